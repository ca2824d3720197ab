"""How a payload declares its fields: a tensor's shape and dtype, and what its numbers must be.

A payload is a frozen dataclass in osfl/payload/kinds.py, whose first field is `classes`. What
server_app/expected.py and osfl/payload/wire.py know of a kind, they read from its declaration here.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

# What the dimensions of shapes are. A client says "classes" and "images"; the run gives the others,
# as far as it has them (server_app/expected.py).
DIMENSIONS = {
    "classes": "classes that the client holds",
    "images": "images that the client describes one by one",
    "L": "tokens of a text condition",
    "d": "width of a text condition",
    "c": "channels of a latent",
    "h": "height of a latent",
    "w": "width of a latent",
    "2e": "width of unCLIP's image condition: of an image embedding, twice",
    "f": "width of the features before a classifier's last layer",
    "K": "components of FedPFT's mixture",
    "v": "variances of such a component: one for all features, or one a feature",
    "J": "Espresso's clusters of a class",
    "p": "learned vectors: one for every token of a condition, or one for all",
    "o": "vectors that a class adds to its domain's: one; a run without them has no o",
    "M": "components of Espresso's mixture; a run without it has no M",
    "K + 1": "FedDISC's clusters of a class, and their mean",
}
CLIENTS_OWN = ("classes", "images")


@dataclass(frozen=True)
class Shape:
    """The dimensions of a payload's tensor: names of `DIMENSIONS`, or numbers.

    A field with several shapes has the first whose dimensions the run has. A field that may be None
    is left out of a run that has none of them.
    """

    dimensions: tuple[int | str, ...]
    dtype: torch.dtype

    def __init__(self, *dimensions: int | str, dtype: torch.dtype = torch.float32):
        object.__setattr__(self, "dimensions", dimensions)
        object.__setattr__(self, "dtype", dtype)


class Values(Enum):
    """What a tensor's numbers must be beyond finite. The text is what a refusal says."""

    SHARES = "must not be negative, and sum to 1 in every class"
    VARIANCES = "a variance below zero"
    DEVIATIONS = "a standard deviation below zero"
    COUNTS = "must be at least 1, and no more than 1,000,000,000"
    LABELS = "must be the labels of the payload's classes, each at least once"


class Form(Enum):
    """What a field of a payload is, by its type."""

    TENSOR = "torch.Tensor, with a Shape"
    STATE = "dict[str, torch.Tensor], beside a field `architecture`"
    TEXTS = "tuple[tuple[str, ...], ...], of every class"
    TEXT = "str"


_FORMS: dict[Any, Form] = {
    torch.Tensor: Form.TENSOR,
    dict[str, torch.Tensor]: Form.STATE,
    tuple[tuple[str, ...], ...]: Form.TEXTS,
    str: Form.TEXT,
}


@dataclass(frozen=True)
class Field:
    """A field of a payload, beside its classes."""

    form: Form
    shapes: tuple[Shape, ...]
    values: tuple[Values, ...]
    optional: bool


@cache
def fields_of(kind: type) -> Mapping[str, Field]:
    """The fields of a kind of payload beside its classes, in order.

    Raises:
        TypeError: a field that the wire format cannot carry, a tensor without a shape, a dimension
            that nobody knows.
    """
    hints = get_type_hints(kind, include_extras=True)
    names = [item.name for item in fields(kind)]
    if not names or names[0] != "classes":
        raise TypeError(f"payload {kind.__name__}: its first field must be `classes`")
    found = {name: _field(f"payload {kind.__name__}: {name}", hints[name]) for name in names[1:]}
    if any(each.form is Form.STATE for each in found.values()) and "architecture" not in found:
        raise TypeError(
            f"payload {kind.__name__}: a state dict needs a field `architecture` beside it"
        )
    shapes = [shape.dimensions for each in found.values() for shape in each.shapes]
    if any("images" in shape for shape in shapes) and ("images",) not in shapes:
        raise TypeError(
            f'payload {kind.__name__}: it needs a tensor with Shape("images"), which says how many'
        )
    return found


def _field(name: str, hint: Any) -> Field:
    marks = getattr(hint, "__metadata__", ())
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    optional = get_origin(kind) in (types.UnionType, Union) and type(None) in get_args(kind)
    if optional:
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    form = _FORMS.get(kind)
    if form is None:
        allowed = "; ".join(each.value for each in Form)
        raise TypeError(f"{name}: the wire format cannot carry {kind}. It carries: {allowed}")
    shapes = tuple(mark for mark in marks if isinstance(mark, Shape))
    if form is Form.TENSOR and not shapes:
        raise TypeError(
            f'{name}: it has no shape. Declare it: Annotated[torch.Tensor, Shape("classes", ...)]'
        )
    for shape in shapes:
        for unknown in [d for d in shape.dimensions if isinstance(d, str) and d not in DIMENSIONS]:
            raise TypeError(
                f"{name}: dimension {unknown!r} is unknown; it must be a number or one of "
                f"{', '.join(DIMENSIONS)}. A new one needs a line there and a size in "
                "server_app/expected.py"
            )
    values = tuple(mark for mark in marks if isinstance(mark, Values))
    return Field(form, shapes, values, optional)


def tensors_of(
    kind: type, sizes: Mapping[str, int]
) -> dict[str, tuple[tuple[int | str, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a payload in a run; "classes" and "images" stay names.

    Args:
        kind: a class of this module.
        sizes: the run's dimensions. One that it does not have is not there.

    Raises:
        TypeError: the run lacks a dimension of a tensor that a payload must have.
    """
    known: dict[str, int | str] = {**dict(zip(CLIENTS_OWN, CLIENTS_OWN, strict=True)), **sizes}
    found = {}
    for name, declared in fields_of(kind).items():
        fitting = [shape for shape in declared.shapes if _sized(shape, known)]
        if fitting:
            whole = tuple(known[d] if isinstance(d, str) else d for d in fitting[0].dimensions)
            found[name] = (whole, fitting[0].dtype)
        elif declared.form is Form.TENSOR and not declared.optional:
            raise TypeError(
                f"payload {kind.__name__}: {name}: this run has no size for a dimension of "
                f"{' or '.join(str(list(shape.dimensions)) for shape in declared.shapes)}"
            )
    return found


def _sized(shape: Shape, known: Mapping[str, int | str]) -> bool:
    return all(d in known for d in shape.dimensions if isinstance(d, str))
