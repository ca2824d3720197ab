"""Measure how many mutants of the computing code the unit tests detect.

    python -m benchmarks.tools.mutants --sample 100 --minutes 60 --seed 0
    python -m benchmarks.tools.mutants --only osfl/payload/wire.py  # part of a name; no table

A mutant is run against the test files that reach its line (`trials.py`), in a copy of the project
below runs/mutants. An interrupted command resumes; after a change of code or tests it starts again.

equivalent.toml explains survivors that no test can kill; these are only tried with --only.
"""

import argparse
import hashlib
import json
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.tools.mutants import trials
from benchmarks.tools.mutants.mutations import Mutant, find_mutants
from benchmarks.tools.mutants.trials import Project, Verdict

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
    tests=("tests/unit/**/test_*.py", "tests/equations/test_*.py", "tests/integration/test_*.py"),
    options=("-m", "not system"),
    declared=(
        (
            "server_app/synthesis/workers.py",
            "tests/unit/server_app/synthesis/test_workers.py",
        ),
    ),
)
REST = 5  # one mutant that does not compute is tried per so many that do


def main() -> None:
    """Try the mutants, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=100, help="of the mutants that compute")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after these")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants in parallel, some 3 GB each")
    parser.add_argument("--only", default="", help="mutants whose name contains this; all of them")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds of tests that a mutant is run against"
    )
    options = parser.parse_args()
    mutants = [m for file in OSFL.files(OSFL.targets) for m in find_mutants(ROOT, file)]
    reasons = {} if options.only else equivalents(EQUIVALENT)
    if options.only:
        chosen = [mutant for mutant in mutants if options.only in mutant.name]
    else:
        chosen = sample(mutants, options.sample, options.seed)
    unexplained = [mutant for mutant in chosen if mutant.name not in reasons]
    deadline = time.monotonic() + 60 * options.minutes
    trials.preload()
    try:
        verdicts = try_all(OSFL, unexplained, WORK, deadline, options.patience, options.jobs)
    except TimeoutError as error:
        raise SystemExit(f"{error}; the same command resumes") from error
    if not options.only:
        write_report(mutants, chosen, verdicts, reasons, options.seed)


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Choose `size` mutants that compute, and a fifth as many of the rest."""
    ranked = sorted(mutants, key=lambda mutant: mutant.rank(seed))
    computing, remainder = split(ranked)
    return computing[:size] + remainder[: size // REST]


def digest_of(root: Path) -> str:
    """Return a digest of a project's code and tests."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        place = file.relative_to(root)
        if place.parts[0] not in (*trials.NOT_COPIED, "benchmarks"):
            digest.update(f"{place}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def try_all(
    project: Project,
    chosen: Sequence[Mutant],
    work: Path,
    deadline: float,
    patience: float = 60.0,
    jobs: int = 1,
) -> dict[str, Verdict]:
    """Return verdicts by the mutants' names, of earlier runs or of this one until the deadline."""
    folder = work / digest_of(project.root)
    folder.mkdir(parents=True, exist_ok=True)
    reaches = trials.measure_reach(project, folder, jobs, deadline)
    file = folder / f"verdicts-{patience:g}.jsonl"

    def judge(tree: Path, mutant: Mutant) -> None:
        if time.monotonic() < deadline:
            tests = trials.tests_of(mutant, project, reaches, patience)
            verdict = trials.try_mutant(mutant, tests, tree, project.options)
            trials.append(file, verdict)
            print(f"{verdict.end:9} {verdict.seconds:6.1f} s  {shown(mutant)}", flush=True)

    names = {record["name"] for record in trials.records_in(file)}
    pending = [mutant for mutant in chosen if mutant.name not in names]
    trials.in_parallel(project.root, folder, jobs, judge, pending)
    verdicts = {record["name"]: Verdict(**record) for record in trials.records_in(file)}
    return {mutant.name: verdicts[mutant.name] for mutant in chosen if mutant.name in verdicts}


def shown(mutant: Mutant, longest: int = 60) -> str:
    """Return a mutant's place and its change, without the equal text on both sides."""
    before, after = mutant.before, mutant.after
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    begin = max(0, same - longest // 3) if max(len(before), len(after)) > longest else 0
    sides = []
    for side in (before, after):
        end = "…" if len(side) > begin + longest else ""
        sides.append("…" * bool(begin) + side[begin : begin + longest] + end)
    return f"{mutant.file}:{mutant.lines[0]} {mutant.function}: {sides[0]} → {sides[1]}"


# ---- The table ----


def write_report(
    mutants: Sequence[Mutant],
    chosen: Sequence[Mutant],
    verdicts: Mapping[str, Verdict],
    reasons: Mapping[str, str],
    seed: int,
) -> None:
    """Write a row per file and for the rest, then the survivors and why some are equivalent."""
    # Imported late: children must import the project from their copies
    from benchmarks.harness import BENCHMARKS, write_table

    ends = {name: verdict.end for name, verdict in verdicts.items()}
    ends |= dict.fromkeys(reasons, "equivalent")
    tried = [mutant for mutant in chosen if mutant.name in ends]
    computing, remainder = split(mutants)
    computing_tried, other_tried = split(tried)
    rows = []
    for file in sorted({mutant.file for mutant in computing_tried}):
        parts = [[m for m in part if m.file == file] for part in (computing, computing_tried)]
        rows.append(row(file, len(parts[0]), parts[1], ends))
    rows.append(row("all that compute", len(computing), computing_tried, ends))
    rows.append(row("the rest", len(remainder), other_tried, ends))
    minutes = sum(verdict.seconds for verdict in verdicts.values()) / 60
    caption = (
        f"Command: `python -m benchmarks.tools.mutants --sample {len(split(chosen)[0])} "
        f"--seed {seed}`; {len(tried)} of {len(chosen)} tried, {minutes:.0f} minutes of tests. "
        "Equivalent: no test can tell, benchmarks/tools/mutants/equivalent.toml says why. "
        "%: killed of those that are not equivalent. The rest: messages, reports, progress, the "
        "kits' recipe."
    )
    table = BENCHMARKS / "tools" / "tables" / "mutants"
    write_table(table, rows, caption)
    survivors = [mutant for mutant in tried if ends[mutant.name] != "killed"]
    survivors.sort(key=lambda mutant: (not mutant.computes, mutant.file, mutant.lines))
    lines = ["", "Survivors:", ""]
    for mutant in survivors:
        why = reasons.get(mutant.name) or ("" if mutant.computes else "does not compute")
        unreached = " (no test runs it)" * (ends[mutant.name] == "unreached")
        lines.append(f"- `{shown(mutant)}`{unreached}{': ' * bool(why)}{why}")
    with table.with_suffix(".md").open("a") as page:
        page.write("\n".join(lines) + "\n")
    data = json.loads(table.with_suffix(".json").read_text())
    data["survivors"] = [
        {"mutant": mutant.name, "line": mutant.lines[0], "why": reasons.get(mutant.name, "")}
        for mutant in survivors
    ]
    table.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


def split(mutants: Sequence[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """Return the mutants that compute, and the rest."""
    computing = [mutant for mutant in mutants if mutant.computes]
    return computing, [mutant for mutant in mutants if not mutant.computes]


def row(
    name: str, number: int, tried: Sequence[Mutant], ends: Mapping[str, str]
) -> dict[str, object]:
    """Return one line of the table: `number` mutants, and the ends of those that were tried."""
    counts = Counter(ends[mutant.name] for mutant in tried)
    detectable = len(tried) - counts["equivalent"]
    return {
        "where": name,
        "mutants": number,
        "tried": len(tried),
        "killed": counts["killed"],
        "survived": counts["survived"],
        "no test": counts["unreached"],
        "equivalent": counts["equivalent"],
        "%": round(100 * counts["killed"] / detectable, 1) if detectable else "",
    }


def equivalents(file: Path) -> dict[str, str]:
    """Return the reasons why mutants are equivalent, by name."""
    entries = tomllib.loads(file.read_text()).get("mutant", []) if file.is_file() else []
    return {entry["name"]: entry["why"] for entry in entries}


if __name__ == "__main__":
    main()
