"""A wheel in an empty environment: without the checkout, `osfl` has all that it needs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.settings import ROOT
from tests.helpers.system_tools import ONE_AT_A_TIME, quick_arguments

UV = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".tools" / "bin"))

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not find_spec("hatchling"), reason="hatchling builds the wheel: make setup"),
    pytest.mark.skipif(UV is None, reason="uv installs the wheel: make setup fetches it"),
]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The `bin` of an environment with the wheel, and this environment's libraries behind it."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [UV, "pip", "install", "--no-deps", "--offline", "--python", python, wheel]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = environment.glob("lib/*/site-packages")
    # A .pth file adds a folder, and not the folders that the .pth files in it name: no checkout
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for script in distribution("flwr").entry_points.select(group="console_scripts"):
        program = environment / "bin" / script.name
        program.write_text(
            f"#!{python}\nimport sys\nfrom {script.module} import {script.attr}\n"
            f"sys.exit({script.attr}())\n"
        )
        program.chmod(0o755)
    return environment / "bin"


def call(program: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Call a program of the environment from an empty folder; returns the finished process."""
    folder = program.parents[2] / "empty"
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "PATH": "/usr/bin:/bin"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_wheel_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = "import osfl, server_app; from osfl import settings; from osfl.kit import kits; "
    where += "print(osfl.__file__, server_app.__file__, settings.shipped('pyproject.toml'), "
    where += "settings.shipped('configs'), kits.find_kit('digits'), sep='\\n')"
    places = call(installed / "python", "-c", where)
    assert places.returncode == 0, places.stderr
    assert all(str(installed.parent) in place for place in places.stdout.splitlines()), places

    settings = quick_arguments(Path("digits"), method="prompts-only", job_id="from-a-wheel")
    settings = ["configs/demo.toml", *settings, "num-clients=2"]
    settings += ["synthesis.images-per-class=1", "global-model.steps=2"]
    assert not (tmp_path / "empty" / "configs").exists()
    done = call(installed / "osfl", "run", *ONE_AT_A_TIME, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "empty" / "runs" / "from-a-wheel"
    assert (folder / "report.html").is_file()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["server"]["synthetic_images"] == 2 * 10


def test_the_wheel_has_what_git_has(installed: Path) -> None:
    """Every config and every file of the kits."""
    (packages,) = installed.parent.glob("lib/*/site-packages")
    for ours, theirs in (("configs", "osfl_app/configs"), ("kits", "osfl_kits")):
        files = [file for file in (ROOT / ours).rglob("*") if file.is_file()]
        assert files
        for file in files:
            copy = packages / theirs / file.relative_to(ROOT / ours)
            assert copy.read_bytes() == file.read_bytes(), copy
    doctor = call(installed / "osfl", "doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
