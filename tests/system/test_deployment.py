"""A federation of separate processes: SuperLink, SuperNodes, gRPC with TLS and node keys. The simulation serialises nothing; this does."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from system_tools import BIN, Federation, quick_arguments, wait_for

from osfl import certs, wire

pytestmark = pytest.mark.system
ONLINE = "online"


def test_payloads_cross_the_network(federation: Federation, tmp_path: Path, tiny_kit: Path) -> None:
    """FedLMG's 45 MB classifiers, over gRPC with TLS and node keys, in Flower's chunks: what the server stored is a valid payload of each site."""
    federation.begin_superlink()
    for k in range(2):
        federation.register(f"site-{k}")
        cache = f"cache-dir='{tmp_path / f'cache-{k}'}'"
        config = f"partition-id={k} num-partitions=2 client-id='site-{k}' {cache}"
        federation.begin_node(f"site-{k}", *federation.trusting(f"site-{k}"), config=config)
    arguments = quick_arguments(
        tiny_kit, method="fedlmg", job_id="networked", fedlmg__strategies="ft", classifier__architecture="resnet18"
    )
    command = [str(BIN / "osfl"), "run", "--connection", "test", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=federation.environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "server" / "networked"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["accuracy"]["FT"]) == {"site-0", "site-1", "average"}
    assert f"accuracy (%) of FT: site-0 {metrics['accuracy']['FT']['site-0']:.1f}, " in done.stdout + done.stderr
    for k in range(2):
        blob = (folder / "payloads" / f"site-{k}.pb").read_bytes()
        assert len(blob) == metrics["clients"][f"site-{k}"]["upload_bytes"] > 44_000_000
        assert wire.digest(blob) == json.loads((folder / "payloads" / f"site-{k}.json").read_text())["sha256"]
        assert not list((tmp_path / f"cache-{k}").rglob("payload.pb"))  # acknowledged


def test_who_has_no_registered_key_or_does_not_trust_the_server_stays_out(federation: Federation, tmp_path: Path) -> None:
    """One node as it should be comes in; every other way ends with its process, and not as a node that is online."""
    federation.begin_superlink()
    federation.register("good")
    federation.flwr("supernode", "unregister", federation.register("revoked"), "test")
    certs.make_node(federation.keys, "stranger")
    other = certs.make_ca(tmp_path / "other")
    for name in ("good", "revoked", "stranger"):
        federation.begin_node(name, *federation.trusting(name))
    federation.begin_node("keyless", "--root-certificates", str(federation.keys / "ca.crt"))
    federation.begin_node("plain", "--insecure")
    federation.register("distrustful")
    federation.begin_node("distrustful", *federation.trusting("distrustful", other))
    reasons = {
        "revoked": "Failed to activate SuperNode",
        "stranger": "Failed to activate SuperNode",
        "keyless": "All SuperNodes must be registered",
        "distrustful": "CERTIFICATE_VERIFY_FAILED",
    }
    for name, reason in reasons.items():
        process = federation.processes[name]
        assert process.wait(timeout=60) != 0
        assert reason in federation.log(name)
    tries = "Connection attempt failed, retrying"  # Flower's node goes on trying, and says no more than that
    wait_for(lambda: federation.log("plain").count(tries) > 2, 60, lambda: federation.log("plain"))
    wait_for(lambda: federation.statuses().count(ONLINE) == 1, 60, lambda: federation.log("good"))

    # Its database outlives a SuperLink: who was registered is, and who was revoked is not
    federation.end("good")
    wait_for(lambda: federation.statuses().count(ONLINE) == 0, 60, lambda: federation.log("good"))
    federation.end("superlink")
    federation.begin_superlink()
    for name in ("good", "revoked"):
        federation.begin_node(name, *federation.trusting(name))
    wait_for(lambda: federation.statuses().count(ONLINE) == 1, 60, lambda: federation.log("good"))
    assert federation.processes["revoked"].wait(timeout=60) != 0
    assert federation.processes["good"].poll() is None


def test_an_expired_server_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) - timedelta(days=400)

    monkeypatch.setattr(certs, "datetime", LastYear)
    certs.make_server(federation.keys, [], days=397)
    monkeypatch.undo()
    (row,) = [row for row in certs.describe(federation.keys) if row[0] == "server.pem"]
    assert row[2] < datetime.now(UTC)
    federation.begin_superlink()
    certs.make_node(federation.keys, "late")
    federation.begin_node("late", *federation.trusting("late"))
    assert federation.processes["late"].wait(timeout=60) != 0
    assert "CERTIFICATE_VERIFY_FAILED" in federation.log("late")
