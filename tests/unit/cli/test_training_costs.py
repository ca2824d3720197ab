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
    ("most", "tried", "best"),
    [
        # 32 are 5 % faster than 16, so that 64 are not tried
        (64, [8, 16, 32], 0.76),
        # 20 are slower than 16
        (20, [8, 16, 20], 0.8),
        (8, [8], 1.0),
        (5, [5], 2.0),
    ],
)
def test_batches_grow_while_that_saves_a_tenth(most: int, tried: list[int], best: float) -> None:
    seconds = {5: 2.0, 8: 1.0, 16: 0.8, 20: 0.9, 32: 0.76, 64: 0.1}
    timed: list[int] = []

    def time_batch(rows: int) -> Cost:
        timed.append(rows)
        return Cost(7.0, seconds[rows])

    assert time_growing_batches(time_batch, 8, most, 60.0) == Cost(7.0, best)
    assert timed == tried


def test_no_batch_is_timed_after_the_time() -> None:
    cost = time_growing_batches(lambda rows: Cost(7.0, 1 / rows), 8, 64, 0.0)
    assert cost == Cost(7.0, 1 / 8)


def test_passes_of_the_unet_grow_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds per row: 1.0, 0.8, and 0.76, which is too little."""
    seconds = {2: 2.0, 4: 3.2, 8: 6.08, 16: 1.0}
    timed: list[int] = []

    def time_pass(kit: object, rows: int, repeats: int) -> float:
        timed.append(rows)
        return seconds[rows]

    monkeypatch.setattr(engine, "unet_pass", lambda kit, rows: lambda: None)
    monkeypatch.setattr(engine, "_seconds", time_pass)
    cost = engine.unet_cost(None, 16)  # type: ignore[arg-type]
    assert timed == [2, 4, 8]
    assert cost.seconds == pytest.approx(0.76)


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
