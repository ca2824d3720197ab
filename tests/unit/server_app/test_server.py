"""The server's parts, each alone: what it renders, whom it follows, what it counts."""

import base64
import io
import json
import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from osfl.config import ConfigError, parse_run_config
from osfl.data.digits import CLASSES
from osfl.launch import flower as launch
from osfl.launch import jobs
from osfl.launch.jobs import innermost_cause
from osfl.launch.views import QuietDisplay
from osfl.models import classifiers
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import load_kit
from osfl.models.training import ExtraLoss, fit
from osfl.payload.kinds import Classifier, Descriptions
from osfl.payload.wire import PayloadError
from osfl.run_folder import layout as run_folder
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.report.metrics import gather, write_report
from osfl.run_folder.status import Status
from osfl.util.seeds import generator_of
from server_app import pipeline
from server_app.context import ServerJob
from server_app.methods import feddeo, fedlmg, local, prompts_only
from server_app.synthesis.guidance import as_teacher
from server_app.synthesis.images import synthesize
from server_app.synthesis.plan import plan_images
from server_app.synthesis.samplers import NotFiniteError, PrecisionError, to_images
from tests.helpers.settings import plain_classifier, quick

CPU = torch.device("cpu")


def resnet() -> nn.Module:
    return classifiers.build_classifier("resnet18", 10, small_stem=True)


@pytest.mark.parametrize("architecture", ["shufflenet_v2_x1_0", "regnet_y_400mf"])
def test_a_classifier_is_rebuilt_from_its_state(architecture: str) -> None:
    model = classifiers.build_classifier(architecture, 10).eval()
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(
        classifiers.rebuild_classifier(model.state_dict(), architecture, 10, False)(images),
        model(images),
    )


@pytest.mark.parametrize("is_file", [False, True])
def test_rendered_images_keep_label_client_and_size(
    home: Path, tiny_kit: Path, is_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every image is painted in its label's shade, and made at 32 px for classifiers of 16.

    Pixels may be many, and then they are in a file.
    """
    if is_file:
        monkeypatch.setattr("server_app.synthesis.images.MEMORY_SHARE", 2**60)
    folder = open_run_folder(parse_run_config(quick(kit=str(tiny_kit))), "job", 0)
    config = parse_run_config(quick(kit=str(tiny_kit), synthesis__unit_size=3))
    job = ServerJob(config, folder, Status(folder.path), ("a", "b"))

    def paint(jobs):  # type: ignore[no-untyped-def]
        return torch.stack(
            [torch.full((3, 32, 32), 20 * j.label + 10, dtype=torch.uint8) for j in jobs]
        )

    for make in (lambda device: paint, lambda device: pytest.fail("everything was made before")):
        images = synthesize(job, plan_images("m", 0, {"a": [1, 4], "b": [7]}, 2), make)  # type: ignore[arg-type]
        assert (images.labels.tolist(), images.clients) == (
            [1, 1, 4, 4, 7, 7],
            ("a",) * 4 + ("b",) * 2,
        )
        assert images.pixels.shape == (6, 3, 16, 16)
        assert (images.pixels[:, 0, 8, 8] // 20).tolist() == images.labels.tolist()
        assert (f" {folder.path}/" in Path("/proc/self/maps").read_text()) == is_file


@pytest.mark.parametrize(("finite_in_float32", "blamed"), [(True, False), (False, True)])
def test_an_overflow_in_16_bits_is_no_clients_fault(
    home: Path, tiny_kit: Path, finite_in_float32: bool, blamed: bool
) -> None:
    """The first image that is not finite, of client b, is drawn again in float32."""
    config = parse_run_config(quick(kit=str(tiny_kit), synthesis__dtype="float16"))
    folder = open_run_folder(config, "job", 0)
    for client in ("a", "b"):
        folder.store_payload(client, client.encode(), {"sha256": client})
    job = ServerJob(config, folder, Status(folder.path), ("a", "b"))
    again: list[str] = []

    def overflowing(jobs):  # type: ignore[no-untyped-def]
        if rows := [row for row, image in enumerate(jobs) if image.client == "b"]:
            raise NotFiniteError(rows)
        return torch.zeros(len(jobs), 3, 32, 32, dtype=torch.uint8)

    def in_float32(jobs):  # type: ignore[no-untyped-def]
        again.extend(image.client for image in jobs)
        if not finite_in_float32:
            raise NotFiniteError([0])
        return torch.zeros(len(jobs), 3, 32, 32, dtype=torch.uint8)

    plan = plan_images("m", 0, {"a": [1], "b": [1]}, 1)
    makers = [lambda device: overflowing, lambda device: in_float32]
    expected = (PayloadError, "payload of b") if blamed else (PrecisionError, "set synthesis.dtype")
    with pytest.raises(expected[0], match=expected[1]):
        synthesize(job, plan, makers[0], in_float32=makers[1])
    assert again == ["b"]


def test_a_unit_that_does_not_fit_is_sampled_in_parts(home: Path, tiny_kit: Path) -> None:
    """Eight at a time are too many for this memory, and four; three fit.

    The next unit begins with what fitted.
    """
    config = parse_run_config(quick(kit=str(tiny_kit), synthesis__unit_size=8))
    tried: list[int] = []

    def paint(jobs, room=3):  # type: ignore[no-untyped-def]
        tried.append(len(jobs))
        if len(jobs) > room:
            raise torch.OutOfMemoryError
        return torch.stack(
            [torch.full((3, 32, 32), 20 * j.index + 10, dtype=torch.uint8) for j in jobs]
        )

    def made(name: str, sample, divisible: bool = True) -> list[int]:  # type: ignore[no-untyped-def]
        job = ServerJob(
            config, open_run_folder(config, name, 0), Status(home / "runs" / name), ("a",)
        )
        plan = plan_images("m", 0, {"a": [1]}, 11)
        return (
            synthesize(job, plan, lambda device: sample, divisible).pixels[:, 0, 8, 8] // 20
        ).tolist()

    assert made("some", paint) == list(range(11))
    assert tried == [8, 4, 2, 2, 2, 2, 2, 1]
    for name, sample, divisible in (
        ("none", partial(paint, room=0), True),
        ("whole", paint, False),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            made(name, sample, divisible)


def test_each_scale_belongs_to_its_branch(tiny_kit: Path) -> None:
    """With one branch switched off, FedDEO is classifier-free guidance on the other."""
    kit = load_kit(tiny_kit)
    plan = plan_images("m", 0, {"a": [0]}, 2)
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    d = torch.randn(kit.text.shape, generator=generator_of(0))
    description = Conditioning(d[None]).expand(2)
    for scales, c in (((0.0, 3.0), description), ((3.0, 0.0), prompts[[0, 0]])):
        ours = feddeo.sample(kit, plan, prompts, {("a", 0): d}, scales, 2)
        assert torch.equal(ours, prompts_only.sample(kit, plan, c, 3.0, 2))
    assert not torch.equal(ours, prompts_only.sample(kit, plan, description, 3.0, 2))


def test_the_server_uses_the_classifier_that_was_sent() -> None:
    state = resnet().state_dict()
    payload = Classifier(CLASSES, "resnet18", state)
    job = SimpleNamespace(config=parse_run_config(quick()), classes=CLASSES)
    for model in (
        fedlmg._rebuild(payload, 10, True).model,
        local.run(job, {"a": payload})["a"].model,
    ):  # type: ignore[arg-type]
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_each_row_is_guided_by_its_own_classifier(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input of the loss and the guidance in every step. Teacher, labels, weights, size, statistics;
    the scale.
    """
    kit = load_kit(tiny_kit)
    plan = plan_images("m", 0, {"a": [0, 3], "b": [5]}, 1)
    calls = []
    teachers = {client: as_teacher(resnet()) for client in "ab"}
    loss = fedlmg.classifier_loss
    guide = fedlmg.guide
    settings = parse_run_config(quick(fedlmg__gradient_scale=7.0, fedlmg__bn_weight=0.3)).fedlmg

    def watched_loss(teacher, x, y, *rest):  # type: ignore[no-untyped-def]
        calls.append(("b" if teacher is teachers["b"] else "a", y.tolist(), *rest))
        return loss(teacher, x, y, *rest)

    def watched_guide(*args):  # type: ignore[no-untyped-def]
        calls.append(args[-1])
        return guide(*args)

    monkeypatch.setattr(fedlmg, "classifier_loss", watched_loss)
    monkeypatch.setattr(fedlmg, "guide", watched_guide)
    fedlmg.sample(
        kit, plan, kit.text([f"an image of {name}" for name in CLASSES]), teachers, settings, 2, 16
    )
    step = [("a", [0, 3], 1.0, 0.3, 16, "image"), ("b", [5], 1.0, 0.3, 16, "image"), 7.0]
    assert sorted(map(str, calls)) == sorted(map(str, step * 2))


def test_a_client_stands_only_for_the_classes_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the client's own classes and the run's seed."""
    plans = []
    names = ("two", "seven")
    for method, name, payload in (
        (feddeo, "feddeo", Descriptions(names, torch.zeros(2, 8, 32))),
        (fedlmg, "fedlmg", Classifier(names, "resnet18", resnet().state_dict())),
    ):
        config = parse_run_config(quick(seed=5, method=name))
        job = ServerJob(config, SimpleNamespace(), SimpleNamespace(), ("a",))  # type: ignore[arg-type]
        monkeypatch.setattr(
            pipeline, "synthesize", lambda job, plan, *rest: plans.append(plan) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            method.run(job, {"a": payload})  # type: ignore[attr-defined]
        assert plans.pop() == plan_images(name, 5, {"a": [2, 7]}, 1)


def test_each_image_is_taught_by_its_own_row() -> None:
    """KL to a one-hot teacher is cross-entropy: the same as twice the learning rate."""
    pixels = torch.randint(
        256, (6, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    labels = torch.tensor([0, 1, 2] * 2)

    def trained(lr: float, teacher: torch.Tensor | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
        settings = plain_classifier(epochs=2, batch_size=2, lr=lr)
        return fit(model, pixels, labels, settings, 0, CPU, extra=ExtraLoss(teacher))[1].weight  # type: ignore[index]

    assert torch.allclose(
        trained(0.02, nn.functional.one_hot(labels).float()), trained(0.04, None), atol=1e-5
    )
    assert not torch.allclose(trained(0.02, None), trained(0.04, None), atol=1e-5)


def test_rows_of_the_confusion_matrix_are_true_classes() -> None:
    """A model that sees threes everywhere, on two zeros and a three."""

    class Threes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.full((len(x),), 3), 4).float()

    pixels = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    labels = torch.tensor([0, 0, 3])
    assert classifiers.count_confusion(Threes(), pixels, labels, 4, CPU) == [
        [0, 0, 0, 2],
        [0] * 4,
        [0] * 4,
        [0, 0, 0, 1],
    ]


def test_rows_that_are_not_finite_are_named(tiny_kit: Path) -> None:
    kit = load_kit(tiny_kit)
    z = torch.zeros(3, *kit.latent_shape)
    assert to_images(kit, z).shape == (3, 3, 32, 32)
    z[1, 0, 0, 0] = float("nan")
    z[2, 0, 0, 0] = float("inf")
    with pytest.raises(NotFiniteError) as caught:
        to_images(kit, z)
    assert caught.value.rows == [1, 2]


def test_figures_by_hand(tmp_path: Path) -> None:
    # FT: 7 of 8 and 2 of 4 right, 68.75 on average. MD is better, and who would choose it for that
    # had looked at the test images
    (tmp_path / "tests").mkdir()
    (tmp_path / "config.json").write_text('{"method": "fedlmg", "seed": 0}')
    (tmp_path / "tests" / "FT.json").write_text(
        json.dumps({"a": [[3, 1], [0, 4]], "b": [[1, 1], [1, 1]]})
    )
    (tmp_path / "tests" / "MD.json").write_text(
        json.dumps({"a": [[4, 0], [0, 4]], "b": [[2, 0], [0, 2]]})
    )
    result = gather(tmp_path, dict.fromkeys(("a", "b"), 1000))
    assert result["accuracy"]["FT"] == {"a": 87.5, "b": 50.0, "average": 68.75}
    assert (result["shown"], result["average"], result["clients"]["a"]["download_bytes"]) == (
        "FT",
        68.75,
        1000,
    )
    assert not result["kit_not_counted"]
    assert gather(tmp_path, {"a": 1000, "b": None})["kit_not_counted"]


def test_the_page_shows_each_clients_first_image_and_the_shares_of_each_row(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "config.json").write_text('{"method": "feddeo", "seed": 0}')
    (tmp_path / "tests" / "FT.json").write_text(
        json.dumps({"a": [[3, 1], [0, 0]], "b": [[0, 0], [1, 7]]})
    )
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (200, 200), colour).save(tmp_path / f"{name}.png")
    drawn = [("b", "dog", "red"), ("b", "dog", "blue"), ("a", "cat", "blue")]
    rows = [
        json.dumps({"client": client, "class": name, "file": f"{file}.png"})
        for client, name, file in drawn
    ]
    (tmp_path / "manifest.jsonl").write_text("\n".join(rows) + "\n")
    write_report(tmp_path, ("cat", "cow", "dog"))
    page = (tmp_path / "report.html").read_text()
    pictures = dict(re.findall(r'<img alt="(.*?)" src="data:image/png;base64,(.*?)">', page))
    assert list(pictures) == ["cat, a", "dog, b"]
    for data, colour in zip(pictures.values(), [(0, 0, 255), (255, 0, 0)], strict=True):
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (picture.size, picture.getpixel((0, 0))) == ((128, 128), colour)
    shades = re.findall(r'<td class="shade( dark)?" style="--s:(\d+)%">(\d+)</td>', page)
    assert shades == [(" dark", "75", "3"), ("", "25", "1"), ("", "12", "1"), (" dark", "88", "7")]


def test_locals_figure_is_the_mean_of_its_models(tmp_path: Path) -> None:
    """The best client's model cannot be chosen. Every client fetches all of them."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "payloads").mkdir()
    (tmp_path / "config.json").write_text('{"method": "local", "seed": 0}')
    for client, matrix in (("a", [[4, 0], [0, 4]]), ("b", [[0, 4], [4, 0]])):
        (tmp_path / "tests" / f"{client}.json").write_text(json.dumps({"a": matrix, "b": matrix}))
        (tmp_path / "payloads" / f"{client}.pb").write_bytes(b"x" * 100)
    result = gather(tmp_path)
    assert (result["shown"], result["average"], result["clients"]["a"]["download_bytes"]) == (
        "",
        50.0,
        200,
    )


def test_a_server_is_alone_in_its_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    folder = open_run_folder(parse_run_config(quick()), "job", 0)
    with (
        folder.lock(),
        pytest.raises(ConfigError, match="'job': another server is at work on it"),
        folder.lock(),
    ):
        pass
    with folder.lock():
        pass


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            "unknown",
            r"lost the connection to run 7, .* running \(see `flwr list there`\): why",
        ),
        ("finished:failed", "the run failed: why"),
    ],
)
def test_a_failed_or_unreachable_federation_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: str, message: str
) -> None:
    """The log breaks off first, and the run goes on: that alone is no failure."""
    answers = iter([("running", ""), (status, "why")])
    monkeypatch.setattr(launch, "submit", lambda *_: 7)
    monkeypatch.setattr(launch, "outcome", lambda *_: next(answers))
    monkeypatch.setattr(launch, "follow_log", lambda *_: None)
    monkeypatch.setattr(jobs, "check_run", lambda *_: [])
    job = jobs.new_job(["job-id=job"], None, "there")
    with pytest.raises(launch.LaunchError, match=message):
        jobs.run_remotely(job, "there", QuietDisplay())


def test_results_that_a_broken_log_lacks_are_read_from_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SuperLink was away while the run ended."""
    begun = 'INFO :      status {"phase": "joining", "total": 0}'
    results = (
        'INFO :      status {"results": {"method": "oscar", "shown": "FT", "server": {}, '
        '"report": "/runs/job/report.html"}}'
    )
    logs = [[begun, "╭─ Error ─╮"], [begun, results]]

    def follow(run_id: int, connection: str, environment: dict, show: Callable) -> None:
        for line in logs.pop(0):
            show(line)

    monkeypatch.setattr(launch, "submit", lambda *_: 7)
    monkeypatch.setattr(launch, "outcome", lambda *_: ("finished:completed", ""))
    monkeypatch.setattr(launch, "follow_log", follow)
    monkeypatch.setattr(jobs, "check_run", lambda *_: [])
    job = jobs.new_job(["job-id=job"], None, "there")
    metrics = jobs.run_remotely(job, "there", QuietDisplay())
    assert metrics["report"] == "/runs/job/report.html"
    assert logs == []


@pytest.mark.parametrize(
    ("status", "phase", "problem"),
    [
        # A client that was given up still trains, and Flower waits for it
        ("running", "finished", ""),
        ("finished:completed", "finished", ""),
        ("finished:failed", "finished", "the run failed: why"),
        ("running", "synthesis", "the run failed: why"),
    ],
)
def test_a_simulation_has_succeeded_with_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, phase: str, problem: str
) -> None:
    def end(log_stream: None, folder: Path, view: object) -> None:
        folder.mkdir(parents=True)
        Status(folder).phase(phase)

    monkeypatch.setattr(jobs, "_check_simulation", lambda *_: None)
    monkeypatch.setattr(jobs, "_stream_log", lambda *_: nullcontext())
    monkeypatch.setattr(jobs, "watch", end)
    monkeypatch.setattr(launch, "local_superlink", lambda *_: nullcontext({}))
    monkeypatch.setattr(launch, "submit", lambda *_: 7)
    monkeypatch.setattr(launch, "outcome", lambda *_: (status, "why"))
    job = jobs.new_job(["job-id=job"], tmp_path)
    resources = jobs.Resources()
    failure = pytest.raises(launch.LaunchError, match=problem) if problem else nullcontext()
    with failure:
        metrics = jobs.simulate(job, resources, QuietDisplay(), read=lambda _: {"average": 1.0})
        assert metrics == {"average": 1.0}


def test_the_innermost_cause_of_the_last_failure_is_reported() -> None:
    """Not that of an earlier one, and not what Flower made of it."""
    try:
        try:
            try:
                raise OSError("no room: the disk is full")
            except OSError as error:
                raise RuntimeError("Simulation Runtime crashed.") from error
        except RuntimeError:
            raise ValueError("Ending simulation.")  # noqa: B904  (its context is looked at)
    except ValueError as error:
        chain = "".join(traceback.format_exception(error))
    earlier = chain.replace("no room", "something before")
    log = (
        f"INFO: begins\n{earlier}INFO: goes on\n{chain}ERROR: Exit Code: 700\n\nSee: <https://x>\n"
    )
    assert innermost_cause(log) == "OSError: no room: the disk is full"
    assert innermost_cause(f"{chain}WARNING: {earlier.partition('The above')[0]}") == (
        "OSError: something before: the disk is full"
    )
    assert innermost_cause("INFO: all is well\n") == ""


def test_the_local_superlink_listens_on_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink runs any app that it is sent, so no other machine may reach it."""
    arguments: list[str] = []
    monkeypatch.setattr(
        launch.subprocess,
        "Popen",
        lambda command, **_: arguments.extend(command) or SimpleNamespace(pid=0),
    )
    monkeypatch.setattr(launch, "_wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(launch, "_guarded_folder", lambda: nullcontext(tmp_path))
    with launch.local_superlink(tmp_path, tmp_path):
        assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
        assert arguments[arguments.index("--fleet-api-address") + 1].startswith("127.0.0.1:")


def test_a_users_own_malloc_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is kept unless the user says otherwise; Flower's switches are ours."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    environment = launch.flower_environment()
    assert (environment["MALLOC_MMAP_THRESHOLD_"], environment["MALLOC_TRIM_THRESHOLD_"]) == (
        "268435456",
        "1",
    )
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"


def test_flowers_commands_are_not_asked_for_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel asks every program; the JSON of `flwr run` would have them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert not {"FORCE_COLOR", "CLICOLOR_FORCE"} & set(launch.flower_environment())
