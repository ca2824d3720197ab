"""benchmarks/robustness/certified_accuracy.py: which votes are certified, and the groups."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks import federation
from benchmarks.federation import cell_name, config_of
from benchmarks.robustness import certified_accuracy
from osfl.data.load import Images
from osfl.payload.kinds import Votes
from server_app.synthesis.images import SyntheticSet


def test_the_settings_are_a_run_of_sixty() -> None:
    """In which nothing that one client sends changes what is drawn for another."""
    config = config_of(certified_accuracy.SETTINGS)
    assert (config.num_clients, config.data.partition) == (60, "iid")
    assert (config.class_balance, config.label_check, config.robust) == (False, "none", "off")
    assert len(certified_accuracy.CLIENTS) == 60


def first_of_most(said: tuple[int, ...], classes: int) -> int:
    return max(range(classes), key=lambda label: (said.count(label), -label))


def most_liars(said: tuple[int, ...], classes: int) -> int:
    """By trying: with one more, some choice of models and of what they say changes the class."""
    winner = first_of_most(said, classes)
    for liars in range(1, len(said) + 1):
        for places in itertools.combinations(range(len(said)), liars):
            for lies in itertools.product(range(classes), repeat=liars):
                changed = list(said)
                for place, lie in zip(places, lies, strict=True):
                    changed[place] = lie
                if first_of_most(tuple(changed), classes) != winner:
                    return liars - 1
    return len(said)


def test_no_choice_of_so_many_liars_changes_what_is_certified_and_one_more_does() -> None:
    """Every way that five models can vote for three classes."""
    every = list(itertools.product(range(3), repeat=5))
    said = torch.tensor(every).T
    winner, radius = certified_accuracy.certified(said, 3)
    assert winner.tolist() == [first_of_most(one, 3) for one in every]
    assert radius.tolist() == [most_liars(one, 3) for one in every]


def test_an_equal_count_goes_to_the_first_class_and_is_worth_nothing() -> None:
    """Of four models: 1122; 1 is first, and one liar of two changes it. Of 1113 one cannot."""
    winner, radius = certified_accuracy.certified(torch.tensor([[1, 1], [1, 1], [2, 1], [2, 3]]), 4)
    assert winner.tolist() == [1, 1]
    assert radius.tolist() == [0, 1]
    # Against a class before it: (3 - 1 - 1) // 2
    _, radius = certified_accuracy.certified(torch.tensor([[1], [1], [1], [0]]), 4)
    assert radius.tolist() == [0]


def test_a_group_learns_its_own_clients_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty groups the fourth has the clients 3, 23 and 43, and no client is in two."""
    names = certified_accuracy.CLIENTS
    pixels = torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(60, 3, 4, 4)
    images = SyntheticSet(pixels, torch.arange(60) % 10, names)
    seen: list[list[int]] = []

    def train(
        job: object, name: str, pixels: torch.Tensor, labels: torch.Tensor
    ) -> SimpleNamespace:
        seen.append(pixels[:, 0, 0, 0].tolist())
        assert labels.tolist() == [number % 10 for number in seen[-1]]
        return SimpleNamespace(model=torch.nn.Flatten())

    monkeypatch.setattr(certified_accuracy, "synthetic_set", lambda: (None, images))
    monkeypatch.setattr(certified_accuracy, "train_global", train)
    monkeypatch.setattr(
        certified_accuracy, "client_images", lambda split: [Images(pixels[:7], torch.arange(7))]
    )
    monkeypatch.setattr(
        federation, "compute_logits", lambda model, pixels, device: pixels[:, 0, 0].float()
    )
    for group in range(20):
        assert len(certified_accuracy.votes_of(20, group)) == 7
    assert seen[3] == [3, 23, 43]
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(60))


def test_a_group_learns_a_pair_once_however_many_of_its_clients_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of thirty groups each has two clients; all of the first fifty-nine say one and the same."""
    same = Votes(("one", "two"), torch.tensor([4, 0], dtype=torch.uint8))
    other = Votes(("two",), torch.tensor([4], dtype=torch.uint8))
    payloads = dict.fromkeys(certified_accuracy.CLIENTS[:59], same) | {
        certified_accuracy.CLIENTS[59]: other
    }
    monkeypatch.setattr(certified_accuracy, "payloads_of", lambda settings: payloads)
    counts = certified_accuracy.pair_counts(30)
    assert {pair: count for pair, count in counts.items() if count} == {
        ("one", 4): 30,
        ("two", 0): 30,
        ("two", 4): 1,
    }
    # Pairs that nobody draws count
    assert len(counts) == 60


def test_a_row_counts_what_is_right_and_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten models for four images: all right; eight right and two say one class (radius 3, less
    one before it); six and four; and all wrong.
    """
    said = torch.tensor([[5, 5, 5, 1]] * 6 + [[5, 5, 6, 1]] * 2 + [[5, 4, 6, 1]] * 2)
    name = cell_name(certified_accuracy.SETTINGS)
    for group in range(10):
        votes = said[group].tolist()
        certified_accuracy.EXPERIMENT.cell(f"{name}-{group}-of-10", lambda votes=votes: votes)
    labels = torch.tensor([5, 5, 5, 5])
    monkeypatch.setattr(
        certified_accuracy,
        "client_images",
        lambda split: [Images(torch.zeros(4, 3, 4, 4).byte(), labels)],
    )
    monkeypatch.setattr(
        certified_accuracy, "pair_counts", lambda groups: Counter({"a": 3, "b": 10, "c": 5})
    )
    line = certified_accuracy.line("10")
    # 18 pairs in ten groups
    assert line["pairs a model learns"] == "2"
    assert line["models that learn a pair"] == "6.0 (3 to 10)"
    assert line["clients in each"] == "6"
    # 10, 8 and 6 of ten
    assert line["one model"] == "60.0"
    assert line["together"] == "75.0"
    shares = [line[f"with {count} liar{'s' if count > 1 else ''}"] for count in (1, 2, 3, 5, 9)]
    # Radii by hand: 10 to 0, and each rival before 5 is worth one more: (10 - 1) // 2 = 4;
    # (8 - 3) // 2 = 2; (6 - 4) // 2 = 1
    assert shares == ["75.0", "50.0", "25.0", "0.0", "0.0"]
