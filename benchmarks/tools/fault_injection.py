"""Run random fault schedules in a real federation, and list the violations.

    python -m benchmarks.tools.fault_injection 0 1000              # the schedules of 1,000 seeds
    python -m benchmarks.tools.fault_injection 0 1000 --parallel 4  # in four federations
    python -m benchmarks.tools.fault_injection 17 1 --again        # one again, with the same span
    python -m benchmarks.tools.fault_injection 0 200 --table       # and their lines in the table

tests/helpers/fault_injection.py has the faults and the checks. Results are kept in runs/histories
while code and Flower's version are the same, so that an interrupted command resumes. The run
folders and logs of a violation are beside them.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, RUNS, Experiment, command_line
from osfl.util.files import write_atomically
from tests.helpers import fault_injection
from tests.helpers.fault_injection import CHANGES, KINDS, SPAN, Fault, Testbed, all_faults_of
from tests.helpers.system_tools import new_federation
from tests.helpers.tiny_kits import make_tiny_kit

WORK = RUNS / "histories"
HELPERS = ("fault_injection.py", "fork_server.py", "settings.py", "system_tools.py", "tiny_kits.py")
PRODUCT = ("osfl", "client_app", "server_app")
# These faults count only where they hit something
MAY_MISS = ("crash", "interrupt", "damage")
EXPERIMENT = Experiment(__file__, table="histories")
Record = dict[str, Any]
SpanOf = Callable[[int], float | None]


# ---- Results ----


@cache
def code_digest() -> str:
    """Return a digest of the code, of Flower's version, and of whether disks can be filled."""
    digest = hashlib.sha256(f"{version('flwr')} {os.geteuid() == 0}".encode())
    files = [ROOT / "tests" / "helpers" / name for name in HELPERS]
    for package in PRODUCT:
        files += sorted((ROOT / package).rglob("*.py"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def file_of(seed: int) -> Path:
    """Return the file of a seed's result with this code."""
    return WORK / f"{seed:06d}-{code_digest()}.json"


def last_span(seed: int) -> float | None:
    """Return the span of a seed's last result with any code, or None."""
    files = sorted(WORK.glob(f"{seed:06d}-*.json"), key=lambda file: file.stat().st_mtime)
    return float(json.loads(files[-1].read_text())["span"]) if files else None


def results(first: int, count: int) -> list[Record]:
    """Return the results of seeds with this code."""
    files = [file_of(seed) for seed in range(first, first + count)]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def summary(records: Sequence[Record]) -> str:
    """Return the numbers of schedules, violations, hours and faults."""
    violated = [record["seed"] for record in records if record["problems"]]
    kinds = Counter(kind for record in records for kind in record["faults"])
    faults = ", ".join(f"{kinds[kind]} {kind}" for kind in (*KINDS, *CHANGES))
    hours = sum(record["seconds"] for record in records) / 3600
    return (
        f"{len(records)} schedules, {len(violated)} with a violation {violated}, "
        f"{hours:.1f} hours; faults: {faults}"
    )


def write_table(first: int, count: int) -> None:
    """Write a line per schedule; the lines of other seeds stay, with the code that they ran with.

    200 schedules take many hours, over which the code changes.
    """
    file = EXPERIMENT.table_file().with_suffix(".json")
    stored = json.loads(file.read_text())["rows"] if file.is_file() else []
    lines = {line["seed"]: line for line in stored}
    for record in results(first, count):
        problems = "; ".join(record["problems"]).replace("|", "/")
        line = {"seed": record["seed"], "faults": "; ".join(record["told"]) or "none"}
        line |= {"violations": problems or "none", "s": record["seconds"], "code": code_digest()}
        lines[record["seed"]] = line
    rows = [lines[seed] for seed in sorted(lines)]
    violated = [line["seed"] for line in rows if line["violations"] != "none"]
    hours = sum(line["s"] for line in rows) / 3600
    caption = (
        "Random fault schedules in a federation of two sites, by seed; code: a digest of the code "
        f"that ran. {len(rows)} schedules, {len(violated)} with a violation {violated}, "
        f"{hours:.1f} hours."
    )
    experiment = Experiment(
        __file__, caption=caption, options=f"{first} {count} --table", table=EXPERIMENT.table
    )
    experiment.write_all(rows)


# ---- Runs ----


def run_seeds(
    first: int, count: int, step: int, again: bool = False, span: float | None = None
) -> None:
    """Run every `step`-th seed's schedule, and keep each result.

    Args:
        again: also the seeds that have a result, with its span.
        span: seconds; None: that of a fault-free run.
    """
    every = range(first, first + count, step)
    seeds = [seed for seed in every if again or not file_of(seed).is_file()]

    def span_of(seed: int) -> float | None:
        return span or (last_span(seed) if again else None)

    while seeds:
        seeds = _run_in_one_federation(seeds, span_of)


def _run_in_one_federation(seeds: list[int], span_of: SpanOf) -> list[int]:
    """Run schedules until a violation, whose run might continue there; return the later seeds."""
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder) / "kit"
        make_tiny_kit(kit)
        testbed = None
        try:
            with new_federation(Path(folder)) as federation:
                federation.control, federation.fleet = free_ports()
                testbed = Testbed(federation, kit)
                testbed.begin()
                start = time.monotonic()
                fault_free = fault_injection.run_fault_free(testbed)
                # Beside others a run takes longer, and its last steps must meet faults, too
                span = round(max(SPAN, time.monotonic() - start), 1)
                for number, seed in enumerate(seeds, start=1):
                    if not _is_good(testbed, seed, fault_free, span_of(seed) or span):
                        return seeds[number:]
                return []
        finally:
            # No process writes there any more
            if testbed is not None:
                testbed.unmount()


def _is_good(testbed: Testbed, seed: int, fault_free: dict[str, object], span: float) -> bool:
    """Run a seed's schedule, and keep its result."""
    start = time.monotonic()
    problems = fault_injection.run_schedule(testbed, seed, fault_free, span)
    seconds = time.monotonic() - start
    faults = [fault for fault in all_faults_of(seed, span) if _counts(testbed, fault)]
    record = {
        "seed": seed,
        "problems": problems,
        "seconds": round(seconds),
        "span": span,
        "faults": [fault.kind for fault in faults],
        "told": list(map(str, faults)),
    }
    write_atomically(file_of(seed), json.dumps(record).encode())
    text = "; ".join(map(str, faults))
    if problems:
        keep_evidence(testbed, file_of(seed).with_suffix(""))
    print(f"{seed}: {problems or 'good'} ({seconds:.0f} s, span {span:.1f}) {text}", flush=True)
    return not problems


def keep_evidence(testbed: Testbed, place: Path) -> None:
    """Copy the run folders and all logs to a new folder."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(testbed.folder / "server", place / "server")
    for log in testbed.folder.glob("*.log"):
        shutil.copy(log, place)


def _counts(testbed: Testbed, fault: Fault) -> bool:
    can_be_made = fault.kind in testbed.kinds or fault.kind in CHANGES
    return can_be_made and (fault.kind not in MAY_MISS or fault in testbed.hits)


def free_ports() -> tuple[int, int]:
    """Return two ports that Linux by default gives to no outgoing connection while the SuperLink
    is away. Commands in parallel try others.
    """
    for port in range(10_000 + 2 * (os.getpid() % 11_000), 32_768, 2):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port, port + 1
    raise OSError("no two neighboring ports are free")


def run_in_parallel(first: int, count: int, jobs: int, more: Sequence[str]) -> list[int]:
    """Share the seeds among processes with more arguments; return their exit codes."""
    command = [sys.executable, "-m", "benchmarks.tools.fault_injection"]
    processes = []
    try:
        for number in range(jobs):
            seeds = [str(first + number), str(count - number), "--step", str(jobs)]
            processes.append(subprocess.Popen([*command, *seeds, *more], cwd=ROOT))
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _exit(*_: object) -> None:
    """Exit so that processes are ended; no other signal interrupts that."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main() -> None:
    """Run schedules; exit with 1 after a violation."""
    parser = command_line(__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="the number of seeds")
    parser.add_argument("--parallel", type=int, default=1, help="federations in parallel")
    parser.add_argument("--again", action="store_true", help="also seeds that have a result")
    parser.add_argument("--table", action="store_true", help="write the table of all results")
    parser.add_argument("--span", type=float, help="seconds, as printed with a result")
    parser.add_argument("--step", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.span is not None and options.span <= 0:
        parser.error(f"--span {options.span:g}: must be more than 0 seconds")
    if options.parallel < 1:
        parser.error(f"--parallel {options.parallel}: must be 1 or more")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    WORK.mkdir(parents=True, exist_ok=True)
    codes = [0]
    if options.parallel == 1:
        step = options.step or 1
        run_seeds(options.first, options.count, step, options.again, options.span)
    else:
        flags = ["--again"] * options.again
        flags += [f"--span={options.span}"] if options.span else []
        codes = run_in_parallel(options.first, options.count, options.parallel, flags)
    # One of several in parallel
    if options.step:
        return
    records = results(options.first, options.count)
    if options.table:
        write_table(options.first, options.count)
    print(summary(records))
    sys.exit(any(record["problems"] for record in records) or any(codes))


if __name__ == "__main__":
    main()
