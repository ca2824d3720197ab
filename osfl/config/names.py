"""Names in a configuration: several in one text, and those that become file names."""


def split_names(text: str) -> tuple[str, ...]:
    """`"a, b"` to `("a", "b")`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
