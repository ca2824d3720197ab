"""Measure what a federation on a network costs, on loopback.

python -m benchmarks.speed.network payloads  # one client, 41 kB to 537 MB: seconds, memory
python -m benchmarks.speed.network demo      # the demo by six clients over TLS, and in simulation
python -m benchmarks.speed.network clients   # 64 simulated clients that send 5 MB each

All roles are processes of their own, with TLS and node keys; `clients` is a simulation.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace

import psutil

from benchmarks.harness import ROOT, Experiment, command_line
from osfl.launch.guard import end_process_tree
from tests.helpers.system_tools import BIN, Federation, new_federation

EXPERIMENT = Experiment(__file__, caption="Memory is the peak of what was resident.")
WORK = EXPERIMENT.work

# Otherwise every process of every run compiles torch and everything else again
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
    """Record the largest resident memory of every role's processes (MB), ten times a second."""

    def __init__(self, *roles: str) -> None:
        super().__init__(daemon=True)
        self.peak = dict.fromkeys(roles, 0.0)
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(0.1):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    words = " ".join(process.cmdline()[:2])
                    for role in self.peak:
                        if words.endswith(role):
                            self.peak[role] = max(self.peak[role], process.memory_info().rss / 1e6)

    def end(self) -> dict[str, float]:
        """Stop, and return the peaks."""
        self._stopped.set()
        self.join()
        return self.peak


def start(federation: Federation, clients: int) -> None:
    """Start the SuperLink, and clients with registered keys.

    Several clients have one core each, as in a simulation: otherwise they wait for each other's
    threads.
    """
    threads = {"OMP_NUM_THREADS": "1"} if clients > 1 else {}
    federation.begin_superlink()
    for k in range(clients):
        federation.register(f"client-{k}")
        cache = federation.folder / f"cache-{k}"
        config = f"partition-id={k} num-partitions={clients} cache-dir='{cache}'"
        federation.begin_node(
            f"client-{k}", *federation.trusting(f"client-{k}"), config=config, **threads
        )


def run_on(federation: Federation, *settings: str) -> tuple[dict, float]:
    """Return a run's metrics, and its seconds from the command to the end."""
    began = time.monotonic()
    run = federation.begin_run(*settings, "job-id=measured")
    try:
        if run.wait():
            raise SystemExit(federation.log("run")[-3000:])
    finally:
        end_process_tree(run.pid)
    return json.loads(
        (federation.folder / "server" / "measured" / "metrics.json").read_text()
    ), time.monotonic() - began


def simulate(*arguments: str) -> tuple[dict, float]:
    """Return the same of `osfl run` in simulation."""
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
    """Measure each payload in a federation of its own."""
    rows = [["", "payload MB", *(f"{role} MB" for role in ROLES), "s"]]
    for number, (name, settings) in enumerate(PAYLOADS.items()):
        folder = WORK / str(number)
        folder.mkdir(parents=True)
        with new_federation(folder) as federation:
            start(federation, 1)
            memory = Memory(*ROLES)
            metrics, seconds = run_on(federation, "num-clients=1", *QUICK, *settings)
            peak = memory.end()
        size = metrics["clients"]["client-0"]["upload_bytes"] / 1e6
        rows.append(
            [name, f"{size:,.2f}", *(f"{peak[role]:,.0f}" for role in ROLES), f"{seconds:.0f}"]
        )
        print(rows[-1], flush=True)
    return rows


def demo() -> list[list[str]]:
    """Measure the run of `make demo` both ways."""
    _, alone = simulate("configs/demo.toml")
    (WORK / "six").mkdir()
    with new_federation(WORK / "six") as federation:
        start(federation, 6)
        _, apart = run_on(federation, str(ROOT / "configs" / "demo.toml"))
    return [
        ["simulation s", "six clients over TLS s", "ratio"],
        [f"{alone:.0f}", f"{apart:.0f}", f"{apart / alone:.2f}"],
    ]


def clients() -> list[list[str]]:
    """Measure 64 clients; the ServerApp is a thread of `flwr-simulation`."""
    memory = Memory("flower-superlink", "flwr-simulation")
    # With `local` every client tests every model
    architecture = [setting for setting in PAYLOADS["ShuffleNet"] if setting != "method=local"]
    settings = ("method=fedlmg", "fedlmg.strategies=ft", "data.partition=iid", *architecture)
    metrics, seconds = simulate("num-clients=64", *QUICK, *settings)
    sizes = [record["upload_bytes"] for record in metrics["clients"].values()]
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
    """Make one of the tables."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the processes, too
    parser = command_line(__doc__)
    kinds = {"payloads": payloads, "demo": demo, "clients": clients}
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    head, *cells = kinds[kind]()
    rows = [dict(zip(head, row, strict=True)) for row in cells]
    replace(EXPERIMENT, options=kind, table=f"network-{kind}").write_all(rows)


if __name__ == "__main__":
    main()
