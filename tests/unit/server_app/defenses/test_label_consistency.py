"""Label consistency: the kit's passes, flagged and excluded clients, and the report."""

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
from osfl.models import diffusion_classifier
from osfl.models.diffusion import Kit, load_kit
from osfl.payload.kinds import Classifier, Descriptions
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import DROPPED, Status
from osfl.util.prompts import DIGITS
from server_app import pipeline
from server_app.context import ServerJob
from server_app.defenses import filters, label_consistency
from server_app.defenses.label_consistency import (
    Flag,
    Flags,
    encode_images,
    filter_images,
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
    errors = diffusion_classifier.denoising_errors(kit, latents, prompts, chance())
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
    np.testing.assert_allclose(numbers(errors), expected, rtol=1e-5)
    assert np.abs(expected[:, 0] - expected[:, 1]).min() > 1e-4


def test_errors_are_the_same_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = analytic_kit()
    latents = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1)).double()
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    together = diffusion_classifier.denoising_errors(kit, latents, prompts, chance())
    monkeypatch.setattr(diffusion_classifier, "BATCH", 3)
    parts = diffusion_classifier.denoising_errors(kit, latents, prompts, chance())
    torch.testing.assert_close(parts, together)


def test_a_batch_that_does_not_fit_into_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """This GPU holds one image; where it holds none, that is the end."""
    kit = analytic_kit()
    latents = torch.randn(5, *SHAPE, generator=chance()).double()
    prompts = kit.text([f"an image of {name}" for name in CLASSES[:3]])
    together = diffusion_classifier.denoising_errors(kit, latents, prompts, chance())
    eps = Kit.eps
    most = 1

    def small(kit: Kit, z: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        if len(z) > most:
            raise torch.OutOfMemoryError
        return eps(kit, z, *more)

    monkeypatch.setattr(Kit, "eps", small)
    halved = diffusion_classifier.denoising_errors(kit, latents, prompts, chance())
    torch.testing.assert_close(halved, together)
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        diffusion_classifier.denoising_errors(kit, latents, prompts, chance())


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


def job_of(defense: str = "label-consistency", **more: Any) -> Any:
    """A job that keeps what it says and stores."""
    record: dict[str, Any] = {"said": [], "agreements": {}, "stamps": []}
    status = SimpleNamespace(
        add_warning=record["said"].append,
        phase=lambda *_: None,
        advance=lambda *_: None,
        stamp=lambda *stamp: record["stamps"].append(stamp),
    )
    folder = SimpleNamespace(
        stored_consistency_scores=lambda inputs: {},
        store_consistency_scores=record["agreements"].__setitem__,
    )
    return SimpleNamespace(
        clients=CLIENTS,
        classes=CLASSES,
        kit="a kit",
        device=torch.device("cpu"),
        config=parse_run_config(quick(method="feddeo", defense=defense, **more)),
        status=status,
        folder=folder,
        kept=record,
        mixing=None,
    )


CLIENTS = ("a", "b", "c")


def test_a_share_of_wins_by_hand() -> None:
    """Two images against three others: 2 and 0 wins of 6. An equal error is half a win."""
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
    requests: Asked = []

    def errors(
        kit: Kit, numbers: torch.Tensor, prompts: torch.Tensor, source: torch.Generator
    ) -> torch.Tensor:
        requests.append((numbers.int().tolist(), prompts))
        result = torch.ones(len(numbers), len(prompts))
        result[:, 0] = torch.where(numbers.int() % 2 == 0, 0.5, 1.5)
        return result

    monkeypatch.setattr(
        label_consistency, "encode_images", lambda kit, pixels: pixels[:, 0, 0, 0].double()
    )
    monkeypatch.setattr(label_consistency, "denoising_errors", errors)
    return requests


def test_each_clients_class_is_asked_for(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no public domain's. The own prompt comes first, and every other class's behind."""
    kit = analytic_kit()
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    images = numbered("aaabbp", "001330")
    images = replace(images, clients=(*images.clients[:5], "public.oil"))
    scores = score_label_consistency(job_of(), images)
    assert scores == {"a": {0: 0.5, 1: 1.0}, "b": {3: 0.5}}
    assert [rows for rows, _ in asked] == [[0, 1], [2], [3, 4]]
    prompts = kit.text(parse_run_config(quick()).prompts(CLASSES))
    for label, (_, asked_prompts) in zip((0, 1, 3), asked, strict=True):
        order = [label, *(contrast for contrast in range(4) if contrast != label)]
        torch.testing.assert_close(asked_prompts, prompts[order])


def test_images_and_contrast_classes_are_drawn_anew_each_time(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of thirty images, and nine of nineteen other classes: no score can tell which."""
    encoded = torch.arange(20.0).view(20, 1, 1)
    kit = replace(analytic_kit(), text=lambda prompts: encoded[: len(prompts)])
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    job = job_of()
    job.classes = tuple(f"class {number}" for number in range(20))
    for _ in range(8):
        score_label_consistency(job, numbered("a" * 30, "3" * 30))
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
def test_a_dry_run_counts_the_kits_passes(
    images: int, classes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images by prompts, at three timesteps."""
    kit = analytic_kit()
    eps = Kit.eps
    row_counts: list[int] = []

    def counted(kit: Kit, z: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        row_counts.append(len(z))
        return eps(kit, z, *more)

    kit = replace(kit, text=lambda prompts: analytic_kit().text([""]).expand(len(prompts)))
    monkeypatch.setattr(label_consistency, "load_engine", lambda *_: kit)
    monkeypatch.setattr(Kit, "eps", counted)
    job = job_of()
    job.classes = tuple(f"class {number}" for number in range(classes))
    score_label_consistency(job, numbered("a" * images, "3" * images))
    assert sum(row_counts) == rows
    assert unet_rows(images, classes) == rows


@pytest.mark.parametrize(
    "given",
    [
        {"synthesis__cache_interval": 2},
        {"synthesis__compile": "on"},
        {"synthesis__lora": "kit", "synthesis__solver": "lcm"},
    ],
)
def test_probe_images_are_sampled_without_approximations(
    given: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few-step weights predict another noise; the run's precision and attention stay."""
    settings: list[Any] = []

    def load(source: str, device: torch.device, given: Any) -> Kit:
        settings.append((source, given))
        return analytic_kit()

    monkeypatch.setattr(label_consistency, "load_engine", load)
    score_label_consistency(job_of(synthesis__dtype="bfloat16", **given), numbered("a", "0"))
    ((source, options),) = settings
    assert source == "a kit"
    assert (options.cache_interval, options.lora, options.compile) == (1, "", "off")
    assert options.dtype == "bfloat16"


# ---- Flags ----


def of(*shares: float) -> dict[int, float]:
    return dict(enumerate(shares))


HONEST = {"a": of(0.9, 0.9), "b": of(0.8, 1.0), "c": of(1.0, 1.0)}


def test_a_client_nearer_to_chance_than_to_the_others_is_flagged() -> None:
    """d's classes have the others' medians 0.9 and 1.0: mean 0.95, middle 0.725."""
    assert flag_clients({**HONEST, "d": of(0.9, 0.56)}) == Flags((), ())
    (flag,) = flag_clients({**HONEST, "d": of(0.9, 0.54)}).flags
    assert flag == Flag("d", None, pytest.approx(0.72))
    # Not its own share is in that median
    assert flag_clients({"a": of(0.95), "b": of(0.7)}) == Flags((Flag("b", None, 0.7),), ("a",))


def test_a_class_below_chance_is_flagged_of_a_client_that_is_not() -> None:
    scores = {"a": of(0.9, 0.9, 0.9), "b": of(1.0, 1.0, 0.49), "c": of(1.0, 0.5, 1.0)}
    assert flag_clients(scores).flags == (Flag("b", 2, 0.49),)
    # All classes of a malicious client are flagged together
    malicious = {**scores, "d": of(0.4, 0.3, 0.2)}
    assert flag_clients(malicious).flags == (
        Flag("b", 2, 0.49),
        Flag("d", None, pytest.approx(0.3)),
    )


def test_a_class_that_the_kit_does_not_know_flags_no_client() -> None:
    """The kit recognizes class 1 of none of six honest clients: it is not scored."""
    scores = {f"client-{number}": of(0.97, 0.97, 0.45) for number in range(6)}
    assert flag_clients(scores) == Flags((), ())
    # Nor does it count for a client that its other classes flag
    (flag,) = flag_clients({**scores, "client-0": of(0.6, 0.7, 1.0)}).flags
    assert flag == Flag("client-0", None, pytest.approx(0.65))


def test_classes_are_compared_with_the_same_classes_of_others() -> None:
    """c's class is hard, for d as well; no other client has e's."""
    scores = {"a": {0: 0.98}, "b": {0: 0.97}, "c": {1: 0.8}, "d": {1: 0.82}, "e": {2: 0.3}}
    assert flag_clients(scores) == Flags((), ("e",))


def test_one_scored_class_of_several_flags_no_client() -> None:
    """Two clients, each weak in one class: what each is good at the other cannot vouch for."""
    scores = {"a": of(1.0, 0.3), "b": of(0.3, 1.0)}
    assert set(flag_clients(scores).flags) == {Flag("a", 1, 0.3), Flag("b", 0, 0.3)}
    # With most of them scored it does: 0.3 and 0.5 of two in three
    scores = {"a": of(0.3, 0.5, 1.0), "b": of(0.9, 0.9, 0.2), "c": of(0.9, 0.9, 0.3)}
    assert flag_clients(scores).flags[0] == Flag("a", None, pytest.approx(0.4))


@pytest.mark.parametrize("others", [of(0.75), of(0.5), of(0.1)])
def test_a_kit_that_does_not_know_the_classes_scores_no_client(others: dict[int, float]) -> None:
    scores = {"a": others, "b": others, "c": others, "d": of(0.0)}
    assert flag_clients(scores) == Flags((), ("a", "b", "c", "d"))


def test_half_of_all_clients_may_be_malicious() -> None:
    """Three malicious clients of six are flagged, and no honest one; of four of six, none is."""
    malicious = {f"malicious-{number}": of(0.4, 0.4) for number in range(3)}
    honest = {f"honest-{number}": of(0.95, 0.95) for number in range(3)}
    verdict = flag_clients({**honest, **malicious})
    assert {flag.client for flag in verdict.flags} == set(malicious)
    assert set(verdict.unscored) == set(honest)
    fewer = {name: honest[name] for name in ("honest-0", "honest-1")}
    majority_result = flag_clients({**fewer, **malicious, "malicious-3": of(0.4, 0.4)})
    assert majority_result.flags == ()


def test_a_single_client_is_compared_with_no_other() -> None:
    assert flag_clients({"a": of(0.1)}) == Flags((), ("a",))


# ---- What is left out ----


@pytest.fixture
def kit_scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, float]]:
    """The kit's view: a is malicious, class 1 of c shows something else, and no other holds d's."""
    scores = {"a": of(0.4, 0.5), "b": of(1.0, 0.9), "c": {0: 1.0, 1: 0.3, 3: 1.0}, "d": {2: 1.0}}
    scores |= {"e": of(1.0, 0.9), "f": {**of(1.0, 0.9), 3: 1.0}}
    monkeypatch.setattr(label_consistency, "score_label_consistency", lambda *_: scores)
    return scores


IMAGES = ("aabbcccd", "01010132")


@pytest.mark.parametrize("defense", ["off", "label-consistency-report", "label-consistency"])
def test_the_defense_decides_which_images_train(
    defense: str, kit_scores: dict[str, dict[int, float]]
) -> None:
    job = job_of(defense)
    drawn = numbered(*IMAGES)
    images = filters.filter_images(job, drawn)
    payloads = filters.drop_clients_without_images(dict.fromkeys("abc"), drawn, images)  # type: ignore[type-var]
    numbers_left = images.pixels[:, 0, 0, 0].tolist()
    drops_images = defense == "label-consistency"
    assert numbers_left == ([2, 3, 4, 6, 7] if drops_images else list(range(8)))
    assert images.labels.tolist() == [int(IMAGES[1][row]) for row in numbers_left]
    assert images.clients == tuple(IMAGES[0][row] for row in numbers_left)
    assert set(payloads) == (set("bc") if drops_images else set("abc"))
    if defense == "off":
        assert job.kept == {"said": [], "agreements": {}, "stamps": []}
        return
    client_outcome = class_outcome = "they were used nevertheless"
    if drops_images:
        client_outcome, class_outcome = (
            "all its images are dropped",
            "the images of this class are dropped",
        )
    assert job.kept["said"] == [
        "a: suspicious, the kit does not recognize its classes in its images (score 0.45, "
        f"chance 0.5); {client_outcome}",
        "c: suspicious, the kit does not recognize its class 'one' in its images (score 0.30, "
        f"chance 0.5); {class_outcome}",
        f"defense = {defense!r} could not score d: the kit does not know their classes, or too few "
        "other clients hold them",
    ]
    (stored,) = job.kept["agreements"].values()
    flags = {client: record["flagged"] for client, record in stored.items()}
    assert flags == {
        "a": "all classes",
        "b": "",
        "c": "one",
        "d": "not judged",
        "e": "",
        "f": "",
    }
    assert stored["b"]["agreement"] == pytest.approx(0.95)
    assert stored["b"]["classes"] == {"zero": 1.0, "one": 0.9}


def test_all_images_train_if_all_were_flagged(kit_scores: dict[str, dict[int, float]]) -> None:
    """Two clients of three classes, who condemn each other."""
    kit_scores.clear()
    kit_scores |= {"a": of(0.0, 0.9, 0.9), "b": of(0.9, 0.9, 0.0)}
    job = job_of()
    images = filter_images(job, numbered("ab", "00"))
    assert images.clients == ("a", "b")
    assert job.kept["said"][-1].endswith("would leave no image to train on; all were used")


def test_a_resumed_server_scores_the_same_images_once(
    kit_scores: dict[str, dict[int, float]], monkeypatch: pytest.MonkeyPatch, run_folder: Any
) -> None:
    """The kit could answer differently a second time. Other images are scored anew."""
    job = run_folder(
        parse_run_config(quick(method="feddeo", defense="label-consistency")), tuple("abcd")
    )
    first = filter_images(job, numbered(*IMAGES))
    kit_scores["a"] = kit_scores["b"]
    again = filter_images(job, numbered(*IMAGES))
    assert again.clients == first.clients == tuple("bbccd")
    assert torch.equal(again.pixels, first.pixels)
    image_sets = [numbered("aabbccdd", IMAGES[1]), numbered("aabbccdd", "01010130")]
    for images in image_sets:
        assert "a" in filter_images(job, images).clients
    # So is what was damaged
    kit_scores["a"] = of(0.4, 0.5)
    filter_images(job, numbered(*IMAGES))
    file = job.folder.path / "agreement.json"
    inputs = json.loads(file.read_text())["inputs"]
    kit_scores["a"] = kit_scores["b"]
    for damage in ("{", json.dumps({"inputs": inputs, "clients": {"a": {"classes": 7}}})):
        file.write_text(damage)
        assert "a" in filter_images(job, numbered(*IMAGES)).clients


def test_an_excluded_client_teaches_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedLMG's training gets the payloads of the others alone."""
    trained: list[tuple[set[str], int]] = []

    def train(job: Any, payloads: dict[str, Any], images: SyntheticSet) -> dict[str, Any]:
        trained.append((set(payloads), len(images.labels)))
        return {}

    monkeypatch.setattr(pipeline, "synthesize", lambda *_: numbered(*IMAGES))
    monkeypatch.setattr(pipeline, "filter_images", lambda job, images: images.select([2, 3]))
    classifier = Classifier(CLASSES, "resnet18", {})
    job = job_of()
    pipeline.synthesize_and_train(
        job,
        dict.fromkeys("ab", classifier),
        fedlmg.sampler,  # type: ignore[arg-type]
        plan=lambda job, payloads: [],
        train=train,
    )
    assert trained == [({"b"}, 2)]
    assert job.kept["stamps"] == [("a", DROPPED)]


# ---- On the real kit ----


def honest(kit: Kit, config: Any) -> Descriptions:
    """The payload of a client whose images look like the kit's own."""
    return Descriptions(DIGITS, kit.text.states(config.prompts(DIGITS)).float())


def rolled(payload: Descriptions) -> Descriptions:
    return replace(payload, vectors=payload.vectors.roll(1, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [rolled, lambda payload: replace(payload, vectors=1000 * payload.vectors)]
)
def test_the_digits_kit_flags_a_malicious_client(
    attack: Callable[[Descriptions], Descriptions], home: Path, run_folder: Any
) -> None:
    settings = {
        "method": "feddeo",
        "num_clients": 3,
        "defense": "label-consistency",
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
    payloads = {"client-0": payload, "client-1": attack(payload), "client-2": payload}
    job = run_folder(config, tuple(payloads))
    images = synthesize(
        job,
        pipeline.plan_held_classes(job, payloads),
        lambda device: feddeo.sampler(job, device, payloads),
    )
    remainder = filter_images(job, images)
    clients = set(remainder.clients)
    assert clients == {"client-0", "client-2"}
    assert len(remainder.labels) >= 36
    stored = json.loads((job.folder.path / "agreement.json").read_text())
    assert stored["clients"]["client-1"]["flagged"] == "all classes"
    assert stored["clients"]["client-1"]["agreement"] < 0.65
    assert min(stored["clients"][client]["agreement"] for client in clients) > 0.85


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[[Any, tuple[str, ...]], ServerJob]:
    """Makes a job with a folder of its own."""

    def made(config: Any, clients: tuple[str, ...]) -> ServerJob:
        folder = RunFolder(tmp_path)
        for client in clients:
            folder.store_payload(client, client.encode(), {})
        return ServerJob(config, folder, Status(folder.path), clients)

    return made


def test_scores_are_stored_for_these_pixels_labels_and_clients(
    run_folder: Callable[[Any, tuple[str, ...]], ServerJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: list[str] = []

    def stored(folder: RunFolder, name: str) -> dict[str, dict[str, float]]:
        inputs.append(name)
        return {"a": {}}

    monkeypatch.setattr(RunFolder, "stored_consistency_scores", stored)
    job = run_folder(parse_run_config(quick()), ("a", "b"))
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    clients = ("a", "b")
    for images in (
        SyntheticSet(pixels, labels, clients),
        SyntheticSet(pixels + 1, labels, clients),
        SyntheticSet(pixels, labels.flip(0), clients),
        SyntheticSet(pixels, labels, ("b", "a")),
        SyntheticSet(pixels.clone(), labels.clone(), clients),
    ):
        assert label_consistency._stored_or_new_scores(job, images) == {"a": {}}
    assert len(set(inputs)) == 4
    assert inputs[4] == inputs[0]


# ---- A whole run ----


@pytest.mark.slow
def test_a_run_reports_what_the_kit_sees(home: Path, tiny_kit: Path) -> None:
    """This kit was never trained: it knows few classes, and those by chance."""
    start(quick(method="feddeo", kit=str(tiny_kit), defense="label-consistency-report"))
    results = metrics(home)
    assert set(results["agreement"]) == {"client-0", "client-1"}
    warnings = " ".join(results["warnings"])
    for client, record in results["agreement"].items():
        assert set(record["classes"]) == set(DIGITS)
        assert record["agreement"] == pytest.approx(np.mean(list(record["classes"].values())))
        assert (client in warnings) == (record["flagged"] != "")
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "Label consistency of the synthetic images" in page
    assert "scoring label consistency" in {phase["phase"] for phase in results["phases"]}


@pytest.mark.slow
def test_a_run_without_robust_reports_nothing(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-domain", kit=str(tiny_kit)))
    assert metrics(home)["agreement"] == {}
    assert not (home / "runs" / "job" / "agreement.json").exists()
    assert "Label consistency" not in (home / "runs" / "job" / "report.html").read_text()


@pytest.mark.parametrize(
    "method", ["prompts-only", "ceiling", "fedcgs", "local", "fedavg", "feddisc"]
)
def test_a_run_without_synthetic_images_scores_nothing(method: str) -> None:
    with pytest.raises(
        ConfigError, match="defense = 'label-consistency-report'.* set defense = 'off'"
    ):
        parse_run_config(quick(method=method, defense="label-consistency-report"))
