"""A site that runs signed code only, in a federation of separate processes."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.system_tools import (
    TWO_CLASSES,
    Federation,
    make_images,
    quick_arguments,
)

pytestmark = pytest.mark.system


def osfl(federation: Federation, *arguments: str) -> str:
    result = subprocess.run(
        [federation.osfl, *arguments],
        cwd=federation.folder,
        env=federation.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(1200)
def test_a_site_runs_what_two_persons_signed(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    """Signed by one, it is refused; signed by both, it runs to its end."""
    federation.begin_superlink()
    make_images(tmp_path / "images")
    federation.register("site-a")
    for name in ("alice", "bob"):
        osfl(federation, "certs", "signer", name)
    signers = tmp_path / "signers"
    signers.write_text("".join((tmp_path / f"{name}.pub").read_text() for name in ("alice", "bob")))
    config = f"client-id='site-a' data-dir='{tmp_path / 'images'}' domain='photo'"
    config += f" cache-dir='{tmp_path / 'cache'}'"
    federation.begin_node(
        "site-a",
        *federation.trusting("site-a"),
        config=config,
        command=[
            *(federation.osfl, "supernode"),
            *("--signers", str(signers), "--required", "2"),
        ],
        OSFL_STATE=str(tmp_path / "state"),
    )
    settings = {**TWO_CLASSES, "num_clients": 1, "join_timeout": 30.0}
    arguments = quick_arguments(tiny_kit, method="prompts-domain", job_id="signed", **settings)
    osfl(federation, "sign", *arguments, "--key", "alice")
    run = federation.begin_run(*arguments, "--signed", "run.signed")
    assert run.wait(timeout=500) != 0
    refusal = "the run is signed by alice; this site requires 2 of alice, bob"
    assert refusal in federation.log("run")
    assert refusal in federation.log("site-a")
    assert not list((tmp_path / "server").rglob("*.pb"))
    assert "signatures: 2" in osfl(federation, "sign", *arguments, "--key", "bob")
    run = federation.begin_run(*arguments, "--signed", "run.signed")
    assert run.wait(timeout=500) == 0, federation.log("run")[-3000:]
    assert "the run is signed by alice, bob" in federation.log("site-a")
    assert (tmp_path / "server" / "signed" / "payloads" / "site-a.pb").is_file()
