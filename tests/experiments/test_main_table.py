"""benchmarks/main_table.py: what its rows have in common, and what it makes of their figures."""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import clients, main_table
from benchmarks.clients import DOMAINS, folder_name, for_clients
from benchmarks.left_out import SYSTEMS
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
    "label-check",
}


@pytest.mark.parametrize("row", main_table.ROWS)
def test_all_rows_train_for_about_as_many_steps(row: str) -> None:
    """Eleven epochs of 1,800 images in batches of 32; with public domains five of 3,600. Rows of
    300 images, and the ceiling beside them, have four times as many as the first.
    """
    config = main_table.config_of(main_table.settings_of(row, 0))
    steps = 11 * 57
    if row.startswith("domain-vector, 300 images") or row == "ceiling, as long":
        steps *= 4
    elif config.public_domains:
        steps = math.ceil(3600 / 32) * 5
    assert config.global_model.batch_size == 32
    assert config.global_model.steps == steps


@pytest.mark.parametrize("row", main_table.ROWS)
def test_a_row_changes_its_method_and_nothing_of_the_recipe(row: str) -> None:
    settings = main_table.settings_of(row, 3)
    method = METHODS[str(settings["method"])]
    section = method.server.replace("_", "-")
    changed = {key for key, value in settings.items() if main_table.COMMON.get(key) != value}
    others = {key for key in changed - OWN if not key.startswith(f"{section}.")}
    assert not others
    assert settings["seed"] == 3


def test_conditions_are_learned_in_as_many_steps() -> None:
    found = [
        value
        for settings in main_table.ROWS.values()
        for key, value in settings.items()
        if key.endswith(".steps") and not key.startswith(("synthesis.", "global-model."))
    ]
    assert len(found) == 23
    assert set(found) == {600}


def payloads_of(row: str) -> str:
    settings = main_table.settings_of(row, 0)
    return folder_name(for_clients(settings))


def test_rows_share_payloads_where_only_the_server_differs() -> None:
    vector = payloads_of("domain-vector")
    assert payloads_of("domain-vector, 10 sampling steps") == vector
    assert payloads_of("domain-vector, public domains") == vector
    assert payloads_of("FedDEO") == payloads_of("FedDEO description alone")
    assert payloads_of("FedCADO") != payloads_of("FedLMG")


def test_espressos_clients_read_the_sampling_steps() -> None:
    """Their latents are noised to the first timestep, which depends on how many there are."""
    few = {"seed": 0, "synthesis.steps": 5}
    assert for_clients({"method": "espresso", **few}) == {"method": "espresso", **few}
    assert for_clients({"method": "feddeo", **few}) == {"method": "feddeo", "seed": 0}


def test_payloads_are_made_once_as_clients_send_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PAYLOADS", tmp_path)
    settings = main_table.settings_of("prompts-domain", 0)
    made = clients.sent(settings)
    assert made == {f"client-{k}": Domain(DIGITS, name) for k, name in enumerate(DOMAINS)}
    # One that is there is taken as it is, and not made again
    (folder,) = tmp_path.glob("payloads-*")
    other = wire.encode(Domain(DIGITS, "oil"), "prompts-domain", folder.name, "client-2")
    (folder / "client-2" / "payload.pb").write_bytes(other)
    assert clients.sent(settings)["client-2"] == Domain(DIGITS, "oil")


def test_coded_rows_have_the_payloads_of_the_others_and_lose_what_the_codec_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector of tenths, and one 7: the steps of its block are ones."""
    monkeypatch.setattr(clients, "PAYLOADS", tmp_path)
    row = "domain-vector, int4"
    assert payloads_of(row) == payloads_of("domain-vector")
    settings = main_table.settings_of("domain-vector", 0)
    domain = torch.full((16, 64), 0.1)
    domain[0, 0] = 7.0
    folder = tmp_path / f"payloads-{payloads_of(row)}"
    for client in main_table.CLIENTS:
        file = folder / client / "payload.pb"
        file.parent.mkdir(parents=True)
        payload = DomainVector(DIGITS, domain)
        file.write_bytes(wire.encode(payload, "domain-vector", folder.name, client))
    for client, found in clients.sent(settings).items():
        assert torch.equal(found.domain, domain), client  # type: ignore[union-attr]
    for client, found in clients.sent(main_table.settings_of(row, 0)).items():
        made = found.domain  # type: ignore[union-attr]
        assert made[0].tolist() == [7.0] + [0.0] * 63, client
        assert torch.allclose(made[1:], domain[1:], rtol=1e-3)


def test_what_sends_nothing_has_no_payloads() -> None:
    assert clients.sent(main_table.settings_of("ceiling", 0)) == {}


def keep(row: str, seed: int, accuracies: list[float], partition: str = "domain") -> None:
    settings = main_table.settings_of(row, seed, partition)
    file = main_table.WORK / f"{folder_name(settings)}.json"
    file.write_text(json.dumps({"accuracy": accuracies, "machine": f"machine of {row}"}))


def test_the_figures_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds. The row's averages are 50 and 54: mean 52, deviation 2.83, standard error 2. The
    ceiling's are 60 and 62. The differences -10 and -8 have mean -9, standard error 1, and an
    interval of 12.7 (Student's t of one degree of freedom) to each side.
    """
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    for seed, (row, ceiling) in enumerate([(50.0, 60.0), (54.0, 62.0)]):
        keep("FedDEO", seed, [row - 5, row + 5, row, row, row, row])
        keep("ceiling", seed, [ceiling] * 6)
        keep("prompts-domain", seed, [row - 20.0] * 6)
        keep("domain-vector", seed, [row] * 6)
        keep("ceiling, as long", seed, [ceiling + 1] * 6)
    found = main_table.line("FedDEO", (0, 1), "domain")
    assert found == {
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
    assert main_table.line("ceiling", (0, 1), "domain")["to ceiling"] == ""


class Pool:
    """Does at once what it is given, and keeps what that was."""

    asked: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, at_once: int, context: object, first: object, given: tuple[int]):
        assert at_once == 2
        # Of sixteen cores
        assert (first, given) == (torch.set_num_threads, (8,))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, act: Callable[..., object], *given: Any) -> Future[None]:
        made: Future[None] = Future()
        if act is main_table.cell:
            self.asked.append(("cell", *given))
        else:
            assert given[0]["data.partition"] == "label"
            self.asked.append(("payloads", given[0]["method"], given[0]["seed"]))
        if act is main_table.cell and given[1] == 0:
            made.set_exception(RuntimeError("out of memory"))
        else:
            made.set_result(None)
        return made


def test_cells_are_made_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads come first, and once for rows that share them. All cells are made before the error
    of one ends the command.
    """
    monkeypatch.setattr(main_table, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr(Pool, "asked", [])
    rows = ["FedDEO", "FedDEO description alone", "OSCAR"]
    with pytest.raises(RuntimeError, match="out of memory"):
        main_table.cells(rows, [0, 1], "label", 2)
    assert Pool.asked == [
        ("payloads", "feddeo", 0),
        ("payloads", "feddeo", 1),
        ("payloads", "oscar", 0),
        ("payloads", "oscar", 1),
        ("cell", "FedDEO", 0, "label"),
        ("cell", "FedDEO", 1, "label"),
        ("cell", "FedDEO description alone", 0, "label"),
        ("cell", "FedDEO description alone", 1, "label"),
        ("cell", "OSCAR", 0, "label"),
        ("cell", "OSCAR", 1, "label"),
    ]


def test_all_are_waited_for_before_an_error_is_told() -> None:
    first: Future[None] = Future()
    last: Future[None] = Future()
    first.set_exception(RuntimeError("out of memory"))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(main_table.all_made, [first, last])
        with pytest.raises(TimeoutError):
            waiting.exception(timeout=0.2)
        last.set_result(None)
        assert isinstance(waiting.exception(timeout=30), RuntimeError)


def test_the_table_has_its_own_cells_and_keeps_its_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    monkeypatch.setattr(main_table, "TABLES", tmp_path / "tables")
    (tmp_path / "tables").mkdir()
    for seed in (0, 1):
        for row in (*main_table.REFERENCES, "FedDEO", "OSCAR"):
            keep(row, seed, [50.0 + seed] * 6)
    (tmp_path / "balance.json").write_text("[1, 2]")
    for row in ("OSCAR", "FedDEO"):
        monkeypatch.setattr("sys.argv", ["main_table", row, "--seeds", "0,1"])
        main_table.main()
    table = json.loads((tmp_path / "tables" / "main-seeds-0-1.json").read_text())
    # In the order of ROWS
    assert [row[""] for row in table["rows"]] == ["FedDEO", "OSCAR"]
    assert [row["made on"] for row in table["rows"]] == ["machine of FedDEO", "machine of OSCAR"]
    assert "--seeds 0,1`. Written on" in table["about"]


def test_other_seeds_and_partitions_have_tables_of_their_own() -> None:
    assert main_table.name_of("domain", main_table.SEEDS) == "main"
    assert main_table.name_of("domain", (0, 3)) == "main-seeds-0-3"
    assert main_table.name_of("label", main_table.SEEDS) == "main-label"
    assert main_table.name_of("label", (0,)) == "main-label-seeds-0"


def test_an_unknown_row_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["main_table", "FedSomething"])
    with pytest.raises(SystemExit):
        main_table.main()
    assert "'FedSomething': must be some of" in capsys.readouterr().err


def test_systems_have_the_guidance_of_the_digits_table() -> None:
    digits = tomllib.loads((ROOT / "configs/tables/digits.toml").read_text())
    for row, settings in SYSTEMS.items():
        own = nested({**DEFAULTS, **settings})[str(settings["method"]).replace("-pooled", "")]
        section = str(settings["method"]).replace("oscar-pooled", "oscar")
        named = {**nested(DEFAULTS)[section], **digits["rows"][row].get(section, {})}
        scales = [key for key in own if "guidance" in key and key != "inversion-guidance"]
        assert {key: own[key] for key in scales} == {key: named[key] for key in scales}, row


def test_a_row_is_the_recommended_run() -> None:
    """Every setting of configs/recommended.toml is the row's."""
    recommended = tomllib.loads((ROOT / "configs/recommended.toml").read_text())
    given = main_table.settings_of("domain-vector", 0)
    ours = nested({**DEFAULTS, **given})
    assert recommended["method"] == given["method"]
    assert recommended["num-clients"] == given["num-clients"]
    # "auto" for the digits
    recipe = {**recommended["global-model"], "augmentation": "affine-color"}
    assert ours["global-model"] | recipe == ours["global-model"]
    assert ours["synthesis"] | recommended["synthesis"] == ours["synthesis"]
    own = recommended["domain-vector"]
    # All clients hold all classes here
    assert {**own, "classes": "held"} == {key: ours["domain-vector"][key] for key in own}


def nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By section."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        found.setdefault(section, {})[name] = value
    return found


def test_the_server_draws_trains_and_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling, hardly trained; a second look reads what the first has kept."""
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    quick = {"method": "ceiling", "global-model.steps": 2, "global-model.batch-size": 300}
    monkeypatch.setitem(main_table.ROWS, "ceiling", quick)
    found = main_table.cell("ceiling", 0, "domain")["accuracy"]
    assert len(found) == 6
    assert all(0 <= accuracy <= 100 for accuracy in found)
    (kept,) = tmp_path.glob("ceiling-*.json")
    record = json.loads(kept.read_text())
    assert record["accuracy"] == found
    assert (record["row"], record["seed"]) == ("ceiling", 0)
    assert f"torch {version('torch')}" in record["machine"]
    # Made once
    kept.write_text(json.dumps({"accuracy": [1.0] * 6}))
    assert main_table.cell("ceiling", 0, "domain") == {"accuracy": [1.0] * 6}


@pytest.mark.parametrize("partition", main_table.PARTITIONS)
def test_every_row_of_every_partition_can_be_run(partition: str) -> None:
    """With the clients' images cut as the partition says."""
    for row in main_table.rows_of(partition):
        settings = main_table.settings_of(row, 0, partition)
        config = main_table.config_of(settings)
        assert config.data.partition == partition
        assert config.domain_vector.classes == ("all" if row.endswith("all classes") else "held")


def test_partitions_have_cells_of_their_own() -> None:
    settings = [main_table.settings_of("ceiling", 0, one) for one in main_table.PARTITIONS]
    assert len({folder_name(one) for one in settings}) == 3


def test_a_skewed_table_names_clients_and_has_no_row_that_is_told_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    assert "prompts-domain" not in main_table.rows_of("label")
    assert main_table.references_of("label") == ("ceiling", "domain-vector, all classes")
    for row, figure in (
        ("ceiling", 70.0),
        ("domain-vector, all classes", 60.0),
        ("OSCAR", 50.0),
    ):
        for seed in (0, 1):
            keep(row, seed, [figure + seed] * 6, "label")
    found = main_table.line("OSCAR", (0, 1), "label")
    assert found["client-5"] == "50.5"
    assert found["to domain-vector, all classes"] == "-10.0 [-10.0, -10.0] *"
    assert "to prompts-domain" not in found
