"""Synthesis on a Ray cluster of three machines, each a Ray node with an address of its own."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from osfl.launch.flower import free_ports, ray_variables
from tests.helpers.settings import quick
from tests.helpers.system_tools import BIN, end_workers, kill, wait_for
from tests.helpers.whole_runs import files, start

# One cluster at a time: the tests of a local one are in this group, too
pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
# Ray replaces 127.0.0.1 by the machine's own address
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
Machines = dict[str, subprocess.Popen]


@pytest.fixture
def cluster() -> Iterator[tuple[str, Machines]]:
    """The cluster's address, and the process of each machine's Ray node by its address."""
    (port,) = free_ports(1)
    # Ray has sockets in it, whose paths must be short
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="r"))
    head = ["--head", "--port", str(port), "--include-dashboard", "false"]
    head += ["--temp-dir", str(folder)]
    machines: Machines = {}
    try:
        for address in ADDRESSES:
            role = ["--address", f"{ADDRESSES[0]}:{port}"] if machines else head
            machines[address] = begin_machine(folder / f"{address}.log", address, role)
        yield f"{ADDRESSES[0]}:{port}", machines
    finally:
        for process in reversed(machines.values()):
            end_workers(process.pid)
        shutil.rmtree(folder, ignore_errors=True)


def begin_machine(log: Path, address: str, role: list[str]) -> subprocess.Popen:
    """Start a Ray node, and wait until it is one."""
    command = [str(BIN / "ray"), "start", *role, "--node-ip-address", address]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "--num-cpus", "1", "--block"],
            env={**os.environ, **ray_variables(os.environ)},
            stdout=output,
            stderr=output,
        )
    wait_for(lambda: "Ray runtime started" in log.read_text(), 120, log.read_text)
    return process


def actors_of(machine: subprocess.Popen) -> list[psutil.Process]:
    """Return the synthesis workers on a machine."""
    actors = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(machine.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "ray::SynthesisWorker" in " ".join(process.cmdline()):
                    actors.append(process)
    return actors


@pytest.mark.timeout(900)
def test_a_machine_that_is_lost_costs_no_image(
    home: Path, tiny_kit: Path, cluster: tuple[str, Machines]
) -> None:
    """Each of three workers is on a machine of its own; kill -9 of one machine in the middle."""
    address, machines = cluster
    settings = {"method": "prompts-domain", "kit": str(tiny_kit), "synthesis__threads": 1}
    settings |= {"synthesis__images_per_class": 4, "synthesis__unit_size": 4}
    settings |= {"synthesis__steps": 20}
    start(quick(**settings), "alone")
    folder = home / "runs" / "cluster"
    workers: dict[str, int] = {}

    def lose_a_machine() -> None:
        end = time.monotonic() + 600
        while len(list(folder.glob("units/*.jsonl"))) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        workers.update({name: len(actors_of(machine)) for name, machine in machines.items()})
        kill(psutil.Process(machines[ADDRESSES[-1]].pid))

    thread = threading.Thread(target=lose_a_machine, daemon=True)
    thread.start()
    start(quick(**settings, synthesis__workers=3, synthesis__ray_address=address), "cluster")
    thread.join()
    assert workers == dict.fromkeys(ADDRESSES, 1)
    assert len(list(folder.glob("units/*.jsonl"))) > 6
    assert files(folder, "images") == files(home / "runs" / "alone", "images") != {}
    assert actors_of(machines[ADDRESSES[0]]) == []
