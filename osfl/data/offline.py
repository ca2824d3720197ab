"""Reject data sets whose rows refer to URLs or to files outside the data set.

The library `datasets` would download or open them while it decodes a row.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.config import DataConfig
from osfl.data.partition import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


def check_rows(rows: "Dataset", config: DataConfig, home: Path | None, source: str) -> None:
    """Check that reading a row opens no file outside the data set.

    Args:
        rows: a split of the data set.
        config: names the columns.
        home: folder of the data set; None for one of the hub, which is in the hub's caches.
        source: name of the data set in messages.

    Raises:
        DataError: a decoded column does not contain single images, or an image is a URL or a file
            outside the data set.
    """
    from datasets import Image
    from datasets.features.features import require_decoding

    for key in ("label", "domain", "group"):
        column = str(getattr(config, f"{key}_column"))
        if column in rows.features and require_decoding(rows.features[column]):
            raise DataError(
                f"data.{key}-column = {column!r}: the column of {source} contains images or other "
                f"media; set data.{key}-column to a column of names or numbers"
            )
    column = config.image_column
    feature = rows.features.get(column)
    if feature is None:
        return
    if require_decoding(feature) and not isinstance(feature, Image):
        raise DataError(
            f"data.image-column = {column!r}: the column of {source} does not contain single "
            "images; set data.image-column to a column of images"
        )
    prefixes = _prefixes(_cache_folders() if home is None else [home])
    if not all(_is_inside(path, prefixes) for path in _paths(rows, column)):
        raise DataError(
            f"data.image-column = {column!r}: an image of {source} is a URL or a file outside the "
            "data set, which is not allowed. Save the data set with its images, such as by "
            "save_to_disk"
        )


def _cache_folders() -> list[Path]:
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return [Path(cache) for cache in caches]


def _paths(rows: "Dataset", column: str) -> Iterator[str]:
    """Yield the paths of the images whose bytes are not in the data set."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for chunk in rows.data.column(column).chunks:
        if not pa.types.is_struct(chunk.type):
            return
        names = [chunk.type.field(index).name for index in range(chunk.type.num_fields)]
        if "path" in names:
            paths = pc.struct_field(chunk, "path")
            yield from _texts(paths.filter(_without_bytes(chunk, names)))


def _without_bytes(chunk: "pa.StructArray", names: list[str]) -> "pa.BooleanArray":
    import pyarrow.compute as pc

    if "bytes" not in names:
        return pc.is_valid(chunk)
    return pc.is_null(pc.struct_field(chunk, "bytes"))


def _texts(paths: "pa.Array") -> Iterable[str]:
    return (str(path) for path in paths.to_pylist() if path is not None)


def _prefixes(folders: list[Path]) -> tuple[str, ...]:
    return tuple(f"{path}/" for folder in folders for path in (folder.absolute(), folder.resolve()))


def _is_inside(path: str, prefixes: tuple[str, ...]) -> bool:
    """Check whether a path is inside a folder, without resolving links, which the site made."""
    return path.startswith(prefixes) and ".." not in path.split("/")
