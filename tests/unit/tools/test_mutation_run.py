"""The mutation run itself, on a project of one file."""

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.tools.mutants.__main__ import digest_of, row, sample, shown
from benchmarks.tools.mutants.mutations import Mutant, find_mutants
from benchmarks.tools.mutants.trials import Verdict, records_in
from tests.helpers.settings import ROOT

CODE = '''
import torch


@torch.no_grad()
def half(x: float | None) -> float:
    """2 of these."""
    if x < 0:
        raise ValueError(f"{x + 1} is negative")
    job.progress(x, 2)
    return x / 2
'''
PROJECT = {
    "sums.py": """
import time

def double(x):
    return x * 2

def larger(a, b):
    return a if a >= b else b

def countdown(n):
    while n > 0:
        n -= 1
        time.sleep(0.01)
    return n

def alone(x):
    return x + 1
""",
    "tests/test_sums.py": """
import pytest
import sums

@pytest.fixture(scope="module")
def eight():
    return sums.double(4)

def test_larger():
    assert sums.larger(1, 2) == sums.larger(2, 1) == sums.larger(2, 2) == 2

def test_double(eight):
    assert eight == 8

def test_countdown():
    assert sums.countdown(2) == 0
""",
    "tests/test_failing.py": """
import sums

def test_larger():
    assert sums.larger(1, 2) == sums.alone(0)
""",
}
EXPECTED = {
    "x * 2 -> x / 2": ("killed", "test_double"),  # in a fixture
    ">= b -> > b": ("survived", ""),  # equivalent
    "n -= 1 -> n = 1": ("killed", "test_countdown"),  # never ends
    # A test file that fails without mutants judges none
    "x + 1 -> x - 1": ("unreached", ""),
}
# The run forks, which a process of pytest must not
RUN = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from benchmarks.tools.mutants import __main__ as run, trials
from benchmarks.tools.mutants.mutations import find_mutants

trials.time_limit = lambda seconds: 8.0
trials.preload(())
root, work, *changes = sys.argv[1:]
project = trials.Project(Path(root), ("*.py",), ("tests/test_*.py",))
every = find_mutants(project.root, "sums.py")
mutants = [m for m in every if f"{m.before} -> {m.after}" in changes]
verdicts = run.try_all(project, mutants, Path(work), time.monotonic() + 300, jobs=2)
print(json.dumps({f"{m.before} -> {m.after}": asdict(verdicts[m.name]) for m in mutants}))
"""


def changes(mutants: list[Mutant]) -> set[str]:
    return {f"{mutant.before} -> {mutant.after}" for mutant in mutants}


def test_messages_and_reports_do_not_compute_and_annotations_are_not_mutated(
    tmp_path: Path,
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mutants = find_mutants(tmp_path, "code.py")
    message_mutants = [mutant for mutant in mutants if not mutant.computes]
    assert {"< 0 -> <= 0", "0 -> 1", "x / 2 -> x * 2", "2 -> 3"} <= changes(
        [mutant for mutant in mutants if mutant.computes]
    )
    assert {"x + 1 -> x - 1", "job.progress(x, 2) -> pass", "2 -> 3"} <= changes(message_mutants)
    assert not any("None" in mutant.before for mutant in mutants)
    division = next(mutant for mutant in mutants if mutant.before == "x / 2")
    assert division.source() == CODE.replace("x / 2", "x * 2")
    assert shown(division) == "code.py:11 half: x / 2 → x * 2"


def test_a_seed_chooses_the_sample(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mutants = find_mutants(tmp_path, "code.py")
    names = {seed: [mutant.name for mutant in sample(mutants, 5, seed)] for seed in range(3)}
    assert len(names[0]) == 6
    assert names[0] == [mutant.name for mutant in sample(mutants, 5, 0)] != names[1]
    (tmp_path / "code.py").write_text("# one more line\n" + CODE)
    assert names[0] == [mutant.name for mutant in sample(find_mutants(tmp_path, "code.py"), 5, 0)]


@pytest.mark.slow
def test_mutants_are_killed_and_the_project_is_left_alone(tmp_path: Path) -> None:
    root, work = tmp_path / "project", tmp_path / "work"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in root.rglob("*.*")}

    def verdicts() -> dict[str, dict[str, str]]:
        command = [sys.executable, "-c", RUN, str(root), str(work), *EXPECTED]
        output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        result: dict[str, dict[str, str]] = json.loads(output.stdout.splitlines()[-1])
        return result

    first = verdicts()
    ends = {
        change: (verdict["end"], verdict["test"].rpartition("::")[2])
        for change, verdict in first.items()
    }
    assert ends == EXPECTED
    assert first["n -= 1 -> n = 1"]["why"] == "timeout"
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in root.rglob("*.*")}
    # A second command reads the first one's verdicts
    assert verdicts() == first
    (file,) = work.glob("*/verdicts-60.jsonl")
    assert len(file.read_text().splitlines()) == len(EXPECTED)


def test_the_table_counts_ends(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mutants = find_mutants(tmp_path, "code.py")[:4]
    ends = ("killed", "killed", "survived", "equivalent")
    line = row("all", 9, mutants, {m.name: end for m, end in zip(mutants, ends, strict=True)})
    assert (line["mutants"], line["tried"], line["%"]) == (9, 4, 66.7)
    assert (line["killed"], line["equivalent"], line["no test"]) == (2, 1, 0)


def test_a_changed_test_is_another_project(tmp_path: Path) -> None:
    (tmp_path / "test_sums.py").write_text("pass\n")
    before = digest_of(tmp_path)
    assert digest_of(tmp_path) == before
    (tmp_path / "test_sums.py").write_text("pass\n\n")
    assert digest_of(tmp_path) != before


def test_a_truncated_verdict_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    verdict = asdict(Verdict("a", "killed"))
    file.write_text(f'{json.dumps(verdict)}\n{{"name": "b", "en')
    assert records_in(file) == [verdict]


@pytest.mark.slow
def test_the_equivalent_mutants_exist() -> None:
    """A renamed function would leave an entry that excuses nothing."""
    entries = tomllib.loads((ROOT / "benchmarks/tools/mutants/equivalent.toml").read_text())[
        "mutant"
    ]
    names = [entry["name"] for entry in entries]
    files = {name.partition(" ")[0] for name in names}
    mutants = {mutant.name for file in files for mutant in find_mutants(ROOT, file)}
    assert [name for name in names if name not in mutants] == []
