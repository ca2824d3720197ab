"""Client half of Espresso: a condition per visual sub-pattern of a class, and a latent mixture.

Espresso ("Guiding Diffusion Models with Fine-Grained Conditions and Semantics-Preserving Sampling",
CVPR 2026; its code is not public), phase 1. (C) A frozen image encoder's features are clustered
within every class; each cluster learns a condition as FedDEO learns a description (eq. 8). (G) The
class's latents, mixed by MixUp, are diffused forward to the first sampling timestep, and a diagonal
Gaussian mixture is fitted to them.

Differences from the paper:

1. Theirs: DINOv2, or CLIP. Ours: the kit's image encoder (a small CLIP), or any DINOv2 or CLIP by
   `image-encoder`.
2. Theirs: "hierarchical clustering". Ours: agglomerative with Ward's criterion, scikit-learn's
   default.
3. Theirs does not state a condition's initial value. Ours: the class prompt's encoding, as in
   FedDEO.
4. Theirs does not state MixUp's distribution and the number of draws. Ours: Beta(1, 1) between two
   images of the class, one mixed latent per image. Theirs: a mixture fitted to noisy latents.
   Ours: fitted to the clean ones and diffused forward in closed form, as if by infinitely many
   draws. A fit to a few draws fits their noise: with 16 images and 10 draws of each, the component
   means have 10 to 20 times the power of the class's signal. `espresso.mixture-fit = "sampled"`
   follows the paper's wording, with `espresso.noise-draws` draws. A class with fewer images than M
   has fewer components, padded with weight 0.
5. Theirs: SD's [77, 768] conditions; a class with fewer images than J has fewer clusters. Ours: the
   same, sent as J conditions, padded with weight 0.
6. `espresso.gmm = false` sends no mixture (rows C and C+Z of its ablation).

Payload for Stable Diffusion 1.5 at 512 px: J x 59,136 + J + M x (1 + 2 x 16,384) = 367,624 numbers
per class with J = M = 4.
"""

from functools import partial

import torch
from sklearn.cluster import AgglomerativeClustering

from client_app.context import ClientJob
from client_app.learning.conditions import load_kit_for_training, posteriors, train_conditions
from client_app.learning.mixtures import diffuse_mixture, fit_mixture, padded_mixture
from osfl.data.load import Images
from osfl.models.diffusion import Kit, forward_noise
from osfl.models.encoders import ImageEncoder, load_image_encoder
from osfl.payload.kinds import Mixtures
from osfl.util.seeds import generator_of, seed_of


def make_payload(job: ClientJob) -> Mixtures:
    """Cluster the images, learn a condition for each cluster, and fit the mixtures.

    Raises:
        KitError: the kit or the image encoder is missing or corrupt.
        ValueError: a condition diverged.
    """
    settings = job.config.espresso
    kit = load_kit_for_training(job)
    encoder = load_image_encoder(job.config.image_encoder or job.kit, job.device)
    images = job.load(kit.image_size)
    features = _features(encoder, job)
    mean, logvar = posteriors(kit, images, job)
    class_labels = images.held()
    names = tuple(job.classes[label] for label in class_labels)
    conditions, weights = _cluster_conditions(kit, images, features, mean, logvar, job)
    if not settings.gmm:
        return Mixtures(names, conditions, weights)

    # G: a mixture of the noisy latents of every class
    kit.scheduler.set_timesteps(job.config.synthesis.steps)
    a_first = kit.alphas_cumprod[int(kit.scheduler.timesteps[0])].cpu()
    mixtures = []
    for label, name in zip(class_labels, names, strict=True):
        rows = (images.labels == label).nonzero().flatten()
        mixtures.append(_mixture(mean[rows].cpu(), logvar[rows].cpu(), a_first, name, job))
    shares, means, variances = (torch.stack(part) for part in zip(*mixtures, strict=True))
    return Mixtures(names, conditions, weights, shares, means, variances)


def _features(encoder: ImageEncoder, job: ClientJob) -> torch.Tensor:
    """Return the image encoder's features of the client's images, [N, e]."""
    images = job.load(encoder.fit)
    embedded: list[torch.Tensor] = []
    for x in job.batched(images.pixels.split(16), len(images), "embedding image"):
        embedded.append(job.meter.run(("embed", len(x)), partial(encoder, x)))
    return torch.cat(embedded)


def _cluster_conditions(
    kit: Kit,
    images: Images,
    features: torch.Tensor,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    job: ClientJob,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return conditions [C, J, L, d] and each cluster's share of its class's images [C, J]."""
    settings = job.config.espresso
    class_labels = images.held()
    names = [job.classes[label] for label in class_labels]
    # C: one condition per cluster
    rows_of = []
    owners = []
    cluster_names = []
    for index, label in enumerate(class_labels):
        rows = (images.labels == label).nonzero().flatten()
        for number, members in enumerate(cluster_features(features[rows], settings.clusters)):
            rows_of.append(rows[members])
            owners.append((index, number))
            cluster_names.append(f"{names[index]}/{number}")
    prompts = kit.text(job.config.prompts(names))
    start = prompts[[index for index, _ in owners]]
    learned = train_conditions(kit, start, mean, logvar, rows_of, cluster_names, settings, job)
    learned = learned.float().cpu()
    conditions = torch.zeros(len(class_labels), settings.clusters, *learned.shape[1:])
    weights = torch.zeros(len(class_labels), settings.clusters)
    for (index, number), condition, rows in zip(owners, learned, rows_of, strict=True):
        conditions[index, number] = condition
        weights[index, number] = len(rows) / int((images.labels == class_labels[index]).sum())
    return conditions, weights


def _mixture(
    mean: torch.Tensor, logvar: torch.Tensor, a_t: torch.Tensor, name: str, job: ClientJob
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit one class's mixture, as the run configures it."""
    settings = job.config.espresso
    stream = ("espresso mixture", job.client, name)
    generator = generator_of(job.config.seed, *stream)
    seed = seed_of(job.config.seed, *stream)
    if settings.mixture_fit == "closed":
        return closed_mixture(mean, logvar, a_t, settings.components, generator, seed)
    latents = noisy_latents(mean, logvar, a_t, settings.noise_draws, generator)
    return fit_mixture(latents, settings.components, seed)


def cluster_features(features: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the rows of each Ward cluster of features [N, e]: min(`count`, N) clusters."""
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
    """Return MixUp of a class's latents, one per image: [N, c, h, w].

    Args:
        mean, logvar: posteriors of the class's N images, [N, c, h, w].
    """
    x0 = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator)
    # Beta(1, 1)
    share = torch.rand(len(x0), 1, 1, 1, generator=generator)
    return share * x0 + (1 - share) * x0[torch.randperm(len(x0), generator=generator)]


def noisy_latents(
    mean: torch.Tensor,
    logvar: torch.Tensor,
    a_t: torch.Tensor,
    draws: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return mixed latents, diffused forward `draws` times each: [N * draws, c, h, w].

    Args:
        a_t: alphas_cumprod at the first sampling timestep, [].
    """
    x0 = mixed_latents(mean, logvar, generator).repeat(draws, 1, 1, 1)
    return forward_noise(x0, torch.randn(x0.shape, generator=generator), a_t.expand(len(x0)))


def closed_mixture(
    mean: torch.Tensor,
    logvar: torch.Tensor,
    a_t: torch.Tensor,
    components: int,
    generator: torch.Generator,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit a mixture to the mixed clean latents and diffuse it forward in closed form.

    Returns:
        weights [M], means and variances [M, c, h, w]; components beyond the N images have weight 0.
    """
    latents = mixed_latents(mean, logvar, generator)
    return diffuse_mixture(padded_mixture(latents, components, seed), a_t)
