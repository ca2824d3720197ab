"""A secure sum in a federation of separate processes, with TLS and node keys."""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from osfl.cli.signing import make_signer
from osfl.payload import wire
from osfl.payload.kinds import FeatureStatistics
from osfl.run_folder.layout import RunFolder
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


def traces(folder: Path) -> dict[str, bytes]:
    """Return some bytes of each payload that a client keeps until its acknowledgement."""
    result = {}
    for site in SITES:
        for file in (folder / f"{site}-cache").rglob("payload.pb"):
            with suppress(FileNotFoundError):
                payload = wire.decode_trusted(file.read_bytes(), "fedcgs", NAMES)
                assert isinstance(payload, FeatureStatistics)
                result[site] = payload.sums.numpy().tobytes()[:24]
    return result


@pytest.mark.timeout(1200)
def test_neither_server_nor_superlink_hold_a_payload(
    federation: Federation, tmp_path: Path
) -> None:
    """One site's node ends after it joined: the sum is that of the others."""
    federation.begin_superlink()
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
        "test_timeout": 90.0,
    }
    for job, is_secure in (("open", False), ("sum", True)):
        arguments = quick_arguments(
            Path("digits"), method="fedcgs", job_id=job, secure_sum=is_secure, **settings
        )
        run = federation.begin_run(*arguments)
        site_traces: dict[str, bytes] = {}
        leaks: set[str] = set()
        status = tmp_path / "server" / job / "status.json"
        ended = False
        while not ended:
            # One more look when it has ended
            ended = run.poll() is not None
            site_traces |= traces(tmp_path)
            stored = [*tmp_path.glob("state.db*"), *(tmp_path / "server" / job).rglob("*.*")]
            for file in stored:
                with suppress(FileNotFoundError, IsADirectoryError):
                    content = file.read_bytes()
                    leaks |= {site for site, trace in site_traces.items() if trace in content}
            is_asked = status.is_file() and '"asked"' in status.read_text()
            if is_secure and is_asked and "site-d" in federation.processes:
                federation.end("site-d")
            time.sleep(0.2)
        assert run.returncode == 0, federation.log("run")[-3000:]
        # The search finds what an open payload leaves
        assert len(site_traces) >= 3
        assert leaks == (set() if is_secure else set(SITES))
    record = RunFolder(tmp_path / "server" / "sum").secure_members() or {}
    assert record["absent"] == ["site-d"]
    figures = json.loads((tmp_path / "server" / "sum" / "metrics.json").read_text())
    assert set(figures["accuracy"]["FedCGS"]) == {"site-a", "site-b", "site-c", "average"}
