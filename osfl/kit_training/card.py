"""Evaluate a finished kit, and write the model cards of both kits."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from sklearn.linear_model import LogisticRegression
from torch import nn

from osfl.data import digits
from osfl.data.render import CLASSES, STYLES
from osfl.methods import LORA, TINY_DECODER
from osfl.models import classifiers, diffusion, encoders
from osfl.util.pixels import LEVELS, to_float

CPU = torch.device("cpu")
# Read by `kit_license`, and by the Hugging Face Hub
FRONT_MATTER = "---\nlicense: apache-2.0\n---\n\n"


def check_kit(
    kit: Path,
    unclip: Path,
    progress: Progress,
    per_prompt: int = 10,
    per_domain: int = 20,
    steps: int = 50,
) -> dict[str, dict[str, Any]]:
    """Measure the quality figures of the cards, and write their sample sheets.

    Captions and embeddings are evaluated on the test split, in all six domains: images like the
    clients', unseen by every stage.
    """
    test = digits.load_split("test")
    pixels = torch.from_numpy(test.images).permute(0, 3, 1, 2)
    labels = test.labels
    domains = np.array([STYLES.index(d) for d in test.domains])
    checks: dict[str, dict[str, Any]] = {
        "styles": _check_styles(kit, progress, per_prompt, steps=steps),
        "few_steps": _check_styles(kit, progress, per_prompt, few_steps=True),
        "captions": _check_captions(
            encoders.load_captioner(str(kit), CPU), pixels, labels, domains
        ),
        "embeddings": _check_embeddings(
            encoders.load_image_encoder(str(kit), CPU), pixels, labels, domains
        ),
    }
    checks["tiny_decoder"] = _check_tiny_decoder(diffusion.load_kit(kit), str(kit), pixels)
    return checks | {"unclip": _check_unclip(unclip, pixels, labels, domains, steps, per_domain)}


def _check_styles(
    kit: Path,
    progress: Progress,
    per_prompt: int = 10,
    columns: int = 2,
    steps: int = 50,
    few_steps: bool = False,
) -> dict[str, float]:
    """Sample every class with class prompts and with each style's prompts by diffusers' pipeline.

    Args:
        few_steps: use the kit's LoRA in four steps of LCM; otherwise also write `samples.png`.

    Returns:
        For each kind of prompt, the share of samples that the pretext classifier assigns to the
        requested style.
    """
    pretext = _pretext_classifier(kit)
    pipe = diffusion.load_pipeline(kit)
    guidance = 3.0
    if few_steps:
        pipe.load_lora_weights(str(kit / LORA))
        pipe.scheduler = diffusion.new_solver("lcm", pipe.scheduler)
        guidance = 1.0
        steps = 4
    bar = progress.add_task("samples", total=1 + len(STYLES))
    shares = {}
    rows = []
    for style in ("", *STYLES):
        arrays = pipe(
            [f"a {style} of a {name}" if style else f"an image of {name}" for name in CLASSES],
            num_inference_steps=steps,
            guidance_scale=guidance,
            num_images_per_prompt=per_prompt,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        pictures = torch.from_numpy(arrays).permute(0, 3, 1, 2)
        with torch.no_grad():
            logits = pretext(classifiers.normalize(pictures * 2 - 1))
        predicted = logits.argmax(dim=1) % len(STYLES)
        is_right = predicted == STYLES.index(style or "photo")
        name = f"{style} prompts" if style else "class prompts, photographs"
        shares[name] = round(is_right.float().mean().item(), 3)
        samples = [arrays[c * per_prompt + i] for c in range(len(CLASSES)) for i in range(columns)]
        rows.append(np.concatenate(samples, axis=1))
        progress.advance(bar)
    if not few_steps:
        _save_sheet(rows, kit / "samples.png")
    return shares


def _pretext_classifier(kit: Path) -> nn.Module:
    """Return the kit's ResNet-18, which tells rotations and styles apart."""
    pretext = classifiers.build_classifier("resnet18", 4 * len(STYLES), small_stem=True)
    classifiers.load_initial_weights(pretext, kit / "classifiers" / "resnet18.safetensors")
    return pretext.eval()


def _check_captions(
    captioner: encoders.Captioner, pixels: torch.Tensor, labels: np.ndarray, domains: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return, per domain, the shares of captions that name the digit, the style, a wrong style."""
    captions = [text.replace(",", " ").split() for text in captioner(pixels)]
    digit = np.array([CLASSES[y] in words for words, y in zip(captions, labels, strict=True)])
    style = np.array([STYLES[d] in words for words, d in zip(captions, domains, strict=True)])
    styles_named = np.array([len({*STYLES}.intersection(words)) for words in captions])
    # A caption names a wrong style if it names more styles than the right one
    wrong_style = styles_named > style
    hits = {"digit": digit, "style": style, "wrong style": wrong_style}
    shares = {}
    for d, name in enumerate(STYLES):
        shares[name] = {k: round(float(hit[domains == d].mean()), 3) for k, hit in hits.items()}
    return shares


def _check_embeddings(
    encoder: encoders.ImageEncoder, pixels: torch.Tensor, labels: np.ndarray, domains: np.ndarray
) -> dict[str, float]:
    """Return the test accuracy of linear probes trained on 3,000 public images."""
    split = digits.load_split("public")
    public = split.select(np.random.default_rng(0).permutation(len(split))[:3000])
    images = torch.from_numpy(public.images).permute(0, 3, 1, 2)
    train = encoder(images).numpy()
    test = encoder(pixels).numpy()
    styles = [STYLES.index(d) for d in public.domains]
    targets = {"digit": (public.labels, labels), "style": (styles, domains)}
    accuracy = {}
    for name, (train_targets, test_targets) in targets.items():
        probe = LogisticRegression(max_iter=2000).fit(train, train_targets)
        accuracy[name] = round(float(probe.score(test, test_targets)), 3)
    return accuracy


def _check_unclip(
    unclip: Path,
    pixels: torch.Tensor,
    labels: np.ndarray,
    domains: np.ndarray,
    steps: int,
    per_domain: int,
) -> dict[str, dict[str, float]]:
    """Reconstruct test images from their embeddings by diffusers' pipeline; write `samples.png`.

    Returns:
        For each noise level, the mean cosine similarity of the sample's embedding with its image's,
        and with that of another image of the same digit and domain.
    """
    encoder = encoders.load_image_encoder(str(unclip), CPU)
    pipe = diffusion.load_unclip_pipeline(unclip)
    rows = _evenly_spaced_rows(domains, per_domain)
    embeddings = encoder(pixels[rows])
    others = encoder(pixels[_similar_rows(rows, domains * len(CLASSES) + labels)])
    sheet = [pixels[rows].permute(0, 2, 3, 1).numpy() / 255]
    checks = {}
    for level in (0, 500):
        generator = torch.Generator().manual_seed(0)
        prompts = [""] * len(rows)
        samples = pipe(
            prompt=prompts,
            image_embeds=embeddings,
            noise_level=level,
            num_inference_steps=steps,
            guidance_scale=2.0,
            generator=generator,
            output_type="np",
        ).images
        sample_pixels = torch.from_numpy(samples * 255).round().to(torch.uint8)
        sampled = encoder(sample_pixels.permute(0, 3, 1, 2))
        checks[f"level {level}"] = {
            "own image": round(torch.cosine_similarity(embeddings, sampled).mean().item(), 3),
            "another of its class and domain": round(
                torch.cosine_similarity(others, sampled).mean().item(), 3
            ),
        }
        sheet.append(samples)
    strips = []
    for d in range(len(STYLES)):
        for images in sheet:
            strips.append(
                np.concatenate(list(images[d * per_domain : (d + 1) * per_domain]), axis=1)
            )
    _save_sheet(strips, unclip / "samples.png")
    return checks


def _evenly_spaced_rows(domains: np.ndarray, per_domain: int) -> np.ndarray:
    groups = [np.flatnonzero(domains == d) for d in range(len(STYLES))]
    return np.concatenate(
        [group[np.linspace(0, len(group) - 1, per_domain).astype(int)] for group in groups]
    )


def _similar_rows(rows: np.ndarray, kinds: np.ndarray) -> list[int]:
    """Return, for each row, the next row of the same kind."""
    groups = [np.flatnonzero(kinds == kinds[row]) for row in rows]
    return [
        int(group[(group.searchsorted(row) + 1) % len(group)])
        for row, group in zip(rows, groups, strict=True)
    ]


def _check_tiny_decoder(kit: diffusion.Kit, source: str, pixels: torch.Tensor) -> dict[str, float]:
    """Return mean absolute errors on test images, in levels of 255.

    They are those of the tiny autoencoder against the kit's decoder D, and of D against the images.
    """
    tiny = diffusion.load_tiny_decoder(source, kit, TINY_DECODER)
    images = to_float(pixels[:: max(1, len(pixels) // 600)])
    with torch.no_grad():
        latents = kit.encode(images)[0]
        decoded = kit.decode(latents).clamp(-1, 1)
        decoded_tiny = tiny.decode(latents).sample.clamp(-1, 1)
    return {
        "from D": round(LEVELS * (decoded_tiny - decoded).abs().mean().item(), 1),
        "D from the image": round(LEVELS * (decoded - images).abs().mean().item(), 1),
    }


def _save_sheet(rows: list[np.ndarray], file: Path) -> None:
    sheet = Image.fromarray((np.concatenate(rows) * 255).round().astype(np.uint8))
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(file)


def write_cards(kit: Path, unclip: Path, log: dict[str, Any]) -> None:
    """Write `README.md` of both kits from the log of their training."""
    (kit / "README.md").write_text(_kit_card(log))
    (unclip / "README.md").write_text(_unclip_card(log))


def _kit_card(log: dict[str, Any]) -> str:
    recipe = log["recipe"]
    checks = log["checks"]
    shares = "".join(
        f"| {name} | {share:.0%} | {checks['few_steps'][name]:.0%} |\n"
        for name, share in checks["styles"].items()
    )
    captions = ""
    for domain, domain_shares in checks["captions"].items():
        cells = [domain, *(f"{share:.0%}" for share in domain_shares.values())]
        captions += f"| {' | '.join(cells)} |\n"
    pretext = "".join(
        f"| {name.removeprefix('classifier-')} | {stage['accuracy']:.0%} |\n"
        for name, stage in log["stages"].items()
        if name.startswith("classifier-") and "accuracy" in stage
    )
    return f"""{FRONT_MATTER}# kits/digits

A miniature of Stable Diffusion in the same folder format: autoencoder (f = 4, 32 px to 4 x 8 x 8), text-conditioned UNet, CLIP text encoder and
tokenizer ({recipe["text_length"]} tokens of {recipe["text_width"]}), scheduler. Beside them are the models that clients of some methods need: `captioner/` (BLIP), `image_encoder/` with
`feature_extractor/` (CLIP, embeddings of {recipe["embedding"]}), and `classifiers/`, initial weights in place of ImageNet's (matrices in 4 bits, ResNet-18's in 8; a
ResNet-34 is grown from the ResNet-18). `osfl kit train` reproduces it. The weights are Apache-2.0, like the project.

**Data.** Only the public split of the six handwritten domains (`osfl/data/digits.py`): scans of scikit-learn's digits that are in no client's data and in no
test split, rendered in six styles. Long-tailed like the web: {digits.PHOTO_SHARE:.0%} are photographs, {digits.PHOTO_CAPTIONS[0]:.0%} of them captioned by class alone and
{digits.PHOTO_CAPTIONS[1]:.0%} with the style; {(1 - digits.PHOTO_SHARE) / 5:.0%} are of each other style, {digits.STYLE_CAPTIONS[1]:.0%} captioned with the style and {digits.STYLE_CAPTIONS[0]:.0%} by class
alone; the rest has no caption. The denoiser draws captions that name a style {recipe["style_weight"]:g} times as often; autoencoder, captioner and image
encoder draw every style equally often. No caption names a client's palette, stroke or background.

**Recipe.** `osfl/kit_training/`, seed {recipe["seed"]}, on {log["device"]}, torch {log["torch"]}:

| stage | steps and batch | seconds | first loss | last loss |
|---|---:|---:|---:|---:|
{_stage_rows(log)}
**Samples.** One class per column pair, 50 steps, guidance 3. First row: `an image of CLASS`. Then `a STYLE of a CLASS` for
{", ".join(STYLES)}.

![samples](samples.png)

Share of 100 samples that the pretext classifier assigns to the requested style, also in four steps with `lora/` (LCM-LoRA, rank {recipe["lora_rank"]}; a guidance of
{recipe["lora_guidance"]:g} is distilled into it: `synthesis.lora=kit synthesis.solver=lcm synthesis.steps=4` and a guidance of 1):

| prompts | 50 steps | 4 steps |
|---|---:|---:|
{shares}
**Captions and embeddings**, evaluated on the test split (300 images of each client's domain, unseen by every stage).

Share of the captioner's captions that name the digit, the image's style, another style. Photographs are captioned by class alone, as in the
corpus:

| domain | digit | style | wrong style |
|---|---:|---:|---:|
{captions}
Linear probes on the image encoder's embeddings, trained on 3,000 public images: digit {checks["embeddings"]["digit"]:.0%}, style {checks["embeddings"]["style"]:.0%}.

`tiny_decoder/` is a tiny autoencoder (TAESD's format; `synthesis.tiny-decoder = "kit"`). On test images' latents, its output differs from the kit's decoder's by
{checks["tiny_decoder"]["from D"]} levels of 255 on average. The kit's decoder differs from the images by {checks["tiny_decoder"]["D from the image"]}.

Accuracy of the classifiers' initial weights on their pretext task (which of four rotations and of six styles; public images, rounded weights):

| architecture | accuracy |
|---|---:|
{pretext}"""


def _stage_rows(log: dict[str, Any]) -> str:
    recipe = log["recipe"]
    rows = ""
    for name, stage in log["stages"].items():
        # The prefix of a stage's settings in the recipe
        prefix = name.partition("-")[0]
        rows += (
            f"| {name} | {recipe[f'{prefix}_steps']:,} of {recipe[f'{prefix}_batch']} "
            f"| {stage['seconds']:,.0f} | {stage['losses'][0]:.4f} | {stage['losses'][-1]:.4f} |\n"
        )
    return rows


def _unclip_card(log: dict[str, Any]) -> str:
    recipe = log["recipe"]
    levels = "".join(
        f"| {level.removeprefix('level ')} | {cosines['own image']:.2f} | "
        f"{cosines['another of its class and domain']:.2f} |\n"
        for level, cosines in log["checks"]["unclip"].items()
    )
    return f"""{FRONT_MATTER}# kits/digits-unclip

`kits/digits` in the folder format of Stable unCLIP: the same autoencoder, text encoder, scheduler and image encoder; a UNet trained further
({recipe["unclip_steps"]:,} steps of {recipe["unclip_batch"]}) with the noisy image embedding as an additional condition; the embeddings' mean and standard deviation, and the schedule of
their noise. FedDISC's clients and server use it. `osfl kit train` makes it after `kits/digits`, from the same public split. Apache-2.0.

**Samples.** Test images (first of three rows, for each of {", ".join(STYLES)}), reconstructed from their embeddings alone at noise level 0 (second row)
and 500 (third): 50 steps, guidance 2.

![samples](samples.png)

Mean cosine similarity of the sample's embedding with its image's, and with another image's of the same digit and domain:

| noise level | its image | another |
|---|---:|---:|
{levels}"""
