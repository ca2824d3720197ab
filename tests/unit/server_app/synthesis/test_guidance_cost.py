"""Costs of guidance by a classifier, beside those of the UNet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from osfl.config import parse_run_config
from osfl.models.classifiers import build_classifier
from osfl.models.diffusion import load_kit
from server_app import costs
from server_app.synthesis.guidance import as_teacher, classifier_loss
from tests.helpers.settings import quick


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        # A gradient at every step
        ({"method": "fedlmg", "synthesis__steps": 5}, 5),
        # And at every edit of the initial noise
        ({"method": "fedcado", "synthesis__steps": 5, "fedcado__noise_edits": 3}, 8),
    ],
)
def test_every_gradient_goes_through_classifier_and_decoder(
    settings: dict[str, Any], passes: int, tiny_kit: Path
) -> None:
    """FLOPs of an image as torch counts them over a batch of three."""
    config = parse_run_config(quick(kit=str(tiny_kit), **settings))
    kit = load_kit(tiny_kit)
    small_stem = config.classifier.small_stem
    model = build_classifier(config.classifier.architecture, 10, small_stem)
    z = torch.randn(3, *kit.latent_shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        images = kit.decode(z)
        size = config.data.image_size
        loss = classifier_loss(as_teacher(model), images, torch.tensor([0, 1, 2]), 1.0, 1.0, size)
        torch.autograd.grad(loss.sum(), z)
    cost = costs.guidance_cost(config, kit, 4)
    assert cost.flops == pytest.approx(passes * counter.get_total_flops() / 3)
    assert cost.seconds > 0


def test_guidance_by_conditions_costs_nothing_more(tiny_kit: Path) -> None:
    config = parse_run_config(quick(method="oscar", kit=str(tiny_kit)))
    cost = costs.guidance_cost(config, load_kit(tiny_kit), 4)
    assert (cost.flops, cost.seconds) == (0, 0)
    assert replace(cost, flops=2.0).times(3).flops == 6
