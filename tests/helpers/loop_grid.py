"""A Flower grid in one process: real messages and apps, no network."""

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity


class LoopGrid:
    """A Grid whose nodes are ClientApps called in this process.

    Real messages, real apps, no network.

    Args:
        app: the ClientApp.
        run_config: what every client sees.
        nodes: node-config of every node.
        tamper: may change or replace a reply (node index, message type, reply) -> reply or None
            (lost).
    """

    def __init__(
        self,
        app: ClientApp,
        run_config: dict,
        nodes: list[dict],
        tamper: Callable[[int, str, Message], Message | None] | None = None,
    ):
        self.app = app
        self.run_config = run_config
        self.nodes = nodes
        self.tamper = tamper
        self.sent: list[tuple[int, str]] = []
        self._ids = itertools.count(1)
        self._replies = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=100 + i, last_activated_at="then") for i in range(len(self.nodes))]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message_id = str(next(self._ids))
            index = message.metadata.dst_node_id - 100
            message.metadata.__dict__["_message_id"] = message_id  # what the SuperLink does
            self.sent.append((index, message.metadata.message_type))
            context = Context(1, 100 + index, self.nodes[index], RecordDict(), self.run_config)
            try:
                reply = self.app(message, context)
            except Exception as error:  # what Flower does
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            if self.tamper:
                reply = self.tamper(index, message.metadata.message_type, reply)
            self._replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for i in message_ids if (reply := self._replies.pop(i, None)) is not None]


def begin_task() -> None:
    """Flower makes a Message only within a task."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
