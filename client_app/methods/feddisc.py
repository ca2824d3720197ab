"""FedDISC's client half: cluster centres of a class's noised image embeddings, and their mean.

FedDISC (Yang et al., arXiv 2305.04063), as FedDEO and FedLMG compare with it: the true labels take
the place of its pseudo-labels.

Differences from the paper:

1. Theirs: Stable unCLIP's CLIP ViT-H. Ours: the image encoder of the Stable unCLIP folder
   `feddisc.kit`, whatever it is.
2. The domain's feature: ours is the mean of each class's images, as an upload of (K + 1) vectors a
   class says.
3. The order: ours noises every image's embedding once at `feddisc.noise-level`, then clusters; a
   class with fewer than K images sends some centres twice.
4. Theirs: no guarantee. Ours: with `epsilon` every centre is the class's noised mean, of embeddings
   that the kit's normaliser has given about the mean 0 and the deviation 1.

Payload for Stable unCLIP 2.1 (embeddings of 1024 and their level's encoding): (5 + 1) x 2048 =
12,288 numbers a class.
"""

from functools import partial

import torch
from sklearn.cluster import KMeans

from client_app.context import ClientJob
from client_app.privacy.mechanisms import private_mean, standard_normal
from osfl.config import RunConfig
from osfl.models.diffusion import EmbeddingNoise, load_embedding_noise
from osfl.models.encoders import load_image_encoder
from osfl.payload.kinds import Embeddings
from osfl.util.seeds import seed_of


def make_payload(job: ClientJob) -> Embeddings:
    """Embed, noise, cluster.

    Raises:
        KitError: the image encoder or its noise schedule is missing or damaged.
    """
    settings = job.config.feddisc
    encoder = load_image_encoder(job.kit, job.device)
    add_noise = load_embedding_noise(job.kit)
    images = job.load(encoder.fit)
    parts: list[torch.Tensor] = []
    job.progress(0, len(images), "embedding image")
    for pixels in images.pixels.split(16):
        parts.append(job.meter.run(("embed", len(pixels)), partial(encoder, pixels)))
        job.progress(sum(map(len, parts)), len(images), "embedding image")
    embeddings = torch.cat(parts)
    held = images.held()
    names = tuple(job.classes[label] for label in held)
    if job.config.epsilon:
        own = [embeddings[images.labels == label] for label in held]
        noised_means = [private_vectors(rows, add_noise, job.config) for rows in own]
        return Embeddings(names, torch.stack(noised_means))
    noise = standard_normal(embeddings.shape).float()
    noised = add_noise(embeddings, torch.full((len(embeddings),), settings.noise_level), noise)
    vectors = [
        class_vectors(
            noised[images.labels == label],
            settings.clusters,
            seed_of(job.config.seed, "feddisc", job.client, label),
        )
        for label in held
    ]
    return Embeddings(names, torch.stack(vectors))


def class_vectors(noised: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """[K + 1, 2e] of a class's noised embeddings [N, 2e]: K-means centres, then the mean of all."""
    count = min(clusters, len(noised))
    centres = (
        KMeans(count, n_init=10, random_state=seed % 2**32).fit(noised.numpy()).cluster_centers_
    )
    rows = torch.from_numpy(centres).float()[[index % count for index in range(clusters)]]
    return torch.cat([rows, noised.mean(dim=0, keepdim=True)])


def private_vectors(
    embeddings: torch.Tensor, add_noise: EmbeddingNoise, config: RunConfig
) -> torch.Tensor:
    """[K + 1, 2e] of a class's embeddings [N, e]: their noised mean, at the noise level."""
    scaled = add_noise.normalizer.scale(embeddings)
    centre = torch.zeros_like(scaled[0])
    # Numbers of deviation 1 have this norm
    limit = config.clip_norm * scaled.shape[1] ** 0.5
    mean = private_mean(scaled, centre, limit, config.epsilon, config.delta).unsqueeze(0)
    level = torch.tensor([config.feddisc.noise_level])
    # What the level leaves of it; its own noise has the mean 0
    vector = add_noise(add_noise.normalizer.unscale(mean), level, torch.zeros_like(mean))
    return vector.repeat(config.feddisc.clusters + 1, 1)
