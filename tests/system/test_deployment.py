"""A federation of separate processes: SuperLink, SuperNodes, gRPC. The simulation serialises nothing; this does."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from system_tools import BIN, quick_arguments

from osfl import wire
from osfl.launch import _free_ports, end_process_tree

pytestmark = pytest.mark.system


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A SuperLink and two SuperNodes on loopback; yields the environment of the user's `flwr` and `osfl`."""
    port, fleet, *node_ports = _free_ports(4)
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
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

    link = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--fleet-api-address", f"127.0.0.1:{fleet}"]
    begin("superlink", "flower-superlink", *link, "--disable-runtime-dependency-installation")
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            assert time.monotonic() < end, (tmp_path / "superlink.log").read_text()
            time.sleep(0.3)
    for k, node_port in enumerate(node_ports):
        node = f"partition-id={k} num-partitions=2 client-id='site-{k}' cache-dir='{tmp_path / f'cache-{k}'}'"
        where = ["--superlink", f"127.0.0.1:{fleet}", "--host", "127.0.0.1", "--port", str(node_port)]
        begin(f"node-{k}", "flower-supernode", "--insecure", *where, "--node-config", node)
    yield environment
    for process in reversed(processes):
        end_process_tree(process.pid)


def test_payloads_cross_the_network(federation: dict[str, str], tmp_path: Path, tiny_kit: Path) -> None:
    """FedLMG's 45 MB classifiers, over gRPC in Flower's chunks: what the server stored is a valid payload of each site."""
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
