"""Declarations of payload fields: a tensor's shape and dtype, and constraints on its values.

A payload is a frozen dataclass in osfl/payload/kinds.py whose first field is `classes`.
server_app/expected.py and osfl/payload/wire.py learn all that they know of a payload kind from
these declarations.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

# Names of the dimensions of shapes. The client determines "classes" and "images"; the run's
# settings and kit determine those of the others that apply to it (`run_dimensions`).
DIMENSIONS = {
    "classes": "classes that the client holds",
    "images": "images that the client describes one by one",
    "L": "tokens of a text condition",
    "d": "width of a text condition",
    "c": "channels of a latent",
    "h": "height of a latent",
    "w": "width of a latent",
    "2e": "width of unCLIP's image condition: twice that of an image embedding",
    "f": "width of the features before a classifier's last layer",
    "t": "triangle of a symmetric f x f matrix, on and above the diagonal: f (f + 1) / 2",
    "r": "triangle of a factor in place of such a matrix, in a run with a lossy codec",
    "K": "components of FedPFT's mixture",
    "v": "variances of such a component: one for all features, or one per feature",
    "J": "Espresso's clusters per class",
    "p": "learned vectors: one for every token of a condition, or one for all",
    "o": "vectors that a class adds to its domain's: one; absent from a run without them",
    "M": "components of a mixture of latents; absent from a run without one",
    "K + 1": "FedDISC's clusters per class, and their mean",
    "4s": "bytes of a secure sum's numbers, four each",
    "m": "members of a secure sum",
}
CLIENT_DIMENSIONS = ("classes", "images")


@dataclass(frozen=True)
class Shape:
    """The dimensions of a payload's tensor: names in `DIMENSIONS`, or numbers.

    A field with several shapes has the first one whose dimensions all exist in the run. An optional
    field is omitted from a run in which none of its shapes exists.
    """

    dimensions: tuple[int | str, ...]
    dtype: torch.dtype

    def __init__(self, *dimensions: int | str, dtype: torch.dtype = torch.float32):
        object.__setattr__(self, "dimensions", dimensions)
        object.__setattr__(self, "dtype", dtype)


class Values(Enum):
    """A constraint on a tensor's numbers, which must be finite anyway.

    The text goes into the error message.
    """

    SHARES = "must not be negative, and must sum to 1 in every mixture"
    VARIANCES = "a variance below zero"
    DEVIATIONS = "a standard deviation below zero"
    COUNTS = "must be at least 1, and no more than 1,000,000,000"
    SUMS = "a sum over images whose mean, by the payload's counts, is beyond 1e6"
    LABELS = "must be the labels of the payload's classes, each at least once"


class Form(Enum):
    """The types that a field of a payload may have."""

    TENSOR = "torch.Tensor, with a Shape"
    STATE = "dict[str, torch.Tensor], beside a field `architecture`"
    TEXTS = "tuple[tuple[str, ...], ...], one tuple per class"
    TEXT = "str"


_FORMS: dict[Any, Form] = {
    torch.Tensor: Form.TENSOR,
    dict[str, torch.Tensor]: Form.STATE,
    tuple[tuple[str, ...], ...]: Form.TEXTS,
    str: Form.TEXT,
}


@dataclass(frozen=True)
class Field:
    """A field of a payload other than its classes."""

    form: Form
    shapes: tuple[Shape, ...]
    values: tuple[Values, ...]
    optional: bool


@cache
def fields_of(kind: type) -> Mapping[str, Field]:
    """Return the fields of a payload kind other than `classes`, in order.

    Raises:
        TypeError: the wire format cannot carry a field, a tensor has no shape, or a dimension is
            unknown.
    """
    hints = get_type_hints(kind, include_extras=True)
    names = [item.name for item in fields(kind)]
    if not names or names[0] != "classes":
        raise TypeError(f"payload {kind.__name__}: its first field must be `classes`")
    declared = {name: _field(f"payload {kind.__name__}: {name}", hints[name]) for name in names[1:]}
    has_state = any(field.form is Form.STATE for field in declared.values())
    if has_state and "architecture" not in declared:
        raise TypeError(
            f"payload {kind.__name__}: a state dict requires a field `architecture` beside it"
        )
    shapes = [shape.dimensions for field in declared.values() for shape in field.shapes]
    if any("images" in shape for shape in shapes) and ("images",) not in shapes:
        raise TypeError(
            f"payload {kind.__name__}: it requires a tensor with "
            'Shape("images"), whose length is the number of images'
        )
    if "counts" not in declared and any(Values.SUMS in field.values for field in declared.values()):
        raise TypeError(f"payload {kind.__name__}: sums over images require a field `counts`")
    return declared


def _field(name: str, hint: Any) -> Field:
    marks = getattr(hint, "__metadata__", ())
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    optional = get_origin(kind) in (types.UnionType, Union) and type(None) in get_args(kind)
    if optional:
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if kind not in _FORMS:
        allowed = "; ".join(member.value for member in Form)
        raise TypeError(f"{name}: the wire format cannot carry {kind}. It carries: {allowed}")
    shapes = tuple(mark for mark in marks if isinstance(mark, Shape))
    if _FORMS[kind] is Form.TENSOR and not shapes:
        raise TypeError(
            f"{name}: a tensor must have a shape. Declare it as "
            'Annotated[torch.Tensor, Shape("classes", ...)]'
        )
    for shape in shapes:
        for unknown in [d for d in shape.dimensions if isinstance(d, str) and d not in DIMENSIONS]:
            raise TypeError(
                f"{name}: dimension {unknown!r} is unknown; it must be a number or one of "
                f"{', '.join(DIMENSIONS)}. A new name needs a line in DIMENSIONS "
                "(osfl/payload/fields.py) and a size in the method's `dimensions`"
            )
    values = tuple(mark for mark in marks if isinstance(mark, Values))
    return Field(_FORMS[kind], shapes, values, optional)


def field_tensors(
    kind: type, sizes: Mapping[str, int]
) -> dict[str, tuple[tuple[int | str, ...], torch.dtype]]:
    """Return shape and dtype of every tensor of a payload in a run.

    The dimensions "classes" and "images" stay names.

    Args:
        kind: a class of osfl/payload/kinds.py.
        sizes: the sizes of the dimensions that exist in the run.

    Raises:
        TypeError: a required tensor has a dimension that does not exist in the run.
    """
    size: dict[str, int | str] = {
        **dict(zip(CLIENT_DIMENSIONS, CLIENT_DIMENSIONS, strict=True)),
        **sizes,
    }
    tensors = {}
    for name, declared in fields_of(kind).items():
        shapes = [shape for shape in declared.shapes if _has_sizes(shape, size)]
        if shapes:
            dimensions = tuple(size[d] if isinstance(d, str) else d for d in shapes[0].dimensions)
            tensors[name] = (dimensions, shapes[0].dtype)
        elif declared.form is Form.TENSOR and not declared.optional:
            raise TypeError(
                f"payload {kind.__name__}: {name}: this run has no size for a dimension of "
                f"{' or '.join(str(list(shape.dimensions)) for shape in declared.shapes)}"
            )
    return tensors


def _has_sizes(shape: Shape, size: Mapping[str, int | str]) -> bool:
    return all(d in size for d in shape.dimensions if isinstance(d, str))
