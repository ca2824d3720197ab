"""Noise schedules that cannot be sampled are refused, by the scheduler's settings alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from osfl.config import parse_run_config
from osfl.kit.kits import KitError
from osfl.models.diffusion import load_kit, load_noise_schedule
from server_app.app import check_server
from tests.helpers.settings import quick


@pytest.fixture
def scheduler(tiny_kit: Path, tmp_path: Path) -> Path:
    """The settings of a kit that has nothing else."""
    shutil.copytree(tiny_kit / "scheduler", tmp_path / "kit" / "scheduler")
    return tmp_path / "kit" / "scheduler" / "scheduler_config.json"


def change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    "settings",
    [
        {"rescale_betas_zero_snr": True},
        {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
        {"trained_betas": [*[0.01] * 999, 1.0]},
    ],
)
def test_a_schedule_that_ends_at_pure_noise_is_refused(scheduler: Path, settings: dict) -> None:
    """The flag or the betas say so, with any spacing. Clients train at all timesteps."""
    change(scheduler, **settings)
    with pytest.raises(KitError, match=r"kit = .*zero terminal SNR.*rescale_betas_zero_snr"):
        load_noise_schedule(str(scheduler.parent.parent))


@pytest.mark.parametrize(
    "settings",
    [{}, {"rescale_betas_zero_snr": False}, {"beta_schedule": "squaredcos_cap_v2"}],
)
def test_other_schedules_are_taken(scheduler: Path, settings: dict) -> None:
    change(scheduler, **settings)
    schedule = load_noise_schedule(str(scheduler.parent.parent))
    assert schedule.alphas_cumprod.shape == (1000,)
    assert torch.all(schedule.alphas_cumprod > 0)


def test_an_unreadable_schedule_is_named(scheduler: Path) -> None:
    scheduler.write_text("{")
    with pytest.raises(KitError, match=r"scheduler_config.json cannot be loaded"):
        load_noise_schedule(str(scheduler.parent.parent))


def test_it_is_refused_before_clients_work_and_where_a_kit_is_loaded(
    tiny_kit: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_kit, tmp_path / "kit")
    file = tmp_path / "kit" / "scheduler" / "scheduler_config.json"
    config = quick(method="prompts-only", kit=str(tmp_path / "kit"), global_model__init="none")
    check_server(parse_run_config(config))
    load_kit(tmp_path / "kit")
    change(file, rescale_betas_zero_snr=True)
    with pytest.raises(KitError, match="zero terminal SNR"):
        check_server(parse_run_config(config))
    with pytest.raises(KitError, match=r"^kit = .* has zero terminal SNR"):
        load_kit(tmp_path / "kit")
    # a method that draws nothing does without
    check_server(parse_run_config(config | {"method": "fedavg", "classifier.init": "none"}))
