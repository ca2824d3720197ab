"""The wire format: a payload as one protobuf message (proto/osfl/payload/v1/payload.proto).

Bytes from the network are hostile until `decode` has accepted them: every field is checked against
what the server expects before any of it is used, and nothing is ever unpickled.
"""

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np
import torch
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from osfl.methods import METHODS
from osfl.payload.codecs import packed, packed_size, unpacked
from osfl.payload.fields import Field, Form, Values, fields_of
from osfl.payload.kinds import Payload, kind_of
from osfl.payload.v1 import payload_pb2 as pb
from osfl.payload.wire_scan import ScanError, scan
from osfl.util.text import plain

VERSION = 1
MAX_MAGNITUDE = 1e6
# Characters of a caption or a name
MAX_TEXT = 300
# One character beyond, and Python holds the whole text at four bytes a character
WIDEST = "\uffff"
TEXT_BYTES = len(WIDEST.encode()) * MAX_TEXT
# Of a tensor, the field that they are packed in included
MAX_DIMENSIONS = 8

# A dimension may be "classes", those the client holds, or "images", as many as it says
Shape = tuple[int | str, ...]
Tensors = Mapping[str, tuple[Shape, torch.dtype]]
Bytes = bytes | memoryview

_DTYPES = {
    torch.float32: (pb.DTYPE_FLOAT32, "<f4"),
    torch.int64: (pb.DTYPE_INT64, "<i8"),
    torch.uint8: (pb.DTYPE_UINT8, "u1"),
}
_CODECS = {
    "raw": pb.CODEC_RAW,
    "float16": pb.CODEC_FLOAT16,
    "int8": pb.CODEC_INT8,
    "int4": pb.CODEC_INT4,
}


class PayloadError(ValueError):
    """A payload that is refused. Names the client and the field."""

    def __init__(self, client: str, field: str, problem: str):
        self.client = client
        self.field = plain(field)
        self.problem = plain(problem, 1000)
        # All of them, so that a worker's error crosses to this process
        super().__init__(client, self.field, self.problem)

    def __str__(self) -> str:
        return f"payload of {self.client}: {self.field}: {self.problem}"


@dataclass(frozen=True)
class Expected:
    """What the server asked a client for; a payload that differs is refused.

    Attributes:
        classes: the run's class names; a payload holds a part of them, in this order.
        tensors: shape and dtype of every tensor of the body, by field.
        architectures: for each allowed classifier, the shape and dtype of every tensor of its state
            dict.
        max_images: how many images a client may describe one by one.
        codec: of the tensors' numbers, the run's `payload-codec`.
    """

    method: str
    job: str
    client: str
    classes: tuple[str, ...]
    max_bytes: int
    tensors: Tensors = field(default_factory=dict)
    architectures: Mapping[str, Tensors] = field(default_factory=dict)
    max_images: int = 20_000
    codec: str = "raw"


def digest(blob: bytes | memoryview) -> str:
    """SHA-256 in hex; the header that travels beside a payload carries it."""
    return hashlib.sha256(blob).hexdigest()


def encode(payload: Payload, method: str, job: str, client: str, codec: str = "raw") -> bytes:
    """Serialise a payload; the same payload gives the same bytes.

    What protobuf's own serialiser gives, without its copies, for it needs four times a large
    payload's memory: a tensor's numbers go from where they are into the result.

    Raises:
        ValueError: the codec cannot hold a number.
    """
    made: type = type(payload)
    declared = fields_of(made)
    head = pb.Payload(
        version=VERSION, method=method, job=job, client=client, classes=payload.classes
    )
    kind = pb.Payload.DESCRIPTOR.fields_by_name[made.__name__.lower()]
    body = list[Bytes]()
    for item in fields(payload)[1:]:
        number = cast(Descriptor, kind.message_type).fields_by_name[item.name].number
        match getattr(payload, item.name):
            case torch.Tensor() as value:
                chosen = codec_of(codec, value.shape, value.dtype, declared[item.name])
                body += _tensor(number, item.name, value, chosen)
            case dict() as state:
                for name, value in state.items():
                    chosen = codec_of(codec, value.shape, value.dtype, declared[item.name])
                    body += _tensor(number, name, value, chosen)
            case tuple() as texts:
                for text in texts:
                    body += _field(number, pb.Texts(text=text).SerializeToString())
            case str() as text:
                body += _field(number, text.encode())
    blob = io.BytesIO()
    for part in (head.SerializeToString(deterministic=True), *_field(kind.number, *body)):
        blob.write(part)
    return blob.getvalue()


def codec_of(codec: str, shape: Sequence[int | str], dtype: torch.dtype, declared: Field) -> str:
    """Of a field's tensor.

    Whole numbers, shares of 1 and what has one dimension go as they are. Variances and deviations,
    of which whole steps would leave many 0, go in float16 at least.
    """
    if dtype != torch.float32 or len(shape) < 2 or Values.SHARES in declared.values:
        return "raw"
    if declared.values and codec != "raw":
        return "float16"
    return codec


def check_size(size: int, expected: Expected) -> None:
    """Whether a payload of `size` bytes can be what was asked for.

    Raises:
        PayloadError: it is larger than the run allows, or than its largest valid payload.
    """
    if size > expected.max_bytes:
        raise PayloadError(
            expected.client,
            "size",
            f"{size:,} bytes; the limit is {expected.max_bytes:,} (max-payload-mb)",
        )
    if size > (most := _most_bytes(expected)):
        raise PayloadError(
            expected.client, "size", f"{size:,} bytes; a payload of this run has at most {most:,}"
        )


def decode(blob: bytes | memoryview, expected: Expected, sha256: str | None = None) -> Payload:
    """Parse and validate a payload.

    In memory, at most four times its size and 6 MB; where the run has a codec also one and a half
    times its numbers in float32.

    Args:
        blob: the serialised message.
        expected: what was asked for.
        sha256: the digest from the header; None skips that check (bytes that this process stored
            itself).

    Raises:
        PayloadError: too large, wrong digest, not a payload, another schema version, method, job,
            client or class list, a field that is unknown or comes too often, wrong or missing
            tensors, wrong shapes or dtypes, a length that does not fit the shape, NaN or infinity.
    """

    def refuse(field_name: str, problem: str) -> PayloadError:
        return PayloadError(expected.client, field_name, problem)

    check_size(len(blob), expected)  # before parsing: small bytes can become large objects
    if sha256 is not None and digest(blob) != sha256:
        raise refuse("sha256", "the bytes do not match the digest in the header")
    try:
        kind = cast(Descriptor, pb.Payload.DESCRIPTOR)
        scan(blob, kind, _most_fields(expected), _longest_text(expected))
        message = pb.Payload.FromString(bytes(blob))
    except ScanError as error:
        raise refuse(error.field, error.problem) from None
    except DecodeError as error:
        raise refuse("message", f"not a payload, or cut short ({error})") from None
    del blob  # if nobody else holds it, there is room for the tensors
    for name, want in (
        ("version", VERSION),
        ("method", expected.method),
        ("job", expected.job),
        ("client", expected.client),
    ):
        if getattr(message, name) != want:
            raise refuse(name, f"{getattr(message, name)!r}; expected {want!r}")
    classes = tuple(message.classes)
    if not classes or classes != tuple(c for c in expected.classes if c in classes):
        raise refuse(
            "classes", f"{list(classes)[:20]} must be a part of the run's classes, in their order"
        )
    body = message.WhichOneof("body")
    wanted = METHODS[expected.method].payload or "nothing"
    if body != wanted.lower():
        raise refuse("body", f"{body or 'nothing'}; {expected.method} expects {wanted.lower()}")
    payload = _read_body(kind_of(wanted), getattr(message, body), classes, expected, refuse)
    _check_values(payload, expected, refuse)
    return payload


def _read_body(
    kind: type, body: Any, classes: tuple[str, ...], expected: Expected, refuse: "Refuse"
) -> Payload:
    """The dataclass `kind` from the message of the same fields."""
    wanted = _whole_shapes(body, len(classes), expected, refuse)
    values: dict[str, Any] = {}
    for name, declared in fields_of(kind).items():
        found = getattr(body, name)
        match declared.form:
            case Form.TENSOR if name in wanted:
                one = {name: wanted[name]}
                values[name] = _read([found], one, declared, expected.codec, refuse)[name]
            case Form.STATE:
                state = _state_of(body.architecture, expected, refuse)
                values[name] = _read(found, state, declared, expected.codec, refuse)
            case Form.TEXTS:
                values[name] = _read_texts(name, found, len(classes), refuse)
            case Form.TEXT:
                values[name] = found
    return cast(Payload, kind(classes, **values))


def _whole_shapes(body: Any, classes: int, expected: Expected, refuse: "Refuse") -> Tensors:
    """Shapes of numbers alone; the tensor that has one number for each image says how many."""
    for name in expected.tensors:
        if not body.HasField(name):
            raise refuse(name, "is missing")
    images = 0
    for name, (shape, dtype) in expected.tensors.items():
        if shape == ("images",):
            images = len(getattr(body, name).data) // dtype.itemsize
            if images > expected.max_images:
                raise refuse(name, f"{images:,} images; at most {expected.max_images:,}")
    size = {"classes": classes, "images": images}
    return {
        name: (_resolve(shape, size), dtype) for name, (shape, dtype) in expected.tensors.items()
    }


def _state_of(architecture: str, expected: Expected, refuse: "Refuse") -> Tensors:
    if architecture not in expected.architectures:
        raise refuse(
            "architecture",
            f"{architecture[:100]!r}; this run allows {', '.join(expected.architectures)}",
        )
    return expected.architectures[architecture]


def _read_texts(
    name: str, lists: Any, classes: int, refuse: "Refuse"
) -> tuple[tuple[str, ...], ...]:
    if len(lists) != classes:
        raise refuse(name, f"not one list for each of {classes} classes")
    return tuple(_checked_texts(name, each.text, refuse) for each in lists)


def _check_values(payload: Payload, expected: Expected, refuse: "Refuse") -> None:
    """What the numbers and texts of a payload must be beyond finite."""
    kind: type = type(payload)
    for name, declared in fields_of(kind).items():
        value = getattr(payload, name)
        match declared.form:
            case Form.TENSOR if value is not None:
                held = [expected.classes.index(c) for c in payload.classes]
                for rule in declared.values:
                    if not _keeps(rule, value, held):
                        raise refuse(name, rule.value)
            case Form.STATE:
                for tensor, numbers in value.items():
                    if tensor.endswith("running_var") and bool((numbers < 0).any()):
                        raise refuse(tensor, Values.VARIANCES.value)
            case Form.TEXTS if not all(value):
                raise refuse(name, "a class without a text; each needs at least one")
            case Form.TEXT:
                _check_text(name, value, refuse)
                if not value.strip():
                    raise refuse(name, f"{value!r}; a {kind.__name__.lower()} has a {name}")


def _keeps(rule: Values, numbers: torch.Tensor, held: list[int]) -> bool:
    """Whether a tensor of the classes with the labels `held` is as it must be."""
    match rule:
        case Values.SHARES:
            sums = numbers.sum(dim=1)
            return not bool((numbers < 0).any() or ((sums - 1).abs() > 1e-3).any())
        case Values.COUNTS:
            return not bool((numbers < 1).any() or (numbers > 10**9).any())
        case Values.LABELS:
            return bool(numbers.unique().tolist() == held)
        case Values.VARIANCES | Values.DEVIATIONS:
            return not bool((numbers < 0).any())


def _checked_texts(name: str, texts: Iterable[str], refuse: "Refuse") -> tuple[str, ...]:
    """A class's texts, each checked before the next is made."""
    found = list[str]()
    for text in texts:
        _check_text(name, text, refuse)
        found.append(text)
    return tuple(found)


def sendable(text: str) -> str:
    """What of a text a payload may hold.

    Printable, nothing beyond U+FFFF, `MAX_TEXT` characters.
    """
    return "".join(c for c in text if c.isprintable() and c <= WIDEST)[:MAX_TEXT]


def _check_text(name: str, text: str, refuse: "Refuse") -> None:
    if text != sendable(text):
        raise refuse(
            name,
            f"{text[:40]!r}: must be printable, without characters beyond U+FFFF, and have at "
            f"most {MAX_TEXT} characters",
        )


def _resolve(shape: Shape, size: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size[n] if isinstance(n, str) else n for n in shape)


def _most_fields(expected: Expected) -> dict[str, int]:
    """How often a repeated field or a submessage may come in a payload; without an entry, never.

    Of tensors one more, and of dimensions a few: the checks after parsing say which is wrong.
    """
    kind = METHODS[expected.method].payload or "nothing"
    tensors = 1 + max(len(expected.tensors), *map(len, expected.architectures.values()), 0)
    most = {
        "Payload.classes": len(expected.classes),
        f"Payload.{kind.lower()}": 1,
        "Texts.text": expected.max_images,
        "Tensor.shape": tensors * MAX_DIMENSIONS,
    }
    many = {Form.TEXTS: len(expected.classes), Form.STATE: tensors}
    for name, declared in _declared(expected).items():
        if declared.form in many:
            most[f"{kind}.{name}"] = many[declared.form]
    return most | {f"{kind}.{name}": 1 for name in expected.tensors}


def _longest_text(expected: Expected) -> int:
    """In bytes: of all names that a payload repeats, and of a text of its own."""
    repeated = (expected.method, expected.job, expected.client, *expected.classes)
    names = (*repeated, *expected.architectures, *expected.tensors)
    states = [name for state in expected.architectures.values() for name in state]
    return max(TEXT_BYTES, *(len(name.encode()) for name in (*names, *states)))


def _most_bytes(expected: Expected) -> int:
    """The size of the largest valid payload, and a little for names and lengths."""
    forms = [declared.form for declared in _declared(expected).values()]
    texts = forms.count(Form.TEXT) + forms.count(Form.TEXTS) * expected.max_images
    size = {"classes": len(expected.classes), "images": expected.max_images}
    everything = (expected.tensors, *expected.architectures.values())
    largest = max(
        number_bytes(tensors, size, expected) + sum(map(len, tensors)) for tensors in everything
    )
    names = sum(len(c.encode()) + 8 for c in expected.classes)
    return largest + texts * (TEXT_BYTES + 8) + names + 65_536


def number_bytes(tensors: Tensors, size: Mapping[str, int], expected: Expected) -> int:
    """Bytes of the tensors' numbers at most, with so many classes and images."""
    declared = _declared(expected)
    state = next((one for one in declared.values() if one.form is Form.STATE), None)
    total = 0
    for name, (shape, dtype) in tensors.items():
        count = math.prod(_resolve(shape, size))
        about = declared.get(name, state)
        codec = "raw" if about is None else codec_of(expected.codec, shape, dtype, about)
        total += packed_size(count, codec) if dtype == torch.float32 else count * dtype.itemsize
    return total


def _declared(expected: Expected) -> Mapping[str, Field]:
    """The fields of the payload that the method's clients send."""
    kind = METHODS[expected.method].payload
    return fields_of(kind_of(kind)) if kind else {}


def _field(number: int, *parts: Bytes) -> list[Bytes]:
    """A field of protobuf's wire format whose length precedes it: a message, a string, bytes."""
    return [_varint(number << 3 | 2), _varint(sum(len(part) for part in parts)), *parts]


def _varint(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _tensor(number: int, name: str, value: torch.Tensor, codec: str) -> list[Bytes]:
    """A field of type Tensor.

    Its data come last, as their number says; of none there is no field.
    """
    code, numpy = _DTYPES[value.dtype]
    about = pb.Tensor(
        name=name, shape=value.shape, dtype=code, codec=_CODECS[codec]
    ).SerializeToString()
    flat = np.ascontiguousarray(value.detach().cpu().numpy(), dtype=numpy).reshape(-1)
    data = packed(flat, codec) if value.is_floating_point() else flat.view(np.uint8).data
    return _field(number, about, *(_field(pb.Tensor.DATA_FIELD_NUMBER, data) if len(data) else []))


Refuse = Callable[[str, str], PayloadError]


def _read(
    tensors: Iterable[pb.Tensor], wanted: Tensors, declared: Field, codec: str, refuse: Refuse
) -> dict[str, torch.Tensor]:
    """Exactly the wanted tensors of a field, in their order.

    Names, shapes, dtypes, codecs, lengths and values are checked.
    """
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        name = tensor.name
        if name not in wanted or name in found:
            raise refuse(
                "tensors", f"{name[:100]!r} is not expected" + (" twice" if name in found else "")
            )
        shape = _resolve(wanted[name][0], {})
        dtype = wanted[name][1]
        code, numpy = _DTYPES[dtype]
        if len(tensor.shape) != len(shape) or tuple(tensor.shape) != shape:
            raise refuse(name, f"shape {list(tensor.shape)[:8]}; expected {list(shape)}")
        if tensor.dtype != code:
            raise refuse(name, f"dtype {tensor.dtype}; expected {pb.DType.Name(code)}")
        chosen = codec_of(codec, shape, dtype, declared)
        if tensor.codec != _CODECS[chosen]:
            wanted_codec = pb.Codec.Name(_CODECS[chosen])
            raise refuse(name, f"codec {tensor.codec}; expected {wanted_codec}")
        count = math.prod(shape)
        if dtype == torch.float32:
            try:
                numbers = unpacked(tensor.data, count, chosen)
            except ValueError as error:
                raise refuse(name, str(error)) from None
        else:
            if len(tensor.data) != (length := count * dtype.itemsize):
                raise refuse(name, f"{len(tensor.data):,} bytes; its shape needs {length:,}")
            numbers = np.frombuffer(tensor.data, numpy)
        array = numbers.reshape(shape)
        if dtype.is_floating_point and array.size:
            # Both NaN if one number is; nothing of the array's size is made.
            low = float(array.min())
            high = float(array.max())
            if not math.isfinite(low) or not math.isfinite(high):
                raise refuse(name, "contains NaN or infinity")
            if max(-low, high) > MAX_MAGNITUDE:
                raise refuse(
                    name,
                    f"contains a number beyond {MAX_MAGNITUDE:g}; no trained weight is that large",
                )
        # What protobuf holds cannot be written to
        found[name] = torch.from_numpy(array if array.flags.writeable else array.copy())
    if missing := [name for name in wanted if name not in found]:
        raise refuse(
            "tensors",
            f"{missing[0]!r} is missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else ""),
        )
    return {name: found[name] for name in wanted}
