"""Import of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without collecting garbage.

    Collections take a ninth of the time in which diffusers is imported: they walk through hundreds
    of thousands of objects of modules, which stay.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
