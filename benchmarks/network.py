"""What a payload costs on a network: one client, all roles in processes of their own, TLS and node keys, on loopback.

python -m benchmarks.network   # seconds and each process's peak memory, for payloads from 41 kB to 45 MB
"""

import json
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from osfl.compare import machine

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "network"
sys.path.append(str(ROOT / "tests"))  # the system tests' federation

from system_tools import Federation, new_federation  # noqa: E402

ROLES = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flwr-clientapp")
QUICK = (
    "num-clients=1",
    "synthesis.images-per-class=1",
    "synthesis.steps=2",
    "global-model.epochs=1",
    "classifier.epochs=1",
    "feddeo.epochs=1",
)
ROWS = {
    "FedDEO": ("method=feddeo",),
    "FedLMG, ShuffleNet": ("method=fedlmg", "fedlmg.strategies=ft", "classifier.architecture=shufflenet_v2_x1_0"),
    "FedLMG, ResNet-18": ("method=fedlmg", "fedlmg.strategies=ft"),
}


class Memory(threading.Thread):
    """The largest resident memory of every role's processes (MB), looked at ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._done = dict.fromkeys(ROLES, 0.0), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.1):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    words = " ".join(process.cmdline()[:2])
                    for role in ROLES:
                        if words.endswith(role):
                            self.peak[role] = max(self.peak[role], process.memory_info().rss / 1e6)

    def end(self) -> dict[str, float]:
        """What was seen."""
        self._done.set()
        self.join()
        return self.peak


def measure(made: Federation, *settings: str) -> list[str]:
    """A row's cells: the payload's size, peak memory of every role, wall seconds of the run."""
    made.begin_superlink()
    made.register("client-0")
    made.begin_node(
        "client-0", *made.trusting("client-0"), config=f"partition-id=0 num-partitions=1 cache-dir='{made.folder / 'cache'}'"
    )
    memory, began = Memory(), time.monotonic()
    if made.begin_run(*QUICK, *settings, "job-id=payload").wait():
        raise SystemExit(made.log("run")[-3000:])
    seconds, peak = time.monotonic() - began, memory.end()
    about = json.loads((made.folder / "server" / "payload" / "metrics.json").read_text())["clients"]["client-0"]
    return [f"{about['upload_bytes'] / 1e6:,.2f}", *(f"{peak[role]:,.0f}" for role in ROLES), f"{seconds:.0f}"]


def main() -> None:
    """Measure every row, and keep the table."""
    lines = ["| | payload MB | " + " | ".join(f"{role} MB" for role in ROLES) + " | s |", "|---|" + "---:|" * 6]
    for name, settings in ROWS.items():
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        with new_federation(WORK) as made:
            lines.append(f"| {name} | " + " | ".join(measure(made, *settings)) + " |")
        print(lines[-1], flush=True)
    note = (
        f"Peak resident memory of every process, and seconds of the run. Command: `python -m benchmarks.network`. {machine()}."
    )
    (ROOT / "benchmarks" / "tables" / "network.md").write_text("\n".join(lines) + f"\n\n{note}\n")


if __name__ == "__main__":
    main()
