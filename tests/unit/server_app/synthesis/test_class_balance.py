"""class-balance: as many images of every class, however many clients hold it."""

from collections import Counter
from pathlib import Path

import pytest

from osfl.cli.estimate import planned_images
from osfl.cli.run_clients import Client
from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.payload.kinds import Domain, Payload
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.util.prompts import DIGITS
from server_app.context import ServerJob
from server_app.methods import domain_vector, fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.plan import ImageJob, balanced_counts, mix_classes, plan_counts
from tests.helpers.settings import quick

# Three clients; class 0 is held by all, 1 by two, 2 by one
HELD = {"a": [0, 1, 2], "b": [0, 1], "c": [0]}


def test_every_class_has_as_many_images_as_the_most_held_one() -> None:
    """R = 5: class 0 has 15 in all. Two clients share class 1's 15 as 8 and 7."""
    assert balanced_counts(HELD, 5) == {
        ("a", 0): 5,
        ("b", 0): 5,
        ("c", 0): 5,
        ("a", 1): 8,
        ("b", 1): 7,
        ("a", 2): 15,
    }


def test_classes_that_all_hold_have_what_they_had() -> None:
    counts = balanced_counts({"b": range(3), "a": range(3)}, 4)
    assert counts == {(client, label): 4 for client in "ab" for label in range(3)}


def test_a_federation_without_classes_has_no_counts() -> None:
    assert balanced_counts({}, 4) == {}
    assert balanced_counts({"a": []}, 4) == {}


def test_a_plan_of_counts_is_by_client_label_and_index() -> None:
    plan = plan_counts("m", 3, {("b", 1): 1, ("a", 2): 2, ("a", 0): 1})
    places = [("a", 0, 0), ("a", 2, 0), ("a", 2, 1), ("b", 1, 0)]
    assert plan == [ImageJob("m", 3, *place) for place in places]


def job_of(home: Path, config: RunConfig) -> ServerJob:
    folder = open_run_folder(config, f"{config.method}-{config.class_balance}", 0)
    return ServerJob(config, folder, Status(folder.path), tuple(HELD))


def payloads() -> dict[str, Payload]:
    return {
        client: Domain(tuple(DIGITS[label] for label in labels), "neon")
        for client, labels in HELD.items()
    }


def config_with(**settings: object) -> RunConfig:
    overrides = {"method": "feddeo", "num_clients": 3, "synthesis__images_per_class": 5, **settings}
    return parse_run_config(quick(**overrides))


def test_a_run_that_asks_for_it_draws_so_many(home: Path) -> None:
    plain = plan_held_classes(job_of(home, config_with()), payloads())
    assert Counter(image.label for image in plain) == {0: 15, 1: 10, 2: 5}
    balanced = plan_held_classes(job_of(home, config_with(class_balance=True)), payloads())
    assert Counter(image.label for image in balanced) == {0: 15, 1: 15, 2: 15}
    # The same images as without, and more
    assert set(plain) < set(balanced)


def test_methods_plans_are_balanced_too(home: Path) -> None:
    options = {"class_balance": True, "domain_vector__classes": "held"}
    job = job_of(home, config_with(method="domain-vector", **options))
    drawn = domain_vector.plan(job, payloads())  # type: ignore[arg-type]
    assert Counter(image.label for image in drawn) == {0: 15, 1: 15, 2: 15}
    job = job_of(home, config_with(class_balance=True))
    mixed = fedlmg.plan_mixed(job, payloads())  # type: ignore[arg-type]
    assert mixed == mix_classes(mixed)
    assert Counter(image.label for image in mixed) == {0: 15, 1: 15, 2: 15}


@pytest.mark.parametrize(("balance", "images"), [(False, 30), (True, 45)])
def test_a_dry_run_counts_the_images(balance: bool, images: int) -> None:
    config = config_with(class_balance=balance)
    clients = [Client(config, tuple(labels)) for labels in HELD.values()]
    assert planned_images(config, clients) == images
    assert planned_images(config, []) == 0


def test_a_dry_run_counts_public_domains_beside_them() -> None:
    config = config_with(class_balance=True, public_domains="neon")
    clients = [Client(config, tuple(labels)) for labels in HELD.values()]
    assert planned_images(config, clients) == 45 + 10 * 5


def test_a_method_without_images_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="class-balance = true: method 'fedavg' synthesizes no images"
    ):
        config_with(method="fedavg", class_balance=True)


def test_a_method_that_synthesizes_every_class_for_all_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="class-balance = true: method 'prompts-only' synthesizes"
    ):
        config_with(method="prompts-only", class_balance=True)
    vector = {"method": "domain-vector", "class_balance": True}
    with pytest.raises(ConfigError, match="with domain-vector.classes = 'all' the server"):
        config_with(**vector, domain_vector__classes="all")
    assert config_with(**vector, domain_vector__classes="held").class_balance
