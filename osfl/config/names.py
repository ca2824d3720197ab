"""Names in a configuration: several in one text, and those that become file names."""

from functools import lru_cache

from osfl.util.text import plain, quoted

# How architectures begin that are not torchvision's: timm's own, and those of the hub for timm
BACKBONES = ("timm:", "hf-hub:")
_TIMM = "timm:"


def split_names(text: str) -> tuple[str, ...]:
    """`"a, b"` to `("a", "b")`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def problem_of_backbone(architecture: str, key: str) -> str:
    """Say what is wrong with the name of an architecture of timm's; "": nothing.

    timm itself would read `local-dir:FOLDER`, and fetch `hf-hub:NAME`.

    Args:
        key: of the configuration, for the message.
    """
    if architecture.startswith(_TIMM) and set(architecture.removeprefix(_TIMM)) & set(":/\\"):
        return (
            f"{key} = {plain(architecture, 200)!r}: must be timm:NAME, a name of timm's alone; for "
            "a folder or a model of the hub set hf-hub:..."
        )
    return ""


@lru_cache(maxsize=16)
def named_words(text: str) -> dict[str, str]:
    """`"mouse=computer mouse, a=b"` by name.

    Raises:
        ValueError: a part without `=`, or with nothing on a side of it.
    """
    words = {}
    for part in split_names(text):
        name, _, word = map(str.strip, part.partition("="))
        if not name or not word:
            raise ValueError(f"{quoted(part)} must be name=words")
        words[name] = word
    return words


def is_identifier(text: str) -> bool:
    """Whether a job or client id is safe as a file name.

    `average` is not: it has its own column in the tables.
    """
    return (
        text != "average"
        and 0 < len(text) <= 64
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
    )
