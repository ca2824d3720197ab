"""What each client gives the global model: which images test, who learns what, and the figures."""

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from conftest import quick
from test_round import metrics, start
from torch import nn
from typer.testing import CliRunner

from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.payloads import Domain
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from server_app import influence
from server_app.influence import (
    EVERYBODY,
    held_out,
    hits_without,
    influences,
    report_influences,
)
from server_app.job import ServerJob
from server_app.synthesis.images import SyntheticSet

CLIENTS = ("a", "b")


def numbered(owners: str, labels: str) -> SyntheticSet:
    """Images whose every pixel is their number."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    return SyntheticSet(pixels.clone(), torch.tensor([*map(int, labels)]), tuple(owners))


@pytest.fixture
def job(tmp_path: Path) -> ServerJob:
    """With a folder of its own."""
    config = parse_run_config(quick(method="feddeo", influence=True, synthesis__images_per_class=3))
    return ServerJob(config, RunFolder(tmp_path), Status(tmp_path), CLIENTS)


# ---- Which images test ----


def test_the_last_fifth_of_each_clients_class_tests() -> None:
    """Of eleven images two, of four one; of a public domain's none."""
    owners = "a" * 11 + "b" * 4 + "a" * 4 + "p" * 5
    images = numbered(owners, "0" * 15 + "1" * 4 + "0" * 5)
    assert held_out(images, CLIENTS) == [9, 10, 14, 18]


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
    """Of each model the numbers of the images that it learned; it says of each test its parity."""
    numbers: list[list[int]] = []

    def trained(job: Any, pixels: torch.Tensor, labels: torch.Tensor, progress: Any) -> nn.Module:
        rows = pixels[:, 0, 0, 0].tolist()
        assert labels.tolist() == [int(LABELS[row]) for row in rows]
        progress(1, 2)
        numbers.append(rows)
        return Reads()

    monkeypatch.setattr(influence, "trained", trained)
    monkeypatch.setattr("osfl.models.classifiers.normalise", lambda images, model: images)
    return numbers


def test_nobody_is_tested_on_what_it_learned_or_learns_from_who_is_left_out(
    job: ServerJob, learned: list[list[int]]
) -> None:
    images = numbered(OWNERS, LABELS)
    hits = hits_without(job, CLIENTS, images, TESTED)
    everybody = [row for row in range(13) if row not in TESTED]
    assert learned == [
        everybody,
        [row for row in everybody if OWNERS[row] != "a"],
        [row for row in everybody if OWNERS[row] != "b"],
    ]
    # 2 is even and of class 0, 5 odd and of class 0, 8 even and of class 1, 11 odd and of class 1
    assert list(hits) == [EVERYBODY, *CLIENTS]
    assert all(found.tolist() == [True, False, False, True] for found in hits.values())
    # Half of the third of three trainings
    assert (job.status.state["done"], job.status.state["total"]) == (5, 6)


def test_a_server_that_goes_on_trains_what_lacks(job: ServerJob, learned: list[list[int]]) -> None:
    images = numbered(OWNERS, LABELS)
    first = hits_without(job, CLIENTS, images, TESTED)
    file = job.folder.path / "influence" / "done.json"
    kept = json.loads(file.read_text())
    learned.clear()
    again = hits_without(job, CLIENTS, images, TESTED)
    assert learned == []
    assert again.keys() == first.keys()
    assert all(torch.equal(again[left], first[left]) for left in first)
    del kept["hits"]["b"]
    file.write_text(json.dumps(kept))
    hits_without(job, CLIENTS, images, TESTED)
    assert [sorted({OWNERS[row] for row in rows}) for rows in learned] == [["a", "c"]]


@pytest.mark.parametrize(
    ("owners", "labels", "damage"),
    [
        ("aaabbbaaabbbb", LABELS, None),
        (OWNERS, "0000001111111", None),
        (OWNERS, LABELS, "{"),
        (OWNERS, LABELS, "{}"),
        (OWNERS, LABELS, "hits"),
    ],
)
def test_of_other_images_and_of_what_is_damaged_all_is_done_again(
    owners: str,
    labels: str,
    damage: str | None,
    job: ServerJob,
    learned: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits_without(job, CLIENTS, numbered(OWNERS, LABELS), TESTED)
    file = job.folder.path / "influence" / "done.json"
    if damage == "hits":
        file.write_text(json.dumps({**json.loads(file.read_text()), "hits": {"a": 7}}))
    elif damage is not None:
        file.write_text(damage)
    learned.clear()
    monkeypatch.setitem(globals(), "LABELS", labels)
    hits_without(job, CLIENTS, numbered(owners, labels), TESTED)
    assert len(learned) == 3


# ---- The figures ----


def test_figures_by_hand() -> None:
    """Three clients with four test images, two and one.

    Without a, its own four images are seen once. All together see three of them: it gives its own
    75 - 25 points. Of b's two images all see one, and the model without a both: -50; of c's one
    both see none: 0. So a gives the others -25.
    """
    owners = "aaaabbc"
    seen = {
        EVERYBODY: (1, 1, 1, 0, 1, 0, 0),
        "a": (0, 0, 1, 0, 1, 1, 0),
        "b": (1, 1, 1, 1, 0, 0, 1),
        "c": (1, 1, 1, 0, 1, 0, 0),
    }
    hits = {left: torch.tensor(row, dtype=torch.bool) for left, row in seen.items()}
    found = influences(hits, owners)
    assert list(found) == ["a", "b", "c"]
    assert (found["a"].seen, found["b"].seen, found["c"].seen) == (25.0, 0.0, 0.0)
    assert found["a"].own.points == 50.0
    assert found["a"].others.points == -25.0
    # a: three of four and all four, -25; c: 0 and 1, -100
    assert found["b"].own.points == 50.0
    assert found["b"].others.points == pytest.approx((-25 - 100) / 2)
    assert (found["c"].own.points, found["c"].others.points) == (0.0, 0.0)
    # 95 % for three clients together: 0.05 / 3 of both sides
    deviations = NormalDist().inv_cdf(1 - 0.05 / 6)
    # a's differences are 1, 1, 0, 0: their variance by three is 1/3, that of their mean 1/12
    assert found["a"].own.half == pytest.approx(100 * deviations * (1 / 12) ** 0.5)
    # b's are 0 and -1: variance 1/2, of the mean 1/4; of c's one image nothing is known; two means
    assert found["a"].others.half == pytest.approx(100 * deviations * (1 / 4) ** 0.5 / 2)


def gains(monkeypatch: pytest.MonkeyPatch, harm: int) -> None:
    """Without a, so many more of b's ten test images are seen."""
    hits = {
        EVERYBODY: torch.tensor([True] * 10 + [False] * 10),
        "a": torch.tensor([True] * (10 + harm) + [False] * (10 - harm)),
        "b": torch.tensor([True] * 10 + [False] * 10),
    }
    monkeypatch.setattr(influence, "hits_without", lambda *given: hits)


@pytest.mark.parametrize(("harm", "warned"), [(0, False), (1, False), (8, True)])
def test_who_harms_the_others_beyond_chance_is_named(
    harm: int, warned: bool, job: ServerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains(monkeypatch, harm)
    payloads = dict.fromkeys(CLIENTS, Domain(("zero",), "x"))
    images = numbered("a" * 50 + "b" * 50, "0" * 100)
    report_influences(job, payloads, images)
    said = job.status.state.get("warnings", [])
    assert bool(said) == warned
    if warned:
        assert said == [
            f"influence: without a the model sees {10 * harm:.1f} points more of the images like "
            "the other clients'. Look at its images"
        ]
    stored = json.loads((job.folder.path / "influence" / "clients.json").read_text())
    assert stored["a"]["others"]["points"] == -10 * harm
    assert stored["b"] == {
        "seen": 0.0,
        "own": {"points": 0.0, "half": 0.0},
        "others": {"points": 0.0, "half": 0.0},
    }


def test_one_client_is_compared_with_nobody(job: ServerJob, learned: list[list[int]]) -> None:
    """The others were left out since, or sent nothing."""
    report_influences(job, {"a": Domain(("zero",), "x")}, numbered("aaappp", "000000"))
    assert learned == []
    assert "nothing to compare" in job.status.state["warnings"][0]
    assert not (job.folder.path / "influence").exists()


def test_it_is_not_done_unasked(tmp_path: Path, learned: list[list[int]]) -> None:
    config = parse_run_config(quick(method="feddeo"))
    job = ServerJob(config, RunFolder(tmp_path), Status(tmp_path), CLIENTS)
    report_influences(job, dict.fromkeys(CLIENTS, Domain(("zero",), "x")), numbered("ab", "00"))
    assert learned == []
    assert not (tmp_path / "influence").exists()


# ---- Real models ----


def coloured(clients: str, liar: str) -> SyntheticSet:
    """Reddish images of class 0 and bluish ones of class 1, ten each; one client swaps them."""
    generator = torch.Generator().manual_seed(0)
    parts, labels, owners = [], [], []
    for client in clients:
        for label in (0, 1):
            shown = 1 - label if client == liar else label
            images = torch.randint(0, 40, (10, 3, 32, 32), generator=generator)
            images[:, 2 * shown] += 200
            parts.append(images.to(torch.uint8))
            labels += [label] * 10
            owners += [client] * 10
    return SyntheticSet(torch.cat(parts), torch.tensor(labels), tuple(owners))


@pytest.mark.parametrize("liar", ["b", ""])
def test_models_point_at_who_swaps_its_classes(liar: str, tmp_path: Path) -> None:
    """A quarter of what the others' models learn is the liar's, so these may be in two minds."""
    clients = "abcde"
    settings: dict[str, Any] = {
        "method": "feddeo",
        "num_clients": 5,
        "influence": True,
        "synthesis__images_per_class": 10,
        "global_model__trained": "head",
        "global_model__lr": 0.1,
        "global_model__steps": 30,
        "global_model__batch_size": 40,
    }
    config = parse_run_config(quick(**settings))
    job = ServerJob(config, RunFolder(tmp_path), Status(tmp_path), tuple(clients))
    payloads = dict.fromkeys(clients, Domain(("zero", "one"), "x"))
    report_influences(job, payloads, coloured(clients, liar))
    found = json.loads((tmp_path / "influence" / "clients.json").read_text())
    seen = {client: about["seen"] for client, about in found.items()}
    given = {client: about["others"]["points"] for client, about in found.items()}
    if not liar:
        assert seen == dict.fromkeys(clients, 100.0)
        assert given == dict.fromkeys(clients, 0.0)
    else:
        assert seen.pop(liar) == 0
        assert min(seen.values()) >= 50
        assert given.pop(liar) < min(0, *given.values())


# ---- A whole run ----


def test_a_finished_run_that_is_called_again_adds_the_table(home: Path, tiny_kit: Path) -> None:
    asked: dict[str, Any] = {
        "method": "prompts-domain",
        "kit": str(tiny_kit),
        "synthesis__images_per_class": 3,
    }
    start(quick(**asked))
    folder = home / "runs" / "job"
    before = metrics(home)
    assert before["influence"] == {}
    assert "What does each client give" not in (folder / "report.html").read_text()
    model = (folder / "models" / "FT.safetensors").stat().st_mtime_ns
    start(quick(**asked, influence=True))
    after = metrics(home)
    assert set(after["influence"]) == {"client-0", "client-1"}
    assert "What does each client give" in (folder / "report.html").read_text()
    assert after["accuracy"] == before["accuracy"]
    assert (folder / "models" / "FT.safetensors").stat().st_mtime_ns == model
    # And a run that does not ask does not show what may be of other images
    start(quick(**asked))
    assert metrics(home)["influence"] == {}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"method": "prompts-only"}, "draws no image from what clients send"),
        ({"method": "fedcgs"}, "draws no image from what clients send"),
        ({"method": "feddeo", "num_clients": 21}, "of 2 to 20, and here are 21"),
        ({"method": "feddeo", "num_clients": 1}, "of 2 to 20, and here are 1"),
        ({"method": "feddeo", "synthesis__images_per_class": 2}, "of at least 3"),
    ],
)
def test_what_cannot_be_asked_is_said(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_run_config(quick(**{"synthesis__images_per_class": 3, **settings, "influence": True}))


def test_a_dry_run_says_that_it_trains_more(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from system_tools import quick_arguments

    monkeypatch.chdir(home)

    def said(**more: Any) -> str:
        settings = quick_arguments(tiny_kit, method="feddeo", synthesis__images_per_class=3, **more)
        result = CliRunner().invoke(cli, ["run", "--dry-run", *settings])
        assert result.exit_code == 0, result.output
        return result.output

    assert "trains the global model 3 times more (influence)" in said(influence=True)
    assert "influence" not in said()
