"""OSCAR's server half: images from each client's mean caption encodings.

OSCAR (Zaland et al., arXiv 2502.08488), section III: classifier-free guidance on the mean encoding of a class's captions.

Differences from the paper:

1. Theirs: `(1 + s) e_c - s e_0` with s = 7.5 (eq. 8). Ours: diffusers' convention, in which the same guidance is `g = 1 + s` (`oscar.guidance`);
   configs/methods/oscar.toml has 7.5 for g, Stable Diffusion's usual scale, where the paper's would be 8.5.
2. `oscar-pooled` sends one vector a class, p. Ours lays it out as `[h_bos, p, p, ..., p]`: the state of the begin-of-text token is a constant of the
   text encoder (it attends to nothing else), and every state after the end of the text resembles the end's.
3. Theirs: 30 images a class (10 in its tables 2 and 3). Ours: `synthesis.images-per-class`.
4. Theirs: noise in every step (eq. 9). Ours: DDIM without (eta = 0), as in all methods here.
"""

from collections.abc import Mapping
from typing import cast

import torch

from osfl.models.diffusion import Kit
from osfl.payloads import Encodings, Payload
from server_app.job import GlobalModel, ServerJob
from server_app.methods.prompts_only import sample
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import render
from server_app.synthesis.plan import plan_images
from server_app.synthesis.workers import Sample
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """R images for every class of every client; one global model, FT."""
    encodings = cast(Mapping[str, Encodings], payloads)
    plan = plan_images(
        job.config.method,
        job.config.seed,
        job.held(payloads),
        job.config.synthesis.images_per_class,
    )
    images = render(
        job,
        plan,
        lambda device: _sampler(job, device, encodings),
        {"guidance": job.config.oscar.guidance},
    )
    return {"FT": train_global(job, "FT", images.pixels, images.labels)}


def _sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Encodings]) -> Sample:
    kit = load_engine(job.kit, device, job.config.synthesis)
    condition_of = {
        (client, job.classes.index(name)): condition
        for client, payload in payloads.items()
        for name, condition in zip(
            payload.classes, as_conditions(kit, payload.vectors), strict=True
        )
    }
    return lambda jobs: sample(
        kit,
        jobs,
        torch.stack([condition_of[image.client, image.label] for image in jobs]),
        job.config.oscar.guidance,
        job.config.synthesis.steps,
    )


def as_conditions(kit: Kit, vectors: torch.Tensor) -> torch.Tensor:
    """Conditions [C, L, d] of mean hidden states [C, L, d], or of pooled ones [C, d]: h_bos, then the vector in every other place."""
    vectors = vectors.to(kit.device, kit.dtype)
    if vectors.ndim == 3:
        return vectors
    length, _ = kit.text.shape
    begin = kit.text([""])[:, :1].expand(len(vectors), -1, -1)
    return torch.cat([begin, vectors[:, None].expand(-1, length - 1, -1)], dim=1)
