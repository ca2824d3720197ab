"""deploy/hub-app, the app for Flower Hub: Flower's own checks, and that it is of this release.

`system/test_wheel.py` runs it.
"""

import runpy
import shutil
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import get_fab_metadata, load_and_validate

from tests.helpers.settings import ROOT

# Its package has a function of the same name
publish = import_module("flwr.cli.app_cmd.publish")
APP = ROOT / "deploy" / "hub-app"
PROJECT = tomllib.loads((APP / "pyproject.toml").read_text())["project"]
OSFL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check(app: Path) -> list[str]:
    """Check an app as `flwr app publish` does before it sends it; returns the names of its files.

    Raises:
        ClickException, ValueError: Flower Hub would not get it.
    """
    config, warnings = load_and_validate(app / "pyproject.toml")
    assert warnings == []
    publish._validate_app_name(app.name, "Flower App directory name")
    publish._validate_description(config["project"].get("description", ""))
    files = publish._collect_file_paths(app)
    publish._validate_files(files)
    return [file.relative_to(app).as_posix() for file in files]


def test_flower_hub_would_accept_it(tmp_path: Path) -> None:
    app = tmp_path / "hub-app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    sent = ["LICENSE", "README.md", "osfl_hub/client.py", "osfl_hub/server.py", "pyproject.toml"]
    assert check(app) == sent
    assert get_fab_metadata(build_fab_from_disk(app)) == ("osfl/osfl-app", OSFL["version"])
    (app / "LICENSE").unlink()
    with pytest.raises(click.ClickException, match="LICENSE"):
        check(app)


def test_it_runs_the_osfl_of_its_version() -> None:
    (flower,) = (need for need in OSFL["dependencies"] if need.startswith("flwr>"))
    assert PROJECT["version"] == OSFL["version"]
    assert PROJECT["dependencies"] == [flower, f"osfl[simulation]=={OSFL['version']}"]
    assert PROJECT["requires-python"] == OSFL["requires-python"]
    assert (APP / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_its_settings_are_those_of_osfl() -> None:
    pyproject = runpy.run_path(str(ROOT / "docs" / "generate.py"))["hub_app"]()
    assert pyproject == (APP / "pyproject.toml").read_text(), "stale: make docs-pages"
    settings = [
        tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        for folder in (APP, ROOT)
    ]
    assert settings[0] == settings[1]
