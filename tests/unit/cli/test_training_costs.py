"""The estimate of a training: its images by hand, and which batches are timed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.utils.flop_counter import FlopCounterMode

from osfl.cli import training_costs
from osfl.cli.dry_run import _client_lines
from osfl.cli.training_costs import _time_steps, model_bytes, training_cost
from osfl.config import parse_run_config
from osfl.models.classifiers import build_classifier
from osfl.util.costs import Cost, time_growing_batches
from server_app.synthesis import engine
from tests.helpers.settings import quick


@pytest.mark.parametrize(
    ("settings", "images"),
    [
        # Two epochs of 20 images
        ({"global_model__epochs": 2}, 40),
        # Minibatches of 8, 8, 4, 8, 8
        ({"global_model__epochs": 2, "global_model__steps": 5}, 36),
        # A last minibatch of one image is left out: 19 of 20
        ({"global_model__epochs": 1, "global_model__batch_size": 19}, 19),
        # FT, MD and SD
        ({"method": "fedlmg", "global_model__epochs": 2, "fedlmg__strategies": "ft,md,sd"}, 120),
    ],
)
def test_the_images_of_all_steps_by_hand(
    settings: dict, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_costs, "time_growing_batches", lambda *_: Cost(3.0, 0.5))
    config = parse_run_config(quick(**{"global_model__batch_size": 8, **settings}))
    assert training_cost(config, 20) == Cost(3.0 * images, 0.5 * images)


def test_a_model_has_the_bytes_of_its_file() -> None:
    """One of FT and of SD; the file also names the tensors."""
    config = parse_run_config(quick(method="fedlmg", fedlmg__strategies="ft,sd"))
    file = save(build_classifier("shufflenet_v2_x1_0", 10, True).state_dict())
    assert 0.98 * 2 * len(file) < model_bytes(config) < 2 * len(file)


def test_one_image_is_too_few() -> None:
    assert training_cost(parse_run_config(quick()), 1) is None


@pytest.mark.parametrize(
    ("most", "timed"), [(64, [8, 16, 32, 64]), (20, [8, 16, 20]), (8, [8]), (5, [5])]
)
def test_the_cost_is_that_of_the_batch_in_which_a_run_works(most: int, timed: list[int]) -> None:
    """The fastest batch is smaller here: large tensors cost page faults."""
    tried: list[int] = []

    def time_batch(rows: int) -> Cost:
        tried.append(rows)
        return Cost(7.0, rows / 100)

    assert time_growing_batches(time_batch, 8, most, 60.0) == Cost(7.0, most / 100)
    assert tried == timed


def test_a_batch_that_does_not_fit_into_memory_is_not_needed() -> None:
    def time_batch(rows: int) -> Cost:
        if rows > 16:
            raise torch.OutOfMemoryError
        return Cost(7.0, rows / 100)

    assert time_growing_batches(time_batch, 8, 64, 60.0) == Cost(7.0, 0.16)
    with pytest.raises(torch.OutOfMemoryError):
        time_growing_batches(time_batch, 32, 64, 60.0)


def test_no_batch_is_timed_after_the_time() -> None:
    cost = time_growing_batches(lambda rows: Cost(7.0, 1 / rows), 8, 64, 0.0)
    assert cost == Cost(7.0, 1 / 8)


def test_short_passes_are_timed_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes 0.1 seconds, so that a pass of two rows is short, and one of four is not."""
    timed: list[tuple[int, int]] = []
    rows_of: dict[object, int] = {}

    def pass_of(rows: int) -> Callable[[], None]:
        act: Callable[[], None] = lambda: None  # noqa: E731
        rows_of[act] = rows
        return act

    def time_pass(act: object, device: torch.device, repeats: int) -> float:
        timed.append((rows_of[act], repeats))
        return 0.1 * rows_of[act] + (0.05 if repeats == 1 else 0.0)

    monkeypatch.setattr(engine, "median_seconds", time_pass)
    cost = engine.cost_per_row(pass_of, torch.device("cpu"), 12)
    assert timed == [(2, 1), (2, engine.REPEATS), (4, 1), (8, 1), (12, 1)]
    assert cost.seconds == pytest.approx((0.1 * 12 + 0.05) / 12)


@pytest.mark.flops
def test_a_step_is_three_forward_passes_but_for_the_first_layer() -> None:
    """The gradient of the input is not needed."""
    config = parse_run_config(quick(global_model__architecture="resnet18"))
    settings = config.global_model
    model = build_classifier(settings.architecture, 10, settings.small_stem)
    side = config.data.image_size
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, side, side))
    forward = counter.get_total_flops()
    cost = _time_steps(model, config, 4)
    assert 2.5 * forward < cost.flops < 3 * forward
    assert 0 < cost.seconds < 10


def test_the_first_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of four images end after 10, 11 and 13 seconds: the last two take 1.5 on average."""
    clock = iter([0.0, 10.0, 11.0, 13.0])

    def fit(*arguments: Any, progress: Callable[[int, int], None], **options: Any) -> None:
        for step in range(4):
            progress(step, 3)

    monkeypatch.setattr(training_costs, "fit", fit)
    monkeypatch.setattr(training_costs.time, "perf_counter", lambda: next(clock))
    cost = _time_steps(torch.nn.Identity(), parse_run_config(quick()), 4)
    assert cost.seconds == 1.5 / 4


@pytest.mark.parametrize(
    ("flops", "lines"),
    [
        ({"a": 1e9, "b": 3e9}, ["a client computes at most 3 GFLOP for its payload"]),
        # A captioner's are unknown, and clients of zero-shot compute nothing
        ({"a": 1e9, "b": None}, []),
        ({"a": 0.0}, []),
        ({}, []),
    ],
)
def test_the_client_that_computes_most_is_shown(
    flops: dict[str, float | None], lines: list[str]
) -> None:
    estimate: Any = SimpleNamespace(client_flops=flops)
    assert _client_lines(estimate) == lines
