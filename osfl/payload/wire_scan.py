"""A first look at a payload's bytes, in place.

Protobuf makes objects of up to 130 times a hostile message's size.

Protobuf's wire format is a row of fields. Each is a tag (number << 3 | wire type), then either a
number of seven bits a byte (a varint), or a length and that many bytes. The scan jumps over bytes
and texts by their length, and ends at the first field too many: its cost is bounded by what is
expected, not by what came. Source: protobuf.dev, "Encoding".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

# wire types
VARINT = 0
LENGTH = 2
MOST_VARINT_BYTES = 10
WIRE_TYPES = {
    FieldDescriptor.TYPE_BYTES: LENGTH,
    FieldDescriptor.TYPE_ENUM: VARINT,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
    FieldDescriptor.TYPE_STRING: LENGTH,
    FieldDescriptor.TYPE_UINT32: VARINT,
    FieldDescriptor.TYPE_UINT64: VARINT,
}


class ScanError(ValueError):
    """Bytes that protobuf need not see. Names the field."""

    def __init__(self, field_name: str, problem: str):
        super().__init__(field_name, problem)
        self.field = field_name
        self.problem = problem


def scan(data: bytes | memoryview, kind: Descriptor, most: Mapping[str, int], longest: int) -> None:
    """Whether `data` is a message of this kind, of known fields, none more often than expected.

    Args:
        data: the serialised message.
        kind: its descriptor.
        most: how often a repeated field or a submessage may come in the whole message, by
            "Message.field"; without an entry, never. Any other field comes once in its message.
        longest: how many bytes a text may have.

    Raises:
        ScanError: an unknown field, or one of another wire type; a field too many; a text that is
            too long; a length beyond the message that it is in; a varint without an end.
    """
    _Scan(data, longest, dict(most)).message(kind, 0, len(data))


@dataclass(frozen=True)
class _Field:
    """What the scan must know of a field."""

    number: int
    name: str
    wire_type: int
    repeated: bool
    text: bool
    message: Descriptor | None
    group: str  # the oneof that it belongs to, else itself
    key: str  # "Message.field"

    @property
    def counted(self) -> bool:
        return self.repeated or self.message is not None


@cache
def _fields(kind: Descriptor) -> dict[int, _Field]:
    return {
        known.number: _Field(
            known.number,
            known.name,
            WIRE_TYPES[known.type],
            known.is_repeated,
            known.type == FieldDescriptor.TYPE_STRING,
            known.message_type,
            known.containing_oneof.name if known.containing_oneof else known.name,
            f"{kind.name}.{known.name}",
        )
        for known in kind.fields
    }


@dataclass
class _Scan:
    data: bytes | memoryview
    longest: int
    left: dict[str, int]  # how much more of a field may come

    def message(self, kind: Descriptor, at: int, end: int) -> None:
        """The fields of a message that is data[at:end]."""
        seen = set[int]()
        while at < end:
            tag, at = self.varint(at, end)
            known = _fields(kind).get(tag >> 3)
            if known is None:
                raise ScanError(
                    "message", f"{kind.name} has a field that this version does not know"
                )
            if not known.repeated and known.number in seen:
                raise ScanError(known.group, "is there twice")
            seen.add(known.number)
            at = self.value(known, tag & 7, at, end)

    def value(self, known: _Field, wire_type: int, at: int, end: int) -> int:
        """Where a field ends whose tag ends at `at`."""
        packed = known.repeated and known.wire_type == VARINT and wire_type == LENGTH
        if wire_type != known.wire_type and not packed:
            raise ScanError(known.name, f"wire type {wire_type}; expected {known.wire_type}")
        if known.counted:
            self.take(known)
        number, at = self.varint(at, end)
        if wire_type == VARINT:
            return at
        if number > end - at:
            raise ScanError("message", f"cut short, or {known.name} has a wrong length")
        end = at + number
        if packed:
            self.packed(known, at, end)
        elif known.message:
            self.message(known.message, at, end)
        elif known.text and number > self.longest:
            raise ScanError(known.name, f"{number:,} bytes of text; at most {self.longest:,}")
        return end

    def packed(self, known: _Field, at: int, end: int) -> None:
        """Numbers one after the other. Each counts, and their field too, for it may be empty."""
        while at < end:
            self.take(known)
            _, at = self.varint(at, end)

    def take(self, known: _Field) -> None:
        left = self.left.get(known.key, 0)
        if left == 0:
            many = "more than" if known.key in self.left else "not"
            raise ScanError(known.group, f"{known.name}: {many} expected in this run")
        self.left[known.key] = left - 1

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """(the number that begins at `at`, where it ends)."""
        number = 0
        for place in range(MOST_VARINT_BYTES):
            if at + place >= end:
                raise ScanError("message", "cut short")
            byte = self.data[at + place]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, at + place + 1
        raise ScanError("message", f"a number of more than {MOST_VARINT_BYTES} bytes")
