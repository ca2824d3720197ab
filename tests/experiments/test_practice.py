"""benchmarks/practice.py and benchmarks/balance.py: what is drawn, and what is compared."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import balance, practice
from benchmarks.clients import CLIENTS
from osfl.config import RunConfig, parse_run_config
from osfl.models.classifiers import build_classifier, normalise
from osfl.models.diffusion import load_kit
from osfl.payload.kinds import Descriptions, DomainVector
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.util.prompts import DIGITS
from server_app.context import ServerJob
from server_app.methods import prompts_only
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import SyntheticSet
from server_app.synthesis.plan import ImageJob, plan_images
from tests.helpers.settings import quick


def test_the_entropy_of_a_row() -> None:
    """Four equal: ln 4. Two equal and two impossible: ln 2. One certain: 0."""
    rows = torch.tensor([[5.0, 5, 5, 5], [3, 3, -1e4, -1e4], [0, 1e4, 0, 0]])
    assert practice.entropy(rows).tolist() == pytest.approx([math.log(4), math.log(2), 0])


@pytest.mark.filterwarnings("ignore:There are modules in")
def test_a_prediction_goes_where_the_model_is_unsure(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """e' = e - s sqrt(1 - a) grad H, and dx0hat/dz is taken for sqrt(a): by finite differences."""
    kit = load_kit(tiny_kit, dtype=torch.float64)
    torch.manual_seed(0)
    model = build_classifier("resnet18", 10, True).double().eval().requires_grad_(False)
    jobs = plan_images("m", 0, {"a": [3]}, 2)
    c = torch.randn(2, *kit.text([""]).shape[1:], dtype=torch.float64)
    z = torch.randn(2, *kit.latent_shape, dtype=torch.float64)
    t = torch.tensor(400)
    a = kit.alphas_cumprod[400].double()
    found: dict[float, torch.Tensor] = {}

    def denoise(kit: Any, noise: Any, steps: int, predict: Any) -> torch.Tensor:
        found[scale] = predict(z, t).detach()
        return z

    monkeypatch.setattr(practice, "denoise", denoise)
    for scale in (0.0, 3.0):
        practice.unsure(kit, jobs, c, model, 2.0, scale, 5)
    e = found[0.0]
    e0 = kit.eps(z, t, kit.text([""]).expand(2, -1, -1), None)
    e1 = kit.eps(z, t, c, None)
    assert torch.allclose(e, e0 + 2 * (e1 - e0), atol=1e-9)
    x0 = (z - (1 - a).sqrt() * e) / a.sqrt()

    def unsureness(moved: torch.Tensor) -> float:
        x = kit.decode(x0 + a.sqrt() * moved).clamp(-1, 1)
        p = model(normalise(x, model)).softmax(dim=1)
        return float(-(p * p.log()).sum())

    way = torch.randn_like(z)
    step = 1e-6
    slope = (unsureness(step * way) - unsureness(-step * way)) / (2 * step)
    moved = ((found[3.0] - e) * way).sum().item()
    assert moved == pytest.approx(-3 * (1 - a).sqrt().item() * slope, rel=1e-3)
    assert abs(moved) > 1e-6


@pytest.mark.filterwarnings("ignore:There are modules in")
def test_without_a_scale_it_is_guidance_alone(tiny_kit: Path) -> None:
    kit = load_kit(tiny_kit)
    model = build_classifier("resnet18", 10, True).eval().requires_grad_(False)
    jobs = plan_images("m", 0, {"a": [3]}, 2)
    c = kit.text(["an image of three"] * 2)
    drawn = practice.unsure(kit, jobs, c, model, 2.0, 0.0, 3)
    assert torch.equal(drawn, prompts_only.sample(kit, jobs, c, 2.0, 3))


def test_the_last_images_are_those_that_the_first_are_not() -> None:
    pixels = torch.arange(60, dtype=torch.uint8).view(-1, 1, 1, 1)
    images = SyntheticSet(pixels, torch.arange(60) // 30, ("a",) * 60)
    last = practice.last_images(images)
    assert last.pixels.flatten().tolist() == [*range(15, 30), *range(45, 60)]
    assert last.labels.tolist() == [0] * 15 + [1] * 15
    assert last.clients == ("a",) * 30


def test_balance_compares_as_many_images_and_steps(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class is held by all six clients, another by one: 7 x 30 = 210 images. Balanced, 180 of
    each: 360. Plain with as many: 360 / 7 = 51 of each, 357 in all. 627 steps of 32: 90 epochs of
    7 batches, and 52 of 12.
    """
    held: dict[str, list[str]] = {f"client-{k}": [DIGITS[0]] for k in range(6)}
    held["client-2"].append(DIGITS[1])
    taken = {
        client: Descriptions(tuple(names), torch.zeros(len(names), 1, 1))
        for client, names in held.items()
    }
    trained: list[tuple[int, int]] = []

    class Half:
        @staticmethod
        def run(job: ServerJob, payloads: Any) -> dict[str, Any]:
            trained.append((len(plan_held_classes(job, payloads)), job.config.global_model.epochs))
            return {"FT": type("Model", (), {"model": None})()}

    def score(config: RunConfig, model: object, number: int) -> float:
        return 10.0 * number

    monkeypatch.setattr(balance, "WORK", home)
    monkeypatch.setattr(balance, "sent", lambda settings: taken)
    monkeypatch.setattr(balance, "server_half", lambda method: Half)
    monkeypatch.setattr(balance, "accuracy", score)
    assert [balance.cell(row, 0) for row in balance.ROWS] == [(25.0, 210), (25.0, 360), (25.0, 357)]
    assert trained == [(210, 90), (360, 52), (357, 52)]
    # Made once
    assert balance.cell("plain", 0) == (25.0, 210)
    assert len(trained) == 3


@pytest.mark.filterwarnings("ignore:There are modules in")
def test_the_last_half_is_drawn_with_each_clients_own_vector(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client k's vector is all 100 (k + 1); a prompt's encoding is far below that."""
    names = {client: k for k, client in enumerate(CLIENTS)}
    taken = {
        client: DomainVector(DIGITS[:2], torch.full((8, 32), 100.0 * (k + 1)), None)
        for client, k in names.items()
    }
    given = {"method": "domain-vector", "kit": str(tiny_kit), "num_clients": 6}
    config = parse_run_config(quick(**given, synthesis__images_per_class=30))
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), CLIENTS)
    seen: list[ImageJob] = []
    prompts = load_kit(tiny_kit).text(config.prompts(job.classes))

    def unsure(kit: Any, jobs: Any, c: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.extend(jobs)
        for image, row in zip(jobs, c, strict=True):
            own = prompts[image.label] + 100.0 * (names[image.client] + 1)
            assert torch.allclose(row, own, atol=1e-4)
        assert rest[1:] == (config.domain_vector.guidance, 5.0, config.synthesis.steps)
        return torch.zeros(len(jobs), 3, 32, 32, dtype=torch.uint8)

    monkeypatch.setattr(practice, "vectors", lambda: taken)
    monkeypatch.setattr(practice, "unsure", unsure)
    model = build_classifier("resnet18", 10, True)
    images = practice.second_half(job, model, 5.0)
    assert {image.index for image in seen} == set(range(15, 30))
    assert len(images.labels) == 6 * 2 * 15
    assert images.labels.tolist() == [image.label for image in seen]
    assert images.clients == tuple(image.client for image in seen)
    # The learner itself is still to be trained on, or not
    assert all(weight.requires_grad for weight in model.parameters())


def test_the_table_of_balance_is_paired_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above plain by 1 and 3: 2, and with one degree of freedom 12.7 times its standard error 1."""
    figures = {
        ("plain", 0): (70.0, 100),
        ("plain", 1): (72.0, 110),
        ("class-balance", 0): (71.0, 150),
        ("class-balance", 1): (75.0, 170),
        ("plain, as many images", 0): (71.0, 150),
        ("plain, as many images", 1): (75.0, 170),
    }
    monkeypatch.setattr(balance, "cell", lambda row, seed: figures[row, seed])
    monkeypatch.setattr(balance, "WORK", tmp_path)
    monkeypatch.setattr(balance, "TABLES", tmp_path)
    monkeypatch.setattr("sys.argv", ["balance", "--seeds", "0,1"])
    balance.main()
    plain, balanced, as_many = json.loads((tmp_path / "balance.json").read_text())["rows"]
    assert plain["average"] == "71.0"
    assert plain["to plain"] == ""
    assert balanced["images"] == "160"
    assert balanced["to plain"] == "+2.0 [-10.7, +14.7]"
    assert balanced["to plain, as many images"] == "+0.0 [+0.0, +0.0]"
    assert as_many["to plain, as many images"] == ""
