"""A standing federation (`osfl serve`): sites come in waves, one leaves, all processes die once."""

import json
import re
from pathlib import Path

import pytest

from osfl.cli import certs
from tests.helpers.standing import MINUTES, Standing, results
from tests.helpers.system_tools import (
    TWO_CLASSES,
    Federation,
    apps_of,
    kill,
    make_images,
    quick_arguments,
)

pytestmark = pytest.mark.system


@pytest.mark.timeout(3600)
def test_sites_come_in_waves_and_one_leaves(federation: Federation, tiny_kit: Path) -> None:
    """Two sites, two more, one more; the second leaves while the third version listens.

    kill -9 of the SuperLink while a version listens, of a site that has joined, of the server while
    it draws, and of `osfl serve`. The last version is bit by bit a fresh run of its sites. All
    payloads stay sealed on the server's disk.
    """
    settings = {"method": "prompts-domain", "synthesis__images_per_class": 6}
    settings |= {"synthesis__unit_size": 2, "synthesis__steps": 8, **TWO_CLASSES}
    key, _ = certs.make_sealing_key(federation.folder / "sealing")
    settings |= {"sealing_key": str(key), "sealed_store": True}
    images = federation.folder / "images"
    make_images(images)
    standing = Standing(
        federation,
        quick_arguments(tiny_kit, **settings),
        versions=3,
        data_of=lambda number: f"data-dir='{images}' domain='sketch of site-{number}'",
    )
    federation.begin_superlink("process")
    federation.begin_server()
    for number in range(5):
        federation.register(f"site-{number}")
    for number in (0, 1):
        standing.begin_site(number)
    standing.serve(new_clients=2)
    standing.wait(lambda: standing.version() == 1)
    assert standing.payloads(1) == ["site-0", "site-1"]

    # The second version listens, and has the payloads of the first
    standing.wait(lambda: standing.clients(2).keys() >= {"site-0", "site-1"})
    standing.kill("superlink")
    federation.begin_superlink("process")
    for number in (2, 3):
        standing.begin_site(number)
    standing.wait(lambda: "site-2" in standing.clients(2))
    standing.kill("site-2")
    standing.return_site(2)
    # It has the twelve work units of the first version, and draws more, which it may do before the
    # last payload has arrived
    standing.wait(lambda: len(standing.payloads(2)) == 4)
    standing.wait(lambda: len(list(standing.run_folder(2).glob("units/*.jsonl"))) > 12)
    (app,) = apps_of(federation.processes["server"])
    kill(app)
    standing.kill("server")
    standing.kill("serve-2")
    assert standing.version() == 1
    federation.begin_server()
    standing.serve(new_clients=1)
    standing.wait(lambda: standing.version() == 2)
    assert standing.payloads(2) == ["site-0", "site-1", "site-2", "site-3"]

    # While the third listens, a site leaves; its node stays online
    standing.wait(lambda: standing.clients(3).keys() >= {"site-0", "site-2", "site-3"})
    output = standing.osfl("forget", str(standing.run_folder(2)), "--client", "site-1")
    assert "the run 'study-v3' has this payload of the client, and drops it" in " ".join(
        output.split()
    )
    standing.begin_site(4)
    assert federation.processes["serve-1"].wait(timeout=15 * MINUTES) == 0, standing.story()
    sites = ["site-0", "site-2", "site-3", "site-4"]
    assert standing.payloads(2) == sites[:3]
    assert standing.payloads(3) == sites
    payloads = [file.read_bytes() for file in standing.run_folder(3).glob("payloads/*.pb")]
    assert not [payload for payload in payloads if b"sketch of" in payload]
    check_versions(standing)

    federation.end("site-1")
    run = federation.begin_run(*standing.arguments, "num-clients=4", "job-id=fresh")
    assert run.wait(timeout=15 * MINUTES) == 0, federation.log("run")[-3000:]
    fresh = results(standing.folder / "server" / "fresh")
    assert len(fresh) == 4 * 2 * 6 + 2
    assert results(standing.run_folder(3)) == fresh


def check_versions(standing: Standing) -> None:
    """Check what each version says of itself, and that no client was asked twice."""
    metrics = {
        number: json.loads((standing.run_folder(number) / "metrics.json").read_text())
        for number in (1, 2, 3)
    }
    versions = {number: metrics[number]["version"] for number in metrics}
    assert versions[1] == {}
    assert (versions[2]["carried"], versions[2]["new"]) == (["site-0"], ["site-2", "site-3"])
    assert (versions[3]["carried"], versions[3]["new"]) == (
        ["site-0", "site-2", "site-3"],
        ["site-4"],
    )
    assert metrics[2]["forgotten"] == 1
    tested = set(metrics[3]["accuracy"]["FT"]) - {"average"}
    assert tested == {"site-0", "site-2", "site-3", "site-4"}
    for number in (1, 3):
        text = (standing.run_folder(number) / "report.html").read_text()
        assert ("site-1" in text) == (number == 1)
    lines = standing.federation.log("serve-1").splitlines()
    assert [line for line in lines if re.fullmatch(r"version \d: \d payloads", line)] == [
        "version 2: 4 payloads",
        "version 3: 4 payloads",
    ]
