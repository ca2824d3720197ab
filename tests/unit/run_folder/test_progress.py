"""Progress of a run as shown to users, and a client's cache between rounds."""

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

import client_app.app
from client_app import handlers, image_cache
from client_app.image_cache import files_key, load_cached
from client_app.methods import (
    classifier,
    domain_vector,
    espresso,
    fedbip,
    feddeo,
    feddisc,
    fgl,
    oscar,
    votes,
)
from client_app.methods.oscar import mean_encoding
from osfl.cli import display
from osfl.config import ConfigError, NodeConfig, parse_node_config, parse_run_config
from osfl.data.load import Images
from osfl.launch import jobs, views
from osfl.launch.flower import MAX_LINE_LENGTH
from osfl.models.diffusion import load_kit
from osfl.run_folder.events import FollowedRun, log_results
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.util.costs import FlopMeter
from osfl.util.pixels import LazyPixels
from server_app.app import run_job
from server_app.context import ServerJob
from server_app.federation.exchange import RoundError
from server_app.methods import prompts_only
from server_app.synthesis.images import synthesize
from server_app.synthesis.plan import plan_images
from server_app.synthesis.progress import report_steps_to, step_done
from server_app.synthesis.samplers import ddim, denoise, z_sampling
from tests.helpers.client_jobs import images, job_of
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "settings", "begins"),
    [
        (feddeo, {"method": "feddeo"}, ["encoding image", "step"]),
        (
            feddeo,
            {
                "method": "feddeo",
                "epsilon": 8.0,
                "feddeo__epochs": 3,
                "feddeo__conditions_per_batch": 8,
            },
            ["encoding image", "step"],
        ),
        (
            espresso,
            {"method": "espresso", "espresso__epochs": 2},
            ["embedding image", "encoding image", "step"],
        ),
        (fedbip, {"method": "fedbip", "fedbip__epochs": 2}, ["encoding image", "step"]),
        (
            domain_vector,
            {"method": "domain-vector", "domain_vector__epochs": 2},
            ["encoding image", "step"],
        ),
        (votes, {"method": "votes"}, ["encoding image", "batch"]),
        (classifier, {"method": "local", "classifier__epochs": 2}, ["step"]),
        (oscar, {"method": "oscar"}, ["captioning image"]),
        (fgl, {"method": "fgl"}, ["captioning image"]),
        (feddisc, {"method": "feddisc"}, ["embedding image"]),
    ],
)
def test_a_client_says_how_far_it_is_before_its_first_step(
    home: Path, tiny_kit: Path, tiny_unclip: Path, half: Any, settings: dict, begins: list[str]
) -> None:
    """Everything that takes long reports nothing done, then more and more, then all."""
    reports: list[tuple[str, int, int]] = []

    def progress(done: int, total: int, what: str = "step") -> None:
        reports.append((what, done, total))

    kit = tiny_unclip if half is feddisc else tiny_kit
    job = job_of(kit, images(*[0] * 20, *[4] * 12), **settings)
    half.make_payload(replace(job, progress=progress))
    assert list(dict.fromkeys(label for label, _, _ in reports)) == begins
    for kind in begins:
        counts = [count for label, count, _ in reports if label == kind]
        total = {total for label, _, total in reports if label == kind}
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert total == {counts[-1]}
        assert len(set(counts)) > 2


def test_the_terminal_shows_the_clients_progress(tmp_path: Path) -> None:
    folder = tmp_path / f"client-0-{'0' * 12}"
    folder.mkdir()
    for line in ("encoding image 8 of 100", "step 0 of 40"):
        label, count, _, total = line.rsplit(" ", 3)
        handlers._ProgressFile(folder)(int(count), int(total), label)
        table = views.client_rows({"client-0": "asked"}, tmp_path)
        assert list(table.columns[1].cells) == [line]


@pytest.mark.parametrize("loop", ["ddim", "unipc", "z"])
def test_every_sampler_tells_of_its_steps(tiny_kit: Path, loop: str) -> None:
    kit = load_kit(tiny_kit)
    steps = []
    z = torch.zeros(1, *kit.latent_shape)

    def still(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(z)

    run: dict[str, Callable[[], Any]] = {
        "ddim": lambda: ddim(kit, z, 3, still),
        "z": lambda: z_sampling(kit, z, 3, still, still, 500),
    }
    if loop == "unipc":
        from dataclasses import replace

        from osfl.models.diffusion import Sampling

        unipc_kit = replace(kit, sampling=Sampling("unipc"))
        run["unipc"] = lambda: denoise(unipc_kit, z, 3, still)
    run[loop]()
    with report_steps_to(lambda *step: steps.append(step)):
        run[loop]()
    step_done(1, 1)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_the_status_tells_of_the_steps_within_a_unit(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_run_config(quick(kit=str(tiny_kit), synthesis__unit_size=2))
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a",))
    kit = load_kit(tiny_kit)
    steps = []
    within = job.status.step
    monkeypatch.setattr(job.status, "step", lambda *step: steps.append(step) or within(*step))
    c = kit.text(["a"])

    def sample(jobs: Any) -> torch.Tensor:
        return prompts_only.sample(kit, jobs, c.expand(len(jobs)), 2.0, 3)

    synthesize(job, plan_images("m", 0, {"a": [1]}, 4), lambda device: sample)
    assert steps == [(1, 3), (2, 3), (3, 3)] * 2
    job.status.step(2, 3)
    job.status._write(immediately=True)
    assert json.loads((folder.path / "status.json").read_text())["step"] == [2, 3]
    job.status.phase("next")
    assert json.loads((folder.path / "status.json").read_text())["step"] == []


class Ending:
    """A log that is followed for some looks."""

    def __init__(self, looks: int):
        self.left = looks

    def poll(self) -> int | None:
        self.left -= 1
        return None if self.left >= 0 else 0


def test_output_after_the_display_begins_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a terminal; the phase is shown with the step of the unit."""
    written = io.StringIO()
    console = Console(file=written, width=120)
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    state = {"phase": "synthesis", "clients": {"a": "joined"}, "done": 1, "total": 2}
    status = {**state, "phases": [{"phase": "synthesis"}], "step": [7, 20]}
    (tmp_path / "status.json").write_text(json.dumps(status))
    with views.ConsoleDisplay(console).view() as view:
        jobs.watch(Ending(2), tmp_path, view)  # type: ignore[arg-type]
    console.print("error the run failed")
    *before, last = written.getvalue().splitlines()
    assert last == "error the run failed"
    assert [line.split(maxsplit=1)[1] for line in before] == ["synthesis", "a: joined"]


def test_a_terminal_shows_clients_and_the_phase_with_the_step_of_the_unit() -> None:
    written = io.StringIO()
    terminal = Console(file=written, width=120, force_terminal=True)
    state = {"phase": "synthesis", "clients": {"a": "joined"}, "done": 1, "total": 2}
    with views.ConsoleDisplay(terminal).view() as view:
        view.show({**state, "step": [7, 20]})
    assert "synthesis step 7 of 20" in written.getvalue()
    assert re.search(r"a +joined", written.getvalue())


def test_without_a_terminal_every_change_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also phases that passed between two looks; one line a minute says how far a long one is."""
    written = io.StringIO()
    now = [0.0]
    monkeypatch.setattr(views.time, "monotonic", lambda: now[0])
    with views.ConsoleDisplay(Console(file=written, width=40)).view() as view:
        view.show({})
        phases = [{"phase": "joining"}, {"phase": "synthesis"}]
        state = {"phase": "synthesis", "phases": phases, "clients": {"a": "asked"}}
        for count in (1, 2):
            view.show({**state, "done": count, "total": 90})
        now[0] = 61.0
        view.show({**state, "done": 3, "total": 90})
        ended = [*phases, {"phase": "finished"}]
        view.show({**state, "phase": "finished", "phases": ended, "done": 3, "total": 90})
    lines = [line.split(maxsplit=1)[1] for line in written.getvalue().splitlines()]
    assert lines == ["joining", "synthesis", "a: asked", "synthesis: 3 of 90"]


def test_a_log_that_is_followed_gives_status_and_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are as the server wrote them, whatever else is in the log."""
    clients = [f"client-{k}" for k in range(120)]
    metrics: dict[str, Any] = {
        "method": "feddeo",
        "server": {"synthetic_images": 7, "seconds_per_image": 0.5, "more": 1},
        "clients": {client: {"upload_bytes": 10, "seconds": 1.0} for client in clients},
        "accuracy": {"FT": {**dict.fromkeys(clients, 50.0), "average": 50.0}},
        "not_tested": ["client-7"],
        "warnings": ["client-3: odd"],
    }
    with caplog.at_level("INFO", logger="flwr"):
        status = Status(tmp_path)
        status.phase("joining", 2)
        status.client("client-0", "joined")
        log_results(metrics, "/data/report.html")
        status.phase("finished")
    followed = FollowedRun()
    other_lines = ["client-9: status {}", "status", "status {", 'status {"phase": 1}']
    lines = [f"INFO :      {record.getMessage()}" for record in caplog.records]
    assert max(map(len, lines)) < MAX_LINE_LENGTH
    for line in [*lines, *(f"INFO :      {other_line}" for other_line in other_lines[:3])]:
        followed.read(line)
    assert followed.state["phase"] == "finished"
    assert followed.state["clients"] == {"client-0": "joined"}
    assert [each["phase"] for each in followed.state["phases"]] == ["joining", "finished"]
    assert followed.metrics["accuracy"] == metrics["accuracy"]
    assert followed.metrics["not_tested"] == ["client-7"]
    assert followed.metrics["warnings"] == ["client-3: odd"]
    assert followed.metrics["report"] == "/data/report.html"
    assert followed.metrics["clients"]["client-119"] == {"upload_bytes": 10}
    # What begins no line of the server's own, or is none of its events, changes nothing
    for line in ('client-1: status {"phase": "failed", "total": 0}', f"INFO :   {other_lines[3]}"):
        assert not followed.read(line)
    assert followed.state["phase"] == "finished"
    display.print_metrics(followed.metrics)


# ---- Memory ----


def test_the_run_says_whether_clients_save_memory_and_the_node_goes_first(tmp_path: Path) -> None:
    def saves(run: str, node: str = "") -> bool:
        config = parse_run_config(quick(checkpointing=run))
        node_config = parse_node_config(
            {"device": "cpu", **({"checkpointing": node} if node else {})}
        )
        return handlers.client_job(config, node_config, "a", "", tmp_path).saves_memory

    assert [saves("auto"), saves("on"), saves("off")] == [False, True, False]
    assert [saves("on", "off"), saves("off", "on"), saves("on", "auto")] == [False, True, False]
    with pytest.raises(ConfigError, match="checkpointing = 'x': must be one of off, on, auto$"):
        parse_run_config(quick(checkpointing="x"))
    with pytest.raises(ConfigError, match="must be one of off, on, auto, empty$"):
        parse_node_config({"checkpointing": "x"})


def test_a_run_may_go_on_with_other_checkpointing(home: Path) -> None:
    for how in ("auto", "on"):
        config = parse_run_config(quick(checkpointing=how))
        open_run_folder(config, "job", 0)
        assert client_app.app.cache_key(config, NodeConfig(), "") == client_app.app.cache_key(
            parse_run_config(quick()), NodeConfig(), ""
        )


def test_oscar_encodes_a_class_in_batches_and_the_mean_stays(tiny_kit: Path) -> None:
    text = load_kit(tiny_kit).text
    sizes = []
    captions = [f"an image of {'seven ' * (n % 5)}" for n in range(37)]

    def encode(batch: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return text.states(batch)

    mean = mean_encoding(encode, captions, FlopMeter())
    assert sizes == [16, 16, 5]
    assert mean.dtype == torch.float32
    assert torch.allclose(mean, text.states(captions).mean(dim=0), rtol=0, atol=1e-6)
    encoding = mean_encoding(text.states, captions[:1], FlopMeter())
    assert torch.allclose(encoding, text.states(captions[:1])[0], rtol=0, atol=1e-6)


# ---- Joining ----


@pytest.mark.parametrize(
    ("method", "key", "part"),
    [("fgl", "captioner", "captioner"), ("espresso", "image-encoder", "image_encoder")],
)
def test_a_client_looks_at_a_named_encoder_when_it_joins(
    home: Path, tiny_kit: Path, tmp_path: Path, method: str, key: str, part: str
) -> None:
    place = shutil.copytree(tiny_kit / part, tmp_path / part)
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = quick(method=method, kit=str(tiny_kit), join_timeout=1.0, **{key: str(place)})
    nodes = [{"partition-id": k, "num-partitions": 2} for k in range(2)]
    grid = LoopGrid(client_app.app.app, config, nodes)
    with pytest.raises(RoundError, match=f"{key} = '{place}': model.safetensors cannot be loaded"):
        run_job(grid, parse_run_config(config), "job")
    assert {kind for _, kind in grid.sent} == {"query.join"}


def test_no_client_is_asked_if_the_server_cannot_synthesize(
    home: Path, tiny_kit: Path, tmp_path: Path
) -> None:
    kit = shutil.copytree(tiny_kit, tmp_path / "kit")
    weights = kit / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model.non_ema.safetensors"))
    config = quick(method="fedlmg", kit=str(kit))
    grid = LoopGrid(client_app.app.app, config, [{"partition-id": 0, "num-partitions": 2}] * 2)
    with pytest.raises(ValueError, match="the only weights there are the variant"):
        run_job(grid, parse_run_config(config), "job")
    assert grid.sent == []
    state = json.loads((home / "runs" / "job" / "status.json").read_text())
    assert state["phase"] == "failed"
    assert "the only weights there are the variant" in state["error"]


# ---- Images that are kept between rounds ----


@pytest.fixture
def client_folder(tmp_path: Path) -> Path:
    """Two classes of three pictures each."""
    for name in ("cat", "dog"):
        for number in range(3):
            file = tmp_path / "data" / "train" / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 12), (40 * number, 0, 200)).save(file)
    (tmp_path / "data" / "test").mkdir()
    return tmp_path / "data"


def test_images_are_decoded_once_a_job(
    client_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_run_config(
        quick(
            method="fedavg", data__name="folder", data__classes="cat,dog", classifier__init="none"
        )
    )
    node = NodeConfig(data_dir=str(client_folder))
    cache = tmp_path / "cache"
    calls = []
    decode = handlers.load_images
    monkeypatch.setattr(handlers, "load_images", lambda *a: calls.append(a) or decode(*a))

    def load(size: int = 16) -> Images:
        return handlers.client_job(config, node, "a", "", cache).load(size)

    first = load()
    again = load()
    assert len(calls) == 1
    assert torch.equal(first.pixels, again.pixels)
    assert torch.equal(first.labels, again.labels)
    for file in cache.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    again.pixels[0] = 7  # changes nothing that is kept
    assert torch.equal(load().pixels, first.pixels)
    # another size, a changed file, a file more, a cut file: decoded anew
    load(8)
    load(16)
    picture = client_folder / "train" / "cat" / "0.png"
    stat = picture.stat()
    os.utime(picture, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    load()
    shutil.copy(picture, picture.with_name("9.png"))
    assert len(load()) == 7
    pixel_file = cache / "pixels.npy"
    for damaged in (pixel_file.read_bytes()[:-1], pixel_file.read_bytes() + b"x"):
        pixel_file.write_bytes(damaged)
        load()
    (cache / "pixels.json").write_text("[")
    load()
    assert len(calls) == 8
    load()
    assert len(calls) == 8


def test_images_beyond_the_cache_limit_or_disk_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    dataset = Images(pixels, torch.tensor([0, 1]))
    lazy = replace(dataset, pixels=LazyPixels(lambda number: pixels[number], 2))
    assert load_cached(tmp_path, "k", lambda: lazy) is lazy
    assert list(tmp_path.iterdir()) == []

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(image_cache, "write_atomically", full)
    assert load_cached(tmp_path, "k", lambda: dataset) is dataset


def test_a_key_is_of_everything_that_pixels_come_from(client_folder: Path) -> None:
    config = parse_run_config(quick(data__name="folder", data__classes="cat,dog", kit="/kit")).data
    node = NodeConfig(data_dir=str(client_folder))
    digits = parse_run_config(quick()).data
    key = partial(files_key, config, node, "train", 16)
    keys = [key(), files_key(config, node, "train", 32)]
    keys += [files_key(digits, NodeConfig(partition_id=k), "train", 16) for k in range(2)]
    assert len(set(keys)) == 4
    assert key() == keys[0]
