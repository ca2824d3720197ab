"""Templates, with every text sanitized and escaped."""

import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from osfl.run_folder.report.page import human_bytes, human_seconds
from osfl.run_folder.status import split_details
from osfl.util.text import sanitize

TEMPLATES = Path(__file__).parent / "templates"
# Characters of a text on a page
MAX_CHARACTERS = 2000
UNKNOWN = "–"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(bytes=_bytes, count=_count, seconds=_seconds, percent=_percent)
    environment.filters.update(number=_number, time=_time, address=_address)
    environment.filters.update(split_details=split_details)
    return environment


def render(template: str, **values: Any) -> str:
    """Render a template of `osfl/ui/templates`."""
    return _environment().get_template(template).render(**values)


def _shown(value: Any) -> Any:
    """Sanitize a text. Markup, which templates make, is not `str` and stays as it is."""
    return sanitize(value, MAX_CHARACTERS) if type(value) is str else value


def _address(text: str) -> str:
    """Quote a part of an address; slashes stay."""
    return quote(text, safe="/", errors="replace")


def _percent(value: float | None) -> str:
    """Format as "88.4 %", a missing or undefined value as a dash."""
    return UNKNOWN if value is None or value != value else f"{value:.1f} %"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None or value != value else f"{value:g}"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _bytes(value: float | None) -> str:
    return UNKNOWN if value is None else human_bytes(value)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else human_seconds(value)


def _time(value: float | None) -> str:
    """Format seconds since 1970 as this machine's local time."""
    if value is None:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
