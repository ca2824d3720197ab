"""Codes that replace a client's exceptions if a privacy guarantee is requested.

The message of an exception may quote labels, column values and file names. A code only says what
kind of thing failed.
"""

import re

# By the name of an exception class or of a parent class, so that nothing needs to be imported
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
SEE_LOG = "(its own log has the details)"
_CODED = re.compile(rf"\b({'|'.join({*CODES.values(), OTHER})}) {re.escape(SEE_LOG)}")


def error_code(error: BaseException) -> str:
    """Return an exception's code, and a pointer to the site's own log for its operator."""
    codes = (CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in CODES)
    return f"{next(codes, OTHER)} {SEE_LOG}"


def find_error_code(text: str) -> str:
    """Return the text of `error_code` without Flower's words around it, or "" if there is none."""
    match = _CODED.search(text)
    return match[0] if match else ""
