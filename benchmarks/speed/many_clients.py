"""Measure the server's CPU-seconds with many clients, on a grid without a network.

python -m benchmarks.speed.many_clients                       # 100 to 10,000 clients
python -m benchmarks.speed.many_clients --clients 1000        # one row

Every client joins, sends a payload of about 100 bytes (prompts-domain), and tests a model of ten
classes. Flower's own work for a message is left out.
"""

import itertools
import json
import resource
import tempfile
import time
from collections.abc import Iterable
from typing import cast

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import osfl
from benchmarks.harness import Experiment, command_line, last_line_of
from osfl.config import RunConfig, parse_run_config
from osfl.data.parts import class_names
from osfl.models.classifiers import build_classifier
from osfl.payload import wire
from osfl.payload.kinds import Domain
from osfl.payload.messages import COST_KEYS, pack_payload
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status
from osfl.settings import default_config
from server_app.context import GlobalModel
from server_app.expected import expected_payload
from server_app.federation.collect import collect
from server_app.federation.evaluate import EvaluationNodes, evaluate_on_clients
from server_app.federation.join import join

ARCHITECTURE = "shufflenet_v2_x1_0"
JOB = "many"
SIZES = (100, 1_000, 10_000)
PHASES = ("joining", "collecting", "testing", "report")
EXPERIMENT = Experiment(
    __file__,
    caption="The server's CPU-seconds by phase, and its peak memory, with N clients that reply at "
    "once on a grid without a network: each joins, sends a payload of about 100 bytes, and tests a "
    "model. In its own process for each N.",
)


class ManyNodes:
    """A Flower grid whose nodes reply at once.

    Args:
        config: the run-config.
        count: the number of nodes.
    """

    def __init__(self, config: RunConfig, count: int):
        self._nodes = [
            NodeInfo(node_id=number, last_activated_at="then", name=f"client-{number}")
            for number in range(1, count + 1)
        ]
        self._classes = class_names(config.data)
        self._ids = itertools.count(1)
        self._requests: dict[str, Message] = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        """List all nodes."""
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept requests, and return their ids."""
        ids = []
        for message in messages:
            ids.append(f"m{next(self._ids)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._requests[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to requests."""
        requests = [self._requests.pop(message_id) for message_id in message_ids]
        return [Message(self._reply(request), reply_to=request) for request in requests]

    def _reply(self, request: Message) -> RecordDict:
        client = f"client-{request.metadata.dst_node_id}"
        kind = request.metadata.message_type
        if kind == "query.join":
            record = {"client": client, "version": osfl.__version__, "architecture": ARCHITECTURE}
            return RecordDict({"join": ConfigRecord(record)})
        if kind == "train":
            payload = Domain(self._classes, "photo")
            blob = wire.encode(payload, "prompts-domain", JOB, client)
            return pack_payload(blob, dict.fromkeys(COST_KEYS, 1.0))
        if kind == "evaluate":
            return RecordDict({"metrics": MetricRecord({"confusion": [1] * 100})})
        return RecordDict()


def measure(count: int) -> dict[str, float]:
    """Return the CPU-seconds of each phase with `count` clients."""
    settings = {"method": "prompts-domain", "num-clients": count, "job-id": JOB}
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as runs:
        config = parse_run_config({**default_config(), **settings, "runs-dir": runs})
        grid = cast(Grid, ManyNodes(config, count))
        folder = open_run_folder(config, JOB, 0)
        status = Status(folder.path)
        model = GlobalModel(build_classifier(ARCHITECTURE, 10, True), ARCHITECTURE, True)
        start = time.process_time()
        members = join(grid, config, status, [])
        seconds["joining"] = time.process_time() - start
        start = time.process_time()
        expected = expected_payload(config, JOB)
        collect(grid, config, JOB, members, folder, status, expected)
        seconds["collecting"] = time.process_time() - start
        start = time.process_time()
        evaluate_on_clients(
            grid, config, EvaluationNodes(members.nodes), {"FT": model}, folder, status
        )
        seconds["testing"] = time.process_time() - start
        start = time.process_time()
        write_report(folder.path, class_names(config.data))
        seconds["report"] = time.process_time() - start
    return seconds


def main() -> None:
    """Measure each number of clients in a process of its own, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--clients", type=int, default=0, help="measure one row, and print it")
    arguments = parser.parse_args()
    if arguments.clients:
        seconds = measure(arguments.clients)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps({**seconds, "memory": memory}))
        return
    lines = []
    for count in SIZES:
        row = json.loads(last_line_of("benchmarks.speed.many_clients", "--clients", str(count)))
        line = {"clients": f"{count:,}"}
        line |= {phase: f"{row[phase]:.1f}" for phase in PHASES}
        line |= {"all": f"{sum(row[phase] for phase in PHASES):.1f}"}
        line |= {"peak memory, GB": f"{row['memory']:.2f}"}
        print(line, flush=True)
        lines.append(line)
    EXPERIMENT.write_all(lines)


if __name__ == "__main__":
    main()
