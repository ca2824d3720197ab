"""`osfl --version`, `methods`, `doctor` and `run --dry-run`."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import LoopGrid, quick
from typer.testing import CliRunner, Result

from client_app.app import app as client_app
from osfl.cli import doctor
from osfl.cli.estimate import estimate_run
from osfl.cli.main import app
from osfl.config import parse_run_config
from osfl.methods import METHODS
from server_app.app import run_job


def call(*arguments: object, columns: int = 300) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, env={"COLUMNS": str(columns), "TERM": "dumb"})


def words(overrides: dict[str, Any]) -> list[str]:
    """A configuration as `osfl run` takes it."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in overrides.items()
    ]


def test_the_version_is_the_installed_packages() -> None:
    assert call("--version").stdout.strip() == version("osfl")


def test_methods_are_listed_with_what_clients_send() -> None:
    listed = call("methods").stdout
    for name, method in METHODS.items():
        (row,) = [line for line in listed.splitlines() if f" {name} " in line]
        assert method.sends in row


def test_the_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    done = call("doctor", "--runs", tmp_path / "runs")
    assert done.exit_code == 0, done.stdout
    for what in ("Python", "Flower", "torch", "kit", "disk", "ports", "clock", "memory"):
        assert f" {what} " in done.stdout, what


@pytest.mark.parametrize(
    ("setting", "said"),
    [("kit=/nowhere/at/all", "/nowhere/at/all"), ("device=cuda:77", "cuda:77")],
)
def test_the_doctor_names_what_is_wrong(tmp_path: Path, setting: str, said: str) -> None:
    done = call("doctor", setting, "--runs", tmp_path / "runs")
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert said in line


def test_another_python_is_refused() -> None:
    assert doctor.check_python("3.9.1").state == doctor.FAIL
    assert doctor.check_python("3.12.3").state == doctor.OK


@pytest.mark.parametrize(
    "method", ["prompts-domain", "fedlmg", "feddeo", "oscar-pooled", "fedbip", "espresso"]
)
def test_a_dry_run_says_what_the_run_sends_and_draws(
    home: Path, tiny_kit: Path, method: str
) -> None:
    values = quick(method=method, kit=str(tiny_kit), synthesis__images_per_class=2)
    config = parse_run_config(values)
    estimate = estimate_run(config)
    nodes = [{"partition-id": number, "num-partitions": 2} for number in range(2)]
    run_job(LoopGrid(client_app, values, nodes), config, "job")  # type: ignore[arg-type]
    folder = home / "runs" / "job"
    sent = {file.stem: file.stat().st_size for file in folder.glob("payloads/*.pb")}
    assert sent.keys() == estimate.uploads.keys()
    for client, size in sent.items():
        assert estimate.uploads[client] == pytest.approx(size, rel=0.05)
    assert estimate.images == len(list(folder.glob("images/*/*/*.png")))
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert taken < estimate.disk_bytes
    assert estimate.sampling is not None
    assert estimate.sampling.seconds > 0
    # A guided UNet pass has two rows, and there are two steps; a gradient costs one more
    assert estimate.sampling.flops > 0


def test_a_dry_run_starts_nothing(tmp_path: Path, tiny_kit: Path) -> None:
    values = quick(method="prompts-only", kit=str(tiny_kit))
    done = call("run", "--dry-run", *words(values), "--runs", tmp_path / "runs")
    assert done.exit_code == 0, done.stdout
    assert "the server draws 20 images" in done.stdout
    assert not os.path.exists(tmp_path / "runs" / "job")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kit=/nowhere/at/all", "/nowhere/at/all"),
        ("max-payload-mb=0.1", "max-payload-mb = 0.1: client-0 would send"),
        ("seeed=1", "did you mean seed?"),
    ],
)
def test_a_dry_run_refuses_what_cannot_work(tmp_path: Path, setting: str, said: str) -> None:
    done = call("run", "--dry-run", "method=fedlmg", setting, "--runs", tmp_path / "runs")
    assert done.exit_code == 1
    assert said in done.stdout
