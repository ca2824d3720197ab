"""Client half of FedDISC: cluster centers of a class's noisy image embeddings, and their mean.

FedDISC (Yang et al., arXiv 2305.04063), as FedDEO and FedLMG compare with it: the true labels
replace its pseudo-labels.

Differences from the paper:

1. Theirs: Stable unCLIP's CLIP ViT-H. Ours: the image encoder of the Stable unCLIP folder
   `feddisc.kit`, whatever it is.
2. The domain's feature: ours is the mean of each class's images, as an upload of (K + 1) vectors
   per class implies.
3. The order: ours noises every image's embedding once at `feddisc.noise-level`, then clusters; a
   class with fewer than K images sends some centers twice.
4. Theirs: no DP guarantee. Ours: with `epsilon`, every center is the class's noisy mean of
   embeddings that the kit's normalizer has scaled to about mean 0 and deviation 1.
5. Ours, with `secure-sum`: a client sends the mean of each class's scaled embeddings alone, since
   cluster centers do not add up, and the server adds the level's encoding.

Payload for Stable unCLIP 2.1 (embeddings of 1024 and their level's encoding): (5 + 1) x 2048 =
12,288 numbers per class.
"""

import math
from functools import partial

import torch
from sklearn.cluster import KMeans

from client_app.context import ClientJob
from client_app.privacy.mechanisms import clipped_mean, private_mean, standard_normal
from osfl.config import RunConfig
from osfl.models.diffusion import EmbeddingNoise, load_embedding_noise
from osfl.models.encoders import load_image_encoder
from osfl.payload.kinds import Embeddings
from osfl.util.seeds import seed_of


def make_payload(job: ClientJob) -> Embeddings:
    """Embed the images, noise the embeddings, and cluster each class's.

    Raises:
        KitError: the image encoder or its noise schedule is missing or corrupt.
    """
    settings = job.config.feddisc
    encoder = load_image_encoder(job.kit, job.device)
    add_noise = load_embedding_noise(job.kit)
    images = job.load(encoder.fit)
    parts: list[torch.Tensor] = []
    for pixels in job.batched(images.pixels.split(16), len(images), "embedding image"):
        parts.append(job.meter.run(("embed", len(pixels)), partial(encoder, pixels)))
    embeddings = torch.cat(parts)
    class_labels = images.held()
    names = tuple(job.classes[label] for label in class_labels)
    if job.config.epsilon or job.config.secure_sum:
        rows_by_class = [embeddings[images.labels == label] for label in class_labels]
        means = [
            summand(rows, add_noise, job)
            if job.config.secure_sum
            else private_vectors(rows, add_noise, job.config)
            for rows in rows_by_class
        ]
        return Embeddings(names, torch.stack(means))
    noise = standard_normal(embeddings.shape).float()
    noisy = add_noise(embeddings, torch.full((len(embeddings),), settings.noise_level), noise)
    vectors = [
        class_vectors(
            noisy[images.labels == label],
            settings.clusters,
            seed_of(job.config.seed, "feddisc", job.client, label),
        )
        for label in class_labels
    ]
    return Embeddings(names, torch.stack(vectors))


def class_vectors(noisy: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """Return K-means centers and mean of a class's noisy embeddings [N, 2e]: [K + 1, 2e]."""
    count = min(clusters, len(noisy))
    centers = (
        KMeans(count, n_init=10, random_state=seed % 2**32).fit(noisy.numpy()).cluster_centers_
    )
    rows = torch.from_numpy(centers).float()[[index % count for index in range(clusters)]]
    return torch.cat([rows, noisy.mean(dim=0, keepdim=True)])


def private_vectors(
    embeddings: torch.Tensor, add_noise: EmbeddingNoise, config: RunConfig
) -> torch.Tensor:
    """Return the noisy mean of a class's embeddings [N, e] at the noise level: [K + 1, 2e]."""
    scaled = add_noise.normalizer.scale(embeddings)
    center = torch.zeros_like(scaled[0])
    limit = clipping_bound(scaled, config)
    mean = private_mean(scaled, center, limit, config.epsilon, config.delta).unsqueeze(0)
    vector = add_noise.expected(mean, config.feddisc.noise_level)
    return vector.repeat(config.feddisc.clusters + 1, 1)


def summand(embeddings: torch.Tensor, add_noise: EmbeddingNoise, job: ClientJob) -> torch.Tensor:
    """Return the mean of a class's scaled embeddings [N, e], for a secure sum: [1, e].

    With an epsilon it is clipped, and the noise is added to the whole numbers of the sum.
    """
    scaled = add_noise.normalizer.scale(embeddings)
    if not job.config.epsilon:
        plain: torch.Tensor = scaled.mean(dim=0, keepdim=True)
        return plain
    job.sum_noise.limit = clipping_bound(scaled, job.config)
    center = torch.zeros_like(scaled[0])
    return clipped_mean(scaled, center, job.sum_noise.limit).float().unsqueeze(0)


def clipping_bound(scaled: torch.Tensor, config: RunConfig) -> float:
    """Return `clip-norm` in units of the typical norm of vectors whose entries have deviation 1."""
    return config.clip_norm * math.sqrt(scaled.shape[1])
