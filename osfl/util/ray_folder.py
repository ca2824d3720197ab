"""The folder of Ray's sockets, whose paths have a limit."""

import os
from collections.abc import Mapping

from osfl.config import ConfigError
from osfl.util.text import quoted

# Ray's sockets are some 70 bytes below this folder, and a socket's path has at most 107
MOST_BYTES = 36
# Where Ray itself goes when no variable names a folder
USUAL = "/tmp"


def ray_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that Ray can make its sockets; {} where it can without.

    A $TMPDIR that Ray cannot use is passed over for /tmp, as Python's own `tempfile` does.

    Raises:
        ConfigError: $RAY_TMPDIR is too long, or $TMPDIR is and /tmp cannot be written.
    """
    key = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    folder = environment.get(key, "")
    short = len(os.fsencode(folder)) <= MOST_BYTES
    if short and (not folder or key == "RAY_TMPDIR" or _is_usable(folder)):
        return {}
    if key == "TMPDIR" and _is_usable(USUAL):
        return {"RAY_TMPDIR": USUAL}
    raise ConfigError(
        f"{key} = {quoted(folder)}: Ray cannot make its sockets there; set {key} to a folder that "
        f"can be written and whose path has at most {MOST_BYTES} bytes"
    )


def _is_usable(folder: str) -> bool:
    return os.path.isabs(folder) and os.access(folder, os.W_OK | os.X_OK)
