"""Methods of installed packages: what is refused, why, and which keys a run has."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from osfl.config import ConfigError, flatten, parse_run_config, schema
from osfl.launch import flower as launch
from osfl.methods import BUILT_IN, METHODS, REFUSED
from osfl.methods.installed import installed_methods
from osfl.settings import read_overrides
from osfl.util.markers import OneOf, markers_of
from tests.helpers.own_package import install, install_styled
from tests.helpers.settings import ROOT, defaults

DECLARATION = """
from dataclasses import dataclass
from osfl.methods.declaration import Method
@dataclass(frozen=True)
class Settings:
    size: int{default}
METHOD = Method(client=None, server="a.b", payload={payload}, sends="", settings=Settings)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which packages are installed."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("odd", "styled_prompts"):
            del sys.modules[name]


@pytest.fixture
def styled(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method of docs/adding-a-method.md."""
    install_styled(site)
    installed, refused = installed_methods(BUILT_IN)
    assert not refused
    (rule,) = markers_of(schema()["method"], OneOf)
    monkeypatch.setattr(rule, "choices", (*rule.choices, "styled"))
    monkeypatch.setitem(METHODS, "styled", installed["styled"])


@pytest.mark.parametrize(
    ("name", "module", "text", "reason"),
    [
        ("odd", "odd.gone", "", "cannot be imported: ModuleNotFoundError: No module named"),
        ("odd", "odd.method", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("odd", "odd.method", "", "must have METHOD = osfl.methods.Method(...); add it"),
        ("Odd", "odd.method", "", "a name must be lower-case words"),
        ("feddeo", "odd.method", "", "OSFL has this name itself; rename the entry point"),
        (
            "odd",
            "odd.method",
            DECLARATION.format(payload="'Pictures'", default=" = 1"),
            "payload = 'Pictures': must be one of Captions, Classifier",
        ),
        (
            "odd",
            "odd.method",
            DECLARATION.format(payload=None, default=""),
            "Settings.size has no default; set it to",
        ),
    ],
)
def test_a_bad_declaration_is_refused_with_its_package_and_the_reason(
    name: str, module: str, text: str, reason: str, site: Path
) -> None:
    install(site, "odd", {"method.py": text}, f"{name} = {module}")
    installed, refused = installed_methods(BUILT_IN)
    assert installed == {}
    assert list(refused) == [name]
    start = f"method = {name!r}: refused from the package odd 1.0 ({module}): "
    assert refused[name].startswith(start + reason)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["styled_prompts.method", "osfl.methods", "osfl.config"])
def test_a_package_may_be_imported_first(first: str, tmp_path: Path) -> None:
    """A worker does so, if its first task is a function of the package's server half."""
    install_styled(tmp_path)
    code = f"import {first}, sys; from osfl.methods import METHODS, REFUSED; "
    code += "assert not REFUSED, REFUSED; assert 'torch' not in sys.modules; print(list(METHODS))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    names = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert names.stdout.strip() == str([*BUILT_IN, "styled"])


def test_two_packages_with_one_name_are_both_refused(site: Path) -> None:
    text = DECLARATION.format(payload=None, default=" = 1")
    install(site, "odd", {"method.py": text}, "odd = odd.method")
    install(site, "odd_too", {"method.py": text}, "odd = odd_too.method")
    installed, refused = installed_methods(BUILT_IN)
    assert (installed, list(refused)) == ({}, ["odd"])
    assert "another package declares this name; uninstall one of them" in refused["odd"]


def test_a_refused_method_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even under a name that OSFL has: a wrong one would be run."""
    monkeypatch.setitem(REFUSED, "feddeo", "method = 'feddeo': refused from the package odd 1.0")
    with pytest.raises(ConfigError, match="refused from the package odd"):
        parse_run_config(defaults())
    assert parse_run_config({**defaults(), "method": "oscar"}).method == "oscar"


@pytest.mark.usefixtures("styled")
def test_a_package_adds_a_section_to_the_runs_of_its_method_alone() -> None:
    usual = {**defaults(), "method": "feddeo"}
    assert schema()["styled.style"].__origin__ is str
    assert "styled.style" not in flatten(parse_run_config(usual))
    # Work units are named after the keys of this section
    assert METHODS["styled"].section == "styled"
    styled_settings = {**defaults(), "method": "styled"}
    # The dataclass has the defaults
    assert parse_run_config(styled_settings).method_settings.style == "photo"
    overrides = read_overrides(["styled.style=12"])
    config = parse_run_config({**styled_settings, **overrides})
    assert config.method_settings.style == "12"
    assert flatten(config)["styled.style"] == "12"
    assert parse_run_config(flatten(config)) == config
    for values, message in [
        ({**styled_settings, "styled.style": 3}, "styled.style = 3: must be a text"),
        (
            {**styled_settings, "styled.stile": "a"},
            r"styled.stile: is a key of method 'styled'|unknown key",
        ),
        (
            {**usual, "styled.style": "a"},
            "styled.style: is a key of method 'styled'; set method=styled, or leave the key out",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_run_config(values)


@pytest.mark.usefixtures("styled")
def test_a_method_named_like_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "device", METHODS["styled"])
    with pytest.raises(ConfigError, match="OSFL has a key of this name; rename the entry point"):
        parse_run_config({**defaults(), "method": "device"})


@pytest.mark.usefixtures("styled")
def test_the_bundle_of_its_runs_alone_has_its_keys(tmp_path: Path) -> None:
    """Flower refuses an override of a key that is not in pyproject.toml."""
    ours = (launch.copy_app(tmp_path / "ours", "feddeo") / "pyproject.toml").read_text()
    theirs = (launch.copy_app(tmp_path / "theirs", "styled") / "pyproject.toml").read_text()
    assert theirs == ours + '\n[tool.flwr.app.config.styled]\nstyle = "photo"\n'
