"""Scan of a payload's bytes in place, before protobuf parses them.

Parsing a malicious message can allocate objects of up to 130 times its size.

Protobuf's wire format is a sequence of fields. Each is a tag (number << 3 | wire type), followed by
either a number of seven bits per byte (a varint), or a length and that many bytes. The scan skips
bytes and texts by their length, and stops at the first field beyond a limit. Its cost is therefore
bounded by what is expected, not by what was received. Source: protobuf.dev, "Encoding".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

# Wire types
VARINT = 0
LENGTH = 2
MAX_VARINT_BYTES = 10
WIRE_TYPES = {
    FieldDescriptor.TYPE_BYTES: LENGTH,
    FieldDescriptor.TYPE_ENUM: VARINT,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
    FieldDescriptor.TYPE_STRING: LENGTH,
    FieldDescriptor.TYPE_UINT32: VARINT,
    FieldDescriptor.TYPE_UINT64: VARINT,
}


class ScanError(ValueError):
    """Bytes that are not an expected message, so that protobuf need not parse them.

    The error names the field.
    """

    def __init__(self, field_name: str, problem: str):
        super().__init__(field_name, problem)
        self.field = field_name
        self.problem = problem


def scan(data: bytes | memoryview, kind: Descriptor, most: Mapping[str, int], longest: int) -> None:
    """Check that `data` is a message of this kind, with no field more often than expected.

    Args:
        data: the serialized message.
        kind: its descriptor.
        most: how often a repeated field or a submessage may occur in the whole message, by
            "Message.field"; never without an entry. Any other field may occur once in its message.
        longest: upper bound on the bytes of a text.

    Raises:
        ScanError: a field is unknown, of another wire type, or occurs too often; a text is too
            long; a length exceeds the enclosing message; a varint does not end.
    """
    _Scan(data, longest, dict(most)).message(kind, 0, len(data))


@dataclass(frozen=True)
class _Field:
    """Properties of a field that the scan needs.

    Attributes:
        group: name of the field's oneof, or else of the field.
        key: "Message.field".
    """

    number: int
    name: str
    wire_type: int
    repeated: bool
    text: bool
    message: Descriptor | None
    group: str
    key: str

    @property
    def counted(self) -> bool:
        return self.repeated or self.message is not None


@cache
def _fields(kind: Descriptor) -> dict[int, _Field]:
    return {
        field.number: _Field(
            field.number,
            field.name,
            WIRE_TYPES[field.type],
            field.is_repeated,
            field.type == FieldDescriptor.TYPE_STRING,
            field.message_type,
            field.containing_oneof.name if field.containing_oneof else field.name,
            f"{kind.name}.{field.name}",
        )
        for field in kind.fields
    }


@dataclass
class _Scan:
    """A pass over a message.

    Attributes:
        remaining: how often each counted field may still occur, by "Message.field".
    """

    data: bytes | memoryview
    longest: int
    remaining: dict[str, int]

    def message(self, kind: Descriptor, at: int, end: int) -> None:
        """Scan the fields of the message in data[at:end]."""
        numbers = set[int]()
        while at < end:
            tag, at = self.varint(at, end)
            field = _fields(kind).get(tag >> 3)
            if field is None:
                raise ScanError(
                    "message", f"{kind.name} has a field that this version does not know"
                )
            if not field.repeated and field.number in numbers:
                raise ScanError(field.group, "occurs twice")
            numbers.add(field.number)
            at = self.value(field, tag & 7, at, end)

    def value(self, field: _Field, wire_type: int, at: int, end: int) -> int:
        """Scan the value of a field whose tag ends at `at`; return where the value ends."""
        packed = field.repeated and field.wire_type == VARINT and wire_type == LENGTH
        if wire_type != field.wire_type and not packed:
            raise ScanError(field.name, f"wire type {wire_type}; expected {field.wire_type}")
        if field.counted:
            self.count(field)
        number, at = self.varint(at, end)
        if wire_type == VARINT:
            return at
        if number > end - at:
            raise ScanError("message", f"cut short, or {field.name} has a wrong length")
        end = at + number
        if packed:
            self.packed(field, at, end)
        elif field.message:
            self.message(field.message, at, end)
        elif field.text and number > self.longest:
            raise ScanError(field.name, f"{number:,} bytes of text; at most {self.longest:,}")
        return end

    def packed(self, field: _Field, at: int, end: int) -> None:
        """Scan consecutive numbers. Each counts, and so does their field, which may be empty."""
        while at < end:
            self.count(field)
            _, at = self.varint(at, end)

    def count(self, field: _Field) -> None:
        """Count an occurrence of a field.

        Raises:
            ScanError: it is one too many.
        """
        remaining = self.remaining.get(field.key, 0)
        if remaining == 0:
            problem = "more often than" if field.key in self.remaining else "not"
            raise ScanError(field.group, f"{field.name}: {problem} expected in this run")
        self.remaining[field.key] = remaining - 1

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return the number that begins at `at`, and where it ends."""
        number = 0
        for place in range(MAX_VARINT_BYTES):
            if at + place >= end:
                raise ScanError("message", "cut short")
            byte = self.data[at + place]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, at + place + 1
        raise ScanError("message", f"a number of more than {MAX_VARINT_BYTES} bytes")
