"""Sanitizing of untrusted text: a node's errors and versions, file names, Flower's messages.

Such text goes through `sanitize` where it is read, before it reaches a terminal, a log, a file or
an exception. A terminal obeys ESC and OSC sequences; bidi controls and invisible letters make one
name look like another; and a node can send 50 MB of either.
"""

import logging
import re
import traceback
from urllib.parse import urlsplit

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_NAME_BYTES = 100
# Characters of a value in an error message
MAX_QUOTED = 200
# Characters of a log record, with its traceback
MAX_LOG_CHARACTERS = 20_000
# A password may contain a space, a slash or an @, although it should not. A host with a port, or
# before a colon and a space, is none.
_PORT = r"\d{1,5}[\s/:,;.)'\"\]>]"
_USER_INFO = re.compile(rf"(?<=://)(?:[^\s:/@\[]*:(?!{_PORT})\S[^\n]*|\S*)@")
_QUERY = re.compile(r"(?<=\S)\?\S+")
_FRAGMENT = re.compile(r"(://[^\s#]*)#\S+")
# Scheme, user and place of a URI
_URI = re.compile(r"([\w+.-]+://)([^?#]*@)?([^?#@\s]*)")
# Unicode's default ignorable characters that are letters or marks, which `isprintable` accepts:
# fillers, joiners, variation selectors
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


def sanitize(text: object, limit: int = 300) -> str:
    """Sanitize a text: one line of at most `limit` printable characters. Never raises.

    Line breaks and other white space become spaces. Characters that are invisible or control a
    terminal become U+FFFD. A truncated text ends with its original length. The function is
    idempotent.

    Args:
        text: a text, bytes in UTF-8, or any object, which `str` converts.
    """
    decoded, length = _decode(text, limit)
    if length > limit:
        decoded = _truncate(decoded, length, limit)
    return "".join(map(_visible, decoded))


def sanitize_lines(text: object, limit: int = MAX_LOG_CHARACTERS) -> str:
    """Sanitize a text but keep its line breaks: for our own multi-line messages and tracebacks."""
    decoded, length = _decode(text, limit)
    if length > limit:
        decoded = _truncate(decoded, length, limit)
    return "\n".join("".join(map(_visible, line)) for line in decoded.split("\n"))


def without_credentials(text: str) -> str:
    """Replace user, password, query and fragment of every URI in a text by asterisks."""
    masked = _QUERY.sub("?***", _USER_INFO.sub("***@", text))
    return _FRAGMENT.sub(r"\1#***", masked)


def is_public_uri(uri: str) -> bool:
    """Return whether a URI has no user, password, query, fragment or white space.

    A path may have white space and @, also that of an SQLite store.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        return False
    if not parts.scheme and not parts.netloc:
        return not parts.query
    if parts.query or parts.fragment:
        return False
    if parts.scheme in ("file", "sqlite") and not parts.netloc:
        return True
    return "@" not in uri and not any(map(str.isspace, uri))


def masked_uri(uri: str) -> str:
    """Return a URI; of one that `is_public_uri` refuses, scheme and place alone."""
    if is_public_uri(uri):
        return uri
    match = _URI.match(uri)
    # Whether such an @ ends a password is unknown
    if match is None or "@" in uri[match.end() :]:
        return "***"
    return f"{match[1]}{'***@' if match[2] else ''}{match[3]}"


def quote(value: object, limit: int = MAX_QUOTED) -> str:
    """Quote a value for an error message: its sanitized `repr`.

    A text longer than `limit` is truncated, and its length is added.
    """
    if isinstance(value, str) and len(value) > limit:
        return f"{sanitize(repr(value[:limit]), 2 * limit)}… ({len(value):,} characters)"
    try:
        return sanitize(repr(value), 2 * limit)
    # Python refuses to write an integer of more than about 4,300 digits
    except ValueError:
        return f"(a {type(value).__name__} that is too long to show)"


def _truncate(text: str, length: int, limit: int) -> str:
    """Truncate to `limit` characters, of which the last state the original length."""
    note = f"… ({length:,} characters)"
    if len(note) >= limit:
        note = "…"
    return text[: max(0, limit - len(note))] + note


def _decode(value: object, limit: int) -> tuple[str, int]:
    """Return a value as text, and its length.

    Of bytes, only enough for `limit` characters are decoded, and the length is in bytes.
    """
    try:
        if isinstance(value, bytes):
            return value[: 4 * limit].decode("utf-8", "replace"), len(value)
        text = value if isinstance(value, str) else str(value)
    # An object's own __str__ may raise anything
    except Exception:
        text = f"({type(value).__name__} without text)"
    return text, len(text)


def _visible(character: str) -> str:
    if character.isprintable() and character not in _INVISIBLE:
        return character
    return " " if character.isspace() else REPLACEMENT


def sanitize_record(record: logging.LogRecord) -> bool:
    """Sanitize a log record and its traceback: a filter for loggers that drops no record."""
    try:
        record.msg = sanitize_lines(record.getMessage())
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if record.exc_text:
            record.exc_text = sanitize_lines(record.exc_text)
    # Logging must not end a run
    except Exception:
        record.msg = "(a line that cannot be shown)"
        record.args = ()
    return True


def folder_name(name: str) -> str:
    """Turn a name from a data set into one for a folder: `Real World` becomes `Real_World`."""
    return "_".join(re.split(r"[\s/\\,]+", name.strip().lstrip("-.")))


def safe_name(text: str) -> str:
    """Turn a text into a file or folder name: all but letters and digits become `_`."""
    return "".join(c if c.isalnum() else "_" for c in text)


def name_problem(name: str) -> str:
    """Say why a name is unfit for a folder or for a prompt; "" if it is fit."""
    if not name.strip():
        return "is empty"
    if sanitize(name, len(name)) != name:
        return "has a character that cannot be printed, such as a line break"
    if "/" in name or "\\" in name:
        return "has a slash"
    if name[0] in "-.":
        return f"begins with {name[0]!r}"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"has {len(name.encode())} bytes, more than {MAX_NAME_BYTES}"
    return ""
