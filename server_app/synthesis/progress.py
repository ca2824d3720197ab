"""Progress callback for denoising steps, set by context so that samplers need not pass it on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[int, int], None]  # (steps finished, total steps)

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def report_steps_to(watcher: Watcher) -> Iterator[None]:
    """Send the context's denoising steps to a watcher. A GPU may lag some steps behind."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def step_done(done: int, total: int) -> None:
    """Report that a denoising loop has finished `done` of `total` steps."""
    if watcher := _watcher.get():
        watcher(done, total)
