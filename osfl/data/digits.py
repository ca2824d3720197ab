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

from functools import lru_cache

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

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

_FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=list(CLASSES)),
        "domain": datasets.Value("string"),
        "source": datasets.Value("int32"),
        "caption": datasets.Value("string"),
    }
)


def split_sources() -> dict[str, np.ndarray]:
    """Partition scikit-learn's 1,797 digits by class, and return their indices per split."""
    labels = load_digits().target
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
def load_split(split: str) -> datasets.Dataset:
    """Return a split as a data set with the columns image, label, domain, source and caption.

    The images are the same on every call and machine. Only the public split has captions.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: the digits have the splits {', '.join(SPLITS)}")
    scans = load_digits()
    rng = np.random.default_rng([SEED, SPLITS.index(split)])
    rows = (
        _public_rows(scans.target, rng) if split == "public" else _domain_rows(split, scans.target)
    )
    columns: dict[str, list] = {name: [] for name in _FEATURES}
    for source, style, caption in rows:
        ranges = WHOLE_STYLE if split == "public" else DOMAIN_SLICES[style]
        columns["image"].append(
            Image.fromarray(render(scans.images[source] / 16, style, ranges, rng))
        )
        columns["label"].append(int(scans.target[source]))
        columns["domain"].append(style)
        columns["source"].append(int(source))
        columns["caption"].append(caption)
    return datasets.Dataset.from_dict(columns, features=_FEATURES)


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
    others = STYLES[1:]
    rows = []
    for _ in range(PUBLIC_IMAGES):
        source = int(rng.choice(sources))
        style = STYLES[0] if rng.random() < PHOTO_SHARE else str(rng.choice(others))
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
