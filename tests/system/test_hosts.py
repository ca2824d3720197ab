"""The machines of docs/deployment.md as network namespaces with addresses of their own, which run
what the systemd units run; and what a network does to a run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template

import pytest

from osfl.launch.guard import end_process_tree
from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN, TWO_CLASSES, make_images, quick_arguments, wait_for

UNITS = ROOT / "deploy" / "systemd"
ADDRESSES = {"server": "10.77.0.1", "site-a": "10.77.0.2"}
PAYLOAD = 44_000_000  # bytes of a ResNet-18, at least


@cache
def may_make_hosts() -> bool:
    """Check whether this user may create network namespaces."""
    name = f"osfl-{os.getpid()}"
    if (
        os.geteuid()
        or not shutil.which("ip")
        or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode
    ):
        return False
    return not subprocess.run(["ip", "netns", "del", name]).returncode


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not may_make_hosts(), reason="needs root and iproute2, to make network namespaces"
    ),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@dataclass
class Host:
    """A machine.

    A network namespace, and folders that stand for its /etc/osfl, /var/lib, /srv and home.
    """

    name: str
    folder: Path
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return f"osfl-{os.getpid()}-{self.name}"

    def on_this_host(self, text: str) -> str:
        """A unit's text with this host's folders."""
        places = {
            "/opt/osfl/.venv/bin": BIN,
            "/etc/osfl": self.folder / "etc",
            "/var/lib/": f"{self.folder}/lib/",
            # The tests' kit is in a folder of its own
            "/srv/kits": "/",
        }
        for there, here in (places | {"/srv/": f"{self.folder}/srv/"}).items():
            text = text.replace(there, str(here))
        return text

    @property
    def settings(self) -> dict[str, str]:
        """/etc/osfl/environment, as deploy/systemd has it, and a home.

        All that a service has of its machine.
        """
        lines = self.on_this_host((UNITS / "environment").read_text()).splitlines()
        settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        threads = (
            {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
            if "OMP_NUM_THREADS" in os.environ
            else {}
        )
        return (
            {name: value.strip('"') for name, value in settings.items()}
            | threads
            | {"HOME": str(self.folder / "home")}
        )

    def begin(self, name: str, *command: str, **settings: str) -> subprocess.Popen:
        """In the background; its output is in NAME.log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            inside = ["ip", "netns", "exec", self.namespace, *command]
            process = subprocess.Popen(
                inside,
                cwd=self.folder / "home",
                env=self.settings | settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def begin_unit(self, name: str) -> subprocess.Popen:
        """The ExecStart of deploy/systemd/NAME.service, with its environment and nothing else."""
        unit = self.on_this_host((UNITS / f"{name}.service").read_text())
        (line,) = re.findall(r"^ExecStart=(.*?[^\\])$", unit, re.MULTILINE | re.DOTALL)
        (environment,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
        (state,) = re.findall(r"^WorkingDirectory=(.*)$", unit, re.MULTILINE)
        Path(state).mkdir(parents=True, exist_ok=True)
        settings = dict(pair.split("=", 1) for pair in environment.split())
        words = [
            Template(word).substitute(self.settings)
            for word in shlex.split(line.replace("\\\n", " "))
        ]
        return self.begin(name, *words, **settings)

    def call(self, *command: str) -> str:
        """The output of a command that a user types here."""
        inside = ["ip", "netns", "exec", self.namespace, *command]
        result = subprocess.run(
            inside, env=self.settings, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def sent_bytes(self) -> int:
        """Return the bytes of the link since it exists."""
        (link,) = json.loads(self.call("ip", "-s", "-j", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    """The server's bridge is the network.

    The end of a host's cable is called like the host, and is pulled there.
    """
    machines = {name: Host(name, tmp_path / name) for name in ADDRESSES}
    server = machines["server"]
    try:
        for name, host in machines.items():
            for folder in ("home", "etc", "lib", "srv"):
                (host.folder / folder).mkdir(parents=True)
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            names = Path("/etc/netns") / host.namespace
            names.mkdir(parents=True)
            (names / "hosts").write_text(
                f"127.0.0.1 localhost\n{ADDRESSES['server']} server.example\n"
            )
            if host is server:
                ip("-n", host.namespace, "link", "add", "eth0", "type", "bridge")
            else:
                ip(
                    "-n",
                    host.namespace,
                    "link",
                    "add",
                    "eth0",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    name,
                    "netns",
                    server.namespace,
                )
                ip("-n", server.namespace, "link", "set", name, "master", "eth0", "up")
            ip("-n", host.namespace, "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield machines
    finally:
        for host in reversed(machines.values()):
            for process in reversed(host.processes.values()):
                end_process_tree(process.pid)
        for host in machines.values():
            subprocess.run(["ip", "netns", "del", host.namespace])
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        with suppress(OSError):
            Path("/etc/netns").rmdir()


def make_keys(server: Host, site: Host, folder: Path) -> None:
    """Make keys like the guide's "Keys"."""
    for command in (
        "ca keys",
        "server keys --host server.example --host control",
        "node keys site-a",
    ):
        subprocess.run(
            [BIN / "osfl", "certs", *command.split()], cwd=folder, check=True, capture_output=True
        )
    for name in ("ca.crt", "server.pem", "server.key", "nodes/site-a.pub"):
        shutil.copy(folder / "keys" / name, server.folder / "etc")
    shutil.copy(folder / "keys" / "ca.crt", site.folder / "etc")
    shutil.copy(folder / "keys" / "nodes" / "site-a", site.folder / "etc" / "node.key")
    (server.folder / "home" / ".flwr").mkdir()
    (server.folder / "home" / ".flwr" / "config.toml").write_text(
        '[superlink.hospitals]\naddress = "127.0.0.1:8000"\nroot-certificates = '
        f'"{server.folder}/etc/ca.crt"\n'
    )


@pytest.mark.timeout(1500)
def test_a_run_between_hosts_whose_link_is_slow_and_cut(
    hosts: dict[str, Host], tmp_path: Path, tiny_kit: Path
) -> None:
    """A client sends 45 MB through 40 Mbit/s.

    Its cable is pulled until the server takes it for gone; nothing is made twice. Then its key is
    revoked.
    """
    server, site = hosts.values()
    make_keys(server, site, tmp_path)
    make_images(site.folder / "srv" / "images")
    server.begin_unit("osfl-superlink")
    server.begin_unit("osfl-server")
    look = (
        "import ssl, urllib.request as u; u.urlopen('https://127.0.0.1:8000/health', "
        "context=ssl.create_default_context(cafile='{}'))"
    )
    healthy = ("python", "-c", look.format(server.folder / "etc" / "ca.crt"))

    def answers(*command: str) -> bool:
        with suppress(AssertionError):
            server.call(*command)
            return True
        return False

    wait_for(lambda: answers(*healthy), 60, lambda: server.log("osfl-superlink"))
    key = str(server.folder / "etc" / "site-a.pub")
    node = str(
        json.loads(
            server.call(
                *("flwr", "supernode", "register", key, "hospitals"),
                *("--name", "site-a", "--format", "json"),
            )
        )["node-id"]
    )
    site.begin_unit("osfl-client")

    def statuses() -> list[str]:
        listed = server.call("flwr", "supernode", "list", "hospitals", "--format", "json")
        return [node["status"] for node in json.loads(listed)["nodes"]]

    def log() -> str:
        return server.log("run") + site.log("osfl-client")

    arguments = quick_arguments(
        tiny_kit,
        method="local",
        job_id="apart",
        num_clients=1,
        **TWO_CLASSES,
        classifier__architecture="resnet18",
    )
    site.call(
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "40mbit",
        "burst",
        "32kbit",
        "latency",
        "400ms",
    )
    run = server.begin("run", str(BIN / "osfl"), "run", "--connection", "hospitals", *arguments)
    cache = site.folder / "lib" / "osfl" / "cache"
    wait_for(lambda: bool(list(cache.rglob("payload.pb"))), 300, log)
    before = site.sent_bytes()
    wait_for(lambda: site.sent_bytes() > before + PAYLOAD / 4, 60, log)
    (payload_file,) = cache.rglob("payload.pb")
    costs = json.loads((payload_file.parent / "payload.json").read_text())["content"]["costs"]

    ip("-n", server.namespace, "link", "set", site.name, "down")
    cut_at = site.sent_bytes()
    wait_for(lambda: statuses() == ["offline"], 120, log, every=15)
    folder = server.folder / "lib" / "osfl" / "runs" / "apart"
    assert site.sent_bytes() < cut_at + PAYLOAD / 4
    assert not list(folder.glob("payloads/*.pb"))
    ip("-n", server.namespace, "link", "set", site.name, "up")

    assert run.wait(timeout=600) == 0, log()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["clients"]["site-a"]["upload_bytes"] > PAYLOAD
    # What it had made, not made again
    assert metrics["clients"]["site-a"]["seconds"] == costs["seconds"]
    # Not sent over and over: a quarter had crossed before the cut, and pieces whose answer a slow
    # machine gives late are sent again
    assert site.sent_bytes() - before < 2 * PAYLOAD
    assert metrics["accuracy"]["site-a"].keys() == {"site-a", "average"}

    # What a client reaches, and what not
    reach = (
        "import socket, sys; "
        "socket.create_connection(('server.example', int(sys.argv[1])), timeout=5)"
    )
    site.call("python", "-c", reach, "9092")
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        site.call("python", "-c", reach, "8000")

    # Revoked while it is connected: its process ends, and the next, which a restart policy would
    # begin, is refused
    server.call("flwr", "supernode", "unregister", node, "hospitals")
    site.processes["osfl-client"].wait(timeout=300)
    assert site.begin_unit("osfl-client").wait(timeout=60) != 0
    assert "Failed to activate SuperNode" in site.log("osfl-client")
    assert "online" not in statuses()
