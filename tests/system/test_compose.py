"""docker-compose.yml as a user runs it, against a real engine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT
from system_tools import quick_arguments


def engine() -> list[str]:
    """The compose command, or [] where there is no engine to talk to."""
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return []
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    return ["docker", "compose"] if plugin else ["docker-compose"] if shutil.which("docker-compose") else []


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not engine(), reason="no Docker engine with compose here"),
    pytest.mark.timeout(3600),  # the images are several GB
]


@dataclass
class Containers:
    """The federation of docker-compose.yml, under a name of its own."""

    project: str
    extra: Path

    def compose(self, *arguments: str, check: bool = True, timeout: float = 3000) -> str:
        """The output of a compose command."""
        files = ["-p", self.project, "-f", str(ROOT / "docker-compose.yml"), "-f", str(self.extra)]
        done = subprocess.run([*engine(), *files, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def inside(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Images built, containers up; all taken down at the end, but for the images."""
    extra = tmp_path_factory.mktemp("compose") / "network.yml"
    built = "".join(f"  {name}: {{build: {{network: host}}}}\n" for name in ("keys", "server", "client-0"))
    extra.write_text(f"services:\n{built}")  # where containers reach the package index by the host's network alone
    federation = Containers(f"osfl-test-{os.getpid()}", extra)
    try:
        federation.compose("build", "keys")
        federation.compose("build", "server", "client-0")
        federation.compose("up", "-d", "--no-build")
        yield federation
    finally:
        federation.compose("down", "--volumes", check=False)


def test_a_run_in_containers(federation: Containers, tiny_kit: Path) -> None:
    """Six clients, TLS, node keys; the results are shown, and every client has given up its copy of the payload."""
    arguments = quick_arguments("digits", method="feddeo", job_id="composed", num_clients=6)
    output = federation.compose("run", "--rm", "run", *arguments)
    assert "accuracy (%) of FT: client-0 " in output
    assert "client-5: delivered" in output
    table = federation.inside("server", "osfl", "show", "/data/runs/composed")
    assert "average" in table
    assert "accuracy on each client's own test images" in table
    assert "payload.pb" not in federation.inside("client-3", "find", "/data")


def test_a_client_reaches_the_nodes_port_and_nothing_else(federation: Containers) -> None:
    look = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5); print('open')"
    assert "open" in federation.inside("client-0", "python", "-c", look, "superlink", "9092")
    for place in (("superlink", "8000"), ("control", "8000"), ("client-1", "9094")):
        refused = federation.compose("exec", "-T", "client-0", "python", "-c", look, *place, check=False)
        assert "Error" in refused or "gaierror" in refused, place
        assert "open" not in refused.splitlines(), place


def test_containers_are_what_they_should_be(federation: Containers) -> None:
    """Not root, nothing to write to but their volume, no compiler, no kit, and on small clients no diffusers."""
    for service in ("superlink", "server", "client-0"):
        assert federation.inside(service, "id", "-u").strip() == "10001"
        written = federation.compose("exec", "-T", service, "touch", "/app/osfl/x", check=False)
        assert "Read-only file system" in written
        assert federation.inside(service, "sh", "-c", "which gcc cc g++ make || echo none").strip() == "none"
    assert "No module named 'diffusers'" in federation.compose(
        "exec", "-T", "superlink", "python", "-c", "import diffusers", check=False
    )
    kits = subprocess.run(
        ["docker", "run", "--rm", "--entrypoint", "find", "osfl-client", "/app/kits", "-type", "f"],
        capture_output=True,
        text=True,
    )
    assert (kits.returncode, kits.stdout) == (0, "")
