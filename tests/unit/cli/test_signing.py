"""`osfl sign`, `osfl run --signed`, and the environment of a node that demands signatures."""

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.cli import signing
from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.launch.run_signatures import read_signers
from osfl.settings import resolve_config

SETTINGS = ("method=fedavg", "seed=3", "job-id=study1")


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


@pytest.fixture
def signers(tmp_path: Path) -> Path:
    """Return a file with the trusted signers alice and bob; their keys are beside it."""
    for name in ("alice", "bob"):
        signing.make_signer(tmp_path, name)
    file = tmp_path / "signers"
    file.write_text((tmp_path / "alice.pub").read_text() + (tmp_path / "bob.pub").read_text())
    return file


def test_signers_have_keys_of_openssh(tmp_path: Path, signers: Path) -> None:
    assert list(read_signers(signers)) == ["alice", "bob"]
    assert (tmp_path / "alice").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"alice exists\. To replace the key"):
        signing.make_signer(tmp_path, "alice")


def test_a_run_starts_with_the_signatures_of_its_own_settings(
    tmp_path: Path, signers: Path
) -> None:
    out = tmp_path / "study.signed"
    for count, name in enumerate(("alice", "bob"), 1):
        code, text = command("sign", *SETTINGS, "--key", str(tmp_path / name), "--out", str(out))
        assert code == 0, text
        assert f"signatures: {count}" in text
    statement, signatures = signing.read_signed(out)
    assert sorted(signatures) == ["alice", "bob"]
    _, overrides = resolve_config(SETTINGS)
    assert statement["config"] == overrides
    signed = signing.signed_setting(out, overrides)
    assert signed == {**overrides, "signatures": out.read_text()}
    with pytest.raises(ConfigError, match="was made for other settings, code or weights"):
        signing.signed_setting(out, {**overrides, "seed": 4})
    code, text = command("sign", "method=fedavg", "job-id=other", "--out", str(out), "--key")
    assert code != 0
    key = str(tmp_path / "bob")
    code, text = command("sign", "method=fedavg", "job-id=other", "--out", str(out), "--key", key)
    assert code == 1
    assert "has the signatures of other settings, code or weights" in " ".join(text.split())
    code, text = command("sign", "method=fedavg", "--out", str(out), "--key", key)
    assert code == 1
    assert "set job-id=NAME" in text


def test_a_file_that_is_no_signing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("no key")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=f"--key {path}: "):
            signing.load_signing_key(path)


def test_a_nodes_commands_check_signatures_in_place_of_flowers(
    tmp_path: Path, signers: Path
) -> None:
    folder = tmp_path / "commands"
    environment = signing.node_environment(signers, 2, folder)
    assert environment["PATH"].split(os.pathsep)[0] == str(folder)
    assert environment["OSFL_SIGNERS"] == str(signers)
    assert environment["OSFL_REQUIRED_SIGNATURES"] == "2"
    assert folder.stat().st_mode & 0o777 == 0o700
    refused = subprocess.run(
        [folder / "flwr-agentapp"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "this site runs signed ClientApps only" in refused.stderr
    for count in (0, 3):
        with pytest.raises(ConfigError, match=r"must be 1 to 2, the trusted signers"):
            signing.node_environment(signers, count, folder)
    with pytest.raises(ConfigError, match="must have at least one signer"):
        signing.node_environment(Path(os.devnull), 1, folder)


def test_clientapps_of_another_process_are_refused(signers: Path) -> None:
    for words in (["--isolation", "process"], ["--isolation=process"]):
        code, text = command("supernode", "--signers", str(signers), *words)
        assert code == 1
        assert "use subprocess" in text
