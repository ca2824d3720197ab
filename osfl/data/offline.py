"""Rows of a data set whose images are elsewhere: addresses of the network, files of other folders.

The library `datasets` would fetch or open them while it decodes a row.
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
    """Refuse a data set of which reading a row would open what is not the data set's own.

    Args:
        home: the folder of the data set; None: it is the hub's, and lies in the hub's caches.
        source: what messages call it.

    Raises:
        DataError: a column that is decoded holds no single images, or one of its images is an
            address or a file outside the data set.
    """
    from datasets import Image
    from datasets.features.features import require_decoding

    for key in ("label", "domain", "group"):
        column = str(getattr(config, f"{key}_column"))
        if column in rows.features and require_decoding(rows.features[column]):
            raise DataError(
                f"data.{key}-column = {column!r}: {source} has images or other media in it; set "
                "the column of names or numbers"
            )
    column = config.image_column
    feature = rows.features.get(column)
    if feature is None:
        return
    if require_decoding(feature) and not isinstance(feature, Image):
        raise DataError(
            f"data.image-column = {column!r}: {source} has no single images in it; set the column "
            "of the images"
        )
    above = _prefixes(_cache_folders() if home is None else [home])
    if not all(_is_inside(path, above) for path in _paths(rows, column)):
        raise DataError(
            f"data.image-column = {column!r}: {source} has an image that is an address of the "
            "network or a file outside the data set, which is not read. Save the data set with "
            "the images in it (save_to_disk does)"
        )


def _cache_folders() -> list[Path]:
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return [Path(cache) for cache in caches]


def _paths(rows: "Dataset", column: str) -> Iterator[str]:
    """The paths of the images that are no bytes in the data set."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for chunk in rows.data.column(column).chunks:
        if not pa.types.is_struct(chunk.type):
            return
        names = [chunk.type.field(place).name for place in range(chunk.type.num_fields)]
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
    return tuple(
        f"{place}/" for folder in folders for place in (folder.absolute(), folder.resolve())
    )


def _is_inside(path: str, above: tuple[str, ...]) -> bool:
    """Whether a path is below a folder as it is written: links in there are the site's own."""
    return path.startswith(above) and ".." not in path.split("/")
