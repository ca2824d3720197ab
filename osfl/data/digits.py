"""The embedded data set: handwritten digits in six domains.

Scikit-learn's 1,797 real handwritten digits are rendered in six styles at 32 px. They are split by
scan, so that no scan is in two of the first three splits:

==========  ==================  =================================================================
split       scans               images
==========  ==================  =================================================================
public      all others          the training set of the kit: 12,000 renderings, long-tailed
private     60 per class        six clients with one domain each, 10 scans per class and client
test        30 per class        every test scan in every domain: 300 images per domain
validation  30 per class, of    like test, rendered again: for the choice of settings, so that
            the public scans    the test images stay unseen
==========  ==================  =================================================================

The public corpus is long-tailed like the web: 75 % photographs, mostly captioned by class only, and
5 % of each other style, mostly captioned with the style. A client's domain is a narrow slice of its
style (`DOMAIN_SLICES`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from osfl.data.render import CLASSES, DOMAIN_SLICES, STYLES, WHOLE_STYLE, render

SPLITS = ("public", "private", "test", "validation")
# Per client
IMAGES_PER_CLASS = 10
# Of test and of validation
TEST_SCANS_PER_CLASS = 30
PUBLIC_IMAGES = 12_000
# The other five styles have equal shares of the remaining images
PHOTO_SHARE = 0.75
# Shares of public images with a caption by class only, with the style, and without a caption
PHOTO_CAPTIONS = (0.85, 0.12, 0.03)
STYLE_CAPTIONS = (0.09, 0.88, 0.03)
SEED = 20_26


@dataclass(frozen=True)
class Digits:
    """Rendered digits, with one entry per image in each field.

    Attributes:
        images: [N, 32, 32, 3] uint8 RGB.
        labels: [N] int64.
        domains: the styles.
        sources: [N] int64, indices of the scans.
        captions: "" for images without one.
    """

    images: np.ndarray
    labels: np.ndarray
    domains: Sequence[str]
    sources: np.ndarray
    captions: Sequence[str]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int] | np.ndarray) -> "Digits":
        """Return the images with these numbers."""
        return Digits(
            self.images[rows],
            self.labels[rows],
            [self.domains[row] for row in rows],
            self.sources[rows],
            [self.captions[row] for row in rows],
        )


@cache
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's scans [1797, 8, 8], in 0 to 16, and their labels [1797].

    As `sklearn.datasets.load_digits`, whose import takes seconds in each client's process.
    """
    library = find_spec("sklearn")
    if library is None or library.origin is None:
        raise ModuleNotFoundError("the digits require scikit-learn: pip install scikit-learn")
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int)


def split_sources() -> dict[str, np.ndarray]:
    """Partition scikit-learn's 1,797 digits by class, and return their indices per split."""
    _, labels = load_scans()
    rng = np.random.default_rng(SEED)
    private_count = IMAGES_PER_CLASS * len(STYLES)
    parts: dict[str, list[np.ndarray]] = {"public": [], "private": [], "test": []}
    for label in range(len(CLASSES)):
        order = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.split(order, [private_count, private_count + TEST_SCANS_PER_CLASS])
        for split, part in zip(("private", "test", "public"), cuts, strict=True):
            parts[split].append(part)
    return {split: np.concatenate(part) for split, part in parts.items()}


@lru_cache(maxsize=len(SPLITS))
def load_split(split: str) -> Digits:
    """Render a split.

    The images are the same on every call and machine. Only the public split has captions.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: the digits have the splits {', '.join(SPLITS)}")
    scans, labels = load_scans()
    rng = np.random.default_rng([SEED, SPLITS.index(split)])
    rows = _public_rows(labels, rng) if split == "public" else _domain_rows(split, labels)
    images = []
    for source, style, _ in rows:
        ranges = WHOLE_STYLE if split == "public" else DOMAIN_SLICES[style]
        images.append(render(scans[source] / 16, style, ranges, rng))
    sources = np.array([source for source, _, _ in rows])
    return Digits(
        np.stack(images),
        labels[sources],
        [style for _, style, _ in rows],
        sources,
        [caption for _, _, caption in rows],
    )


def _domain_rows(split: str, labels: np.ndarray) -> list[tuple[int, str, str]]:
    """Return (source, domain, "") per image: private scans in one domain, others in all six."""
    sources = _validation_sources(labels) if split == "validation" else split_sources()[split]
    if split != "private":
        return [(int(s), style, "") for style in STYLES for s in sources]
    rows = []
    for label in range(len(CLASSES)):
        per_client = np.split(sources[labels[sources] == label], len(STYLES))
        rows += [
            (int(s), style, "")
            for style, part in zip(STYLES, per_client, strict=True)
            for s in part
        ]
    return rows


def _validation_sources(labels: np.ndarray) -> np.ndarray:
    """Return the first public scans of every class."""
    public = split_sources()["public"]
    scans = [
        public[labels[public] == label][:TEST_SCANS_PER_CLASS] for label in range(len(CLASSES))
    ]
    return np.concatenate(scans)


def _public_rows(labels: np.ndarray, rng: np.random.Generator) -> list[tuple[int, str, str]]:
    """Return (source, style, caption) for each image of the long-tailed public corpus."""
    sources = split_sources()["public"]
    rare_styles = STYLES[1:]
    rows = []
    for _ in range(PUBLIC_IMAGES):
        source = int(rng.choice(sources))
        style = STYLES[0] if rng.random() < PHOTO_SHARE else str(rng.choice(rare_styles))
        shares = PHOTO_CAPTIONS if style == STYLES[0] else STYLE_CAPTIONS
        rows.append((source, style, _caption(CLASSES[labels[source]], style, shares, rng)))
    return rows


def _caption(name: str, style: str, shares: tuple[float, ...], rng: np.random.Generator) -> str:
    kind = rng.choice(3, p=shares)
    by_class = (f"an image of {name}", f"an image of a {name}", f"a {name}", name)
    with_style = (
        f"a {style} of a {name}",
        f"a {name} in {style} style",
        f"an image of a {name}, {style}",
    )
    return str(rng.choice((by_class, with_style, ("",))[kind]))
