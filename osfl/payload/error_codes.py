"""The codes that stand for a client's exceptions where a guarantee of privacy is asked for.

An exception's words may quote labels, column values and file names. A code says what kind of thing
failed and nothing else.
"""

import re

# By the name of the exception's class or of a parent class, so that no class needs an import
CODES = {
    "ConfigError": "SETTINGS",
    "DataError": "DATA",
    "KitError": "KIT",
    "ClassifierError": "TRAINING",
    "OSError": "FILES",
    "ImportError": "PACKAGES",
    "MemoryError": "MEMORY",
    "OutOfMemoryError": "MEMORY",
}
OTHER = "UNEXPECTED"
DETAILS = "(its own log has the details)"
_CODED = re.compile(rf"\b({'|'.join({*CODES.values(), OTHER})}) {re.escape(DETAILS)}")


def coded(error: BaseException) -> str:
    """Return an exception's code and where the site's operator finds its words."""
    known = (CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in CODES)
    return f"{next(known, OTHER)} {DETAILS}"


def find_coded(text: str) -> str:
    """Return what `coded` made, without what Flower puts around it; "" where there is none."""
    found = _CODED.search(text)
    return found[0] if found else ""
