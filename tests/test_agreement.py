"""Whether a client's images show its classes: what the kit is asked, who is doubted, who is left
out, and what a run says.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import analytic
import numpy as np
import pytest
import torch
from analytic import CLASSES, analytic_kit, numbers, random_pixels
from conftest import quick
from test_round import metrics, start
from torch.nn import functional as F

from osfl.config import ConfigError, parse_run_config
from osfl.models.diffusion import Kit, load_kit
from osfl.models.kits import find_kit
from osfl.payloads import Classifier, Descriptions
from osfl.prompts import DIGITS
from osfl.seeds import generator_of
from server_app import agreement, driver
from server_app.agreement import Doubt, agreements, doubted, knows, latents_of, without_doubted
from server_app.job import ServerJob
from server_app.methods import feddeo, fedlmg
from server_app.synthesis.images import SyntheticSet, render

SHAPE = (analytic.CHANNELS, analytic.SIDE, analytic.SIDE)


# ---- What the kit is asked ----


def test_errors_are_the_denoisers_at_three_times_of_the_schedule() -> None:
    """t = 300, 500 and 700. Of three images and two prompts, by NumPy."""
    kit = analytic_kit()
    latents, _ = kit.encode(random_pixels(3).double() / 127.5 - 1)
    prompts = kit.text(["an image of zero", "an image of two"])
    found = agreement.denoising_errors(kit, latents, prompts, 7)
    source = generator_of(7, "agreement")
    a = analytic.alphas_cumprod()
    mean, _ = analytic.encode(random_pixels(3).numpy())
    expected = np.zeros((3, 2))
    for t in (300, 500, 700):
        noise = numbers(torch.randn(SHAPE, generator=source))
        z = np.sqrt(a[t]) * mean + np.sqrt(1 - a[t]) * noise
        for column in range(2):
            e = analytic.eps(z, a[t], analytic.mu(numbers(prompts[column : column + 1])))
            expected[:, column] += ((noise - e) ** 2).mean(axis=(1, 2, 3)) / 3
    np.testing.assert_allclose(numbers(found), expected, rtol=1e-5)
    assert np.abs(expected[:, 0] - expected[:, 1]).min() > 1e-4


def test_errors_are_the_same_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = analytic_kit()
    latents = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1)).double()
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    together = agreement.denoising_errors(kit, latents, prompts, 0)
    monkeypatch.setattr(agreement, "BATCH", 3)
    torch.testing.assert_close(agreement.denoising_errors(kit, latents, prompts, 0), together)


@pytest.mark.parametrize("side", [8, 4, 16])
def test_images_of_any_size_come_at_the_kits(side: int) -> None:
    """Brought to [-1, 1], and to eight pixels, by interpolation; then the encoder's mean."""
    pixels = random_pixels(2, side)
    images = pixels.double() / 127.5 - 1
    if side != 8:
        images = F.interpolate(images, (8, 8), mode="bilinear", antialias=True)
    cells = F.avg_pool2d(images, 2).numpy()
    mixed = np.einsum("oc,bchw->bohw", analytic.ENCODER, cells)
    expected = (mixed + analytic.ENCODER_BIAS[:, None, None]) * analytic.SCALING
    np.testing.assert_allclose(numbers(latents_of(analytic_kit(), pixels)), expected, atol=1e-5)


def numbered(owners: str, labels: str) -> SyntheticSet:
    """Images whose every pixel is their number; owners and labels are a character each."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    return SyntheticSet(pixels.clone(), torch.tensor(list(map(int, labels))), tuple(owners))


def job_of(robust: str = "exclude", **more: Any) -> Any:
    """A job that keeps what it says and stores."""
    kept: dict[str, Any] = {"said": [], "agreements": None}
    status = SimpleNamespace(
        warn_of=kept["said"].append,
        phase=lambda *_: None,
        advance=lambda *_: None,
    )
    folder = SimpleNamespace(store_agreements=lambda found: kept.update(agreements=found))
    return SimpleNamespace(
        classes=CLASSES,
        clients=("a", "b", "c"),
        device=torch.device("cpu"),
        config=parse_run_config(quick(method="feddeo", robust=robust, **more)),
        status=status,
        folder=folder,
        kept=kept,
    )


PAYLOADS = dict.fromkeys("abc", Descriptions(CLASSES, torch.zeros(4, 12, 8)))


def test_agreement_is_how_often_the_own_prompt_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two images a class. Class 0 of a: 2 of 3 and 0 of 3 rivals; equal errors are no win."""
    errors = {
        (0, 1): [[0.2, 0.1, 0.3, 0.4], [0.9, 0.1, 0.2, 0.3]],
        (2,): [[0.1, 0.2, 0.3, 0.1]],
        (3, 4): [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.5]],
    }
    asked = []

    def latents(kit: Kit, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[:, 0, 0, 0].double()

    def denoising_errors(
        kit: Kit, seen: torch.Tensor, prompts: torch.Tensor, seed: int
    ) -> torch.Tensor:
        asked.append(prompts)
        return torch.tensor(errors[tuple(seen.int().tolist())])

    kit = analytic_kit()
    monkeypatch.setattr(agreement, "load_kit", lambda *_: kit)
    monkeypatch.setattr(agreement, "latents_of", latents)
    monkeypatch.setattr(agreement, "denoising_errors", denoising_errors)
    # The sixth image is a public domain's
    images = numbered("aaabb", "00133")
    images = replace(
        images,
        pixels=torch.cat([images.pixels, images.pixels[:1]]),
        labels=torch.cat([images.labels, images.labels[:1]]),
        clients=(*images.clients, "public.oil"),
    )
    found = agreements(job_of(), PAYLOADS, images)
    assert found == {
        "a": {0: pytest.approx(2 / 6), 1: pytest.approx(2 / 3)},
        "b": {3: pytest.approx(1.0)},
    }
    # The own prompt comes first, and every other class's behind
    prompts = kit.text(parse_run_config(quick()).prompts(CLASSES))
    for label, seen in zip((0, 1, 3), asked, strict=True):
        torch.testing.assert_close(seen[0], prompts[label])
        rivals = {tuple(row.flatten().tolist()) for row in seen[1:]}
        others = [prompts[other] for other in range(4) if other != label]
        assert rivals == {tuple(row.flatten().tolist()) for row in others}


def test_no_more_images_and_rivals_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first six images of a class, and nine other classes by chance, the same every time."""
    asked = []

    def denoising_errors(
        kit: Kit, seen: torch.Tensor, prompts: torch.Tensor, seed: int
    ) -> torch.Tensor:
        asked.append((len(seen), prompts))
        return torch.ones(len(seen), len(prompts))

    names = tuple(f"class {number}" for number in range(20))
    encoded = torch.arange(20.0).view(20, 1, 1)
    kit = replace(analytic_kit(), text=lambda prompts: encoded[: len(prompts)])
    monkeypatch.setattr(agreement, "load_kit", lambda *_: kit)
    monkeypatch.setattr(agreement, "denoising_errors", denoising_errors)
    job = job_of()
    job.classes = names
    for _ in range(2):
        agreements(job, PAYLOADS, numbered("a" * 9, "3" * 9))
    (first, prompts), (_, again) = asked
    chosen = prompts.flatten().int().tolist()
    assert first == 6
    assert chosen[0] == 3
    assert len(set(chosen)) == 10
    assert torch.equal(prompts, again)


# ---- Who is doubted ----


def of(*shares: float) -> dict[int, float]:
    return dict(enumerate(shares))


def test_a_client_nearer_to_chance_than_to_the_others_median_is_doubted() -> None:
    """The others' median is 0.9, the middle 0.7."""
    others = {"a": of(0.9, 0.9), "b": of(0.8, 1.0), "c": of(1.0, 1.0)}
    assert doubted({**others, "d": of(0.9, 0.52)}) == []
    (doubt,) = doubted({**others, "d": of(0.9, 0.48)})
    assert doubt == Doubt("d", None, pytest.approx(0.69))
    # Not its own share is in that median
    two = {"a": of(0.95), "b": of(0.7)}
    assert doubted(two) == [Doubt("b", None, 0.7)]


def test_a_class_below_chance_is_doubted_of_a_client_that_is_not() -> None:
    found = {"a": of(0.9, 0.9, 0.9), "b": of(1.0, 1.0, 0.49), "c": of(1.0, 0.5, 1.0)}
    assert doubted(found) == [Doubt("b", 2, 0.49)]
    assert doubted({**found, "c": of(0.4, 0.3, 0.2)})[-1].label is None


@pytest.mark.parametrize("others", [of(0.74), of(0.5), of(0.1)])
def test_a_kit_that_does_not_know_the_classes_judges_nobody(others: dict[int, float]) -> None:
    found = {"a": others, "b": others, "c": others, "d": of(0.0)}
    assert doubted(found) == []
    assert not knows([others[0]] * 3)
    assert knows([0.76, 0.2, 0.8])


def test_a_client_alone_is_held_against_nobody() -> None:
    assert doubted({"a": of(0.1)}) == []


# ---- What is left out ----


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, float]]:
    """What the kit sees: a lies, and class 1 of c is of something else."""
    # The others' median is 0.95 for a, with c's mean of 0.767, and the middle 0.725
    found = {"a": of(0.4, 0.5), "b": of(1.0, 0.9), "c": of(1.0, 0.3, 1.0), "d": of(1.0, 1.0)}
    monkeypatch.setattr(agreement, "agreements", lambda *_: found)
    return found


IMAGES = ("aabbccc", "0101012")


@pytest.mark.parametrize("robust", ["off", "report", "exclude"])
def test_what_trains_is_what_robust_says(robust: str, seen: dict[str, dict[int, float]]) -> None:
    job = job_of(robust)
    payloads, images = without_doubted(job, PAYLOADS, numbered(*IMAGES))
    numbers_left = images.pixels[:, 0, 0, 0].tolist()
    left = robust == "exclude"
    assert numbers_left == ([2, 3, 4, 6] if left else list(range(7)))
    assert images.labels.tolist() == [int(IMAGES[1][row]) for row in numbers_left]
    assert images.clients == tuple(IMAGES[0][row] for row in numbers_left)
    assert set(payloads) == (set("bc") if left else set("abc"))
    if robust == "off":
        assert job.kept == {"said": [], "agreements": None}
        return
    fate = "its images are left out" if left else "they were used all the same"
    assert job.kept["said"] == [
        "a: the kit does not see its classes in its images (agreement 0.45, chance 0.5); " + fate,
        "c: the kit does not see its class 'one' in its images (agreement 0.30, chance 0.5); "
        + fate,
    ]
    stored = job.kept["agreements"]
    assert {client: about["doubted"] for client, about in stored.items()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
    }
    assert stored["b"] == {
        "agreement": pytest.approx(0.95),
        "classes": {"zero": 1.0, "one": 0.9},
        "doubted": False,
    }


def test_a_kit_that_knows_nothing_is_said(seen: dict[str, dict[int, float]]) -> None:
    for client in seen:
        seen[client] = of(0.5, 0.6)
    job = job_of()
    _, images = without_doubted(job, PAYLOADS, numbered(*IMAGES))
    assert len(images.labels) == 7
    assert job.kept["said"] == [
        "robust = 'exclude' found nothing out: the kit does not tell these classes apart"
    ]


def test_who_is_left_out_teaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedLMG's training gets the payloads of the others alone."""
    trained: list[tuple[set[str], int]] = []

    def train(job: Any, payloads: dict[str, Any], images: SyntheticSet) -> dict[str, Any]:
        trained.append((set(payloads), len(images.labels)))
        return {}

    def believed(job: Any, payloads: Any, images: SyntheticSet) -> Any:
        return {"b": payloads["b"]}, replace(images, labels=images.labels[:2])

    monkeypatch.setattr(driver, "render", lambda *_: numbered(*IMAGES))
    monkeypatch.setattr(driver, "without_doubted", believed)
    classifier = Classifier(CLASSES, "resnet18", {})
    driver.synthesise_and_train(
        job_of(),
        dict.fromkeys("ab", classifier),
        fedlmg._sampler,  # type: ignore[arg-type]
        plan=lambda job, payloads: [],
        train=train,
    )
    assert trained == [({"b"}, 2)]


# ---- On the real kit ----


def honest(kit: Kit, config: Any) -> Descriptions:
    """What a client would send whose images look like the kit's own."""
    return Descriptions(DIGITS, kit.text(config.prompts(DIGITS)).float())


def rolled(payload: Descriptions) -> Descriptions:
    return replace(payload, vectors=payload.vectors.roll(1, 0))


@pytest.mark.parametrize(
    "lie", [rolled, lambda payload: replace(payload, vectors=1000 * payload.vectors)]
)
def test_the_digits_kit_finds_a_liar(
    lie: Callable[[Descriptions], Descriptions], home: Path, run_folder: Any
) -> None:
    settings = {
        "method": "feddeo",
        "num_clients": 3,
        "robust": "exclude",
        "synthesis__images_per_class": 2,
        "synthesis__steps": 5,
        "synthesis__unit_size": 60,
        "synthesis__batch_size": 60,
        "data__image_size": 32,
        "feddeo__guidance_description": 2.0,
        "feddeo__guidance_text": 0.0,
    }
    config = parse_run_config(quick(**settings))
    payload = honest(load_kit(find_kit(config.kit)), config)
    payloads = {"client-0": payload, "client-1": lie(payload), "client-2": payload}
    job = run_folder(config, tuple(payloads))
    images = render(
        job,
        driver.plan_held(job, payloads),
        lambda device: feddeo.sampler(job, device, payloads),
    )
    kept, left = without_doubted(job, payloads, images)
    assert set(kept) == set(left.clients) == {"client-0", "client-2"}
    assert len(left.labels) >= 36
    stored = json.loads((job.folder.path / "agreement.json").read_text())
    assert [about["doubted"] for about in stored.values()].count(True) >= 1
    assert stored["client-1"]["agreement"] < 0.65
    assert min(stored[client]["agreement"] for client in kept) > 0.85


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[[Any, tuple[str, ...]], ServerJob]:
    """Makes a job with a folder of its own."""
    from osfl.run_folder.layout import RunFolder
    from osfl.run_folder.status import Status

    def made(config: Any, clients: tuple[str, ...]) -> ServerJob:
        folder = RunFolder(tmp_path)
        for client in clients:
            folder.store_payload(client, client.encode(), {})
        return ServerJob(config, folder, Status(folder.path), clients)

    return made


# ---- A whole run ----


def test_a_run_reports_what_the_kit_sees(home: Path, tiny_kit: Path) -> None:
    """This kit was never trained: it tells no classes apart, and says so."""
    start(quick(method="feddeo", kit=str(tiny_kit), robust="report"))
    found = metrics(home)
    assert set(found["agreement"]) == {"client-0", "client-1"}
    for about in found["agreement"].values():
        assert set(about["classes"]) == set(DIGITS)
        assert about["agreement"] == pytest.approx(np.mean(list(about["classes"].values())))
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "Do the images show their classes?" in page
    (warning,) = found["warnings"]
    assert "the kit does not tell these classes apart" in warning
    assert "looking for liars" in {phase["phase"] for phase in found["phases"]}


def test_a_run_that_was_not_asked_says_nothing(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-domain", kit=str(tiny_kit)))
    assert metrics(home)["agreement"] == {}
    assert not (home / "runs" / "job" / "agreement.json").exists()
    assert "Do the images" not in (home / "runs" / "job" / "report.html").read_text()


@pytest.mark.parametrize("method", ["prompts-only", "ceiling", "fedcgs", "local", "fedavg"])
def test_without_images_of_a_client_there_is_nothing_to_look_at(method: str) -> None:
    with pytest.raises(ConfigError, match="robust = 'report': .* take off"):
        parse_run_config(quick(method=method, robust="report"))
