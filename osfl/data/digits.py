"""Six handwritten domains.

Scikit-learn's 1,797 real handwritten digits, drawn in six styles at 32 px.

The scans are split by source image, so that no scan is in two of the first three splits:

==========  ==================  =================================================================
split       scans               images
==========  ==================  =================================================================
public      all that are left   the web that the kit is trained on: 12,000 drawings, long-tailed
private     60 a class          six clients, one domain each, 10 scans a class and client
test        30 a class          every test scan in every domain: 300 images a domain
validation  30 a class, of the  as test, drawn anew: to choose settings by, so that the test
            public ones         chooses none
==========  ==================  =================================================================

The public corpus is long-tailed like the web: 75 % photographs, nearly always captioned by class
alone, and 5 % of each other style, nearly always captioned with the style. A client's domain is a
narrow slice of its style (`DOMAIN_SLICES`).
"""

from functools import lru_cache

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from osfl.data.render import CLASSES, DOMAIN_SLICES, STYLES, WHOLE_STYLE, render

SPLITS = ("public", "private", "test", "validation")
IMAGES_PER_CLASS = 10  # of each client
TEST_SCANS_PER_CLASS = 30  # and of the validation
PUBLIC_IMAGES = 12_000
PHOTO_SHARE = 0.75  # the other five styles share the rest equally
# How a public image is captioned: (by class alone, with the style, not at all).
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
    """Indices into scikit-learn's digits: a partition of all 1,797, stratified by class."""
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
    """One split as a Hugging Face data set with columns image, label, domain, source, caption.

    Deterministic: the same drawings on every call and machine. Only the public split has captions.

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
    """(source, domain, ""): private, each scan in one domain; test and validation, in all six."""
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
    """The first public scans of every class."""
    public = split_sources()["public"]
    scans = [
        public[labels[public] == label][:TEST_SCANS_PER_CLASS] for label in range(len(CLASSES))
    ]
    return np.concatenate(scans)


def _public_rows(labels: np.ndarray, rng: np.random.Generator) -> list[tuple[int, str, str]]:
    """(source, style, caption) of the long-tailed public corpus."""
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
