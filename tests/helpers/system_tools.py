"""Helpers of the system tests."""

import errno
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
from packaging.version import Version
from PIL import Image
from sklearn.datasets import load_digits

from osfl.cli import certs, node_keys
from osfl.launch.flower import flower_environment, free_ports
from tests.helpers.fork_server import descendants, start_fork_server, workers_of
from tests.helpers.settings import defaults, quick

BIN = Path(sys.executable).parent
# Its sitecustomize.py sets a process's clock
CLOCK_MODULES = str(Path(__file__).parent / "clock")
# Every client that is simulated at the same time is a process that imports torch: half of what a
# small run costs.
ONE_AT_A_TIME = ("--client-cpus", str(os.cpu_count() or 1))

# Whether nodes dial a port of their own, by gRPC. Since Flower 1.40 they call the port of `flwr`.
GRPC = Version(version("flwr")) < Version("1.40")

APPS = ("flwr-serverapp", "flwr-clientapp")

# What takes a full disk's room.
FILLER = "filler"


def quick_arguments(kit: Path, **overrides: object) -> list[str]:
    """`settings.quick` as arguments of `osfl run`."""
    # Six containers on two busy cores
    patience = {
        "join_timeout": 600.0,
        "deadline": 600.0,
        "test_timeout": 1200.0,
    }
    usual = defaults()
    settings = quick(kit=str(kit), **(patience | overrides))
    # Without a method the run would be configs/recommended.toml's
    shown = {
        k: str(v).lower() if isinstance(v, bool) else v
        for k, v in settings.items()
        if v != usual[k] or k == "method"
    }
    return [f"{key}={value}" for key, value in shown.items()]


# A run's settings for the folders of `make_images`: to read them takes a process no time, to draw
# the digits several seconds.
TWO_CLASSES = {
    "data__name": "folder",
    "data__classes": "three,seven",
    # As the kit's classifiers have them
    "classifier__small_stem": True,
    "global_model__small_stem": True,
}


def make_images(folder: Path) -> None:
    """Eight scanned digits of two classes to train on, and as many to test."""
    scans = load_digits()
    for label, name in ((3, "three"), (7, "seven")):
        for number, scan in enumerate(scans.images[scans.target == label][:16]):
            file = folder / ("train" if number < 8 else "test") / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((scan * 15.9).astype("uint8")).save(file)


class Clock:
    """The clock of one machine's processes: the time of Python's `time.time` and Flower's `now`.

    The system's own clock stays, and so do files' times and what certificates are held against.

    Attributes:
        settings: the environment of these processes.
    """

    def __init__(self, folder: Path):
        """
        Args:
            folder: its own.
        """
        folder.mkdir(parents=True)
        self._file = folder / "ahead"
        self.set_ahead(0.0)
        self.settings = {"PYTHONPATH": CLOCK_MODULES, "OSFL_CLOCK_FILE": str(self._file)}

    def set_ahead(self, seconds: float) -> None:
        """From now on."""
        changed = self._file.with_suffix(".new")
        changed.write_text(str(seconds))
        changed.replace(self._file)


def wait_for(
    condition: Callable[[], bool], seconds: float, what: Callable[[], str], every: float = 0.5
) -> None:
    """Fail with the text `what()` if the condition, checked `every` seconds, stays false."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(every)


def kill(process: psutil.Process) -> None:
    """kill -9 of a process and all that it started."""
    members = workers_of(process)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs([*members, process], timeout=10)


def end_workers(pid: int) -> None:
    """Terminate a process and all that it started, and kill them after five seconds."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        members = workers_of(process)
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        psutil.wait_procs([*members, process], timeout=5)
        kill(process)


def apps_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The ServerApps or ClientApps that Flower's process runs now, each in one of its own."""
    apps = []
    with suppress(psutil.NoSuchProcess):
        for child, worker in descendants(psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):
                if any(Path(word).name in APPS for word in child.cmdline()[:3]):
                    apps.append(worker)
    return apps


@dataclass
class Federation:
    """A SuperLink on loopback, its keys, and the nodes that were started."""

    folder: Path
    control: int = 0
    fleet: int = 0
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    # Environment of all processes that is read when Python starts or imports a library
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the user's `flwr` and `osfl`; some commands are forks in it."""
        usual = flower_environment()
        settings = {"TERM": "dumb", "COLUMNS": "200", **self.settings}
        commands, _ = start_fork_server(**settings)
        return {
            **usual,
            **settings,
            "PATH": f"{commands}{os.pathsep}{usual['PATH']}",
            "FLWR_HOME": str(self.folder / "flwr"),
            "OSFL_RUNS": str(self.folder / "server"),
        }

    @property
    def osfl(self) -> str:
        """Return the path of a fork's `osfl`."""
        return str(shutil.which("osfl", path=self.environment["PATH"]))

    def begin(self, name: str, *command: str, **settings: str) -> None:
        """In the background, with its output in NAME.log, and some more environment."""
        (self.folder / "empty").mkdir(exist_ok=True)
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder / "empty",
                env=self.environment | settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, name: str) -> None:
        end_workers(self.processes.pop(name).pid)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def begin_superlink(self, isolation: str = "subprocess", **settings: str) -> None:
        """Start it with the keys and the database that are there, and wait for its health."""
        if not self.control:
            self.control, self.fleet = free_ports(2)
            if not GRPC:
                self.fleet = self.control
        authority = self.keys / "ca.crt"
        (self.folder / "flwr").mkdir(exist_ok=True)
        (self.folder / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = '
            f'"127.0.0.1:{self.control}"\nroot-certificates = "{authority}"\n'
        )
        tls = [
            f"--ssl-ca-certfile={authority}",
            f"--ssl-certfile={self.keys}/server.pem",
            f"--ssl-keyfile={self.keys}/server.key",
        ]
        where = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.control),
            "--fleet-api-address",
            f"127.0.0.1:{self.fleet}",
        ]
        self.begin(
            "superlink",
            "flower-superlink",
            *tls,
            *where,
            f"--database={self.folder / 'state.db'}",
            f"--isolation={isolation}",
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            **settings,
        )
        unchecked = ssl.create_default_context()
        # Its certificate may be one that nodes refuse
        unchecked.check_hostname = False
        unchecked.verify_mode = ssl.CERT_NONE

        def healthy() -> bool:
            with suppress(OSError):
                urllib.request.urlopen(
                    f"https://127.0.0.1:{self.control}/health", timeout=1, context=unchecked
                )
                return True
            return False

        wait_for(healthy, 180, lambda: self.log("superlink"))

    def begin_server(self, **settings: str) -> None:
        """Start the process that runs ServerApps, for a SuperLink with isolation `process`."""
        where = [
            "--runtime-api-address",
            f"127.0.0.1:{self.control}",
            "--root-certificates",
            str(self.keys / "ca.crt"),
        ]
        self.begin("server", "flower-superexec", *where, **settings)

    def begin_run(self, *arguments: str) -> subprocess.Popen:
        """`osfl run` in the background; its output is in run.log."""
        with open(self.folder / "run.log", "ab") as log:
            command = [self.osfl, "run", "--connection", "test", *arguments]
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def flwr(self, *arguments: str) -> str:
        """The output of a `flwr` command."""
        result = subprocess.run(
            ["flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def register(self, name: str, keys: Path | None = None) -> str:
        """A key pair for a node, and its public key registered; returns the node id.

        Args:
            keys: where the pair is kept; None: with the others.
        """
        folder = keys or self.keys
        _, request = node_keys.request_key(folder / "nodes", name)
        public = node_keys.register_key(folder, *node_keys.read_request(request)).file
        answer = json.loads(
            self.flwr(
                *("supernode", "register", str(public), "test", "--name", name, "--format", "json")
            )
        )
        return str(answer["node-id"])

    def statuses(self) -> list[str]:
        """Return the states of all registered nodes."""
        return [
            node["status"]
            for node in json.loads(self.flwr("supernode", "list", "test", "--format", "json"))[
                "nodes"
            ]
        ]

    def begin_node(
        self,
        name: str,
        *security: str,
        config: str = "",
        isolation: str = "subprocess",
        fleet: int = 0,
        command: Sequence[str] = ("flower-supernode",),
        **settings: str,
    ) -> None:
        """A SuperNode.

        Where its isolation is `process`, it does not start what would run its ClientApps.

        It calls the SuperLink at the port `fleet`, where something may stand between them.
        """
        (port,) = free_ports(1)
        where = [
            "--isolation",
            isolation,
            "--superlink",
            f"127.0.0.1:{fleet or self.fleet}",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        self.begin(
            name,
            *command,
            *where,
            *security,
            "--node-config",
            config or f"client-id='{name}'",
            **settings,
        )

    def trusting(self, name: str, authority: Path | None = None) -> list[str]:
        """Return the arguments of a node that follows the guide, or trusts another authority."""
        trusted = ["--root-certificates", str(authority or self.keys / "ca.crt")]
        return [*trusted, "--auth-supernode-private-key", str(self.keys / "nodes" / name)]


class Line:
    """A client's line to a server: a TCP proxy on loopback that can be slow, or be cut.

    Attributes:
        port: where it listens.
        sent: bytes that were passed on to the server.
    """

    def __init__(self, server: int, to_server: float = 0.0, back: float = 0.0):
        """
        Args:
            server: its port.
            to_server, back: bytes a second; 0 for all that come.
        """
        self._server = server
        self._whole = True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.pace(to_server, back)
        self.sent = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        # Else what the kernel holds back would be minutes of it, heartbeats among them
        self._door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def pace(self, to_server: float, back: float) -> None:
        """Limit the bytes per second from now on; 0 for no limit."""
        self._rates = {"to server": to_server, "back": back}

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        with self._lock:
            self._whole = False
            for pair in self._pairs:
                _end(pair)
            self._pairs.clear()

    def mend(self) -> None:
        """Let new ones through."""
        with self._lock:
            self._whole = True

    def close(self) -> None:
        """Take no more connections."""
        self._door.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._door.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        with self._lock, suppress(OSError):
            if self._whole:
                server = socket.create_connection(("127.0.0.1", self._server))
                self._pairs.append((client, server))
                for way in ((client, server, "to server"), (server, client, "back")):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()
                return
        client.close()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        """Pass bytes on until one end is closed; then close both."""
        with suppress(OSError):
            while some := source.recv(2**12):
                if rate := self._rates[way]:
                    time.sleep(len(some) / rate)
                if way == "to server":
                    self.sent += len(some)
                target.sendall(some)
        _end((source, target))


def _end(pair: Sequence[socket.socket]) -> None:
    # Closing alone does not end another thread's read
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def mount_disk(folder: Path, size: str) -> bool:
    """A small disk in memory at a folder, if this user may mount one.

    Args:
        size: as `mount` reads it: "320m".
    """
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def fill_disk(folder: Path) -> None:
    """Leave no room for a byte on the small disk at a folder; a file there, `FILLER`, takes it."""
    assert folder.is_mount(), folder
    # A part is written where the whole has no room; others may write meanwhile
    with open(folder / FILLER, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@contextmanager
def new_federation(folder: Path) -> Iterator[Federation]:
    """Keys for a federation on loopback, whose SuperLink the caller starts.

    Ended with everything it started.
    """
    certs.make_ca(folder / "keys")
    certs.make_server(folder / "keys", [])
    federation = Federation(folder)
    try:
        yield federation
    finally:
        for process in reversed(federation.processes.values()):
            end_workers(process.pid)
