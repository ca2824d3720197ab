"""What a finished kit can do, measured, and its cards."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import Progress
from sklearn.linear_model import LogisticRegression

from osfl.data import digits
from osfl.data.render import STYLES
from osfl.methods import LORA, SMALL_DECODER
from osfl.models import classifiers, diffusion, encoders
from osfl.util.pixels import LEVELS, to_float

CPU = torch.device("cpu")


def check_kit(
    kit: Path,
    unclip: Path,
    progress: Progress,
    per_prompt: int = 10,
    per_domain: int = 20,
    steps: int = 50,
) -> dict[str, dict]:
    """Everything that the cards say of quality, and the pictures beside them.

    Captions and embeddings are measured on the clients' kind of images: the test split, in all six
    domains, which no stage has seen.
    """
    test = digits.load_split("test").with_format("numpy")
    pixels = torch.from_numpy(np.stack(test["image"])).permute(0, 3, 1, 2)
    labels = np.array(test["label"])
    domains = np.array([STYLES.index(d) for d in test["domain"]])
    checks: dict[str, dict] = {
        "styles": _check_styles(kit, progress, per_prompt, steps=steps),
        "few_steps": _check_styles(kit, progress, per_prompt, few_steps=True),
        "captions": _check_captions(
            encoders.load_captioner(str(kit), CPU), pixels, labels, domains
        ),
        "embeddings": _check_embeddings(
            encoders.load_image_encoder(str(kit), CPU), pixels, labels, domains
        ),
    }
    checks["small_decoder"] = _check_small_decoder(diffusion.load_kit(kit), str(kit), pixels)
    return checks | {"unclip": _check_unclip(unclip, pixels, labels, domains, steps, per_domain)}


def _check_styles(
    kit: Path,
    progress: Progress,
    per_prompt: int = 10,
    columns: int = 2,
    steps: int = 50,
    few_steps: bool = False,
) -> dict[str, float]:
    """Sample every class from class prompts and from each style's prompts with diffusers' own
    pipeline; draw `samples.png`.

    Args:
        few_steps: with the kit's few-step weights, in four steps of LCM; nothing is drawn.

    Returns:
        for each kind of prompt, the share of samples that the pretext classifier takes for the
        style asked for.
    """
    pretext = classifiers.build_classifier("resnet18", 4 * len(STYLES), small_stem=True)
    classifiers.load_initialisation(pretext, kit / "classifiers" / "resnet18.safetensors")
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
        prompts = [
            f"a {style} of a {name}" if style else f"an image of {name}" for name in digits.CLASSES
        ]
        generator = torch.Generator().manual_seed(0)
        arrays = pipe(
            prompts,
            num_inference_steps=steps,
            guidance_scale=guidance,
            num_images_per_prompt=per_prompt,
            generator=generator,
            output_type="np",
        ).images
        pictures = torch.from_numpy(arrays).permute(0, 3, 1, 2)
        with torch.no_grad():
            guess = pretext.eval()(classifiers.normalise(pictures * 2 - 1)).argmax(dim=1) % len(
                STYLES
            )
        wanted = STYLES.index(style or "photo")
        shares[f"{style} prompts" if style else "class prompts, photographs"] = round(
            (guess == wanted).float().mean().item(), 3
        )
        shown = [
            arrays[c * per_prompt + i] for c in range(len(digits.CLASSES)) for i in range(columns)
        ]
        rows.append(np.concatenate(shown, axis=1))
        progress.advance(bar)
    if not few_steps:
        _save_sheet(rows, kit / "samples.png")
    return shares


def _check_captions(
    captioner: encoders.Captioner, pixels: torch.Tensor, labels: np.ndarray, domains: np.ndarray
) -> dict[str, dict[str, float]]:
    """For each domain, the share of captions that name the digit, that name the style, and that
    name another style.
    """
    captions = [text.replace(",", " ").split() for text in captioner(pixels)]
    digit = np.array(
        [digits.CLASSES[y] in words for words, y in zip(captions, labels, strict=True)]
    )
    style = np.array([STYLES[d] in words for words, d in zip(captions, domains, strict=True)])
    styles_named = np.array([len({*STYLES}.intersection(words)) for words in captions])
    # A caption names a wrong style where it names more than the right one.
    wrong_style = styles_named > style
    found = {"digit": digit, "style": style, "wrong style": wrong_style}
    shares = {}
    for d, name in enumerate(STYLES):
        shares[name] = {k: round(float(hits[domains == d].mean()), 3) for k, hits in found.items()}
    return shares


def _check_embeddings(
    encoder: encoders.ImageEncoder, pixels: torch.Tensor, labels: np.ndarray, domains: np.ndarray
) -> dict[str, float]:
    """Accuracy of linear probes that learned from 3,000 public images."""
    public = digits.load_split("public").with_format("numpy")
    rows = np.random.default_rng(0).permutation(len(public))[:3000]
    images = torch.from_numpy(np.stack(public[rows]["image"])).permute(0, 3, 1, 2)
    known = encoder(images).numpy()
    asked = encoder(pixels).numpy()
    styles = [STYLES.index(d) for d in public[rows]["domain"]]
    targets = {"digit": (public[rows]["label"], labels), "style": (styles, domains)}
    return {
        name: round(float(LogisticRegression(max_iter=2000).fit(known, y).score(asked, wanted)), 3)
        for name, (y, wanted) in targets.items()
    }


def _check_unclip(
    unclip: Path,
    pixels: torch.Tensor,
    labels: np.ndarray,
    domains: np.ndarray,
    steps: int,
    per_domain: int,
) -> dict[str, dict[str, float]]:
    """Draw test images again from their embeddings with diffusers' own pipeline.

    Draw `samples.png`.

    Returns:
        for each noise level, the mean cosine between the embeddings of image and sample, and of the
        sample and another image of the same digit and domain.
    """
    encoder = encoders.load_image_encoder(str(unclip), CPU)
    pipe = diffusion.load_unclip_pipeline(unclip)
    of_domain = [np.flatnonzero(domains == d) for d in range(len(STYLES))]
    rows = np.concatenate(
        [group[np.linspace(0, len(group) - 1, per_domain).astype(int)] for group in of_domain]
    )
    embeddings = encoder(pixels[rows])
    kind = domains * len(digits.CLASSES) + labels
    alike = [np.flatnonzero(kind == kind[row]) for row in rows]
    others = encoder(
        pixels[
            [
                int(group[(group.searchsorted(row) + 1) % len(group)])
                for row, group in zip(rows, alike, strict=True)
            ]
        ]
    )
    sheet = [pixels[rows].permute(0, 2, 3, 1).numpy() / 255]
    checks = {}
    for level in (0, 500):
        generator = torch.Generator().manual_seed(0)
        prompts = [""] * len(rows)
        drawn = pipe(
            prompt=prompts,
            image_embeds=embeddings,
            noise_level=level,
            num_inference_steps=steps,
            guidance_scale=2.0,
            generator=generator,
            output_type="np",
        ).images
        again = encoder(torch.from_numpy(drawn * 255).round().to(torch.uint8).permute(0, 3, 1, 2))
        checks[f"level {level}"] = {
            "own image": round(torch.cosine_similarity(embeddings, again).mean().item(), 3),
            "another of its class and domain": round(
                torch.cosine_similarity(others, again).mean().item(), 3
            ),
        }
        sheet.append(drawn)
    strips = []
    for d in range(len(STYLES)):
        for images in sheet:
            strips.append(
                np.concatenate(list(images[d * per_domain : (d + 1) * per_domain]), axis=1)
            )
    _save_sheet(strips, unclip / "samples.png")
    return checks


def _check_small_decoder(kit: diffusion.Kit, source: str, pixels: torch.Tensor) -> dict[str, float]:
    """How far, in shades of 255, what the small decoder makes of test images' latents is from what
    D makes, and how far that is from the images.
    """
    small = diffusion.load_small_decoder(source, kit, SMALL_DECODER)
    images = to_float(pixels[:: max(1, len(pixels) // 600)])
    with torch.no_grad():
        latents = kit.encode(images)[0]
        decoded = kit.decode(latents).clamp(-1, 1)
        its = small.decode(latents).sample.clamp(-1, 1)
    return {
        "from D": round(LEVELS * (its - decoded).abs().mean().item(), 1),
        "D from the image": round(LEVELS * (decoded - images).abs().mean().item(), 1),
    }


def _save_sheet(rows: list[np.ndarray], file: Path) -> None:
    sheet = Image.fromarray((np.concatenate(rows) * 255).round().astype(np.uint8))
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(file)


def write_cards(kit: Path, unclip: Path, log: dict) -> None:
    """`README.md` of both kits, from the log of their training."""
    r = log["recipe"]
    stages = log["stages"]
    checks = log["checks"]
    trained = [name for name in stages if name.startswith("classifier-")]
    kinds = {name: name.partition("-")[0] for name in stages}  # the recipe's prefix of a stage
    losses = "".join(
        f"| {name} | {r[f'{kinds[name]}_steps']:,} of {r[f'{kinds[name]}_batch']} | "
        f"{about['seconds']:,.0f} "
        f"| {about['losses'][0]:.4f} | {about['losses'][-1]:.4f} |\n"
        for name, about in stages.items()
    )
    shares = "".join(
        f"| {name} | {share:.0%} | {checks['few_steps'][name]:.0%} |\n"
        for name, share in checks["styles"].items()
    )
    captions = ""
    for domain, about in checks["captions"].items():
        cells = [domain, *(f"{share:.0%}" for share in about.values())]
        captions += f"| {' | '.join(cells)} |\n"
    pretext = "".join(
        f"| {name.removeprefix('classifier-')} | {stages[name]['accuracy']:.0%} |\n"
        for name in trained
        if "accuracy" in stages[name]
    )
    (kit / "README.md").write_text(f"""# kits/digits

A miniature of Stable Diffusion in its own folder format: autoencoder (f = 4, 32 px to 4 x 8 x 8), text-conditioned UNet, CLIP text encoder and
tokenizer ({r["text_length"]} tokens of {r["text_width"]}), scheduler; beside them what clients of some methods need: `captioner/` (BLIP), `image_encoder/` with
`feature_extractor/` (CLIP, embeddings of {r["embedding"]}), and `classifiers/`, initialisations that stand for ImageNet's (matrices in 4 bits, ResNet-18's in 8; a
ResNet-34 grows out of the ResNet-18). `osfl kit train` makes it again; the weights are Apache-2.0, as the project.

**Data.** Only the public split of the six handwritten domains (`osfl/data/digits.py`): scans of scikit-learn's digits that no client and no
test has, drawn in six styles. Long-tailed like the web: {digits.PHOTO_SHARE:.0%} photographs, {digits.PHOTO_CAPTIONS[0]:.0%} of them captioned by class alone and
{digits.PHOTO_CAPTIONS[1]:.0%} with the style; {(1 - digits.PHOTO_SHARE) / 5:.0%} of each other style, {digits.STYLE_CAPTIONS[1]:.0%} captioned with the style and {digits.STYLE_CAPTIONS[0]:.0%} by class
alone; the rest without a caption. The denoiser draws captions that name a style {r["style_weight"]:g} times as often; autoencoder, captioner and image
encoder see every style equally often. No caption names a client's palette, stroke or background.

**Recipe.** `osfl/kit_training/`, seed {r["seed"]}, on {log["device"]}, torch {log["torch"]}:

| stage | steps and batch | seconds | first loss | last loss |
|---|---:|---:|---:|---:|
{losses}
**What it draws.** The class of every column, two samples each, 50 steps, guidance 3. First row: `an image of CLASS`. Then `a STYLE of a CLASS` for
{", ".join(STYLES)}.

![samples](samples.png)

Share of 100 samples that the pretext classifier takes for the style asked for; also in four steps with `lora/` (LCM-LoRA, rank {r["lora_rank"]}; it has guidance
{r["lora_guidance"]:g} within it: `synthesis.lora=kit synthesis.solver=lcm synthesis.steps=4` and a guidance of 1):

| prompts | 50 steps | 4 steps |
|---|---:|---:|
{shares}
**What it sees**, measured on the test split (300 images of each client's domain, which no stage has seen).

Share of the captioner's captions that name the digit, the image's style, another style. Photographs are captioned by class alone, as in the
corpus:

| domain | digit | style | wrong style |
|---|---:|---:|---:|
{captions}
Linear probes on the image encoder's embeddings, trained on 3,000 public images: digit {checks["embeddings"]["digit"]:.0%}, style {checks["embeddings"]["style"]:.0%}.

`small_decoder/` (TAESD's format; `synthesis.small-decoder = "kit"`) is {checks["small_decoder"]["from D"]} shades of 255 from what the autoencoder's decoder makes of test
images' latents, which is itself {checks["small_decoder"]["D from the image"]} from the images.

Accuracy of the initialisations on their pretext task (which of four turns and of six styles; public images, weights rounded):

| architecture | accuracy |
|---|---:|
{pretext}""")
    levels = "".join(
        f"| {level.removeprefix('level ')} | {about['own image']:.2f} | "
        f"{about['another of its class and domain']:.2f} |\n"
        for level, about in checks["unclip"].items()
    )
    (unclip / "README.md").write_text(f"""# kits/digits-unclip

`kits/digits` in the folder format of Stable unCLIP: the same autoencoder, text encoder, scheduler and image encoder; a UNet that was trained on
({r["unclip_steps"]:,} steps of {r["unclip_batch"]}) with the noised image embedding as one more condition; the embeddings' mean and deviation, and the schedule of
their noise. FedDISC's clients and server use it. `osfl kit train` makes it after `kits/digits`, from the same public split; Apache-2.0.

**What it draws.** Test images (first of three rows, for each of {", ".join(STYLES)}), drawn again from their embeddings alone, at noise level 0 (second row)
and 500 (third): 50 steps, guidance 2.

![samples](samples.png)

Mean cosine of the sample's embedding with its image's, and with another image's of the same digit and domain:

| noise level | its image | another |
|---|---:|---:|
{levels}""")
