"""benchmarks/epsilons.py: accuracy along epsilon."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from benchmarks import epsilons
from benchmarks.epsilons import MECHANISMS
from client_app import mechanisms
from client_app.job import ClientJob
from client_app.methods import votes
from osfl.data.digits import split_sources
from osfl.data.load import Images
from osfl.methods import client_half
from osfl.payloads import Payload
from osfl.prompts import DIGITS

QUICK: dict[str, Any] = {
    "synthesis.images-per-class": 1,
    "synthesis.steps": 2,
    "synthesis.solver": "ddim",
    "global-model.steps": 2,
    "global-model.batch-size": 4,
}
STEPS: dict[str, Any] = {
    "feddeo.steps": 4,
    "domain-vector.steps": 4,
    "votes.draws": 1,
    "classifier.epochs": 1,
}
EACH = tuple(name for name, mechanism in MECHANISMS.items() if mechanism.each)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any training, in a folder of its own."""
    monkeypatch.setattr(epsilons, "WORK", tmp_path)
    monkeypatch.setattr(epsilons, "TABLES", tmp_path)
    monkeypatch.setattr(epsilons, "SHORT", QUICK)
    short = {
        name: replace(mechanism, settings={**mechanism.settings, **STEPS})
        for name, mechanism in MECHANISMS.items()
    }
    monkeypatch.setattr(epsilons, "MECHANISMS", short)


def numbers(payload: Payload) -> Iterator[torch.Tensor]:
    """All that is in it."""
    for value in vars(payload).values():
        if isinstance(value, torch.Tensor):
            yield value


@pytest.mark.parametrize("name", EACH)
def test_what_is_said_once_and_noised_is_what_the_clients_half_sends(
    quick: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the noise is 0, and the most votes win."""
    monkeypatch.setattr(
        mechanisms, "standard_normal", lambda shape, chance: torch.zeros(shape).double()
    )
    monkeypatch.setattr(votes, "permute_and_flip", lambda counts, eps: counts.index(max(counts)))
    job = epsilons.job_of(name, 3, 3, 4.0)
    ours = list(numbers(epsilons.new_payload(name, job)))
    theirs = list(numbers(client_half(job.config.method).make_payload(job)))
    assert len(ours) == len(theirs) > 0
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
        assert own.float().std() > 0


@pytest.mark.parametrize("name", EACH)
def test_a_payload_is_noised_once_and_less_epsilon_is_more_noise(quick: None, name: str) -> None:
    """0.5 takes more than twenty times the noise of 20."""
    blob = epsilons.payload(name, 0, 2, 0.5)
    assert epsilons.payload(name, 0, 2, 0.5) == blob
    if MECHANISMS[name].counts:
        return
    (weak,) = numbers(epsilons.new_payload(name, epsilons.job_of(name, 0, 2, 0.5)))
    least = epsilons.job_of(name, 0, 2, 20.0)
    assert least.config.epsilon == 20
    (strong,) = numbers(epsilons.new_payload(name, least))
    assert weak.norm() > 3 * strong.norm()


@pytest.mark.parametrize("name", ["OSCAR", "FedPFT"])
def test_a_mechanism_ends_in_six_accuracies(quick: None, name: str) -> None:
    found = epsilons.measured(name, 2, 8.0)
    assert len(found) == 6
    assert all(0 <= accuracy <= 100 for accuracy in found)


def test_the_same_payloads_are_not_drawn_again(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes of an epsilon that changes no winner are those without a guarantee."""
    monkeypatch.setattr(votes, "permute_and_flip", lambda counts, eps: counts.index(max(counts)))
    first = epsilons.measured("votes", 2, 0.0)
    monkeypatch.setattr(epsilons, "server_half", None)
    assert epsilons.measured("votes", 2, 8.0) == first


def test_ten_images_are_a_part_of_thirty_and_each_client_has_scans_of_its_own() -> None:
    few = epsilons.drawings(0, 10)
    many = epsilons.drawings(0, 70)
    assert [label for _, label in few] == [label for label in range(10) for _ in range(10)]
    for label in range(10):
        for place in range(10):
            own = np.array(few[10 * label + place][0])
            assert (own == np.array(many[70 * label + place][0])).all()
        # From the sixty-first on the same scans, in another look
        again = np.array(many[70 * label + 60][0])
        assert (again != np.array(many[70 * label][0])).any()


def test_no_scan_of_the_test_is_drawn_and_no_two_clients_share_one_of_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[bytes] = []
    blank = np.zeros((32, 32, 3), dtype=np.uint8)

    def render(ink: np.ndarray, *rest: Any) -> np.ndarray:
        drawn.append(ink.tobytes())
        return blank

    monkeypatch.setattr(epsilons, "render", render)
    for number in range(6):
        epsilons.drawings(number, 10)
    scans = load_digits().images / 16
    private = {scans[row].tobytes() for row in split_sources()["private"]}
    assert len(drawn) == len(set(drawn)) == 600
    assert set(drawn) == private


def test_the_table_has_a_column_for_each_epsilon_and_keeps_other_rows(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cell of 60 and 80 is 70.0."""
    asked = []

    def measured(name: str, count: int, epsilon: float) -> list[float]:
        asked.append((name, count, epsilon))
        return [60.0 + epsilon, 80.0 + epsilon]

    monkeypatch.setattr(epsilons, "measured", measured)
    for name in ("OSCAR", "votes"):
        monkeypatch.setattr("sys.argv", ["epsilons", name])
        epsilons.main()
    rows = json.loads((tmp_path / "epsilons.json").read_text())["rows"]
    assert [row[""] for row in rows] == [
        *(f"votes: {count} images" for count in (10, 30, 100)),
        *(f"OSCAR: {count} images" for count in (10, 30, 100)),
    ]
    assert rows[0]["ε = 0.5"] == "70.5"
    assert rows[0]["ε = 16"] == "86.0"
    assert rows[0]["no guarantee"] == "70.0"
    assert len(asked) == 2 * 3 * 5
    assert (tmp_path / "epsilons.png").stat().st_size > 10_000


def test_an_unknown_row_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["epsilons", "FedAvg"])
    with pytest.raises(SystemExit):
        epsilons.main()
    assert "'FedAvg': must be some of votes" in capsys.readouterr().err


def test_classes_are_loaded_as_the_kit_wants_them() -> None:
    job: ClientJob = epsilons.job_of("votes", 1, 2, 1.0)
    images: Images = job.load(16)
    assert images.pixels[torch.arange(20)].shape == (20, 3, 16, 16)
    assert job.classes == DIGITS
    assert images.labels.tolist() == [label for label in range(10) for _ in range(2)]
