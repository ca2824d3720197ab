"""docker-compose.yml as a user runs it, against a real engine."""

import io
import os
import shutil
import ssl
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from ipaddress import ip_network
from pathlib import Path

import docker
import pytest
import yaml
from docker.errors import DockerException, ImageNotFound
from docker.models.containers import Container
from filelock import FileLock

from osfl.cli import certs
from osfl.launch.flower import free_ports
from tests.helpers.proxy import CLOSED, make_site_certificate, post, trust
from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN, quick_arguments, wait_for


@cache
def engine() -> docker.DockerClient:
    """The Docker engine; DockerException where none answers."""
    # Seconds, for a command in a container that says nothing until it ends.
    return docker.from_env(timeout=600)


@cache
def compose_command() -> list[str]:
    """Compose as users type it, or [] where it or the engine is missing."""
    try:
        engine().ping()
    except DockerException:
        return []
    for command in (["docker", "compose"], ["docker-compose"]):
        if not shutil.which(command[0]):
            continue
        if subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return []


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not compose_command(), reason="no Docker engine with compose here"),
    pytest.mark.timeout(3600),  # the images are several GB
]


@dataclass
class Containers:
    """The services of compose files, under a name of their own."""

    project: str
    files: tuple[Path, ...]
    settings: dict[str, str] = field(default_factory=dict)  # what a user writes into .env

    def compose(self, *arguments: str, check: bool = True, timeout: float = 3000) -> str:
        """The output of a compose command."""
        files = [word for file in self.files for word in ("-f", str(file))]
        command = [*compose_command(), "-p", self.project, *files, *arguments]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **self.settings},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == 0 or not check, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout + result.stderr

    def containers(self, *labels: str) -> list[Container]:
        """List the services' containers, running or not, without those of `compose run`."""
        labels_of_project = [f"project={self.project}", "oneoff=False", *labels]
        label_filters = [f"com.docker.compose.{label}" for label in labels_of_project]
        return engine().containers.list(all=True, filters={"label": label_filters})

    def container(self, service: str) -> Container:
        """The one container of a service."""
        (service_container,) = self.containers(f"service={service}")
        return service_container

    def inside(self, service: str, *command: str, check: bool = True) -> str:
        """The output of a command in a service's container."""
        status, output = self.container(service).exec_run(list(command))
        text = output.decode()
        assert status == 0 or not check, text[-3000:]
        return text

    def logs(self, *services: str) -> str:
        """The last 60 lines of each of these services, or of all."""
        containers = [self.container(name) for name in services] or self.containers()
        return "\n".join(
            f"{container.name}:\n{container.logs(tail=60).decode()}" for container in containers
        )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Built once, and they stay.

    One test at a time, whichever worker runs it: a federation of containers fills two cores.
    """
    with FileLock(Path(tempfile.gettempdir()) / "osfl-containers.lock"):
        build(tmp_path_factory)
        yield


def build(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All images, by docker-compose.yml."""
    extra = tmp_path_factory.mktemp("compose") / "network.yml"
    built = "".join(
        f"  {name}: {{build: {{network: host}}}}\n" for name in ("keys", "server", "client-0")
    )
    # Where containers reach the package index by the host's network alone
    extra.write_text(f"services:\n{built}")
    builder = Containers(f"osfl-build-{os.getpid()}", (ROOT / "docker-compose.yml", extra))
    builder.compose("build", "keys")
    builder.compose("build", "server", "client-0")


@pytest.fixture
def federation(images: None) -> Iterator[Containers]:
    """Containers up; taken down at the end."""
    federation = Containers(f"osfl-test-{os.getpid()}", (ROOT / "docker-compose.yml",))
    try:
        federation.compose("up", "-d", "--no-build")
        yield federation
    finally:
        federation.compose("down", "--volumes", check=False)


def test_a_federation_in_containers(federation: Containers) -> None:
    """All in one test, for the images and the federation are made once."""
    a_run_ends_with_its_table(federation)
    a_client_reaches_the_nodes_port_and_nothing_else(federation)
    containers_are_what_they_should_be(federation)
    keys_and_registrations_outlive_the_containers(federation)


def a_run_ends_with_its_table(federation: Containers) -> None:
    """Six clients, TLS, node keys, payloads sealed to the server's key; every client gives up its
    copy of the payload.
    """
    arguments = quick_arguments(
        "digits",
        method="feddeo",
        job_id="composed",
        num_clients=6,
        synthesis__workers=2,
        sealing_key="/data/sealing.key",
    )
    output = federation.compose("run", "--rm", "run", *arguments, check=False)
    assert "report: " in output, output[-3000:] + federation.logs("superlink", "server")
    assert "accuracy (%) of FT: client-0 " in output
    assert "client-5: delivered" in output
    assert "payloads are sealed to " in output
    mode = federation.inside("server", "stat", "-c", "%a %u", "/data/sealing.key")
    assert mode.split() == ["600", "10001"]
    fingerprint = output.split("payloads are sealed to ")[1].split()[0]
    assert fingerprint in federation.logs("keys")
    assert "sealing.key" not in federation.inside("superlink", "ls", "/data")
    table = federation.inside("server", "osfl", "show", "/data/runs/composed")
    assert "accuracy on each client's own test images" in table
    assert "average" in table
    assert "payload.pb" not in federation.inside("client-3", "find", "/data")


def a_client_reaches_the_nodes_port_and_nothing_else(federation: Containers) -> None:
    """Not the SuperLink's port 8000 at any of its addresses, no other client, nothing outside.

    Of all keys it has its own.
    """
    look = (
        "import socket, sys; "
        "socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5); print('open')"
    )
    networks = federation.container("superlink").attrs["NetworkSettings"]["Networks"]
    addresses = [network["IPAddress"] for network in networks.values()]
    assert len(addresses) == 2
    assert "open" in federation.inside("client-0", "python", "-c", look, "superlink", "9092")
    for place in addresses:
        answer = federation.inside("client-0", "python", "-c", look, place, "8000", check=False)
        assert (
            answer.strip()
            .splitlines()[-1]
            .startswith(("ConnectionRefusedError", "TimeoutError", "OSError: [Errno 101]"))
        ), answer
    (joined,) = federation.container("client-0").attrs["NetworkSettings"]["Networks"]
    # The engine's promise, as whether anything outside answers says more of this machine. Older
    # engines leave a route and drop what takes it.
    assert engine().networks.get(joined).attrs["Internal"]
    files = federation.inside(
        "client-0", "sh", "-c", "find / -xdev -name '*.key' 2>/dev/null || true"
    ).split()
    assert files == []
    assert federation.inside("client-0", "sh", "-c", "ls /data").split() == [
        "ca.crt",
        "cache",
        "flwr",
        "node.key",
    ]


def containers_are_what_they_should_be(federation: Containers) -> None:
    """Healthy, not root, nothing to write to but their volume, no compiler, no kit, and on small
    clients no diffusers.
    """
    for service in ("superlink", "server", "client-0"):
        assert federation.container(service).health == "healthy"
        assert federation.inside(service, "id", "-u").strip() == "10001"
        written = federation.inside(service, "touch", "/app/osfl/x", check=False)
        assert "Read-only file system" in written
        assert (
            federation.inside(service, "sh", "-c", "which gcc cc g++ make || echo none").strip()
            == "none"
        )
    missing = federation.inside("superlink", "python", "-c", "import diffusers", check=False)
    assert "No module named 'diffusers'" in missing
    search = ["/app/kits", "-type", "f"]
    kits = engine().containers.run("osfl-client", search, entrypoint="find", remove=True)
    assert kits == b""


def keys_and_registrations_outlive_the_containers(federation: Containers) -> None:
    """`down` and `up` again: the same keys, the same nodes, which are back.

    The results are still there.
    """
    before = federation.inside("client-2", "sha256sum", "/data/node.key")
    federation.compose("down")
    federation.compose("up", "-d", "--no-build")
    assert federation.inside("client-2", "sha256sum", "/data/node.key") == before

    def online() -> int:
        listed = federation.compose(
            "run",
            "--rm",
            "--entrypoint",
            "flwr",
            "run",
            "supernode",
            "list",
            "federation",
            "--format",
            "json",
        )
        return listed.count('"online"')

    wait_for(lambda: online() == 6, 180, federation.logs)
    assert "average" in federation.inside("server", "osfl", "show", "/data/runs/composed")


@dataclass
class Machines:
    """A server's machine and those of sites, each a project of its own, as in docs/deployment.md.

    The sites dial `address`. Their keys and certificates are in `folder`.
    """

    folder: Path
    address: str
    settings: dict[str, str]
    projects: list[Containers] = field(default_factory=list)

    def begin_server(self, *files: str) -> Containers:
        """Start the server's containers, and register the sites' keys."""
        server = self._begin("server", ("server.yml", *files), self.settings)
        assert server.compose("run", "--rm", "register").count('"node-id"') == 2
        return server

    def begin_site(self, number: int, *files: str, **settings: str) -> Containers:
        """Start the containers of a site, which has half of the digits."""
        name = SITES[number]
        keys = install(self.folder / name, self.folder / "keys", {}, "ca.crt")
        install(keys, self.folder / "keys" / "nodes", {name: "node.key"})
        defaults = {
            "OSFL_SERVER": f"{self.address}:9092",
            "OSFL_KEYS": str(keys),
            "OSFL_CLIENT": name,
            "OSFL_NODE_CONFIG": f"partition-id={number} num-partitions=2",
            "OSFL_TARGET": "client",
        }
        return self._begin(name, ("client.yml", *files), defaults | settings)

    def _begin(self, name: str, files: tuple[str, ...], settings: dict[str, str]) -> Containers:
        paths = tuple(ROOT / "deploy" / file for file in files)
        project = Containers(f"osfl-{name}-{os.getpid()}", paths, settings)
        self.projects.append(project)
        project.compose("up", "-d", "--no-build")
        return project


SITES = ("site-a", "site-b")


@pytest.fixture
def machines(images: None, tmp_path: Path) -> Iterator[Machines]:
    """Keys of two sites and of a server, which are up to no test's end."""
    if os.geteuid():
        pytest.skip("needs root: keys belong to the containers' user")
    subnet = engine().networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"]
    # The engine's own; it does not always say which.
    address = str(next(ip_network(subnet).hosts()))
    for command in (
        "ca keys",
        f"server keys --host {address} --host control",
        f"node keys {' '.join(SITES)}",
    ):
        subprocess.run(
            [BIN / "osfl", "certs", *command.split()], cwd=tmp_path, check=True, capture_output=True
        )
    keys = install(
        tmp_path / "server", tmp_path / "keys", {"server.key": "server.key"}, "ca.crt", "server.pem"
    )
    install(keys / "nodes", tmp_path / "keys" / "nodes", {}, *(f"{name}.pub" for name in SITES))
    settings = {"OSFL_KEYS": str(keys), "OSFL_ADDRESS": address}
    machines = Machines(tmp_path, address, settings)
    try:
        yield machines
    finally:
        for containers in reversed(machines.projects):
            containers.compose("down", "--volumes", check=False)


def test_a_federation_of_machines_with_containers(machines: Machines, tmp_path: Path) -> None:
    """docs/deployment.md.

    Keys of one's own, server.yml, and client.yml twice, each a project of its own that dials the
    server's address. Payloads are sealed to a key that the SuperLink's container does not have.
    """
    sealing, fingerprint = certs.make_sealing_key(tmp_path / "keys")
    keys_to_open = install(tmp_path / "sealing", sealing.parent, {sealing.name: sealing.name})
    keys_to_open.chmod(0o700)
    os.chown(keys_to_open, 10001, 10001)
    machines.settings["OSFL_SEALING"] = str(keys_to_open)
    server = machines.begin_server()
    # What is known stays as it is
    assert '"node-id"' not in server.compose("run", "--rm", "register")
    pinned = f"partition-id=0 num-partitions=2 seal-to='{fingerprint}'"
    site = machines.begin_site(0, OSFL_NODE_CONFIG=pinned)
    machines.begin_site(1)
    arguments = quick_arguments(
        "digits",
        method="fedlmg",
        fedlmg__strategies="ft",
        job_id="apart",
        num_clients=2,
        sealing_key="/sealing/sealing.key",
    )
    output = server.compose("run", "--rm", "run", *arguments, check=False)
    assert "accuracy (%) of FT: site-a " in output, output[-3000:] + site.logs()
    assert f"payloads are sealed to {fingerprint}" in output
    keys = ["find", "/data", "/keys", "-name", "sealing.key"]
    assert "sealing.key" not in server.inside("superlink", *keys, check=False)
    assert "sealing.key" in server.inside("server", "ls", "/sealing")
    assert "average" in server.inside("server", "osfl", "show", "/data/runs/apart")
    listed = server.compose(
        "run", "--rm", "flwr", "supernode", "list", "federation", "--format", "json"
    )
    assert listed.count('"online"') == 2
    copied, _ = server.container("server").get_archive("/data/runs/apart")
    with tarfile.open(fileobj=io.BytesIO(b"".join(copied))) as archive:
        assert archive.getmember("apart/report.html").isfile()


def require_caddy() -> None:
    """Skip the test if the proxies' image is neither here nor in a registry."""
    proxy = yaml.safe_load((ROOT / "deploy" / "proxy.yml").read_text())["services"]["proxy"]
    try:
        engine().images.get(proxy["image"])
    except ImageNotFound:
        try:
            engine().images.pull(proxy["image"])
        except DockerException:
            pytest.skip(f"no image {proxy['image']} here, and no registry that has it")


def is_healthy(container: Container) -> bool:
    container.reload()
    return container.health == "healthy"


def test_containers_of_sites_with_certificates_pass_the_proxy(
    machines: Machines, tmp_path: Path
) -> None:
    """proxy.yml and site-proxy.yml, with mutual TLS: at the published port is the fleet alone."""
    require_caddy()
    (port,) = free_ports(1)
    proxied = f"{machines.address}:{port}"
    machines.settings |= {
        "OSFL_ADDRESS": "127.0.0.1",
        "OSFL_PROXY_ADDRESS": machines.address,
        "OSFL_PROXY_PORT": str(port),
        "OSFL_CLIENT_CERTIFICATES": "require_and_verify",
    }
    server = machines.begin_server("proxy.yml")
    make_site_certificate(tmp_path / "keys")
    sites = []
    for number, name in enumerate(SITES):
        # The commands of site.Caddyfile leave the key to its user
        private = {"site-tls.key": "site-tls.key"}
        (tmp_path / name).mkdir()
        install(tmp_path / name, tmp_path / "keys", private, "site-tls.pem")
        own = {"OSFL_SERVER": "127.0.0.1:9443", "OSFL_PROXY": proxied}
        sites.append(machines.begin_site(number, "site-proxy.yml", **own))
    arguments = quick_arguments(
        "digits", method="fedlmg", fedlmg__strategies="ft", job_id="proxied", num_clients=2
    )
    output = server.compose("run", "--rm", "run", *arguments, check=False)
    logs = server.logs("proxy") + "".join(site.logs() for site in sites)
    assert "accuracy (%) of FT: site-a " in output, output[-3000:] + logs
    proxies = [containers.container("proxy") for containers in (server, *sites)]
    for proxy in proxies:
        wait_for(partial(is_healthy, proxy), 60, server.logs)
        assert proxy.exec_run(["id", "-u"]).output.strip() == b"10001"
    # A program without a certificate gets no further than its handshake
    with pytest.raises((ssl.SSLError, ConnectionError)):
        post(trust(tmp_path / "keys"), machines.address, port, CLOSED[0])
    shown = trust(tmp_path / "keys")
    shown.load_cert_chain(tmp_path / "keys" / "site-tls.pem", tmp_path / "keys" / "site-tls.key")
    for path in CLOSED:
        assert post(shown, machines.address, port, path) == 403, path


def install(folder: Path, keys: Path, private: dict[str, str], *public: str) -> Path:
    """Install keys as the guide's section "Keys" does.

    Public files for all to read, private ones for the containers' user alone; by their new names.
    """
    folder.mkdir(mode=0o755, exist_ok=True)
    for name in public:
        shutil.copy(keys / name, folder)
        (folder / name).chmod(0o644)
    for name, new in private.items():
        shutil.copy(keys / name, folder / new)
        (folder / new).chmod(0o600)
        os.chown(folder / new, 10001, 10001)
    return folder
