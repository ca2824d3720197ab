"""The wire format: a payload to and from one serialised protobuf message (proto/osfl/v1/payload.proto).

Bytes from the network are hostile until `decode` has accepted them: every field is checked against what the server expects
before any of it is used, and nothing is ever unpickled.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from google.protobuf.message import DecodeError

from osfl.methods import METHODS
from osfl.payloads import Classifier, Descriptions, Payload
from osfl.v1 import payload_pb2 as pb

VERSION = 1
MAX_MAGNITUDE = 1e6

_DTYPES = {torch.float32: (pb.DTYPE_FLOAT32, "<f4"), torch.int64: (pb.DTYPE_INT64, "<i8")}


class PayloadError(ValueError):
    """A payload that is refused. Names the client and the field."""

    def __init__(self, client: str, field: str, problem: str):
        super().__init__(f"payload of {client}: {field}: {problem}")
        self.client, self.field = client, field


@dataclass(frozen=True)
class Expected:
    """What the server asked a client for; a payload that differs is refused.

    Attributes:
        classes: the run's class names; a payload holds a part of them, in this order.
        text_shape: (L, d) of a description.
        architectures: for each allowed classifier, the shape and dtype of every tensor of its state dict.
    """

    method: str
    job: str
    client: str
    classes: tuple[str, ...]
    max_bytes: int
    text_shape: tuple[int, int] | None = None
    architectures: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)


def digest(blob: bytes | memoryview) -> str:
    """SHA-256 in hex; the header that travels beside a payload carries it."""
    return hashlib.sha256(blob).hexdigest()


def encode(payload: Payload, method: str, job: str, client: str) -> bytes:
    """Serialise a payload; the same payload gives the same bytes."""
    message = pb.Payload(version=VERSION, method=method, job=job, client=client, classes=payload.classes)
    match payload:
        case Descriptions():
            message.descriptions.vectors.CopyFrom(_tensor("vectors", payload.vectors))
        case Classifier():
            message.classifier.architecture = payload.architecture
            message.classifier.state.extend(_tensor(name, value) for name, value in payload.state.items())
    return message.SerializeToString(deterministic=True)


def decode(blob: bytes | memoryview, expected: Expected, sha256: str | None = None) -> Payload:
    """Parse and validate a payload.

    Args:
        blob: the serialised message.
        expected: what was asked for.
        sha256: the digest from the header; None skips that check (bytes that this process stored itself).

    Raises:
        PayloadError: too large, wrong digest, not a payload, another schema version, method, job, client or class list,
            wrong or missing tensors, wrong shapes or dtypes, a length that does not fit the shape, NaN or infinity.
    """

    def refuse(field_name: str, problem: str) -> PayloadError:
        return PayloadError(expected.client, field_name, problem)

    if len(blob) > expected.max_bytes:
        raise refuse("size", f"{len(blob):,} bytes; the limit is {expected.max_bytes:,} (max-payload-mb)")
    if len(blob) > (most := _most_bytes(expected)):  # before parsing: small bytes can become large objects
        raise refuse("size", f"{len(blob):,} bytes; a payload of this run has at most {most:,}")
    if sha256 is not None and digest(blob) != sha256:
        raise refuse("sha256", "the bytes do not match the digest in the header")
    try:
        message = pb.Payload.FromString(bytes(blob))
    except DecodeError as error:
        raise refuse("message", f"not a payload, or cut short ({error})") from None
    message.DiscardUnknownFields()
    if message.ByteSize() != len(blob):
        raise refuse("message", "has fields this version does not know")
    for name, want in (("version", VERSION), ("method", expected.method), ("job", expected.job), ("client", expected.client)):
        if getattr(message, name) != want:
            raise refuse(name, f"{getattr(message, name)!r}; expected {want!r}")
    classes = tuple(message.classes)
    if not classes or classes != tuple(c for c in expected.classes if c in classes):
        raise refuse("classes", f"{list(classes)[:20]} must be a part of the run's classes, in their order")
    body, kind = message.WhichOneof("body"), METHODS[expected.method].payload or "nothing"
    if body != kind.lower():
        raise refuse("body", f"{body or 'nothing'}; {expected.method} expects {kind.lower()}")
    if body == "descriptions":
        assert expected.text_shape is not None
        want_shape = (len(classes), *expected.text_shape)
        vectors = _read([message.descriptions.vectors], {"vectors": (want_shape, torch.float32)}, refuse)["vectors"]
        return Descriptions(classes, vectors)
    architecture = message.classifier.architecture
    if architecture not in expected.architectures:
        raise refuse("architecture", f"{architecture[:100]!r}; this run allows {', '.join(expected.architectures)}")
    state = _read(message.classifier.state, expected.architectures[architecture], refuse)
    for name, value in state.items():
        if name.endswith("running_var") and bool((value < 0).any()):
            raise refuse(name, "a variance below zero")
    return Classifier(classes, architecture, state)


def _most_bytes(expected: Expected) -> int:
    """The size of the largest valid payload, and a little for names and lengths."""
    descriptions = len(expected.classes) * 4 * int(np.prod(expected.text_shape)) if expected.text_shape else 0
    states = [sum(int(np.prod(s)) * t.itemsize + len(n) for n, (s, t) in a.items()) for a in expected.architectures.values()]
    return max([descriptions, *states]) + sum(len(c.encode()) + 8 for c in expected.classes) + 65_536


def _tensor(name: str, value: torch.Tensor) -> pb.Tensor:
    code, numpy = _DTYPES[value.dtype]
    data = np.ascontiguousarray(value.detach().cpu().numpy(), dtype=numpy).tobytes()
    return pb.Tensor(name=name, shape=value.shape, dtype=code, codec=pb.CODEC_RAW, data=data)


Wanted = dict[str, tuple[tuple[int, ...], torch.dtype]]
Refuse = Callable[[str, str], PayloadError]


def _read(tensors: Iterable[pb.Tensor], wanted: Wanted, refuse: Refuse) -> dict[str, torch.Tensor]:
    """Exactly the wanted tensors, in their order; names, shapes, dtypes, lengths and values are checked."""
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        name = tensor.name
        if name not in wanted or name in found:
            raise refuse("tensors", f"{name[:100]!r} is not expected" + (" twice" if name in found else ""))
        shape, dtype = wanted[name]
        code, numpy = _DTYPES[dtype]
        if len(tensor.shape) != len(shape) or tuple(tensor.shape) != shape:
            raise refuse(name, f"shape {list(tensor.shape)[:8]}; expected {list(shape)}")
        if tensor.dtype != code:
            raise refuse(name, f"dtype {tensor.dtype}; expected {pb.DType.Name(code)}")
        if tensor.codec != pb.CODEC_RAW:
            raise refuse(name, f"codec {tensor.codec}; expected {pb.Codec.Name(pb.CODEC_RAW)}")
        length = int(np.prod(shape, dtype=np.int64)) * np.dtype(numpy).itemsize
        if len(tensor.data) != length:
            raise refuse(name, f"{len(tensor.data):,} bytes; its shape needs {length:,}")
        array = np.frombuffer(tensor.data, dtype=numpy).reshape(shape)
        if not np.isfinite(array).all():
            raise refuse(name, "contains NaN or infinity")
        if dtype.is_floating_point and array.size and np.abs(array).max() > MAX_MAGNITUDE:
            raise refuse(name, f"contains a number beyond {MAX_MAGNITUDE:g}; no trained weight is that large")
        found[name] = torch.from_numpy(array.copy())
    if missing := [name for name in wanted if name not in found]:
        raise refuse("tensors", f"{missing[0]!r} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
    return {name: found[name] for name in wanted}
