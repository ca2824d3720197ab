"""Evaluation of the global models on the clients' test images."""

import time
from collections.abc import Mapping
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
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError

Matrix = list[list[int]]


@dataclass
class Evaluation:
    """Evaluation of one global model on all clients.

    Attributes:
        model: the model's name.
        client_of: client by node.
        classes: number of classes.
        max_images: upper bound of a client's test images.
        adapted: whether each client personalizes the model (local fine-tuning) first.
        came: confusion matrices before personalization, by client.
        matrices: confusion matrices by client.
        silent: clients that withhold their results.
    """

    model: str
    client_of: dict[int, str]
    classes: int
    max_images: int
    personalized: bool = False
    base_matrices: Mapping[str, Matrix] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def read(self, node: int, content: RecordDict) -> Matrix | None:
        """Read a client's confusion matrix: counts of [true class, predicted class].

        Returns:
            None if the client withholds it.

        Raises:
            InvalidReplyError: it is malformed, too large, or of other images than the first
                evaluation.
        """
        size = self.classes
        metrics = content.metric_records["metrics"]
        if WITHHELD in metrics or (self.personalized and "confusion" not in metrics):
            return None
        cells = cast(list[int], metrics["confusion"])
        are_counts = all(isinstance(cell, int) and cell >= 0 for cell in cells)
        if len(cells) != size * size or not are_counts:
            raise InvalidReplyError(
                "its confusion matrix has the wrong size, or cells that are not counts"
            )
        if sum(cells) > self.max_images:
            raise InvalidReplyError(
                f"it tested on {sum(cells):,} images, more than max-images = {self.max_images:,}; "
                "set max-images to at least the number of images of the largest client"
            )
        matrix = [cells[row * size : (row + 1) * size] for row in range(size)]
        unadapted = self.base_matrices.get(self.client_of[node], matrix)
        if list(map(sum, matrix)) != list(map(sum, unadapted)):
            raise InvalidReplyError("it tested the model on other images before personalization")
        return matrix

    def keep(self, node: int, matrix: Matrix | None) -> None:
        """Record a client's result."""
        client = self.client_of[node]
        if matrix is None:
            self.silent.add(client)
        else:
            self.matrices[client] = matrix

    def fail(self, node: int, reason: str) -> None:
        """Log that a client could not test the model."""
        suffix = ", personalized" if self.personalized else ""
        log.error("%s could not test %s%s: %s", self.client_of[node], self.model, suffix, reason)


def evaluate_on_clients(
    grid: Grid,
    config: RunConfig,
    nodes: dict[str, int],
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Send every global model to every client and store the confusion matrices.

    A model's average omits clients that do not reply within `test-timeout` and clients that
    withhold their results (`test-results`); the report says so. Then, with `adaptation.steps`,
    clients personalize the models and test them again. A failure there costs the second test only.

    Raises:
        RoundError: no client could test a model. It is not an error if all withhold their results.
    """
    personalizes = bool(config.adaptation.steps)
    total = len(models) * len(nodes) * (1 + personalizes)
    status.phase("testing on clients", total)
    client_of = {node: client for client, node in nodes.items()}
    size = len(class_names(config.data))
    evaluator = _Evaluator(grid, config, folder.path.name, status, total)
    matrices = {}
    withheld: set[str] = set()
    for name, model in models.items():
        test = Evaluation(name, client_of, size, config.max_images)
        evaluator.run(test, model)
        if not test.matrices and not test.silent:
            raise RoundError(f"no client could test the global model {name}; see the log above")
        withheld |= test.silent
        folder.store_test(name, test.matrices)
        matrices[name] = test.matrices
    folder.store_withheld(withheld)
    if withheld:
        log.info("test results are withheld by %s", ", ".join(sorted(withheld)))
    # All models are tested on the same images
    _warn_of_large_tests(next(iter(matrices.values()), {}), status)
    if not personalizes:
        return
    for name, model in models.items():
        test = Evaluation(
            name,
            client_of,
            size,
            config.max_images,
            personalized=True,
            base_matrices=matrices[name],
        )
        evaluator.run(test, model)
        # With an epsilon, clients must not reveal these results, and any that arrive are dropped
        if test.matrices and not config.epsilon:
            folder.store_adapted_test(name, test.matrices)


def _warn_of_large_tests(matrices: Mapping[str, Matrix], status: Status) -> None:
    """Warn of clients that dominate the figures over the pooled test images."""
    images = {client: sum(map(sum, matrix)) for client, matrix in matrices.items()}
    positive = {client: count for client, count in images.items() if count}
    for client, ratios in sorted(find_large_counts(positive).items()):
        status.add_warning(
            f"{client}: states {images[client]:,} test images, {ratios['counts']:.3g} times the "
            "others' median; it dominates the figures over the pooled test images"
        )


class _Evaluator:
    """Runs one evaluation after the other, and reports the progress of the phase."""

    def __init__(self, grid: Grid, config: RunConfig, job_id: str, status: Status, total: int):
        self._grid = grid
        self._config = config
        self._job_id = job_id
        self._status = status
        self._total = total
        self._finished = 0  # clients of earlier evaluations

    def run(self, test: Evaluation, model: GlobalModel) -> None:
        """Evaluate one model on all clients, until all have replied or `test-timeout`."""
        seconds = self._config.test_timeout
        # A client that gets the request twice would personalize the model twice, in parallel
        patience = seconds if test.personalized else None
        exchange = Exchange(self._grid, seconds, patience)
        content = pack_model(
            SentModel(
                model.model.state_dict(),
                model.architecture,
                model.small_stem,
                self._job_id,
                test.model,
                test.personalized,
            )
        )
        for node in test.client_of:
            exchange.push(node, "evaluate", content)
        release_memory()
        end = time.monotonic() + seconds
        while exchange.pull(test.read, test.keep, test.fail, end) and time.monotonic() < end:
            replies = len(test.matrices) + len(test.silent)
            self._status.advance(self._finished + replies, self._total)
            exchange.wait(end)
        exchange.end()
        for node in exchange.pending_nodes():
            test.fail(node, f"no reply within {seconds:g} s (test-timeout)")
        self._finished += len(test.client_of)
