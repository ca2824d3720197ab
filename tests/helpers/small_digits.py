"""Small subsets of the embedded digits."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest


@cache
def public_digits(load_split: Any, count: int = 2500) -> Any:
    """A public corpus drawn as the whole is, but smaller.

    Every process that needs one would draw 12,000 images.
    """
    from osfl.data import digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "PUBLIC_IMAGES", count)
        return load_split.__wrapped__("public")


@cache
def few_digits(load_split: Callable[[str], Any], split: str) -> Any:
    """Three images of every class and domain of a split, two of the test's; a small public one."""
    if split == "public":
        return public_digits(load_split)
    images = load_split(split)
    counts: Counter = Counter()
    rows = []
    for i, kind in enumerate(zip(images.labels.tolist(), images.domains, strict=True)):
        counts[kind] += 1
        if counts[kind] <= (2 if split == "test" else 3):
            rows.append(i)
    return images.select(rows)
