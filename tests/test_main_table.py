"""benchmarks/main_table.py: what its rows have in common, and what it makes of their figures."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import main_table
from benchmarks.left_out import DOMAINS, folder_name, for_clients
from osfl import wire
from osfl.methods import METHODS
from osfl.payloads import Domain
from osfl.prompts import DIGITS

# Of six clients with ten images of each class
REAL = 600
OWN = {
    "seed",
    "method",
    "global-model.epochs",
    "public-domains",
    "synthesis.steps",
    "fedcado.strategies",
    "fedlmg.strategies",
}


@pytest.mark.parametrize("row", main_table.ROWS)
def test_all_rows_train_for_about_as_many_steps(row: str) -> None:
    config = main_table.config_of(main_table.settings_of(row, 0))
    domains = 6 + len([name for name in config.public_domains.split(",") if name])
    images = REAL if row == "ceiling" else domains * 10 * 30
    steps = math.ceil(images / 32) * config.global_model.epochs
    assert 0.9 * 627 <= steps <= 627


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
        if key.endswith(".steps") and not key.startswith("synthesis.")
    ]
    assert len(found) == 7
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


def test_payloads_are_made_once_as_clients_send_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    settings = main_table.settings_of("prompts-domain", 0)
    made = main_table.sent(settings)
    assert made == {f"client-{k}": Domain(DIGITS, name) for k, name in enumerate(DOMAINS)}
    # One that is there is taken as it is, and not made again
    (folder,) = tmp_path.glob("payloads-*")
    other = wire.encode(Domain(DIGITS, "oil"), "prompts-domain", folder.name, "client-2")
    (folder / "client-2" / "payload.pb").write_bytes(other)
    assert main_table.sent(settings)["client-2"] == Domain(DIGITS, "oil")


def test_what_sends_nothing_has_no_payloads() -> None:
    assert main_table.sent(main_table.settings_of("ceiling", 0)) == {}


def keep(row: str, seed: int, accuracies: list[float]) -> None:
    file = main_table.WORK / f"{folder_name(main_table.settings_of(row, seed))}.json"
    file.write_text(json.dumps({"accuracy": accuracies}))


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
    found = main_table.line("FedDEO", (0, 1))
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
    }
    assert main_table.line("ceiling", (0, 1))["to ceiling"] == ""


def test_cells_are_made_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there already is not made again, and a failed cell is told after the others."""
    taken = []

    class Pool:
        def __init__(self, at_once: int, mp_context: object):
            assert at_once == 2

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, act, row: str, seed: int, threads: int):  # type: ignore[no-untyped-def]
            from concurrent.futures import Future

            made: Future[None] = Future()
            taken.append((row, seed, threads))
            if seed == 0:
                made.set_exception(RuntimeError("out of memory"))
            else:
                made.set_result(None)
            return made

    monkeypatch.setattr(main_table, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    with pytest.raises(RuntimeError, match="out of memory"):
        main_table.cells(["ceiling"], [0, 1], 2)
    assert taken == [("ceiling", 0, 8), ("ceiling", 1, 8)]


def test_the_server_draws_trains_and_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling, hardly trained; a second look reads what the first has kept."""
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    quick = {"method": "ceiling", "global-model.epochs": 1, "global-model.batch-size": 300}
    monkeypatch.setitem(main_table.ROWS, "ceiling", quick)
    before = torch.get_num_threads()
    found = main_table.cell("ceiling", 0)
    assert torch.get_num_threads() == before
    assert len(found) == 6
    assert all(0 <= accuracy <= 100 for accuracy in found)
    (kept,) = tmp_path.glob("ceiling-*.json")
    record = json.loads(kept.read_text())
    assert record["accuracy"] == found
    assert (record["row"], record["seed"]) == ("ceiling", 0)
    kept.write_text(json.dumps({"accuracy": [1.0] * 6}))
    assert main_table.cell("ceiling", 0) == [1.0] * 6
