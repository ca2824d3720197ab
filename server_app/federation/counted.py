"""Size limits on a reply's objects before Flower builds them.

An array lists its chunks and may name the same chunk a thousand times. Flower, which has no limit
of its own, would build gigabytes from a reply of kilobytes before any check sees it. So the array
class in Flower's table is replaced by one that adds up the chunks first. A record of many small
items needs 37 times its bytes; all records of a reply together have a limit of their own.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry

# A confusion matrix of two thousand classes has four million cells of one or two bytes
MAX_RECORD_BYTES = 2**23
_RECORDS = (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
_budget = threading.local()


@contextmanager
def limit_reply_bytes(size: float) -> Iterator[None]:
    """Limit the total bytes of arrays and of records built in this thread.

    Exceeding `size`, or `MAX_RECORD_BYTES`, raises ValueError.
    """
    _budget.left = size
    _budget.records = MAX_RECORD_BYTES
    try:
        yield
    finally:
        del _budget.left, _budget.records


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


def _counted(kind: type[InflatableObject]) -> type[InflatableObject]:
    """Return a class that builds objects of a kind after counting their bytes."""

    class Counted(kind):  # type: ignore[valid-type, misc]
        @classmethod
        def inflate(
            cls, object_content: bytes, children: dict[str, InflatableObject] | None = None
        ) -> InflatableObject:
            if hasattr(_budget, "records"):
                _budget.records -= len(object_content)
                if _budget.records < 0:
                    raise ValueError("its records exceed the size limit of a reply")
            return kind.inflate(object_content, children)

    return Counted


inflatable_class_registry[Array.__qualname__] = _CountedArray
inflatable_class_registry.update({kind.__qualname__: _counted(kind) for kind in _RECORDS})
