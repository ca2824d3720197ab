"""The wire format: a payload as one protobuf message (proto/osfl/payload/v1/payload.proto).

Bytes from the network are untrusted until `decode` accepts them: it checks every field against what
the server expects before any of it is used. Nothing is ever unpickled.
"""

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from osfl.methods import METHODS
from osfl.payload.codecs import pack, packed_size, unpack
from osfl.payload.fields import Field, Form, Values, fields_of
from osfl.payload.kinds import KINDS, Joint, Masked, Payload, Sent, kind_of
from osfl.payload.v1 import payload_pb2 as pb
from osfl.payload.wire_scan import ScanError, scan
from osfl.util.text import sanitize

VERSION = 1
# Of a number, or of the mean over the images of a sum
MAX_MAGNITUDE = 1e6
MAX_COUNT = 10**9
# Characters of a caption or a name
MAX_TEXT = 300
# With a single character beyond this one, Python stores a text at four bytes per character
WIDEST = "\uffff"
TEXT_BYTES = len(WIDEST.encode()) * MAX_TEXT
# Dimensions of a tensor, plus one for the packed field that holds them
MAX_DIMENSIONS = 8

# A dimension may be "classes", the number of classes that the client holds, or "images", the number
# of images that it describes
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
    """A refused payload. The error names the client and the field."""

    def __init__(self, client: str, field: str, problem: str):
        self.client = client
        self.field = sanitize(field)
        self.problem = sanitize(problem, 1000)
        # With all three as arguments, the error of a worker process can be unpickled here
        super().__init__(client, self.field, self.problem)

    def __str__(self) -> str:
        return f"payload of {self.client}: {self.field}: {self.problem}"


@dataclass(frozen=True)
class Expected:
    """The server's expectations of a client's payload. A payload that differs is refused.

    Attributes:
        classes: the run's class names; a payload holds a subset of them, in this order.
        tensors: shape and dtype of every tensor of the body, by field.
        architectures: for each allowed classifier, the shape and dtype of every tensor of its state
            dict.
        max_images: upper bound on the images that a client may describe one by one.
        codec: the run's `payload-codec`.
        parts: what is expected of each part of a joint payload, whose `method` joins theirs.
        masked: whether the payload is a summand of a secure sum, whose classes are the run's.
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
    parts: tuple["Expected", ...] = ()
    masked: bool = False


def joint_expected(kind: str, parts: Mapping[str, Expected]) -> Expected:
    """Return what is expected of a joint payload.

    Args:
        kind: the methods, joined.
        parts: of one run and client, by method.
    """
    return replace(next(iter(parts.values())), method=kind, parts=tuple(parts.values()))


def digest(blob: bytes | memoryview) -> str:
    """Return the SHA-256 in hex, which the header beside a payload states."""
    return hashlib.sha256(blob).hexdigest()


def encode(payload: Payload, method: str, job: str, client: str, codec: str = "raw") -> bytes:
    """Serialize a payload; the same payload gives the same bytes.

    The bytes equal those of protobuf's own serializer, which would need four times the memory of a
    large payload. Here a tensor's numbers are copied once, into the result.

    Raises:
        ValueError: a number is too large for the codec, or not finite.
    """
    kind: type = type(payload)
    declared = fields_of(kind)
    head = pb.Payload(
        version=VERSION, method=method, job=job, client=client, classes=payload.classes
    )
    body_field = pb.Payload.DESCRIPTOR.fields_by_name[kind.__name__.lower()]
    body = list[Bytes]()
    for item in fields(payload)[1:]:
        number = cast(Descriptor, body_field.message_type).fields_by_name[item.name].number
        match getattr(payload, item.name):
            case torch.Tensor() as value:
                tensor_codec = codec_of(codec, value.shape, value.dtype, declared[item.name])
                body += _tensor(number, item.name, value, tensor_codec)
            case dict() as state:
                for name, value in state.items():
                    tensor_codec = codec_of(codec, value.shape, value.dtype, declared[item.name])
                    body += _tensor(number, name, value, tensor_codec)
            case tuple() as texts:
                for text in texts:
                    body += _field(number, pb.Texts(text=text).SerializeToString())
            case str() as text:
                body += _field(number, text.encode())
    blob = io.BytesIO()
    for part in (head.SerializeToString(deterministic=True), *_field(body_field.number, *body)):
        blob.write(part)
    return blob.getvalue()


def encode_joint(
    payloads: Mapping[str, Payload], codecs: Mapping[str, str], job: str, client: str
) -> bytes:
    """Serialize several payloads of one client as one message.

    Args:
        payloads: by method.
        codecs: the codec of each.

    Raises:
        ValueError: they are of different classes, or as `encode`.
    """
    kind = "+".join(payloads)
    first, *others = [payload.classes for payload in payloads.values()]
    if any(classes != first for classes in others):
        raise ValueError(f"the payloads of {kind} must be of the same classes")
    head = pb.Payload(version=VERSION, method=kind, job=job, client=client, classes=first)
    body = list[Bytes]()
    for method, payload in payloads.items():
        part = encode(payload, method, job, client, codecs[method])
        body += _field(pb.Joint.PART_FIELD_NUMBER, part)
    number = pb.Payload.DESCRIPTOR.fields_by_name["joint"].number
    return b"".join((head.SerializeToString(deterministic=True), *_field(number, *body)))


def codec_of(codec: str, shape: Sequence[int | str], dtype: torch.dtype, declared: Field) -> str:
    """Return the codec of one tensor in a run with this `payload-codec`.

    Integers, shares that sum to 1, and tensors of one dimension are sent raw. Variances and
    deviations need at least float16, because the uniform steps of int8 and int4 would round many of
    them to 0.
    """
    if dtype != torch.float32 or len(shape) < 2 or Values.SHARES in declared.values:
        return "raw"
    if {Values.VARIANCES, Values.DEVIATIONS} & set(declared.values) and codec != "raw":
        return "float16"
    return codec


def check_size(size: int, expected: Expected) -> None:
    """Check that a payload of `size` bytes can be valid.

    Raises:
        PayloadError: it is larger than the run allows, or than the largest valid payload.
    """
    if size > expected.max_bytes:
        raise PayloadError(
            expected.client,
            "size",
            f"{size:,} bytes; the limit is {expected.max_bytes:,} (max-payload-mb)",
        )
    if size > (limit := _max_payload_bytes(expected)):
        raise PayloadError(
            expected.client, "size", f"{size:,} bytes; a payload of this run has at most {limit:,}"
        )


def decode(blob: bytes | memoryview, expected: Expected, sha256: str | None = None) -> Sent:
    """Parse and validate a payload.

    Peak memory is at most four times the payload's size plus 6 MB; with a codec also one and a half
    times the size of its numbers in float32.

    Args:
        blob: the serialized message.
        expected: what the payload must match.
        sha256: the digest that the header states; None skips this check, for bytes that this
            process stored itself.

    Raises:
        PayloadError: the payload is too large or malformed, or its digest is wrong; its schema
            version, method, job, client or class list is another; a field is unknown or occurs too
            often; a tensor is missing or unexpected, has a wrong shape, dtype or length, or
            contains NaN or infinity.
    """

    def refuse(field_name: str, problem: str) -> PayloadError:
        return PayloadError(expected.client, field_name, problem)

    # Before parsing, because few bytes can become large objects
    check_size(len(blob), expected)
    if sha256 is not None and digest(blob) != sha256:
        raise refuse("sha256", "the bytes do not match the digest in the header")
    message = _parse(blob, expected, refuse)
    # Unless the caller keeps it, this makes room for the tensors
    del blob
    classes = _check_header(message, expected, refuse)
    body = message.WhichOneof("body")
    kind = _kind_name(expected)
    if body != kind.lower():
        raise refuse("body", f"{body or 'nothing'}; {expected.method} expects {kind.lower()}")
    if expected.parts:
        return _read_joint(message.joint, classes, expected, refuse)
    payload = _read_body(kind_of(kind), getattr(message, body), classes, expected, refuse)
    _check_values(payload, expected, refuse)
    return payload


def decode_trusted(blob: bytes, method: str, classes: tuple[str, ...]) -> Payload:
    """Parse a payload of tensors that this process encoded and stored itself.

    Args:
        classes: all classes of the run.
    """
    message = pb.Payload.FromString(blob)
    kind = METHODS[method].payload or "nothing"
    body = getattr(message, kind.lower())
    dtypes = {code: dtype for dtype, (code, _) in _DTYPES.items()}
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for name in fields_of(kind_of(kind)):
        if body.HasField(name):
            tensor = getattr(body, name)
            tensors[name] = (tuple(tensor.shape), dtypes[tensor.dtype])
    expected = Expected(method, message.job, message.client, classes, len(blob), tensors)
    return cast(Payload, decode(blob, expected))


def _read_joint(
    body: pb.Joint, classes: tuple[str, ...], expected: Expected, refuse: "Refuse"
) -> Joint:
    """Return the parts of a joint payload, each parsed and validated by itself."""
    if len(body.part) != len(expected.parts):
        raise refuse("joint", f"{len(body.part)} parts; expected {len(expected.parts)}")
    parts: dict[str, Payload] = {}
    for blob, part in zip(body.part, expected.parts, strict=True):
        try:
            # Limit and job are those of the whole message, which may be of an earlier run
            in_message = replace(part, max_bytes=expected.max_bytes, job=expected.job)
            payload = cast(Payload, decode(blob, in_message))
        except PayloadError as error:
            raise refuse(f"{part.method}: {error.field}", error.problem) from None
        if payload.classes != classes:
            raise refuse(f"{part.method}: classes", "must be those of the whole payload")
        parts[part.method] = payload
    return Joint(classes, parts)


def _parse(blob: bytes | memoryview, expected: Expected, refuse: "Refuse") -> pb.Payload:
    try:
        descriptor = cast(Descriptor, pb.Payload.DESCRIPTOR)
        scan(blob, descriptor, _max_fields(expected), _longest_text(expected))
        return pb.Payload.FromString(bytes(blob))
    except ScanError as error:
        raise refuse(error.field, error.problem) from None
    except DecodeError as error:
        raise refuse("message", f"not a payload, or cut short ({error})") from None


def _check_header(message: pb.Payload, expected: Expected, refuse: "Refuse") -> tuple[str, ...]:
    """Check the message's fields beside its body; return the classes."""
    for name, value in (
        ("version", VERSION),
        ("method", expected.method),
        ("job", expected.job),
        ("client", expected.client),
    ):
        if getattr(message, name) != value:
            raise refuse(name, f"{getattr(message, name)!r}; expected {value!r}")
    classes = tuple(message.classes)
    if not classes or classes != tuple(c for c in expected.classes if c in classes):
        raise refuse(
            "classes", f"{list(classes)[:20]} must be a subset of the run's classes, in their order"
        )
    if expected.masked and classes != expected.classes:
        raise refuse("classes", "must be all classes of the run in a secure sum")
    return classes


def _read_body(
    kind: type, body: Any, classes: tuple[str, ...], expected: Expected, refuse: "Refuse"
) -> Payload:
    """Return the dataclass `kind`, read from the message with the same fields."""
    tensors = _resolve_shapes(body, len(classes), expected, refuse)
    values: dict[str, Any] = {}
    for name, declared in fields_of(kind).items():
        message = getattr(body, name)
        match declared.form:
            case Form.TENSOR if name in tensors:
                tensor = {name: tensors[name]}
                values[name] = _read([message], tensor, declared, expected.codec, refuse)[name]
            case Form.STATE:
                state = _state_of(body.architecture, expected, refuse)
                values[name] = _read(message, state, declared, expected.codec, refuse)
            case Form.TEXTS:
                values[name] = _read_texts(name, message, len(classes), refuse)
            case Form.TEXT:
                values[name] = message
    return cast(Payload, kind(classes, **values))


def _resolve_shapes(body: Any, classes: int, expected: Expected, refuse: "Refuse") -> Tensors:
    """Replace the names in expected shapes by numbers.

    The number of images is the length of the tensor whose shape is ("images",).
    """
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
        raise refuse(name, f"must have one list for each of {classes} classes")
    return tuple(_checked_texts(name, message.text, refuse) for message in lists)


def _check_values(payload: Payload, expected: Expected, refuse: "Refuse") -> None:
    """Check the declared constraints on a payload's numbers and texts."""
    kind: type = type(payload)
    for name, declared in fields_of(kind).items():
        value = getattr(payload, name)
        match declared.form:
            case Form.TENSOR if value is not None:
                labels = [expected.classes.index(c) for c in payload.classes]
                counts = getattr(payload, "counts", None)
                for rule in declared.values:
                    if not _satisfies(value, rule, labels, counts):
                        raise refuse(name, rule.value)
            case Form.STATE:
                for tensor, numbers in value.items():
                    if tensor.endswith("running_var") and bool((numbers < 0).any()):
                        raise refuse(tensor, Values.VARIANCES.value)
            case Form.TEXTS if not all(value):
                raise refuse(name, "a class without a text; each must have at least one")
            case Form.TEXT:
                _check_text(name, value, refuse)
                if not value.strip():
                    raise refuse(name, f"{value!r}; a {kind.__name__.lower()} must have a {name}")


def _satisfies(
    numbers: torch.Tensor, rule: Values, labels: list[int], counts: torch.Tensor | None
) -> bool:
    """Return whether a tensor satisfies a constraint.

    Args:
        labels: those of the payload's classes.
        counts: the images of each class that the payload states, if it states them.
    """
    match rule:
        case Values.SHARES:
            sums = numbers.sum(dim=-1)
            return not bool((numbers < 0).any() or ((sums - 1).abs() > 1e-3).any())
        case Values.COUNTS:
            return not bool((numbers < 1).any() or (numbers > MAX_COUNT).any())
        case Values.SUMS:
            assert counts is not None, "fields_of requires counts beside sums"
            # A tensor of one dimension is a sum over all classes
            images = counts if numbers.dim() > 1 else counts.sum()[None]
            # Without a copy of the numbers
            low, high = numbers.reshape(len(images), -1).aminmax(dim=1)
            largest = torch.maximum(-low, high).double()
            return bool((largest <= MAX_MAGNITUDE * images.double()).all())
        case Values.LABELS:
            return bool(numbers.unique().tolist() == labels)
        case Values.VARIANCES | Values.DEVIATIONS:
            return not bool((numbers < 0).any())


def _checked_texts(name: str, texts: Iterable[str], refuse: "Refuse") -> tuple[str, ...]:
    """Return a class's texts, each checked before protobuf makes the next."""
    accepted = list[str]()
    for text in texts:
        _check_text(name, text, refuse)
        accepted.append(text)
    return tuple(accepted)


def sanitize_caption(text: str) -> str:
    """Reduce a text to what a payload may contain.

    That is at most `MAX_TEXT` printable characters up to U+FFFF.
    """
    return "".join(c for c in text if c.isprintable() and c <= WIDEST)[:MAX_TEXT]


def _check_text(name: str, text: str, refuse: "Refuse") -> None:
    if text != sanitize_caption(text):
        raise refuse(
            name,
            f"{text[:40]!r}: must be printable, without characters beyond U+FFFF, and at most "
            f"{MAX_TEXT} characters long",
        )


def _resolve(shape: Shape, size: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size[n] if isinstance(n, str) else n for n in shape)


def _max_fields(expected: Expected) -> dict[str, int]:
    """Return how often each repeated field or submessage may occur in a payload.

    A field without an entry may not occur. One tensor and a few dimensions more than expected are
    allowed, so that the checks after parsing can say which one is wrong.
    """
    kind = _kind_name(expected)
    if expected.parts:
        parts = {"Payload.joint": 1, "Joint.part": len(expected.parts)}
        return {"Payload.classes": len(expected.classes), **parts}
    tensors = 1 + max(len(expected.tensors), *map(len, expected.architectures.values()), 0)
    limits = {
        "Payload.classes": len(expected.classes),
        f"Payload.{kind.lower()}": 1,
        "Texts.text": expected.max_images,
        "Tensor.shape": tensors * MAX_DIMENSIONS,
    }
    repeats = {Form.TEXTS: len(expected.classes), Form.STATE: tensors}
    for name, declared in _declared(expected).items():
        if declared.form in repeats:
            limits[f"{kind}.{name}"] = repeats[declared.form]
    return limits | {f"{kind}.{name}": 1 for name in expected.tensors}


def _longest_text(expected: Expected) -> int:
    """Return the size in bytes of the longest name or text that a valid payload can contain."""
    repeated = (expected.method, expected.job, expected.client, *expected.classes)
    names = (*repeated, *expected.architectures, *expected.tensors)
    states = [name for state in expected.architectures.values() for name in state]
    return max(TEXT_BYTES, *(len(name.encode()) for name in (*names, *states)))


def _max_payload_bytes(expected: Expected) -> int:
    """Return the size of the largest valid payload, with a margin for names and lengths."""
    if expected.parts:
        return sum(map(_max_payload_bytes, expected.parts)) + 65_536
    forms = [declared.form for declared in _declared(expected).values()]
    texts = forms.count(Form.TEXT) + forms.count(Form.TEXTS) * expected.max_images
    size = {"classes": len(expected.classes), "images": expected.max_images}
    alternatives = (expected.tensors, *expected.architectures.values())
    largest = max(
        number_bytes(tensors, size, expected) + sum(map(len, tensors)) for tensors in alternatives
    )
    names = sum(len(c.encode()) + 8 for c in expected.classes)
    return largest + texts * (TEXT_BYTES + 8) + names + 65_536


def number_bytes(tensors: Tensors, size: Mapping[str, int], expected: Expected) -> int:
    """Return an upper bound on the bytes of the tensors' numbers.

    Args:
        size: the number of "classes" and of "images".
    """
    declared = _declared(expected)
    state = next((item for item in declared.values() if item.form is Form.STATE), None)
    total = 0
    for name, (shape, dtype) in tensors.items():
        count = math.prod(_resolve(shape, size))
        declaration = declared.get(name, state)
        codec = "raw"
        if declaration is not None:
            codec = codec_of(expected.codec, shape, dtype, declaration)
        total += packed_size(count, codec) if dtype == torch.float32 else count * dtype.itemsize
    return total


def _declared(expected: Expected) -> Mapping[str, Field]:
    """Return the fields of the payload that the method's clients send."""
    kind = _kind_name(expected)
    return fields_of(KINDS[kind]) if kind in KINDS else {}


def _kind_name(expected: Expected) -> str:
    """Return the class of the payload that is expected; the body's field has it in lower case."""
    if expected.parts:
        return Joint.__name__
    if expected.masked:
        return Masked.__name__
    return METHODS[expected.method].payload or "nothing"


def _field(number: int, *parts: Bytes) -> list[Bytes]:
    """Encode a length-delimited field of protobuf's wire format: a message, a string or bytes."""
    return [_varint(number << 3 | 2), _varint(sum(len(part) for part in parts)), *parts]


def _varint(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _tensor(number: int, name: str, value: torch.Tensor, codec: str) -> list[Bytes]:
    """Encode a field of type Tensor.

    The data come last, because protobuf writes fields in the order of their numbers. An empty
    tensor has no data field.
    """
    code, numpy_dtype = _DTYPES[value.dtype]
    header = pb.Tensor(
        name=name, shape=value.shape, dtype=code, codec=_CODECS[codec]
    ).SerializeToString()
    flat = np.ascontiguousarray(value.detach().cpu().numpy(), dtype=numpy_dtype).reshape(-1)
    data = pack(flat, codec) if value.is_floating_point() else flat.view(np.uint8).data
    return _field(number, header, *(_field(pb.Tensor.DATA_FIELD_NUMBER, data) if len(data) else []))


Refuse = Callable[[str, str], PayloadError]


def _read(
    messages: Iterable[pb.Tensor], expected: Tensors, declared: Field, codec: str, refuse: Refuse
) -> dict[str, torch.Tensor]:
    """Return exactly the expected tensors of a field, in their order."""
    tensors: dict[str, torch.Tensor] = {}
    for message in messages:
        name = message.name
        if name not in expected or name in tensors:
            raise refuse(
                "tensors",
                f"{name[:100]!r} is not expected" + (" twice" if name in tensors else ""),
            )
        shape, dtype = expected[name]
        tensors[name] = _read_tensor(
            message, _resolve(shape, {}), dtype, codec_of(codec, shape, dtype, declared), refuse
        )
        # A sum is held against its images later (Values.SUMS)
        largest = MAX_MAGNITUDE * (MAX_COUNT if Values.SUMS in declared.values else 1)
        _check_finite(name, tensors[name], largest, refuse)
    if missing := [name for name in expected if name not in tensors]:
        raise refuse(
            "tensors",
            f"{missing[0]!r} is missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else ""),
        )
    return {name: tensors[name] for name in expected}


def _read_tensor(
    message: pb.Tensor, shape: tuple[int, ...], dtype: torch.dtype, codec: str, refuse: Refuse
) -> torch.Tensor:
    """Return a tensor after checking its shape, dtype, codec and length."""
    name = message.name
    code = _DTYPES[dtype][0]
    if len(message.shape) != len(shape) or tuple(message.shape) != shape:
        raise refuse(name, f"shape {list(message.shape)[:8]}; expected {list(shape)}")
    if message.dtype != code:
        raise refuse(name, f"dtype {message.dtype}; expected {pb.DType.Name(code)}")
    if message.codec != _CODECS[codec]:
        raise refuse(name, f"codec {message.codec}; expected {pb.Codec.Name(_CODECS[codec])}")
    array = _numbers(message, math.prod(shape), dtype, codec, refuse).reshape(shape)
    # An array over protobuf's own bytes is read-only
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _numbers(
    message: pb.Tensor, count: int, dtype: torch.dtype, codec: str, refuse: Refuse
) -> np.ndarray:
    if dtype == torch.float32:
        try:
            return unpack(message.data, count, codec)
        except ValueError as error:
            raise refuse(message.name, str(error)) from None
    length = count * dtype.itemsize
    if len(message.data) != length:
        raise refuse(message.name, f"{len(message.data):,} bytes; its shape needs {length:,}")
    return np.frombuffer(message.data, _DTYPES[dtype][1])


def _check_finite(name: str, tensor: torch.Tensor, largest: float, refuse: Refuse) -> None:
    """Check that a tensor's real numbers are finite, and at most `largest` in magnitude."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # Both are NaN if any number is. No temporary array of the same size is needed.
    array = tensor.numpy()
    low = float(array.min())
    high = float(array.max())
    if not math.isfinite(low) or not math.isfinite(high):
        raise refuse(name, "contains NaN or infinity")
    if max(-low, high) > largest:
        raise refuse(name, f"contains a number beyond {largest:g}; no trained weight is that large")
