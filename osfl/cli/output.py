"""Handle failures of standard output."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output that was closed, as by `| head`, or whose disk is full."""


class _Output:
    """A text stream whose failures raise OutputError, unlike those of other files."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with _as_output_error():
            return self._stream.write(text)

    def flush(self) -> None:
        with _as_output_error():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None


@contextmanager
def watched_output() -> Iterator[None]:
    """Exit with 1 and a message on stderr if standard output fails.

    Raises:
        SystemExit: standard output could not be written.
    """
    stream = sys.stdout
    # None if it was closed from the start
    if stream is None:
        yield
        return
    watched = _Output(stream)
    sys.stdout = watched
    try:
        try:
            yield
        finally:
            watched.flush()
    except OutputError as error:
        _discard(stream)
        print_to_stderr(f"error {error}")
        raise SystemExit(1) from None
    finally:
        sys.stdout = stream


def print_to_stderr(text: str) -> None:
    """Print a line on stderr, unless it is closed too."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard a stream's buffer, which Python would otherwise flush at exit, exiting with 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
