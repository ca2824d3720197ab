"""Whether a client's images show its classes: what the kit is asked, who is doubted, who is left
out, and what a run says.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from osfl.config import ConfigError, parse_run_config
from osfl.kit.kits import find_kit
from osfl.models.diffusion import Kit, load_kit
from osfl.payload.kinds import Classifier, Descriptions
from osfl.util.prompts import DIGITS
from server_app import pipeline
from server_app.context import ServerJob
from server_app.defenses import label_consistency
from server_app.defenses.label_consistency import (
    Flag,
    Flags,
    drop_flagged,
    encode_images,
    flag_clients,
    score_label_consistency,
    unet_rows,
)
from server_app.methods import feddeo, fedlmg
from server_app.synthesis.images import SyntheticSet, synthesize
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, analytic_kit, numbers, random_pixels
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

SHAPE = (analytic.CHANNELS, analytic.SIDE, analytic.SIDE)


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# ---- What the kit is asked ----


def test_errors_are_the_denoisers_at_three_times_of_the_schedule() -> None:
    """t = 300, 500 and 700. Of three images and two prompts, by NumPy."""
    kit = analytic_kit()
    latents, _ = kit.encode(random_pixels(3).double() / 127.5 - 1)
    prompts = kit.text(["an image of zero", "an image of two"])
    found = label_consistency.denoising_errors(kit, latents, prompts, chance())
    source = chance()
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
    together = label_consistency.denoising_errors(kit, latents, prompts, chance())
    monkeypatch.setattr(label_consistency, "BATCH", 3)
    parts = label_consistency.denoising_errors(kit, latents, prompts, chance())
    torch.testing.assert_close(parts, together)


def test_a_batch_that_does_not_fit_into_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """This GPU holds one image; where it holds none, that is the end."""
    kit = analytic_kit()
    latents = torch.randn(5, *SHAPE, generator=chance()).double()
    prompts = kit.text(["an image of zero"])
    together = label_consistency.denoising_errors(kit, latents, prompts, chance())
    eps = Kit.eps
    most = 1

    def small(kit: Kit, z: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        if len(z) > most:
            raise torch.OutOfMemoryError
        return eps(kit, z, *more)

    monkeypatch.setattr(Kit, "eps", small)
    halved = label_consistency.denoising_errors(kit, latents, prompts, chance())
    torch.testing.assert_close(halved, together)
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        label_consistency.denoising_errors(kit, latents, prompts, chance())


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
    np.testing.assert_allclose(numbers(encode_images(analytic_kit(), pixels)), expected, atol=1e-5)


def numbered(owners: str, labels: str) -> SyntheticSet:
    """Images whose every pixel is their number; owners and labels are a character each."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    return SyntheticSet(pixels.clone(), torch.tensor(list(map(int, labels))), tuple(owners))


def job_of(robust: str = "exclude", **more: Any) -> Any:
    """A job that keeps what it says and stores."""
    kept: dict[str, Any] = {"said": [], "agreements": {}}
    status = SimpleNamespace(
        add_warning=kept["said"].append,
        phase=lambda *_: None,
        advance=lambda *_: None,
    )
    folder = SimpleNamespace(
        stored_consistency_scores=lambda inputs: {},
        store_consistency_scores=kept["agreements"].__setitem__,
    )
    return SimpleNamespace(
        classes=CLASSES,
        kit="a kit",
        device=torch.device("cpu"),
        config=parse_run_config(quick(method="feddeo", robust=robust, **more)),
        status=status,
        folder=folder,
        kept=kept,
    )


PAYLOADS = dict.fromkeys("abc", Descriptions(CLASSES, torch.zeros(4, 12, 8)))


def test_a_share_of_wins_by_hand() -> None:
    """Of two images against three others: 2 and 0 wins of 6. An equal error is half a win."""
    errors = torch.tensor([[0.2, 0.1, 0.3, 0.4], [0.9, 0.1, 0.2, 0.3]])
    assert label_consistency.win_rate(errors) == pytest.approx(2 / 6)
    assert label_consistency.win_rate(torch.tensor([[0.1, 0.2, 0.3, 0.1]])) == pytest.approx(
        2.5 / 3
    )
    assert label_consistency.win_rate(torch.ones(4, 3)) == 0.5


Asked = list[tuple[list[int], torch.Tensor]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The numbers of the images and the prompts that the kit is asked for; the first prompt wins
    where an image's number is even.
    """
    seen: Asked = []

    def errors(
        kit: Kit, numbers: torch.Tensor, prompts: torch.Tensor, source: torch.Generator
    ) -> torch.Tensor:
        seen.append((numbers.int().tolist(), prompts))
        found = torch.ones(len(numbers), len(prompts))
        found[:, 0] = torch.where(numbers.int() % 2 == 0, 0.5, 1.5)
        return found

    monkeypatch.setattr(
        label_consistency, "encode_images", lambda kit, pixels: pixels[:, 0, 0, 0].double()
    )
    monkeypatch.setattr(label_consistency, "denoising_errors", errors)
    return seen


def test_each_clients_class_is_asked_for(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no public domain's. The own prompt comes first, and every other class's behind."""
    kit = analytic_kit()
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    images = numbered("aaabbp", "001330")
    images = replace(images, clients=(*images.clients[:5], "public.oil"))
    found = score_label_consistency(job_of(), PAYLOADS, images)
    assert found == {"a": {0: 0.5, 1: 1.0}, "b": {3: 0.5}}
    assert [rows for rows, _ in asked] == [[0, 1], [2], [3, 4]]
    prompts = kit.text(parse_run_config(quick()).prompts(CLASSES))
    for label, (_, seen) in zip((0, 1, 3), asked, strict=True):
        order = [label, *(other for other in range(4) if other != label)]
        torch.testing.assert_close(seen, prompts[order])


def test_some_images_and_rivals_are_drawn_anew_each_time(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of thirty images, and nine of nineteen other classes: nobody can know which."""
    encoded = torch.arange(20.0).view(20, 1, 1)
    kit = replace(analytic_kit(), text=lambda prompts: encoded[: len(prompts)])
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    job = job_of()
    job.classes = tuple(f"class {number}" for number in range(20))
    for _ in range(8):
        score_label_consistency(job, PAYLOADS, numbered("a" * 30, "3" * 30))
    for rows, prompts in asked:
        assert len(set(rows)) == 6
        chosen = prompts.flatten().int().tolist()
        assert chosen[0] == 3
        assert len(set(chosen)) == 10
    assert len({tuple(rows) for rows, _ in asked}) > 4
    assert len({tuple(prompts.flatten().tolist()) for _, prompts in asked}) > 4
    assert len({row for rows, _ in asked for row in rows}) > 15


@pytest.mark.parametrize(
    ("images", "classes", "rows"), [(30, 4, 6 * 4 * 3), (2, 4, 2 * 4 * 3), (30, 20, 6 * 10 * 3)]
)
def test_what_a_dry_run_foretells_is_what_the_kit_is_asked(
    images: int, classes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images by prompts, at three timesteps."""
    kit = analytic_kit()
    eps = Kit.eps
    seen: list[int] = []

    def counted(kit: Kit, z: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        seen.append(len(z))
        return eps(kit, z, *more)

    kit = replace(kit, text=lambda prompts: analytic_kit().text([""]).expand(len(prompts), -1, -1))
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    monkeypatch.setattr(Kit, "eps", counted)
    job = job_of()
    job.classes = tuple(f"class {number}" for number in range(classes))
    score_label_consistency(job, PAYLOADS, numbered("a" * images, "3" * images))
    assert sum(seen) == rows
    assert unet_rows(images, classes) == rows


@pytest.mark.parametrize(
    "given",
    [
        {"synthesis__cache_interval": 2},
        {"synthesis__compile": "on"},
        {"synthesis__lora": "kit", "synthesis__solver": "lcm"},
    ],
)
def test_the_judge_samples_without_short_cuts(
    given: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few-step weights predict another noise; the run's precision and attention stay."""
    settings: list[Any] = []

    def load(source: str, device: torch.device, given: Any) -> Kit:
        settings.append((source, given))
        return analytic_kit()

    monkeypatch.setattr(label_consistency, "load_engine", load)
    score_label_consistency(
        job_of(synthesis__dtype="bfloat16", **given), PAYLOADS, numbered("a", "0")
    )
    ((source, found),) = settings
    assert source == "a kit"
    assert (found.cache_interval, found.lora, found.compile) == (1, "", "off")
    assert found.dtype == "bfloat16"


# ---- Who is doubted ----


def of(*shares: float) -> dict[int, float]:
    return dict(enumerate(shares))


HONEST = {"a": of(0.9, 0.9), "b": of(0.8, 1.0), "c": of(1.0, 1.0)}


def test_a_client_nearer_to_chance_than_to_the_others_is_doubted() -> None:
    """Of d's classes the others' medians are 0.9 and 1.0: mean 0.95, middle 0.725."""
    assert flag_clients({**HONEST, "d": of(0.9, 0.56)}) == Flags((), ())
    (doubt,) = flag_clients({**HONEST, "d": of(0.9, 0.54)}).flags
    assert doubt == Flag("d", None, pytest.approx(0.72))
    # Not its own share is in that median
    assert flag_clients({"a": of(0.95), "b": of(0.7)}) == Flags((Flag("b", None, 0.7),), ("a",))


def test_a_class_below_chance_is_doubted_of_a_client_that_is_not() -> None:
    found = {"a": of(0.9, 0.9, 0.9), "b": of(1.0, 1.0, 0.49), "c": of(1.0, 0.5, 1.0)}
    assert flag_clients(found).flags == (Flag("b", 2, 0.49),)
    # A liar's classes are doubted all at once
    lies = {**found, "d": of(0.4, 0.3, 0.2)}
    assert flag_clients(lies).flags == (Flag("b", 2, 0.49), Flag("d", None, pytest.approx(0.3)))


def test_a_class_that_the_kit_does_not_know_is_nobodys_fault() -> None:
    """Six honest clients, and class 1 is seen of none: nothing of it is judged."""
    found = {f"client-{number}": of(0.97, 0.97, 0.45) for number in range(6)}
    assert flag_clients(found) == Flags((), ())
    # Nor does it count for who is doubted by the other ones
    (doubt,) = flag_clients({**found, "client-0": of(0.6, 0.7, 1.0)}).flags
    assert doubt == Flag("client-0", None, pytest.approx(0.65))


def test_classes_are_held_against_the_same_classes_of_others() -> None:
    """c's class is hard, for d as well; nobody else has e's."""
    found = {"a": {0: 0.98}, "b": {0: 0.97}, "c": {1: 0.8}, "d": {1: 0.82}, "e": {2: 0.3}}
    assert flag_clients(found) == Flags((), ("e",))


def test_one_judged_class_of_several_condemns_no_client() -> None:
    """Two clients, each weak in one class: what each is good at the other cannot vouch for."""
    found = {"a": of(1.0, 0.3), "b": of(0.3, 1.0)}
    assert set(flag_clients(found).flags) == {Flag("a", 1, 0.3), Flag("b", 0, 0.3)}
    # With most of them judged it does: 0.3 and 0.5 of two in three
    found = {"a": of(0.3, 0.5, 1.0), "b": of(0.9, 0.9, 0.2), "c": of(0.9, 0.9, 0.3)}
    assert flag_clients(found).flags[0] == Flag("a", None, pytest.approx(0.4))


@pytest.mark.parametrize("others", [of(0.75), of(0.5), of(0.1)])
def test_a_kit_that_does_not_know_the_classes_judges_nobody(others: dict[int, float]) -> None:
    found = {"a": others, "b": others, "c": others, "d": of(0.0)}
    assert flag_clients(found) == Flags((), ("a", "b", "c", "d"))


def test_half_of_all_may_lie_together() -> None:
    """Three of six: each liar is doubted, and the honest are left alone. Four of six: nobody is."""
    lies = {f"liar-{number}": of(0.4, 0.4) for number in range(3)}
    honest = {f"honest-{number}": of(0.95, 0.95) for number in range(3)}
    verdict = flag_clients({**honest, **lies})
    assert {one.client for one in verdict.flags} == set(lies)
    assert set(verdict.unscored) == set(honest)
    fewer = {name: honest[name] for name in ("honest-0", "honest-1")}
    more = flag_clients({**fewer, **lies, "liar-3": of(0.4, 0.4)})
    assert more.flags == ()


def test_a_client_alone_is_held_against_nobody() -> None:
    assert flag_clients({"a": of(0.1)}) == Flags((), ("a",))


# ---- What is left out ----


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, float]]:
    """What the kit sees: a lies, class 1 of c is of something else, and nobody else has d's."""
    found = {"a": of(0.4, 0.5), "b": of(1.0, 0.9), "c": {0: 1.0, 1: 0.3, 3: 1.0}, "d": {2: 1.0}}
    found |= {"e": of(1.0, 0.9), "f": {**of(1.0, 0.9), 3: 1.0}}
    monkeypatch.setattr(label_consistency, "score_label_consistency", lambda *_: found)
    return found


IMAGES = ("aabbcccd", "01010132")


@pytest.mark.parametrize("robust", ["off", "report", "exclude"])
def test_what_trains_is_what_robust_says(robust: str, seen: dict[str, dict[int, float]]) -> None:
    job = job_of(robust)
    payloads, images = drop_flagged(job, PAYLOADS, numbered(*IMAGES))
    numbers_left = images.pixels[:, 0, 0, 0].tolist()
    left = robust == "exclude"
    assert numbers_left == ([2, 3, 4, 6, 7] if left else list(range(8)))
    assert images.labels.tolist() == [int(IMAGES[1][row]) for row in numbers_left]
    assert images.clients == tuple(IMAGES[0][row] for row in numbers_left)
    assert set(payloads) == (set("bc") if left else set("abc"))
    if robust == "off":
        assert job.kept == {"said": [], "agreements": {}}
        return
    whole = one = "they were used nevertheless"
    if left:
        whole, one = "all its images are dropped", "the images of this class are dropped"
    assert job.kept["said"] == [
        "a: suspicious, the kit does not recognize its classes in its images (score 0.45, "
        f"chance 0.5); {whole}",
        "c: suspicious, the kit does not recognize its class 'one' in its images (score 0.30, "
        f"chance 0.5); {one}",
        f"robust = {robust!r} could not score d: the kit does not know their classes, or too few "
        "other clients hold them",
    ]
    (stored,) = job.kept["agreements"].values()
    doubts = {client: about["doubted"] for client, about in stored.items()}
    assert doubts == {
        "a": "all classes",
        "b": "",
        "c": "one",
        "d": "not judged",
        "e": "",
        "f": "",
    }
    assert stored["b"]["agreement"] == pytest.approx(0.95)
    assert stored["b"]["classes"] == {"zero": 1.0, "one": 0.9}


def test_where_nothing_would_be_left_all_train(seen: dict[str, dict[int, float]]) -> None:
    """Two clients of three classes, who condemn each other."""
    seen.clear()
    seen |= {"a": of(0.0, 0.9, 0.9), "b": of(0.9, 0.9, 0.0)}
    job = job_of()
    payloads, images = drop_flagged(job, PAYLOADS, numbered("ab", "00"))
    assert (set(payloads), len(images.labels)) == (set("abc"), 2)
    assert job.kept["said"][-1].endswith("would leave no image to train on; all were used")


def test_a_server_that_goes_on_judges_the_same_images_once(
    seen: dict[str, dict[int, float]], monkeypatch: pytest.MonkeyPatch, run_folder: Any
) -> None:
    """Even if the kit, asked again, would say something else. Other images are judged anew."""
    job = run_folder(parse_run_config(quick(method="feddeo", robust="exclude")), tuple("abcd"))
    first = drop_flagged(job, PAYLOADS, numbered(*IMAGES))
    seen["a"] = seen["b"]
    again = drop_flagged(job, PAYLOADS, numbered(*IMAGES))
    assert again[0] == first[0]
    assert torch.equal(again[1].pixels, first[1].pixels)
    others = [numbered("aabbccdd", IMAGES[1]), numbered("aabbccdd", "01010130")]
    for images in others:
        payloads, _ = drop_flagged(job, PAYLOADS, images)
        assert set(payloads) == set("abc")
    # So is what was damaged
    seen["a"] = of(0.4, 0.5)
    drop_flagged(job, PAYLOADS, numbered(*IMAGES))
    file = job.folder.path / "agreement.json"
    inputs = json.loads(file.read_text())["inputs"]
    seen["a"] = seen["b"]
    for damage in ("{", json.dumps({"inputs": inputs, "clients": {"a": {"classes": 7}}})):
        file.write_text(damage)
        assert set(drop_flagged(job, PAYLOADS, numbered(*IMAGES))[0]) == set("abc")


def test_who_is_left_out_teaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedLMG's training gets the payloads of the others alone."""
    trained: list[tuple[set[str], int]] = []

    def train(job: Any, payloads: dict[str, Any], images: SyntheticSet) -> dict[str, Any]:
        trained.append((set(payloads), len(images.labels)))
        return {}

    def believed(job: Any, payloads: Any, images: SyntheticSet) -> Any:
        return {"b": payloads["b"]}, replace(images, labels=images.labels[:2])

    monkeypatch.setattr(pipeline, "synthesize", lambda *_: numbered(*IMAGES))
    monkeypatch.setattr(pipeline, "drop_flagged", believed)
    classifier = Classifier(CLASSES, "resnet18", {})
    pipeline.synthesize_and_train(
        job_of(),
        dict.fromkeys("ab", classifier),
        fedlmg.sampler,  # type: ignore[arg-type]
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


@pytest.mark.slow
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
    images = synthesize(
        job,
        pipeline.plan_held_classes(job, payloads),
        lambda device: feddeo.sampler(job, device, payloads),
    )
    kept, left = drop_flagged(job, payloads, images)
    assert set(kept) == set(left.clients) == {"client-0", "client-2"}
    assert len(left.labels) >= 36
    stored = json.loads((job.folder.path / "agreement.json").read_text())
    assert stored["clients"]["client-1"]["doubted"] == "all classes"
    assert stored["clients"]["client-1"]["agreement"] < 0.65
    assert min(stored["clients"][client]["agreement"] for client in kept) > 0.85


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


@pytest.mark.slow
def test_a_run_reports_what_the_kit_sees(home: Path, tiny_kit: Path) -> None:
    """This kit was never trained: it knows few classes, and those by chance."""
    start(quick(method="feddeo", kit=str(tiny_kit), robust="report"))
    found = metrics(home)
    assert set(found["agreement"]) == {"client-0", "client-1"}
    said = " ".join(found["warnings"])
    for client, about in found["agreement"].items():
        assert set(about["classes"]) == set(DIGITS)
        assert about["agreement"] == pytest.approx(np.mean(list(about["classes"].values())))
        assert (client in said) == (about["doubted"] != "")
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "Label consistency of the synthetic images" in page
    assert "scoring label consistency" in {phase["phase"] for phase in found["phases"]}


@pytest.mark.slow
def test_a_run_that_was_not_asked_says_nothing(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-domain", kit=str(tiny_kit)))
    assert metrics(home)["agreement"] == {}
    assert not (home / "runs" / "job" / "agreement.json").exists()
    assert "Label consistency" not in (home / "runs" / "job" / "report.html").read_text()


@pytest.mark.parametrize(
    "method", ["prompts-only", "ceiling", "fedcgs", "local", "fedavg", "feddisc"]
)
def test_without_images_of_a_client_there_is_nothing_to_look_at(method: str) -> None:
    with pytest.raises(ConfigError, match="robust = 'report'.* set robust = 'off'"):
        parse_run_config(quick(method=method, robust="report"))
