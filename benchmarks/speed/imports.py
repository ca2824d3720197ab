"""Measure the CPU-seconds that each kind of process takes to start: its imports and first loads.

python -m benchmarks.speed.imports                    # this checkout
python -m benchmarks.speed.imports --before CHECKOUT  # and an earlier one, in turn

Flower starts a process for each message, so a client pays its imports several times per job.
"""

import os
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from benchmarks.harness import ROOT, Experiment, command_line

DIGITS = """
from osfl.config import parse_node_config, parse_run_config
from osfl.data.load import load_images
from osfl.settings import default_config
from osfl.models.classifiers import build_classifier, count_confusion
import torch
config = parse_run_config(default_config())
node = parse_node_config({"partition-id": 0, "num-partitions": 6})
def load(split):
    return load_images(config.data, node, split, 0)
"""
CLIENT = "import client_app.app, client_app.handlers\n" + DIGITS
SERVER = "import server_app.app, torchvision\n"
REPORT = """
import numpy as np
from osfl.run_folder.report.page import _page, scores
_page()
scores(np.eye(2, dtype=int))
"""
TEST = """
images = load("test")
model = build_classifier("resnet18", 10, True)
count_confusion(model, images.pixels[:2], images.labels[:2], 10, torch.device("cpu"))
"""
COMMAND = """
import sys
sys.argv = "osfl {}".split()
from osfl.cli.main import app
app()
"""
PROCESSES = {
    "libraries: torch": "import torch",
    "libraries: torch, torchvision": "import torchvision",
    "libraries: and diffusers": "import torchvision\nfrom diffusers import UNet2DConditionModel",
    "`osfl --help`": COMMAND.format("--help"),
    "`osfl run --dry-run method=fedcgs`": COMMAND.format("run --dry-run method=fedcgs"),
    "`osfl run --dry-run method=feddeo`": COMMAND.format("run --dry-run method=feddeo"),
    "a client joins": "import client_app.app",
    "a client's payload, fedcgs": CLIENT
    + 'import client_app.methods.fedcgs\nload("train")\nbuild_classifier("resnet18", 10, True)',
    "a client's payload, feddeo": CLIENT + 'import client_app.methods.feddeo\nload("train")',
    "a client's test of a model": CLIENT + TEST,
    "the server, fedcgs": SERVER + "import server_app.methods.fedcgs" + REPORT,
    "the server, feddeo": SERVER
    + "import server_app.methods.feddeo, server_app.synthesis.engine"
    + REPORT,
}
EXPERIMENT = Experiment(
    __file__,
    caption="CPU-seconds (user and system, with child processes) of processes that import what "
    "their kind needs, load the digits, and do no other work. The lowest of {repeats}.",
)


def cpu_seconds(code: str, checkout: Path) -> float:
    """Return the CPU-seconds of a process that runs code, with its children."""
    start = getrusage(RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    end = getrusage(RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def main() -> None:
    """Measure all kinds of processes, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {"now": ROOT}
    if arguments.before:
        checkouts = {"before": arguments.before.resolve(), "now": ROOT}
    lines = []
    for process, code in PROCESSES.items():
        line = {"process": process}
        for column, checkout in checkouts.items():
            seconds = min(cpu_seconds(code, checkout) for _ in range(arguments.repeats))
            line[column] = f"{seconds:.1f}"
        print(line, flush=True)
        lines.append(line)
    caption = EXPERIMENT.caption.format(repeats=arguments.repeats)
    options = "--before CHECKOUT" if arguments.before else ""
    Experiment(__file__, caption=caption, options=options).write_all(lines)


if __name__ == "__main__":
    main()
