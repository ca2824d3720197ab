"""Who hears of every denoising step of a batch, without the methods' samplers passing it on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[int, int], None]  # (steps done, steps in all)

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within, `step_done` tells this one; a GPU may be some steps behind what it is told."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def step_done(done: int, total: int) -> None:
    """A denoising loop has done so many of its steps."""
    if watcher := _watcher.get():
        watcher(done, total)
