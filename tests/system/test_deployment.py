"""Admission to a federation of separate processes, with TLS and node keys."""

import json
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from osfl.cli import certs, node_keys
from tests.helpers.system_tools import (
    GRPC,
    TWO_CLASSES,
    Clock,
    Federation,
    make_images,
    quick_arguments,
    wait_for,
)

pytestmark = pytest.mark.system
ONLINE = "online"
# A domain's name, which is all of a payload
SECRET = "ward of nobody else"


def wait_until_in(federation: Federation, name: str) -> None:
    """Until a node has a place."""
    wait_for(lambda: "SuperNode ID" in federation.log(name), 60, lambda: federation.log(name))


def test_a_node_without_registered_key_or_trust_is_refused(
    federation: Federation, tmp_path: Path
) -> None:
    """One node as it should be comes in.

    Every other way ends with its process, and not as a node that is online.
    """
    federation.begin_superlink("process")
    federation.register("good")
    federation.flwr("supernode", "unregister", federation.register("revoked"), "test")
    node_keys.make_node(federation.keys, "stranger")
    other_ca = certs.make_ca(tmp_path / "other")
    for name in ("good", "revoked", "stranger"):
        federation.begin_node(name, *federation.trusting(name), isolation="process")
    federation.begin_node(
        "keyless", "--root-certificates", str(federation.keys / "ca.crt"), isolation="process"
    )
    federation.begin_node("plain", "--insecure", isolation="process")
    federation.register("distrustful")
    federation.begin_node(
        "distrustful", *federation.trusting("distrustful", other_ca), isolation="process"
    )
    # Flower refuses who is more than 5 seconds ahead of the server, or 305 behind
    clocks = {"ahead": 30, "behind": -400, "little-behind": -200} if GRPC else {}
    for name, ahead in clocks.items():
        federation.register(name)
        trusting = federation.trusting(name)
        clock = Clock(tmp_path / f"clock-{name}")
        clock.set_ahead(ahead)
        federation.begin_node(name, *trusting, isolation="process", **clock.settings)
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
    # It says nothing of its clock, and its exit code is that of a node that was asked to end
    for name in clocks.keys() & {"ahead", "behind"}:
        assert federation.processes[name].wait(timeout=60) == 0
        assert "SuperNode terminated gracefully" in federation.log(name)
    # Flower's node goes on trying, and says no more than that
    tries = "Connection attempt failed, retrying"
    wait_for(lambda: federation.log("plain").count(tries) > 2, 60, lambda: federation.log("plain"))
    welcome = ["good", "little-behind"] if GRPC else ["good"]
    for name in welcome:
        wait_until_in(federation, name)
    assert federation.statuses().count(ONLINE) == len(welcome)
    nodes_are_known_by_their_names(federation)

    # Its database outlives a SuperLink: who was registered is, and who was revoked is not
    for name in welcome:
        federation.end(name)
    wait_for(
        lambda: federation.statuses().count(ONLINE) == 0,
        120,
        lambda: federation.log("good"),
        every=10,
    )
    federation.end("superlink")
    federation.begin_superlink("process")
    for name in ("good", "revoked"):
        federation.begin_node(name, *federation.trusting(name), isolation="process")
    assert federation.processes["revoked"].wait(timeout=60) != 0
    wait_until_in(federation, "good")
    assert federation.statuses().count(ONLINE) == 1
    assert federation.processes["good"].poll() is None


def nodes_are_known_by_their_names(federation: Federation) -> None:
    """List the registered nodes, revoke one by its name, and see its key refused."""

    def call(*arguments: str) -> subprocess.CompletedProcess:
        command = [federation.osfl, "nodes", *arguments, "--connection", "test"]
        return subprocess.run(
            command, env=federation.environment, capture_output=True, text=True, timeout=120
        )

    number = federation.register("late")
    listed = call()
    assert listed.returncode == 0, listed.stdout
    rows = {row[1]: row for row in map(str.split, listed.stdout.splitlines()) if len(row) > 5}
    assert rows["good"][5] == ONLINE
    assert rows["late"][3] == number
    assert "revoked" not in rows
    unknown = call("revoke", "nobody")
    assert unknown.returncode == 1
    assert "'nobody': no such node; registered nodes: " in unknown.stdout
    result = call("revoke", "late")
    line = f"late ({number}) is unregistered; its key is no longer accepted\n"
    assert result.stdout.endswith(line)
    assert "late" not in call().stdout
    federation.begin_node("late", *federation.trusting("late"), isolation="process")
    assert federation.processes["late"].wait(timeout=60) != 0
    assert "Failed to activate SuperNode" in federation.log("late")


def test_an_expired_server_is_refused(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) - timedelta(days=400)

    monkeypatch.setattr(certs, "datetime", LastYear)
    certs.make_server(federation.keys, [], days=397)
    monkeypatch.undo()
    (row,) = [row for row in certs.describe(federation.keys) if row[0] == "server.pem"]
    assert row[2] < datetime.now(UTC)
    federation.begin_superlink("process")
    node_keys.make_node(federation.keys, "late")
    federation.begin_node("late", *federation.trusting("late"), isolation="process")
    assert federation.processes["late"].wait(timeout=60) != 0
    assert "CERTIFICATE_VERIFY_FAILED" in federation.log("late")


def secret_in_database(folder: Path, run: subprocess.Popen) -> bool:
    """Search the database's files until a run has ended: deleted rows stay readable for a while."""
    present = False
    ended = False
    while not ended:
        # One more look when it has ended
        ended = run.poll() is not None
        for file in folder.glob("state.db*"):
            with suppress(FileNotFoundError):
                present = present or SECRET.encode() in file.read_bytes()
        time.sleep(0.05)
    return present


@pytest.mark.timeout(500)
def test_a_key_names_its_client_and_the_database_holds_no_sealed_payload(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    """A site with a key of its own that takes another's name is refused, and the other is not. Its
    payload is sealed in the first run, and open in the second.
    """
    file, pin = certs.make_sealing_key(tmp_path / "sealing")
    federation.begin_superlink()
    make_images(tmp_path / "images")
    for name in ("site-a", "site-b"):
        federation.register(name)
        config = f"client-id='site-a' data-dir='{tmp_path / 'images'}' domain='{SECRET}'"
        config += f" cache-dir='{tmp_path / name}'"
        federation.begin_node(name, *federation.trusting(name), config=config)
    settings = {"method": "prompts-domain", **TWO_CLASSES, "join_timeout": 60.0}
    jobs = {
        "sealed": {"sealing_key": str(file), "num_clients": 2, "min_clients": 1},
        "open": {"num_clients": 1},
    }
    for job, overrides in jobs.items():
        run = federation.begin_run(
            *quick_arguments(tiny_kit, job_id=job, **{**settings, **overrides})
        )
        assert secret_in_database(tmp_path, run) == (job == "open")
        log = federation.log("run")
        assert run.returncode == 0, log[-3000:]
        assert "status {" not in log
        assert "accuracy on each client's own test images" in log
        folder = tmp_path / "server" / job
        assert log.splitlines()[-1] == f"on the server, report: {folder / 'report.html'}"
        (stored,) = (folder / "payloads").glob("*.pb")
        assert stored.name == "site-a.pb"
        assert SECRET.encode() in stored.read_bytes()
    assert f"payloads are sealed to {pin}" in log
    assert "its key is registered as 'site-b', but its client id is 'site-a'" in log


@pytest.mark.timeout(1500)
def test_two_runs_share_one_cluster(federation: Federation, tmp_path: Path, tiny_kit: Path) -> None:
    """Begun together, on the same nodes: both end well, and each has what its own clients sent.

    One may fail because Flower unpacks the app for both at once. It is repeated, as its error says.
    """
    federation.begin_superlink()
    for name in ("site-a", "site-b"):
        federation.register(name)
        make_images(tmp_path / name)
        config = f"client-id='{name}' data-dir='{tmp_path / name}' domain='photo of {name}'"
        config += f" cache-dir='{tmp_path / name}-cache'"
        federation.begin_node(name, *federation.trusting(name), config=config)
    settings = {**TWO_CLASSES, "num_clients": 2, "join_timeout": 120.0}
    arguments = {
        job: quick_arguments(tiny_kit, method=method, job_id=job, **settings)
        for job, method in (("first", "prompts-domain"), ("second", "oscar-pooled"))
    }
    runs = {job: federation.begin_run(*arguments[job]) for job in arguments}
    codes = {job: run.wait(timeout=600) for job, run in runs.items()}
    is_disturbed = "Flower's copy of the app is incomplete" in federation.log("run")
    for job in [job for job, code in codes.items() if code and is_disturbed]:
        codes[job] = federation.begin_run(*arguments[job]).wait(timeout=300)
    assert codes == {"first": 0, "second": 0}, federation.log("run")[-3000:]
    times = {}
    for job in runs:
        folder = tmp_path / "server" / job
        phases = json.loads((folder / "status.json").read_text())["phases"]
        times[job] = (phases[0]["began"], phases[-1]["began"])
        payloads = sorted((folder / "payloads").glob("*.pb"))
        assert [file.name for file in payloads] == ["site-a.pb", "site-b.pb"]
        for file in payloads:
            payload = file.read_bytes()
            assert file.stem.encode() in payload
            assert job.encode() in payload
            named = f"photo of {file.stem}".encode() in payload
            assert named == (job == "first")
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["server"]["synthetic_images"] == 2 * 2
    latest_begin = max(began for began, _ in times.values())
    earliest_end = min(ended for _, ended in times.values())
    # They went on side by side, unless one was repeated
    assert is_disturbed or latest_begin < earliest_end
