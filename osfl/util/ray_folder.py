"""The folder of Ray's sockets, whose paths are limited in length."""

import os
from collections.abc import Mapping

from osfl.config import ConfigError
from osfl.util.text import quote

# Ray adds about 70 bytes to this folder's path, and a socket's path has at most 107
MAX_PATH_BYTES = 36
# Ray's default
DEFAULT = "/tmp"


def ray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set so that Ray can create its sockets; often none.

    A $TMPDIR that Ray cannot use is replaced by /tmp, as Python's own `tempfile` does.

    Raises:
        ConfigError: $RAY_TMPDIR is too long, or $TMPDIR is unusable and /tmp is not writable.
    """
    key = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    folder = environment.get(key, "")
    short = len(os.fsencode(folder)) <= MAX_PATH_BYTES
    if short and (not folder or key == "RAY_TMPDIR" or _is_usable(folder)):
        return {}
    if key == "TMPDIR" and _is_usable(DEFAULT):
        return {"RAY_TMPDIR": DEFAULT}
    raise ConfigError(
        f"{key} = {quote(folder)}: Ray cannot create its sockets there; set {key} to a writable "
        f"folder whose path has at most {MAX_PATH_BYTES} bytes"
    )


def _is_usable(folder: str) -> bool:
    return os.path.isabs(folder) and os.access(folder, os.W_OK | os.X_OK)
