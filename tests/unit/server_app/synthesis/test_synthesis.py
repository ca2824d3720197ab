"""Synthesis: who gets which unit, what is not finite, what a global model is trained on."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from osfl.config import parse_run_config
from osfl.models.classifiers import compute_logits, new_classifier
from osfl.models.diffusion import load_kit
from osfl.models.training import ExtraLoss, fit
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app.context import ServerJob
from server_app.synthesis.engine import _calibrated, _seconds
from server_app.synthesis.images import _shaping
from server_app.synthesis.plan import Unit, cut_units, plan_images
from server_app.synthesis.samplers import NotFiniteError, to_images
from server_app.synthesis.workers import _hand_out
from server_app.training import _softmax, mean_teacher, train_global
from tests.helpers.settings import quick

CPU = torch.device("cpu")
UNITS = cut_units(plan_images("m", 0, {"a": [0, 1]}, 4), 2, {}, {})


# ---- What is not finite ----


def decoding(images: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(decode=lambda z: images)


def test_one_number_of_the_latent_that_is_not_finite_is_enough() -> None:
    """A decoder may hide it: a clamp, a saturated activation."""
    z = torch.zeros(3, 4, 2, 2)
    z[1, 2, 1, 0] = float("nan")
    with pytest.raises(NotFiniteError) as caught:
        to_images(decoding(torch.zeros(3, 3, 8, 8)), z)  # type: ignore[arg-type]
    assert caught.value.rows == [1]


def test_one_number_of_the_image_that_is_not_finite_is_enough() -> None:
    images = torch.zeros(3, 3, 8, 8)
    images[2, 1, 0, 5] = float("inf")
    with pytest.raises(NotFiniteError) as caught:
        to_images(decoding(images), torch.zeros(3, 4, 2, 2))  # type: ignore[arg-type]
    assert caught.value.rows == [2]


def test_one_probability_that_is_not_finite_is_enough() -> None:
    """A teacher's probability, on one of the images."""
    weight = torch.zeros(2, 3 * 4)
    pixels = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    pixels[1] = 255
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    teacher[1].weight.data = weight
    teacher[1].register_forward_hook(lambda _, args, out: out / (args[0].sum(1, keepdim=True) < 0))
    with pytest.raises(PayloadError, match="client-1.*outputs on the synthetic images"):
        _softmax("client-1", teacher, pixels, CPU)


def test_pixels_are_the_papers_range_rounded() -> None:
    values = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
    batch = to_images(decoding(values.view(1, 1, 1, 6).expand(1, 3, 1, 6)), torch.zeros(1, 4, 1, 1))  # type: ignore[arg-type]
    assert batch[0, 0, 0].tolist() == [0, 0, 128, 191, 255, 255]


# ---- Who gets which unit ----


class Actor:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.sample = self

    def remote(self, jobs: tuple) -> str:
        return "ref"


def given_to(
    held: dict, waiting: list[Unit], still_open: list[Unit], deadly: tuple[Unit, ...] = ()
) -> list[list[Unit]]:
    deaths = {unit.name: 1 for unit in deadly}
    _hand_out(deque(waiting), held, {unit.name: unit for unit in still_open}, deaths)
    return [[unit for _, unit in queue] for queue in held.values()]


def test_an_actor_with_a_unit_waits_until_all_have_one() -> None:
    queues = {Actor(): [("ref", UNITS[0])], Actor(): [], Actor(): []}
    assert given_to(queues, UNITS[1:], UNITS) == [[UNITS[0], UNITS[3]], [UNITS[1]], [UNITS[2]]]


def test_an_idle_actor_repeats_what_the_fewest_have() -> None:
    first, second = UNITS[:2]
    queues = {
        Actor(): [("ref", first)],
        Actor(): [("ref", first)],
        Actor(): [("ref", second)],
        Actor(): [],
        Actor(): [],
    }
    assignments = given_to(queues, [], [first, second])
    assert assignments == [[first], [first], [second], [second], []]  # twice at most


def test_a_unit_at_which_an_actor_died_is_given_alone() -> None:
    """The result may be lost because the next unit killed the actor: then that one is found."""
    first, second, third = UNITS[:3]
    assignments = given_to({Actor(): [], Actor(): []}, [first, second, third], UNITS, (first,))
    assert assignments == [[first], [second, third]]
    assert given_to({Actor(): []}, [first, second], UNITS, (second,)) == [[first]]


def test_a_finished_unit_is_not_given_out_again() -> None:
    finished_unit, open_unit = UNITS[:2]
    assert given_to({Actor(): []}, [finished_unit, open_unit], [open_unit]) == [[open_unit]]
    assert given_to({Actor(): [("ref", finished_unit)], Actor(): []}, [], []) == [
        [finished_unit],
        [],
    ]


# ---- What a global model is trained on ----


@pytest.fixture
def job(home: Path, tiny_kit: Path) -> ServerJob:
    config = parse_run_config(quick(kit=str(tiny_kit), global_model__lr=0.05))
    folder = open_run_folder(config, "job", 0)
    return ServerJob(config, folder, Status(folder.path), ("a",))


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, (6, 3, 16, 16), generator=g, dtype=torch.uint8), torch.arange(6)


def outputs(model: nn.Module) -> torch.Tensor:
    return compute_logits(model, pictures()[0], CPU)


def test_a_global_model_is_the_settings_the_seeds_and_the_teachers(job: ServerJob) -> None:
    pixels, labels = pictures()
    teacher = torch.softmax(torch.randn(6, 10, generator=torch.Generator().manual_seed(1)), 1)
    settings = job.config.global_model
    seed = job.config.seed
    for name, target, weight in (("FT", None, 0.0), ("MD", teacher, 3.0)):
        classifier = train_global(job, name, pixels, labels, target, weight)
        expected = new_classifier(settings, 10, job.init_kit, seed)
        fit(
            expected,
            pixels,
            labels,
            settings,
            seed,
            CPU,
            extra=ExtraLoss(target, weight),
        )
        assert torch.equal(outputs(classifier.model), outputs(expected))
        assert not classifier.model.training
        assert (classifier.architecture, classifier.small_stem) == (
            settings.architecture,
            settings.small_stem,
        )


def test_a_global_model_is_kept_for_the_same_images_labels_and_teachers(
    job: ServerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, labels = pictures()
    teacher = torch.full((6, 10), 0.1)
    first = train_global(job, "FT", pixels, labels, teacher, 1.0)
    trained: list[int] = []
    monkeypatch.setattr("server_app.training.fit", lambda *args, **named: trained.append(1))
    again = train_global(job, "FT", pixels, labels, teacher, 1.0)
    assert torch.equal(outputs(first.model), outputs(again.model))
    assert not again.model.training
    assert trained == []
    other_pixels = pixels.clone()
    other_pixels[5, 2, 15, 15] += 1
    for changed in (
        (other_pixels, labels, teacher),
        (pixels, labels.flip(0), teacher),
        (pixels, labels, None),
    ):
        # each is trained, and would be kept in the place of the first
        train_global(job, "FT", pixels, labels, teacher, 1.0)
        trained.clear()
        train_global(job, "FT", *changed, 1.0)
        assert trained == [1]


def test_a_class_that_no_teacher_holds_gets_nothing() -> None:
    class Even(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(images), 4)

    teachers = {"a": Even(), "b": Even()}
    classes = {"a": [0, 1], "b": [1]}
    probabilities = mean_teacher(teachers, classes, pictures()[0], CPU, plain=False)
    assert torch.allclose(probabilities, torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(6, 4))


# ---- What is measured once ----


def test_a_calibration_is_kept_in_a_folder_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "new" / "cache"))
    times = {"float32": 2.0, "bfloat16": 1.0}
    options = {"dtype": ("float32", "bfloat16"), "compile": ("off",)}
    asked: list[str] = []

    def seconds(choice: Mapping[str, str]) -> float:
        asked.append(choice["dtype"])
        return times[choice["dtype"]]

    for _ in range(2):
        chosen = _calibrated(seconds, options, "this device")  # type: ignore[arg-type]
        assert chosen == {"dtype": "bfloat16", "compile": "off"}
    assert asked == ["float32", "bfloat16"]
    assert _calibrated(lambda choice: 0.0, {"dtype": ("float32",)}, "another") == {
        "dtype": "float32"
    }


def test_a_pass_is_timed_once_it_is_warm(tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of five passes after two that nobody times to their end."""
    clock = iter([0.0, 0.0, *(0.0, 7.0), *(0.0, 1.0), *(0.0, 2.0), *(0.0, 6.0), *(0.0, 5.0)])
    monkeypatch.setattr("server_app.synthesis.engine.time.perf_counter", lambda: next(clock))
    assert _seconds(load_kit(tiny_kit), 2) == 5.0
    assert next(clock, None) is None


def test_other_words_in_prompts_are_other_units(home: Path, tiny_kit: Path) -> None:
    """And no words at all leave the names as they always were."""
    shaping = []
    for number, words in enumerate(("", "zero=nothing", "zero=nil")):
        config = parse_run_config(quick(kit=str(tiny_kit), data__words=words))
        folder = open_run_folder(config, f"job-{number}", 0)
        shaping.append(_shaping(ServerJob(config, folder, Status(folder.path), ("a",))))
    assert "words" not in shaping[0]
    assert [entry["words"] for entry in shaping[1:]] == ["zero=nothing", "zero=nil"]
    assert {**shaping[0], "words": "zero=nil"} == shaping[2]
