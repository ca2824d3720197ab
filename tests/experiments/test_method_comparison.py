"""benchmarks/accuracy/method_comparison.py and benchmarks/recipe.py: rows, and their figures."""

import json
import math
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import federation, harness, recipe
from benchmarks.accuracy import method_comparison
from benchmarks.federation import DOMAINS, cell_name, client_settings, config_of
from benchmarks.recipe import SYSTEMS
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.kinds import Domain, DomainVector
from osfl.settings import default_config
from osfl.util.prompts import DIGITS
from tests.helpers.settings import ROOT

DEFAULTS = default_config()
OWN = {
    "seed",
    "method",
    "global-model.steps",
    "global-model.precision",
    "synthesis.images-per-class",
    "public-domains",
    "synthesis.steps",
    "synthesis.solver",
    "synthesis.guided-from",
    "synthesis.guided-to",
    "synthesis.cache-interval",
    "synthesis.lora",
    "fedcado.strategies",
    "fedlmg.strategies",
    "payload-codec",
    "epsilon",
    "clip-norm",
    "label-filter",
}


@pytest.mark.parametrize("row", recipe.ROWS)
def test_all_rows_train_for_about_as_many_steps(row: str) -> None:
    """Eleven epochs of 1,800 images in batches of 32; with public domains five of 3,600. Rows of
    300 images, and the ceiling beside them, have four times as many as the first.
    """
    config = config_of(recipe.settings_of(row, 0))
    steps = 11 * 57
    if row.startswith("domain-vector, 300 images") or row == "ceiling, as long":
        steps *= 4
    elif config.public_domains:
        steps = math.ceil(3600 / 32) * 5
    assert config.global_model.batch_size == 32
    assert config.global_model.steps == steps


@pytest.mark.parametrize("row", recipe.ROWS)
def test_a_row_changes_its_method_and_nothing_of_the_recipe(row: str) -> None:
    settings = recipe.settings_of(row, 3)
    method = METHODS[str(settings["method"])]
    section = method.server.replace("_", "-")
    changed = {key for key, value in settings.items() if recipe.COMMON.get(key) != value}
    extras = {key for key in changed - OWN if not key.startswith(f"{section}.")}
    assert not extras
    assert settings["seed"] == 3


def test_conditions_are_learned_in_as_many_steps() -> None:
    step_counts = [
        value
        for settings in recipe.ROWS.values()
        for key, value in settings.items()
        if key.endswith(".steps") and not key.startswith(("synthesis.", "global-model."))
    ]
    assert len(step_counts) == 23
    assert set(step_counts) == {600}


def payloads_of(row: str) -> str:
    settings = recipe.settings_of(row, 0)
    return cell_name(client_settings(settings))


def test_rows_share_payloads_where_only_the_server_differs() -> None:
    vector = payloads_of("domain-vector")
    assert payloads_of("domain-vector, 10 sampling steps") == vector
    assert payloads_of("domain-vector, public domains") == vector
    assert payloads_of("FedDEO") == payloads_of("FedDEO description alone")
    assert payloads_of("FedCADO") != payloads_of("FedLMG")


def test_espressos_clients_read_the_sampling_steps() -> None:
    """Latents are noised to the first timestep, which depends on how many there are."""
    few = {"seed": 0, "synthesis.steps": 5}
    assert client_settings({"method": "espresso", **few}) == {"method": "espresso", **few}
    assert client_settings({"method": "feddeo", **few}) == {"method": "feddeo", "seed": 0}


@pytest.mark.slow
def test_payloads_are_made_once_as_clients_send_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe.settings_of("prompts-domain", 0)
    payloads = federation.payloads_of(settings)
    assert payloads == {f"client-{k}": Domain(DIGITS, name) for k, name in enumerate(DOMAINS)}
    # One that is there is taken as it is, and not made again
    (folder,) = (harness.RUNS / "payloads").glob("payloads-*")
    blob = wire.encode(Domain(DIGITS, "oil"), "prompts-domain", folder.name, "client-2")
    (folder / "client-2" / "payload.pb").write_bytes(blob)
    assert federation.payloads_of(settings)["client-2"] == Domain(DIGITS, "oil")


def test_coded_rows_have_the_payloads_of_the_others_and_lose_what_the_codec_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector of tenths, and one 7: the steps of its block are ones."""
    row = "domain-vector, int4"
    assert payloads_of(row) == payloads_of("domain-vector")
    settings = recipe.settings_of("domain-vector", 0)
    domain = torch.full((16, 64), 0.1)
    domain[0, 0] = 7.0
    folder = harness.RUNS / "payloads" / f"payloads-{payloads_of(row)}"
    for client in federation.CLIENTS:
        file = folder / client / "payload.pb"
        file.parent.mkdir(parents=True)
        payload = DomainVector(DIGITS, domain)
        file.write_bytes(wire.encode(payload, "domain-vector", folder.name, client))
    for client, client_payload in federation.payloads_of(settings).items():
        assert torch.equal(client_payload.domain, domain), client  # type: ignore[union-attr]
    for client, client_payload in federation.payloads_of(recipe.settings_of(row, 0)).items():
        rows = client_payload.domain  # type: ignore[union-attr]
        assert rows[0].tolist() == [7.0] + [0.0] * 63, client
        assert torch.allclose(rows[1:], domain[1:], rtol=1e-3)


def test_a_method_without_clients_has_no_payloads() -> None:
    assert federation.payloads_of(recipe.settings_of("ceiling", 0)) == {}


def keep(row: str, seed: int, accuracies: list[float], partition: str = "domain") -> None:
    settings = recipe.settings_of(row, seed, partition)
    file = harness.RUNS / "method-comparison" / f"{cell_name(settings)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"accuracy": accuracies, "machine": f"machine of {row}"}))


def test_the_figures_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds. The row's averages are 50 and 54: mean 52, deviation 2.83, standard error 2. The
    ceiling's are 60 and 62. The differences -10 and -8 have mean -9, standard error 1, and an
    interval of 12.7 (Student's t of one degree of freedom) to each side.
    """
    for seed, (row, ceiling) in enumerate([(50.0, 60.0), (54.0, 62.0)]):
        keep("FedDEO", seed, [row - 5, row + 5, row, row, row, row])
        keep("ceiling", seed, [ceiling] * 6)
        keep("prompts-domain", seed, [row - 20.0] * 6)
        keep("domain-vector", seed, [row] * 6)
        keep("ceiling, as long", seed, [ceiling + 1] * 6)
    line = method_comparison.line("FedDEO", (0, 1), "domain")
    assert line == {
        "": "FedDEO",
        "clipart": "47.0",
        "infograph": "57.0",
        "neon": "52.0",
        "painting": "52.0",
        "photo": "52.0",
        "sketch": "52.0",
        "average": "52.0",
        "standard error": "2.00",
        "to ceiling": "-9.0 [-21.7, +3.7]",
        "to prompts-domain": "+20.0 [+20.0, +20.0] *",
        "to domain-vector": "+0.0 [+0.0, +0.0]",
        "to ceiling, as long": "-10.0 [-22.7, +2.7]",
        "made on": "machine of FedDEO",
    }
    assert method_comparison.line("ceiling", (0, 1), "domain")["to ceiling"] == ""


def test_rows_that_share_payloads_do_not_make_them_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Payloads come first, once for rows that share them."""
    asked: list[tuple[Any, ...]] = []

    def in_parallel(act: object, arguments: list[tuple[Any, ...]], jobs: int) -> None:
        assert jobs == 2
        if act is method_comparison.cell:
            asked.extend(arguments)
            return
        assert act is method_comparison.make_payloads
        for (settings,) in arguments:
            assert settings["data.partition"] == "label"
            asked.append((settings["method"], settings["seed"]))

    monkeypatch.setattr(method_comparison, "in_parallel", in_parallel)
    rows = ["FedDEO", "FedDEO description alone", "OSCAR"]
    method_comparison.cells(rows, [0, 1], "label", 2)
    assert asked == [
        *(("feddeo", 0), ("feddeo", 1), ("oscar", 0), ("oscar", 1)),
        *((row, seed, "label") for row in rows for seed in (0, 1)),
    ]


def test_an_unknown_row_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["main_table", "FedSomething"])
    with pytest.raises(SystemExit):
        method_comparison.main()
    assert "'FedSomething': must be some of" in capsys.readouterr().err


def test_systems_have_the_guidance_of_the_digits_table() -> None:
    digits = tomllib.loads((ROOT / "configs/tables/digits.toml").read_text())
    for row, settings in SYSTEMS.items():
        values = nested({**DEFAULTS, **settings})[str(settings["method"]).replace("-pooled", "")]
        section = str(settings["method"]).replace("oscar-pooled", "oscar")
        named = {**nested(DEFAULTS)[section], **digits["rows"][row].get(section, {})}
        scales = [key for key in values if "guidance" in key and key != "inversion-guidance"]
        assert {key: values[key] for key in scales} == {key: named[key] for key in scales}, row


def test_a_row_is_the_recommended_run() -> None:
    """Every setting of configs/recommended.toml is the row's."""
    recommended = tomllib.loads((ROOT / "configs/recommended.toml").read_text())
    settings = recipe.settings_of("domain-vector", 0)
    ours = nested({**DEFAULTS, **settings})
    assert recommended["method"] == settings["method"]
    assert recommended["num-clients"] == settings["num-clients"]
    # "auto" for the digits
    training = {**recommended["global-model"], "augmentation": "affine-color"}
    assert ours["global-model"] | training == ours["global-model"]
    assert ours["synthesis"] | recommended["synthesis"] == ours["synthesis"]
    section = recommended["domain-vector"]
    # All clients hold all classes here
    assert {**section, "classes": "held"} == {key: ours["domain-vector"][key] for key in section}


def nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by section."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    return sections


@pytest.mark.slow
def test_the_server_draws_trains_and_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling, hardly trained; a second look reads what the first has kept."""
    quick = {"method": "ceiling", "global-model.steps": 2, "global-model.batch-size": 300}
    monkeypatch.setitem(recipe.ROWS, "ceiling", quick)
    accuracies = method_comparison.cell("ceiling", 0, "domain")["accuracy"]
    assert len(accuracies) == 6
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    (file,) = (harness.RUNS / "method-comparison").glob("ceiling-*.json")
    record = json.loads(file.read_text())
    assert record["accuracy"] == accuracies
    assert (record["row"], record["seed"]) == ("ceiling", 0)
    assert f"torch {version('torch')}" in record["machine"]
    # Made once
    file.write_text(json.dumps({"accuracy": [1.0] * 6}))
    assert method_comparison.cell("ceiling", 0, "domain") == {"accuracy": [1.0] * 6}


@pytest.mark.parametrize("partition", recipe.PARTITIONS)
def test_every_row_of_every_partition_can_be_run(partition: str) -> None:
    """With the clients' images cut as the partition says."""
    for row in recipe.rows_of(partition):
        settings = recipe.settings_of(row, 0, partition)
        config = config_of(settings)
        assert config.data.partition == partition
        assert config.domain_vector.classes == ("all" if row.endswith("all classes") else "held")


def test_partitions_have_cells_of_their_own() -> None:
    settings = [recipe.settings_of("ceiling", 0, partition) for partition in recipe.PARTITIONS]
    assert len({cell_name(cell_settings) for cell_settings in settings}) == 3


def test_a_skewed_table_names_clients_and_has_no_row_with_domain_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "prompts-domain" not in recipe.rows_of("label")
    assert method_comparison.references_of("label") == ("ceiling", "domain-vector, all classes")
    for row, figure in (("ceiling", 70.0), ("domain-vector, all classes", 60.0), ("OSCAR", 50.0)):
        for seed in (0, 1):
            keep(row, seed, [figure + seed] * 6, "label")
    line = method_comparison.line("OSCAR", (0, 1), "label")
    assert line["client-5"] == "50.5"
    assert line["to domain-vector, all classes"] == "-10.0 [-10.0, -10.0] *"
    assert "to prompts-domain" not in line
