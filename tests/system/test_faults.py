"""Killed processes lose nothing that was uploaded."""

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from osfl.payload import wire
from tests.helpers.system_tools import (
    TWO_CLASSES,
    Federation,
    apps_of,
    kill,
    make_images,
    quick_arguments,
    wait_for,
)

pytestmark = pytest.mark.system


@pytest.mark.timeout(1500)
def test_everything_dies_once_while_payloads_cross_the_network(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    """FedLMG's 45 MB classifiers, over gRPC with TLS and node keys, in Flower's chunks.

    kill -9 of a client's app alone while it trains, as where memory runs out, of another client, of
    the SuperLink, and of the server while it draws; each comes back as its restart policy would do
    it.
    """
    federation.begin_superlink("process")
    federation.begin_server()
    make_images(tmp_path / "images")
    caches = [tmp_path / f"cache-{k}" for k in range(2)]

    def begin_site(k: int) -> None:
        config = f"client-id='site-{k}' data-dir='{tmp_path / 'images'}' cache-dir='{caches[k]}'"
        federation.begin_node(f"site-{k}", *federation.trusting(f"site-{k}"), config=config)

    nodes = [federation.register(f"site-{k}") for k in range(2)]
    for k in range(2):
        begin_site(k)
    arguments = quick_arguments(
        tiny_kit,
        method="fedlmg",
        job_id="faulty",
        **TWO_CLASSES,
        fedlmg__strategies="ft",
        classifier__architecture="resnet18",
        classifier__epochs=60,  # some ten seconds
        synthesis__images_per_class=5,
        synthesis__steps=8,
        synthesis__unit_size=4,
    )
    folder = tmp_path / "server" / "faulty"
    run = federation.begin_run(*arguments)

    def log() -> str:
        return federation.log("run")[-3000:]

    def training() -> list[int]:
        return [k for k in range(2) if list(caches[k].rglob("progress"))]

    # The app of who trains first, then the other client, and the SuperLink
    wait_for(lambda: bool(training()), 300, log, every=0.1)
    first = training()[0]
    peer = 1 - first
    site = federation.processes[f"site-{first}"]
    # That in which it joined may be ending yet
    wait_for(lambda: len(apps_of(site)) == 1, 20, log, every=0.1)
    apps_of(site)[0].kill()
    wait_for(lambda: peer in training(), 300, log, every=0.1)
    kill(psutil.Process(federation.processes[f"site-{peer}"].pid))
    kill(psutil.Process(federation.processes["superlink"].pid))
    assert not any(list(cache.rglob("payload.pb")) for cache in caches)
    federation.begin_superlink("process")

    def delivered() -> int:
        # It is refused while the SuperLink takes it for online. On a busy machine one that was
        # refused may go on: it says why, and waits for the SuperExec that it began beside
        site = f"site-{peer}"
        refused = "Exit Code: 305" in federation.log(site)
        if refused or federation.processes[site].poll() is not None:
            federation.end(site)
            time.sleep(15)  # every start costs seconds of both cores
            begin_site(peer)
        return len(list((folder / "payloads").glob("*.pb")))

    wait_for(lambda: delivered() == 2, 300, log)
    # Its SuperNode went on; it says so, unless the SuperLink took it for away meanwhile
    again = rf"node {nodes[first]} (failed \(code 8\)|reconnected); the request will be sent again"
    # The command's stream may have ended with the SuperLink, which keeps the run's log
    run_id = re.findall(r"Flower run (\d+)", federation.log("run"))[0]
    assert re.search(again, federation.flwr("log", run_id, "test", "--show")), log()

    # The server, while it draws. The same command goes on at once: nobody is asked again, no unit
    # is drawn again
    wait_for(lambda: len(list((folder / "units").glob("*.jsonl"))) >= 2, 120, log)
    (server,) = apps_of(federation.processes["server"])
    kill(server)
    mtimes = {
        f: f.stat().st_mtime_ns
        for f in [*folder.glob("units/*.jsonl"), *folder.glob("payloads/*.pb")]
    }
    assert not (folder / "report.html").exists()
    assert federation.begin_run(*arguments).wait(timeout=300) == 0, log()
    assert run.wait(timeout=180) == 1
    assert all(f.stat().st_mtime_ns == at for f, at in mtimes.items())

    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["accuracy"]["FT"]) == {"site-0", "site-1", "average"}
    assert (
        f"accuracy (%) of FT: site-0 {metrics['accuracy']['FT']['site-0']:.1f}, "
        in federation.log("run")
    )
    assert len((folder / "manifest.jsonl").read_text().splitlines()) == 2 * 10
    for k in range(2):
        blob = (folder / "payloads" / f"site-{k}.pb").read_bytes()
        assert len(blob) == metrics["clients"][f"site-{k}"]["upload_bytes"] > 44_000_000
        assert (
            wire.digest(blob)
            == json.loads((folder / "payloads" / f"site-{k}.json").read_text())["sha256"]
        )
    wait_for(lambda: not list(tmp_path.glob("cache-*/**/payload.pb")), 30, log)  # acknowledged
