"""The test of the global model where the data is."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from flwr.app import RecordDict
from flwr.serverapp import Grid

from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.payload.messages import WITHHELD, SentModel, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.costs import release_memory
from osfl.util.log import log
from server_app.context import GlobalModel
from server_app.defenses.outliers import find_large_counts
from server_app.federation.exchange import Exchange, RoundError, UnfitError

Matrix = list[list[int]]


@dataclass
class Evaluation:
    """Of one global model, on all clients.

    Attributes:
        model: its name.
        client_of: by node.
        classes: how many there are.
        max_images: the most test images of a client.
        adapted: whether each client adapts it first.
        came: with that, the matrices of the model as it came.
        matrices: what clients told, by client.
        silent: clients that withhold what they found.
    """

    model: str
    client_of: dict[int, str]
    classes: int
    max_images: int
    adapted: bool = False
    came: Mapping[str, Matrix] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def read(self, node: int, content: RecordDict) -> Matrix | None:
        """A client's confusion matrix: counts of [true class, predicted class].

        Returns:
            None: its site withholds it.
        """
        size = self.classes
        metrics = content.metric_records["metrics"]
        if WITHHELD in metrics or (self.adapted and "confusion" not in metrics):
            return None
        cells = cast(list[int], metrics["confusion"])
        counts = all(isinstance(cell, int) and cell >= 0 for cell in cells)
        if len(cells) != size * size or not counts:
            raise UnfitError(
                "its confusion matrix has the wrong size, or cells that are not counts"
            )
        if sum(cells) > self.max_images:
            raise UnfitError(
                f"it tested on {sum(cells):,} images, more than max-images = {self.max_images:,}; "
                "set max-images to at least the number of images of the largest client"
            )
        matrix = [cells[row * size : (row + 1) * size] for row in range(size)]
        before = self.came.get(self.client_of[node], matrix)
        if list(map(sum, matrix)) != list(map(sum, before)):
            raise UnfitError("it tested the model on other images before it adapted it")
        return matrix

    def keep(self, node: int, matrix: Matrix | None) -> None:
        """One more client has tested."""
        client = self.client_of[node]
        if matrix is None:
            self.silent.add(client)
        else:
            self.matrices[client] = matrix

    def fail(self, node: int, reason: str) -> None:
        """One client could not test."""
        adapted = ", adapted" if self.adapted else ""
        log.error("%s could not test %s%s: %s", self.client_of[node], self.model, adapted, reason)


def evaluate_on_clients(
    grid: Grid,
    config: RunConfig,
    nodes: dict[str, int],
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Send every global model to every client and store the confusion matrices.

    A client that does not answer within `test-timeout` is left out of that model's average, and so
    is one whose site withholds its results (`test-results`); the report says so. Then, with
    `adaptation.steps`, clients adapt the models and test them again: what fails there costs that
    second test alone.

    Raises:
        RoundError: no client could test a model. That all withhold their results is no error.
    """
    adapts = bool(config.adaptation.steps)
    total = len(models) * len(nodes) * (1 + adapts)
    done = 0
    status.phase("testing on clients", total)
    client_of = {node: client for client, node in nodes.items()}
    size = len(class_names(config.data))
    came = {}
    withheld: set[str] = set()

    def ask(test: Evaluation, entry: GlobalModel) -> None:
        _ask(grid, config, test, entry, folder.path.name, lambda n: status.advance(done + n, total))

    for name, entry in models.items():
        test = Evaluation(name, client_of, size, config.max_images)
        ask(test, entry)
        done += len(nodes)
        if not test.matrices and not test.silent:
            raise RoundError(f"no client could test the global model {name}; see the log above")
        withheld |= test.silent
        folder.store_test(name, test.matrices)
        came[name] = test.matrices
    folder.store_withheld(withheld)
    if withheld:
        log.info("test results are withheld by %s", ", ".join(sorted(withheld)))
    # All models are tested on the same images
    _warn_of_large_tests(next(iter(came.values()), {}), status)
    if not adapts:
        return
    for name, entry in models.items():
        test = Evaluation(name, client_of, size, config.max_images, adapted=True, came=came[name])
        ask(test, entry)
        done += len(nodes)
        # Of a run with an epsilon no client may tell, and none is heard
        if test.matrices and not config.epsilon:
            folder.store_adapted_test(name, test.matrices)


def _warn_of_large_tests(matrices: Mapping[str, Matrix], status: Status) -> None:
    """Warn of clients that dominate the figures over all test images together."""
    images = {client: sum(map(sum, matrix)) for client, matrix in matrices.items()}
    tested = {client: count for client, count in images.items() if count}
    for client, found in sorted(find_large_counts(tested).items()):
        status.warn_of(
            f"{client}: states {images[client]:,} test images, {found['counts']:.3g} times the "
            "others' median; it dominates the figures over all test images together"
        )


def _ask(
    grid: Grid,
    config: RunConfig,
    test: Evaluation,
    entry: GlobalModel,
    job_id: str,
    advance: Callable[[int], None],
) -> None:
    """One model's test on all clients, to the end or to `test-timeout`."""
    # Who is asked twice would adapt twice, side by side
    patience = config.test_timeout if test.adapted else None
    exchange = Exchange(grid, config.test_timeout, patience)
    content = pack_model(
        SentModel(
            entry.model.state_dict(),
            entry.architecture,
            entry.small_stem,
            job_id,
            test.model,
            test.adapted,
        )
    )
    for node in test.client_of:
        exchange.push(node, "evaluate", content)
    release_memory()
    end = time.monotonic() + config.test_timeout
    while exchange.pull(test.read, test.keep, test.fail, end) and time.monotonic() < end:
        advance(len(test.matrices) + len(test.silent))
        exchange.rest(end)
    exchange.end()
    for node in exchange.waiting():
        test.fail(node, f"no answer within {config.test_timeout:g} s (test-timeout)")
