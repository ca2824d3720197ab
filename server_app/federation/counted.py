"""Size limit on a reply's arrays before Flower builds them.

An array lists its chunks and may name the same chunk a thousand times. Flower, which has no limit
of its own, would build gigabytes from a reply of kilobytes before any check sees it. So the array
class in Flower's table is replaced by one that adds up the chunks first.
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
def limit_array_bytes(size: float) -> Iterator[None]:
    """Limit the total bytes of arrays built in this thread; exceeding it raises ValueError."""
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
            indices = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
            chunks = cast(list[ArrayChunk], [(children or {})[names[n]] for n in indices])
            _budget.left -= sum(len(chunk.data) for chunk in chunks)
            if _budget.left < 0:
                raise ValueError("its arrays exceed the size limit of a reply")
        return Array.inflate(object_content, children)


inflatable_class_registry[Array.__qualname__] = _CountedArray
