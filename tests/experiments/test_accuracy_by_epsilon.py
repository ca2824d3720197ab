"""benchmarks/privacy/accuracy_by_epsilon.py: accuracy along epsilon."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from benchmarks.federation import DOMAINS
from benchmarks.privacy import accuracy_by_epsilon
from benchmarks.privacy.accuracy_by_epsilon import MECHANISMS
from client_app.methods import votes
from client_app.privacy import dp_sgd
from osfl.config import RunConfig
from osfl.data.digits import split_sources
from osfl.data.render import DOMAIN_SLICES

QUICK: dict[str, Any] = {
    "synthesis.images-per-class": 1,
    "synthesis.steps": 2,
    "synthesis.solver": "ddim",
    "global-model.steps": 2,
    "global-model.batch-size": 4,
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train hardly at all."""
    monkeypatch.setattr(accuracy_by_epsilon, "SHORT", QUICK)
    for name, settings in MECHANISMS.items():
        fewer = {"classifier.steps": 2} if "classifier.steps" in settings else {}
        monkeypatch.setitem(MECHANISMS, name, {**settings, "votes.draws": 1, **fewer})


@pytest.mark.slow
def test_a_payload_is_made_once_for_each_epsilon_count_and_client(quick: None) -> None:
    oscar = MECHANISMS["OSCAR"]
    blob = accuracy_by_epsilon.payload(oscar, 0, 2, 0.5)
    assert accuracy_by_epsilon.payload(oscar, 0, 2, 0.5) == blob
    cells = [(1, 2, 0.5), (0, 3, 0.5), (0, 2, 16.0)]
    payloads = [accuracy_by_epsilon.payload(oscar, *cell) for cell in cells]
    assert len({blob, *payloads}) == 4
    assert accuracy_by_epsilon.job_of(oscar, 0, 2, 16.0).config.epsilon == 16


def test_other_settings_have_another_folder(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders() -> set[str]:
        configs = [
            accuracy_by_epsilon.config_of(mechanism, 1.0) for mechanism in MECHANISMS.values()
        ]
        return {config.runs_dir for config in configs}

    before = folders()
    assert len(before) == len(MECHANISMS)
    monkeypatch.setattr(accuracy_by_epsilon, "SHORT", {**QUICK, "global-model.steps": 3})
    assert not before & folders()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OSCAR", "local, the last layer alone"])
def test_accuracies_are_of_each_domain(
    quick: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a model's accuracy is ten times its domain's number."""
    models = []

    def accuracy(config: RunConfig, model: torch.nn.Module, number: int) -> float:
        models.append(model)
        return 10.0 * number

    # Calibration takes half a minute
    monkeypatch.setattr(dp_sgd, "noise_multiplier", lambda *_: 1.0)
    monkeypatch.setattr(accuracy_by_epsilon, "accuracy_on_test", accuracy)
    assert accuracy_by_epsilon.accuracies_of(MECHANISMS[name], 2, 8.0) == [0, 10, 20, 30, 40, 50]
    local = name.startswith("local")
    assert len(models) == (36 if local else 6)
    assert len(set(map(id, models))) == (6 if local else 1)


@pytest.mark.slow
def test_the_same_payloads_are_not_drawn_again(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes of an epsilon that changes no winner are those without a guarantee."""
    monkeypatch.setattr(votes, "permute_and_flip", lambda counts, eps: counts.index(max(counts)))
    first = accuracy_by_epsilon.accuracies_of(MECHANISMS["votes"], 2, 0.0)
    monkeypatch.setattr(accuracy_by_epsilon, "server_module", None)
    assert accuracy_by_epsilon.accuracies_of(MECHANISMS["votes"], 2, 8.0) == first


@pytest.mark.slow
def test_prompts_only_has_one_row(quick: None) -> None:
    (row,) = accuracy_by_epsilon.lines_of(accuracy_by_epsilon.NOTHING)
    assert row[""] == "prompts-only, which sends nothing"
    assert 0 <= float(row["no guarantee"]) <= 100
    assert len(row) == 2


def test_ten_images_are_a_part_of_thirty() -> None:
    few = accuracy_by_epsilon.drawings(0, 10)
    many = accuracy_by_epsilon.drawings(0, 70)
    assert [label for _, label in few] == [label for label in range(10) for _ in range(10)]
    for label in range(10):
        for place in range(10):
            picture = np.array(few[10 * label + place][0])
            assert (picture == np.array(many[70 * label + place][0])).all()
        # From the sixty-first on the same scans, in another look
        again = np.array(many[70 * label + 60][0])
        assert (again != np.array(many[70 * label][0])).any()


@pytest.mark.parametrize(("count", "different"), [(10, 600), (100, 600)])
def test_training_scans_are_drawn_in_the_clients_domain(
    count: int, different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten images no two clients share a scan; with a hundred all have all sixty."""
    drawn: list[list[bytes]] = [[] for _ in DOMAINS]
    blank = np.zeros((32, 32, 3), dtype=np.uint8)
    scans = load_digits()
    label_of = {
        (scans.images[row] / 16).tobytes(): scans.target[row] for row in split_sources()["private"]
    }

    def render(ink: np.ndarray, style: str, ranges: Any, rng: np.random.Generator) -> np.ndarray:
        assert ranges is DOMAIN_SLICES[style]
        drawn[DOMAINS.index(style)].append(ink.tobytes())
        return blank

    monkeypatch.setattr(accuracy_by_epsilon, "render", render)
    for number in range(6):
        labels = [label for _, label in accuracy_by_epsilon.drawings(number, count)]
        assert [label_of[ink] for ink in drawn[number]] == labels
    every = [set(scans_of) for scans_of in drawn]
    assert len(set.union(*every)) == different
    assert {len(scans_of) for scans_of in every} == {min(10 * count, 600)}


def test_the_table_has_a_column_for_each_epsilon_and_keeps_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cell of 60 and 80 is 70.0."""
    asked = []

    def measured(
        mechanism: accuracy_by_epsilon.Settings, count: int, epsilon: float
    ) -> list[float]:
        asked.append((mechanism["method"], count, epsilon))
        return [60.0 + epsilon, 80.0 + epsilon]

    monkeypatch.setattr(accuracy_by_epsilon, "accuracies_of", measured)
    monkeypatch.setattr(accuracy_by_epsilon, "trained", lambda mechanism, blobs: [30.0, 50.0])
    for name in ("OSCAR", "votes", accuracy_by_epsilon.NOTHING):
        monkeypatch.setattr("sys.argv", ["epsilons", name])
        accuracy_by_epsilon.EXPERIMENT.main(None, accuracy_by_epsilon.lines_of)
    file = accuracy_by_epsilon.EXPERIMENT.table_file().with_suffix(".json")
    rows = json.loads(file.read_text())["rows"]
    accuracy_by_epsilon.plot(rows)
    assert rows[0] == {"": "prompts-only, which sends nothing", "no guarantee": "40.0"}
    assert [row[""] for row in rows[1:]] == [
        *(f"votes: {count} images" for count in (10, 30, 100)),
        *(f"OSCAR: {count} images" for count in (10, 30, 100)),
    ]
    assert rows[1]["ε = 0.5"] == "70.5"
    assert rows[1]["ε = 16"] == "86.0"
    assert rows[1]["no guarantee"] == "70.0"
    assert len(asked) == 2 * 3 * 5
    assert file.with_suffix(".png").stat().st_size > 10_000
