"""A first run on own images, by the commands that docs/your-data.md gives; early refusals."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.cli.preflight import check_simulation
from osfl.config import ConfigError
from osfl.data.partition import DataError
from osfl.kit.folder import KitError
from osfl.models.classifiers import ClassifierError
from osfl.settings import resolve_config
from tests.helpers.settings import ROOT

pytestmark = pytest.mark.system

# A work tree of the checkout lies one folder deeper
PLACES = [folder / "shared" / "data" / "pacs" for folder in (ROOT.parent, ROOT.parent.parent)]
PACS = next((folder for folder in PLACES if folder.is_dir()), PLACES[0])
CLASSES = ("dog", "horse")
PAGE = (ROOT / "docs" / "your-data.md").read_text()
FIRST = PAGE.partition("## First run on your images")[2].partition("\n## ")[0]


def copy_pacs(root: Path) -> None:
    """Six images of two classes for each of two clients, as the page lays them out."""
    for client, domain in (("hospital_a", "photo"), ("hospital_b", "sketch")):
        for name in CLASSES:
            files = sorted((PACS / domain / name).iterdir())[:6]
            for number, file in enumerate(files):
                folder = root / client / ("train" if number < 4 else "test") / name
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, folder)


def write_random_images(root: Path) -> None:
    chance = np.random.default_rng(0)
    for client in ("a", "b"):
        for split in ("train", "test"):
            for name in CLASSES:
                folder = root / client / split / name
                folder.mkdir(parents=True)
                for number in range(3):
                    pixels = chance.integers(0, 255, (20, 24, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture
def study(tmp_path: Path) -> list[str]:
    """Settings of two clients with random images."""
    write_random_images(tmp_path / "sites")
    file = tmp_path / "study.toml"
    file.write_text(
        f'num-clients = 2\n[data]\nname = "folder"\nroot = "{tmp_path / "sites"}"\n'
        'classes = ["dog", "horse"]\n'
    )
    return [str(file)]


@pytest.mark.skipif(
    not PACS.is_dir(), reason="the PACS images are not on this machine (../shared/data/pacs)"
)
def test_the_first_run_of_the_page_works(tmp_path: Path, osfl: Callable) -> None:
    """Without weights, network and kit; every command of the section's sh block, in its order."""
    copy_pacs(tmp_path / "sites")
    settings = re.search(r"```toml\n(.*?)```", FIRST, re.S)
    commands = re.search(r"```sh\n(.*?)```", FIRST, re.S)
    assert settings
    assert commands
    text = settings[1].replace("/data/sites", str(tmp_path / "sites"))
    (tmp_path / "study.toml").write_text(text)
    lines = commands[1].strip().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["osfl", "data"],
        ["osfl", "run"],
        ["osfl", "run"],
    ]
    outputs = []
    for line in lines:
        result = osfl(*line.split()[1:])
        assert result.returncode == 0, (line, result.stdout[-2000:], result.stderr[-2000:])
        outputs.append(result.stdout)
    assert "data.image-size = 224 (default)" in outputs[1]
    assert "classifier.small-stem = false (default)" in outputs[1]
    [recorded] = tmp_path.glob("runs/*/config.json")
    config = json.loads(recorded.read_text())
    assert (config["data.image-size"], config["classifier.small-stem"]) == (224, False)


def test_without_a_kit_the_next_step_is_named(study: list[str], osfl: Callable) -> None:
    result = osfl("run", *study)
    assert result.returncode == 1
    assert "method domain-vector (default" in result.stdout
    assert "method=fedcgs classifier.init=imagenet" in result.stdout
    assert "classifier.init=none without a network" in result.stdout


def test_the_digits_kit_is_refused_by_its_path_too(
    study: list[str], osfl: Callable, tmp_path: Path, shipped_kit: Path
) -> None:
    """And a copy of it. One command is a process, as a user starts it."""
    copy = tmp_path / "mine"
    shutil.copytree(shipped_kit, copy)
    refused = "kit = '{}': it draws digits, but data.name = 'folder'"
    process = osfl("run", *study, f"kit={shipped_kit}")
    assert process.returncode == 1
    assert refused.format(shipped_kit) in process.stdout
    with pytest.raises(KitError, match=re.escape(refused.format(copy))):
        check_simulation(resolve_config([*study, f"kit={copy}"])[0], tmp_path / "runs")
    for kit in (shipped_kit, copy):
        for command in (["run", "--dry-run"], ["doctor"]):
            result = CliRunner().invoke(
                app, [*command, *study, f"kit={kit}"], env={"COLUMNS": "400", "TERM": "dumb"}
            )
            assert result.exit_code == 1
            assert refused.format(kit) in result.output, command


def leaves_nothing(folder: Path) -> bool:
    return not list(folder.glob("runs/*")) and not list(folder.glob("runs/.*"))


def test_a_run_that_cannot_work_starts_nothing(
    study: list[str], osfl: Callable, tmp_path: Path
) -> None:
    result = osfl("run", *study, "method=fedcgs", "classifier.init=/nowhere.pth")
    assert result.returncode == 1
    assert "classifier.init = '/nowhere.pth': no such file" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    # A run's folder, its log and the clients' cache are made before the SuperLink starts
    assert leaves_nothing(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["classifier.architecture=resnet17"], "resnet17"),
        (["method=feddeo", "kit=/nowhere"], "kit = '/nowhere': no such folder"),
        (["data.classes=dog,cat"], "is not one of data.classes"),
        (["method=local", "max-payload-mb=0.1"], "max-payload-mb = 0.1: a would send"),
    ],
    ids=["architecture", "kit", "classes", "size"],
)
def test_a_check_before_the_start_sees_what_cannot_work(
    study: list[str], tmp_path: Path, settings: list[str], message: str
) -> None:
    """Call the function that the check's process calls."""
    every = [*study, "method=fedcgs", "classifier.init=none", *settings]
    config, _ = resolve_config(every)
    with pytest.raises((ClassifierError, ConfigError, DataError, KitError)) as refused:
        check_simulation(config, tmp_path / "runs")
    assert message in str(refused.value)
    assert leaves_nothing(tmp_path)


def test_a_job_id_with_other_settings_is_refused_at_once(
    study: list[str], osfl: Callable, tmp_path: Path
) -> None:
    from osfl.config import flatten

    settings = [*study, "method=fedcgs", "classifier.init=none", "job-id=mine"]
    config, _ = resolve_config([*settings, "seed=4"])
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text(json.dumps(flatten(config)))
    began = time.monotonic()
    result = osfl("run", *settings)
    assert result.returncode == 1
    assert "job-id = 'mine' was started with seed = 4; this run has 0" in result.stdout
    assert not (tmp_path / "runs" / ".client-cache").exists()
    assert not (tmp_path / "runs" / "mine.log").exists()
    assert time.monotonic() - began < 60


def test_a_connection_is_not_asked_for_what_cannot_be_built(osfl: Callable) -> None:
    result = osfl("run", "method=local", "classifier.architecture=resnet17", "--connection", "none")
    assert result.returncode == 1
    assert "resnet17" in result.stdout


def test_a_run_that_is_not_there_names_those_that_are(osfl: Callable, tmp_path: Path) -> None:
    (tmp_path / "runs" / "study").mkdir(parents=True)
    (tmp_path / "runs" / "study" / "config.json").write_text("{}")
    result = osfl("show", "runs/nothing")
    assert result.returncode == 1
    assert "runs/nothing: no such folder; runs in runs: study" in result.stdout
