"""A Flower grid in one process, some of whose clients answer late."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message

from tests.helpers.loop_grid import LoopGrid


class LateGrid(LoopGrid):
    """A `LoopGrid` that withholds the payload of its last client until something has happened.

    Args:
        may_answer: returns whether it has; called at every poll for the payload, in a thread.
    """

    def __init__(self, *arguments: Any, may_answer: Callable[[], bool], **settings: Any):
        super().__init__(*arguments, **settings)
        self._may_answer = may_answer
        self._late: set[str] = set()
        self.has_answered = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, message_id in zip(messages, ids, strict=True):
            is_last = message.metadata.dst_node_id == 99 + len(self.nodes)
            if is_last and message.metadata.message_type == "train":
                self._late.add(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        if self._late & set(ids):
            if not self._may_answer():
                return []
            self.has_answered = True
        return super().pull_messages(ids)
