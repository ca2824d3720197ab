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
from osfl.protocol import MOST_IMAGES, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from server_app.federation.exchange import Exchange, RoundError, UnfitError
from server_app.job import GlobalModel

Matrix = list[list[int]]


@dataclass
class Evaluation:
    """Of one global model, on all clients."""

    model: str
    client_of: dict[int, str]  # by node
    classes: int
    matrices: dict[str, Matrix] = field(default_factory=dict)  # by client

    def read(self, node: int, content: RecordDict) -> Matrix:
        """A client's confusion matrix: counts of [true class, predicted class]."""
        size = self.classes
        cells = cast(list[int], content.metric_records["metrics"]["confusion"])
        counts = all(isinstance(cell, int) and cell >= 0 for cell in cells)
        if len(cells) != size * size or not counts or sum(cells) > MOST_IMAGES:
            raise UnfitError(
                "its confusion matrix has the wrong size, or cells that are not counts"
            )
        return [cells[row * size : (row + 1) * size] for row in range(size)]

    def keep(self, node: int, matrix: Matrix) -> None:
        """One more client has tested."""
        self.matrices[self.client_of[node]] = matrix

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
        test = Evaluation(name, client_of, len(class_names(config.data)))
        exchange = Exchange(grid, config.test_timeout)
        content = pack_model(entry.model.state_dict(), entry.architecture, entry.small_stem)
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
