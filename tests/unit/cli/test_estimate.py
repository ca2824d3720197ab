"""`osfl run --dry-run`: what it says is what the run then does, and what cannot work is refused."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from client_app.app import app as client_app
from client_app.privacy.mechanisms import private_mean
from osfl.cli import dry_run, estimate, training_costs
from osfl.cli.main import app as cli
from osfl.cli.run_clients import Client
from osfl.config import parse_run_config
from osfl.models.diffusion import load_kit, timesteps
from osfl.util.costs import Cost
from server_app.app import run_job
from server_app.costs import NoisyMean, noisy_mean, rows_per_image
from server_app.expected import shapes_of_kit
from server_app.synthesis import engine, images
from tests.helpers.gaussian_mechanism import least_sigma
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick

SAMPLES_NOTHING = ("local", "fedavg")


@pytest.mark.slow
@pytest.mark.flops
@pytest.mark.parametrize(
    ("method", "codec"),
    [
        *[(method, "raw") for method in ("prompts-only", "prompts-domain", "feddeo", "fedbip")],
        *[(method, "raw") for method in ("oscar-pooled", "fedlmg", *SAMPLES_NOTHING)],
        *(("espresso", "int8"), ("domain-vector", "int4"), ("local", "int4")),
    ],
)
def test_the_estimate_equals_sent_bytes_and_synthesized_images(
    method: str, codec: str, home: Path, tiny_kit: Path
) -> None:
    settings = {"payload_codec": codec, "synthesis__images_per_class": 2}
    config = quick(method=method, kit=str(tiny_kit), job_id="job", **settings)
    estimated = estimate.estimate_run(parse_run_config(config))
    nodes = [{"partition-id": k, "num-partitions": 2} for k in range(2)]
    run_job(LoopGrid(client_app, config, nodes), parse_run_config(config), "job")
    metrics = json.loads((home / "runs" / "job" / "metrics.json").read_text())
    assert set(estimated.uploads) == set(metrics["clients"])
    for client, record in metrics["clients"].items():
        sent = record["upload_bytes"]
        # Deflating takes up to a third of these
        assert sent * 0.95 <= estimated.uploads[client] <= sent * (1.05 if codec == "raw" else 1.5)
    assert estimated.images == metrics["server"]["synthetic_images"]
    # FedDEO is the default
    assert estimated.changed.get("method", "feddeo") == method
    folder = [file for file in (home / "runs" / "job").rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in folder)
    assert size < estimated.disk_bytes
    if method in SAMPLES_NOTHING:
        assert estimated.sampling is estimated.folder_bytes is estimated.memory_mb is None
    else:
        assert estimated.sampling is not None
        assert estimated.sampling.seconds > 0
        assert estimated.sampling.flops > 0
        assert estimated.folder_bytes == pytest.approx(size, rel=0.2)
        # The model is most of the folder
        rows = [file for file in folder if "units" in file.parts or file.name == "manifest.jsonl"]
        files = [*rows, *(file for file in folder if file.suffix == ".png")]
        mean_size = sum(file.stat().st_size for file in files) / estimated.images
        image_bytes = estimate.image_bytes(parse_run_config(config))
        assert image_bytes == pytest.approx(mean_size, rel=0.3)


@pytest.mark.slow
def test_images_cost_unet_rows_guidance_and_decoding(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten images of two steps: 4 rows of a guided image, or 8 with FedLMG's gradients."""
    units = {"unet": Cost(1.0, 2.0), "decoding": Cost(10.0, 20.0)}
    batches: dict[str, int] = {}

    def cost_of(name: str, kit: object, most: int) -> Cost:
        batches[name] = most
        return units[name]

    monkeypatch.setattr(engine, "unet_cost", partial(cost_of, "unet"))
    monkeypatch.setattr(engine, "decoding_cost", partial(cost_of, "decoding"))
    guidance = {"oscar": Cost(0.0, 0.0), "fedlmg": Cost(100.0, 200.0)}
    monkeypatch.setattr(estimate, "guidance_cost", lambda config, *_: guidance[config.method])
    settings = {"kit": str(tiny_kit), "synthesis__unit_size": 60, "synthesis__batch_size": 0}
    oscar, fedlmg = (
        parse_run_config(quick(method=name, **settings)) for name in ("oscar", "fedlmg")
    )
    assert estimate.sampling_cost(oscar, 10, []) == Cost(40 + 100, 80 + 200)
    # Two rows of each of the ten images, of which a unit could have sixty
    assert batches == {"unet": 20, "decoding": 10}
    assert estimate.sampling_cost(fedlmg, 10, []) == Cost(80 + 1100, 160 + 2200)
    # Half of the images are OSCAR's, half FedLMG's
    mixed = parse_run_config({**quick(method="mixed", **settings), "mixed.methods": "oscar,fedlmg"})
    clients = [Client(config, (0,)) for config in (oscar, fedlmg)]
    assert estimate.sampling_cost(mixed, 10, clients) == Cost(60 + 600, 120 + 1200)


@pytest.mark.parametrize(
    ("method", "settings", "rows"),
    [
        # Two branches in two steps
        ("prompts-only", {}, 4),
        # The prompt's branch is there when its scale is
        ("feddeo", {"feddeo__guidance_text": 1.0}, 6),
        # One with the scale 1 is alone
        ("prompts-only", {"prompts_only__guidance": 1.0}, 2),
        ("feddeo", {"feddeo__guidance_description": 1.0}, 2),
        ("feddisc", {}, 6),
        # And back through the UNet; FedCADO's edit of the noise beside it
        ("fedlmg", {}, 8),
        ("fedlmg", {"fedlmg__gradient": "x0"}, 4),
        ("fedcado", {}, 12),
        # A zig-zag at one of the two steps: two branches down, one back
        ("espresso", {"espresso__z_threshold": 1}, 4 + 3),
        ("espresso", {"espresso__z_threshold": 1, "espresso__guidance": 1.0}, 2 + 2),
        ("espresso", {"espresso__z_sampling": False}, 4),
    ],
)
def test_rows_of_an_image(method: str, settings: dict, rows: int, tiny_kit: Path) -> None:
    config = parse_run_config(quick(method=method, kit=str(tiny_kit), **settings))
    assert rows_per_image(config, timesteps(load_kit(tiny_kit).scheduler, 2)) == rows


@pytest.mark.slow
@pytest.mark.flops
def test_judging_is_part_of_the_samplings_cost(
    tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients with ten classes each; of a class's seven images six are looked at, with ten
    prompts and at three timesteps. To draw one takes two branches in two steps.
    """
    monkeypatch.setattr(engine, "decoding_cost", lambda *_: Cost(0.0, 0.0))
    common = {"method": "feddeo", "kit": str(tiny_kit), "synthesis__images_per_class": 7}
    plain = estimate.estimate_run(parse_run_config(quick(**common)))
    judging = estimate.estimate_run(
        parse_run_config(quick(**common, defense="label-consistency-report"))
    )
    assert plain.sampling is not None
    assert judging.sampling is not None
    drawn = 2 * 10 * 7 * 2 * 2
    judged = 2 * 10 * 6 * 10 * 3
    share = judging.sampling.flops / plain.sampling.flops
    assert share == pytest.approx((drawn + judged) / drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("room", "pixels"), [(6000, 0), (61440, 61440)])
def test_the_server_holds_payloads_twice_and_images_for_which_there_is_room(
    room: int, pixels: int, tiny_kit: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients' images of ten classes have 2 * 10 * 4 * 3 * 16 * 16 = 61,440 bytes."""
    monkeypatch.setattr(estimate, "sampling_cost", lambda *_: Cost(0.0, 0.0))
    monkeypatch.setattr(training_costs, "training_cost", lambda *_: None)
    monkeypatch.setattr(estimate, "peak_memory_mb", lambda: 1000.0)
    monkeypatch.setattr(images, "memory_for_pixels", lambda: room)
    settings = quick(method="feddeo", kit=str(tiny_kit), synthesis__images_per_class=4)
    estimated = estimate.estimate_run(parse_run_config(settings))
    sent = sum(estimated.uploads.values())
    assert sent > 1000
    assert estimated.memory_mb is not None
    assert 1e6 * estimated.memory_mb == pytest.approx(1e9 + 2 * sent + pixels, abs=1)


def arguments(kit: Path, **overrides: object) -> list[str]:
    from tests.helpers.system_tools import quick_arguments

    return ["run", "--dry-run", *quick_arguments(kit, **overrides)]


@pytest.mark.slow
def test_a_dry_run_shows_and_leaves_nothing(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    result = CliRunner().invoke(cli, arguments(tiny_kit, method="feddeo", seed=7))
    assert result.exit_code == 0, result.output
    assert "seed" in result.output
    assert "a client sends " in result.output
    assert "a client computes at most " in result.output
    assert "the server synthesizes 20 images" in result.output
    assert "the training of the global model on them: " in result.output
    assert "workers like it" not in result.output
    assert "the run's folder has about " in result.output
    assert re.search(r"the server's process needs about [\d.e+]+ [MG]B of memory", result.output)
    assert not (home / "runs").exists()
    # How much deflating saves is known when it is done
    deflated = CliRunner().invoke(cli, arguments(tiny_kit, method="feddeo", payload_codec="int4"))
    assert "a client sends at most " in deflated.output
    cost = Cost(2e12, 80.0)
    config = parse_run_config(quick(kit=str(tiny_kit), synthesis__workers=4))
    expected = "about 1.3 min on this machine; on 4 workers like it 20 s"
    assert dry_run._sampling_line(config, cost).endswith(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kit": "/nowhere"}, "no such folder"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"num_clients": 7}, "this client has no data"),
        ({"max_payload_mb": 0.001}, "max-payload-mb = 0.001"),
        ({"global_model__architecture": "resnet19"}, "resnet19"),
        ({"data__name": "folder", "data__classes": "a,b", "data__root": "/nowhere"}, "/nowhere"),
    ],
)
def test_an_impossible_run_is_refused(
    overrides: dict, message: str, home: Path, tiny_kit: Path
) -> None:
    kit = overrides.pop("kit", tiny_kit)
    result = CliRunner().invoke(cli, arguments(kit, method="feddeo", **overrides))
    assert result.exit_code == 1, result.output
    assert message in result.output


def test_a_run_larger_than_the_disk_is_refused(home: Path, tiny_kit: Path) -> None:
    huge = arguments(tiny_kit, method="feddeo", synthesis__images_per_class=1_000_000)
    result = CliRunner().invoke(cli, [*huge, "num-clients=100000"])
    assert result.exit_code == 1
    assert "MB free; this run needs about" in result.output


# ---- What a guarantee takes ----


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        # The digits' kit has 16 tokens of 64 numbers, and features of 512
        ({"method": "oscar"}, 16 * 64),
        ({"method": "oscar-pooled"}, 64),
        ({"method": "feddeo"}, 16 * 64),
        ({"method": "feddeo", "feddeo__tokens": "all"}, 64),
        ({"method": "domain-vector"}, 16 * 64),
        ({"method": "domain-vector", "domain_vector__tokens": "all"}, 64),
        ({"method": "fedpft", "classifier__architecture": "resnet18"}, 2 * 512),
        ({"method": "votes"}, 0),
        ({"method": "fedlmg"}, 0),
    ],
)
def test_the_numbers_that_get_noise(settings: dict, numbers: int) -> None:
    config = parse_run_config(quick(**settings, kit="digits"))
    mean = noisy_mean(config)
    assert (mean.dimensions if mean else 0) == numbers
    assert mean is None or mean.over_classes == (config.method != "domain-vector")


def test_feddiscs_noise_is_on_an_embeddings_own_half(tiny_unclip: Path) -> None:
    config = parse_run_config(quick(method="feddisc", feddisc__kit=str(tiny_unclip)))
    assert noisy_mean(config) == NoisyMean(shapes_of_kit(str(tiny_unclip))[2] // 2)


def clients_of(method: str, counts: dict[str, tuple[int, ...]], **settings: Any) -> dict:
    """Make clients with these numbers of images of class 0, 1 and so on."""
    config = parse_run_config(quick(method=method, kit="digits", **settings))
    return {
        name: Client(config, tuple(label for label, n in enumerate(ns) for _ in range(n)))
        for name, ns in counts.items()
    }


COUNTS = {"a": (40, 5), "b": (0, 9), "c": (3, 30)}


def test_the_worst_mean_is_of_the_smallest_class() -> None:
    """Noise of 64 numbers has 8 times the length of one's: 2 sigma / n of the limit, by 8."""
    noise = estimate.worst_noise(clients_of("oscar-pooled", COUNTS, epsilon=2.0, delta=1e-4))
    needed = math.ceil(2 * least_sigma(2.0, 1e-4) * 8)
    assert noise == estimate.Noise("c", 3, needed)


def test_a_domains_mean_is_of_all_its_images() -> None:
    noise = estimate.worst_noise(clients_of("domain-vector", COUNTS, epsilon=1.0))
    assert noise is not None
    assert (noise.client, noise.images) == ("b", 9)


def test_a_site_that_asks_for_more_has_more_noise() -> None:
    clients = clients_of("oscar-pooled", {"a": (10,), "b": (10,)}, epsilon=2.0)
    config = replace(clients["b"].config, epsilon=1.0)
    clients["b"] = replace(clients["b"], config=config)
    noise = estimate.worst_noise(clients)
    assert noise is not None
    assert (noise.client, noise.break_even_images) == (
        "b",
        math.ceil(2 * least_sigma(1.0, 1e-5) * 8),
    )
    assert estimate.worst_noise(clients_of("oscar-pooled", COUNTS)) is None
    assert estimate.worst_noise(clients_of("votes", COUNTS, epsilon=1.0)) is None


def test_noise_is_as_long_as_the_limit_where_the_mean_is_of_so_many() -> None:
    """The mechanism itself: images that are all their center, and 1,024 numbers."""
    clients = clients_of("oscar", {"a": (10,)}, epsilon=4.0)
    noise = estimate.worst_noise(clients)
    assert noise is not None
    rows = torch.zeros(noise.break_even_images, 16, 64)
    noised = private_mean(rows, rows[0], 3.0, 4.0, 1e-5)
    assert noised.norm().item() == pytest.approx(3.0, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "drowned"), [(1.0, True), (16.0, False)])
def test_a_dry_run_says_what_noise_leaves(
    home: Path, monkeypatch: pytest.MonkeyPatch, epsilon: float, drowned: bool
) -> None:
    """With a hundred images per client one vector keeps most with 16; with three of a class
    nothing.
    """
    monkeypatch.chdir(home)
    overrides = ["domain-vector.tokens=all", f"epsilon={epsilon}"]
    arguments = ["run", "--dry-run", "method=domain-vector", "num-clients=2", *overrides]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "the noise is as large as the clipping bound (clip-norm)" in result.output
    assert "trained on separately, in 60 passes (domain-vector.epochs); steps" in result.output
    assert ("that mean is mostly noise" in result.output) == drowned
    assert "but not its list of classes, the number of images, or" in result.output


def test_simulated_clients_of_a_mixed_run_may_read_what_the_user_may(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kit elsewhere than where kits are kept; sites of a federation must allow its folder."""
    monkeypatch.delenv("OSFL_ALLOWED_DIRS")
    settings = {**quick(method="mixed", kit=str(tiny_kit)), "mixed.methods": "votes"}
    estimated = estimate.estimate_run(parse_run_config(settings), simulated=True)
    assert set(estimated.kinds.values()) == {"votes"}
