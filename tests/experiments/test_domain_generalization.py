"""benchmarks/accuracy/domain_generalization.py: a held-out domain tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.accuracy import domain_generalization
from benchmarks.federation import DOMAINS, cell_name, config_of
from osfl.config import NodeConfig
from osfl.data.load import domain_name
from osfl.methods import METHODS
from osfl.settings import default_config
from tests.helpers.settings import quick

DEFAULTS = default_config()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prompts-only", "ceiling"])
def test_a_fold_is_taught_by_the_others_and_tested_by_its_own(
    method: str, home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    monkeypatch.setattr(domain_generalization, "CLIENTS", ("client-0", "client-1", "client-2"))
    changed = quick(kit=str(tiny_kit), method=method, num_clients=3)
    settings = {key: value for key, value in changed.items() if DEFAULTS[key] != value}
    settings |= {"seed": 0, "synthesis.images-per-class": 1}
    monkeypatch.setattr(
        domain_generalization, "accuracy_on_test", lambda *given: scored.append(given[2]) or 50.0
    )
    for number in (1, 0, 1):
        assert domain_generalization.accuracy_on(number, settings) == 50.0
        assert scored == [1, 0][: len(scored)]
        folder = harness.RUNS / "jobs" / cell_name(settings)
        clients = {f"client-{k}" for k in range(3) if k != number}
        if method == "prompts-only" and len(scored) == (1 if number else 2):
            rows = (folder / "manifest.jsonl").read_text().splitlines()
            assert {json.loads(row)["client"] for row in rows} == clients
        name = "FT" if method == "prompts-only" else "real"
        description = json.loads((folder / "models" / f"{name}.json").read_text())
        assert description["images"] == (20 if method == "prompts-only" else 60)
    assert scored == [1, 0]


def test_the_domains_are_those_of_the_clients_in_their_order() -> None:
    """Else a fold would be told the name of the domain that tests it."""
    config = config_of({**domain_generalization.COMMON, "method": "ceiling"})
    assert len(DOMAINS) == len(domain_generalization.CLIENTS)
    for number, name in enumerate(DOMAINS):
        node = NodeConfig(partition_id=number, num_partitions=len(domain_generalization.CLIENTS))
        assert domain_name(config.data, node, 0) == name


def test_the_tested_domain_is_not_among_the_others() -> None:
    settings = {"seed": 0, "public-domains": domain_generalization.OTHERS}
    named = domain_generalization.with_names(settings, 4)
    assert named == {"seed": 0, "public-domains": "clipart, infograph, neon, painting, sketch"}
    assert "photo" in str(domain_generalization.with_names(settings, None)["public-domains"])
    assert domain_generalization.with_names({"seed": 0}, 4) == {"seed": 0}


def test_the_difference_to_the_ceiling_is_paired_by_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 2, 3, 1, 2, 3 above the ceiling: mean 2, s = sqrt(4 / 5), t(5) = 2.5706."""
    of_ceiling = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    above = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]

    def accuracy_on(number: int, settings: Any) -> float:
        return of_ceiling[number] + (above[number] if settings["method"] != "ceiling" else 0)

    monkeypatch.setattr(domain_generalization, "accuracy_on", accuracy_on)
    ceiling, row = (domain_generalization.line(name, (0,)) for name in ("ceiling", "domain-vector"))
    assert (ceiling[""], ceiling["average"], ceiling["to the ceiling"]) == ("ceiling", "35.0", "")
    assert row["average"] == "37.0"
    assert [row[name] for name in DOMAINS][:2] == ["11.0", "22.0"]
    # 2.5706 * sqrt(0.8 / 6) = 0.9387
    assert row["to the ceiling"] == "+2.0 [+1.1, +2.9] *"


@pytest.mark.parametrize("row", domain_generalization.ROWS)
def test_rows_are_configurations(row: str) -> None:
    config = config_of(
        domain_generalization.with_names(domain_generalization.settings_of(row, 3), 2)
    )
    assert config.seed == 3
    assert METHODS[config.method].samples or config.method == "ceiling"
    public = len(config.public_domain_names)
    # As many optimization steps for all, but for a remainder of an epoch
    images = 500 if config.method == "ceiling" else (5 + public) * 10 * 30
    steps = -(-images // config.global_model.batch_size) * config.global_model.epochs
    assert 560 <= steps <= 630
