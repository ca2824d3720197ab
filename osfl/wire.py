"""The wire format: a payload to and from one serialised protobuf message (proto/osfl/v1/payload.proto).

Bytes from the network are hostile until `decode` has accepted them: every field is checked against what the server expects
before any of it is used, and nothing is ever unpickled.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from osfl import payloads
from osfl.methods import METHODS
from osfl.payloads import Captions, Classifier, Concepts, Domain, Mixtures, Payload
from osfl.v1 import payload_pb2 as pb

VERSION = 1
MAX_MAGNITUDE = 1e6
MAX_TEXT = 300  # characters of a caption or a name

Shape = tuple[int | str, ...]  # a dimension may be "classes", those the client holds, or "images", as many as it says
Tensors = Mapping[str, tuple[Shape, torch.dtype]]

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
        tensors: shape and dtype of every tensor of the body, by field.
        architectures: for each allowed classifier, the shape and dtype of every tensor of its state dict.
        max_images: how many images a client may describe one by one.
    """

    method: str
    job: str
    client: str
    classes: tuple[str, ...]
    max_bytes: int
    tensors: Tensors = field(default_factory=dict)
    architectures: Mapping[str, Tensors] = field(default_factory=dict)
    max_images: int = 20_000


def digest(blob: bytes | memoryview) -> str:
    """SHA-256 in hex; the header that travels beside a payload carries it."""
    return hashlib.sha256(blob).hexdigest()


def encode(payload: Payload, method: str, job: str, client: str) -> bytes:
    """Serialise a payload; the same payload gives the same bytes."""
    message = pb.Payload(version=VERSION, method=method, job=job, client=client, classes=payload.classes)
    body = getattr(message, type(payload).__name__.lower())
    body.SetInParent()
    for item in fields(payload)[1:]:
        match getattr(payload, item.name):
            case torch.Tensor() as value:
                _fill(getattr(body, item.name), item.name, value)
            case dict() as state:
                for name, value in state.items():
                    _fill(getattr(body, item.name).add(), name, value)
            case tuple() as texts:
                getattr(body, item.name).extend(pb.Texts(text=text) for text in texts)
            case str() as text:
                setattr(body, item.name, text)
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
    classes = tuple(message.classes[: len(expected.classes) + 1])
    if not classes or classes != tuple(c for c in expected.classes if c in classes):
        raise refuse("classes", f"{list(classes)[:20]} must be a part of the run's classes, in their order")
    body, kind = message.WhichOneof("body"), METHODS[expected.method].payload or "nothing"
    if body != kind.lower():
        raise refuse("body", f"{body or 'nothing'}; {expected.method} expects {kind.lower()}")
    payload = _read_body(getattr(payloads, kind), getattr(message, body), classes, expected, refuse)
    _check_values(payload, expected, refuse)
    return payload


def _read_body(kind: type, body: Any, classes: tuple[str, ...], expected: Expected, refuse: "Refuse") -> Payload:
    """The dataclass `kind` from the message of the same fields."""
    if kind is Classifier:
        architecture = body.architecture
        if architecture not in expected.architectures:
            raise refuse("architecture", f"{architecture[:100]!r}; this run allows {', '.join(expected.architectures)}")
        return Classifier(classes, architecture, _read(body.state, expected.architectures[architecture], refuse))
    if kind is Captions:
        if len(body.texts) != len(classes) or sum(len(texts.text) for texts in body.texts) > expected.max_images:
            raise refuse(
                "texts", f"not one list for each of {len(classes)} classes, or more than {expected.max_images:,} texts"
            )
        return Captions(classes, tuple(tuple(texts.text) for texts in body.texts))
    if kind is Domain:
        return Domain(classes, body.name)
    for item in fields(kind)[1:]:
        if item.name not in expected.tensors and body.HasField(item.name):
            raise refuse(item.name, "is not expected in this run")
        if item.name in expected.tensors and not body.HasField(item.name):
            raise refuse(item.name, "is missing")
    images = len(body.labels.data) // 8 if kind is Concepts else 0
    if images > expected.max_images:
        raise refuse("labels", f"{images:,} images; at most {expected.max_images:,}")
    size = {"classes": len(classes), "images": images}
    wanted = {name: (_resolve(shape, size), dtype) for name, (shape, dtype) in expected.tensors.items()}
    return kind(classes, **{name: _read([getattr(body, name)], {name: want}, refuse)[name] for name, want in wanted.items()})


def _check_values(payload: Payload, expected: Expected, refuse: "Refuse") -> None:
    """What the numbers and texts of a kind must be beyond finite."""
    match payload:
        case Classifier():
            for name, value in payload.state.items():
                if name.endswith("running_var") and bool((value < 0).any()):
                    raise refuse(name, "a variance below zero")
        case Mixtures():
            for name in ("weights", "component_weights"):
                shares = getattr(payload, name)
                if shares is not None and (bool((shares < 0).any()) or bool(((shares.sum(dim=1) - 1).abs() > 1e-3).any())):
                    raise refuse(name, "must not be negative, and sum to 1 in every class")
            if payload.component_variances is not None and bool((payload.component_variances < 0).any()):
                raise refuse("component_variances", "a variance below zero")
        case Concepts():
            held = [expected.classes.index(name) for name in payload.classes]
            if sorted(set(payload.labels.tolist())) != held:
                raise refuse("labels", "must be the labels of the payload's classes, each at least once")
            if bool((payload.deviations < 0).any()):
                raise refuse("deviations", "a standard deviation below zero")
        case Captions():
            if not all(payload.texts):
                raise refuse("texts", "a class without a text; each needs at least one")
            _check_texts("texts", [text for texts in payload.texts for text in texts], refuse)
        case Domain():
            _check_texts("name", [payload.name], refuse)


def _check_texts(name: str, texts: Iterable[str], refuse: "Refuse") -> None:
    for text in texts:
        if len(text) > MAX_TEXT or not text.isprintable():
            raise refuse(name, f"{text[:40]!r}: must be printable and have at most {MAX_TEXT} characters")


def _resolve(shape: Shape, size: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size[n] if isinstance(n, str) else n for n in shape)


def _most_bytes(expected: Expected) -> int:
    """The size of the largest valid payload, and a little for names and lengths."""
    if METHODS[expected.method].payload in ("Captions", "Domain"):
        texts = expected.max_images if METHODS[expected.method].payload == "Captions" else 1
        return texts * (4 * MAX_TEXT + 8) + 65_536
    size = {"classes": len(expected.classes), "images": expected.max_images}

    def most(tensors: Tensors) -> int:
        return sum(math.prod(_resolve(s, size)) * dtype.itemsize + len(name) for name, (s, dtype) in tensors.items())

    largest = max([most(expected.tensors), *map(most, expected.architectures.values())])
    return largest + sum(len(c.encode()) + 8 for c in expected.classes) + 65_536


def _fill(tensor: pb.Tensor, name: str, value: torch.Tensor) -> None:
    """In place: a message that is copied into another holds a large payload twice."""
    tensor.dtype, numpy = _DTYPES[value.dtype]
    tensor.name, tensor.codec = name, pb.CODEC_RAW
    tensor.shape.extend(value.shape)
    tensor.data = np.ascontiguousarray(value.detach().cpu().numpy(), dtype=numpy).tobytes()


Refuse = Callable[[str, str], PayloadError]


def _read(tensors: Iterable[pb.Tensor], wanted: Tensors, refuse: Refuse) -> dict[str, torch.Tensor]:
    """Exactly the wanted tensors, in their order; names, shapes, dtypes, lengths and values are checked."""
    found: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        name = tensor.name
        if name not in wanted or name in found:
            raise refuse("tensors", f"{name[:100]!r} is not expected" + (" twice" if name in found else ""))
        shape, dtype = _resolve(wanted[name][0], {}), wanted[name][1]
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
