"""The files in deploy/ and docker-compose.yml: what can be known of them without an engine.

`system/test_compose.py` runs them.
"""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from osfl.cli.launch import _FLOWER_SWITCHES, MALLOC_SETTINGS
from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN

COMPOSE = ROOT / "docker-compose.yml"
SERVER = ROOT / "deploy" / "server.yml"
CLIENT = ROOT / "deploy" / "client.yml"
ONE_SHOT = ("keys", "register", "run", "flwr")


def services(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["services"]


def words(service: dict[str, Any]) -> list[str]:
    """Entry point and command of a service."""
    parts = []
    for name in ("entrypoint", "command"):
        value = service.get(name, [])
        parts += shlex.split(value) if isinstance(value, str) else value
    return parts


def flower_commands() -> dict[str, list[str]]:
    """Every Flower command in deploy/, by where it stands."""
    found = {}
    for file in (COMPOSE, SERVER, CLIENT):
        for name, service in services(file).items():
            if (command := words(service)) and command[0].startswith("flower-"):
                found[f"{file.name}:{name}"] = command
    for file in (ROOT / "deploy" / "systemd").glob("*.service"):
        (line,) = re.findall(r"^ExecStart=(.*?[^\\])$", file.read_text(), re.MULTILINE | re.DOTALL)
        command = shlex.split(line.replace("\\\n", " "))
        found[file.name] = [Path(command[0]).name, *command[1:]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", ["flower-superlink", "flower-supernode", "flower-superexec"])
def test_the_installed_flower_knows_every_option(program: str) -> None:
    """Flower renames its options from release to release."""
    commands = {
        where: command for where, command in flower_commands().items() if command[0] == program
    }
    assert len(commands) >= 2
    help_text = subprocess.run(
        [BIN / program, "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"--[a-z-]+", help_text))
    for where, command in commands.items():
        assert {word.partition("=")[0] for word in command if word.startswith("--")} <= known, where


def test_nodes_need_a_key_and_trust_one_authority() -> None:
    for where, command in flower_commands().items():
        if command[0] == "flower-superlink":
            assert {"--enable-supernode-auth", "--database", "--ssl-keyfile"} <= set(command), where
        else:
            assert "--root-certificates" in command, where
        if command[0] == "flower-supernode":
            assert "--auth-supernode-private-key" in command, where
        assert "--insecure" not in command, where


def test_units_find_flowers_programs_and_their_settings() -> None:
    """Flower starts its own programs by their names; systemd's PATH has no environment of ours."""
    text = (ROOT / "deploy" / "systemd" / "environment").read_text()
    settings = dict(
        line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    for file in (ROOT / "deploy" / "systemd").glob("*.service"):
        unit = file.read_text()
        (program,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
        assert str(Path(program).parent) in settings["PATH"].split(":"), file.name
        assert set(re.findall(r"\$\{(\w+)\}", unit)) <= set(settings), file.name
        variables = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)[
            0
        ].split()  # which the file's would override
        assert not {setting.partition("=")[0] for setting in variables} & set(settings), file.name
        (state,) = re.findall(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
        assert all(
            setting.partition("=")[2].startswith(f"/var/lib/{state}/") for setting in variables
        ), file.name


def test_state_and_database_are_their_users_alone() -> None:
    """Flower makes its database, which holds tokens of running tasks, as the umask says."""
    for file in (ROOT / "deploy" / "systemd").glob("*.service"):
        lines = file.read_text().splitlines()
        assert {"StateDirectoryMode=0700", "UMask=0077"} <= set(lines), file.name
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "install -d -m 700 -o osfl -g osfl /data /ledger\n" in recipe
    keys = (ROOT / "deploy" / "compose_keys.sh").read_text()
    assert 'chmod 700 "$volume"' in keys
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert guide.index("umask 077") < guide.index("osfl certs ca keys")


def test_settings_are_those_of_the_launcher() -> None:
    recipe = (ROOT / "deploy" / "Dockerfile").read_text().split()
    units = (ROOT / "deploy" / "systemd" / "environment").read_text().split()
    flower = {name: value for name, value in _FLOWER_SWITCHES.items() if name.startswith("FLWR_")}
    for name, value in (MALLOC_SETTINGS | flower).items():
        assert f"{name}={value}" in recipe
        assert f"{name}={value}" in units


def test_port_8000_is_the_servers_own() -> None:
    """Whoever reaches it can run code on every node."""
    one_machine = services(COMPOSE)
    assert not any("ports" in service for service in one_machine.values())
    assert words(one_machine["superlink"])[:3] == ["flower-superlink", "--host", "control"]
    for name, service in one_machine.items():
        if name.startswith("client-"):
            assert service["networks"] == ["fleet"]
    assert [service["ports"] for service in services(SERVER).values() if "ports" in service] == [
        ["${OSFL_ADDRESS:-0.0.0.0}:9092:9092"]
    ]
    assert "ports" not in services(CLIENT)["client"]
    unit = (ROOT / "deploy" / "systemd" / "osfl-superlink.service").read_text()
    assert "--host 127.0.0.1 --fleet-api-address 0.0.0.0:9092" in unit


@pytest.mark.parametrize("file", [COMPOSE, SERVER, CLIENT], ids=lambda file: file.name)
def test_containers_may_do_no_more_than_they_must(file: Path) -> None:
    for name, service in services(file).items():
        if name == "keys":  # which gives to others what is theirs: root, and alone
            assert service["network_mode"] == "none"
            continue
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, name  # the image's: not root
        if name not in ONE_SHOT:
            assert service["restart"] == "unless-stopped", name
            assert "healthcheck" in service, name


def test_every_client_has_its_own_volume_and_key() -> None:
    clients = {
        name: service for name, service in services(COMPOSE).items() if name.startswith("client-")
    }
    assert len(clients) == 6
    for name, service in clients.items():
        ledger = name.replace("client", "ledger")
        volumes = [f"{name}:/data", f"{ledger}:/ledger", "./kits:/app/kits:ro"]
        assert service["volumes"] == volumes
        number = name.removeprefix("client-")
        part = f"client-id='{name}' partition-id={number} num-partitions=6"
        assert words(service)[-1] == f"{part} allowed-dirs='/app/kits'"


def test_images_hold_no_kit_no_data_and_no_secret() -> None:
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (.*)$", recipe, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert set(copied) == {
        "pyproject.toml",
        "requirements.txt",
        "LICENSE",
        "osfl",
        "client_app",
        "server_app",
        "configs",
    }
    sent = (ROOT / ".dockerignore").read_text().split("\n", 1)[1].split()
    assert sent[0] == "*"
    assert {line.removeprefix("!") for line in sent[1:]} == {*copied, "**/__pycache__"}
    assert re.findall(r"^USER (.*)$", recipe, re.MULTILINE)[-1] == "osfl"


def test_a_privacy_ledger_lies_on_a_volume_apart_from_the_cache() -> None:
    """What empties a cache must not begin a new budget."""
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "OSFL_CACHE=/data/cache OSFL_STATE=/ledger " in recipe
    for file in (COMPOSE, CLIENT):
        named = yaml.safe_load(file.read_text())["volumes"]
        for service in services(file).values():
            if words(service)[:1] != ["flower-supernode"]:
                continue
            (volume,) = (each for each in service["volumes"] if each.endswith(":/ledger"))
            assert volume.removeprefix("${OSFL_LEDGER:-").partition(":")[0].rstrip("}") in named
    unit = (ROOT / "deploy" / "systemd" / "osfl-client.service").read_text()
    assert " OSFL_CACHE=/var/lib/osfl/cache OSFL_STATE=/var/lib/osfl/ledger\n" in unit


def test_every_client_says_which_folders_a_run_may_name() -> None:
    for file in (COMPOSE, CLIENT):
        for service in services(file).values():
            command = words(service)
            if command[:1] == ["flower-supernode"]:
                assert "allowed-dirs='/app/kits'" in command[-1]
    assert "allowed-dirs='/srv/kits'" in (ROOT / "deploy/systemd/environment").read_text()
