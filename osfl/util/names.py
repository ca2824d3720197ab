"""Names in a configuration: lists of names in one text, and names that become file names."""

from functools import lru_cache
from pathlib import Path

from osfl.util.text import quote, sanitize

# Prefixes of architectures from outside torchvision: timm's own models, and hub models for timm
BACKBONES = ("timm:", "hf-hub:")
_TIMM = "timm:"
# Trackers of runs
TRACKERS = ("tensorboard", "mlflow")


def split_names(text: str) -> tuple[str, ...]:
    """Split `"a, b"` into `("a", "b")`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def problem_of_backbone(architecture: str, key: str) -> str:
    """Say what is wrong with the name of an architecture of timm's; "": nothing.

    timm itself would read `local-dir:FOLDER`, and fetch `hf-hub:NAME`.

    Args:
        key: of the configuration, for the message.
    """
    if architecture.startswith(_TIMM) and set(architecture.removeprefix(_TIMM)) & set(":/\\"):
        return (
            f"{key} = {sanitize(architecture, 200)!r}: must be timm:NAME, a name of timm's "
            "alone; for "
            "a folder or a model of the hub set hf-hub:..."
        )
    return ""


@lru_cache(maxsize=16)
def parse_words(text: str) -> dict[str, str]:
    """Parse `"mouse=computer mouse, a=b"` into a dictionary.

    Raises:
        ValueError: a part has no `=`, or an empty side.
    """
    phrases = {}
    for part in split_names(text):
        name, _, phrase = map(str.strip, part.partition("="))
        if not name or not phrase:
            raise ValueError(f"{quote(part)} must be name=words")
        phrases[name] = phrase
    return phrases


IDENTIFIER_RULE = "must be 1 to 64 letters, digits, '-' or '_', and not 'average'"


def is_identifier(text: str) -> bool:
    """Return whether a job or client id is valid, and so safe as a file name.

    `average` is not, because it is a column of the tables.
    """
    return (
        text != "average"
        and 0 < len(text) <= 64
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
    )


def is_absolute(path: str) -> bool:
    """Return whether a path is absolute, or begins with a user's home."""
    try:
        return Path(path).expanduser().is_absolute()
    # The home of an unknown user
    except RuntimeError:
        return False


def not_absolute(key: str, path: str) -> str:
    """Return the problem with a key's path that is not absolute."""
    return (
        f"{key} = {quote(path)}: must be an absolute path, because Flower starts server and "
        "clients in a folder of its own"
    )
