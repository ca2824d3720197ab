"""FedDF's proxy set: a seeded sample of public images without labels (`rounds.proxy`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from osfl.config import ConfigError
from osfl.data.parts import is_hidden
from osfl.data.pictures import open_image, to_pixels
from osfl.util.log import log
from osfl.util.seeds import generator_of
from server_app.context import ServerJob


class ImageFiles:
    """Image files that are decoded on access.

    Args:
        files: of the images.
        size: side in pixels to which images are resized.
    """

    def __init__(self, files: Sequence[Path], size: int):
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return an image, uint8 [3, S, S].

        Raises:
            ConfigError: the file is not an image, or is corrupt.
        """
        file = self.files[row]
        try:
            with open_image(file) as image:
                return to_pixels(image, self.size)
        # Pillow raises many types of errors for corrupt files
        except Exception as error:
            raise ConfigError(
                f"rounds.proxy: {file} is not a readable image ({error}). Remove or replace it"
            ) from error


# Images uint8 [3, S, S] by row, also as a tensor [N, 3, S, S]
Proxy = torch.Tensor | ImageFiles


def pixels(proxy: Proxy, rows: torch.Tensor) -> torch.Tensor:
    """Return proxy images, uint8 [N, 3, S, S]."""
    return torch.stack([proxy[row] for row in rows.tolist()])


def load_proxy(job: ServerJob) -> Proxy:
    """Return a sample of `rounds.proxy-images` proxy images, or all if there are fewer.

    Raises:
        ConfigError: the folder does not exist, or has fewer than two images.
    """
    settings = job.config.rounds
    size = job.config.data.image_size
    if settings.proxy == "public":
        from osfl.data.digits import load_split

        images = load_split("public").images
        rows = np.random.default_rng(job.config.seed).permutation(len(images))
        drawn = images[rows[: _sample_size(job, len(images))]]
        return torch.stack([to_pixels(Image.fromarray(image), size) for image in drawn])
    folder = Path(settings.proxy).expanduser()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not _is_passed_over(p, folder))
    if len(files) < 2:
        raise ConfigError(
            f"rounds.proxy = {settings.proxy!r}: must be 'public' or a folder with at least two "
            "images"
        )
    order = torch.randperm(len(files), generator=generator_of(job.config.seed, "feddf", "proxy"))
    sample = order[: _sample_size(job, len(files))]
    return ImageFiles([files[row] for row in sample.tolist()], size)


def _is_passed_over(file: Path, folder: Path) -> bool:
    """Check whether a file, or a folder between it and `folder`, is hidden or a system's own."""
    return any(map(is_hidden, file.relative_to(folder).parts))


def _sample_size(job: ServerJob, available: int) -> int:
    configured = job.config.rounds.proxy_images
    if configured > available:
        log.warning(
            "rounds.proxy-images = %s: only %s are available, and all are used",
            configured,
            available,
        )
    return min(configured, available)


def check_proxy(job: ServerJob, proxy: Proxy) -> None:
    """Decode every proxy image once, so that a corrupt one is found before the clients work.

    Raises:
        ConfigError: an image cannot be read.
    """
    job.status.phase("checking the proxy images", len(proxy))
    for row in range(len(proxy)):
        proxy[row]
        job.status.advance(row + 1, len(proxy))
