"""benchmarks/accuracy/mixed_federations.py: who sends what, and what is compared with what."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.accuracy import mixed_federations
from benchmarks.accuracy.mixed_federations import CHEAP_AND_ONE, MIXED, MIXED_CHEAP
from benchmarks.federation import CLIENTS, cell_name
from osfl.settings import default_config
from tests.helpers.settings import quick


@pytest.mark.parametrize("row", [MIXED, MIXED_CHEAP])
def test_every_client_sends_each_kind_once_and_every_run_has_equally_many(row: str) -> None:
    runs = mixed_federations.runs_of(row, 0)
    kinds = mixed_federations.PARTS[row]
    for client in range(len(CLIENTS)):
        assert sorted(run[client] for run in runs) == sorted(kinds)
    for run in runs:
        assert set(Counter(run).values()) == {len(CLIENTS) // len(kinds)}


def test_each_client_is_in_some_run_the_one_that_sends_a_description() -> None:
    clients = []
    for seed in range(5):
        for run in mixed_federations.runs_of(CHEAP_AND_ONE, seed):
            assert Counter(run)["FedDEO"] == 1
            assert set(run) == {"FedDEO", "votes", "prompts-domain"}
            clients.append(run.index("FedDEO"))
    assert set(clients) == set(range(len(CLIENTS)))


def test_a_mixed_row_is_compared_with_the_mean_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pure federations have 30, 60 and 75, mean 55; mixed ones by order 56, 57 and 61, mean 58.

    Seed 1 has four points more in the mixed runs alone: +3 and +7 make +5.
    """
    pure = {"FedLMG": 30.0, "OSCAR": 60.0, "FedDEO": 75.0}
    by_first_kind = {"FedLMG": 56.0, "OSCAR": 57.0, "FedDEO": 61.0}

    def accuracies(kinds: Sequence[str], seed: int) -> list[float]:
        mixed = by_first_kind.get(kinds[0], 0) + 4 * seed
        average = pure[kinds[0]] if len(set(kinds)) == 1 else mixed
        return [average - 10, average + 10] * 3

    monkeypatch.setattr(mixed_federations, "accuracies", accuracies)
    line = mixed_federations.line(MIXED, (0, 1))
    assert line["average"] == "60.0"
    assert line["to"] == "FedLMG and OSCAR and FedDEO"
    # At every place a client sends each kind once, so that each kind has the average
    assert {line[f"with {kind}"] for kind in pure} == {"60.0"}
    assert line["with votes"] == ""
    # Two values: t of one degree of freedom, 12.706, times a standard error of 2
    assert line["difference"] == "+5.0 [-20.4, +30.4]"
    assert mixed_federations.line("OSCAR", (0, 1)) == {
        "": "OSCAR",
        "average": "60.0",
        "standard error": "0.00",
        "to": "",
        "difference": "",
        "with FedLMG": "",
        "with OSCAR": "60.0",
        "with FedDEO": "",
        "with votes": "",
        "with prompts-domain": "",
    }


def test_a_kind_has_the_accuracy_of_its_own_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has 10 points of its place, and 0, 1 or 2 of its kind: on average 25 of places."""
    points = {"FedLMG": 0.0, "OSCAR": 1.0, "FedDEO": 2.0}

    def accuracies(kinds: Sequence[str], seed: int) -> list[float]:
        return [10 * place + points[kind] for place, kind in enumerate(kinds)]

    monkeypatch.setattr(mixed_federations, "accuracies", accuracies)
    for kind, value in points.items():
        values = mixed_federations.of_senders(MIXED, kind, (0, 1))
        assert len(values) == 2 * len(CLIENTS)
        assert sum(values) / len(values) == 25 + value


@pytest.mark.slow
def test_clients_of_a_mixed_run_have_the_images_of_the_pure_runs(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = default_config()
    changed = quick(kit=str(tiny_kit), num_clients=6)
    common = {key: value for key, value in changed.items() if defaults[key] != value}
    monkeypatch.setattr(mixed_federations, "COMMON", common)
    methods = {kind: {"method": kind.lower()} for kind in ("OSCAR", "votes")}
    monkeypatch.setattr(mixed_federations, "PURE", methods)
    monkeypatch.setattr(
        mixed_federations, "accuracy_on_test", lambda config, model, client: float(client)
    )
    kinds = ("OSCAR", "votes") * 3
    for run in (("OSCAR",) * 6, ("votes",) * 6, kinds):
        assert mixed_federations.accuracies(run, 0) == [0, 1, 2, 3, 4, 5]

    def images_of(method: str) -> dict[str, list[str]]:
        (folder,) = (harness.RUNS / "jobs").glob(f"{method}-*")
        digests: dict[str, list[str]] = {}
        for text in (folder / "manifest.jsonl").read_text().splitlines():
            row = json.loads(text)
            digests.setdefault(row["client"], []).append(row["sha256"])
        return digests

    pure = {kind: images_of(kind.lower()) for kind in methods}
    mixed = images_of("mixed")
    assert mixed == {
        client: pure[kind][client] for client, kind in zip(CLIENTS, kinds, strict=True)
    }


def test_runs_whose_kinds_lie_otherwise_are_other_cells() -> None:
    """The settings alone are the same."""
    names = set()
    for row in (MIXED, MIXED_CHEAP):
        for kinds in mixed_federations.runs_of(row, 0):
            settings = mixed_federations.mixed_settings_of(kinds, 0)
            names.add(cell_name({**settings, "kinds": ",".join(kinds)}))
    assert len(names) == 5
