"""OSCAR's server half: images from each client's mean caption encodings.

OSCAR (Zaland et al., arXiv 2502.08488), section III: classifier-free guidance on the mean encoding
of a class's captions.

Differences from the paper:

1. Theirs: `(1 + s) e_c - s e_0` with s = 7.5 (eq. 8). Ours: diffusers' convention, in which the
   same guidance is `g = 1 + s` (`oscar.guidance`); configs/methods/oscar.toml has 7.5 for g, Stable
   Diffusion's usual scale, where the paper's would be 8.5.
2. `oscar-pooled` sends one vector a class, p. Ours lays it out as `[h_bos, p, p, ..., p]`: the
   state of the begin-of-text token is a constant of the text encoder (it attends to nothing else),
   and every state after the end of the text resembles the end's.
3. Theirs: 30 images a class (10 in its tables 2 and 3). Ours: `synthesis.images-per-class`.
4. Theirs: noise in every step (eq. 9). Ours: DDIM without (eta = 0), as in all methods here.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.models.diffusion import Kit
from osfl.payload.kinds import Encodings
from server_app.context import ServerJob, by_class
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesise_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Encodings]) -> Models:
    """R images for every class of every client; one global model, FT."""
    return synthesise_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Encodings]) -> Sample:
    """Each image by its client's encoding of its class."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    guidance = job.config.oscar.guidance
    steps = job.config.synthesis.steps
    conditions = by_class(job, payloads, lambda payload: as_conditions(kit, payload.vectors))

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        c = torch.stack([conditions[image.client, image.label] for image in jobs])
        return sample(kit, jobs, c, guidance, steps)

    return draw


def as_conditions(kit: Kit, vectors: torch.Tensor) -> torch.Tensor:
    """Conditions [C, L, d] of mean hidden states [C, L, d], or of pooled ones [C, d].

    H_bos, then the vector in every other place.
    """
    vectors = vectors.to(kit.device, kit.dtype)
    if vectors.ndim == 3:
        return vectors
    length, _ = kit.text.shape
    begin = kit.text([""])[:, :1].expand(len(vectors), -1, -1)
    return torch.cat([begin, vectors[:, None].expand(-1, length - 1, -1)], dim=1)
