"""Client contributions: test images, training images, and the figures."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.models.classifiers import ClassifierError
from osfl.payload.kinds import Domain
from osfl.run_folder.layout import CHECKSUMS, RunFolder
from osfl.run_folder.status import Status
from server_app.context import ServerJob
from server_app.defenses import contribution
from server_app.defenses.contribution import (
    ALL_CLIENTS,
    contributions_from_hits,
    held_out_rows,
    leave_one_out_hits,
    report_contributions,
)
from server_app.synthesis.images import SyntheticSet
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

CLIENTS = ("a", "b")


def numbered(owners: str, labels: str) -> SyntheticSet:
    """Images whose every pixel is their number."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    return SyntheticSet(pixels.clone(), torch.tensor([*map(int, labels)]), tuple(owners))


@pytest.fixture
def job(tmp_path: Path) -> ServerJob:
    """With a folder of its own."""
    asked = {"client_contribution": True, "num_clients": 3, "synthesis__images_per_class": 3}
    config = parse_run_config(quick(method="feddeo", **asked))
    return ServerJob(config, RunFolder(tmp_path), Status(tmp_path), CLIENTS)


# ---- Which images test ----


def test_the_last_fifth_of_each_clients_class_tests() -> None:
    """Two of eleven images, one of four, and none of a public domain's."""
    owners = "a" * 11 + "b" * 4 + "a" * 4 + "p" * 5
    images = numbered(owners, "0" * 15 + "1" * 4 + "0" * 5)
    assert held_out_rows(images, CLIENTS) == [9, 10, 14, 18]


# ---- Who learns what ----

# The third image of each client's class tests; c is the server's own domain
OWNERS, LABELS = "aaabbbaaabbbc", "0000001111110"
TESTED = [2, 5, 8, 11]


class Reads(nn.Module):
    """Takes an image of an odd number for class 1, and one of an even number for class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ones = (127.5 * (images[:, 0, 0, 0] + 1)).round().long() % 2
        return torch.nn.functional.one_hot(ones, 2).float()


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the images that each model trained on; it predicts each test image's
    parity.
    """
    numbers: list[list[int]] = []

    def trained(job: Any, pixels: torch.Tensor, labels: torch.Tensor, progress: Any) -> nn.Module:
        rows = pixels[:, 0, 0, 0].tolist()
        assert labels.tolist() == [int(LABELS[row]) for row in rows]
        progress(1, 2)
        numbers.append(rows)
        return Reads()

    monkeypatch.setattr(contribution, "train_model", trained)
    monkeypatch.setattr("osfl.models.classifiers.normalize", lambda images, model: images)
    return numbers


def test_no_model_is_tested_on_its_training_images_or_trains_on_the_left_out_client(
    job: ServerJob, learned: list[list[int]]
) -> None:
    images = numbered(OWNERS, LABELS)
    hits = leave_one_out_hits(job, CLIENTS, images, TESTED)
    everybody = [row for row in range(13) if row not in TESTED]
    assert learned == [
        everybody,
        [row for row in everybody if OWNERS[row] != "a"],
        [row for row in everybody if OWNERS[row] != "b"],
    ]
    # 2 is even and of class 0, 5 odd and of class 0, 8 even and of class 1, 11 odd and of class 1
    assert list(hits) == [ALL_CLIENTS, *CLIENTS]
    assert all(model_hits.tolist() == [True, False, False, True] for model_hits in hits.values())
    # Half of the third of three trainings
    assert (job.status.state["done"], job.status.state["total"]) == (5, 6)


def test_a_server_that_goes_on_trains_what_lacks(job: ServerJob, learned: list[list[int]]) -> None:
    images = numbered(OWNERS, LABELS)
    first = leave_one_out_hits(job, CLIENTS, images, TESTED)
    file = job.folder.path / "contribution" / "done.json"
    record = json.loads(file.read_text())
    learned.clear()
    again = leave_one_out_hits(job, CLIENTS, images, TESTED)
    assert learned == []
    assert again.keys() == first.keys()
    assert all(torch.equal(again[client], first[client]) for client in first)
    del record["hits"]["b"]
    file.write_text(json.dumps(record))
    leave_one_out_hits(job, CLIENTS, images, TESTED)
    assert [sorted({OWNERS[row] for row in rows}) for rows in learned] == [["a", "c"]]


def test_a_test_is_stored_at_once(
    job: ServerJob, learned: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends in the third training; two are there, and the third alone is done again."""
    images = numbered(OWNERS, LABELS)
    plain = contribution.train_model

    def ending(*given: Any, **more: Any) -> nn.Module:
        if len(learned) == 2:
            raise KeyboardInterrupt
        return plain(*given, **more)

    monkeypatch.setattr(contribution, "train_model", ending)
    with pytest.raises(KeyboardInterrupt):
        leave_one_out_hits(job, CLIENTS, images, TESTED)
    monkeypatch.setattr(contribution, "train_model", plain)
    leave_one_out_hits(job, CLIENTS, images, TESTED)
    assert len(learned) == 3


def test_other_images_of_the_same_owners_are_learned_anew(
    job: ServerJob, learned: list[list[int]]
) -> None:
    """A payload came again, and another one; and other images test."""
    images = numbered(OWNERS, LABELS)
    leave_one_out_hits(job, CLIENTS, images, TESTED)
    changed = replace(images, pixels=images.pixels.clone())
    changed.pixels[0, 1, 2, 2] += 1
    leave_one_out_hits(job, CLIENTS, changed, TESTED)
    assert len(learned) == 6
    leave_one_out_hits(job, CLIENTS, changed, [1, 5, 8, 11])
    assert len(learned) == 9


@pytest.mark.parametrize(
    ("owners", "labels", "damage"),
    [
        ("aaabbbaaabbbb", LABELS, None),
        (OWNERS, "0000001111111", None),
        (OWNERS, LABELS, "{"),
        (OWNERS, LABELS, "{}"),
        (OWNERS, LABELS, 7),
        (OWNERS, LABELS, [True]),
        (OWNERS, LABELS, [None] * 4),
    ],
)
def test_other_images_and_corrupt_files_repeat_all_trainings(
    owners: str,
    labels: str,
    damage: Any,
    job: ServerJob,
    learned: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_one_out_hits(job, CLIENTS, numbered(OWNERS, LABELS), TESTED)
    file = job.folder.path / "contribution" / "done.json"
    if isinstance(damage, str):
        file.write_text(damage)
    elif damage is not None:
        hits = dict.fromkeys((ALL_CLIENTS, *CLIENTS), damage)
        file.write_text(json.dumps({**json.loads(file.read_text()), "hits": hits}))
    learned.clear()
    monkeypatch.setitem(globals(), "LABELS", labels)
    leave_one_out_hits(job, CLIENTS, numbered(owners, labels), TESTED)
    assert len(learned) == 3


# ---- The figures ----


def test_figures_by_hand() -> None:
    """Three clients with four test images, two and one, all of a class that each holds.

    Without a, its own four images are seen once. All together see three of them: it gives its own
    75 - 25 points. Of b's two images all see one, and the model without a both: -50; of c's one
    both see none: 0. So a gives the others -25.
    """
    owners = "aaaabbc"
    hit_rows = {
        ALL_CLIENTS: (1, 1, 1, 0, 1, 0, 0),
        "a": (0, 0, 1, 0, 1, 1, 0),
        "b": (1, 1, 1, 1, 0, 0, 1),
        "c": (1, 1, 1, 0, 1, 0, 0),
    }
    hits = {client: torch.tensor(row, dtype=torch.bool) for client, row in hit_rows.items()}
    contributions = contributions_from_hits(hits, owners, [0] * 7)
    assert list(contributions) == ["a", "b", "c"]
    assert (contributions["a"].seen, contributions["b"].seen, contributions["c"].seen) == (
        25.0,
        0.0,
        0.0,
    )
    assert contributions["a"].own.points == 50.0
    assert contributions["a"].others.points == -25.0
    # a: three of four and all four, -25; c: 0 and 1, -100
    assert contributions["b"].own.points == 50.0
    assert contributions["b"].others.points == pytest.approx((-25 - 100) / 2)
    assert (contributions["c"].own.points, contributions["c"].others.points) == (0.0, 0.0)
    assert [contribution.images for contribution in contributions.values()] == [3, 5, 6]
    # 95 % for two intervals of each of three clients together: 0.05 / 6 of both sides
    deviations = NormalDist().inv_cdf(1 - 0.05 / 12)
    # a's differences are 1, 1, 0, 0, and half an answer more in each cell: 3 of 6 differ, by 2 / 6
    # on average
    of_a = (3 / 6 - (2 / 6) ** 2) / 6
    assert contributions["a"].own.half == pytest.approx(100 * deviations * of_a**0.5)
    # b's are 0 and -1: 2 of 4, by -1 / 4. c's one is 0: 1 of 3, by 0
    of_b = (2 / 4 - (1 / 4) ** 2) / 4
    of_c = (1 / 3) / 3
    half = 100 * deviations * (of_b + of_c) ** 0.5 / 2
    assert contributions["a"].others.half == pytest.approx(half)


@pytest.mark.parametrize(("each", "harms"), [(1, False), (9, False), (10, True)])
def test_few_images_flag_no_client(each: int, harms: bool) -> None:
    """Each of three clients has `each` images; those of the others are correct without a only."""
    owners = "a" * each + "b" * each + "c" * each
    none = torch.zeros(3 * each, dtype=torch.bool)
    contributions = contributions_from_hits(
        {ALL_CLIENTS: none, "a": ~none, "b": none, "c": none}, owners, [0] * 3 * each
    )
    assert contributions["a"].others.points == -100.0
    assert [contribution.harms for contribution in contributions.values()] == [harms, False, False]


def test_a_class_without_other_holders_is_not_tested_on_the_others() -> None:
    """a's second image is of class 1, which c has, and its first of class 0, which no other has."""
    hit_rows = dict.fromkeys((ALL_CLIENTS, *"abc"), (0, 1, 0, 1))
    hits = {client: torch.tensor(row, dtype=torch.bool) for client, row in hit_rows.items()}
    contributions = contributions_from_hits(hits, "aabc", [0, 1, 2, 1])
    assert (contributions["a"].seen, contributions["b"].seen, contributions["c"].seen) == (
        100.0,
        None,
        100.0,
    )


THREE = ("a", "b", "c")


def gains(monkeypatch: pytest.MonkeyPatch, harm: int) -> None:
    """Without a, more of b's ten test images are correct; c's are correct for all models."""
    hits = {
        ALL_CLIENTS: torch.tensor([True] * 10 + [False] * 10 + [True] * 10),
        "a": torch.tensor([True] * (10 + harm) + [False] * (10 - harm) + [True] * 10),
        "b": torch.tensor([True] * 10 + [False] * 10 + [True] * 10),
        "c": torch.tensor([True] * 10 + [False] * 10 + [True] * 10),
    }
    monkeypatch.setattr(contribution, "leave_one_out_hits", lambda *given: hits)


def payloads_of(clients: Sequence[str]) -> dict[str, Domain]:
    return dict.fromkeys(clients, Domain(("zero",), "x"))


@pytest.mark.parametrize(("harm", "warned"), [(0, False), (2, False), (10, True)])
def test_a_client_that_harms_the_others_beyond_chance_is_named(
    harm: int, warned: bool, job: ServerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two others gains some tenths, and the other nothing: half of that."""
    gains(monkeypatch, harm)
    images = numbered("a" * 50 + "b" * 50 + "c" * 50, "0" * 150)
    report_contributions(job, payloads_of(THREE), images)
    warnings = job.status.state.get("warnings", [])
    assert len(warnings) == int(warned)
    if warned:
        assert (
            f"without a the model is {5 * harm:.1f} points more accurate on images" in warnings[0]
        )
    stored = json.loads((job.folder.path / "contribution" / "clients.json").read_text())
    assert stored["a"]["others"]["points"] == pytest.approx(-5 * harm)
    assert (stored["b"]["seen"], stored["b"]["own"]["points"]) == (0.0, 0.0)
    assert stored["c"]["seen"] == 100.0


def test_two_clients_have_no_contributions(job: ServerJob, learned: list[list[int]]) -> None:
    """The others were left out since, or sent nothing; a table of more is taken away."""
    job.folder.store_contributions({"c": {}})
    report_contributions(job, payloads_of("abz"), numbered("aaabbbppp", "000000000"))
    assert learned == []
    (warning,) = job.status.state["warnings"]
    assert warning == "client-contribution: requires images of at least 3 clients; the run has 2"
    assert json.loads((job.folder.path / "contribution" / "clients.json").read_text()) == {}


def test_a_training_that_fails_costs_the_table_alone(
    job: ServerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(*given: Any, **more: Any) -> nn.Module:
        raise ClassifierError("the loss is not finite")

    monkeypatch.setattr(contribution, "train_model", diverged)
    report_contributions(job, payloads_of(THREE), numbered("aaabbbccc", "0" * 9))
    (warning,) = job.status.state["warnings"]
    assert (
        warning == "client-contribution: a training without a client failed: the loss is not finite"
    )
    assert json.loads((job.folder.path / "contribution" / "clients.json").read_text()) == {}


def test_it_is_not_done_unasked(tmp_path: Path, learned: list[list[int]]) -> None:
    config = parse_run_config(quick(method="feddeo"))
    job = ServerJob(config, RunFolder(tmp_path), Status(tmp_path), THREE)
    report_contributions(job, payloads_of(THREE), numbered("abc", "000"))
    assert learned == []
    assert not (tmp_path / "contribution").exists()


# ---- Real models ----


def colored(clients: str, malicious: str) -> SyntheticSet:
    """Reddish images of class 0 and bluish ones of class 1, ten each; one client swaps them."""
    generator = torch.Generator().manual_seed(0)
    parts, labels, owners = [], [], []
    for client in clients:
        for label in (0, 1):
            shown = 1 - label if client == malicious else label
            images = torch.randint(0, 40, (10, 3, 32, 32), generator=generator)
            images[:, 2 * shown] += 200
            parts.append(images.to(torch.uint8))
            labels += [label] * 10
            owners += [client] * 10
    return SyntheticSet(torch.cat(parts), torch.tensor(labels), tuple(owners))


@pytest.mark.slow
@pytest.mark.parametrize("malicious", ["b", ""])
def test_models_recognize_few_images_of_a_label_flipping_client(
    malicious: str, tmp_path: Path
) -> None:
    """A quarter of the others' training images is the malicious client's: models may be unsure."""
    clients = "abcde"
    settings: dict[str, Any] = {
        "method": "feddeo",
        "num_clients": 5,
        "client_contribution": True,
        "synthesis__images_per_class": 10,
        "global_model__trained": "head",
        "global_model__lr": 0.1,
        "global_model__steps": 30,
        "global_model__batch_size": 40,
    }
    config = parse_run_config(quick(**settings))
    job = ServerJob(config, RunFolder(tmp_path), Status(tmp_path), tuple(clients))
    report_contributions(job, payloads_of(clients), colored(clients, malicious))
    contributions = json.loads((tmp_path / "contribution" / "clients.json").read_text())
    accuracies = {client: record["seen"] for client, record in contributions.items()}
    points = {client: record["others"]["points"] for client, record in contributions.items()}
    if not malicious:
        assert accuracies == dict.fromkeys(clients, 100.0)
        assert points == dict.fromkeys(clients, 0.0)
    else:
        assert accuracies.pop(malicious) == 0
        assert min(accuracies.values()) >= 50
        assert points.pop(malicious) < min(0, *points.values())


# ---- A whole run ----

KINDS = ("own", "others")


@pytest.mark.slow
def test_a_finished_run_that_is_called_again_adds_the_table(home: Path, tiny_kit: Path) -> None:
    asked: dict[str, Any] = {
        "method": "prompts-domain",
        "num_clients": 3,
        "kit": str(tiny_kit),
        "synthesis__images_per_class": 3,
    }
    start(quick(**asked))
    folder = home / "runs" / "job"
    before = metrics(home)
    assert before["contributions"] == {}
    assert "Client contributions" not in (folder / "report.html").read_text()
    model = (folder / "models" / "FT.safetensors").stat().st_mtime_ns
    start(quick(**asked, client_contribution=True))
    after = metrics(home)
    assert set(after["contributions"]) == {"client-0", "client-1", "client-2"}
    page = (folder / "report.html").read_text()
    assert "Client contributions" in page
    table = page[page.index("Client contributions") :]
    for client, record in after["contributions"].items():
        row = table[table.index(f"<td>{client}</td>") :]
        row = row[: row.index("</tr>")]
        gains = [f"{record[key]['points']:+.1f} ± {record[key]['half']:.1f}" for key in KINDS]
        assert re.findall(r"[+-][\d.]+ ± [\d.]+", row) == gains
        assert f"{record['seen']:.1f}" in row
    assert after["accuracy"] == before["accuracy"]
    assert "contribution/clients.json" in (folder / CHECKSUMS).read_text()
    assert (folder / "models" / "FT.safetensors").stat().st_mtime_ns == model
    # And a run that does not ask does not show what may be of other images
    start(quick(**asked))
    assert metrics(home)["contributions"] == {}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"method": "prompts-only"}, "requires a method that synthesizes images"),
        ({"method": "fedcgs"}, "requires a method that synthesizes images"),
        ({"method": "feddeo", "num_clients": 21}, "requires 3 to 20 clients, but there are 21"),
        ({"method": "feddeo", "num_clients": 2}, "requires 3 to 20 clients, but there are 2"),
        (
            {"method": "feddeo", "num_clients": 3, "held_out": "client-0"},
            "requires 3 to 20 clients, but there are 2",
        ),
        (
            {"method": "feddeo", "num_clients": 3, "synthesis__images_per_class": 2},
            "images-per-class to be at least 3",
        ),
    ],
)
def test_impossible_contributions_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_run_config(
            quick(**{"synthesis__images_per_class": 3, **settings, "client_contribution": True})
        )


@pytest.mark.slow
def test_a_dry_run_says_that_it_trains_more(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.system_tools import quick_arguments

    monkeypatch.chdir(home)

    def said(**more: Any) -> str:
        asked = {"num_clients": 4, "held_out": "client-3", "synthesis__images_per_class": 3}
        settings = quick_arguments(tiny_kit, method="feddeo", **asked, **more)
        result = CliRunner().invoke(cli, ["run", "--dry-run", *settings])
        assert result.exit_code == 0, result.output
        return result.output

    assert "trains the global model 4 more times (client-contribution)" in said(
        client_contribution=True
    )
    assert "client-contribution" not in said()
