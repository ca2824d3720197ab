"""Stages 3 to 6 and 8: what clients and baselines need beside the diffusion model.

Each writes its part of the kit when it is done.
"""

import json
from pathlib import Path

import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from osfl.data.render import STYLES
from osfl.kit_training import Recipe, untrained
from osfl.kit_training.diffusion_model import noise_prediction_loss
from osfl.kit_training.stages import Corpus, Stage, run_stage
from osfl.methods import SMALL_DECODER
from osfl.models import classifiers, diffusion, encoders
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of

BITS = {"resnet18": 8}  # the others are stored with 4


def train_classifiers(
    out: Path,
    work: Path,
    recipe: Recipe,
    corpus: Corpus,
    progress: Progress,
    kept: frozenset[str] = frozenset(),
) -> dict[str, dict]:
    """Initialisations of the recipe's architectures but those that are `kept`.

    The pretext task has 4 turns x 6 styles.
    """
    device = corpus.pixels.device
    log = {}

    def pretext(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = corpus.draw(recipe.classifier_batch, generator)
        turns = torch.randint(4, (len(rows),), generator=generator, device=device)
        turned = torch.stack(
            [
                torch.rot90(x, int(k), (1, 2))
                for x, k in zip(corpus.images(rows), turns, strict=True)
            ]
        )
        return classifiers.normalise(turned), turns * len(STYLES) + corpus.style[rows]

    (out / "classifiers").mkdir(exist_ok=True)
    for architecture in recipe.classifiers:
        if architecture in kept:
            continue
        name = f"classifier-{architecture}"
        torch.manual_seed(seed_of(recipe.seed, name))
        model = classifiers.build_classifier(
            architecture, num_classes=4 * len(STYLES), small_stem=True
        )

        def loss(generator: torch.Generator, model: nn.Module = model) -> torch.Tensor:
            x, target = pretext(generator)
            return F.cross_entropy(model(x), target)

        stage = Stage(
            name,
            nn.ModuleDict({"model": model}),
            recipe.classifier_steps,
            recipe.classifier_lr,
            loss,
        )
        log[name] = run_stage(stage, work, recipe.seed, device, progress)
        bits = BITS.get(architecture, 4)
        classifiers.round_weights(model, bits)
        generator = torch.Generator(device).manual_seed(seed_of(recipe.seed, name, "check"))
        # BatchNorm's statistics of the rounded weights
        update_bn([pretext(generator)[0] for _ in range(30)], model)
        with torch.no_grad():
            checks = []
            for _ in range(20):
                x, y = pretext(generator)
                checks.append((model(x).argmax(1) == y).float().mean().item())
        log[name]["accuracy"] = round(sum(checks) / len(checks), 4)
        classifiers.save_initialisation(
            model.cpu(), out / "classifiers" / f"{architecture}.safetensors", bits
        )
    return log


def train_image_encoder(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict]:
    """SLIP: captions among all captions, and views among the batch's."""
    device = corpus.pixels.device
    torch.manual_seed(seed_of(recipe.seed, "image_encoder"))
    encoder = untrained.new_image_encoder(
        corpus.pixels.shape[-1], recipe.image_encoder_width, recipe.embedding
    )
    text = encoders.load_text_encoder(str(out), device, torch.float32)
    table, caption_of = _captions(text, corpus)
    captioned = caption_of >= 0
    project = nn.Linear(table.shape[1], recipe.embedding)
    mean, std = (
        torch.tensor(v, device=device).view(3, 1, 1)
        for v in (encoder.processor.image_mean, encoder.processor.image_std)
    )

    def embed(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        view = (_view(x, generator) + 1) / 2
        return F.normalize(encoder.model((view - mean) / std).image_embeds)

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.image_encoder_batch, generator)
        x = corpus.images(rows)
        one = embed(x, generator)
        other = embed(x, generator)
        pairs = torch.arange(len(rows), device=device)
        views = F.cross_entropy(one @ other.T / 0.1, pairs) + F.cross_entropy(
            other @ one.T / 0.1, pairs
        )
        named = captioned[rows]
        texts = F.normalize(project(table))
        return views + F.cross_entropy(one[named] @ texts.T / 0.1, caption_of[rows][named])

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
    """(the end-of-text state of every distinct caption [U, d], each image's caption's number there
    [N], -1 for none).
    """
    distinct = sorted(set(corpus.captions) - {""})
    number = {caption: index for index, caption in enumerate(distinct)}
    return text.pooled(distinct), torch.tensor(
        [number.get(c, -1) for c in corpus.captions], device=corpus.pixels.device
    )


def _view(x: torch.Tensor, generator: torch.Generator, turn: float = 0.0) -> torch.Tensor:
    """A shifted, scaled and slightly noisy view [B, 3, H, W], turned by up to `turn` radians.

    Colours stay: a client's look has its own.
    """

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(len(x), generator=generator, device=x.device)

    scale = uniform(0.75, 1.05)
    nothing = torch.zeros(len(x), device=x.device)
    rows = [
        torch.stack([scale, nothing, uniform(-0.15, 0.15)], 1),
        torch.stack([nothing, scale, uniform(-0.15, 0.15)], 1),
    ]
    place = torch.stack(rows, 1)
    if turn:
        angle = uniform(-turn, turn)
        rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(
            -1, 2, 2
        )
        place = torch.cat([place[:, :, :2] @ rotation, place[:, :, 2:]], 2)
    grid = F.affine_grid(place, list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    return (moved + 0.05 * torch.randn(x.shape, generator=generator, device=x.device)).clamp(-1, 1)


def _recolour(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image's colour channels in an order of its own.

    Of a rare style the corpus has few colours for each digit.
    """
    order = torch.rand(len(x), 3, generator=generator, device=x.device).argsort(dim=1)
    return x.gather(1, order[:, :, None, None].expand_as(x))


def train_captioner(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict]:
    """BLIP's captioning loss on the images that have a caption."""
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
        view = _view(_recolour(corpus.images(rows), generator), generator, turn=0.2)
        x = ((view + 1) / 2 - mean) / std
        tokens = batch.input_ids[rows]
        mask = batch.attention_mask[rows]
        return captioner.model(
            x, tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)
        ).loss

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
) -> dict[str, dict]:
    """The kit's UNet with an image embedding as one more condition.

    Written as a Stable unCLIP folder of its own.
    """
    device = corpus.pixels.device
    kit = diffusion.load_kit(out, device)
    encoder = encoders.load_image_encoder(str(out), device)
    embeddings = encoder(corpus.pixels.cpu()).to(device)
    noise = untrained.new_embedding_noise(embeddings.mean(dim=0), embeddings.std(dim=0))
    posteriors = [kit.encode(to_float(chunk)) for chunk in corpus.pixels.split(500)]
    mean, logvar = (torch.cat(part) for part in zip(*posteriors, strict=True))
    distinct = ["", *sorted(set(corpus.captions) - {""})]
    number = {caption: index for index, caption in enumerate(distinct)}
    hidden = kit.text(distinct)
    caption_of = torch.tensor([number[c] for c in corpus.captions], device=device)
    torch.manual_seed(seed_of(recipe.seed, "unclip"))
    unet = untrained.new_unclip_unet(kit.unet, recipe.embedding).requires_grad_()
    levels_count = noise.scheduler.config.num_train_timesteps

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.unclip_batch, generator)
        x0 = mean[rows] + (0.5 * logvar[rows]).exp() * torch.randn(
            mean[rows].shape, generator=generator, device=device
        )
        levels = torch.randint(levels_count, (len(rows),), generator=generator, device=device)
        own_noise = torch.randn(len(rows), recipe.embedding, generator=generator, device=device)
        image = noise(embeddings[rows], levels, own_noise)
        no_text, no_image = torch.rand(2, len(rows), generator=generator, device=device)
        image = image * (no_image >= recipe.unclip_image_dropout)[:, None]
        condition = torch.where(
            (no_text < recipe.unclip_caption_dropout)[:, None, None],
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
    half = diffusion.load_kit(out, "cpu", torch.float16)
    pipe = untrained.unclip_pipeline(
        half, unet.cpu().half(), encoders.load_image_encoder(str(out), torch.device("cpu")), noise
    )
    pipe.image_encoder.half()
    pipe.save_pretrained(unclip)
    # Diffusers notes where a part came from: a path of this machine
    for file in unclip.rglob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content.pop("_name_or_path", None):
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return {"unclip": log}


def train_small_decoder(
    out: Path, work: Path, recipe: Recipe, corpus: Corpus, progress: Progress
) -> dict[str, dict]:
    """A decoder in TAESD's format that learns what the kit's own makes of x0hat, at every noise
    level: there a classifier's guidance uses it.
    """
    device = corpus.pixels.device
    kit = diffusion.load_kit(out, device)
    torch.manual_seed(seed_of(recipe.seed, "small_decoder"))
    small = untrained.new_small_decoder(recipe.small_decoder_width)
    hidden = kit.text([""])

    def loss(generator: torch.Generator) -> torch.Tensor:
        rows = corpus.draw_balanced(recipe.small_decoder_batch, generator)
        with torch.no_grad():
            x0, _ = kit.encode(corpus.images(rows))
            t = torch.randint(
                len(kit.alphas_cumprod), (len(rows),), generator=generator, device=device
            )
            a_t = kit.alphas_cumprod[t]
            z = diffusion.forward_noise(
                x0, torch.randn(x0.shape, generator=generator, device=device), a_t
            )
            e = kit.eps(z, t, hidden.expand(len(rows), -1, -1))
            clean = (torch.rand(len(rows), generator=generator, device=device) < 0.5)[
                :, None, None, None
            ]
            a_t = a_t.view(-1, 1, 1, 1)
            latents = torch.where(clean, x0, diffusion.x0hat(z, e, a_t))
            target = kit.decode(latents)
        return F.l1_loss(small.decode(latents).sample, target)

    stage = Stage(
        "small_decoder",
        nn.ModuleDict({"decoder": small.decoder}),
        recipe.small_decoder_steps,
        recipe.small_decoder_lr,
        loss,
        ema_decay=0.995,
    )
    log = run_stage(stage, work, recipe.seed, device, progress)
    small.half().save_pretrained(out / SMALL_DECODER)
    return {"small_decoder": log}
