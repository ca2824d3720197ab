"""Evaluation of the global models on the clients' test images."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

from flwr.app import RecordDict
from flwr.serverapp import Grid

from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.metrics.histograms import ScoreHistograms, check_histograms
from osfl.metrics.messages import unpack_histograms
from osfl.payload.messages import WITHHELD, SentModel, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.costs import release_memory
from osfl.util.log import log
from server_app.context import GlobalModel
from server_app.defenses.outliers import find_large_counts
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError
from server_app.federation.samples import OwnSamples

Matrix = list[list[int]]
ClientTest = tuple[Matrix, ScoreHistograms | None]


@dataclass
class Evaluation:
    """Evaluation of one global model on all clients.

    Attributes:
        model: the model's name.
        client_of: client by node.
        classes: number of classes.
        max_images: upper bound of a client's test images.
        personalized: whether each client personalizes the model (local fine-tuning) first.
        base_matrices: confusion matrices before personalization, by client.
        matrices: confusion matrices by client.
        histograms: histograms of the scores, by each client that sent them.
        withheld: clients that withhold their results.
        samples: adds to a request the synthetic images that its client asked for.
    """

    model: str
    client_of: dict[int, str]
    classes: int
    max_images: int
    personalized: bool = False
    base_matrices: Mapping[str, Matrix] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    histograms: dict[str, ScoreHistograms] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)
    samples: OwnSamples | None = None

    @property
    def title(self) -> str:
        """The name of the tested model, in messages."""
        return f"{self.model}, personalized" if self.personalized else self.model

    @property
    def trains(self) -> bool:
        """True if clients train before they test."""
        return self.personalized

    def pack(self, model: SentModel) -> RecordDict:
        """Pack the global model for a request."""
        return pack_model(model)

    def request_to(self, node: int, content: RecordDict) -> RecordDict:
        """Return one client's content: everyone's, and the synthetic images that it asked for."""
        return content if self.samples is None else self.samples.add(content, self.client_of[node])

    def read(self, node: int, content: RecordDict) -> ClientTest | None:
        """Read a client's confusion matrix, counts of [true, predicted class], and histograms.

        Returns:
            None if the client withholds the matrix.

        Raises:
            InvalidReplyError: it is malformed, states too many images, or counts other images than
                the first evaluation.
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
        base = self.base_matrices.get(self.client_of[node], matrix)
        if list(map(sum, matrix)) != list(map(sum, base)):
            raise InvalidReplyError("it tested the global model on other images before")
        return matrix, self._read_histograms(content, matrix)

    def _read_histograms(self, content: RecordDict, matrix: Matrix) -> ScoreHistograms | None:
        """Read the histograms of a reply; None if it has none."""
        try:
            histograms = unpack_histograms(content, self.classes)
            if histograms is not None:
                check_histograms(histograms, matrix)
        except ValueError as error:
            raise InvalidReplyError(str(error)) from None
        return histograms

    def keep(self, node: int, test: ClientTest | None) -> None:
        """Record a client's result."""
        client = self.client_of[node]
        if test is None:
            self.withheld.add(client)
            return
        self.matrices[client], histograms = test
        if histograms is not None:
            self.histograms[client] = histograms

    def take(self, clients: Collection[str]) -> dict[str, Matrix]:
        """Remove the results of some clients, and return their confusion matrices."""
        names = sorted(self.matrices.keys() & set(clients))
        for client in names:
            self.histograms.pop(client, None)
        return {client: self.matrices.pop(client) for client in names}

    def fail(self, node: int, reason: str) -> None:
        """Log that a client could not test the model."""
        log.error("%s could not test %s: %s", self.client_of[node], self.title, reason)


@dataclass(frozen=True)
class EvaluationNodes:
    """The nodes that test the global models.

    Attributes:
        participants: by client. With reused payloads there may be none, and no test of theirs is
            stored.
        test_only: by test-only client; their results are stored apart.
        comparing: the clients that get a sample of their synthetic images.
    """

    participants: Mapping[str, int]
    test_only: Mapping[str, int] = field(default_factory=dict)
    comparing: Collection[str] = ()


def evaluate_on_clients(
    grid: Grid,
    config: RunConfig,
    nodes: EvaluationNodes,
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Send every global model to every client and store the confusion matrices.

    A model's average omits clients that do not reply within `test-timeout` and clients that
    withhold their results (`test-results`); the report says so. Then, with `personalization.steps`,
    clients personalize the models and test them again. A failure there costs the second test only.

    Raises:
        RoundError: no participant could test a model. It is not an error if all withhold their
            results.
    """
    personalizes = bool(config.personalization.steps)
    participants = nodes.participants
    total = len(models) * (len(participants) * (1 + personalizes) + len(nodes.test_only))
    status.phase("testing on clients", total)
    client_of = {node: client for client, node in participants.items()}
    tester_of = {node: client for client, node in nodes.test_only.items()}
    classes = class_names(config.data)
    size = len(classes)
    samples: OwnSamples | None = OwnSamples(folder, nodes.comparing, classes)
    evaluator = Evaluator(grid, config, folder.path.name, status, total)
    matrices = {}
    test_only_matrices = {}
    withheld: set[str] = set()
    for name, model in models.items():
        test = Evaluation(name, client_of | tester_of, size, config.max_images, samples=samples)
        evaluator.run(test, model)
        # The images travel with the first model only
        samples = None
        withheld |= test.withheld
        test_only_matrices[name] = test.take(nodes.test_only)
        matrices[name] = test.matrices
        if participants or not folder.has_payloads_of_another:
            _store_test(test, participants, config, folder)
    folder.store_tests_apart(test_only_matrices if nodes.test_only else {})
    _store_withheld(withheld, folder)
    # All models are tested on the same images
    _warn_of_large_tests(next(iter(matrices.values()), {}), status)
    for name, model in models.items() if personalizes else ():
        test = Evaluation(
            name,
            client_of,
            size,
            config.max_images,
            personalized=True,
            base_matrices=matrices[name],
        )
        evaluator.run(test, model)
        _store_personalized(test, config, folder)


def _store_test(
    test: Evaluation, participants: Collection[str], config: RunConfig, folder: RunFolder
) -> None:
    """Store the participants' tests of a global model.

    Raises:
        RoundError: none of them could test it.
    """
    if not test.matrices and test.withheld.isdisjoint(participants):
        raise RoundError(f"no client could test the global model {test.model}; see the log above")
    folder.store_test(test.model, test.matrices)
    # With an epsilon, clients must not reveal these, and any that arrive are dropped
    folder.store_histograms(test.model, {} if config.epsilon else test.histograms)


def _store_withheld(clients: Collection[str], folder: RunFolder) -> None:
    folder.store_withheld(clients)
    if clients:
        log.info("test results are withheld by %s", ", ".join(sorted(clients)))


def _store_personalized(test: Evaluation, config: RunConfig, folder: RunFolder) -> None:
    """Store the tests of personalized models.

    With an epsilon, clients must not reveal these results, and any that arrive are dropped.
    """
    if test.matrices and not config.epsilon:
        folder.store_personalized_test(test.model, test.matrices)
        folder.store_histograms(test.model, test.histograms, personalized=True)


def _warn_of_large_tests(matrices: Mapping[str, Matrix], status: Status) -> None:
    """Warn of clients whose test images dominate the figures over all test images."""
    images = {client: sum(map(sum, matrix)) for client, matrix in matrices.items()}
    positive = {client: count for client, count in images.items() if count}
    for client, ratios in sorted(find_large_counts(positive).items()):
        status.add_warning(
            f"{client}: states {images[client]:,} test images, {ratios['counts']:.3g} times the "
            "others' median; it dominates the figures over the pooled test images"
        )


class Evaluator:
    """Runs evaluations one after the other, and reports the progress of the phase."""

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
        # A client that gets the request twice would train twice, in parallel
        patience = seconds if test.trains else None
        exchange = Exchange(self._grid, seconds, patience)
        content = test.pack(
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
            exchange.push(node, "evaluate", test.request_to(node, content))
        release_memory()
        end = time.monotonic() + seconds

        def keep(node: int, result: ClientTest | None) -> None:
            test.keep(node, result)
            self._status.stamp(test.client_of[node], "tested")

        while exchange.pull(test.read, keep, test.fail, end) and time.monotonic() < end:
            replies = len(test.matrices) + len(test.withheld)
            self._status.advance(self._finished + replies, self._total)
            exchange.wait(end)
        exchange.end()
        for node in exchange.pending_nodes():
            test.fail(node, f"no reply within {seconds:g} s (test-timeout)")
        self._finished += len(test.client_of)
