"""The shipped kit, and the recipe that made it."""

import json
import shutil
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.progress import Progress
from sklearn.svm import SVC
from torch.utils.flop_counter import FlopCounterMode

from osfl import kit_training
from osfl.config import ConfigError, parse_run_config
from osfl.data import digits
from osfl.data.render import STYLES
from osfl.kit.check import check_kit
from osfl.kit.kits import find_kit, kit_license
from osfl.kit.used_parts import kit_parts
from osfl.kit_training import card
from osfl.methods import TINY_DECODER
from osfl.models import classifiers, encoders
from osfl.models.diffusion import load_kit, load_tiny_decoder, load_unclip_pipeline
from osfl.settings import resolve_config
from osfl.tables.table_file import read_table
from osfl.util.pixels import LEVELS, to_float
from server_app.methods.prompts_only import sample
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import plan_images
from tests.helpers.settings import ROOT, SHIPPED_TABLES, quick
from tests.helpers.small_digits import public_digits


def folder_digest(folder: Path) -> str:
    """SHA-256 over the weights and settings in a folder."""
    digest = sha256()
    for file in sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".safetensors")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def grey(pixels: torch.Tensor) -> np.ndarray:
    """[N, 3, 32, 32] uint8 to standardised grey vectors [N, 1024]."""
    flat = pixels.float().mean(dim=1).flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1)).numpy()


def samples(
    kit_folder: Path, template: str, per_class: int, steps: int
) -> tuple[torch.Tensor, np.ndarray]:
    kit = load_kit(kit_folder)
    jobs = plan_images("test", 0, {"a": range(10)}, per_class)
    prompts = kit.text([template.format(name) for name in digits.CLASSES])
    return sample(kit, jobs, prompts[[job.label for job in jobs]], 3.0, steps), np.array(
        [job.label for job in jobs]
    )


def test_the_kit_is_found_small_and_stable_diffusion_shaped(shipped_kit: Path) -> None:
    assert Path(find_kit("digits")) == shipped_kit
    unclip = Path(find_kit("digits-unclip"))
    assert (
        sum(
            f.stat().st_size for kit in (shipped_kit, unclip) for f in kit.rglob("*") if f.is_file()
        )
        < 60e6
    )
    assert (
        json.loads((unclip / "model_index.json").read_text())["_class_name"]
        == "StableUnCLIPImg2ImgPipeline"
    )
    index = json.loads((shipped_kit / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert {"vae", "unet", "text_encoder", "tokenizer", "scheduler"} <= set(index)
    card = (shipped_kit / "README.md").read_text()
    assert "samples.png" in card
    assert (shipped_kit / "samples.png").is_file()


@pytest.fixture(scope="module")
def reader() -> SVC:
    """A support vector machine that learned from real public photographs."""
    public = public_digits(digits.load_split)
    rows = [i for i, domain in enumerate(public.domains) if domain == "photo"][:1500]
    real = public.select(rows)
    return SVC(C=10).fit(grey(torch.from_numpy(real.images).permute(0, 3, 1, 2)), real.labels)


@pytest.mark.slow
def test_class_prompts_give_legible_photographs(shipped_kit: Path, reader: SVC) -> None:
    pixels, labels = samples(shipped_kit, "an image of {}", 4, 20)
    assert reader.score(grey(pixels), labels) > 0.85


@pytest.mark.slow
def test_few_steps_are_as_legible(shipped_kit: Path, reader: SVC) -> None:
    """Two of LCM with the kit's few-step weights, which two steps without them are not."""
    jobs = plan_images("test", 0, {"a": range(10)}, 8)
    labels = np.array([job.label for job in jobs])

    def score(guidance: float, **settings: object) -> float:
        synthesis = parse_run_config(quick(**settings)).synthesis
        kit = load_engine(str(shipped_kit), torch.device("cpu"), synthesis)
        prompts = kit.text([f"an image of {name}" for name in digits.CLASSES])
        pixels = sample(kit, jobs, prompts[labels], guidance, 2)
        return reader.score(grey(pixels), labels)

    assert score(1.0, synthesis__lora="kit", synthesis__solver="lcm") > 0.85
    assert score(2.0) < 0.7


@pytest.mark.slow
def test_style_prompts_give_the_style(shipped_kit: Path) -> None:
    """Cheap marks of three styles.

    Neon is dark, clipart is colourful, an infograph's rim is bright.
    """

    def marks(style: str) -> tuple[float, float, float]:
        pixels = samples(shipped_kit, f"a {style} of a {{}}", 2, 10)[0].float() / 255
        saturation = (pixels.amax(1) - pixels.amin(1)).mean().item()
        return pixels.mean().item(), saturation, pixels[:, :, :3].mean().item()

    by_style = {style: marks(style) for style in STYLES}
    assert min(by_style, key=lambda s: by_style[s][0]) == "neon"
    assert by_style["clipart"][1] > 2 * by_style["photo"][1]
    assert by_style["infograph"][2] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("table", SHIPPED_TABLES, ids=lambda file: file.stem)
def test_the_shipped_kits_hold_what_every_row_of_the_tables_needs(table: Path) -> None:
    needs = set()
    for cell in read_table(table, [], seeds="0").cells():
        config, _ = resolve_config(cell.settings)
        needs.add((config.sampling_kit, tuple(kit_parts(config))))
    for kit, parts in needs:
        check_kit(find_kit(kit), parts)


@pytest.fixture(scope="module")
def seen() -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """(pixels, labels, style numbers) of 120 test images, 20 of each style.

    Scans that no stage of the recipe has seen.
    """
    test = digits.load_split("test").select(range(0, 1800, 15))
    pixels = torch.from_numpy(test.images).permute(0, 3, 1, 2)
    return pixels, test.labels, np.array([STYLES.index(d) for d in test.domains])


def test_captions_are_compared_word_by_word() -> None:
    captions = [
        "an image of a one, neon",
        "a neon of a seven",
        "a neon photo of a two",
        "an image of seventeen",
    ]
    other_styles = [number for number, style in enumerate(STYLES) if style != "neon"]
    labels = np.array([1, 7, 3, 7, *(0 for _ in other_styles)])
    styles = np.array([*(STYLES.index("neon") for _ in captions), *other_styles])
    captions += ["an image" for _ in other_styles]
    shares = card._check_captions(
        lambda pixels: captions, torch.zeros(len(captions), 3, 32, 32), labels, styles
    )  # type: ignore[arg-type]
    assert shares["neon"] == {"digit": 0.5, "style": 0.75, "wrong style": 0.25}


def test_captions_name_the_digit_and_the_style(shipped_kit: Path, seen) -> None:  # type: ignore[no-untyped-def]
    """Photographs are captioned by class alone, as in the corpus; every other style is named."""
    shares = card._check_captions(
        encoders.load_captioner(str(shipped_kit), torch.device("cpu")), *seen
    )
    assert np.mean([share["digit"] for share in shares.values()]) > 0.7
    assert min(share["style"] for style, share in shares.items() if style != "photo") > 0.9
    assert max(share["wrong style"] for share in shares.values()) < 0.1


def test_embeddings_tell_styles_apart_and_unclip_draws_them(shipped_kit: Path, seen) -> None:  # type: ignore[no-untyped-def]
    """An image drawn from an embedding is nearer to it than to the mean embedding of any other
    style.
    """
    pixels, _, styles = seen
    folder = find_kit("digits-unclip")
    encoder = encoders.load_image_encoder(folder, torch.device("cpu"))
    pipe = load_unclip_pipeline(folder)
    embeddings = encoder(pixels)
    means = torch.stack([embeddings[styles == number].mean(0) for number in range(len(STYLES))])
    nearest = torch.cosine_similarity(embeddings[:, None], means, dim=-1).argmax(1)
    assert (nearest.numpy() == styles).mean() > 0.95
    drawn = pipe(
        prompt=[""] * len(STYLES),
        image_embeds=embeddings[
            [int(np.flatnonzero(styles == number)[0]) for number in range(len(STYLES))]
        ],
        noise_level=0,
        num_inference_steps=10,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    again = encoder(torch.from_numpy(drawn * 255).round().to(torch.uint8).permute(0, 3, 1, 2))
    assert torch.cosine_similarity(again[:, None], means, dim=-1).argmax(1).tolist() == list(
        range(len(STYLES))
    )


@pytest.mark.slow
def test_the_tiny_decoder_sees_what_the_autoencoder_sees(shipped_kit: Path, seen) -> None:  # type: ignore[no-untyped-def]
    """For two fifths of the operations.

    Images that no stage has seen, nearer to D's of the same latents than to D's of any others.
    """
    kit = load_kit(shipped_kit)
    small = load_tiny_decoder(str(shipped_kit), kit, TINY_DECODER)
    flops = []
    with torch.no_grad():
        latents = kit.encode(to_float(seen[0]))[0]
        outputs = []
        for decode in (kit.decode, lambda z: small.decode(z).sample):
            with FlopCounterMode(display=False) as counter:
                outputs.append(decode(latents).clamp(-1, 1).flatten(1))
            flops.append(counter.get_total_flops())
    of_kit, of_small = outputs
    assert flops[1] < 0.4 * flops[0]
    assert LEVELS * (of_small - of_kit).abs().mean() < 10
    assert torch.cdist(of_small, of_kit).argmin(1).tolist() == list(range(len(of_kit)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    sorted((ROOT / "kits" / "digits" / "classifiers").glob("*.safetensors")),
    ids=lambda file: file.stem,
)
def test_initialisations_know_turns_and_styles(file: Path, seen) -> None:  # type: ignore[no-untyped-def]
    """The pretext task: which of four turns (here none), and which of six styles."""
    model = classifiers.build_classifier(file.stem, 4 * len(STYLES), small_stem=True)
    classifiers.load_initial_weights(model, file)
    guess = classifiers.compute_logits(model, seen[0], torch.device("cpu")).argmax(1).numpy()
    assert (guess % len(STYLES) == seen[2]).mean() > 0.95
    assert (
        guess // len(STYLES) == 0
    ).mean() > 0.45  # of other digits than it learned from; chance is 1/4


def test_tokens_are_numbered_the_same_every_time() -> None:
    from osfl.kit_training.untrained import new_text_encoder

    captions = [*digits.CLASSES, "an image of a", "in style, photo"]
    first_tokenizer, second_tokenizer = (
        new_text_encoder(captions, 16, 16).tokenizer for _ in range(2)
    )
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    tokens = first_tokenizer.convert_ids_to_tokens(
        first_tokenizer("an image of seven")["input_ids"]
    )
    assert tokens == [
        "<|startoftext|>",
        "an</w>",
        "image</w>",
        "of</w>",
        "seven</w>",
        "<|endoftext|>",
    ]


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_kit_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints after every step; broken off in the denoiser and again in the first classifier.

    Resumed.
    """
    few = {
        "public": public_digits(digits.load_split).select(range(200)),
        "test": digits.load_split("test").select(range(0, 1800, 45)),
    }
    monkeypatch.setattr(digits, "load_split", few.__getitem__)
    check = partial(card.check_kit, per_prompt=2, per_domain=2, steps=1)
    checks = []

    def check_once(*args) -> dict:  # type: ignore[no-untyped-def]
        if not checks:
            checks.append(check(*args))
        return checks[0]  # of equal weights, as is shown below

    monkeypatch.setattr(card, "check_kit", check_once)
    stages = (
        "vae",
        "denoiser",
        "classifier",
        "image_encoder",
        "captioner",
        "unclip",
        "tiny_decoder",
        "lora",
    )
    short = {f"{name}_steps": 1 for name in stages} | {f"{name}_batch": 4 for name in stages}
    recipe = replace(kit_training.Recipe(), classifiers=("resnet18", "shufflenet_v2_x1_0"), **short)  # type: ignore[arg-type]

    def train(out: Path, work: Path, base: Path | None = None) -> None:
        with Progress(disable=True) as progress:
            kit_training.train_kit(out, work, recipe, "cpu", progress, base)

    quiet = tmp_path / "quiet"
    rough = tmp_path / "rough"
    train(quiet, tmp_path / "work-1")
    save = torch.save
    calls = []

    def breaking(*args, **kwargs):  # type: ignore[no-untyped-def]
        save(*args, **kwargs)
        calls.append(1)
        if len(calls) in (2, 9):  # before the checkpoint is renamed
            raise Interrupted

    monkeypatch.setattr(torch, "save", breaking)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train(rough, tmp_path / "work-2")
    train(rough, tmp_path / "work-2")
    # vae, denoiser twice, image encoder, captioner, unclip, small decoder, few-step weights, the
    # first classifier twice, the second
    assert len(calls) == 11
    for part in (
        "unet",
        "vae",
        "text_encoder",
        "classifiers",
        "image_encoder",
        "captioner",
        "tiny_decoder",
        "lora",
    ):
        assert folder_digest(rough / part) == folder_digest(quiet / part), part
    assert folder_digest(tmp_path / "rough-unclip") == folder_digest(tmp_path / "quiet-unclip")
    with pytest.raises(ConfigError, match="its checkpoints are of another recipe"):
        kit_training.train_kit(
            tmp_path / "other", tmp_path / "work-2", replace(recipe, vae_steps=2), "cpu", Progress()
        )
    for kit in (quiet, tmp_path / "quiet-unclip"):
        assert (kit / "samples.png").is_file()
        assert load_kit(kit).image_size == 32
    assert kit_license(str(rough)) == kit_license(str(tmp_path / "rough-unclip")) == "apache-2.0"
    page = (rough / "README.md").read_text()
    assert all(
        f"| {name} | 1 of 4 | " in page
        for name in (*stages[:2], "classifier-shufflenet_v2_x1_0", *stages[3:])
    )
    assert "| infograph | " in page
    assert load_tiny_decoder(str(quiet), load_kit(quiet), TINY_DECODER).config.latent_channels == 4

    # On a finished kit only what it lacks is trained
    base = tmp_path / "base"
    shutil.copytree(quiet, base)
    shutil.copytree(tmp_path / "quiet-unclip", tmp_path / "base-unclip")
    (base / "classifiers" / "shufflenet_v2_x1_0.safetensors").unlink()
    log = json.loads((base / "training.json").read_text())
    del log["stages"]["classifier-shufflenet_v2_x1_0"]
    (base / "training.json").write_text(json.dumps(log))
    calls[:] = [0] * 10
    train(tmp_path / "grown", tmp_path / "work-3", base)
    assert len(calls) == 10 + 1
    for name in ("grown", "grown-unclip"):
        parts = {
            file.relative_to(tmp_path / name) for file in (tmp_path / name).rglob("*.safetensors")
        }
        assert all(
            folder_digest(tmp_path / name / p.parent)
            == folder_digest(tmp_path / name.replace("grown", "quiet") / p.parent)
            for p in parts
        )
    page = (tmp_path / "grown" / "README.md").read_text()
    assert all(
        f"| {name} | 1 of 4 | " in page
        for name in ("captioner", "unclip", "classifier-shufflenet_v2_x1_0")
    )
