"""Evaluate a photograph kit on held-out public images, and write its model card."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from torch import nn

from osfl.config import ConfigError
from osfl.kit_training.photographs.contrast import Encoders
from osfl.kit_training.photographs.corpus import PublicCorpus
from osfl.kit_training.photographs.recipe import PhotographRecipe, Words
from osfl.models import diffusion
from osfl.util.pixels import to_float
from osfl.util.prompts import fill_prompt
from osfl.util.seeds import generator_of

BATCH = 64
STEPS = 25
GUIDANCE = 3.0
# Prompts of the sample sheet, with the number of samples of each word
SHEET = {
    "a photo of a {class}": 4,
    "a painting of a {class}": 2,
    "a cartoon of a {class}": 2,
    "a sketch of a {class}": 2,
}
MAX_SHEET_WORDS = 12
# Number of losses that the card shows of each stage
POINTS = 10


@torch.no_grad()
def check_photograph_kit(
    out: Path,
    encoders: Encoders,
    corpus: PublicCorpus,
    recipe: PhotographRecipe,
    progress: Progress,
) -> dict[str, Any]:
    """Measure the figures of the card, and write `samples.png`.

    Args:
        out: the folder of the finished kit.
        encoders: its encoders, on the CPU.

    Returns:
        `zero_shot`, `prompts` (`_sample_sheet`) and `distance` (FID and KID), as `training.json`
        has them.
    """
    encoders.clip.float()
    held_out = corpus.held_out[: recipe.samples]
    images = corpus.images(held_out)
    checks: dict[str, Any] = {"zero_shot": zero_shot(encoders, corpus, recipe)}
    pipe = diffusion.load_pipeline(out)
    checks["prompts"] = _sample_sheet(out, pipe, encoders, recipe, progress)
    captions = corpus.draw_captions(held_out, generator_of(recipe.seed, "card"))
    drawn = sample(pipe, [corpus.captions[c] for c in captions.tolist()], progress)
    others = corpus.images(corpus.draw(len(held_out), generator_of(recipe.seed, "real")))
    features = Features(encoders)
    checks["distance"] = {
        "drawn": distances(features, images, drawn),
        "other public images": distances(features, images, others),
        "images": len(images),
    }
    return checks


class Features(nn.Module):
    """The kit's image encoder with the interface of torchmetrics' feature extractors."""

    def __init__(self, encoders: Encoders):
        super().__init__()
        self._encoders = encoders
        self.num_features = encoders.clip.config.projection_dim

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, e] of norm 1 of images [B, 3, S, S] uint8."""
        return self._encoders.embed_images(to_float(pixels))


def require_torchmetrics() -> None:
    """Check that the card's figures can be computed, before a training of hours.

    Raises:
        ConfigError: torchmetrics is not installed.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        raise ConfigError(
            "a kit's card requires the package torchmetrics: pip install 'osfl[card]'"
        )


def distances(features: Features, real: torch.Tensor, others: torch.Tensor) -> dict[str, float]:
    """Return FID and KID, both times 1,000, between two sets of images [N, 3, S, S] uint8.

    The features are the kit's own, so the figures cannot be compared with published ones.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    fid = FrechetInceptionDistance(features)
    kid = KernelInceptionDistance(features, subsets=20, subset_size=min(100, len(real) // 2))
    for images, is_real in ((real, True), (others, False)):
        for part in images.split(BATCH):
            fid.update(part, real=is_real)
            kid.update(part, real=is_real)
    torch.manual_seed(0)
    return {
        "FID": round(1000 * fid.compute().item(), 1),
        "KID": round(1000 * kid.compute()[0].item(), 2),
    }


def sample(pipe: Any, prompts: list[str], progress: Progress) -> torch.Tensor:
    """Sample one image per prompt with diffusers' pipeline; return [N, 3, S, S] uint8."""
    parts = []
    bar = progress.add_task("samples", total=len(prompts))
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        generator = generator_of(start, "samples")
        arrays = pipe(
            batch,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            generator=generator,
            output_type="np",
        ).images
        pixels = torch.from_numpy((arrays * 255).round().astype(np.uint8))
        parts.append(pixels.permute(0, 3, 1, 2))
        progress.update(bar, advance=len(batch))
    return torch.cat(parts)


def zero_shot(
    encoders: Encoders, corpus: PublicCorpus, recipe: PhotographRecipe
) -> dict[str, dict[str, float]]:
    """Return zero-shot accuracy, images and classes of the held-out images, by source and domain.

    An image is assigned to the nearest kind of its source and domain, by the mean embedding of the
    kind's captions.
    """
    accuracies = {}
    embedded = encode(encoders, corpus, corpus.held_out)
    kinds = corpus.kind[corpus.held_out]
    groups = sorted({(kind.source, kind.domain) for kind in corpus.kinds})
    for source, domain in groups:
        members = [
            number
            for number, kind in enumerate(corpus.kinds)
            if (kind.source, kind.domain) == (source, domain)
        ]
        rows = torch.isin(kinds, torch.tensor(members))
        texts = torch.stack([_kind_embedding(encoders, corpus, number) for number in members])
        nearest = torch.tensor(members)[(embedded[rows] @ texts.T).argmax(dim=1)]
        name = f"{source}, {domain}" if domain else source
        accuracies[name] = {
            "accuracy": round((nearest == kinds[rows]).float().mean().item(), 4),
            "images": int(rows.sum()),
            "classes": len(members),
        }
    return accuracies


def encode(encoders: Encoders, corpus: PublicCorpus, rows: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [B, e] of the corpus's rows [B]."""
    parts = [encoders.embed_images(to_float(corpus.images(part))) for part in rows.split(BATCH)]
    return torch.cat(parts)


def _kind_embedding(encoders: Encoders, corpus: PublicCorpus, number: int) -> torch.Tensor:
    """Return the mean embedding [e] of the captions with a kind's first name."""
    kind = corpus.kinds[number]
    captions = kind.captions[:: len(kind.names)]
    indices = torch.tensor([corpus.captions.index(caption) for caption in captions])
    return encoders.embed_captions(indices).mean(dim=0)


def _sample_sheet(
    out: Path, pipe: Any, encoders: Encoders, recipe: PhotographRecipe, progress: Progress
) -> dict[str, float]:
    """Write a sheet with a row for each emphasized word, or for some names without any.

    Returns:
        For each prompt, the share of samples that the kit's encoders assign to the right word.
    """
    words = sheet_words(recipe.names, recipe.emphasis)
    prompts = []
    for word in words:
        for template, count in SHEET.items():
            prompts += [fill_prompt(template, {"class": word})] * count
    pixels = sample(pipe, prompts, progress)
    columns = sum(SHEET.values())
    table = pixels.unflatten(0, (len(words), columns))
    sheet = table.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    image = Image.fromarray(sheet.numpy())
    image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST).save(
        out / "samples.png"
    )
    embedded = encoders.embed_images(to_float(pixels)).unflatten(0, (len(words), columns))
    shares = {}
    start = 0
    for template, count in SHEET.items():
        texts = encoders.embed_texts([fill_prompt(template, {"class": word}) for word in words])
        nearest = (embedded[:, start : start + count] @ texts.T).argmax(dim=2)
        is_correct = nearest == torch.arange(len(words))[:, None]
        shares[template] = round(is_correct.float().mean().item(), 3)
        start += count
    return shares


def sheet_words(names: Words, emphasis: Mapping[str, float]) -> list[str]:
    """Return the emphasized words; without any, the first names of some classes."""
    words = list(emphasis) or [texts[0] for texts in names.values()] or ["person"]
    return list(dict.fromkeys(words))[:MAX_SHEET_WORDS]


def write_card(out: Path, log: dict[str, Any]) -> None:
    """Write the kit's `README.md` from the log of its training."""
    recipe = log["recipe"]
    unet = recipe["unet"]
    checks = log["checks"]
    distance = checks["distance"]
    sources = "".join(
        f"| {name} | {count['read']:,} | {count['listed']:,} | {count['unreadable']:,} "
        f"| {count['copies']:,} | {count['kept']:,} | {recipe['sources'][name]['weight']:g} |\n"
        for name, count in log["sources"].items()
    )
    stages = "".join(_stage_row(name, stage, recipe) for name, stage in log["stages"].items())
    accuracies = "".join(
        f"| {name} | {row['images']:,} | {row['classes']} | {row['accuracy']:.1%} |\n"
        for name, row in checks["zero_shot"].items()
    )
    shares = "".join(f"| `{name}` | {share:.0%} |\n" for name, share in checks["prompts"].items())
    real = distance["other public images"]
    drawn = distance["drawn"]
    card = f"""# A photograph kit

Text-to-image diffusion model for {recipe["image_size"]} px in Stable Diffusion's folder format, trained by `osfl kit train` on public images alone. The autoencoder is a
published tiny one ({recipe["autoencoder"]}). The text encoder and the image encoder were trained together contrastively; `clip/` is the pair with its projections, for
zero-shot classification. The weights inherit the terms of the images below: research only where these say so.

**Data.** Images read, left out by lists, unreadable, left out because they look like a client's (thumbnails of 16 x 16 pixels, also mirrored, correlation above {recipe["copy_above"]:g}
with an image of {", ".join(recipe["exclude"]) or "no set"}), and kept. {recipe["held_out"]:.0%} of the kept ones are held out of every stage.

| source | read | listed | unreadable | copies | kept | weight |
|---|---:|---:|---:|---:|---:|---:|
{sources}
Drawn more often: {", ".join(f"{word} x{factor:g}" for word, factor in recipe["emphasis"].items()) or "nothing"}.

**Recipe.** Seed {recipe["seed"]}, on {log["device"]}, torch {log["torch"]}; UNet of {unet["channels"]} channels, {log["parameters"]["unet"] / 1e6:.1f} M parameters; averaged weights ({unet["ema_decay"]:g}):

| stage | steps and batch | seconds | loss at {POINTS} points in time |
|---|---:|---:|---|
{stages}
**Zero-shot accuracy** on held-out public images, among the names of their source:

| source | images | classes | accuracy |
|---|---:|---:|---:|
{accuracies}
**Samples**, {STEPS} steps, guidance {GUIDANCE:g}; a row for each of {", ".join(sheet_words(recipe["names"], recipe["emphasis"]))}; {", ".join(f"{count} of `{name}`" for name, count in SHEET.items())}.

![samples](samples.png)

Share of these samples that the kit's own encoders assign to the right word:

| prompt | share |
|---|---:|
{shares}
**FID and KID** (times 1,000) against {distance["images"]:,} held-out public images, by torchmetrics with this kit's own image encoder, so they compare with no other
kit's: {drawn["FID"]:g} and {drawn["KID"]:g} for as many images drawn under the same captions; {real["FID"]:g} and {real["KID"]:g} for as many other public images.
"""
    (out / "README.md").write_text(card)


def _stage_row(name: str, stage: dict[str, Any], recipe: dict[str, Any]) -> str:
    batch = recipe["unet" if name == "unet" else "image_encoder"]["batch"]
    losses = stage["losses"]
    places = np.linspace(0, len(losses) - 1, min(POINTS, len(losses))).astype(int)
    curve = ", ".join(f"{losses[place]:.3f}" for place in places)
    return f"| {name} | {stage['steps']:,} of {batch} | {stage['seconds']:,.0f} | {curve} |\n"
