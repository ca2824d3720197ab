"""public-domains: what the server draws by a domain's name alone, beside the clients' images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.cli.estimate import planned_images
from osfl.cli.run_clients import Client
from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.util.prompts import DIGITS
from server_app import public_domains
from server_app.app import estimate_disk_bytes
from server_app.synthesis.plan import ImageJob, cut_units
from tests.helpers.composition import CPU, config_of, prompts_of, server
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start

PUBLIC = "Oil painting, neon"


def job_of(kit: Path, **overrides: object) -> Any:
    return server(kit, config_of(kit, public_domains=PUBLIC, **overrides))


def test_every_class_is_planned_in_every_domain(tiny_kit: Path) -> None:
    plan = public_domains.plan(job_of(tiny_kit, synthesis__images_per_class=2))
    assert [(image.client, image.label, image.index) for image in plan] == [
        (owner, label, index)
        for owner in ("public.neon", "public.oil_painting")
        for label in range(10)
        for index in range(2)
    ]


def test_no_domain_is_planned_by_default(tiny_kit: Path) -> None:
    assert public_domains.plan(server(tiny_kit, config_of(tiny_kit))) == []


def test_a_domain_is_drawn_by_its_name_and_a_client_by_its_method(
    tiny_kit: Path, composed: Any
) -> None:
    job = job_of(tiny_kit, prompts_domain__guidance=3.5)
    clients: list[ImageJob] = []

    def of_clients(jobs: Any) -> torch.Tensor:
        clients.extend(jobs)
        return torch.zeros(len(jobs))

    sample = public_domains.add_public_domains(job, lambda device: of_clients)(CPU)
    client_jobs = [ImageJob("m", 0, "neon", 4, 0)]
    sample(client_jobs)
    assert (clients, composed) == (client_jobs, [])
    sample([image for image in public_domains.plan(job) if image.label in (3, 8)][2:])
    assert clients == client_jobs
    c0, (only,) = composed[0]
    words = ("a oil painting of a three", "a oil painting of a eight")
    assert torch.equal(only.c, prompts_of(tiny_kit, *words))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 3.5


def test_a_kit_is_loaded_when_it_is_needed(tiny_kit: Path) -> None:
    loaded: list[torch.device] = []

    def load(device: torch.device) -> Any:
        loaded.append(device)
        return lambda jobs: torch.zeros(len(jobs))

    sample = public_domains.add_public_domains(job_of(tiny_kit), load)(CPU)
    assert loaded == []
    for _ in range(2):
        sample([ImageJob("m", 0, "a", 4, 0)])
    assert loaded == [CPU]


def unit_names(job: Any) -> list[str]:
    plan = [ImageJob("m", 0, "a", 4, 0), *public_domains.plan(job)]
    units = cut_units(plan, 8, {"a": "payload", **public_domains.ingredients(job)}, {})
    return [unit.name for unit in units]


def test_settings_that_shape_a_domains_images_are_in_its_units_names(tiny_kit: Path) -> None:
    names = unit_names(job_of(tiny_kit))
    guided = unit_names(job_of(tiny_kit, prompts_domain__guidance=9.0))
    worded = unit_names(job_of(tiny_kit, prompts_domain__prompt="{class}, {domain}"))
    # One of the client, two of each domain's ten images
    assert len(names) == 5
    assert guided[0] == worded[0] == names[0]
    assert len({*names[1:], *guided[1:], *worded[1:]}) == 12


@pytest.mark.slow
def test_a_run_has_the_clients_images_and_the_domains(home: Path, tiny_kit: Path) -> None:
    """The clients' are the very same as without."""

    def rows_of(job: str, public: str) -> list[dict[str, Any]]:
        start(quick(method="prompts-domain", kit=str(tiny_kit), public_domains=public), job)
        text = (home / "runs" / job / "manifest.jsonl").read_text()
        return [json.loads(row) for row in text.splitlines()]

    alone = rows_of("alone", "")
    rows = rows_of("more", PUBLIC)
    assert rows[: len(alone)] == alone
    added = [(row["client"], row["class"]) for row in rows[len(alone) :]]
    assert added == [
        (owner, name) for owner in ("public.neon", "public.oil_painting") for name in DIGITS
    ]
    pages = {job: (home / "runs" / job / "report.html").read_text() for job in ("alone", "more")}
    assert "domains that the server added" in pages["more"]
    assert "domains that the server added" not in pages["alone"]
    record = json.loads((home / "runs" / "more" / "models" / "FT.json").read_text())
    assert record["images"] == len(alone) + 20


@pytest.mark.slow
def test_a_domain_is_drawn_anew_where_its_prompts_guidance_is_another(
    home: Path, tiny_kit: Path
) -> None:
    """Two clients' twenty images are the same units; the domain's ten are others."""
    units: dict[float, set[str]] = {}
    for guidance in (2.0, 3.0):
        job = f"job-{guidance:.0f}"
        settings = {"public_domains": "neon", "prompts_domain__guidance": guidance}
        start(quick(method="prompts-only", kit=str(tiny_kit), **settings), job)
        units[guidance] = {file.name for file in (home / "runs" / job / "units").iterdir()}
    # Units of at most eight images of one owner
    assert [len(names) for names in units.values()] == [6, 6]
    assert len(units[2.0] & units[3.0]) == 4


def config_with(public: str, **overrides: object) -> RunConfig:
    settings = {"method": "domain-vector", "synthesis__images_per_class": 3, **overrides}
    return parse_run_config(quick(public_domains=public, **settings))


def test_a_dry_run_counts_the_domains_images() -> None:
    config = config_with("")
    public_config = config_with(PUBLIC)
    # 3 images of the classes 4 and 7; and of ten classes in two domains
    assert planned_images(config, [Client(config, (4, 7))]) == 6
    assert planned_images(public_config, [Client(public_config, (4, 7))]) == 66
    # 2 clients, and as much again, of 32 px, and of 16 for the classifiers
    bytes_per_image = 3 * (32**2 + 16**2)
    difference = estimate_disk_bytes(public_config) - estimate_disk_bytes(config)
    assert difference == 60 * bytes_per_image


@pytest.mark.parametrize("method", ["fedlmg", "fedcado", "feddisc", "fedcgs", "local", "fedavg"])
def test_a_method_without_prompts_has_no_public_domain(method: str) -> None:
    with pytest.raises(ConfigError, match=f"public-domains = 'neon': method '{method}'"):
        config_with("neon", method=method)


@pytest.mark.parametrize(
    ("public", "wrong"),
    [
        ("neon, Neon", "two of the names give the same folder"),
        ("neon, a/b", "'a/b' has a slash"),
        ("oil_painting, oil painting", "two of the names give the same folder"),
        ("oil-painting, oil painting", "two of the names give the same folder"),
    ],
)
def test_names_that_are_no_words_or_the_same_are_refused(public: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        config_with(public)
