"""Optimization steps of learned conditions: passes over their images, or a fixed number."""

from pathlib import Path

import pytest
import torch

from client_app.methods import espresso, fedbip, feddeo
from osfl.models.encoders import TextEncoder
from osfl.util.minibatches import minibatches
from tests.helpers.client_jobs import images, job_of


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_steps_take_the_place_of_epochs_and_begin_as_they_do() -> None:
    """150 steps of one: fifteen passes over ten images; the first 37 are of the same images."""
    rows = torch.arange(20, 30)
    epoch_batches = minibatches(rows, 15, 0, 1, generator())
    step_batches = minibatches(rows, 1, 150, 1, generator())
    assert len(epoch_batches) == 150
    assert torch.equal(torch.cat(epoch_batches), torch.cat(step_batches))
    assert torch.equal(
        torch.cat(minibatches(rows, 99, 37, 1, generator())), torch.cat(epoch_batches)[:37]
    )
    for size, steps in ((3, 1), (3, 4), (3, 5), (4, 9), (64, 7)):
        batches = minibatches(rows, 1, steps, size, generator())
        assert len(batches) == steps
        a_pass = -(-10 // size)
        for first in range(0, steps - a_pass + 1, a_pass):
            assert sorted(torch.cat(batches[first : first + a_pass]).tolist()) == rows.tolist()


@pytest.mark.parametrize(("method", "half"), [("feddeo", feddeo), ("espresso", espresso)])
def test_every_condition_has_its_steps(tiny_kit, monkeypatch, method: str, half) -> None:  # type: ignore[no-untyped-def]
    """Classes of four images and of one, and Espresso's clusters of them.

    Five steps each, side by side.
    """
    stepped: list[int] = []
    step = torch.optim.Adam.step

    def counted(self, *args, **named):  # type: ignore[no-untyped-def]
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        stepped.append(len(moved))
        return step(self, *args, **named)

    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    settings = {
        f"{method}__steps": 5,
        f"{method}__batch_size": 1,
        f"{method}__conditions_per_batch": 8,
    }
    job = job_of(tiny_kit, images(0, 0, 0, 0, 4), method=method, **settings)
    half.make_payload(job)
    conditions = 2 if method == "feddeo" else 3
    assert stepped == [conditions] * 5


def test_fedbips_words_have_their_steps(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    progress: list[tuple[int, int]] = []
    job = job_of(tiny_kit, images(0, 0, 4), method="fedbip", fedbip__steps=3, fedbip__batch_size=2)
    object.__setattr__(job, "progress", lambda done, total, *what: progress.append((done, total)))
    fedbip.make_payload(job)
    assert progress[-3:] == [(1, 3), (2, 3), (3, 3)]


def test_fedbips_words_begin_as_the_words_map_says(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    begin = fedbip.initial_concepts

    def starts(text: TextEncoder, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(names)
        return begin(text, names)

    monkeypatch.setattr(fedbip, "initial_concepts", starts)
    words = "zero=nothing, one=a single stroke"
    job = job_of(tiny_kit, images(0, 0, 4), method="fedbip", fedbip__steps=1, data__words=words)
    payload = fedbip.make_payload(job)
    assert asked == [["nothing", "four"]]
    assert payload.classes == ("zero", "four")
