"""Espresso's client half.

A condition for every visual sub-pattern of a class, and a Gaussian mixture of its noised latents.

Espresso ("Guiding Diffusion Models with Fine-Grained Conditions and Semantics-Preserving Sampling",
CVPR 2026; its code is not public), phase 1. (C) A frozen image encoder's features are clustered
inside every class; each cluster learns a condition as FedDEO's description (eq. 8). (G) The class's
latents, mixed by MixUp, are diffused forward to the first sampling timestep, and a diagonal
Gaussian mixture is fitted to them.

Differences from the paper:

1. Theirs: DINOv2, or CLIP. Ours: the kit's image encoder (a small CLIP), or any DINOv2 or CLIP by
   `image-encoder`.
2. Theirs: "hierarchical clustering". Ours: agglomerative with Ward's criterion, scikit-learn's
   default.
3. Theirs, silent on where a condition begins: ours begins at the class prompt's encoding, as
   FedDEO's.
4. Theirs, silent on MixUp's law and the number of draws: ours Beta(1, 1) between two images of the
   class, one mixture for every image. Theirs: a mixture fitted to noised latents. Ours: fitted to
   the clean ones and diffused forward in closed form, as if by infinitely many draws; a fit to a
   few draws
   is a fit to their noise: with 16 images and 10 draws of each, the component means have 10 to 20
   times the power of the class's signal. `espresso.mixture-fit = "sampled"` is the paper's wording,
   with `espresso.noise-draws` draws. A class with fewer images than M has fewer components; the
   places left over have weight 0.
5. Theirs: SD's [77, 768] conditions; a class with fewer images than J has fewer clusters. Ours: the
   same, sent in J places with weight 0 in those left over.
6. `espresso.gmm = false` sends no mixture (rows C and C+Z of its ablation).

Payload for Stable Diffusion 1.5 at 512 px: J x 59,136 + J + M x (1 + 2 x 16,384) = 367,624 numbers
a class with J = M = 4.
"""

from functools import partial

import torch
from sklearn.cluster import AgglomerativeClustering

from client_app.context import ClientJob
from client_app.learning.conditions import learn_conditions, load_kit_to_learn, posteriors
from client_app.learning.mixtures import fit_mixture, padded_mixture
from osfl.models.diffusion import forward_noise
from osfl.models.encoders import load_image_encoder
from osfl.payload.kinds import Mixtures
from osfl.util.seeds import generator_of, seed_of


def make_payload(job: ClientJob) -> Mixtures:
    """Cluster, learn a condition for each cluster, fit the mixtures.

    Raises:
        KitError: the kit or the image encoder is missing or damaged.
        ValueError: a condition diverged.
    """
    settings = job.config.espresso
    kit = load_kit_to_learn(job)
    encoder = load_image_encoder(job.config.image_encoder or job.kit, job.device)
    images = job.load(kit.image_size)
    seen = job.load(encoder.fit)
    embedded: list[torch.Tensor] = []
    job.progress(0, len(seen), "embedding image")
    for x in seen.pixels.split(16):
        embedded.append(job.meter.run(("embed", len(x)), partial(encoder, x)))
        job.progress(sum(map(len, embedded)), len(seen), "embedding image")
    features = torch.cat(embedded)
    mean, logvar = posteriors(kit, images, job)
    held = images.held()
    names = [job.classes[label] for label in held]

    # C: one condition a cluster
    rows_of = []
    owners = []
    cluster_names = []
    for index, label in enumerate(held):
        rows = (images.labels == label).nonzero().flatten()
        for number, members in enumerate(cluster(features[rows], settings.clusters)):
            rows_of.append(rows[members])
            owners.append((index, number))
            cluster_names.append(f"{names[index]}/{number}")
    prompts = kit.text(job.config.prompts(names))
    start = prompts[[index for index, _ in owners]]
    learned = (
        learn_conditions(kit, start, mean, logvar, rows_of, cluster_names, settings, job)
        .float()
        .cpu()
    )
    conditions = torch.zeros(len(held), settings.clusters, *learned.shape[1:])
    weights = torch.zeros(len(held), settings.clusters)
    for (index, number), condition, rows in zip(owners, learned, rows_of, strict=True):
        conditions[index, number] = condition
        weights[index, number] = len(rows) / int((images.labels == held[index]).sum())
    if not settings.gmm:
        return Mixtures(tuple(names), conditions, weights)

    # G: a mixture of the noised latents of every class
    kit.scheduler.set_timesteps(job.config.synthesis.steps)
    a_first = kit.alphas_cumprod[int(kit.scheduler.timesteps[0])].cpu()
    mixtures = []
    for label, name in zip(held, names, strict=True):
        rows = (images.labels == label).nonzero().flatten()
        mixtures.append(_mixture(mean[rows].cpu(), logvar[rows].cpu(), a_first, name, job))
    shares, means, variances = (torch.stack(part) for part in zip(*mixtures, strict=True))
    return Mixtures(tuple(names), conditions, weights, shares, means, variances)


def _mixture(
    mean: torch.Tensor, logvar: torch.Tensor, a_t: torch.Tensor, name: str, job: ClientJob
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One class's, as the config asks for it."""
    settings = job.config.espresso
    stream = ("espresso mixture", job.client, name)
    generator = generator_of(job.config.seed, *stream)
    seed = seed_of(job.config.seed, *stream)
    if settings.mixture_fit == "closed":
        return closed_mixture(mean, logvar, a_t, settings.components, generator, seed)
    latents = noised_latents(mean, logvar, a_t, settings.noise_draws, generator)
    return fit_mixture(latents, settings.components, seed)


def cluster(features: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Ward clusters of features [N, e].

    The members of each, at most `count` and at most N of them.
    """
    count = min(count, len(features))
    if count == 1:
        return [torch.arange(len(features))]
    labels = torch.from_numpy(
        AgglomerativeClustering(count, linkage="ward").fit_predict(features.numpy())
    )
    return [(labels == number).nonzero().flatten() for number in range(count)]


def mixed_latents(
    mean: torch.Tensor, logvar: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """MixUp of a class's latents, one of every image: [N, c, h, w].

    Args:
        mean, logvar: posteriors of the class's N images, [N, c, h, w].
    """
    x0 = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator)
    share = torch.rand(len(x0), 1, 1, 1, generator=generator)  # Beta(1, 1)
    return share * x0 + (1 - share) * x0[torch.randperm(len(x0), generator=generator)]


def noised_latents(
    mean: torch.Tensor,
    logvar: torch.Tensor,
    a_t: torch.Tensor,
    draws: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mixed latents, diffused forward `draws` times each: [N * draws, c, h, w].

    Args:
        a_t: alphas_cumprod at the first sampling timestep, [].
    """
    many = mixed_latents(mean, logvar, generator).repeat(draws, 1, 1, 1)
    return forward_noise(many, torch.randn(many.shape, generator=generator), a_t.expand(len(many)))


def closed_mixture(
    mean: torch.Tensor,
    logvar: torch.Tensor,
    a_t: torch.Tensor,
    components: int,
    generator: torch.Generator,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixture of the mixed clean latents, diffused forward: no noise is drawn.

    A component N(mu, s^2) of z_0 is N(sqrt(a_t) mu, a_t s^2 + 1 - a_t) of z_t (DDPM, eq. 4).

    Returns:
        weights [M], means and variances [M, c, h, w]; components beyond the N images have weight 0.
    """
    latents = mixed_latents(mean, logvar, generator)
    weights, centres, spreads = padded_mixture(latents, components, seed)
    return weights, a_t.sqrt() * centres, a_t * spreads + 1 - a_t
