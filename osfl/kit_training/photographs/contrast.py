"""Train a miniature CLIP on public images and captions: the kit's text and image encoders.

The loss is UniCL's (Yang et al., arXiv 2204.03610, eqs. 2-4): CLIP's symmetric cross-entropy, in
which all images that share a caption are positives of its text, because a batch holds many images
of one class.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

from osfl.kit_training import untrained
from osfl.kit_training.parts import random_view
from osfl.kit_training.photographs.corpus import PublicCorpus
from osfl.kit_training.photographs.recipe import PhotographRecipe
from osfl.kit_training.stages import CHECKPOINT_SECONDS, Stage, run_stage
from osfl.models.encoders import ImageEncoder, TextEncoder
from osfl.util.pixels import to_float
from osfl.util.seeds import generator_of, seed_of

STAGE = "encoders"
IMAGE_STAGE = "image_encoder"
# CLIP's upper bound on its logit scale
MAX_SCALE = 100.0


class Encoders:
    """A miniature CLIP with its tokenizer and preprocessing."""

    def __init__(self, corpus: PublicCorpus, recipe: PhotographRecipe, device: torch.device):
        torch.manual_seed(seed_of(recipe.seed, STAGE))
        captions = corpus.captions
        self.clip, self.tokenizer, self.processor = untrained.new_clip(captions, recipe)
        if device.type == "cpu":
            # On a CPU torch's fused attention is slow in bfloat16
            self.clip.set_attn_implementation("eager")
        self.tokens = TextEncoder(self.clip.text_model, self.tokenizer).tokens(captions)
        self._mean = torch.tensor(self.processor.image_mean).view(3, 1, 1)
        self._std = torch.tensor(self.processor.image_std).view(3, 1, 1)

    @property
    def text(self) -> TextEncoder:
        """The text encoder tau."""
        return TextEncoder(self.clip.text_model, self.tokenizer)

    @property
    def image(self) -> ImageEncoder:
        """The image encoder, with copied weights."""
        return ImageEncoder(untrained.image_tower(self.clip), self.processor)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, e] of norm 1 of images [B, 3, S, S] in [-1, 1]."""
        inputs = ((images + 1) / 2 - self._mean.to(images.device)) / self._std.to(images.device)
        return F.normalize(self.clip.get_image_features(inputs).pooler_output.float())

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return embeddings [N, e] of norm 1 of any texts."""
        return self._embed_tokens(self.text.tokens(texts))

    def embed_captions(self, captions: torch.Tensor) -> torch.Tensor:
        """Return embeddings [U, e] of norm 1 of the corpus's captions, by their indices [U]."""
        device = self.clip.logit_scale.device
        return self._embed_tokens(self.tokens.to(device)[captions.to(device)])

    def _embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.clip.get_text_features(tokens).pooler_output.float())


def train_encoders(
    work: Path, recipe: PhotographRecipe, corpus: PublicCorpus, device: torch.device, bar: Progress
) -> tuple[Encoders, dict[str, dict[str, Any]]]:
    """Train both encoders, then the image encoder alone for `more_steps`.

    The UNet depends on the text encoder, so later training can only change the image encoder.

    Returns:
        The encoders in eval mode, and the log of each stage.
    """
    encoders = Encoders(corpus, recipe, device)
    settings = recipe.image_encoder

    def loss(generator: torch.Generator) -> torch.Tensor:
        # The corpus stays on the CPU
        host = generator_of(generator.initial_seed(), "rows")
        rows = corpus.draw(settings.batch, host)
        captions = corpus.draw_captions(rows, host)
        images = to_float(corpus.images(rows).to(device))
        mirror = torch.rand(len(rows), 1, 1, 1, generator=host) < 0.5
        images = torch.where(mirror.to(device), images.flip(3), images)
        view = random_view(images, generator)
        with torch.autocast(device.type, torch.bfloat16):
            return contrastive_loss(encoders, view, captions)

    clip = encoders.clip
    joint_stage = Stage(
        STAGE,
        nn.ModuleDict({"clip": clip}),
        settings.steps,
        settings.lr,
        loss,
        ema_decay=0.995,
        patience=CHECKPOINT_SECONDS,
    )
    log = {STAGE: run_stage(joint_stage, work, recipe.seed, device, bar)}
    if settings.more_steps or (work / f"{IMAGE_STAGE}.pt").is_file():
        tower = nn.ModuleDict({"model": clip.vision_model, "projection": clip.visual_projection})
        image_stage = replace(
            joint_stage,
            name=IMAGE_STAGE,
            modules=tower.requires_grad_(),
            steps=settings.more_steps,
            lr=settings.more_lr,
            ema_decay=0.999,
            decay=False,
        )
        log[IMAGE_STAGE] = run_stage(image_stage, work, recipe.seed, device, bar)
    return encoders, log


def contrastive_loss(
    encoders: Encoders, images: torch.Tensor, captions: torch.Tensor
) -> torch.Tensor:
    """Return UniCL's loss of images [B, 3, S, S] and the indices [B] of their captions.

    A text is an anchor once for every image that it belongs to; its target is uniform over them.
    """
    distinct, text_of = captions.unique(return_inverse=True)
    text_of = text_of.to(images.device)
    scale = encoders.clip.logit_scale.exp().clamp(max=MAX_SCALE)
    logits = scale * encoders.embed_images(images) @ encoders.embed_captions(distinct).T
    return bidirectional_loss(logits, text_of)


def bidirectional_loss(logits: torch.Tensor, text_of: torch.Tensor) -> torch.Tensor:
    """Return the mean of both directions' cross-entropies.

    Args:
        logits: of each image and each distinct text, [B, U].
        text_of: index of each image's text, [B].
    """
    # UniCL, eq. 3: image to text
    image_to_text = F.cross_entropy(logits, text_of)
    # UniCL, eq. 4: text to image, with a uniform target over the text's images
    log_shares = F.log_softmax(logits, dim=0)
    text_to_image = -log_shares.gather(1, text_of[:, None]).mean()
    return (image_to_text + text_to_image) / 2
