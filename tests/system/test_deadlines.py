"""A client's slow network does not delay the others."""

import json
import time
from pathlib import Path

import pytest

from tests.helpers.system_tools import (
    TWO_CLASSES,
    Federation,
    Line,
    make_images,
    quick_arguments,
    wait_for,
)

pytestmark = pytest.mark.system
DEADLINE = 60.0  # a slow machine needs half of it to begin
RATE = 30_000  # bytes a second: a ShuffleNet of 5 MB takes three minutes
WAITING = "waiting for payloads"


@pytest.mark.timeout(400)
def test_a_slow_upload_holds_up_no_client(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    """The other's payload is stored, the phase ends at its deadline, and the process ends.

    Flower's pull of the slow client's reply goes on meanwhile: it lasts as long as the upload.
    """
    federation.begin_superlink()
    line = Line(federation.fleet, to_server=RATE)
    make_images(tmp_path / "images")
    for name, port in (("quick", 0), ("slow", line.port)):
        federation.register(name)
        config = f"client-id='{name}' data-dir='{tmp_path / 'images'}'"
        config += f" cache-dir='{tmp_path / 'cache'}'"
        federation.begin_node(name, *federation.trusting(name), config=config, fleet=port)
    arguments = quick_arguments(
        tiny_kit, method="local", job_id="thin", **TWO_CLASSES, deadline=DEADLINE
    )
    run = federation.begin_run(*arguments)
    folder = tmp_path / "server" / "thin"

    def log() -> str:
        return federation.log("run")[-3000:]

    def phase() -> str:
        file = folder / "status.json"
        return json.loads(file.read_text())["phase"] if file.exists() else ""

    wait_for(lambda: phase() == WAITING, 120, log, every=0.1)
    began = time.monotonic()
    wait_for(lambda: phase() != WAITING, DEADLINE + 5, log, every=0.1)
    assert time.monotonic() - began > DEADLINE - 1
    assert [file.name for file in (folder / "payloads").glob("*.pb")] == ["quick.pb"]
    assert run.wait(timeout=60) == 1, log()
    line.close()
    # The upload had begun, and with it the pull; it has not ended
    assert 100_000 < line.sent < (folder / "payloads" / "quick.pb").stat().st_size - 10**6
    late = f"slow: no payload within {DEADLINE:g} s (deadline)"
    assert json.loads((folder / "status.json").read_text())["error"].endswith(late)
