"""Membership-inference attacks: score how likely an image helped to make a payload.

The attacker is the server. It has the payload, the kit, the run's settings, and an image with its
label, and asks whether the client has that image. The attacks are simple closed forms on a single
payload. A stronger attack may exist, so what they find is a lower bound. Attacks on means and sums
are in `client_app.audit.linear`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from client_app.audit.linear import CONTRIBUTIONS, features_and_labels, payload_rows
from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.methods import votes
from osfl.data.load import Images
from osfl.kit.kits import kit_image_size
from osfl.models.classifiers import compute_logits, rebuild_classifier
from osfl.models.concepts import encode_concept_prompt
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import (
    Autoencoder,
    Kit,
    forward_noise,
    load_embedding_noise,
    load_kit,
    load_kit_autoencoder,
)
from osfl.models.encoders import load_captioner, load_image_encoder
from osfl.payload.kinds import (
    Captions,
    Classifier,
    Concepts,
    Descriptions,
    Domain,
    DomainVector,
    Embeddings,
    FeatureMixtures,
    FeatureStatistics,
    LatentMixture,
    LatentStatistics,
    Mixtures,
    Payload,
    Votes,
)
from osfl.util.seeds import generator_of

# Timesteps at which the denoising error is measured
DRAWS = 10
# Images in a batch
BATCH = 16
# The target that scores decoded latents
RECONSTRUCTIONS = "pictures"

Attack = Callable[[ClientJob, Payload], dict[str, torch.Tensor]]


def attack(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    """Return the membership scores [N] of the images that `job` loads, by attack target.

    The higher the score, the likelier the image is a member.

    Raises:
        KeyError: the payload lacks the class of an image.
    """
    # With epsilon these payloads are noisy means, on which the linear attack is the strongest
    is_noisy_mean = job.config.epsilon and type(payload) in CONTRIBUTIONS
    if is_noisy_mean or type(payload) not in ATTACKS:
        return {}
    return ATTACKS[type(payload)](job, payload)


# ---- Conditions learned through the diffusion model: members denoise better under them ----


@torch.no_grad()
def denoising_errors(
    kit: Kit, latents: torch.Tensor, conditions: Conditioning, job: ClientJob
) -> torch.Tensor:
    """Return the mean over timesteps of |eps - e(z_t, t, c)|^2 / dim, [N], on the CPU.

    Noise and timesteps are the same for every image and every call.

    Args:
        latents: [N, c, h, w].
        conditions: of each image, N rows.
    """
    generator = generator_of(job.config.seed, "audit", "noise")
    timesteps = len(kit.alphas_cumprod)
    sums = torch.zeros(len(latents))
    for draw in range(DRAWS):
        t = int((draw + 0.5) / DRAWS * timesteps)
        eps = torch.randn(latents.shape[1:], generator=generator).to(kit.device)
        for rows in torch.arange(len(latents)).split(BATCH):
            noise = eps.expand(len(rows), *eps.shape)
            t_batch = torch.full((len(rows),), t, device=kit.device)
            z_t = forward_noise(latents[rows], noise, kit.alphas_cumprod[t_batch])
            c = conditions[rows].to(kit.device)
            e = job.meter.run(("attack", len(rows)), partial(kit.eps, z_t, t_batch, c))
            sums[rows] += (noise - e).square().flatten(1).mean(dim=1).cpu().float()
    return sums / DRAWS


def _gain(
    job: ClientJob, conditions_of: Callable[[Kit, torch.Tensor, Conditioning], list[Conditioning]]
) -> torch.Tensor:
    """Return how much the payload's condition lowers the denoising error of the class prompt, [N].

    Of several conditions, the best counts.
    """
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    latents, _ = posteriors(kit, images, job)
    prompts = kit.text(job.config.prompts(job.classes))[images.labels]
    candidates = conditions_of(kit, images.labels, prompts)
    errors = [denoising_errors(kit, latents, conditions, job) for conditions in candidates]
    return denoising_errors(kit, latents, prompts, job) - torch.stack(errors).amin(dim=0)


def _descriptions(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    vectors = cast(Descriptions, payload).vectors

    def conditions(kit: Kit, labels: torch.Tensor, prompts: Conditioning) -> list[Conditioning]:
        states = vectors[payload_rows(job, payload, labels)].to(kit.device)
        if job.config.feddeo.tokens == "all":
            states = states + prompts.states
        return [prompts.with_states(states)]

    return {"descriptions": _gain(job, conditions)}


def _domain_vector(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(DomainVector, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: Conditioning) -> list[Conditioning]:
        shifted = prompts.states + sent.domain.to(kit.device)
        if sent.offsets is not None:
            shifted = shifted + sent.offsets[payload_rows(job, payload, labels), 0].to(kit.device)
        return [prompts.with_states(shifted)]

    return {"vector": _gain(job, conditions)}


def _mixtures(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Mixtures, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: Conditioning) -> list[Conditioning]:
        rows = payload_rows(job, payload, labels)
        first = sent.conditions[rows, 0]
        candidates = []
        for cluster in range(sent.weights.shape[1]):
            is_present = (sent.weights[rows, cluster] > 0).view(-1, 1, 1)
            # The padding of an absent cluster must not win
            states = torch.where(is_present, sent.conditions[rows, cluster], first)
            candidates.append(prompts.with_states(states.to(kit.device)))
        return candidates

    scores = {"conditions": _gain(job, conditions)}
    if sent.component_weights is not None:
        means = cast(torch.Tensor, sent.component_means)
        variances = cast(torch.Tensor, sent.component_variances)
        mixtures = (sent.component_weights, means, variances)
        scores |= _component_scores(job, mixtures, partial(payload_rows, job, sent))
    return scores


def _latent_mixture(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(LatentMixture, payload)
    # The images of all classes share one mixture
    mixtures = (sent.weights[None], sent.means[None], sent.variances[None])
    return _component_scores(job, mixtures, torch.zeros_like)


def _latent_statistics(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(LatentStatistics, payload)
    autoencoder = load_kit_autoencoder(job.kit, job.device)
    images = job.load(kit_image_size(job.kit))
    latents = posteriors(autoencoder, images, job)[0].float().cpu()
    counts = sent.counts.view(-1, 1, 1, 1)
    means = sent.sums / counts
    variances = (sent.squares / counts - means.square()).clamp_min(0)
    rows = payload_rows(job, sent, images.labels)
    likelihoods = mixture_log_likelihood(
        latents.flatten(1),
        torch.ones(len(rows), 1),
        means[rows].flatten(1)[:, None],
        variances[rows].flatten(1)[:, None],
    )
    owners = torch.arange(len(means))
    psnr = _reconstruction_psnr(autoencoder, images, means, owners, rows, job)
    return {"latents": likelihoods, RECONSTRUCTIONS: psnr}


def _component_scores(
    job: ClientJob,
    mixtures: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Score images by the mixtures of noisy latents: their likelihood, and the decoded means.

    Args:
        mixtures: weights [R, M], means and variances [R, M, c, h, w].
        rows_of: returns the row of each label's mixture.
    """
    weights, means, variances = mixtures
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    kit.scheduler.set_timesteps(job.config.synthesis.steps)
    a_first = kit.alphas_cumprod[int(kit.scheduler.timesteps[0])].cpu()
    latents, _ = posteriors(kit, images, job)
    # The components model sqrt(a) x_0
    x = a_first.sqrt() * latents.float().cpu()
    rows = rows_of(images.labels)
    likelihoods = mixture_log_likelihood(
        x.flatten(1), weights[rows], means[rows].flatten(2), variances[rows].flatten(2)
    )
    is_present = weights > 0
    clean_means = means[is_present] / a_first.sqrt()
    owners = is_present.nonzero()[:, 0]
    psnr = _reconstruction_psnr(kit, images, clean_means, owners, rows, job)
    return {"latents": likelihoods, RECONSTRUCTIONS: psnr}


def mixture_log_likelihood(
    x: torch.Tensor, weights: torch.Tensor, means: torch.Tensor, variances: torch.Tensor
) -> torch.Tensor:
    """Return log sum_k w_k N(x; m_k, v_k) of every row, [N].

    Args:
        x: [N, D].
        weights: of each row's own mixture, [N, K]; components with weight 0 do not count.
        means: [N, K, D].
        variances: [N, K, D], or [N, K, 1] shared by all entries.
    """
    per_entry = variances.double().clamp_min(1e-12).expand_as(means)
    squares = (x.double().unsqueeze(1) - means.double()).square() / per_entry
    logs = -0.5 * (squares + (2 * math.pi * per_entry).log()).sum(dim=-1)
    return (weights.double().log() + logs).logsumexp(dim=1)


def _concepts(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Concepts, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: Conditioning) -> list[Conditioning]:
        rows = payload_rows(job, payload, labels)
        prompt = encode_concept_prompt(kit.text)
        return [prompt.filled(sent.domain.to(kit.device), sent.vectors[rows].to(kit.device))]

    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    latents, _ = posteriors(kit, images, job)
    distances = torch.cdist(latents.float().cpu().flatten(1), sent.means.flatten(1))
    rows = payload_rows(job, sent, images.labels)
    class_labels = [job.classes.index(name) for name in sent.classes]
    owners = torch.tensor([class_labels.index(label) for label in sent.labels.tolist()])
    return {
        "words": _gain(job, conditions),
        "latents": -distances.amin(dim=1),
        RECONSTRUCTIONS: _reconstruction_psnr(kit, images, sent.means, owners, rows, job),
    }


@torch.no_grad()
def _reconstruction_psnr(
    kit: Kit | Autoencoder,
    images: Images,
    latents: torch.Tensor,
    owners: torch.Tensor,
    rows: torch.Tensor,
    job: ClientJob,
) -> torch.Tensor:
    """Return each image's PSNR in dB to the closest decoded latent of its row, [N].

    Args:
        latents: [M, c, h, w].
        owners: the payload's row of each latent, [M].
        rows: the payload's row of each image, [N].
    """
    decoded = []
    for part in latents.split(BATCH):
        z = part.to(kit.device)
        pictures = job.meter.run(("decode", len(z)), partial(kit.decode, z))
        decoded.append(pictures.clamp(-1, 1).float().cpu())
    reconstructions = torch.cat(decoded).flatten(1)
    psnr = []
    for x, row in zip(images.batches(1), rows, strict=True):
        errors = (reconstructions[owners == row] - x.flatten(1)).square().mean(dim=1)
        # For values in [-1, 1]: 10 log10(2^2 / MSE)
        psnr.append(10 * (4 / errors.amin().clamp_min(1e-12)).log10())
    return torch.stack(psnr)


# ---- Clusters, mixtures and moments: members are closer to them ----


def _embeddings(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    encoder = load_image_encoder(job.kit, job.device)
    images = job.load(encoder.fit)
    embedded = torch.cat([encoder(pixels) for pixels in images.pixels.split(BATCH)])
    levels = torch.full((len(embedded),), job.config.feddisc.noise_level)
    # The expected noisy embedding of an image
    expected = load_embedding_noise(job.kit)(embedded, levels, torch.zeros_like(embedded))
    centers = cast(Embeddings, payload).vectors[payload_rows(job, payload, images.labels), :-1]
    distances = (expected.unsqueeze(1) - centers).square().sum(dim=2)
    return {"centres": -distances.amin(dim=1)}


def _feature_statistics(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    features, _ = features_and_labels(job, job.config.fedcgs.projection)
    return {"moments": -leverage(features, cast(FeatureStatistics, payload).moments.double())}


def leverage(features: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Return f^T (B + lambda I)^-1 f of every row, [N].

    It is at most 1 for a feature that is in B = sum of f f^T. If B sums fewer features than
    dimensions, it is far larger for any other feature.

    Args:
        features: [N, D].
        moments: B, [D, D].
    """
    # Far above float32 rounding, far below the features' own variance
    ridge = 1e-4 * moments.diagonal().mean()
    solved = torch.linalg.solve(moments + ridge * torch.eye(len(moments)), features.T)
    distances: torch.Tensor = (features * solved.T).sum(dim=1)
    return distances


def _feature_mixtures(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(FeatureMixtures, payload)
    features, labels = features_and_labels(job)
    rows = payload_rows(job, payload, labels)
    return {
        "mixture": mixture_log_likelihood(
            features, sent.weights[rows], sent.means[rows], sent.variances[rows]
        )
    }


# ---- Classifiers are more confident on members; captions and votes match or do not ----


def _classifier(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Classifier, payload)
    settings = job.config.classifier
    model = rebuild_classifier(sent.state, sent.architecture, len(job.classes), settings.small_stem)
    images = job.load(job.config.data.image_size)
    logits = compute_logits(model, images.pixels, job.device).double()
    is_label = torch.nn.functional.one_hot(images.labels, len(job.classes)).bool()
    # LiRA (Carlini et al., arXiv 2112.03570), eq. 6: log(p_y / (1 - p_y))
    others = logits.masked_fill(is_label, -math.inf).logsumexp(dim=1)
    return {"confidence": logits[is_label] - others}


def _captions(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    images = job.load(captioner.fit)
    captions: list[str] = []
    for rows in torch.arange(len(images)).split(BATCH):
        captions += captioner(images.pixels[rows], job.meter)
    texts = cast(Captions, payload).texts
    class_texts = [texts[row] for row in payload_rows(job, payload, images.labels).tolist()]
    is_sent = [caption in sent for caption, sent in zip(captions, class_texts, strict=True)]
    return {"captions": torch.tensor(is_sent).double()}


def _votes(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    latents, _ = posteriors(kit, images, job)
    choices = votes.candidate_errors(kit, latents, images.labels, job).argmin(dim=1)
    winners = cast(Votes, payload).winners[payload_rows(job, payload, images.labels)]
    return {"winners": (choices == winners).double()}


def _no_attack(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    images = job.load(job.config.data.image_size)
    # A domain's name does not depend on any image
    return {"name": torch.zeros(len(images))}


ATTACKS: dict[type, Attack] = {
    Descriptions: _descriptions,
    DomainVector: _domain_vector,
    Mixtures: _mixtures,
    LatentMixture: _latent_mixture,
    LatentStatistics: _latent_statistics,
    Concepts: _concepts,
    Embeddings: _embeddings,
    FeatureStatistics: _feature_statistics,
    FeatureMixtures: _feature_mixtures,
    Classifier: _classifier,
    Captions: _captions,
    Votes: _votes,
    Domain: _no_attack,
}
