"""FedDISC's server half: images from cluster centroids of the clients' image embeddings.

FedDISC (Yang et al., arXiv 2305.04063), as FedDEO and FedLMG compare with it. A diffusion model
conditioned on image embeddings (Stable unCLIP) composes two branches with scale 2 each: a cluster's
centroid, and the class's mean as the domain's feature.

Differences from the paper:

1. Theirs: pseudo-labels for clients without labels. Ours: the true labels, as in FedDEO's and
   FedLMG's comparisons.
2. Ours: a class's images use its centroids in turn.
3. Ours: the prompt beside the embedding is the class's in both branches, and the empty prompt in
   the unconditional one.
4. Ours, with an `epsilon` or `secure-sum`: all centroids of a class are its mean.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import FedDISCConfig, RunConfig
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, load_embedding_noise
from osfl.payload.kinds import Embeddings
from server_app.context import ServerJob, rows_by_class
from server_app.costs import NoisyMean, guided_branches
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, to_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Embeddings]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Embeddings]) -> Sample:
    """Return a function that samples images from class prompts and their clients' embeddings."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    prompts = kit.text(job.config.prompts(job.classes))
    vectors = rows_by_class(
        job, payloads, lambda payload: image_conditions(job, payload).to(kit.device, kit.dtype)
    )
    settings = job.config.feddisc
    return lambda jobs: sample(kit, jobs, prompts, vectors, settings, job.config.synthesis.steps)


def image_conditions(job: ServerJob, payload: Embeddings) -> torch.Tensor:
    """Return every class's centroids and mean, [C, K + 1, 2e]; of a secure sum, its mean twice.

    Raises:
        KitError: the noise schedule of image embeddings is missing or corrupt.
    """
    if not job.config.secure_sum:
        return payload.vectors
    noise = load_embedding_noise(job.kit)
    means = noise.expected(payload.vectors[:, 0], job.config.feddisc.noise_level)
    return means.unsqueeze(1).repeat(1, 2, 1)


@torch.no_grad()
def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    vectors: Mapping[tuple[str, int], torch.Tensor],
    settings: FedDISCConfig,
    steps: int,
) -> torch.Tensor:
    """Sample with compositional guidance on a cluster's centroid and the class's mean embedding.

    Args:
        prompts: conditions of every class's prompt.
        vectors: K centroids and the mean, [K + 1, 2e], by (client, label).

    Returns:
        uint8 [B, 3, H, W].
    """
    c = prompts[[image.label for image in jobs]]
    embeddings = [vectors[image.client, image.label] for image in jobs]
    centroids = torch.stack(
        [rows[image.index % (len(rows) - 1)] for rows, image in zip(embeddings, jobs, strict=True)]
    )
    means = torch.stack([rows[-1] for rows in embeddings])
    # As in Stable unCLIP, the empty prompt's image condition is zero
    c0 = kit.text([""]).with_image(torch.zeros_like(means[:1]))
    # FedDISC: e = e0 + g_c (e_centroid - e0) + g_d (e_mean - e0)
    conditions = [
        Condition(c.with_image(centroids), settings.guidance_cluster),
        Condition(c.with_image(means), settings.guidance_domain),
    ]
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    return to_images(kit, denoise(kit, z, steps, lambda z, t: compose(kit, z, t, c0, conditions)))


def branches(config: RunConfig) -> int:
    """Return the rows per image of a guided UNet pass: centroid, mean and neither."""
    return guided_branches(config.feddisc.guidance_cluster, config.feddisc.guidance_domain)


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return a class's mean embedding.

    The other half of a condition is the noise level, which a secure sum does not have.
    """
    return NoisyMean(sizes["2e"] if sizes["K + 1"] == 1 else sizes["2e"] // 2)
