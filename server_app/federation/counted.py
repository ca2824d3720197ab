"""A reply's arrays are counted before Flower builds them.

An array says which chunks it is made of, and may name one chunk a thousand times: from what took
kilobytes to send, Flower would build gigabytes before anybody sees the reply. It has no limit of
its own, and calls the class that its table has for a name: there it finds one that counts first.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from flwr.app import Array
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

_budget = threading.local()


@contextmanager
def at_most(size: float) -> Iterator[None]:
    """In this thread, arrays of together more than so many bytes raise a ValueError."""
    _budget.left = size
    try:
        yield
    finally:
        del _budget.left


class _CountedArray(Array):
    @classmethod
    def inflate(
        cls, object_content: bytes, children: dict[str, InflatableObject] | None = None
    ) -> Array:
        if hasattr(_budget, "left"):
            names = get_object_children_ids_from_object_content(object_content)
            numbers = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
            chunks = cast(list[ArrayChunk], [(children or {})[names[n]] for n in numbers])
            _budget.left -= sum(len(chunk.data) for chunk in chunks)
            if _budget.left < 0:
                raise ValueError("its arrays are larger than any that it may send")
        return Array.inflate(object_content, children)


inflatable_class_registry[Array.__qualname__] = _CountedArray
