"""FedDF's public images without labels (`rounds.proxy`): a seeded sample, decoded as it is used."""

from collections.abc import Sequence
from pathlib import Path

import torch

from osfl.config import ConfigError
from osfl.data.parts import is_passed_over
from osfl.data.pictures import open_picture, to_pixels
from osfl.util.log import log
from osfl.util.seeds import generator_of
from server_app.context import ServerJob


class Pictures:
    """Image files that are decoded when they are used.

    Args:
        files: of the images.
        size: pixels on a side that they are brought to.
    """

    def __init__(self, files: Sequence[Path], size: int):
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> torch.Tensor:
        """uint8 [3, S, S].

        Raises:
            ConfigError: the file is no image, or damaged.
        """
        file = self.files[row]
        try:
            with open_picture(file) as image:
                return to_pixels(image, self.size)
        # Damaged files make Pillow raise errors of many kinds
        except Exception as error:
            raise ConfigError(
                f"rounds.proxy: {file} is not a readable image ({error}). Remove or replace it"
            ) from error


# uint8 [3, S, S] by row: a tensor [N, 3, S, S] is one too.
Proxy = torch.Tensor | Pictures


def pixels(proxy: Proxy, rows: torch.Tensor) -> torch.Tensor:
    """Some proxy images, uint8 [N, 3, S, S]."""
    return torch.stack([proxy[row] for row in rows.tolist()])


def load_proxy(job: ServerJob) -> Proxy:
    """The proxy images: a sample of `rounds.proxy-images`, or all where there are no more.

    Raises:
        ConfigError: no such folder, or fewer than two images in it.
    """
    settings = job.config.rounds
    size = job.config.data.image_size
    if settings.proxy == "public":
        from osfl.data.digits import load_split

        rows = load_split("public").shuffle(seed=job.config.seed)
        count = _sampled(job, len(rows))
        return torch.stack([to_pixels(image, size) for image in rows.select(range(count))["image"]])
    folder = Path(settings.proxy).expanduser()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not _is_passed_over(p, folder))
    if len(files) < 2:
        raise ConfigError(
            f"rounds.proxy = {settings.proxy!r}: must be 'public' or a folder with at least two "
            "images"
        )
    order = torch.randperm(len(files), generator=generator_of(job.config.seed, "feddf", "proxy"))
    sample = order[: _sampled(job, len(files))]
    return Pictures([files[row] for row in sample.tolist()], size)


def _is_passed_over(file: Path, folder: Path) -> bool:
    """Check whether a file, or a folder between it and `folder`, is hidden or a system's own."""
    return any(map(is_passed_over, file.relative_to(folder).parts))


def _sampled(job: ServerJob, there: int) -> int:
    """How many proxy images of those that are there."""
    wanted = job.config.rounds.proxy_images
    if wanted > there:
        log.warning("rounds.proxy-images = %s: there are %s, and all are taken", wanted, there)
    return min(wanted, there)


def check_proxy(job: ServerJob, proxy: Proxy) -> None:
    """Decode every proxy image once: a damaged one is named before the clients work, not after.

    Raises:
        ConfigError: as `Pictures`.
    """
    job.status.phase("checking the proxy images", len(proxy))
    for row in range(len(proxy)):
        proxy[row]
        job.status.advance(row + 1, len(proxy))
