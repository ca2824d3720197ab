"""OSCAR's server half: images from each client's mean caption encodings.

OSCAR (Zaland et al., arXiv 2502.08488), section III: classifier-free guidance on the mean encoding
of a class's captions.

Differences from the paper:

1. Theirs: `(1 + s) e_c - s e_0` with s = 7.5 (eq. 8). Ours: diffusers' convention, in which the
   same guidance is `g = 1 + s` (`oscar.guidance`). configs/methods/oscar.toml has g = 7.5, Stable
   Diffusion's usual scale; the paper's would be 8.5.
2. Ours: `oscar-pooled` sends one vector p per class, and the condition is `[h_bos, p, p, ..., p]`:
   the state h_bos of the begin-of-text token is a constant of the text encoder (the token attends
   to itself only), and every state after the end of the text resembles the state at its end.
   A kit with a pooled vector gets that of the class's prompt.
3. Theirs: 30 images per class (10 in its tables 2 and 3). Ours: `synthesis.images-per-class`.
4. Theirs: noise in every step (eq. 9). Ours: DDIM without noise (eta = 0), as in all methods here.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.models.diffusion import Kit
from osfl.payload.kinds import Encodings
from server_app.context import ServerJob, rows_by_class
from server_app.costs import NoisyMean
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Encodings]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Encodings]) -> Sample:
    """Return a function that samples images from their clients' encodings of their classes."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    guidance = job.config.oscar.guidance
    steps = job.config.synthesis.steps
    prompts = kit.text(job.config.prompts(job.classes))
    encodings = rows_by_class(job, payloads, lambda payload: as_states(kit, payload.vectors))

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        states = torch.stack([encodings[image.client, image.label] for image in jobs])
        c = prompts[[image.label for image in jobs]].with_states(states)
        # OSCAR, eq. 8, with g = 1 + s: e = e_0 + g (e_c - e_0)
        return sample(kit, jobs, c, guidance, steps)

    return draw


def as_states(kit: Kit, vectors: torch.Tensor) -> torch.Tensor:
    """Return states [C, L, d] of conditions from mean states [C, L, d] or pooled ones [C, d].

    A pooled vector p becomes `[h_bos, p, ..., p]`.
    """
    vectors = vectors.to(kit.device, kit.dtype)
    if vectors.ndim == 3:
        return vectors
    length, _ = kit.text.shape
    h_bos = kit.text([""]).states[:, :1].expand(len(vectors), -1, -1)
    return torch.cat([h_bos, vectors[:, None].expand(-1, length - 1, -1)], dim=1)


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return a class's mean encoding; a pooled one has no tokens."""
    return NoisyMean(sizes.get("L", 1) * sizes["d"])
