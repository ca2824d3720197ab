"""What a federation on a network costs, by separate processes with TLS and node keys on loopback; to benchmarks/tables/network-*.md.

python -m benchmarks.network payloads   one client, payloads from 41 kB to 537 MB: seconds, and each process's peak memory
python -m benchmarks.network clients    64 simulated clients that send 5 MB each
python -m benchmarks.network demo       the demo by six clients over TLS, and in simulation
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from osfl import certs
from osfl.compare import machine
from osfl.launch import end_process_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "network"
sys.path.append(str(ROOT / "tests"))  # the system tests' federation

from system_tools import BIN, Federation  # noqa: E402

ROLES = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flwr-clientapp")
QUICK = ("synthesis.images-per-class=1", "synthesis.steps=2", "global-model.epochs=1", "classifier.epochs=1")
PAYLOADS = {
    "FedDEO": ("method=feddeo", "feddeo.epochs=1"),
    "FedLMG, ShuffleNet": ("method=fedlmg", "fedlmg.strategies=ft", "classifier.architecture=shufflenet_v2_x1_0"),
    "FedLMG, ResNet-18": ("method=fedlmg", "fedlmg.strategies=ft"),
    "FedLMG, VGG-16": (
        "method=fedlmg",
        "fedlmg.strategies=ft",
        "classifier.architecture=vgg16",
        "classifier.small-stem=false",
        "classifier.init=none",
    ),
}


class Memory(threading.Thread):
    """The largest resident memory of every role's processes (MB), looked at ten times a second."""

    def __init__(self, *roles: str) -> None:
        super().__init__(daemon=True)
        self.peak, self._done = dict.fromkeys(roles, 0.0), threading.Event()
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
        """What was seen."""
        self._done.set()
        self.join()
        return self.peak


@contextmanager
def federation(folder: Path, clients: int) -> "Iterator[Federation]":
    """A SuperLink and clients in processes of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    certs.make_ca(folder / "keys")
    certs.make_server(folder / "keys", [])
    made = Federation(folder)
    try:
        made.begin_superlink()
        for k in range(clients):
            name = f"client-{k}"
            made.register(name)
            config = f"partition-id={k} num-partitions={clients} client-id='{name}' cache-dir='{folder / name}'"
            made.begin_node(name, *made.trusting(name), config=config)
        yield made
    finally:
        for process in reversed(made.processes.values()):
            end_process_tree(process.pid)


def run_on(made: Federation, job: str, *settings: str) -> dict:
    """The metrics of a run, and its wall seconds."""
    began = time.monotonic()
    if made.begin_run(*settings, f"job-id={job}").wait():
        raise SystemExit(made.log("run")[-3000:])
    return {**json.loads((made.folder / "server" / job / "metrics.json").read_text()), "wall": time.monotonic() - began}


def payloads() -> list[str]:
    """One client; each row with processes of its own."""
    lines = ["| | payload | " + " | ".join(f"{role} MB" for role in ROLES) + " | wall s |", "|---|" + "---:|" * 6]
    for number, (name, settings) in enumerate(PAYLOADS.items()):
        with federation(WORK / f"payload-{number}", 1) as made:
            memory = Memory(*ROLES)
            metrics = run_on(made, "payload", "num-clients=1", *QUICK, *settings)
            peaks = memory.end()
        size = metrics["clients"]["client-0"]["upload_bytes"]
        cells = [f"{size / 1e6:,.2f} MB", *(f"{peaks[role]:,.0f}" for role in ROLES), f"{metrics['wall']:.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def simulate(*arguments: str) -> float:
    """`osfl run` in simulation; its wall seconds."""
    began = time.monotonic()
    subprocess.run([BIN / "osfl", "run", *arguments, "--runs", WORK], cwd=ROOT, check=True)
    return time.monotonic() - began


def many_clients() -> list[str]:
    """64 of them, two at a time on two cores."""
    shutil.rmtree(WORK / "many", ignore_errors=True)
    memory = Memory("flower-superlink", "flwr-simulation")  # the ServerApp is a thread of the latter
    wall = simulate("num-clients=64", "job-id=many", "data.partition=iid", *QUICK, *PAYLOADS["FedLMG, ShuffleNet"])
    peaks = memory.end()
    metrics = json.loads((WORK / "many" / "metrics.json").read_text())
    sizes = [about["upload_bytes"] for about in metrics["clients"].values()]
    lines = [
        "| clients | delivered | a payload | together | " + " | ".join(f"{role} MB" for role in peaks) + " | wall s |",
        "|---:|" + "---:|" * 6,
    ]
    cells = [
        "64",
        f"{len(sizes)}",
        f"{max(sizes) / 1e6:.2f} MB",
        f"{sum(sizes) / 1e6:.0f} MB",
        *(f"{mb:,.0f}" for mb in peaks.values()),
        f"{wall:.0f}",
    ]
    return [*lines, "| " + " | ".join(cells) + " |"]


def demo() -> list[str]:
    """`make demo`'s run both ways, on this machine's cores."""
    shutil.rmtree(WORK / "demo", ignore_errors=True)
    alone = simulate("configs/demo.toml", "job-id=demo")
    with federation(WORK / "six", 6) as made:
        apart = run_on(made, "demo", str(ROOT / "configs" / "demo.toml"))["wall"]
    lines = ["| simulation s | six clients over TLS s | ratio |", "|---:|---:|---:|"]
    return [*lines, f"| {alone:.0f} | {apart:.0f} | {apart / alone:.2f} |"]


def main() -> None:
    """Run one of them and keep its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"payloads": payloads, "clients": many_clients, "demo": demo}
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    table = "\n".join(kinds[kind]()) + f"\n\nCommand: `python -m benchmarks.network {kind}`. {machine()}.\n"
    (ROOT / "benchmarks" / "tables" / f"network-{kind}.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
