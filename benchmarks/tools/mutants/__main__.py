"""Measure how many mutants of the computing code the unit tests detect.

    python -m benchmarks.tools.mutants --sample 100 --minutes 60 --seed 0
    python -m benchmarks.tools.mutants --only osfl/payload/wire.py  # part of a name; no table

A mutant is run against the unit tests that reach its line (`trials.py`), in a copy of the project
below runs/mutants, by a process that has torch imported and forks (`server.py`). An interrupted
command resumes. After a change, the tests in changed files are measured again (all, if other code
changed); survivors are tried again, and mutants whose code or whose killing test's file changed,
first with the test that killed them before.

equivalent.toml explains survivors that no test can kill; these are only tried with --only.
"""

import argparse
import json
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from filelock import FileLock

from benchmarks.harness import BENCHMARKS, command_line, write_table
from benchmarks.tools.mutants.mutations import Mutant, find_mutants
from benchmarks.tools.mutants.trials import (
    Project,
    Reach,
    Servers,
    Verdict,
    holds,
    load_verdicts,
    save_verdict,
    snapshot,
    try_mutant,
)

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / "runs" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
OSFL = Project(
    ROOT,
    targets=(
        "client_app/learning/conditions.py",
        "client_app/methods/*.py",
        "client_app/learning/local_training.py",
        "server_app/methods/*.py",
        "server_app/baselines/*.py",
        "server_app/synthesis/*.py",
        "server_app/training.py",
        "osfl/payload/wire.py",
        "osfl/payload/wire_scan.py",
        "osfl/models/diffusion.py",
        "osfl/models/encoders.py",
        "osfl/models/classifiers.py",
        "osfl/models/training.py",
    ),
    options=("-m", "not system"),
    declared={
        "server_app/synthesis/workers.py": ("tests/unit/server_app/synthesis/test_workers.py",)
    },
)
REST = 5  # one mutant that does not compute is tried per so many that do


def main() -> None:
    """Try the mutants, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--sample", type=int, default=100, help="of the mutants that compute")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after these")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--jobs", type=int, default=1, help="fork servers, of some 3 GB each")
    parser.add_argument("--only", default="", help="mutants whose name contains this; all of them")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds of tests that a mutant is run against"
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(WORK / "lock", timeout=60):  # one at a time
            run(arguments, deadline)
    except TimeoutError as error:
        raise SystemExit(f"{error}; the same command resumes") from error


def run(arguments: argparse.Namespace, deadline: float) -> None:
    """Try the chosen mutants on a copy of the project."""
    snapshot(ROOT, WORK / "project")
    project = replace(OSFL, root=WORK / "project")
    mutants = [m for file in project.files for m in find_mutants(project.root, file)]
    if arguments.select:
        chosen = [mutant for mutant in mutants if arguments.select in mutant.name]
    else:
        chosen = sample(mutants, arguments.sample, arguments.seed)
    reasons = {} if arguments.select else equivalents(EQUIVALENT)
    unexplained = [mutant for mutant in chosen if mutant.name not in reasons]
    verdicts = try_all(project, unexplained, WORK, deadline, arguments.patience, arguments.jobs)
    if not arguments.select:
        write_report(mutants, chosen, verdicts, reasons, arguments.seed)


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Choose `size` mutants that compute, and a fifth as many of the rest."""
    ranked = sorted(mutants, key=lambda mutant: mutant.rank(seed))
    computing = [mutant for mutant in ranked if mutant.computes]
    other = [mutant for mutant in ranked if not mutant.computes]
    return computing[:size] + other[: size // REST]


def try_all(
    project: Project,
    chosen: Sequence[Mutant],
    work: Path,
    deadline: float,
    patience: float = 60.0,
    jobs: int = 1,
) -> dict[str, Verdict]:
    """Return verdicts by the mutants' names, of earlier runs or of this one until the deadline."""
    file = work / "verdicts.jsonl"
    lock = Lock()
    earlier = load_verdicts(file)
    with Servers(project, work, jobs) as servers:
        reach = Reach(project, servers, work / "reach.json", deadline)

        def judge(mutant: Mutant) -> None:
            before = earlier.get(mutant.name)
            if time.monotonic() > deadline or holds(before, mutant, reach, patience):
                return
            with servers.one() as server:
                verdict = try_mutant(mutant, reach, server, before, patience)
            with lock:
                earlier[mutant.name] = verdict
                save_verdict(file, verdict)
                print(f"{verdict.end:9} {verdict.seconds:6.1f} s  {shown(mutant)}", flush=True)

        servers.each(judge, chosen)
    return {
        mutant.name: earlier[mutant.name]
        for mutant in chosen
        if holds(earlier.get(mutant.name), mutant, reach, patience)
    }


def shown(mutant: Mutant, most: int = 60) -> str:
    """Return a mutant's place and its change, without the equal text on both sides."""
    before = mutant.before
    after = mutant.after
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    begin = max(0, same - most // 3) if max(len(before), len(after)) > most else 0
    cut = "…" if begin else ""
    sides = [
        cut + side[begin : begin + most] + "…" * (len(side) > begin + most)
        for side in (before, after)
    ]
    return f"{mutant.file}:{mutant.lines[0]} {mutant.function}: {sides[0]} → {sides[1]}"


# ---- The table ----


def write_report(
    mutants: Sequence[Mutant],
    chosen: Sequence[Mutant],
    verdicts: dict[str, Verdict],
    reasons: dict[str, str],
    seed: int,
) -> None:
    """Write a row per file and for the rest, then the survivors and why some are equivalent."""
    tried = [mutant for mutant in chosen if mutant.name in {**verdicts, **reasons}]
    rows = [
        row(file, of_file(mutants, file), of_file(tried, file), verdicts, reasons)
        for file in sorted({mutant.file for mutant in tried if mutant.computes})
    ]
    computing, other = split(mutants)
    computing_tried, other_tried = split(tried)
    rows.append(row("all that compute", computing, computing_tried, verdicts, reasons))
    rows.append(row("the rest", other, other_tried, verdicts, reasons))
    size = len(split(chosen)[0])
    seconds = sum(verdict.seconds for verdict in verdicts.values())
    caption = (
        f"Command: `python -m benchmarks.tools.mutants --sample {size} --seed {seed}`; "
        f"{len(tried)} of {len(chosen)} tried, "
        f"{seconds / 60:.0f} minutes of tests. Equivalent: no test can tell, "
        "benchmarks/tools/mutants/equivalent.toml says why. "
        "%: killed of those that are not equivalent. The rest: messages, reports, progress, the "
        "kits' recipe."
    )
    out = BENCHMARKS / "tools" / "tables" / "mutants"
    write_table(out, rows, caption)
    ends = {name: verdict.end for name, verdict in verdicts.items()}
    survivors = [mutant for mutant in tried if ends.get(mutant.name) != "killed"]
    lines = ["Survivors:", ""]
    for mutant in sorted(
        survivors, key=lambda mutant: (not mutant.computes, mutant.file, mutant.lines)
    ):
        reason = reasons.get(mutant.name) or ("" if mutant.computes else "does not compute")
        unreached = " (no test runs it)" * (ends.get(mutant.name) == "unreached")
        lines.append(f"- `{shown(mutant)}`{unreached}{': ' * bool(reason)}{reason}")
    page = out.with_suffix(".md")
    page.write_text(page.read_text() + "\n" + "\n".join(lines) + "\n")
    data = json.loads(out.with_suffix(".json").read_text())
    data["survivors"] = [
        {
            "mutant": mutant.name,
            "line": mutant.lines[0],
            "computes": mutant.computes,
            "why": reasons.get(mutant.name, ""),
        }
        for mutant in survivors
    ]
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


def split(mutants: Sequence[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """Return the mutants that compute, and the rest."""
    computing = [mutant for mutant in mutants if mutant.computes]
    return computing, [mutant for mutant in mutants if not mutant.computes]


def of_file(mutants: Sequence[Mutant], file: str) -> list[Mutant]:
    """Return a file's mutants that compute."""
    return [mutant for mutant in mutants if mutant.file == file and mutant.computes]


def row(
    name: str,
    mutants: Sequence[Mutant],
    tried: Sequence[Mutant],
    verdicts: dict[str, Verdict],
    reasons: dict[str, str],
) -> dict[str, object]:
    """Return one line of the table."""
    ends: dict[str, int] = defaultdict(int)
    for mutant in tried:
        ends["equivalent" if mutant.name in reasons else verdicts[mutant.name].end] += 1
    counted = len(tried) - ends["equivalent"]
    return {
        "where": name,
        "mutants": len(mutants),
        "tried": len(tried),
        "killed": ends["killed"],
        "survived": ends["survived"],
        "no test": ends["unreached"],
        "equivalent": ends["equivalent"],
        "%": round(100 * ends["killed"] / counted, 1) if counted else "",
    }


def equivalents(file: Path) -> dict[str, str]:
    """Return the reasons why mutants are equivalent, by name."""
    entries = tomllib.loads(file.read_text()).get("mutant", []) if file.is_file() else []
    return {entry["name"]: entry["why"] for entry in entries}


if __name__ == "__main__":
    main()
