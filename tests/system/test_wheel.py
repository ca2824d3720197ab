"""A wheel in an empty environment: without the checkout, `osfl` has all that it needs.

It is built as PyPI's are, from the source distribution.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.settings import ROOT
from tests.helpers.system_tools import ONE_AT_A_TIME, quick_arguments

UV = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".tools" / "bin"))

# The largest file that PyPI accepts without asking
PYPI_BYTES = 100e6

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not find_spec("hatchling"), reason="hatchling builds the wheel: make setup"),
    pytest.mark.skipif(UV is None, reason="uv installs the wheel: make setup fetches it"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.fixture
def installed(built: tuple[Path, Path], tmp_path: Path) -> Path:
    """The `bin` of an environment with the wheel, and this environment's libraries behind it."""
    _, wheel = built
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


def call(program: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Call a program of the environment, from an empty folder if no other is given.

    Returns:
        the finished process.
    """
    folder = folder or program.parents[2] / "empty"
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
    page = "from osfl.ui.app import STATIC; from osfl.ui.rendering import render; "
    page += "print(render('problem.html', status=404, text='x'), *STATIC.iterdir())"
    files = call(installed / "python", "-c", page)
    assert "404: x" in files.stdout, files.stderr
    assert "page.css" in files.stdout

    settings = quick_arguments(Path("digits"), method="prompts-only", job_id="from-a-wheel")
    settings = ["configs/demo.toml", *settings, "num-clients=2"]
    settings += ["synthesis.images-per-class=1", "global-model.steps=2"]
    assert not (tmp_path / "empty" / "configs").exists()
    result = call(installed / "osfl", "run", *ONE_AT_A_TIME, *settings)
    assert result.returncode == 0, result.stdout + result.stderr
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


def test_pypi_would_accept_both_and_show_the_page(built: tuple[Path, Path]) -> None:
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert all(file.stat().st_size < PYPI_BYTES for file in built)
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
        license_file = f"{Path(name).parent}/licenses/LICENSE"
        assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload(decode=True).decode()
    assert page.startswith((ROOT / "README.md").read_text().partition("\n")[0])
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links
    assert all(link.startswith("https://") for link in links), links


def test_flower_hubs_app_runs_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Build its bundle, unpack it elsewhere, and run it as somebody who fetched it does."""
    source = tmp_path / "hub-app"
    shutil.copytree(ROOT / "deploy" / "hub-app", source)
    bundle = call(installed / "flwr", "build", folder=source)
    assert bundle.returncode == 0, bundle.stdout + bundle.stderr
    (file,) = source.glob("*.fab")
    app = tmp_path / "osfl-app"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(app)
    # The digits' own kit: what is found is the wheel's
    smallest = "method='prompts-only' job-id='hub' synthesis.images-per-class=1 synthesis.steps=2"
    command = ["flwr", "run", ".", "--stream", "--run-config", f"{smallest} global-model.steps=2"]
    command += ["--federation-config", f"client-resources-num-cpus={os.cpu_count()}"]
    # The SuperLink that `flwr run` would start by itself must be there within 15 seconds
    script = tmp_path / "run.py"
    script.write_text(
        "import subprocess\n"
        "from pathlib import Path\n"
        "from osfl.launch.flower import local_superlink\n"
        f"with local_superlink(Path({str(tmp_path / 'runs')!r}), Path('cache')) as environment:\n"
        f"    subprocess.run({command}, cwd={str(app)!r}, env=environment, check=True)\n"
    )
    result = call(installed / "python", str(script))
    # The exit code of `flwr run` says nothing of the run
    assert (tmp_path / "runs" / "hub" / "report.html").is_file(), result.stdout + result.stderr
    metrics = json.loads((tmp_path / "runs" / "hub" / "metrics.json").read_text())
    assert metrics["server"]["synthetic_images"] == 2 * 10
