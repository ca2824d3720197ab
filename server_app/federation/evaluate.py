"""The test of the global model where the data is."""

import time
from dataclasses import dataclass, field
from typing import cast

from flwr.app import RecordDict
from flwr.serverapp import Grid

from osfl.config import RunConfig
from osfl.costs import release_memory
from osfl.data.parts import class_names
from osfl.log import log
from osfl.protocol import MOST_IMAGES, SentModel, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from server_app.federation.exchange import (
    WORK_PATIENCE_SECONDS,
    Exchange,
    RoundError,
    UnfitError,
)
from server_app.job import GlobalModel

Matrix = list[list[int]]


@dataclass
class Evaluation:
    """Of one global model, on all clients."""

    model: str
    client_of: dict[int, str]  # by node
    classes: int
    adapts: bool  # whether clients adapt it, and test it again
    matrices: dict[str, Matrix] = field(default_factory=dict)  # by client
    adapted: dict[str, Matrix] = field(default_factory=dict)

    def read(self, node: int, content: RecordDict) -> tuple[Matrix, Matrix | None]:
        """A client's confusion matrices, of the model as it came and adapted; None: it is not."""
        metrics = content.metric_records["metrics"]
        came = self._matrix(metrics["confusion"])
        own = metrics["adapted"] if self.adapts and "adapted" in metrics else None
        return came, None if own is None else self._matrix(own)

    def _matrix(self, sent: object) -> Matrix:
        """Counts of [true class, predicted class]."""
        size = self.classes
        cells = cast(list[int], sent)
        counts = all(isinstance(cell, int) and cell >= 0 for cell in cells)
        if len(cells) != size * size or not counts or sum(cells) > MOST_IMAGES:
            raise UnfitError(
                "its confusion matrix has the wrong size, or cells that are not counts"
            )
        return [cells[row * size : (row + 1) * size] for row in range(size)]

    def keep(self, node: int, matrices: tuple[Matrix, Matrix | None]) -> None:
        """One more client has tested."""
        client = self.client_of[node]
        self.matrices[client], adapted = matrices
        if adapted is not None:
            self.adapted[client] = adapted

    def fail(self, node: int, reason: str) -> None:
        """One client could not test."""
        log.error("%s could not test %s: %s", self.client_of[node], self.model, reason)


def evaluate_on_clients(
    grid: Grid,
    config: RunConfig,
    nodes: dict[str, int],
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Send every global model to every client and store the confusion matrices.

    Those of the models that clients adapted are stored as of a model of its own, `FT-adapted`.

    A client that does not answer within `test-timeout` is left out of that model's average, and the
    report says so.

    Raises:
        RoundError: no client could test a model.
    """
    total = len(models) * len(nodes)
    done = 0
    status.phase("testing on clients", total)
    client_of = {node: client for client, node in nodes.items()}
    for name, entry in models.items():
        adapts = bool(config.adaptation.steps)
        test = Evaluation(name, client_of, len(class_names(config.data)), adapts)
        patience = WORK_PATIENCE_SECONDS if adapts else None
        exchange = Exchange(grid, config.test_timeout, patience)
        state = entry.model.state_dict()
        job_id = folder.path.name
        content = pack_model(SentModel(state, entry.architecture, entry.small_stem, job_id, name))
        for node in nodes.values():
            exchange.push(node, "evaluate", content)
        release_memory()
        end = time.monotonic() + config.test_timeout
        while exchange.pull(test.read, test.keep, test.fail, end) and time.monotonic() < end:
            status.advance(done + len(test.matrices), total)
            exchange.rest(end)
        exchange.end()
        for node in exchange.waiting():
            test.fail(node, f"no answer within {config.test_timeout:g} s (test-timeout)")
        done += len(nodes)
        if not test.matrices:
            raise RoundError(f"no client could test the global model {name}; see the log above")
        folder.store_test(name, test.matrices)
        if test.adapted:
            folder.store_test(name, test.adapted, adapted=True)
