"""A long TMPDIR, as a cluster's jobs have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.config import ConfigError
from osfl.util import ray_folder as places
from osfl.util.ray_folder import ray_variables

LONG = "/scratch/" + "0" * 60


@pytest.mark.parametrize(
    "environment", [{}, {"TMPDIR": "/tmp"}, {"RAY_TMPDIR": "/r", "TMPDIR": LONG}]
)
def test_short_paths_stay(environment: dict[str, str]) -> None:
    assert ray_variables(environment) == {}


def test_a_long_path_is_replaced_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_variables({"TMPDIR": LONG}) == {"RAY_TMPDIR": "/tmp"}
    assert ray_variables({"TMPDIR": "/nowhere"}) == {"RAY_TMPDIR": "/tmp"}
    assert ray_variables({"TMPDIR": "."}) == {"RAY_TMPDIR": "/tmp"}
    # Bytes count, not characters
    assert ray_variables({"TMPDIR": "/tmp/" + "ä" * 18}) == {"RAY_TMPDIR": "/tmp"}
    with pytest.raises(ConfigError, match="RAY_TMPDIR = .*Ray cannot create its sockets there"):
        ray_variables({"RAY_TMPDIR": LONG})
    monkeypatch.setattr(places, "DEFAULT", "/nowhere")
    with pytest.raises(ConfigError, match="TMPDIR = .*set TMPDIR to a writable folder"):
        ray_variables({"TMPDIR": LONG})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", [places.MAX_PATH_BYTES, 60])
def test_ray_begins_at_the_limit_and_beyond(tmp_path: Path, length: int) -> None:
    """The longest folder that is left alone works, and so does a longer one."""
    folder = Path("/tmp") / f"osfl-{os.getpid()}-".ljust(length - len("/tmp/"), "0")
    folder.mkdir()
    code = (
        "import os, ray; from osfl.util.ray_folder import ray_variables\n"
        "os.environ.update(ray_variables(os.environ))\n"
        "ray.init(address='local', include_dashboard=False, num_cpus=1)\n"
        "print('begun')"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RAY_TMPDIR"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert "begun" in result.stdout, result.stderr[-2000:]
