"""Files in an object store that speaks S3.

Credentials, region and endpoint are those of the environment. An object is there whole or not at
all.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.config import ConfigError
from osfl.util.text import sanitize

if TYPE_CHECKING:
    # Takes a third of a second to import, and few commands need it
    from pyarrow.fs import FileSystem

SCHEME = "s3://"
HINT = (
    "it must be s3://BUCKET/FOLDER, of a bucket that exists; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a store other than Amazon's"
)


@dataclass(frozen=True)
class Bucket:
    """A folder of an object store.

    Every method raises ConfigError if the store refuses or cannot be reached.
    """

    url: str
    _filesystem: "FileSystem"
    _path: str

    def names(self) -> set[str]:
        """Return the names of the objects in the folder."""
        from pyarrow.fs import FileSelector, FileType

        with _as_config_error(self.url):
            infos = self._filesystem.get_file_info(FileSelector(self._path, allow_not_found=True))
        return {info.base_name for info in infos if info.type == FileType.File}

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the first bytes of an object."""
        place = f"{self._path}/{name}"
        with _as_config_error(self.url), self._filesystem.open_input_stream(place) as stream:
            content: bytes = stream.read(most_bytes)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Store content under a name, in place of any other."""
        with self.scratch() as folder:
            file = Path(folder) / name
            file.write_bytes(content)
            self.upload(file, name)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """Return the context of a folder for files that are yet to be uploaded."""
        return tempfile.TemporaryDirectory(prefix="osfl-")

    def upload(self, file: Path, name: str) -> None:
        """Store a file's content under a name, in place of any other."""
        from pyarrow.fs import LocalFileSystem, copy_files

        # An output stream of pyarrow would store what there is when an exception closes it
        with _as_config_error(self.url):
            copy_files(
                str(file),
                f"{self._path}/{name}",
                source_filesystem=LocalFileSystem(),
                destination_filesystem=self._filesystem,
            )


def is_object_store(place: str | Path) -> bool:
    """Return whether a place that a user typed is in an object store."""
    return isinstance(place, str) and "://" in place


def open_bucket(url: str) -> Bucket:
    """Open a folder of an object store.

    Raises:
        ConfigError: the address is not one of S3, or the folder's bucket cannot be reached.
    """
    from pyarrow.fs import FileSystem

    folder = url.removeprefix(SCHEME).rstrip("/")
    if not url.startswith(SCHEME) or not folder:
        raise ConfigError(f"{sanitize(url, 1000)}: {HINT}")
    with _as_config_error(url):
        filesystem, path = FileSystem.from_uri(url.rstrip("/"))
        return Bucket(url, filesystem, path)


@contextmanager
def _as_config_error(url: str) -> Iterator[None]:
    """Raise a failure of the store as ConfigError."""
    try:
        yield
    # pyarrow's ArrowInvalid is a ValueError
    except (OSError, ValueError) as error:
        raise ConfigError(f"{sanitize(url, 1000)}: {sanitize(error, 1000)}; {HINT}") from error
