"""zero-shot: a public CLIP with the classes' names as its head. Clients send nothing, and test it.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (arXiv
2103.00020), sections 3.1.2 and 3.1.4: an image belongs to the class whose text has the largest
cosine with it; a class's text embedding is the mean over its templates.

Differences from the paper:

1. Theirs: images resized bicubically to CLIP's own size. Ours: resized to `data.image-size` as for
   every other model, then bicubically to CLIP's size if that differs.
2. Theirs: 80 templates for ImageNet. Ours: `zero-shot.templates`.
"""

import hashlib
from collections.abc import Mapping

import torch

from osfl.config import RunConfig
from osfl.inference.description import describe
from osfl.kit.kits import find_kit
from osfl.kit.used_parts import global_settings
from osfl.models.clip_classifier import ClipClassifier
from osfl.models.encoders import Clip, load_clip
from osfl.payload.kinds import Payload
from osfl.util.costs import Stopwatch
from osfl.util.prompts import fill_prompt
from server_app.context import GlobalModel, ServerJob

NAME = "CLIP"


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """Return CLIP's image tower with a head of the classes' names, as the run's global model."""
    watch = Stopwatch()
    job.status.phase("encoding the classes' names")
    config = job.config
    model, architecture = load_classifier(job)
    head = model.head.weight.detach().contiguous()
    record = {
        "seconds": watch.seconds,
        "inputs": hashlib.sha256(head.numpy().tobytes()).hexdigest(),
    }
    settings = global_settings(config, architecture)
    described = describe(config, job.folder.path.name, NAME, settings, model)
    job.folder.store_model(NAME, model.state_dict(), record, described.metadata())
    return {NAME: GlobalModel(model, architecture, small_stem=False)}


def load_classifier(job: ServerJob) -> tuple[ClipClassifier, str]:
    """Return CLIP's image tower with a head of the classes' names, and its architecture.

    Raises:
        KitError: the model is missing, corrupt or of another kind.
    """
    config = job.config
    clip = load_clip(config.zero_shot.clip or find_kit(config.kit), job.device)
    return clip.classifier(encode_classes(clip, config, job.classes))


def encode_classes(clip: Clip, config: RunConfig, classes: tuple[str, ...]) -> torch.Tensor:
    """Return each class's text embedding of norm 1, [C, e] on the CPU."""
    rows = []
    for name in classes:
        words = {"class": config.data.prompt_name(name)}
        texts = [fill_prompt(template, words) for template in config.zero_shot.texts]
        # CLIP, section 3.1.4: the mean of the templates' normalized embeddings, normalized again
        rows.append(torch.nn.functional.normalize(clip.encode_texts(texts).mean(dim=0), dim=0))
    return torch.stack(rows)
