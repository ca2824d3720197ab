"""Columns of labels, domains and groups: what a data set may store in them, and what it means."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from osfl.data.partition import DataError
from osfl.util.text import folder_name, sanitize

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


@dataclass(frozen=True)
class Column:
    """The values of a column, one a row.

    Attributes:
        place: what messages call it, the configuration's key and the column's name.
        values: whole numbers [N] int64, or texts [N] of objects.
        is_missing: [N], where there is no value.
        names: the texts that the numbers stand for, where the data set stores them.
        is_boolean: whether 0 and 1 are stored as False and True.
    """

    place: str
    values: np.ndarray
    is_missing: np.ndarray
    names: tuple[str, ...] | None = None
    is_boolean: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers that no stored names explain."""
        return self.names is None and self.values.dtype != object

    def texts(self) -> list[str]:
        """Each value in words, as an identifier; "" where there is none.

        Raises:
            DataError: a number without a name among those that the data set stores.
        """
        return [composed(folder_name(word)) for word in self.words()]

    def words(self) -> list[str]:
        """Each value in words as the data set has it; "" where there is none.

        Raises:
            DataError: as `texts`.
        """
        if self.names is None:
            words = [str(value) for value in self.values]
        else:
            numbers = np.where(self.is_missing, 0, self.values)
            _check_range(self.place, numbers, len(self.names), "the data set's column")
            words = [self.names[number] for number in numbers]
        rows = zip(words, self.is_missing, strict=True)
        return ["" if missing else word for word, missing in rows]


def read_column(rows: "Dataset", column: str, key: str) -> Column:
    """Read a column of numbers or texts, or of lists that hold one of either.

    -1 and null mean that a row has no value.

    Args:
        key: the configuration's key that names the column, for messages.

    Raises:
        DataError: the column has values of another type.
    """
    place = f"{key} = {column!r}"
    table = rows.select_columns([column]).with_format("arrow")[:]
    array = _only_elements(table.column(column).combine_chunks(), place)
    names = stored_names(rows.features[column])
    values, is_missing = _plain_values(array, place)
    if values.dtype != object:
        is_missing = is_missing | (values == -1)
    is_boolean = str(array.type) == "bool"
    return Column(place, values, is_missing, names, is_boolean)


def stored_names(feature: Any) -> tuple[str, ...] | None:
    """The names of a ClassLabel, or of a list's."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names else None


def _only_elements(array: "pa.Array", place: str) -> "pa.Array":
    """The elements of lists of one, null for empty lists; other arrays as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        longest = pc.max(pc.list_value_length(array)).as_py() or 0
        if longest > 1:
            raise _wrong_type(place, f"lists of up to {longest} values")
        kind = array.type.value_type
        array = pa.array([held[0] if held else None for held in array.to_pylist()], type=kind)
    return array


def _plain_values(array: "pa.Array", place: str) -> tuple[np.ndarray, np.ndarray]:
    """(values, whether there is none) of an array of numbers or texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_floating(kind):
        array = pc.if_else(pc.is_nan(array), None, array)
    is_missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_null(kind):
        return np.full(len(array), -1), is_missing
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = np.array(array.to_pylist(), dtype=object)
        return values, is_missing | (values == "")
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        try:
            numbers = pc.cast(array, pa.int64()).fill_null(-1)
        except pa.ArrowInvalid:
            raise _wrong_type(place, f"{kind} values that are no whole numbers") from None
        return numbers.to_numpy(zero_copy_only=False), is_missing
    raise _wrong_type(place, f"values of type {sanitize(kind, 80)}")


def _wrong_type(place: str, what: str) -> DataError:
    return DataError(
        f"{place}: the column holds {what}; it must hold one whole number or one text a row. Set "
        f"{place.partition(' ')[0]} to another column, or convert this one"
    )


def check_pictures(feature: Any, column: str, source: str) -> None:
    """Check that a column holds pictures: images, {bytes, path}, or bytes.

    Raises:
        DataError: it holds something else.
    """
    fields = feature if isinstance(feature, dict) else {"bytes": feature}
    stored = fields.get("bytes")
    is_bytes = getattr(stored, "dtype", "") in ("binary", "large_binary")
    if type(feature).__name__ != "Image" and not is_bytes:
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        raise DataError(
            f"data.image-column = {column!r}: in {source} the column holds values of type "
            f"{sanitize(kind, 80)}; it must hold images, or their files' bytes. Set "
            "data.image-column "
            "to the column of the images"
        )


def check_distinct(place: str, words: Iterable[str]) -> None:
    """Check that names stay different as identifiers, in which `a/b` and `a b` are both `a_b`.

    Accents in another form of Unicode, and blanks at an end, make no other name.

    Raises:
        DataError: two names become one.
    """
    spelled: dict[str, str] = {}
    for word in sorted({composed(word).strip() for word in words}):
        name = folder_name(word)
        other = spelled.setdefault(name, word)
        if other != word:
            raise DataError(
                f"{place}: {sanitize(repr(other), 80)} and {sanitize(repr(word), 80)} would be "
                "the same "
                f"name, {sanitize(repr(name), 80)}; rename one of them in the data set"
            )


# ---- Labels as classes ----


def class_indices(column: Column, classes: Sequence[str], source: str) -> np.ndarray:
    """Each label as the index of its class, [N] int64; -1: no label, or no class of the run.

    Stored names and texts name their class. Numbers without names are the classes in their order.

    Raises:
        DataError: labels that cannot be the run's classes.
    """
    if column.is_boolean and sorted(map(str.casefold, classes)) == ["false", "true"]:
        column = replace(column, names=tuple(sorted(classes, key=str.casefold)))
    if column.is_number and not _are_values(classes):
        numbers = np.where(column.is_missing, 0, column.values)
        _check_range(column.place, numbers, len(classes), "data.classes")
        return np.where(column.is_missing, -1, column.values)
    places = {composed(name): place for place, name in enumerate(classes)}
    if column.names is not None:
        _check_stored(column.names, classes, source)
    texts, inverse = np.unique(np.array(column.texts(), dtype=str), return_inverse=True)
    table = np.array([places.get(text, -1) for text in texts], dtype=np.int64)
    if (texts != "").any() and (table < 0).all() and column.names is None:
        raise DataError(
            f"{column.place}: no label of {source} is one of data.classes; set data.classes to the "
            "labels' texts, or data.label-column to another column"
        )
    return table[inverse] if len(table) else np.empty(0, np.int64)


def check_complete(
    labels: np.ndarray, classes: Sequence[str], column: str, source: str, has_texts: bool
) -> None:
    """Check that a whole data set has images of every class of the run.

    A client's part, or a split, may lack some.

    Args:
        labels: indices into the classes, of all splits that the run takes.
        has_texts: whether the column has texts; else its numbers are the classes in their order.

    Raises:
        DataError: a class has no image.
    """
    missing = sorted(set(range(len(classes))) - set(labels.tolist()))
    if not missing:
        return
    name = classes[missing[0]]
    cure = "remove it from data.classes, or spell it as the data set does"
    if not (has_texts or _are_values(classes)):
        cure = (
            f"no row has its number, {missing[0]}. Number the classes from 0 without a gap, in the "
            "order of data.classes"
        )
    raise DataError(
        f"data.classes: {source} has no class {name!r} in its column {column!r}; {cure}"
    )


def _check_stored(names: Sequence[str], classes: Sequence[str], source: str) -> None:
    """Check that a data set stores a name for each class of the run."""
    known = {composed(folder_name(name)) for name in names}
    if missing := [name for name in classes if composed(name) not in known]:
        raise DataError(
            f"data.classes: {source} has no class {missing[0]!r}; it has "
            f"{sanitize(', '.join(map(folder_name, names)), 500)}"
        )


def _check_range(place: str, numbers: np.ndarray, count: int, what: str) -> None:
    """Check that numbers are of 0 to count - 1."""
    if not len(numbers) or (numbers.min() >= 0 and numbers.max() < count):
        return
    raise DataError(
        f"{place}: the column has the numbers {numbers.min()} to {numbers.max()}; {what} has "
        f"{count} names for 0 to {count - 1}. Number the classes from 0 (-1: no label) and name "
        "each of them"
    )


def _are_values(classes: Sequence[str]) -> bool:
    """Whether the classes' names are the numbers themselves, such as `1,2,3`."""
    return all(name.isdecimal() and str(int(name)) == name for name in classes)


def composed(name: str) -> str:
    """Return a name with each accent as part of its letter, as names are compared."""
    return unicodedata.normalize("NFC", name)
