"""Records of another run's payloads that would lead a run elsewhere: they are refused."""

import hashlib
import os
from pathlib import Path

import pytest

from osfl.config import ConfigError, RunConfig, flatten, parse_run_config
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.payload_source import find_source, reuse_payloads
from osfl.run_folder.payload_store import PayloadSource
from osfl.settings import default_config
from osfl.util.files import CorruptFileError

PAYLOAD = b"payload"
DIGEST = hashlib.sha256(PAYLOAD).hexdigest()


@pytest.fixture
def config() -> RunConfig:
    return parse_run_config({**default_config(), "method": "oscar", "num-clients": 1})


@pytest.fixture
def other(tmp_path: Path, config: RunConfig) -> RunFolder:
    """A run with a payload of site-a, and of the file that `../x` would name."""
    run = RunFolder(tmp_path / "other")
    run.write_json("config.json", flatten(config))
    for client in ("site-a", "../x"):
        run.store_payload(client, PAYLOAD, {"sha256": DIGEST})
    return run


def _bound(folder: Path, other: RunFolder, payloads: dict[str, str]) -> RunFolder:
    run = RunFolder(folder / "job")
    run.store_payload_source(PayloadSource(str(other.path), "other", payloads))
    return run


@pytest.mark.parametrize(
    "payloads",
    [
        *({"../x": DIGEST}, {"/tmp/x": DIGEST}, {"average": DIGEST}),
        *({"site-a": ""}, {"site-a": 3}, {"site-a": DIGEST.upper()}, {"site-a": f"{DIGEST}\n"}),
    ],
)
def test_a_resumed_run_writes_no_payload_elsewhere(
    tmp_path: Path, config: RunConfig, other: RunFolder, payloads: dict
) -> None:
    run = _bound(tmp_path, other, payloads)
    with pytest.raises(CorruptFileError, match=r"payloads-from\.json is corrupt"):
        reuse_payloads(config, run)
    assert [file.name for file in run.path.iterdir()] == ["payloads-from.json"]


def test_a_link_is_no_payload(tmp_path: Path, config: RunConfig, other: RunFolder) -> None:
    """Not in the other run, as it would dangle; in the run itself, it is replaced."""
    payload = other.path / "payloads" / "site-a.pb"
    run = _bound(tmp_path, other, {"site-a": DIGEST})
    reuse_payloads(config, run)
    copy = run.path / "payloads" / "site-a.pb"
    copy.unlink()
    os.symlink(payload, copy)
    reuse_payloads(config, run)
    assert not copy.is_symlink()
    copy.unlink()
    payload.rename(tmp_path / "elsewhere.pb")
    os.symlink(tmp_path / "elsewhere.pb", payload)
    with pytest.raises(ConfigError, match="is missing or corrupt, or a link"):
        reuse_payloads(config, run)
    assert not os.path.lexists(copy)


@pytest.mark.parametrize(("client", "digest"), [("site a", DIGEST), ("site-a", "0"), ("x", None)])
def test_a_run_with_other_names_or_digests_is_no_source(
    config: RunConfig, other: RunFolder, client: str, digest: str | None
) -> None:
    assert find_source(config, other).payloads == {"site-a": DIGEST}
    other.store_payload(client, PAYLOAD, {"sha256": digest} if digest else {})
    with pytest.raises(CorruptFileError, match="without a client's name or SHA-256"):
        find_source(config, other)
