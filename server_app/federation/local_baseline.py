"""Evaluation of the clients' local-only models beside the global one (`local-baseline`).

It is a last request to `evaluate`, after the tests of all global models. A client that fails here,
or takes too long, lacks only its gain. Clients of methods without a payload are asked, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from osfl.config import LOCAL_BASELINE, RunConfig
from osfl.data.parts import class_names
from osfl.payload.messages import LocalTest, SentModel, pack_model
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.model_store import main_model
from osfl.run_folder.status import Status
from server_app.context import GlobalModel
from server_app.federation.evaluate import ClientTest, Evaluation, Evaluator, Matrix
from server_app.federation.exchange import InvalidReplyError


@dataclass
class LocalEvaluation(Evaluation):
    """Evaluation of each client's local-only model, by clients that have tested the global one.

    Attributes:
        pairs: the counts of `LocalTest` by client.
    """

    pairs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name of the tested model, in messages."""
        return f"its local-only model beside {self.model}"

    @property
    def trains(self) -> bool:
        """True if clients train before they test."""
        return True

    def pack(self, model: SentModel) -> RecordDict:
        """Pack the global model, to which the client compares its own."""
        content = pack_model(model)
        content[LOCAL_BASELINE] = ConfigRecord()
        return content

    def read(self, node: int, content: RecordDict) -> ClientTest | None:
        """Read the local model's confusion matrix and the counts of pairs.

        Returns:
            None if the client withholds them.

        Raises:
            InvalidReplyError: as for a global model, or the counts contradict the two matrices.
        """
        test = super().read(node, content)
        if test is None:
            return None
        matrix, _ = test
        client = self.client_of[node]
        pairs = tuple(cast(list[int], content.metric_records["metrics"]["pairs"]))
        are_counts = all(isinstance(count, int) and count >= 0 for count in pairs)
        if len(pairs) != 4 or not are_counts:
            raise InvalidReplyError("its pairs of results are not four counts")
        both, global_only, local_only, _ = pairs
        counts = (sum(pairs), both + global_only, both + local_only)
        correct = (_correct(self.base_matrices[client]), _correct(matrix))
        if counts != (sum(map(sum, matrix)), *correct):
            raise InvalidReplyError("its pairs of results contradict its confusion matrices")
        self.pairs[client] = pairs
        return test

    def local_tests(self) -> dict[str, LocalTest]:
        """Return the valid results by client."""
        return {
            client: LocalTest(matrix, self.pairs[client])
            for client, matrix in self.matrices.items()
        }


def compare_with_local_models(
    grid: Grid,
    config: RunConfig,
    nodes: Mapping[str, int],
    models: Mapping[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Let every client train alone, and store its local model's results beside the global model's.

    Results of an earlier test are removed. With an epsilon no client may send its result, and none
    is asked.
    """
    name = main_model(models)
    folder.remove_local_tests()
    if not config.local_baseline or config.epsilon:
        return
    matrices = folder.stored_test(name)
    client_of = {node: client for client, node in nodes.items() if client in matrices}
    status.phase("training alone on clients", len(client_of))
    size = len(class_names(config.data))
    test = LocalEvaluation(name, client_of, size, config.max_images, base_matrices=matrices)
    evaluator = Evaluator(grid, config, folder.path.name, status, len(client_of))
    evaluator.run(test, models[name])
    folder.store_local_tests(name, test.local_tests())


def _correct(matrix: Matrix) -> int:
    return sum(row[label] for label, row in enumerate(matrix))
