"""Words from outside: a node's errors and versions, names of files, what Flower says.

They go through `plain` where they are read, before they reach a terminal, a log, a file or an
exception. A terminal obeys ESC and OSC sequences; bidi controls and invisible letters make a name
look like another; a node can send 50 MB of either.
"""

import logging
import re
import traceback

MARK = "\N{REPLACEMENT CHARACTER}"
MOST_NAME_BYTES = 100
MOST_QUOTED = 200  # characters of a value in an error
LOG_CHARACTERS = 20_000  # of a line of the log, with its traceback
# Unicode's default ignorable characters that are letters or marks, so that `isprintable` passes
# them: fillers, joiners, variation selectors.
_INVISIBLE = frozenset(
    map(
        chr,
        (
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180F, 0x3164, 0xFFA0),
            *range(0x180B, 0x180E),
            *range(0xFE00, 0xFE10),
            *range(0xE0100, 0xE01F0),
        ),
    )
)


def plain(text: object, limit: int = 300) -> str:
    """A text from outside on one line: printable, at most `limit` characters. Never raises.

    Line breaks and other white space become spaces; what a terminal would obey or nobody could see
    becomes U+FFFD. What was cut off is counted at the end. `plain(plain(text))` changes nothing.

    Args:
        text: a text, bytes in UTF-8, or what `str` makes of anything else.
    """
    words, length = _text(text, limit)
    if length > limit:
        words = _cut(words, length, limit)
    return "".join(map(_visible, words))


def plain_lines(text: object, limit: int = LOG_CHARACTERS) -> str:
    """As `plain`, but line breaks stay: for our own messages of several lines, and tracebacks."""
    words, length = _text(text, limit)
    if length > limit:
        words = _cut(words, length, limit)
    return "\n".join("".join(map(_visible, line)) for line in words.split("\n"))


def quoted(value: object, limit: int = MOST_QUOTED) -> str:
    """A value as an error quotes it: as `repr` writes it, printable, and not too long.

    Args:
        value: a setting's value, or any other; a text that is longer than `limit` is cut, and its
            length is added.
    """
    if isinstance(value, str) and len(value) > limit:
        return f"{plain(repr(value[:limit]), 2 * limit)}… ({len(value):,} characters)"
    try:
        return plain(repr(value), 2 * limit)
    # Python writes no whole number of more than some 4,300 digits
    except ValueError:
        return f"(a {type(value).__name__} that is too long to show)"


def _cut(words: str, length: int, limit: int) -> str:
    """The first words, and how long the whole was: `limit` characters together."""
    note = f"… ({length:,} characters)"
    if len(note) >= limit:
        note = "…"
    return words[: max(0, limit - len(note))] + note


def _text(text: object, limit: int) -> tuple[str, int]:
    """(as text, of bytes at least the first `limit` characters; the length, of bytes in bytes)."""
    try:
        if isinstance(text, bytes):
            return text[: 4 * limit].decode("utf-8", "replace"), len(text)
        words = text if isinstance(text, str) else str(text)
        return words, len(words)
    except Exception:  # whatever an object's own __str__ raises
        words = f"({type(text).__name__} without words)"
        return words, len(words)


def _visible(character: str) -> str:
    if character.isprintable() and character not in _INVISIBLE:
        return character
    return " " if character.isspace() else MARK


def plain_record(record: logging.LogRecord) -> bool:
    """A filter for loggers: every line, and every traceback, is plain. It drops nothing."""
    try:
        record.msg = plain_lines(record.getMessage())
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if record.exc_text:
            record.exc_text = plain_lines(record.exc_text)
    except Exception:  # a log never ends a run
        record.msg = "(a line that cannot be shown)"
        record.args = ()
    return True


def identifier(name: str) -> str:
    """A name from the wild as one that a folder can have: `Real World` is `Real_World`."""
    return "_".join(re.split(r"[\s/\\,]+", name.strip().lstrip("-.")))


def safe_name(text: str) -> str:
    """A text as a file's or folder's name: letters and digits, `_` for all else."""
    return "".join(c if c.isalnum() else "_" for c in text)


def name_problem(name: str) -> str:
    """Why a text can be neither a folder's name nor the words of a prompt; empty: it can be."""
    if not name.strip():
        return "is empty"
    if plain(name, len(name)) != name:
        return "has a character that cannot be printed, such as a line break"
    if "/" in name or "\\" in name:
        return "has a slash"
    if name[0] in "-.":
        return f"begins with {name[0]!r}"
    if len(name.encode()) > MOST_NAME_BYTES:
        return f"has {len(name.encode())} bytes, more than {MOST_NAME_BYTES}"
    return ""
