"""Server-sent events: the sections of a page that have changed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.concurrency import run_in_threadpool

# Seconds between two looks at the files
INTERVAL = 0.5
# Share of the time in which a large run's page is read and rendered, at most
SHARE = 0.2
# Seconds after which a comment is sent; a connection that its reader has left ends by it
QUIET = 15.0


class Live(Protocol):
    """A page that changes."""

    def stamp(self) -> object:
        """Return a value that changes when the page may have changed."""

    def sections(self) -> dict[str, str]:
        """Render the page's sections, as HTML by the id of their element."""

    def is_over(self) -> bool:
        """Return whether the page will not change any more."""


async def stream_sections(live: Live, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield an event `section` for each section that changes, all at first; `end` at the end.

    Args:
        is_ending: whether the server is ending.
    """
    shown: dict[str, str] = {}
    stamp: object = None
    quiet = 0.0
    while not is_ending():
        began = time.monotonic()
        current = await run_in_threadpool(live.stamp)
        if current != stamp:
            stamp = current
            sections = await run_in_threadpool(live.sections)
            for name, html in sections.items():
                if shown.get(name) != html:
                    yield event("section", {"id": name, "html": html})
                    quiet = 0.0
            shown = sections
            if await run_in_threadpool(live.is_over):
                yield event("end", {})
                return
        if quiet >= QUIET:
            yield ": still here\n\n"
            quiet = 0.0
        pause = max(INTERVAL, (time.monotonic() - began) * (1 / SHARE - 1))
        quiet += pause
        await sleep_until(is_ending, pause)


async def sleep_until(is_ending: Callable[[], bool], seconds: float) -> None:
    """Sleep, or wake up when the server is ending."""
    end = time.monotonic() + seconds
    while not is_ending() and (pause := end - time.monotonic()) > 0:
        await asyncio.sleep(min(INTERVAL, pause))


def event(name: str, content: object) -> str:
    """Format a server-sent event with a JSON value, which has no line break."""
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
