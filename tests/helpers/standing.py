"""A federation with a standing mode (`osfl serve`), for tests and measurements."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from tests.helpers.system_tools import Federation, kill, wait_for

# Many processes on few cores; and results are bit-identical for the same number of threads
THREADS = {"OMP_NUM_THREADS": "1"}
MINUTES = 60.0  # in seconds


class Standing:
    """A federation with a standing mode, and what its versions have left on the server."""

    def __init__(
        self,
        federation: Federation,
        arguments: Sequence[str],
        versions: int,
        data_of: Callable[[int], str],
        interval: int = 600,
    ):
        """
        Args:
            arguments: the settings of every version.
            versions: their number, after which `osfl serve` ends.
            data_of: returns the part of a site's node-config that names its data.
            interval: seconds after which a version waits no longer for new clients.
        """
        self.federation = federation
        self.federation.settings = THREADS
        self.folder = federation.folder
        self.arguments = arguments
        self.versions = versions
        self.data_of = data_of
        self.interval = interval

    def begin_site(self, number: int) -> None:
        """Start a registered site's node."""
        name = f"site-{number}"
        config = f"client-id='{name}' cache-dir='{self.folder / 'cache' / name}' "
        config += self.data_of(number)
        trusting = self.federation.trusting(name)
        self.federation.begin_node(name, *trusting, config=config)

    def serve(self, new_clients: int) -> None:
        """Start `osfl serve` in the background."""
        options = ["--connection", "test", "--name", "study"]
        options += ["--every", str(self.interval)]
        options += ["--versions", str(self.versions), "--new-clients", str(new_clients)]
        options += ["--runs", str(self.folder / "standing")]
        command = [self.federation.osfl, "serve", *self.arguments, *options]
        name = f"serve-{new_clients}"
        self.federation.begin(name, *command)

    def run_folder(self, version: int) -> Path:
        return self.folder / "server" / f"study-v{version}"

    def clients(self, version: int) -> dict[str, str]:
        """The state of each client of a version."""
        file = self.run_folder(version) / "status.json"
        states: dict[str, str] = json.loads(file.read_text())["clients"] if file.exists() else {}
        return states

    def payloads(self, version: int) -> list[str]:
        return sorted(file.stem for file in self.run_folder(version).glob("payloads/*.pb"))

    def version(self) -> int:
        """The last version that `osfl serve` knows."""
        file = self.folder / "standing" / "study.json"
        return json.loads(file.read_text())["version"] if file.exists() else 0

    def kill(self, name: str) -> None:
        kill(psutil.Process(self.federation.processes.pop(name).pid))

    def return_site(self, number: int) -> None:
        """Start a killed site until the SuperLink, which takes it for online yet, lets it in."""
        name = f"site-{number}"

        def is_in() -> bool:
            process = self.federation.processes.get(name)
            refused = process is not None and "Exit Code: 305" in self.federation.log(name)
            if process is not None and (refused or process.poll() is not None):
                self.federation.end(name)
            if name not in self.federation.processes:
                self.begin_site(number)
            return "SuperNode ID" in self.federation.log(name)

        wait_for(is_in, 15 * MINUTES, self.story, every=5)

    def story(self) -> str:
        logs = sorted(self.folder.glob("serve-*.log"), reverse=True)
        return "\n".join(log.read_text()[-2000:] for log in logs)

    def wait(self, condition: Any, minutes: float = 15) -> None:
        wait_for(condition, minutes * MINUTES, self.story, every=0.1)

    def osfl(self, *arguments: str) -> str:
        result = subprocess.run(
            [self.federation.osfl, *arguments],
            cwd=self.folder,
            env=self.federation.environment,
            capture_output=True,
            text=True,
            timeout=15 * MINUTES,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


def results(folder: Path) -> dict[str, Any]:
    """Images, their seeds, and the models' weights."""
    files = [*folder.glob("images/**/*.png"), folder / "manifest.jsonl"]
    contents: dict[str, Any] = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    for file in folder.glob("models/*.safetensors"):
        tensors = load_file(file)
        contents[file.name] = {name: value.numpy().tobytes() for name, value in tensors.items()}
    return contents
