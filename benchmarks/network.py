"""What a federation on a network costs.

On loopback; to benchmarks/tables/network-*.md. All roles are processes of their own, with TLS and
node keys, but in `clients`, which is a simulation.

python -m benchmarks.network payloads   # one client, 41 kB to 537 MB: seconds, memory
python -m benchmarks.network demo       # the demo by six clients over TLS, and in simulation
python -m benchmarks.network clients    # 64 simulated clients that send 5 MB each
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks import TABLES, command_line, write_table
from osfl.cli.guard import end_process_tree
from tests.helpers.system_tools import BIN, Federation, new_federation

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "network"

# Else every process of every run would compile torch and all else again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
ROLES = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flwr-clientapp")
QUICK = (
    "synthesis.images-per-class=1",
    "synthesis.steps=2",
    "global-model.epochs=1",
    "classifier.epochs=1",
    "feddeo.epochs=1",
)
PAYLOADS = {
    "FedDEO": ("method=feddeo",),
    "ShuffleNet": ("method=local", "classifier.architecture=shufflenet_v2_x1_0"),
    "ResNet-18": ("method=local",),
    "VGG-16": (
        "method=local",
        "classifier.architecture=vgg16",
        "classifier.small-stem=false",
        "classifier.init=none",
    ),
}


class Memory(threading.Thread):
    """The largest resident memory of every role's processes (MB), looked at ten times a second."""

    def __init__(self, *roles: str) -> None:
        super().__init__(daemon=True)
        self.peak = dict.fromkeys(roles, 0.0)
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.1):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    words = " ".join(process.cmdline()[:2])
                    for role in self.peak:
                        if words.endswith(role):
                            self.peak[role] = max(self.peak[role], process.memory_info().rss / 1e6)

    def end(self) -> dict[str, float]:
        """The figures, and no more looking."""
        self._done.set()
        self.join()
        return self.peak


def begin(made: Federation, clients: int) -> None:
    """The SuperLink, and clients with registered keys.

    As in a simulation, each on one core where they are several, or they would wait for each other's
    threads.
    """
    threads = {"OMP_NUM_THREADS": "1"} if clients > 1 else {}
    made.begin_superlink()
    for k in range(clients):
        made.register(f"client-{k}")
        config = (
            f"partition-id={k} num-partitions={clients} cache-dir='{made.folder / f'cache-{k}'}'"
        )
        made.begin_node(f"client-{k}", *made.trusting(f"client-{k}"), config=config, **threads)


def run_on(made: Federation, *settings: str) -> tuple[dict, float]:
    """A run's metrics, and its seconds from the command to the end."""
    began = time.monotonic()
    run = made.begin_run(*settings, "job-id=measured")
    try:
        if run.wait():
            raise SystemExit(made.log("run")[-3000:])
    finally:
        end_process_tree(run.pid)
    return json.loads(
        (made.folder / "server" / "measured" / "metrics.json").read_text()
    ), time.monotonic() - began


def simulate(*arguments: str) -> tuple[dict, float]:
    """The same of `osfl run` in simulation."""
    command = [BIN / "osfl", "run", *arguments, "job-id=measured", "--runs", WORK / "runs"]
    began = time.monotonic()
    run = subprocess.Popen(command, cwd=ROOT)
    try:
        if code := run.wait():
            raise SystemExit(code)
    finally:
        end_process_tree(run.pid)
    return json.loads(
        (WORK / "runs" / "measured" / "metrics.json").read_text()
    ), time.monotonic() - began


def payloads() -> list[list[str]]:
    """Every row in a federation of its own."""
    rows = [["", "payload MB", *(f"{role} MB" for role in ROLES), "s"]]
    for number, (name, settings) in enumerate(PAYLOADS.items()):
        folder = WORK / str(number)
        folder.mkdir(parents=True)
        with new_federation(folder) as made:
            begin(made, 1)
            memory = Memory(*ROLES)
            metrics, seconds = run_on(made, "num-clients=1", *QUICK, *settings)
            peak = memory.end()
        size = metrics["clients"]["client-0"]["upload_bytes"] / 1e6
        rows.append(
            [name, f"{size:,.2f}", *(f"{peak[role]:,.0f}" for role in ROLES), f"{seconds:.0f}"]
        )
        print(rows[-1], flush=True)
    return rows


def demo() -> list[list[str]]:
    """`make demo`'s run both ways."""
    _, alone = simulate("configs/demo.toml")
    (WORK / "six").mkdir()
    with new_federation(WORK / "six") as made:
        begin(made, 6)
        _, apart = run_on(made, str(ROOT / "configs" / "demo.toml"))
    return [
        ["simulation s", "six clients over TLS s", "ratio"],
        [f"{alone:.0f}", f"{apart:.0f}", f"{apart / alone:.2f}"],
    ]


def clients() -> list[list[str]]:
    """The ServerApp is a thread of `flwr-simulation`."""
    memory = Memory("flower-superlink", "flwr-simulation")
    # Where all test the models of all
    of_local = [setting for setting in PAYLOADS["ShuffleNet"] if setting != "method=local"]
    settings = ("method=fedlmg", "fedlmg.strategies=ft", "data.partition=iid", *of_local)
    metrics, seconds = simulate("num-clients=64", *QUICK, *settings)
    sizes = [about["upload_bytes"] for about in metrics["clients"].values()]
    peak = memory.end()
    head = [
        "clients",
        "delivered",
        "a payload MB",
        "together MB",
        *(f"{role} MB" for role in peak),
        "s",
    ]
    figures = [
        f"{max(sizes) / 1e6:.2f}",
        f"{sum(sizes) / 1e6:.0f}",
        *(f"{mb:,.0f}" for mb in peak.values()),
        f"{seconds:.0f}",
    ]
    return [head, ["64", str(sum(size > 0 for size in sizes)), *figures]]


def main() -> None:
    """Run one of them and keep its table."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended so, it ends what it started
    parser = command_line(__doc__)
    kinds = {"payloads": payloads, "demo": demo, "clients": clients}
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    head, *rows = kinds[kind]()
    about = (
        f"Memory is the peak of what was resident. Command: `python -m benchmarks.network {kind}`."
    )
    write_table(
        TABLES / f"network-{kind}", [dict(zip(head, row, strict=True)) for row in rows], about
    )


if __name__ == "__main__":
    main()
