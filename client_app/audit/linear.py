"""Linear attack on every payload that is a mean or a sum of single images' contributions.

The attacker knows both images of each pair, and the images without a canary bit. Where a bit s_i of
1 or -1 says that x_i is in the payload and not y_i, the mean v of n images satisfies

    2 n v - sum of (x_i + y_i) - 2 (sum of the other images) = sum of s_i (x_i - y_i) + noise.

This is a linear system in the bits, which a ridge regression solves. The ridge is the variance of
the noise. The attacker estimates it from the payload, and so detects missing noise.

DP-SGD also moves the last layer by a sum over the images: each image's gradient, times an unknown
factor. The same regression estimates the factors; an image outside has factor 0. Gradients are
those at the initial weights, so the estimate is exact for the first step only.

A distance to the mean (`client_app.audit.attacks`) considers one image at a time, so the other
images act as noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from client_app.context import ClientJob
from client_app.learning.conditions import image_digests, learn_condition_per_image, posteriors
from client_app.learning.features import project, width_and_features
from client_app.methods import domain_vector, oscar
from client_app.privacy.mechanisms import clip_rows, mean_distance, mean_over_tokens
from osfl.kit.kits import kit_image_size
from osfl.models.classifiers import ClassifierError, linear_head, new_classifier, rebuild_classifier
from osfl.models.diffusion import load_embedding_noise, load_kit, load_kit_autoencoder
from osfl.models.encoders import load_captioner, load_image_encoder, load_text_encoder
from osfl.payload.kinds import (
    Classifier,
    Descriptions,
    DomainVector,
    Embeddings,
    Encodings,
    FeatureMixtures,
    FeatureStatistics,
    LatentStatistics,
    Payload,
)

MEANS = "means"
# The target that scores the update of a classifier's last layer
UPDATE = "update"
# Images embedded in one batch
BATCH = 16
# Candidate variances of the noise, relative to the largest squared singular value
NOISE_LEVELS = torch.logspace(-14, 8, 221, dtype=torch.float64)


@dataclass(frozen=True)
class Means:
    """Means in a payload, and each image's contribution to its mean.

    Attributes:
        sent: [G, D].
        rows: [N, D]; clipped as the client clips them.
        groups: [N] int64, the mean that an image belongs to.
    """

    sent: torch.Tensor
    rows: torch.Tensor
    groups: torch.Tensor


def linear_attack(job: ClientJob, payload: Payload, pairs: int) -> dict[str, torch.Tensor]:
    """Return the scores [2 `pairs`] of both images of every pair, or {} if no attack applies.

    Args:
        job: loads the pairs' training images, their test images in the same order, and then the
            images that are in every payload.
        pairs: number of pairs.

    Raises:
        KeyError: the payload lacks the class of an image.
    """
    if isinstance(payload, Classifier):
        scores = _update(job, payload)
        return {} if scores is None else {UPDATE: scores[: 2 * pairs]}
    if type(payload) not in CONTRIBUTIONS:
        return {}
    means = CONTRIBUTIONS[type(payload)](job, payload)
    return {} if means is None else {MEANS: canary_scores(means, pairs)}


def canary_scores(means: Means, pairs: int) -> torch.Tensor:
    """Return estimates of the canary bits s: s for the training images, -s for the test images.

    Args:
        means: of 2 `pairs` images in pairs, followed by the other images.
        pairs: number of pairs.
    """
    scores = torch.zeros(2 * pairs, dtype=torch.float64)
    for group in means.groups.unique().tolist():
        ours = (means.groups[:pairs] == group).nonzero().flatten()
        if len(ours) == 0:
            continue
        rows = means.rows[means.groups == group].double()
        x, y = means.rows[ours].double(), means.rows[pairs + ours].double()
        others = rows.sum(dim=0) - (x + y).sum(dim=0)
        count = len(rows) - len(ours)
        residual = 2 * count * means.sent[group].double() - (x + y).sum(dim=0) - 2 * others
        scores[ours] = estimate_canary_bits(x - y, residual)
    scores[pairs:] = -scores[:pairs]
    return scores


def estimate_canary_bits(differences: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the ridge estimate of the bits s in `residual` = s @ `differences` + noise.

    For noise of variance v and fair bits, (D D^T + v I)^-1 D residual is the best linear estimate.

    Args:
        differences: D, [P, D].
        residual: [D].
    """
    return ridge(differences, residual.unsqueeze(0))[:, 0]


def ridge(rows: torch.Tensor, sums: torch.Tensor, unit: bool = True) -> torch.Tensor:
    """Return coefficients a [P, K] such that a^T `rows` approximates `sums`.

    The ridge is the noise variance that maximizes the likelihood of `sums`, for Gaussian
    coefficients and noise.

    Args:
        rows: [P, D].
        sums: [K, D].
        unit: whether the coefficients have variance 1; if not, their variance is estimated, too.
    """
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    if s[0] == 0:
        return torch.zeros(len(rows), len(sums), dtype=rows.dtype)
    projected = sums @ v.T
    outside = (sums.square().sum() - projected.square().sum()).clamp_min(0)
    noise = s[0] ** 2 * NOISE_LEVELS.unsqueeze(1)
    variances = s.square() + noise
    squares = (projected.square().sum(dim=0) / variances).sum(dim=1) + outside / noise[:, 0]
    free = rows.shape[1] - len(s)
    logs = len(sums) * (variances.log().sum(dim=1) + free * noise[:, 0].log())
    cost = logs + (squares if unit else sums.numel() * squares.clamp_min(1e-300).log())
    estimates: torch.Tensor = u @ (s * projected / variances[cost.argmin()]).T
    return estimates


def payload_rows(job: ClientJob, payload: Payload, labels: torch.Tensor) -> torch.Tensor:
    """Return the payload row of each image's class, [N]."""
    row_of = {job.classes.index(name): row for row, name in enumerate(payload.classes)}
    return torch.tensor([row_of[label] for label in labels.tolist()])


def _limited(rows: torch.Tensor, limit: float, job: ClientJob) -> torch.Tensor:
    """Return rows [N, D], clipped if the run has an epsilon."""
    return (clip_rows(rows, limit) if job.config.epsilon else rows).flatten(1)


def _descriptions(job: ClientJob, payload: Payload) -> Means | None:
    # Without epsilon the descriptions are learned from all images jointly and are not means
    if not job.config.epsilon:
        return None
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    mean, logvar = posteriors(kit, images, job)
    all_prompts = kit.text(job.config.prompts(job.classes))
    start = all_prompts[images.labels]
    settings = job.config.feddeo
    names = image_digests(images)
    learned = learn_condition_per_image(kit, start, mean, logvar, names, settings, job)
    rows = (learned - start.states).cpu().double()
    sent = cast(Descriptions, payload).vectors.double()
    limit = job.config.clip_norm * mean_distance(all_prompts.states)
    if settings.tokens == "all":
        rows, limit = mean_over_tokens(rows, limit)
    else:
        sent = sent - _prompts_of(payload, all_prompts.states.cpu().double(), job)
    groups = payload_rows(job, payload, images.labels)
    return Means(sent.flatten(1), _limited(rows, limit, job), groups)


def _domain_vector(job: ClientJob, payload: Payload) -> Means | None:
    if not job.config.epsilon:
        return None
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    mean, logvar = posteriors(kit, images, job)
    rows = domain_vector.vector_per_image(kit, images, mean, logvar, job).double()
    prompts = kit.text.states(job.config.prompts(job.classes)).cpu()
    limit = job.config.clip_norm * mean_distance(prompts)
    if job.config.domain_vector.tokens == "all":
        rows, limit = mean_over_tokens(rows, limit)
    sent = cast(DomainVector, payload).domain.double().flatten().unsqueeze(0)
    return Means(sent, _limited(rows, limit, job), torch.zeros_like(images.labels))


def _encodings(job: ClientJob, payload: Payload) -> Means:
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    images = job.load(captioner.fit)
    vectors = cast(Encodings, payload).vectors
    # A pooled encoding has no axis of tokens
    encode = text.pooled if vectors.ndim == 2 else text.states
    captions: list[str] = []
    for numbers in torch.arange(len(images)).split(BATCH):
        captions += captioner(images.pixels[numbers], job.meter)
    prompts = encode(job.config.prompts(job.classes)).cpu().double()
    rows = _encoded(encode, captions, job) - prompts[images.labels]
    sent = vectors.double() - _prompts_of(payload, prompts, job)
    limit = job.config.clip_norm * mean_distance(prompts)
    groups = payload_rows(job, payload, images.labels)
    return Means(sent.flatten(1), _limited(rows, limit, job), groups)


def _encoded(
    encode: Callable[[Sequence[str]], torch.Tensor], captions: list[str], job: ClientJob
) -> torch.Tensor:
    """Encode captions, one row each; equal captions give exactly equal rows."""
    distinct = list(dict.fromkeys(captions))
    encodings = torch.cat(list(oscar.encode_captions(encode, distinct, job.meter)))
    return encodings[[distinct.index(caption) for caption in captions]]


def _prompts_of(payload: Payload, prompts: torch.Tensor, job: ClientJob) -> torch.Tensor:
    """Select the payload's classes from the prompts of all classes."""
    return prompts[[job.classes.index(name) for name in payload.classes]]


def _embeddings(job: ClientJob, payload: Payload) -> Means:
    encoder = load_image_encoder(job.kit, job.device)
    add_noise = load_embedding_noise(job.kit)
    images = job.load(encoder.fit)
    embedded = torch.cat([encoder(pixels).cpu() for pixels in images.pixels.split(BATCH)])
    width = embedded.shape[1]
    scaled = add_noise.normalizer.scale(embedded)
    # Typical norm of a vector whose entries have deviation 1
    limited = _limited(scaled.double(), job.config.clip_norm * width**0.5, job).float()
    levels = torch.full((len(limited),), job.config.feddisc.noise_level)
    # The noise of the level has mean 0
    unscaled = add_noise.normalizer.unscale(limited)
    expected = add_noise(unscaled, levels, torch.zeros_like(limited))[:, :width]
    # The embedding is followed by its level, which is the same for all
    sent = cast(Embeddings, payload).vectors[:, -1, :width]
    rows, means = (add_noise.normalizer.scale(part) for part in (expected, sent))
    return Means(means, rows, payload_rows(job, payload, images.labels))


def features_and_labels(job: ClientJob, projection: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [N, D] of a frozen network, and labels [N].

    Args:
        projection: D of projected features; 0: no projection.
    """
    images = job.load(job.config.data.image_size)
    _, batches = project(job, projection, *width_and_features(job, images))
    return torch.cat([batch for _, batch in batches]), images.labels


def _feature_statistics(job: ClientJob, payload: Payload) -> Means:
    sent = cast(FeatureStatistics, payload)
    features, labels = features_and_labels(job, job.config.fedcgs.projection)
    means = sent.sums.double() / sent.counts.unsqueeze(1)
    return Means(means, features, payload_rows(job, payload, labels))


def _feature_mixtures(job: ClientJob, payload: Payload) -> Means:
    sent = cast(FeatureMixtures, payload)
    features, labels = features_and_labels(job)
    # The mean of a mixture fitted by EM is the mean of its images
    means = (sent.weights.double().unsqueeze(2) * sent.means.double()).sum(dim=1)
    limit = job.config.clip_norm * features.shape[1] ** 0.5
    return Means(means, _limited(features, limit, job), payload_rows(job, payload, labels))


def _latent_statistics(job: ClientJob, payload: Payload) -> Means:
    sent = cast(LatentStatistics, payload)
    images = job.load(kit_image_size(job.kit))
    latents, _ = posteriors(load_kit_autoencoder(job.kit, job.device), images, job)
    rows = latents.double().cpu().flatten(1)
    means = (sent.sums.double() / sent.counts.view(-1, 1, 1, 1)).flatten(1)
    limit = job.config.clip_norm * rows.shape[1] ** 0.5
    return Means(means, _limited(rows, limit, job), payload_rows(job, payload, images.labels))


def _update(job: ClientJob, payload: Classifier) -> torch.Tensor | None:
    """Return each image's estimated share in the update of the last layer, [N].

    None without epsilon, where BatchNorm changes the features, or without a last linear layer.
    """
    if not job.config.epsilon:
        return None
    settings = job.config.classifier
    trained = rebuild_classifier(
        payload.state, payload.architecture, len(job.classes), settings.small_stem
    )
    start = new_classifier(settings, len(job.classes), job.kit, job.config.seed, "classifier.init")
    try:
        before, after = linear_head(start), linear_head(trained)
    except ClassifierError:
        return None
    changes = [after.weight - before.weight, (after.bias - before.bias).unsqueeze(1)]
    update = torch.cat(changes, dim=1).detach().double()
    features, labels = features_and_labels(job)
    logits = features @ before.weight.detach().double().T + before.bias.detach().double()
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[1])
    rows = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    # Minus the gradient of the cross-entropy at the initial weights
    descents = torch.einsum("nc,nd->ncd", one_hot - logits.softmax(dim=1), rows).flatten(1)
    return ridge(descents, update.reshape(1, -1), unit=False)[:, 0]


CONTRIBUTIONS: dict[type, Callable[[ClientJob, Payload], Means | None]] = {
    Descriptions: _descriptions,
    DomainVector: _domain_vector,
    Encodings: _encodings,
    Embeddings: _embeddings,
    FeatureStatistics: _feature_statistics,
    FeatureMixtures: _feature_mixtures,
    LatentStatistics: _latent_statistics,
}
