"""Read columns of labels, domains and groups from a data set."""

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
    """The values of a column, one per row.

    Attributes:
        place: the configuration's key and the column's name, for messages.
        values: integers [N] int64, or strings [N] object.
        is_missing: [N] bool, True where the row has no value.
        names: the strings that the numbers stand for, if the data set stores them.
        is_boolean: whether 0 and 1 are stored as False and True.
    """

    location: str
    values: np.ndarray
    is_missing: np.ndarray
    names: tuple[str, ...] | None = None
    is_boolean: bool = False

    @property
    def is_number(self) -> bool:
        """True if the values are numbers without stored names."""
        return self.names is None and self.values.dtype != object

    def texts(self) -> list[str]:
        """Return each value as an identifier; "" for missing values.

        Raises:
            DataError: a number has no name, although the data set stores names.
        """
        return [normalize_name(folder_name(word)) for word in self.words()]

    def words(self) -> list[str]:
        """Return each value as the string in the data set; "" for missing values.

        Raises:
            DataError: as `texts`.
        """
        if self.names is None:
            words = [str(value) for value in self.values]
        else:
            numbers = np.where(self.is_missing, 0, self.values)
            _check_range(self.location, numbers, len(self.names), "the data set's column")
            words = [self.names[number] for number in numbers]
        rows = zip(words, self.is_missing, strict=True)
        return ["" if missing else word for word, missing in rows]


def read_column(rows: "Dataset", column: str, key: str) -> Column:
    """Read a column of numbers or strings, or of lists with one of either.

    -1 and null stand for missing values.

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
    """Return the names of a ClassLabel, or of a list of ClassLabels, or None."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return tuple(names) if names else None


def _only_elements(array: "pa.Array", place: str) -> "pa.Array":
    """Replace lists of one element by the element and empty lists by null; keep other arrays."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        longest = pc.max(pc.list_value_length(array)).as_py() or 0
        if longest > 1:
            raise _wrong_type(place, f"lists of up to {longest} values")
        kind = array.type.value_type
        array = pa.array([row[0] if row else None for row in array.to_pylist()], type=kind)
    return array


def _plain_values(array: "pa.Array", place: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the (values, is_missing) of an array of numbers or strings."""
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
            raise _wrong_type(place, f"{kind} values that are not integers") from None
        return numbers.to_numpy(zero_copy_only=False), is_missing
    raise _wrong_type(place, f"values of type {sanitize(kind, 80)}")


def _wrong_type(place: str, content: str) -> DataError:
    return DataError(
        f"{place}: the column contains {content}; it must contain one integer or string per row. "
        f"Set {place.partition(' ')[0]} to another column, or convert this one"
    )


def check_image_column(feature: Any, column: str, source: str) -> None:
    """Check that a column contains images, {bytes, path}, or bytes.

    Raises:
        DataError: it contains something else.
    """
    fields = feature if isinstance(feature, dict) else {"bytes": feature}
    stored = fields.get("bytes")
    is_bytes = getattr(stored, "dtype", "") in ("binary", "large_binary")
    if type(feature).__name__ != "Image" and not is_bytes:
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        raise DataError(
            f"data.image-column = {column!r}: the column of {source} contains values of type "
            f"{sanitize(kind, 80)}; it must contain images, or the bytes of image files. Set "
            "data.image-column to a column of images"
        )


def check_distinct(place: str, words: Iterable[str]) -> None:
    """Check that names stay distinct as identifiers, in which `a/b` and `a b` are both `a_b`.

    Names that only differ in the Unicode form of accents or in surrounding blanks are equal.

    Raises:
        DataError: two names have the same identifier.
    """
    spelled: dict[str, str] = {}
    for word in sorted({normalize_name(word).strip() for word in words}):
        name = folder_name(word)
        other = spelled.setdefault(name, word)
        if other != word:
            raise DataError(
                f"{place}: {sanitize(repr(other), 80)} and {sanitize(repr(word), 80)} would have "
                "the "
                f"same name, {sanitize(repr(name), 80)}; rename one of them in the data set"
            )


# ---- Labels as classes ----


def class_indices(column: Column, classes: Sequence[str], source: str) -> np.ndarray:
    """Return each label as the index of its class, [N] int64; -1 for rows without a class.

    Stored names and strings name their class. Numbers without names are indices into the classes.

    Raises:
        DataError: the labels cannot be the run's classes.
    """
    if column.is_boolean and sorted(map(str.casefold, classes)) == ["false", "true"]:
        column = replace(column, names=tuple(sorted(classes, key=str.casefold)))
    if column.is_number and not _are_values(classes):
        numbers = np.where(column.is_missing, 0, column.values)
        _check_range(column.location, numbers, len(classes), "data.classes")
        return np.where(column.is_missing, -1, column.values)
    indices = {normalize_name(name): index for index, name in enumerate(classes)}
    if column.names is not None:
        _check_stored(column.names, classes, source)
    texts, inverse = np.unique(np.array(column.texts(), dtype=str), return_inverse=True)
    table = np.array([indices.get(text, -1) for text in texts], dtype=np.int64)
    if (texts != "").any() and (table < 0).all() and column.names is None:
        raise DataError(
            f"{column.location}: no label of {source} is one of data.classes; set data.classes "
            "to the "
            "labels, or data.label-column to another column"
        )
    return table[inverse] if len(table) else np.empty(0, np.int64)


def check_complete(
    labels: np.ndarray, classes: Sequence[str], column: str, source: str, has_texts: bool
) -> None:
    """Check that a whole data set has images of every class; a part or split may lack some.

    Args:
        labels: indices into the classes, of all splits that the run uses.
        classes: of the run.
        column: the label column.
        source: name of the data set in messages.
        has_texts: whether the column contains strings, instead of indices into the classes.

    Raises:
        DataError: a class has no image.
    """
    missing = sorted(set(range(len(classes))) - set(labels.tolist()))
    if not missing:
        return
    name = classes[missing[0]]
    hint = "remove it from data.classes, or spell it as the data set does"
    if not (has_texts or _are_values(classes)):
        hint = (
            f"no row has its number, {missing[0]}. Number the classes from 0 without gaps, in the "
            "order of data.classes"
        )
    raise DataError(
        f"data.classes: {source} has no class {name!r} in its column {column!r}; {hint}"
    )


def _check_stored(names: Sequence[str], classes: Sequence[str], source: str) -> None:
    """Check that a data set stores a name for each class of the run."""
    stored = {normalize_name(folder_name(name)) for name in names}
    if missing := [name for name in classes if normalize_name(name) not in stored]:
        raise DataError(
            f"data.classes: {source} has no class {missing[0]!r}; its classes are "
            f"{sanitize(', '.join(map(folder_name, names)), 500)}"
        )


def _check_range(place: str, numbers: np.ndarray, count: int, owner: str) -> None:
    """Check that numbers are in 0 to count - 1."""
    if not len(numbers) or (numbers.min() >= 0 and numbers.max() < count):
        return
    raise DataError(
        f"{place}: the column contains the numbers {numbers.min()} to {numbers.max()}; {owner} has "
        f"{count} names for 0 to {count - 1}. Number the classes from 0 (-1 for no label) and name "
        "each of them"
    )


def _are_values(classes: Sequence[str]) -> bool:
    """Check whether the class names are numbers, such as `1,2,3`."""
    return all(name.isdecimal() and str(int(name)) == name for name in classes)


def normalize_name(name: str) -> str:
    """Return a name in Unicode's NFC, for comparisons."""
    return unicodedata.normalize("NFC", name)
