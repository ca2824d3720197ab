"""benchmarks/privacy/accuracy_by_epsilon.py: accuracy along epsilon."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from benchmarks.federation import DOMAINS
from benchmarks.privacy import accuracy_by_epsilon
from benchmarks.privacy.accuracy_by_epsilon import MECHANISMS
from client_app.context import ClientJob
from client_app.methods import votes
from client_app.privacy import dp_sgd, mechanisms
from osfl.config import RunConfig
from osfl.data.digits import split_sources
from osfl.data.load import Images
from osfl.data.render import DOMAIN_SLICES
from osfl.methods import client_module
from osfl.payload.kinds import Payload
from osfl.util.prompts import DIGITS

QUICK: dict[str, Any] = {
    "synthesis.images-per-class": 1,
    "synthesis.steps": 2,
    "synthesis.solver": "ddim",
    "global-model.steps": 2,
    "global-model.batch-size": 4,
}
STEPS: dict[str, Any] = {
    "feddeo.steps": 4,
    "feddeo.epochs": 2,
    "domain-vector.steps": 4,
    "domain-vector.epochs": 2,
    "votes.draws": 1,
    # Some differences are cut, and some are not
    "clip-norm": 0.5,
}
EACH = [name for name, mechanism in MECHANISMS.items() if mechanism.each]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any training, in a folder of its own."""
    monkeypatch.setattr(accuracy_by_epsilon, "SHORT", QUICK)
    for name, mechanism in MECHANISMS.items():
        settings = {**mechanism.settings, **STEPS}
        if "classifier.steps" in settings:
            settings["classifier.steps"] = 2
        monkeypatch.setitem(MECHANISMS, name, replace(mechanism, settings=settings))


def numbers(payload: Payload) -> Iterator[torch.Tensor]:
    """All that is in it."""
    for value in vars(payload).values():
        if isinstance(value, torch.Tensor):
            yield value


@pytest.mark.parametrize("name", EACH)
def test_what_is_said_once_and_noised_is_what_the_clients_half_sends(
    quick: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every draw of the noise is one standard deviation, and the most votes win."""
    monkeypatch.setattr(
        mechanisms, "standard_normal", lambda shape, chance: torch.ones(shape).double()
    )
    monkeypatch.setattr(votes, "permute_and_flip", lambda counts, eps: counts.index(max(counts)))
    job = accuracy_by_epsilon.job_of(MECHANISMS[name], 3, 3, 16.0)
    ours = list(numbers(accuracy_by_epsilon.new_payload(MECHANISMS[name], job)))
    theirs = list(numbers(client_module(job.config.method).make_payload(job)))
    assert len(ours) == len(theirs) > 0
    for payload, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(payload, other, rtol=1e-4, atol=1e-5)
        assert payload.float().std() > 0


def test_a_payload_is_noised_once_for_each_epsilon_count_and_client(quick: None) -> None:
    oscar = MECHANISMS["OSCAR"]
    blob = accuracy_by_epsilon.payload(oscar, 0, 2, 0.5)
    assert accuracy_by_epsilon.payload(oscar, 0, 2, 0.5) == blob
    others = [(1, 2, 0.5), (0, 3, 0.5), (0, 2, 16.0)]
    made = [accuracy_by_epsilon.payload(oscar, *other) for other in others]
    assert len({blob, *made}) == 4
    assert accuracy_by_epsilon.job_of(oscar, 0, 2, 16.0).config.epsilon == 16


def test_what_images_say_is_kept_for_each_client_and_count(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def each(job: ClientJob, images: Images) -> torch.Tensor:
        asked.append((job.client, len(images)))
        return torch.full((1,), float(len(asked)))

    oscar = replace(MECHANISMS["OSCAR"], each=each)
    found = []
    for number, count in ((0, 1), (1, 1), (0, 2), (0, 1), (1, 1), (0, 2)):
        job = accuracy_by_epsilon.job_of(oscar, number, count, 1.0)
        found.append(accuracy_by_epsilon.contributions(oscar, job, job.load(32)).item())
    assert found == [1, 2, 3, 1, 2, 3]
    assert asked == [("client-0", 10), ("client-1", 10), ("client-0", 20)]


def test_other_settings_have_files_of_their_own(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {accuracy_by_epsilon.folder_of(mechanism) for mechanism in MECHANISMS.values()}
    monkeypatch.setattr(accuracy_by_epsilon, "SHORT", {**QUICK, "global-model.steps": 3})
    assert not folders & {
        accuracy_by_epsilon.folder_of(mechanism) for mechanism in MECHANISMS.values()
    }


@pytest.mark.parametrize("name", ["OSCAR", "FedDISC", "FedPFT", "local, the last layer alone"])
def test_a_mechanism_ends_in_the_domains_accuracies(
    quick: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a model's accuracy is ten times its domain's number."""
    models = []

    def accuracy(config: RunConfig, model: torch.nn.Module, number: int) -> float:
        models.append(model)
        return 10.0 * number

    # What takes half a minute
    monkeypatch.setattr(dp_sgd, "noise_multiplier", lambda *given: 1.0)
    monkeypatch.setattr(accuracy_by_epsilon, "accuracy_on_test", accuracy)
    assert accuracy_by_epsilon.accuracies_of(MECHANISMS[name], 2, 8.0) == [0, 10, 20, 30, 40, 50]
    of_clients = name.startswith("local")
    assert len(models) == (36 if of_clients else 6)
    assert len(set(map(id, models))) == (6 if of_clients else 1)


def test_the_same_payloads_are_not_drawn_again(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes of an epsilon that changes no winner are those without a guarantee."""
    monkeypatch.setattr(votes, "permute_and_flip", lambda counts, eps: counts.index(max(counts)))
    first = accuracy_by_epsilon.accuracies_of(MECHANISMS["votes"], 2, 0.0)
    monkeypatch.setattr(accuracy_by_epsilon, "server_module", None)
    assert accuracy_by_epsilon.accuracies_of(MECHANISMS["votes"], 2, 8.0) == first


def test_what_sends_nothing_is_measured_too(quick: None) -> None:
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
    """Of ten no two clients share one; of a hundred all have all sixty."""
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
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cell of 60 and 80 is 70.0."""
    asked = []

    def measured(
        mechanism: accuracy_by_epsilon.Mechanism, count: int, epsilon: float
    ) -> list[float]:
        asked.append((mechanism.settings["method"], count, epsilon))
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


def test_an_unknown_row_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["epsilons", "FedAvg"])
    with pytest.raises(SystemExit):
        accuracy_by_epsilon.EXPERIMENT.main(None, accuracy_by_epsilon.lines_of)
    assert "'FedAvg': must be some of prompts-only" in capsys.readouterr().err


def test_classes_are_loaded_as_the_kit_wants_them() -> None:
    job: ClientJob = accuracy_by_epsilon.job_of(MECHANISMS["votes"], 1, 2, 1.0)
    images: Images = job.load(16)
    assert images.pixels[torch.arange(20)].shape == (20, 3, 16, 16)
    assert job.classes == DIGITS
    assert images.labels.tolist() == [label for label in range(10) for _ in range(2)]
