"""A page of this site's own images beside those that the server synthesized for it.

The page stays at the site (node-config `comparison-dir`), and nothing about it is sent. The
synthetic images are untrusted, so the page contains their pixels encoded anew, never their bytes.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict
from PIL import Image

from osfl.config import NodeConfig, RunConfig
from osfl.data.load import OpenedImages, open_images
from osfl.data.parts import class_names
from osfl.payload.samples import MAX_PER_CLASS, MAX_SIDE, Sample, unpack_samples
from osfl.run_folder.image_store import decode_png
from osfl.run_folder.report.page import compile_page
from osfl.run_folder.report.pictures import image_url
from osfl.run_folder.report.template_comparison import COMPARISON_PAGE
from osfl.util.files import write_atomically
from osfl.util.names import is_identifier

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Row:
    """A class on the page.

    Attributes:
        name: the class.
        own, synthetic: data URLs of its images.
    """

    name: str
    own: Sequence[str]
    synthetic: Sequence[str]


def write_comparison(content: RecordDict, config: RunConfig, node: NodeConfig, client: str) -> None:
    """Write the page, if a message with a global model has synthetic images for it.

    A failure is logged, because the test result must not be lost with it.

    Args:
        content: the request to `evaluate`.
    """
    folder = Path(node.comparison_dir).expanduser()
    try:
        classes = class_names(config.data)
        samples = unpack_samples(content, len(classes))
        if not samples:
            return
        synthetic = _decode(samples)
        originals = _own_images(config, node, list(synthetic))
        job = str(content.config_records["header"]["job"])
        page = render(_rows(classes, originals, synthetic), config.method, job, client)
        _check_job(job)
        file = folder / f"{job}-{client}.html"
        write_atomically(file, page.encode())
    # The server's message, or this site's images, may be invalid in any way
    except Exception as error:
        log.error("comparison-dir = %s: the page cannot be written: %s", folder, error)
    else:
        log.info("this site's images beside the synthetic ones are in %s", file)


def render(rows: Sequence[Row], method: str, job: str, client: str) -> str:
    """Render the page."""
    values = {"rows": rows, "most": MAX_PER_CLASS, "method": method, "job": job, "client": client}
    return str(compile_page(COMPARISON_PAGE).render(**values))


def _check_job(job: str) -> None:
    if not is_identifier(job):
        raise ValueError(f"the job id {job[:80]!r} must be an identifier to name a file")


def _decode(samples: Sequence[Sample]) -> dict[int, list[Image.Image]]:
    """Decode synthetic images, by label.

    Raises:
        ValueError: one is not a PNG, is corrupt, or has more pixels than the server may send.
    """
    pictures: dict[int, list[Image.Image]] = defaultdict(list)
    for sample in samples:
        picture = decode_png(sample.content, MAX_SIDE)
        if picture is None:
            raise ValueError(
                f"a synthetic image is not a complete PNG of at most {MAX_SIDE} px a side"
            )
        pictures[sample.label].append(picture)
    return dict(sorted(pictures.items()))


def _own_images(
    config: RunConfig, node: NodeConfig, labels: Sequence[int]
) -> dict[int, list[Image.Image]]:
    """Decode a few training images of each class, evenly spread, in the run's image size."""
    opened = open_images(config.data, node, "train", config.seed)
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, label in enumerate(opened.labels):
        numbers[label].append(number)
    pictures = {}
    for label in labels:
        candidates = numbers[label]
        chosen = candidates[:: max(1, len(candidates) // MAX_PER_CLASS)][:MAX_PER_CLASS]
        pictures[label] = [_picture(opened, config.data.image_size, number) for number in chosen]
    return pictures


def _picture(opened: OpenedImages, size: int, number: int) -> Image.Image:
    pixels = opened.pixels(size, number)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    factor = MAX_SIDE // size
    # The server enlarges small synthetic images the same way
    if factor > 1:
        return picture.resize((factor * size, factor * size), Image.Resampling.NEAREST)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture


def _rows(
    classes: Sequence[str],
    own: Mapping[int, Sequence[Image.Image]],
    synthetic: Mapping[int, Sequence[Image.Image]],
) -> list[Row]:
    return [
        Row(classes[label], _urls(own[label]), _urls(pictures))
        for label, pictures in synthetic.items()
    ]


def _urls(pictures: Sequence[Image.Image]) -> list[str]:
    # A PNG would make a page of photographs ten times as large
    return [image_url(picture, "jpeg") for picture in pictures]
