"""A federation of separate processes: SuperLink, SuperNodes, gRPC with TLS and node keys. The simulation serialises nothing; this does."""

import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from system_tools import BIN, quick_arguments

from osfl import certs, wire
from osfl.launch import _free_ports, end_process_tree, flower_environment

pytestmark = pytest.mark.system
ONLINE = "online"


@dataclass
class Federation:
    """A SuperLink on loopback, its keys, and the nodes that were started."""

    folder: Path
    control: int = 0
    fleet: int = 0
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def environment(self) -> dict[str, str]:
        """Of the user's `flwr` and `osfl`."""
        return {
            **flower_environment(),
            "FLWR_HOME": str(self.folder / "flwr"),
            "OSFL_RUNS": str(self.folder / "server"),
            "TERM": "dumb",
            "COLUMNS": "200",
        }

    def begin(self, name: str, *command: str) -> None:
        (self.folder / "empty").mkdir(exist_ok=True)
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder / "empty", env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, name: str) -> None:
        end_process_tree(self.processes.pop(name).pid)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def begin_superlink(self) -> None:
        """Start it with the keys and the database that are there, and wait for its health."""
        if not self.control:
            self.control, self.fleet = _free_ports(2)
        authority = self.keys / "ca.crt"
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{self.control}"\nroot-certificates = "{authority}"\n'
        )
        tls = [
            f"--ssl-ca-certfile={authority}",
            f"--ssl-certfile={self.keys}/server.pem",
            f"--ssl-keyfile={self.keys}/server.key",
        ]
        where = ["--host", "127.0.0.1", "--port", str(self.control), "--fleet-api-address", f"127.0.0.1:{self.fleet}"]
        self.begin(
            "superlink",
            "flower-superlink",
            *tls,
            *where,
            f"--database={self.folder / 'state.db'}",
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE  # its certificate may be one that nodes refuse

        def healthy() -> bool:
            with suppress(OSError):
                urllib.request.urlopen(f"https://127.0.0.1:{self.control}/health", timeout=1, context=unchecked)
                return True
            return False

        wait_for(healthy, 60, lambda: self.log("superlink"))

    def flwr(self, *arguments: str) -> str:
        """The output of a `flwr` command."""
        command = [str(BIN / "flwr"), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def register(self, name: str) -> str:
        """A key pair for a node, and its public key registered; returns the node id."""
        key = certs.make_node(self.keys, name)
        answer = json.loads(self.flwr("supernode", "register", f"{key}.pub", "test", "--format", "json"))
        return str(answer["node-id"])

    def statuses(self) -> list[str]:
        """Of all nodes that are registered."""
        return [node["status"] for node in json.loads(self.flwr("supernode", "list", "test", "--format", "json"))["nodes"]]

    def begin_node(self, name: str, *security: str, config: str = "") -> None:
        (port,) = _free_ports(1)
        where = ["--superlink", f"127.0.0.1:{self.fleet}", "--host", "127.0.0.1", "--port", str(port)]
        self.begin(name, "flower-supernode", *where, *security, "--node-config", config or f"client-id='{name}'")

    def trusting(self, name: str, authority: Path | None = None) -> list[str]:
        """What a node is started with that does as the README says, or trusts another authority."""
        trusted = ["--root-certificates", str(authority or self.keys / "ca.crt")]
        return [*trusted, "--auth-supernode-private-key", str(self.keys / "nodes" / name)]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """Keys for a SuperLink on loopback, which the test starts."""
    certs.make_ca(tmp_path / "keys")
    certs.make_server(tmp_path / "keys", [])
    made = Federation(tmp_path)
    yield made
    for process in reversed(made.processes.values()):
        end_process_tree(process.pid)


def wait_for(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.5)


def test_payloads_cross_the_network(federation: Federation, tmp_path: Path, tiny_kit: Path) -> None:
    """FedLMG's 45 MB classifiers, over gRPC with TLS and node keys, in Flower's chunks: what the server stored is a valid payload of each site."""
    federation.begin_superlink()
    for k in range(2):
        federation.register(f"site-{k}")
        cache = f"cache-dir='{tmp_path / f'cache-{k}'}'"
        config = f"partition-id={k} num-partitions=2 client-id='site-{k}' {cache}"
        federation.begin_node(f"site-{k}", *federation.trusting(f"site-{k}"), config=config)
    arguments = quick_arguments(
        tiny_kit, method="fedlmg", job_id="networked", fedlmg__strategies="ft", classifier__architecture="resnet18"
    )
    command = [str(BIN / "osfl"), "run", "--connection", "test", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=federation.environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "server" / "networked"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["accuracy"]["FT"]) == {"site-0", "site-1", "average"}
    assert f"accuracy (%) of FT: site-0 {metrics['accuracy']['FT']['site-0']:.1f}, " in done.stdout + done.stderr
    for k in range(2):
        blob = (folder / "payloads" / f"site-{k}.pb").read_bytes()
        assert len(blob) == metrics["clients"][f"site-{k}"]["upload_bytes"] > 44_000_000
        assert wire.digest(blob) == json.loads((folder / "payloads" / f"site-{k}.json").read_text())["sha256"]
        assert not list((tmp_path / f"cache-{k}").rglob("payload.pb"))  # acknowledged


def test_who_has_no_registered_key_or_does_not_trust_the_server_stays_out(federation: Federation, tmp_path: Path) -> None:
    """One node as it should be comes in; every other way ends with its process, and not as a node that is online."""
    federation.begin_superlink()
    federation.register("good")
    federation.flwr("supernode", "unregister", federation.register("revoked"), "test")
    certs.make_node(federation.keys, "stranger")
    other = certs.make_ca(tmp_path / "other")
    for name in ("good", "revoked", "stranger"):
        federation.begin_node(name, *federation.trusting(name))
    federation.begin_node("keyless", "--root-certificates", str(federation.keys / "ca.crt"))
    federation.begin_node("plain", "--insecure")
    federation.register("distrustful")
    federation.begin_node("distrustful", *federation.trusting("distrustful", other))
    reasons = {
        "revoked": "Failed to activate SuperNode",
        "stranger": "Failed to activate SuperNode",
        "keyless": "All SuperNodes must be registered",
        "distrustful": "CERTIFICATE_VERIFY_FAILED",
    }
    for name, reason in reasons.items():
        process = federation.processes[name]
        assert process.wait(timeout=60) != 0
        assert reason in federation.log(name)
    tries = "Connection attempt failed, retrying"  # Flower's node goes on trying, and says no more than that
    wait_for(lambda: federation.log("plain").count(tries) > 2, 60, lambda: federation.log("plain"))
    wait_for(lambda: federation.statuses().count(ONLINE) == 1, 60, lambda: federation.log("good"))

    # Its database outlives a SuperLink: who was registered is, and who was revoked is not
    federation.end("good")
    wait_for(lambda: federation.statuses().count(ONLINE) == 0, 60, lambda: federation.log("good"))
    federation.end("superlink")
    federation.begin_superlink()
    for name in ("good", "revoked"):
        federation.begin_node(name, *federation.trusting(name))
    wait_for(lambda: federation.statuses().count(ONLINE) == 1, 60, lambda: federation.log("good"))
    assert federation.processes["revoked"].wait(timeout=60) != 0
    assert federation.processes["good"].poll() is None


def test_an_expired_server_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) - timedelta(days=400)

    monkeypatch.setattr(certs, "datetime", LastYear)
    certs.make_server(federation.keys, [], days=397)
    monkeypatch.undo()
    (row,) = [row for row in certs.describe(federation.keys) if row[0] == "server.pem"]
    assert row[2] < datetime.now(UTC)
    federation.begin_superlink()
    certs.make_node(federation.keys, "late")
    federation.begin_node("late", *federation.trusting("late"))
    assert federation.processes["late"].wait(timeout=60) != 0
    assert "CERTIFICATE_VERIFY_FAILED" in federation.log("late")
