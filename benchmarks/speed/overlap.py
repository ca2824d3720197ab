"""Measure how long a run takes after its last payload, with and without `synthesis.overlap`.

python -m benchmarks.speed.overlap            # some minutes on two cores

The last client answers when the images of all others exist, or, without overlap, at once: nothing
happens meanwhile. Clients send a payload of about 100 bytes (prompts-domain), on a grid without a
network, and test no real model. Both runs make the same images.
"""

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.harness import Experiment
from benchmarks.speed.many_clients import JOB, ManyNodes
from osfl.config import RunConfig, Scalar, parse_run_config
from osfl.run_folder.layout import RunFolder, read_rows
from osfl.run_folder.report.metrics import read_metrics
from osfl.settings import default_config
from server_app.app import run_job

CLIENTS = 6
ROWS = ("off", "on")
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    caption="Seconds from the last of six payloads to the end of a run of prompts-domain with the "
    "digits' kit (40 images of each client, 20 steps), on a grid without a network. With "
    "`synthesis.overlap` the last client answers when the images of the others exist.",
)


class LateNodes(ManyNodes):
    """`ManyNodes` whose last client answers when the images of the others exist.

    Args:
        early: whether they are made while it works, or else it answers at once.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, early: bool):
        super().__init__(config, CLIENTS)
        self._folder = folder
        images = config.synthesis.images_per_class * len(self._classes)
        self._awaited = (CLIENTS - 1) * images if early else 0
        self._late: set[str] = set()
        self.answered = 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept requests, and return their ids."""
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, message_id in zip(messages, ids, strict=True):
            metadata = message.metadata
            if (metadata.dst_node_id, metadata.message_type) == (CLIENTS, "train"):
                self._late.add(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to requests, but not yet that of the last client."""
        ids = list(message_ids)
        if self._late & set(ids):
            if sum(len(read_rows(unit)) for unit in self._folder.unit_files()) < self._awaited:
                return []
            self.answered = time.monotonic()
        return super().pull_messages(ids)


def measure(row: str, seeds: object = ()) -> dict[str, str]:
    """Run once, and return the table's line."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    settings: dict[str, Scalar] = {"method": "prompts-domain", "num-clients": CLIENTS}
    settings |= {"synthesis.images-per-class": 4, "synthesis.overlap": row}
    with tempfile.TemporaryDirectory() as runs:
        config = parse_run_config({**default_config(), **settings, "runs-dir": runs})
        folder = RunFolder(Path(runs) / JOB)
        grid = LateNodes(config, folder, row == "on")
        run_job(cast(Grid, grid), config, JOB)
        seconds = time.monotonic() - grid.answered
        server = read_metrics(folder.path)["server"]
    return {
        "": row,
        "seconds after the last payload": f"{seconds:.0f}",
        "seconds of synthesis, in all": f"{server['synthesis_seconds']:.0f}",
        "images": str(server["synthetic_images"]),
    }


def measure_warm(row: str, seeds: object = ()) -> dict[str, str]:
    """Return the line of a second run: the first one of a process also imports libraries."""
    measure(row)
    return measure(row)


def main() -> None:
    """Make both rows of the table."""
    EXPERIMENT.main(__doc__, measure_warm)


if __name__ == "__main__":
    main()
