"""Samples of a run's synthetic images for the sites that asked for their own."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from flwr.app import RecordDict

from osfl.payload.samples import (
    MAX_BYTES,
    MAX_IMAGES,
    MAX_PER_CLASS,
    MAX_SIDE,
    Sample,
    pack_samples,
)
from osfl.run_folder.image_store import MAX_IMAGE_BYTES, read_rows, thumbnail
from osfl.run_folder.layout import RunFolder
from osfl.util.files import CorruptFileError, read_below
from osfl.util.log import log

# Paths of images, by class
Files = dict[str, list[str]]


class OwnSamples:
    """Adds to a message the images that were synthesized for its receiver.

    Args:
        folder: the run's folder.
        clients: those that asked.
        classes: the run's class names.
    """

    def __init__(self, folder: RunFolder, clients: Collection[str], classes: Sequence[str]):
        self._root = folder.path
        self._classes = classes
        self._files = _files_of(folder, clients) if clients else {}

    def add(self, content: RecordDict, client: str) -> RecordDict:
        """Return the content with a client's images; the content itself if it gets none."""
        files = self._files.get(client)
        samples = [] if files is None else _read(self._root, files, self._classes)
        return RecordDict({**content, **pack_samples(samples)}) if samples else content


def _files_of(folder: RunFolder, clients: Collection[str]) -> dict[str, Files]:
    """Return the first files of every class, by client."""
    files: dict[str, Files] = defaultdict(lambda: defaultdict(list))
    if not folder.manifest_file.is_file():
        return {}
    try:
        rows = read_rows(folder.manifest_file)
    except CorruptFileError as error:
        log.error("no client gets a sample of its synthetic images: %s", error)
        return {}
    for row in rows:
        # Images of a public domain belong to no client
        if row["client"] in clients:
            class_files = files[row["client"]][row["class"]]
            if len(class_files) < MAX_PER_CLASS:
                class_files.append(row["file"])
    return files


def _read(root: Path, files: Files, classes: Sequence[str]) -> list[Sample]:
    """Read one image of every class, then a second, as long as all of them fit."""
    samples: list[Sample] = []
    size = 0
    for number in range(MAX_PER_CLASS):
        for label, name in enumerate(classes):
            names = files.get(name, [])[number : number + 1]
            for content in filter(None, (_picture(root, file) for file in names)):
                size += len(content)
                if len(samples) == MAX_IMAGES or size > MAX_BYTES:
                    return samples
                samples.append(Sample(label, content))
    return samples


def _picture(root: Path, file: str) -> bytes | None:
    try:
        return thumbnail(read_below(root, file, MAX_IMAGE_BYTES), MAX_SIDE)
    except (OSError, ValueError):
        return None
