"""A secure sum in a federation of separate processes, with TLS and node keys."""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from osfl.cli.signing import make_signer
from osfl.payload import wire
from osfl.payload.kinds import FeatureStatistics
from osfl.run_folder.layout import RunFolder
from tests.helpers.fork_server import workers_of
from tests.helpers.system_tools import TWO_CLASSES, Federation, make_images, quick_arguments

pytestmark = pytest.mark.system
SITES = ("site-a", "site-b", "site-c", "site-d")
NAMES = ("three", "seven")


def begin_sites(federation: Federation, folder: Path) -> None:
    """Start sites that sign their keys of a sum, and know each other."""
    keys = {site: make_signer(folder / "signers", site) for site in SITES}
    peers = folder / "peers"
    peers.write_text("".join(key.with_suffix(".pub").read_text() for key in keys.values()))
    for site, key in keys.items():
        make_images(folder / site)
        federation.register(site)
        config = f"client-id='{site}' data-dir='{folder / site}' cache-dir='{folder / site}-cache'"
        config += f" secure-sum-key='{key}' secure-sum-peers='{peers}'"
        federation.begin_node(site, *federation.trusting(site), config=config)


def server_memory(federation: Federation) -> Iterator[bytes]:
    """Yield what the SuperLink, and the ServerApp that it runs, have in memory that they write."""
    superlink = psutil.Process(federation.processes["superlink"].pid)
    for process in workers_of(superlink):
        with suppress(OSError):
            yield from writable_memory(process.pid)


def writable_memory(pid: int) -> Iterator[bytes]:
    """Yield the writable regions of a process.

    Raises:
        OSError: the system refuses it, or the process has ended.
    """
    regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for region in regions:
            addresses, rights = region.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(address, 16) for address in addresses.split("-"))
                with suppress(OSError, ValueError):
                    memory.seek(start)
                    yield memory.read(end - start)


def traces(folder: Path, sites: Iterable[str]) -> dict[str, bytes]:
    """Return some bytes of each payload that a client keeps until its acknowledgement."""
    result = {}
    for site in sites:
        for file in (folder / f"{site}-cache").rglob("payload.pb"):
            with suppress(FileNotFoundError):
                payload = wire.decode_trusted(file.read_bytes(), "fedcgs", NAMES)
                assert isinstance(payload, FeatureStatistics)
                result[site] = payload.sums.numpy().tobytes()[:24]
    return result


@contextmanager
def kept_traces(folder: Path) -> Iterator[dict[str, bytes]]:
    """Yield the traces of all payloads so far.

    A thread adds to them: clients keep payloads briefly, and a search of memory takes seconds.
    """
    kept: dict[str, bytes] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            kept.update(traces(folder, set(SITES) - set(kept)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield kept
    finally:
        is_over.set()
        thread.join()


@pytest.mark.timeout(1200)
def test_neither_server_nor_superlink_hold_a_payload(
    federation: Federation, tmp_path: Path
) -> None:
    """One site's node ends after it joined: the sum is that of the others."""
    # Another environment: no forks, whose writable memory holds the fork server's libraries, too
    federation.begin_superlink(COLUMNS="100")
    begin_sites(federation, tmp_path)
    settings = {
        **TWO_CLASSES,
        "fedcgs__projection": 12,
        "classifier__init": "none",
        "num_clients": 4,
        "min_clients": 3,
        "max_weight_ratio": 0.0,
        "join_timeout": 120.0,
        "deadline": 60.0,
        # The ended node is asked, too; the others may share busy cores
        "test_timeout": 60.0,
    }
    # Other seeds have other projections, so that neither job leaves traces of the other
    for seed, (job, is_secure) in enumerate([("open", False), ("sum", True)]):
        options = {**settings, "job_id": job, "secure_sum": is_secure, "seed": seed}
        arguments = quick_arguments(Path("digits"), method="fedcgs", **options)
        run = federation.begin_run(*arguments)
        leaks: set[str] = set()
        leaks_in_memory: set[str] = set()
        next_search = 0.0
        status = tmp_path / "server" / job / "status.json"
        ended = False
        with kept_traces(tmp_path) as kept:
            while not ended:
                # One more look when it has ended
                ended = run.poll() is not None
                site_traces = dict(kept)
                stored = [*tmp_path.glob("state.db*"), *(tmp_path / "server" / job).rglob("*.*")]
                for file in stored:
                    with suppress(FileNotFoundError, IsADirectoryError):
                        content = file.read_bytes()
                        leaks |= {site for site, trace in site_traces.items() if trace in content}
                # Each search takes a second of a core that the federation could use
                if site_traces and time.monotonic() > next_search:
                    for content in server_memory(federation):
                        leaking = {site for site, trace in site_traces.items() if trace in content}
                        leaks_in_memory |= leaking
                    next_search = time.monotonic() + 5
                is_asked = status.is_file() and '"asked"' in status.read_text()
                if is_secure and is_asked and "site-d" in federation.processes:
                    federation.end("site-d")
                time.sleep(0.4)
        assert run.returncode == 0, federation.log("run")[-3000:]
        # The search finds what an open payload leaves
        assert len(site_traces) >= 3
        assert leaks == (set() if is_secure else set(SITES))
        if is_secure:
            assert not leaks_in_memory
        elif os.geteuid() == 0:
            assert leaks_in_memory
    record = RunFolder(tmp_path / "server" / "sum").secure_members() or {}
    assert record["absent"] == ["site-d"]
    figures = json.loads((tmp_path / "server" / "sum" / "metrics.json").read_text())
    assert set(figures["accuracy"]["FedCGS"]) == {"site-a", "site-b", "site-c", "average"}
