"""Images that the server makes while a client still works (`synthesis.overlap`)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from httpx import HTTPStatusError, Request, Response

import server_app.app as app_module
import server_app.methods.feddeo as feddeo_server
import server_app.synthesis.images as images_module
from client_app.app import app
from osfl.cli import certs
from osfl.config import parse_run_config
from osfl.kit.kits import KitError
from osfl.run_folder.layout import RunFolder, read_rows
from osfl.run_folder.status import Status, read_status
from server_app import overlap
from server_app.app import run_job
from server_app.defenses import label_consistency
from server_app.federation import collect
from server_app.methods import prompts_domain
from server_app.synthesis import engine
from server_app.synthesis.samplers import NotFiniteError
from tests.helpers.late_grid import LateGrid
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import ROOT, quick
from tests.helpers.system_tools import TWO_CLASSES, make_images, wait_for
from tests.helpers.whole_runs import files, nodes, start, start_once

pytestmark = pytest.mark.slow
# Of each client: one of each class
IMAGES = 10
THREAD = "overlap"
# Client and label, of a row in the client's second work unit
BAD = ("client-0", 8)
LEFT = "further images are synthesized after the last payload"


def owners(folder: Path) -> list[str]:
    """The owner of every image in a committed work unit."""
    return [row["client"] for unit in RunFolder(folder).unit_files() for row in read_rows(unit)]


def start_late(
    config: dict[str, Any], may_answer: Callable[[], bool], job: str = "job", **settings: Any
) -> LateGrid:
    """Run a job whose last client answers late."""
    sites = settings.pop("sites", nodes(config["num-clients"]))
    grid = LateGrid(app, config, sites, may_answer=may_answer, **settings)
    run_job(grid, parse_run_config(config), job)  # type: ignore[arg-type]
    return grid


def drawn_units(folder: Path) -> list[str]:
    lines = (folder / "timings.jsonl").read_text().splitlines()
    return [json.loads(line)["unit"] for line in lines]


def plain_run(home: Path, config: dict[str, Any]) -> Path:
    """The folder of a run of the same job without overlap."""
    folder = start_once(home, {**config, "synthesis.overlap": "off"})
    return Path(shutil.move(folder, home / "plain"))


def assert_same_results(folder: Path, plain: Path) -> None:
    """Images, units, manifest and models are equal bit by bit, and there are no other files."""
    names = ("images", "units", "manifest.jsonl", "payloads", "models", "kit.json")
    results, plain_results = files(folder, *names), files(plain, *names)
    timed = [name for name in results if ".json" in name.replace(".jsonl", "")]
    assert results.keys() == plain_results.keys()
    assert [
        name for name in results.keys() - set(timed) if results[name] != plain_results[name]
    ] == []
    assert sorted(drawn_units(folder)) == sorted(drawn_units(plain))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("feddeo", {}),
        ("oscar", {"synthesis__parallel_units": 2}),
        ("fedlmg", {"fedlmg__bn_statistics": "unit"}),
        ("domain-vector", {"domain_vector__classes": "all"}),
        ("fgl", {"public_domains": "sketch"}),
    ],
)
def test_an_early_client_has_its_images_before_a_late_one_answers(
    home: Path, tiny_kit: Path, method: str, settings: dict[str, Any]
) -> None:
    config = quick(method=method, kit=str(tiny_kit), synthesis__overlap="on", **settings)
    plain = plain_run(home, config)
    folder = home / "runs" / "job"
    snapshots: list[list[str]] = []
    states: list[str] = []

    def may_answer() -> bool:
        snapshots.append(owners(folder))
        states.append(read_status(folder)["clients"]["client-0"])
        return f"; {IMAGES} of {IMAGES} images synthesized" in states[-1]

    grid = start_late(config, may_answer)
    assert grid.has_answered
    assert snapshots[0] == []
    assert snapshots[-1] == ["client-0"] * IMAGES
    assert re.fullmatch(r"delivered [\d,]+ bytes; .*", states[-1])
    assert_same_results(folder, plain)
    times = json.loads((folder / "metrics.json").read_text())["timeline"]["clients"]["client-0"]
    assert times["delivered"] <= times["synthesized"] < times["tested"]
    assert "images synthesized: " in (folder / "report.html").read_text()


def test_payloads_that_stay_sealed_have_their_images_early(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    """The images are those of a run without a key, and no payload is on the disk in clear text."""
    config = quick(method="prompts-domain", kit=str(tiny_kit), synthesis__overlap="on")
    plain = plain_run(home, config)
    key, _ = certs.make_sealing_key(tmp_path / "sealing")
    folder = home / "runs" / "job"
    grid = start_late(
        {**config, "sealing-key": str(key), "sealed-store": True},
        lambda: owners(folder) == ["client-0"] * IMAGES,
    )
    assert grid.has_answered
    names = ("images", "manifest.jsonl", "models/FT.safetensors")
    assert files(folder, *names) == files(plain, *names)
    for file in (folder / "payloads").glob("*.pb"):
        assert file.stem.encode() in (plain / "payloads" / file.name).read_bytes()
        assert file.stem.encode() not in file.read_bytes()


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


class Polls:
    """Let a client answer at the third poll; the second one follows a hand-over of payloads.

    Attributes:
        threads: names of all threads that have run at a poll.
    """

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self._count = 0

    def __call__(self) -> bool:
        self._count += 1
        self.threads |= thread_names()
        return self._count == 3


def test_a_run_with_balanced_classes_has_no_thread(home: Path, tiny_kit: Path) -> None:
    """A client's counts depend on who comes later."""
    settings = {"class_balance": True, "synthesis__overlap": "on"}
    config = quick(method="prompts-domain", kit=str(tiny_kit), **settings)
    plain = plain_run(home, config)
    polls = Polls()
    start_late(config, polls)
    assert THREAD not in polls.threads
    assert_same_results(home / "runs" / "job", plain)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch has two threads here, and gives three to threads that are new."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    thread = threading.Thread(target=torch.set_num_threads, args=(3,))
    thread.start()
    thread.join()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("parallel", "begun"), [(1, 1), (2, 2)])
def test_the_run_waits_for_units_in_progress_and_makes_the_others(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, parallel: int, begun: int
) -> None:
    """The late client answers during the first units. All have the run's number of threads."""
    settings = {"unit_size": 4, "parallel_units": parallel, "overlap": "on"}
    settings = {f"synthesis__{key}": value for key, value in settings.items()}
    config = quick(method="prompts-domain", kit=str(tiny_kit), **settings)
    plain = plain_run(home, config)
    sample = prompts_domain.sample
    has_ended = threading.Event()
    threads: list[int] = []
    folder = home / "runs" / "job"

    def watched(kit: Any, *rest: Any) -> Any:
        threads.append(torch.get_num_threads())
        if len(threads) <= begun:
            assert has_ended.wait(30)
        return sample(kit, *rest)

    phase = Status.phase

    def begin(status: Status, name: str, total: int = 0) -> None:
        phase(status, name, total)
        if name == "finishing the images in progress":
            has_ended.set()

    monkeypatch.setattr(overlap, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(Status, "phase", begin)
    monkeypatch.setattr(prompts_domain, "sample", watched)
    counts: list[int] = []
    resolve = app_module.resolve_synthesis

    def resolved(*arguments: Any) -> Any:
        counts.append(len(owners(folder)))
        return resolve(*arguments)

    monkeypatch.setattr(app_module, "resolve_synthesis", resolved)
    start_late(config, lambda: len(threads) == begun)
    assert counts == [4 * begun]
    assert set(threads) == {2 // parallel}
    # Units of 4, 4 and 2 images of each client
    assert len(threads) == 6
    assert_same_results(folder, plain)


def test_a_payload_is_not_checked_while_a_kit_is_loaded(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries change torch's default number format meanwhile, which is the whole process's."""
    config = quick(method="fedlmg", kit=str(tiny_kit), synthesis__overlap="on")
    build = engine._build
    check = collect.check_plausible
    is_loading = threading.Event()
    formats: list[torch.dtype] = []

    def slow_build(*arguments: Any) -> Any:
        if threading.current_thread().name != THREAD:
            return build(*arguments)
        torch.set_default_dtype(torch.bfloat16)
        is_loading.set()
        # Without the lock the run's thread would check the late payload now
        time.sleep(1)
        torch.set_default_dtype(torch.float32)
        return build(*arguments)

    def checked(*arguments: Any) -> None:
        formats.append(torch.get_default_dtype())
        check(*arguments)

    monkeypatch.setattr(engine, "_build", slow_build)
    monkeypatch.setattr(collect, "check_plausible", checked)
    start_late(config, is_loading.is_set)
    assert formats == [torch.float32] * 2


def test_a_continued_run_has_the_images_of_the_other_one(home: Path, tiny_kit: Path) -> None:
    """The new client is late. Nothing is left to make of the others."""
    config = quick(method="oscar", kit=str(tiny_kit), synthesis__overlap="on")
    start(config, "first")
    larger = {**config, "num-clients": 3, "continue-from": "first"}
    folder = home / "runs" / "job"

    def may_answer() -> bool:
        states = read_status(folder)["clients"]
        return all("10 of 10 images" in states[f"client-{number}"] for number in (0, 1))

    start_late(larger, may_answer)
    assert len(drawn_units(folder)) == len(drawn_units(home / "runs" / "first")) / 2
    assert owners(folder).count("client-2") == IMAGES
    first_images = files(home / "runs" / "first", "images")
    assert first_images.items() <= files(folder, "images").items()


def test_clients_of_a_mixed_run_have_their_images_early(home: Path, tiny_kit: Path) -> None:
    config = {
        **quick(method="mixed", kit=str(tiny_kit), num_clients=3, synthesis__overlap="on"),
        "mixed.methods": "domain-vector+fedcgs,oscar",
    }
    kinds = ("oscar", "domain-vector+fedcgs", "oscar")
    sites = [
        {**node, "method": kind, "client-id": f"client-{number}"}
        for number, (node, kind) in enumerate(zip(nodes(3), kinds, strict=True))
    ]
    folder = home / "runs" / "job"
    grid = LoopGrid(app, config, sites)
    run_job(grid, parse_run_config({**config, "synthesis.overlap": "off"}), "job")  # type: ignore[arg-type]
    plain = Path(shutil.move(folder, home / "plain"))

    def may_answer() -> bool:
        return set(owners(folder)) == {"client-0", "client-1"} and len(owners(folder)) == 2 * IMAGES

    start_late(config, may_answer, sites=sites)
    assert_same_results(folder, plain)


# ---- What goes wrong ----

KILLED = """
import os, signal
from pathlib import Path
from client_app.app import app
from osfl.config import parse_run_config
from server_app.app import run_job
from tests.helpers.late_grid import LateGrid
from tests.helpers.loop_grid import begin_task

config = {config}
units = Path(os.environ["OSFL_RUNS"]) / "job" / "units"

def may_answer():
    if any(units.glob("*.jsonl")):
        os.kill(os.getpid(), signal.SIGKILL)

begin_task()
run_job(LateGrid(app, config, {sites}, may_answer=may_answer), parse_run_config(config), "job")
"""


def test_a_server_that_is_killed_meanwhile_goes_on_where_it_was(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    """No unit is made twice, and the other client is still late."""
    make_images(tmp_path / "data")
    settings = {"images_per_class": 5, "unit_size": 1, "steps": 20, "overlap": "on"}
    settings = {f"synthesis__{key}": value for key, value in settings.items()}
    config = quick(method="prompts-domain", kit=str(tiny_kit), **TWO_CLASSES, **settings)
    site = {"data-dir": str(tmp_path / "data"), "domain": "sketch"}
    sites = [{**site, "client-id": f"client-{number}"} for number in range(2)]
    folder = home / "runs" / "job"
    plain_config = parse_run_config({**config, "synthesis.overlap": "off"})
    run_job(LoopGrid(app, config, sites), plain_config, "job")  # type: ignore[arg-type]
    plain = Path(shutil.move(folder, home / "plain"))
    code = KILLED.replace("{config}", repr(config)).replace("{sites}", repr(sites))
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ, cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    image_owners = owners(folder)
    assert 0 < len(image_owners) < IMAGES
    assert [file.name for file in RunFolder(folder).payload_files()] == ["client-0.pb"]
    at_first: list[int] = []

    def may_answer() -> bool:
        at_first.append(len(owners(folder)))
        return at_first[-1] == IMAGES

    grid = start_late(config, may_answer, sites=sites)
    assert [index for index, kind in grid.sent if kind == "train"] == [1]
    assert at_first[0] >= len(image_owners)
    # The kill may come between the commitment of a unit and the line of its time
    units = drawn_units(folder)
    assert len(units) == len(set(units)) >= 2 * IMAGES - 1
    names = ("images", "units", "manifest.jsonl")
    assert files(folder, *names) == files(plain, *names)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_run_ends_the_thread_within_a_step(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The run is interrupted in the second step of the first unit, which has a thousand steps."""
    config = quick(
        method="prompts-domain", kit=str(tiny_kit), synthesis__overlap="on", synthesis__steps=999
    )
    steps: list[int] = []
    is_raised = threading.Event()
    is_marked = threading.Event()
    step = overlap._SilentStatus.step

    def count(status: Any, done: int, total: int) -> None:
        steps.append(done)
        if done == 2:
            assert is_raised.wait(30)
            # Until the run's thread has set the mark that it has failed
            wait_for(status._is_aborted, 30, lambda: "no mark", every=0.01)
            # The thread reports no error, not even that of the line before
            is_marked.set()
        step(status, done, total)

    def may_answer() -> bool:
        if len(steps) > 1:
            is_raised.set()
            raise (
                error("stop")
                if error is not OSError
                else HTTPStatusError(
                    "no", request=Request("POST", "http://x/pull-messages"), response=Response(403)
                )
            )
        return False

    monkeypatch.setattr(overlap._SilentStatus, "step", count)
    with pytest.raises(HTTPStatusError if error is OSError else error):
        start_late(config, may_answer)
    assert THREAD not in thread_names()
    assert is_marked.is_set()
    assert max(steps) == 2
    assert owners(home / "runs" / "job") == []
    assert read_status(home / "runs" / "job")["phase"] == "failed"


def test_the_run_meets_the_error_of_a_payload_that_diverges(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second unit diverges. The other early client has its images; the run is as ever."""
    sample = feddeo_server.sample
    tried: list[str] = []

    def diverge(kit: Any, jobs: Any, *rest: Any) -> Any:
        if rows := [row for row, job in enumerate(jobs) if (job.client, job.label) == BAD]:
            tried.append(threading.current_thread().name)
            raise NotFiniteError(rows)
        return sample(kit, jobs, *rest)

    monkeypatch.setattr(feddeo_server, "sample", diverge)
    config = quick(
        method="feddeo",
        kit=str(tiny_kit),
        synthesis__overlap="on",
        num_clients=3,
        min_clients=2,
    )
    plain = plain_run(home, config)
    tried.clear()
    folder = home / "runs" / "job"

    def may_answer() -> bool:
        return THREAD in tried and owners(folder).count("client-1") == IMAGES

    start_late(config, may_answer)
    assert [THREAD in name for name in tried] == [True, False]
    assert_same_results(folder, plain)
    assert (folder / "payloads" / "client-0.pb.refused").exists()
    assert "payload of client-0: payload: " in caplog.text
    status = [read_status(run_folder)["clients"]["client-0"] for run_folder in (folder, plain)]
    assert status == ["refused", "refused"]
    figures = [
        json.loads((run_folder / "metrics.json").read_text()) for run_folder in (folder, plain)
    ]
    for key in ("accuracy", "confusion", "warnings", "not_tested"):
        assert figures[0][key] == figures[1][key]


def test_a_defense_that_drops_images_leaves_what_it_leaves_without_overlap(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The early client's images are dropped."""

    def without_client_0(job: Any, images: Any) -> Any:
        return images.select([row for row, name in enumerate(images.clients) if name != "client-0"])

    monkeypatch.setattr(label_consistency, "filter_images", without_client_0)
    config = quick(
        method="oscar", kit=str(tiny_kit), synthesis__overlap="on", defense="label-consistency"
    )
    plain = plain_run(home, config)
    folder = home / "runs" / "job"
    start_late(config, lambda: len(owners(folder)) == IMAGES)
    assert_same_results(folder, plain)
    assert json.loads((folder / "models" / "FT.json").read_text())["images"] == IMAGES


@pytest.mark.parametrize("failure", ["commit", "kit", "memory"])
def test_a_thread_that_fails_leaves_the_images_to_the_run(
    home: Path,
    tiny_kit: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: str,
) -> None:
    """The disk is full, the kit cannot be loaded, or there is no room for payloads to come."""
    caplog.set_level("INFO")
    config = quick(method="prompts-domain", kit=str(tiny_kit), synthesis__overlap="on")
    plain = plain_run(home, config)

    def failing(real: Any, error: Exception) -> Any:
        def fail(*arguments: Any) -> Any:
            # Units are committed in threads that the overlap's begins
            if is_early:
                raise error
            return real(*arguments)

        return fail

    is_early = True
    full = OSError(28, "No space left on device")
    if failure == "commit":
        monkeypatch.setattr(images_module, "_commit", failing(images_module._commit, full))
    elif failure == "kit":
        broken = failing(prompts_domain.load_engine, KitError("no kit"))
        monkeypatch.setattr(prompts_domain, "load_engine", broken)
    else:
        memory = SimpleNamespace(available=config["max-payload-mb"] * 1e6)
        virtual = SimpleNamespace(virtual_memory=lambda: memory)
        monkeypatch.setattr(overlap, "psutil", virtual)

    def may_answer() -> bool:
        nonlocal is_early
        is_early = LEFT not in caplog.text
        return not is_early

    start_late(config, may_answer)
    reason = {
        "commit": "OSError: [Errno 28] No space left on device",
        "kit": "KitError: no kit",
        "memory": "600 MB of memory free",
    }[failure]
    assert f"{LEFT}: {reason}" in caplog.text
    assert_same_results(home / "runs" / "job", plain)
    assert "synthesized" not in read_status(home / "runs" / "job")["clients"]["client-0"]


def test_a_run_that_awaits_no_client_begins_no_thread(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(method="prompts-domain", kit=str(tiny_kit), synthesis__overlap="on")
    monkeypatch.setattr(overlap.Overlap, "draw", lambda *_: pytest.fail("it waits"))
    start(config)
