"""The files in deploy/ and docker-compose.yml: what can be known of them without an engine.

`system/test_compose.py`, `test_proxy.py` and `test_slurm.py` run them. The Helm chart is rendered
by Helm's own code, and validated by Kubernetes' schemas; no cluster ran it.
"""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from osfl.launch.flower import _FLOWER_SWITCHES, MALLOC_SETTINGS
from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN

COMPOSE = ROOT / "docker-compose.yml"
SERVER = ROOT / "deploy" / "server.yml"
CLIENT = ROOT / "deploy" / "client.yml"
PROXIES = [ROOT / "deploy" / "proxy.yml", ROOT / "deploy" / "site-proxy.yml"]
CHART = ROOT / "deploy" / "helm" / "osfl"
# Kubernetes' release whose schemas are used
KUBERNETES = "1.33"
NODE = {"name": "site-a", "secret": "osfl-site-a", "imagesClaim": "images", "kitsClaim": "kits"}
# Values of the chart: everything in one cluster, or a site's cluster alone
WHOLE = {"nodes": [NODE, {"name": "site-b", "secret": "b"}], "server": {"kitsClaim": "kits"}}
SITE = {
    "superlink": {"enabled": False},
    "server": {"enabled": False},
    "fleet": "server.example:9092",
    "nodes": [NODE],
}
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


def resources(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Render the chart as the release `demo`; its objects by kind and name."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="demo")
    objects = [each for text in files.values() for each in yaml.safe_load_all(text) if each]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


def pods(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The specification of every pod of the chart, by its set's name."""
    return {
        name: each["spec"]["template"]["spec"]
        for name, each in resources(values).items()
        if each["kind"] == "StatefulSet"
    }


def flower_commands() -> dict[str, list[str]]:
    """Every Flower command in deploy/, by where it stands."""
    commands = {}
    for file in (COMPOSE, SERVER, CLIENT):
        for name, service in services(file).items():
            if (command := words(service)) and command[0].startswith("flower-"):
                commands[f"{file.name}:{name}"] = command
    for file in (ROOT / "deploy" / "systemd").glob("*.service"):
        (line,) = re.findall(r"^ExecStart=(.*?[^\\])$", file.read_text(), re.MULTILINE | re.DOTALL)
        command = shlex.split(line.replace("\\\n", " "))
        if (program := Path(command[0]).name).startswith("flower-"):
            commands[file.name] = [program, *command[1:]]
    for name, pod in pods(WHOLE).items():
        (container,) = pod["containers"]
        commands[name] = [*container["command"], *container["args"]]
    for file in (ROOT / "deploy" / "slurm").glob("*.sbatch"):
        text = file.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(flower-.*) &$", text, re.MULTILINE):
            command = shlex.split(line)
            commands[f"{file.name}:{command[0]}"] = command
    return commands


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
    options = set(re.findall(r"--[a-z-]+", help_text))
    for where, command in commands.items():
        assert {word.partition("=")[0] for word in command if word.startswith("--")} <= options, (
            where
        )


def test_nodes_need_a_key_and_trust_one_authority() -> None:
    for where, command in flower_commands().items():
        options = {word.partition("=")[0] for word in command}
        if command[0] == "flower-superlink":
            assert {"--enable-supernode-auth", "--database", "--ssl-keyfile"} <= options, where
        else:
            assert "--root-certificates" in options, where
        if command[0] == "flower-supernode":
            assert "--auth-supernode-private-key" in options, where
        assert "--insecure" not in options, where


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
        # The file's settings would override them
        variables = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)[0].split()
        assert not {setting.partition("=")[0] for setting in variables} & set(settings), file.name
        (state,) = re.findall(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
        folders = (f"/var/lib/{state}/", f"/run/credentials/{file.name}")
        assert all(setting.partition("=")[2].startswith(folders) for setting in variables), (
            file.name
        )


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
    # Caddy alone listens at the port that is published
    (proxy,), (site_proxy,) = (services(file).values() for file in PROXIES)
    assert proxy["ports"] == ["${OSFL_PROXY_ADDRESS:-0.0.0.0}:${OSFL_PROXY_PORT:-443}:8443"]
    assert proxy["environment"]["OSFL_PROXY_PORT"] == "8443"
    assert "ports" not in site_proxy
    unit = (ROOT / "deploy" / "systemd" / "osfl-superlink.service").read_text()
    assert "--host 127.0.0.1 --fleet-api-address 0.0.0.0:9092" in unit


@pytest.mark.parametrize("file", [COMPOSE, SERVER, CLIENT, *PROXIES], ids=lambda file: file.name)
def test_containers_may_do_no_more_than_they_must(file: Path) -> None:
    for name, service in services(file).items():
        if name == "keys":  # which gives to others what is theirs: root, and alone
            assert service["network_mode"] == "none"
            continue
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if file in PROXIES:
            # Caddy's image has root
            assert service["user"] == "10001:10001"
        else:
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


def test_a_privacy_ledger_has_a_volume_of_its_own() -> None:
    """Emptying a cache must not begin a new budget."""
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


def test_proxies_get_the_keys_that_their_files_name() -> None:
    """Units read copies of the keys, which systemd makes for a user that has nothing else."""
    names = {"osfl-proxy": "Caddyfile", "osfl-site-proxy": "site.Caddyfile"}
    for unit_name, file in names.items():
        unit = (ROOT / "deploy" / "systemd" / f"{unit_name}.service").read_text()
        assert f"--config /opt/osfl/deploy/proxy/{file}\n" in unit
        used = set(
            re.findall(
                r"\{\$OSFL_KEYS:/etc/osfl\}/(\S+)",
                (ROOT / "deploy" / "proxy" / file).read_text(),
            )
        )
        assert set(re.findall(r"^LoadCredential=(.*?):/etc/osfl/\1$", unit, re.MULTILINE)) == used
        assert "DynamicUser=true\n" in unit
    for file, settings in zip(names.values(), PROXIES, strict=True):
        (proxy,) = services(settings).values()
        assert words(proxy)[-1] == f"/proxy/{file}"
        variables = set(re.findall(r"\{\$(\w+)", (ROOT / "deploy" / "proxy" / file).read_text()))
        assert variables <= set(proxy["environment"])
        text = (ROOT / "deploy" / "proxy" / file).read_text()
        used = set(re.findall(r"\{\$OSFL_KEYS:/etc/osfl\}/(\S+)", text))
        # Not the key of the site's node, which lies in the same folder
        mounts = {f"${{OSFL_KEYS}}/{name}:/keys/{name}:ro" for name in used}
        assert set(proxy["volumes"]) == {"./proxy:/proxy:ro"} | mounts


@pytest.mark.parametrize("values", [{}, WHOLE, SITE], ids=["server", "whole", "site"])
def test_kubernetes_knows_every_field_of_the_chart(values: dict[str, Any]) -> None:
    assert helm_python.lint(CHART)["errors"] == []
    objects = resources(values)
    assert len(objects) == 3 * len(values.get("nodes", [])) + (0 if values is SITE else 8)
    for name, each in objects.items():
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
        # Keys are in secrets that are made beforehand, never among the chart's values
        assert each["kind"] != "Secret", name
    with pytest.raises(helm_python.HelmError, match="requires a secret"):
        resources({"nodes": [{"name": "site-a"}]})


def test_a_cluster_runs_the_chart_without_rights() -> None:
    for name, pod in pods(WHOLE).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"], name
        assert not context["allowPrivilegeEscalation"], name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        claims = {
            each["metadata"]["name"]
            for each in resources(WHOLE)[name]["spec"]["volumeClaimTemplates"]
        }
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == claims | {each["name"] for each in pod["volumes"]}, name


def test_the_charts_port_8000_is_the_servers_own() -> None:
    objects = resources(WHOLE)
    ports = {
        name: [port["port"] for port in each["spec"].get("ports", [])]
        for name, each in objects.items()
        if each["kind"] == "Service"
    }
    assert ports.pop("Service/demo-osfl-control") == [8000]
    assert ports.pop("Service/demo-osfl-fleet") == [9092]
    assert not any(ports.values())
    assert "type" not in objects["Service/demo-osfl-control"]["spec"]
    first, second = objects["NetworkPolicy/demo-osfl-superlink"]["spec"]["ingress"]
    assert first == {"ports": [{"port": 9092}]}
    (source,) = second["from"]
    server = objects["StatefulSet/demo-osfl-server"]["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"] == server
    # All others have a policy that admits no peer
    for name, pod in objects.items():
        if pod["kind"] == "StatefulSet" and not name.endswith("superlink"):
            policy = objects[name.replace("StatefulSet", "NetworkPolicy")]["spec"]
            assert policy["policyTypes"] == ["Ingress"]
            assert "ingress" not in policy


@pytest.mark.parametrize("name", ["server.sbatch", "clients.sbatch"])
def test_slurms_files_are_shell(name: str) -> None:
    file = ROOT / "deploy" / "slurm" / name
    subprocess.run(["bash", "-n", file], check=True)
    # Slurm reads no option below the first command
    head, _, script = file.read_text().partition("\nset -euo pipefail\n")
    assert head.count("\n#SBATCH --") >= 6
    assert "#SBATCH" not in script
