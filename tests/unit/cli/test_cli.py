"""The `osfl` command's output about itself, its methods and the machine."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import osfl as package
from osfl.cli import doctor
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.methods import METHODS
from osfl.settings import find_config, resolve_config, with_recommended
from tests.helpers.settings import ROOT, quick

HEAVY = {"torch", "flwr", "rich", "numpy", "psutil"}


def test_help_imports_nothing_heavy() -> None:
    """Help then takes a tenth of a second; rich alone would take three."""
    code = (
        "import sys; from osfl.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    )
    code += f"\nprint('loaded:', sorted({HEAVY} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "doctor" in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded: []"


def _commands(command: click.Command, *path: str) -> dict[tuple[str, ...], click.Command]:
    """All commands, by what is typed to call them."""
    commands = {path: command}
    if not isinstance(command, click.Group):
        return commands
    for name, inner in command.commands.items():
        commands.update(_commands(inner, *path, name))
    return commands


COMMANDS = _commands(get_command(cli))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_describes_every_argument_and_option(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=100)
    assert shown.exit_code == 0
    assert "\\[" not in shown.output
    words = " ".join(shown.output.split())
    for parameter in COMMANDS[path].params:
        # With click 8.5 an argument loses its help
        assert parameter.help, parameter.name
        is_hidden = getattr(parameter, "hidden", False)
        assert (" ".join(parameter.help.split()) in words) != is_hidden


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == package.__version__


def test_every_method_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.cli.display.console._width", 200)
    lines = CliRunner().invoke(cli, ["methods", "--wide"]).output.splitlines()
    rows = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert set(METHODS) <= set(rows)
    assert "learned description" in rows["feddeo"]
    assert "unet" in rows["feddeo"]
    assert "classifiers/resnet18.safetensors" in rows["fedlmg"]
    assert "every round" in rows["fedavg"]
    assert "nothing" in rows["prompts-only"]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_terminal_shows_every_method_by_its_whole_name(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("osfl.cli.display.console._width", columns)
    lines = CliRunner().invoke(cli, ["methods"]).output.splitlines()
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= columns
    begins = [line.split()[0] for line in lines if line.strip()]
    assert set(METHODS) <= set(begins)
    if columns == 80:
        assert len(lines) < 2.5 * len(METHODS)
    wide = CliRunner().invoke(cli, ["methods", "--wide"]).output
    assert all(name in wide for name in METHODS)


def test_shipped_configs_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is here goes first."""
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/demo.toml") == ROOT / "configs" / "demo.toml"
    assert find_config("configs/methods/feddeo.toml").is_file()
    for name in ("demo.toml", "configs/../pyproject.toml", "configs/none.toml"):
        with pytest.raises(ConfigError, match=r"no such file.*configs/demo\.toml"):
            find_config(name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text("seed = 3\n")
    assert resolve_config(["configs/demo.toml"])[0].seed == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("demo.tom", "did you mean configs/demo.toml?"),
        ("configs/method/oscar.toml", "did you mean configs/methods/oscar.toml?"),
        ("configs/recomended.toml", "did you mean configs/recommended.toml?"),
        ("study", "and more in configs/data, configs/frontier, configs/kits"),
    ],
)
def test_missing_configs_are_answered_with_similar_ones(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        find_config(name)


def test_show_names_the_runs_in_a_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "status.json").write_text('{"phase": "joining"}')
    result = CliRunner().invoke(cli, ["show", str(tmp_path)], env={"COLUMNS": "500"})
    assert result.exit_code == 1
    assert f"{tmp_path} is not the folder of a run; runs in it: first" in result.output
    unfinished = CliRunner().invoke(cli, ["show", str(tmp_path / "first")], env={"COLUMNS": "500"})
    assert "this run has not finished" in unfinished.output


# ---- The doctor ----


@pytest.mark.parametrize(
    ("given", "recommended"),
    [
        (None, True),
        (["seed=1", "data.name=folder"], True),
        (["method=oscar"], False),
        (["configs/demo.toml"], False),
        (["seed=1", "configs/methods/oscar.toml"], False),
    ],
)
def test_a_run_without_file_and_method_is_the_recommended_one(
    given: list[str] | None, recommended: bool
) -> None:
    settings = with_recommended(given)
    assert settings == [*(["configs/recommended.toml"] if recommended else []), *(given or [])]
    if recommended:
        config, _ = resolve_config(with_recommended(["seed=7", "domain-vector.lr=1"]))
        assert (config.method, config.seed, config.domain_vector.lr) == ("domain-vector", 7, 1.0)
        assert config.global_model.schedule == "one-cycle"


def test_the_doctor_finds_this_machine_well(osfl: Callable, tiny_kit: Path) -> None:
    result = osfl("doctor", f"kit={tiny_kit}", "global-model.architecture=shufflenet_v2_x1_0")
    assert result.returncode == 0, result.stdout
    looked_at = [
        line.split()[1] for line in result.stdout.splitlines() if line[:4] in ("ok  ", "warn")
    ]
    expected = ["Python", "Flower", "packages", "torch", "kit", "disk", "ports", "clock", "memory"]
    assert looked_at == expected


def test_the_doctor_says_what_is_wrong(osfl: Callable) -> None:
    result = osfl("doctor", "kit=/nowhere")
    assert result.returncode == 1
    assert "fail kit      kit = '/nowhere': no such folder" in result.stdout


def test_another_python_and_another_flower_fail() -> None:
    assert doctor.check_python("3.9.1").state == doctor.FAIL
    assert doctor.check_python("3.12.0").state == doctor.OK
    requirements = [each for each in requires("osfl") or [] if not each.startswith("flwr")]
    flower, packages = doctor.check_packages([*requirements, "flwr==1.2.3"])
    assert (flower.subject, flower.state) == ("Flower", doctor.FAIL)
    assert "1.2.3" in flower.hint
    assert packages.state == doctor.OK
    _, packages = doctor.check_packages(["flwr", "typer>=1000"])
    assert packages.state == doctor.FAIL
    assert "typer" in packages.text


def test_a_missing_package_of_a_role_is_a_warning() -> None:
    asked = ["flwr", "no-such-package>=2; extra == 'server'", "nor-this; extra == 'dev'"]
    flower, packages = doctor.check_packages(asked)
    assert flower.state == doctor.OK
    assert packages.state == doctor.WARN
    assert "no-such-package is not installed" in packages.text
    assert "nor-this" not in packages.text
    assert "osfl[server]" in packages.hint


@pytest.mark.parametrize(
    ("hours", "state"),
    [(0.0, doctor.OK), (0.01, doctor.WARN), (5.0, doctor.FAIL), (-1e6, doctor.FAIL)],
)
def test_a_clock_that_is_wrong_is_noticed(tmp_path: Path, hours: float, state: str) -> None:
    def now() -> float:
        return time.time() + 3600 * hours

    assert doctor.check_clock(tmp_path, now).state == state


def test_room_on_the_disk_and_in_memory(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path / "not" / "yet", 1000).state == doctor.OK
    assert doctor.check_disk(tmp_path, 10**18).state == doctor.FAIL
    config = parse_run_config(quick(num_clients=1))
    assert doctor.check_memory(config, 10**12).state == doctor.OK
    assert doctor.check_memory(config, int(1.2e9)).state == doctor.WARN
    assert doctor.check_memory(config, 10**8).state == doctor.FAIL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in doctor.check_disk(tmp_path, 1).text


def test_epochs_that_are_set_later_end_the_steps_of_before() -> None:
    """configs/recommended.toml has 627 steps, which would go first."""
    config, _ = resolve_config(["configs/recommended.toml"])
    assert config.global_model.steps == 627
    config, _ = resolve_config(["configs/recommended.toml", "global-model.epochs=3"])
    assert (config.global_model.steps, config.global_model.epochs) == (0, 3)
    assert config.domain_vector.steps == 600
    arguments = ["configs/recommended.toml", "global-model.epochs=3", "global-model.steps=9"]
    config, _ = resolve_config(arguments)
    assert config.global_model.steps == 9


def test_an_option_of_version_0_2_is_refused_with_its_new_name() -> None:
    result = CliRunner().invoke(cli, ["compare", "table.toml", "--at-once", "3"])
    assert result.exit_code == 2
    assert "renamed to --parallel" in result.output
