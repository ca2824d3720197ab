"""Train stages 3 to 6 and 8: the models beside the diffusion model, for clients and baselines.

Each function writes its part of the kit at the end, and returns the log of its stages.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from osfl.data.render import STYLES
from osfl.kit_training import untrained
from osfl.kit_training.diffusion_model import noise_prediction_loss
from osfl.kit_training.recipe import Recipe
from osfl.kit_training.stages import Corpus, Stage, run_stage
from osfl.methods import TINY_DECODER
from osfl.models import classifiers, diffusion, encoders
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of

BITS = {"resnet18": 8}  # the others are stored in 4 bits
# A batch of the classifiers' pretext task: images and labels
_Batch = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def train_classifiers(
    out: Path,
    work: Path,
    recipe: Recipe,
    corpus: Corpus,
    progress: Progress,
    trained: frozenset[str] = frozenset(),
) -> dict[str, dict[str, Any]]:
    """Train initial weights of the recipe's architectures, except those already `trained`.

    The pretext task has 4 rotations x 6 styles.
    """
    device = corpus.pixels.device
    log = {}

    def pretext(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = corpus.draw(recipe.classifier_batch, generator)
        turns = torch.randint(4, (len(rows),), generator=generator, device=device)
        images = zip(corpus.images(rows), turns, strict=True)
        rotated = torch.stack([torch.rot90(image, int(turn), (1, 2)) for image, turn in images])
        return classifiers.normalize(rotated), turns * len(STYLES) + corpus.style[rows]

    (out / "classifiers").mkdir(exist_ok=True)
    for architecture in (name for name in recipe.classifiers if name not in trained):
        name = f"classifier-{architecture}"
        torch.manual_seed(seed_of(recipe.seed, name))
        model = classifiers.build_classifier(
            architecture, num_classes=4 * len(STYLES), small_stem=True
        )

        def loss(generator: torch.Generator, model: nn.Module = model) -> torch.Tensor:
            x, target = pretext(generator)
            return F.cross_entropy(model(x), target)

        modules = nn.ModuleDict({"model": model})
        stage = Stage(name, modules, recipe.classifier_steps, recipe.classifier_lr, loss)
        log[name] = run_stage(stage, work, recipe.seed, device, progress)
        bits = BITS.get(architecture, 4)
        classifiers.round_weights(model, bits)
        generator = torch.Generator(device).manual_seed(seed_of(recipe.seed, name, "check"))
        log[name]["accuracy"] = _pretext_accuracy(model, pretext, generator)
        classifiers.save_initial_weights(
            model.cpu(), out / "classifiers" / f"{architecture}.safetensors", bits
        )
    return log


def _pretext_accuracy(model: nn.Module, pretext: _Batch, generator: torch.Generator) -> float:
    """Recompute BatchNorm's statistics for the rounded weights, and return the model's accuracy."""
    update_bn([pretext(generator)[0] for _ in range(30)], model)
    accuracies = []
    with torch.no_grad():
        for _ in range(20):
            images, labels = pretext(generator)
            accuracies.append((model(images).argmax(1) == labels).float().mean().item())
    accuracy: float = round(sum(accuracies) / len(accuracies), 4)
    return accuracy


def train_image_encoder(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Train a CLIP vision tower with SLIP's losses: image against caption, view against view."""
    device = corpus.pixels.device
    torch.manual_seed(seed_of(recipe.seed, "image_encoder"))
    encoder = untrained.new_image_encoder(
        corpus.pixels.shape[-1], recipe.image_encoder_width, recipe.embedding
    )
    text = encoders.load_text_encoder(str(out), device, torch.float32)
    table, caption_of = _captions(text, corpus)
    has_caption = caption_of >= 0
    project = nn.Linear(table.shape[1], recipe.embedding)
    mean, std = (
        torch.tensor(v, device=device).view(3, 1, 1)
        for v in (encoder.processor.image_mean, encoder.processor.image_std)
    )

    def embed(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        view = (random_view(x, generator) + 1) / 2
        return F.normalize(encoder.model((view - mean) / std).image_embeds)

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.image_encoder_batch, generator)
        x = corpus.images(rows)
        view_1 = embed(x, generator)
        view_2 = embed(x, generator)
        pairs = torch.arange(len(rows), device=device)
        view_loss = F.cross_entropy(view_1 @ view_2.T / 0.1, pairs) + F.cross_entropy(
            view_2 @ view_1.T / 0.1, pairs
        )
        captioned = has_caption[rows]
        texts = F.normalize(project(table))
        logits = view_1[captioned] @ texts.T / 0.1
        return view_loss + F.cross_entropy(logits, caption_of[rows][captioned])

    modules = nn.ModuleDict({"encoder": encoder.model, "project": project})
    stage = Stage(
        "image_encoder",
        modules,
        recipe.image_encoder_steps,
        recipe.image_encoder_lr,
        loss,
        ema_decay=0.995,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    encoder.model.half().save_pretrained(out / "image_encoder")
    encoder.processor.save_pretrained(out / "feature_extractor")
    return {"image_encoder": log}


def _captions(text: encoders.TextEncoder, corpus: Corpus) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pooled encodings of the distinct captions [U, d], and each image's index [N].

    The index of an image without a caption is -1.
    """
    distinct = sorted(set(corpus.captions) - {""})
    number = {caption: index for index, caption in enumerate(distinct)}
    return text.pooled(distinct), torch.tensor(
        [number.get(c, -1) for c in corpus.captions], device=corpus.pixels.device
    )


def random_view(x: torch.Tensor, generator: torch.Generator, turn: float = 0.0) -> torch.Tensor:
    """Return shifted, scaled, slightly noisy views [B, 3, H, W], rotated by up to `turn` radians.

    Colors do not change: a style has its own.
    """

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(len(x), generator=generator, device=x.device)

    scale = uniform(0.75, 1.05)
    zero = torch.zeros(len(x), device=x.device)
    rows = [
        torch.stack([scale, zero, uniform(-0.15, 0.15)], 1),
        torch.stack([zero, scale, uniform(-0.15, 0.15)], 1),
    ]
    transform = torch.stack(rows, 1)
    if turn:
        angle = uniform(-turn, turn)
        rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(
            -1, 2, 2
        )
        transform = torch.cat([transform[:, :, :2] @ rotation, transform[:, :, 2:]], 2)
    grid = F.affine_grid(transform, list(x.shape), align_corners=False)
    view = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    return (view + 0.05 * torch.randn(x.shape, generator=generator, device=x.device)).clamp(-1, 1)


def _permute_colors(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Permute each image's color channels at random.

    In rare styles, the corpus has only a few colors per digit.
    """
    order = torch.rand(len(x), 3, generator=generator, device=x.device).argsort(dim=1)
    return x.gather(1, order[:, :, None, None].expand_as(x))


def train_captioner(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Train a BLIP with the captioning loss on the images that have a caption."""
    device = corpus.pixels.device
    torch.manual_seed(seed_of(recipe.seed, "captioner"))
    captioner = untrained.new_captioner(
        corpus.captions, corpus.pixels.shape[-1], recipe.captioner_width
    )
    captioned = torch.tensor([bool(c) for c in corpus.captions], device=device)
    batch = captioner.processor.tokenizer(
        list(corpus.captions), padding=True, return_tensors="pt"
    ).to(device)
    images = captioner.processor.image_processor
    mean, std = (
        torch.tensor(v, device=device).view(3, 1, 1) for v in (images.image_mean, images.image_std)
    )

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.captioner_batch, generator, among=captioned)
        view = random_view(_permute_colors(corpus.images(rows), generator), generator, turn=0.2)
        x = ((view + 1) / 2 - mean) / std
        tokens = batch.input_ids[rows]
        mask = batch.attention_mask[rows]
        loss: torch.Tensor = captioner.model(
            x, tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)
        ).loss
        return loss

    stage = Stage(
        "captioner",
        nn.ModuleDict({"model": captioner.model}),
        recipe.captioner_steps,
        recipe.captioner_lr,
        loss,
        0.995,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    captioner.model.half().save_pretrained(out / "captioner")
    captioner.processor.save_pretrained(out / "captioner")
    return {"captioner": log}


def train_unclip(
    out: Path, unclip: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Train the kit's UNet with an image embedding as an additional condition.

    It is written as a Stable unCLIP folder of its own.
    """
    device = corpus.pixels.device
    kit = diffusion.load_kit(out, device)
    encoder = encoders.load_image_encoder(str(out), device)
    embeddings = encoder(corpus.pixels.cpu()).to(device)
    augment = untrained.new_embedding_noise(embeddings.mean(dim=0), embeddings.std(dim=0))
    posteriors = [kit.encode(to_float(chunk)) for chunk in corpus.pixels.split(500)]
    mean, logvar = (torch.cat(part) for part in zip(*posteriors, strict=True))
    distinct = ["", *sorted(set(corpus.captions) - {""})]
    number = {caption: index for index, caption in enumerate(distinct)}
    hidden = kit.text.states(distinct)
    caption_of = torch.tensor([number[c] for c in corpus.captions], device=device)
    torch.manual_seed(seed_of(recipe.seed, "unclip"))
    unet = untrained.new_unclip_unet(kit.unet, recipe.embedding).requires_grad_()
    num_levels = augment.scheduler.config.num_train_timesteps

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.unclip_batch, generator)
        x0 = mean[rows] + (0.5 * logvar[rows]).exp() * torch.randn(
            mean[rows].shape, generator=generator, device=device
        )
        levels = torch.randint(num_levels, (len(rows),), generator=generator, device=device)
        noise = torch.randn(len(rows), recipe.embedding, generator=generator, device=device)
        image = augment(embeddings[rows], levels, noise)
        text_draw, image_draw = torch.rand(2, len(rows), generator=generator, device=device)
        image = image * (image_draw >= recipe.unclip_image_dropout)[:, None]
        condition = torch.where(
            (text_draw < recipe.unclip_caption_dropout)[:, None, None],
            hidden[0],
            hidden[caption_of[rows]],
        )
        return noise_prediction_loss(unet, x0, condition, image, kit.alphas_cumprod, generator)

    stage = Stage(
        "unclip",
        nn.ModuleDict({"unet": unet}),
        recipe.unclip_steps,
        recipe.unclip_lr,
        loss,
        recipe.ema_decay,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    _write_unclip(out, unclip, unet.cpu().half(), augment)
    return {"unclip": log}


def _write_unclip(
    kit: Path, unclip: Path, unet: nn.Module, augment: diffusion.EmbeddingNoise
) -> None:
    """Write the Stable unCLIP folder in half precision, with the kit's other parts."""
    half = diffusion.load_kit(kit, "cpu", torch.float16)
    encoder = encoders.load_image_encoder(str(kit), torch.device("cpu"))
    pipe = untrained.unclip_pipeline(half, unet, encoder, augment)
    pipe.image_encoder.half()
    pipe.save_pretrained(unclip)
    # diffusers records the path of each part's source on this machine
    for file in unclip.rglob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content.pop("_name_or_path", None):
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def train_tiny_decoder(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Train a tiny autoencoder (TAESD) to decode like the kit's decoder.

    It learns x0hat of every noise level too, because classifier guidance decodes it.
    """
    device = corpus.pixels.device
    kit = diffusion.load_kit(out, device)
    torch.manual_seed(seed_of(recipe.seed, "small_decoder"))
    tiny = untrained.new_tiny_decoder(recipe.tiny_decoder_width)
    hidden = kit.text([""])

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.tiny_decoder_batch, generator)
        with torch.no_grad():
            x0, _ = kit.encode(corpus.images(rows))
            t = torch.randint(
                len(kit.alphas_cumprod), (len(rows),), generator=generator, device=device
            )
            a_t = kit.alphas_cumprod[t]
            noise = torch.randn(x0.shape, generator=generator, device=device)
            z = diffusion.forward_noise(x0, noise, a_t)
            e = kit.eps(z, t, hidden.expand(len(rows)))
            is_clean = torch.rand(len(rows), generator=generator, device=device) < 0.5
            x0hat = diffusion.x0hat(z, e, a_t.view(-1, 1, 1, 1))
            latents = torch.where(is_clean.view(-1, 1, 1, 1), x0, x0hat)
            target = kit.decode(latents)
        return F.l1_loss(tiny.decode(latents).sample, target)

    stage = Stage(
        "tiny_decoder",
        nn.ModuleDict({"decoder": tiny.decoder}),
        recipe.tiny_decoder_steps,
        recipe.tiny_decoder_lr,
        loss,
        ema_decay=0.995,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    tiny.half().save_pretrained(out / TINY_DECODER)
    return {"tiny_decoder": log}
