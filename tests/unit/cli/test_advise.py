"""`osfl advise`: its rule, the run that only measures, and its table."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.advice import (
    DESCRIPTIONS,
    FEATURES,
    FIRST,
    KINDS,
    NOT_WORTH,
    PROMPTS,
    ROUNDS,
    UNKNOWN,
    WORTH,
    ZERO_SHOT,
    Figures,
    judge,
    kind_of,
    pool,
)
from osfl.cli.advise import advise_methods, markdown, measurement
from osfl.cli.client_costs import client_flops
from osfl.cli.estimate import upload_bytes
from osfl.cli.main import app
from osfl.cli.run_clients import Client, placeholder_clients
from osfl.config import ConfigError, parse_run_config
from osfl.methods import METHODS
from osfl.run_folder.events import FollowedRun, log_advice
from osfl.settings import resolve_config
from tests.helpers.settings import quick
from tests.helpers.system_tools import ONE_AT_A_TIME


@pytest.mark.parametrize(
    ("figures", "first", "worth"),
    [
        # CLIP ViT-B/16 on PACS
        (Figures(0.96, 0.93, 0.5), ZERO_SHOT, {DESCRIPTIONS, PROMPTS}),
        (Figures(0.90, 0.915, None), ZERO_SHOT, set()),
        (Figures(0.90, 0.93, None), FEATURES, set()),
        # The digits, where a domain vector is measured at 79 % and FedCGS at 67 %
        (Figures(None, 0.62, 0.80), DESCRIPTIONS, {FEATURES, PROMPTS}),
        (Figures(None, 0.85, 0.40), FEATURES, {DESCRIPTIONS, PROMPTS}),
        # A kit that never saw such images
        (Figures(0.12, 0.80, 0.20), FEATURES, set()),
        (Figures(0.10, 0.11, 0.10), ROUNDS, set()),
        (Figures(None, None, 0.5), DESCRIPTIONS, {PROMPTS}),
        (Figures(0.5, None, None), ZERO_SHOT, set()),
        (Figures(None, 0.15, None), ROUNDS, set()),
    ],
)
def test_the_rule(figures: Figures, first: str, worth: set[str]) -> None:
    verdicts = judge(figures, classes=10)
    assert set(verdicts) == set(KINDS)
    marks = {kind: verdict.verdict for kind, verdict in verdicts.items()}
    assert [kind for kind, mark in marks.items() if mark == FIRST] == [first]
    assert {kind for kind, mark in marks.items() if mark == WORTH} == worth
    assert all(verdict.reason for verdict in verdicts.values())


def test_near_chance_depends_on_the_number_of_classes() -> None:
    """30 % of two classes are nothing, and of ten, knowledge."""
    share = Figures(None, None, 0.30)
    assert judge(share, classes=10)[DESCRIPTIONS].verdict == FIRST
    assert judge(share, classes=4)[DESCRIPTIONS].verdict == NOT_WORTH
    head = Figures(None, 0.45, None)
    assert judge(head, classes=4)[FEATURES].verdict == NOT_WORTH
    assert judge(head, classes=5)[FEATURES].verdict == FIRST


def test_without_any_figure_nothing_is_known() -> None:
    assert {v.verdict for v in judge(Figures(), 10).values()} == {UNKNOWN}


def test_figures_are_means_over_the_clients_that_have_them() -> None:
    clients = [Figures(None, 0.2, 0.5), Figures(0.9, 0.4, None), Figures(0.7, None, None)]
    pooled = pool(clients)
    assert (pooled.zero_shot, pooled.head, pooled.diffusion) == pytest.approx((0.8, 0.3, 0.5))
    assert pool([]) == Figures()


def test_every_method_is_of_a_kind() -> None:
    kinds = {name: kind_of(method) for name, method in METHODS.items()}
    assert kinds["prompts-only"] == PROMPTS
    assert kinds["fedcgs"] == kinds["fedpft"] == FEATURES
    assert kinds["domain-vector"] == kinds["prompts-domain"] == kinds["votes"] == DESCRIPTIONS
    assert kinds["feddf"] == ROUNDS
    assert kinds["fedlmg"] == "classifiers"
    assert kinds["local"] == kinds["ceiling"] == "reference"


def test_the_run_that_measures_has_no_methods_settings() -> None:
    """Settings of a defense, a codec or a sealing key would not fit a run that trains nothing."""
    settings = {
        "method": "feddeo",
        "defense": "label-consistency",
        "payload-codec": "int8",
        "feddeo.epochs": 7,
        "data.partition": "label",
        "num-clients": 3,
        "synthesis.prompt": "an emoji of a {class}",
    }
    resolve_config([settings])
    asked = measurement(settings)
    config, _ = resolve_config([asked])
    assert config.advise
    assert config.job_id.startswith("advise-s0-")
    assert config.num_clients == 3
    assert config.data.partition == "label"
    assert config.synthesis.prompt == "an emoji of a {class}"
    assert (config.method, config.defense, config.payload_codec) == ("local", "off", "raw")
    with pytest.raises(ConfigError, match=r"epsilon = 2.0: the figures of osfl advise are exact"):
        measurement({"epsilon": 2.0})


@pytest.mark.slow
def test_the_table_has_every_method_with_its_costs(home: Path, tiny_kit: Path) -> None:
    """Uploads are the dry run's; a method that the settings do not fit says why."""
    overrides = {"kit": str(tiny_kit), "num-clients": 2, "method": "votes"}
    rows = advise_methods(overrides, {"a": Figures(None, 0.62, 0.80)}, simulated=True)
    by_method = {row.method: row for row in rows}
    assert set(METHODS) - {"mixed"} == set(by_method)
    assert rows[0].method == "domain-vector"
    assert [row.method for row in rows if row.verdict.verdict == FIRST] == ["domain-vector"]
    assert {by_method[name].verdict.verdict for name in ("feddeo", "fedcgs")} == {WORTH}
    config, _ = resolve_config(
        ["configs/recommended.toml", {**overrides, "method": "fedcgs", "num-clients": 2}]
    )
    default = next(iter(placeholder_clients(config).values()))
    assert by_method["fedcgs"].upload == upload_bytes("client-0", default)
    assert by_method["prompts-only"].upload == by_method["prompts-only"].compute == 0
    assert by_method["fedavg"].upload > 10 * by_method["fedcgs"].upload
    assert "unCLIP" in by_method["feddisc"].problem or by_method["feddisc"].upload
    text = markdown({"a": Figures(None, 0.62, 0.80)}, ["b"], rows)
    assert "| domain-vector | first choice |" in text
    assert "- withheld by their sites: b\n" in text
    assert "- zero-shot accuracy (CLIP): none\n" in text


@pytest.mark.slow
def test_a_clients_computation_is_its_passes(home: Path, tiny_kit: Path) -> None:
    """Count by hand, from one forward pass; the digits' table measures the same within 7 %."""
    from osfl.models.diffusion import unet_flops

    unet = unet_flops(str(tiny_kit))
    labels = (0, 0, 0, 1, 1, 1)

    def flops(method: str, **settings: object) -> float | None:
        config = parse_run_config(quick(method=method, kit=str(tiny_kit), **settings))
        return client_flops(Client(config, labels))

    once = flops("fedcgs")
    assert once is not None
    assert once > 0
    assert flops("local", classifier__epochs=4) == pytest.approx(3 * 4 * once)
    stepped = {"classifier__steps": 10, "classifier__batch_size": 2}
    assert flops("local", **stepped) == pytest.approx(3 * 10 * 2 / 6 * once)
    assert flops("fedavg", rounds__count=5, rounds__local_epochs=2) == pytest.approx(30 * once)
    assert flops("feddeo", feddeo__epochs=3) == 2 * 3 * 6 * unet
    each = {"feddeo__steps": 5, "feddeo__batch_size": 2}
    assert flops("feddeo", **each) == 2 * 2 * 5 * 2 * unet
    # A class has three images, fewer than a batch
    large = {"feddeo__steps": 5, "feddeo__batch_size": 10}
    assert flops("feddeo", **large) == 2 * 2 * 5 * 3 * unet
    assert flops("votes", votes__draws=3, votes__candidates="a,b") == 3 * 2 * 6 * unet
    assert flops("prompts-only") == flops("prompts-domain") == 0
    assert flops("oscar") is None


def test_a_remote_command_reads_the_figures_from_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="flwr")
    row = {"zero_shot": None, "head": 0.25, "diffusion": 0.5}
    shares = {f"site-{number}": {**row, "head": number / 100} for number in range(70)}
    log_advice(shares, ["other"])
    followed = FollowedRun()
    for record in caplog.records:
        assert followed.read(f"INFO :      {record.getMessage()}")
    assert followed.metrics["advice"] == {"clients": shares, "withheld": ["other"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["epsilon=1.0"], "the figures of osfl advise are exact"),
        (["data.name=folder", "data.root=/nowhere", "data.classes=a,b"], "classifier.init"),
    ],
)
def test_what_cannot_be_asked_is_said(settings: list[str], message: str, tmp_path: Path) -> None:
    command = ["advise", *settings, "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_command_asks_prints_and_saves(osfl, tmp_path: Path, tiny_kit: Path) -> None:  # type: ignore[no-untyped-def]
    settings = (f"kit={tiny_kit}", "num-clients=2", "-o", "data.image-size=16")
    result = osfl("advise", *ONE_AT_A_TIME, *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = (tmp_path / "runs").glob("advise-s0-*")
    clients = json.loads((folder / "advice.json").read_text())["clients"]
    assert sorted(clients) == ["client-0", "client-1"]
    assert "first choice" in (folder / "advice.md").read_text()
    assert "a local head on frozen features: " in result.stdout
