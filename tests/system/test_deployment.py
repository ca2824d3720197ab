"""A federation of separate processes: SuperLink, SuperNodes, gRPC with TLS and node keys. The simulation serialises nothing; this does."""

import json
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_tools import BIN, quick_arguments

from osfl import certs, wire
from osfl.launch import _free_ports, end_process_tree

pytestmark = pytest.mark.system


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A SuperLink and two SuperNodes on loopback; yields the environment of the user's `flwr` and `osfl`."""
    port, fleet, *node_ports = _free_ports(4)
    home, keys = tmp_path / "flwr", tmp_path / "keys"
    authority = certs.make_ca(keys)
    certs.make_server(keys, [])
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{authority}"\n'
    )
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OSFL_RUNS": str(tmp_path / "server"),
        "TERM": "dumb",
        "COLUMNS": "200",
    }
    processes, empty = [], tmp_path / "empty"
    empty.mkdir()

    def begin(name: str, *command: str, **variables: str) -> None:
        log = open(tmp_path / f"{name}.log", "wb")  # noqa: SIM115
        processes.append(
            subprocess.Popen(
                command, cwd=empty, env={**environment, **variables}, stdout=log, stderr=log, start_new_session=True
            )
        )

    link = [
        "--ssl-ca-certfile",
        str(authority),
        "--ssl-certfile",
        str(keys / "server.pem"),
        "--ssl-keyfile",
        str(keys / "server.key"),
    ]
    link += ["--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(port), "--fleet-api-address", f"127.0.0.1:{fleet}"]
    begin("superlink", "flower-superlink", *link, "--disable-runtime-dependency-installation")
    trusting, end = ssl.create_default_context(cafile=str(authority)), time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=1, context=trusting)
            break
        except OSError:
            assert time.monotonic() < end, (tmp_path / "superlink.log").read_text()
            time.sleep(0.3)
    for k, node_port in enumerate(node_ports):
        key = certs.make_node(keys, f"site-{k}")
        register = [str(BIN / "flwr"), "supernode", "register", f"{key}.pub", "test"]
        subprocess.run(register, env=environment, check=True, capture_output=True, timeout=120)
        node = f"partition-id={k} num-partitions=2 client-id='site-{k}' cache-dir='{tmp_path / f'cache-{k}'}'"
        where = ["--superlink", f"127.0.0.1:{fleet}", "--host", "127.0.0.1", "--port", str(node_port)]
        where += ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
        begin(f"node-{k}", "flower-supernode", *where, "--node-config", node)
    yield environment
    for process in reversed(processes):
        end_process_tree(process.pid)


def test_payloads_cross_the_network(federation: dict[str, str], tmp_path: Path, tiny_kit: Path) -> None:
    """FedLMG's 45 MB classifiers, over gRPC with TLS and node keys, in Flower's chunks: what the server stored is a valid payload of each site."""
    arguments = quick_arguments(
        tiny_kit, method="fedlmg", job_id="networked", fedlmg__strategies="ft", classifier__architecture="resnet18"
    )
    command = [str(BIN / "osfl"), "run", "--connection", "test", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=federation, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "server" / "networked"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["accuracy"]["FT"]) == {"site-0", "site-1", "average"}
    for k in range(2):
        blob = (folder / "payloads" / f"site-{k}.pb").read_bytes()
        assert len(blob) == metrics["clients"][f"site-{k}"]["upload_bytes"] > 44_000_000
        assert wire.digest(blob) == json.loads((folder / "payloads" / f"site-{k}.json").read_text())["sha256"]
        assert not list((tmp_path / f"cache-{k}").rglob("payload.pb"))  # acknowledged
