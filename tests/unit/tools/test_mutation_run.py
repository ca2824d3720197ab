"""The mutation run itself, on a project of one file."""

import json
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks.tools.mutants import trials
from benchmarks.tools.mutants.__main__ import row, sample, shown, try_all
from benchmarks.tools.mutants.mutations import Mutant, find_mutants
from benchmarks.tools.mutants.trials import Project, load_verdicts, sources
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
def double(x):
    return x * 2

def larger(a, b):
    return a if a >= b else b

def countdown(n):
    while n > 0:
        n -= 1
    return n

def alone(x):
    return x + 1
""",
    "tests/test_sums.py": """
import pytest
import sums

seen = []

@pytest.fixture(scope="module")
def eight():
    return sums.double(4)

def test_first(eight):
    seen.append(1)

def test_larger():
    assert sums.larger(1, 2) == sums.larger(2, 1) == sums.larger(2, 2) == 2

def test_that_needs_the_first():
    assert seen
    sums.larger(1, 2)

def test_double(eight):
    assert eight == 8

def test_countdown():
    assert sums.countdown(2) == 0
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Project(root, ("*.py",), preload=())


def changes(mutants: list[Mutant]) -> set[str]:
    return {f"{mutant.before} -> {mutant.after}" for mutant in mutants}


def test_messages_and_reports_do_not_compute_and_annotations_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mutants = find_mutants(tmp_path, "code.py")
    rest = [mutant for mutant in mutants if not mutant.computes]
    assert {"< 0 -> <= 0", "0 -> 1", "x / 2 -> x * 2", "2 -> 3"} <= changes(
        [mutant for mutant in mutants if mutant.computes]
    )
    assert {"x + 1 -> x - 1", "job.progress(x, 2) -> pass", "2 -> 3"} <= changes(rest)
    assert not any("None" in mutant.before for mutant in mutants)
    division = next(mutant for mutant in mutants if mutant.before == "x / 2")
    assert division.source() == CODE.replace("x / 2", "x * 2")
    assert shown(division) == "code.py:11 half: x / 2 → x * 2"


def test_a_sample_is_the_seeds(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mutants = find_mutants(tmp_path, "code.py")
    names = {seed: [mutant.name for mutant in sample(mutants, 5, seed)] for seed in range(3)}
    assert len(names[0]) == 6
    assert names[0] == [mutant.name for mutant in sample(mutants, 5, 0)] != names[1]
    (tmp_path / "code.py").write_text("# one more line\n" + CODE)
    assert names[0] == [mutant.name for mutant in sample(find_mutants(tmp_path, "code.py"), 5, 0)]


def test_faults_are_noticed_and_the_project_is_left_alone(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_timeout", lambda seconds: 6.0)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in project.root.rglob("*.*")}
    tried = {
        "x * 2 -> x / 2": "killed",  # in a fixture, by the test that looks at what it gave
        ">= b -> > b": "survived",  # equivalent
        "n -= 1 -> n = 1": "killed",  # never ends
        "x + 1 -> x - 1": "unreached",
    }
    mutants = [m for m in find_mutants(project.root, "sums.py") if changes([m]) & {*tried}]
    work = tmp_path / "work"
    verdicts = try_all(project, mutants, work, time.monotonic() + 300)
    ends = {f"{m.before} -> {m.after}": verdicts[m.name] for m in mutants}
    assert {change: verdict.end for change, verdict in ends.items()} == tried
    assert ends["x * 2 -> x / 2"].test.endswith("test_double")
    assert ends["n -= 1 -> n = 1"].why == "timeout"
    # a test that fails alone on the project as it is says nothing about a mutant
    assert json.loads((work / "reach.json").read_text())["clean"] == {
        "tests/test_sums.py::test_double": True,
        "tests/test_sums.py::test_countdown": True,
        "tests/test_sums.py::test_that_needs_the_first": False,
    }
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in project.root.rglob("*.*")}

    # stopped and started again, it knows; nothing is tried twice
    assert try_all(project, mutants, work, time.monotonic() + 300) == verdicts
    assert len((work / "verdicts.jsonl").read_text().splitlines()) == len(tried)
    counts = row("all", mutants, mutants, verdicts, {ends[">= b -> > b"].name: "a is b, then"})
    assert (counts["killed"], counts["equivalent"], counts["no test"]) == (2, 1, 1)
    assert counts["%"] == 66.7


def test_a_changed_test_is_another_tree(project: Project) -> None:
    base, each = sources(project)
    test = project.root / "tests" / "test_sums.py"
    test.write_text(test.read_text() + "\n")
    assert sources(project)[0] == base
    assert sources(project)[1] != each


def test_a_verdict_that_was_cut_off_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "verdicts.jsonl").write_text(
        '{"name": "a", "tree": "t", "end": "killed"}\n{"name": "b", "tr'
    )
    assert [*load_verdicts(tmp_path / "verdicts.jsonl")] == ["a"]


def test_the_equivalent_mutants_exist() -> None:
    """A renamed function would leave an entry that excuses nothing."""
    entries = tomllib.loads((ROOT / "benchmarks/tools/mutants/equivalent.toml").read_text())[
        "mutant"
    ]
    names = [entry["name"] for entry in entries]
    files = {name.partition(" ")[0] for name in names}
    mutants = {mutant.name for file in files for mutant in find_mutants(ROOT, file)}
    assert [name for name in names if name not in mutants] == []
