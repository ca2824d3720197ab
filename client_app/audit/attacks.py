"""How much a payload looks as if an image had helped to make it: the higher, the likelier.

The attacker is the server. It has the payload, the kit, the run's settings, and an image with its
label, of which it asks whether the client has it. These are plain attacks with closed forms, each
on one payload: a stronger one may exist, so what they find is a lower bound. Means and sums have
a module of their own, `client_app.audit.linear`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from client_app.audit.linear import MEANS_OF, features_and_labels, rows_of
from client_app.context import ClientJob
from client_app.learning.conditions import posteriors
from client_app.methods import votes
from osfl.data.load import Images
from osfl.models.classifiers import logits_of, rebuild
from osfl.models.concepts import concept_prompt
from osfl.models.diffusion import Kit, forward_noise, load_embedding_noise, load_kit
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
    Mixtures,
    Payload,
    Votes,
)
from osfl.util.seeds import generator_of

DRAWS = 10  # timesteps at which a denoising error is looked at
BATCH = 16  # images in a batch
PICTURES = "pictures"  # decoded latents

Attack = Callable[[ClientJob, Payload], dict[str, torch.Tensor]]


def attack(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    """Return the scores [N] of the images that `job` loads, by the name of what is attacked.

    Raises:
        KeyError: an image is of a class that the payload has not.
    """
    # With epsilon these payloads are noised means, and no other attack on them is as strong
    noised_mean = job.config.epsilon and type(payload) in MEANS_OF
    if noised_mean or type(payload) not in ATTACKS:
        return {}
    return ATTACKS[type(payload)](job, payload)


# ---- What was learned through the diffusion model: it denoises what it learned from better ----


@torch.no_grad()
def denoising_errors(
    kit: Kit, latents: torch.Tensor, conditions: torch.Tensor, job: ClientJob
) -> torch.Tensor:
    """The mean over timesteps of |eps - e(z_t, t, c)|^2 / dim, [N], on the CPU.

    Noise and timesteps are the same for every image, and for every call.

    Args:
        latents: [N, c, h, w].
        conditions: of each image, [N, L, d].
    """
    generator = generator_of(job.config.seed, "audit", "noise")
    last = len(kit.alphas_cumprod)
    found = torch.zeros(len(latents))
    for draw in range(DRAWS):
        t = int((draw + 0.5) / DRAWS * last)
        eps = torch.randn(latents.shape[1:], generator=generator).to(kit.device)
        for rows in torch.arange(len(latents)).split(BATCH):
            noise = eps.expand(len(rows), *eps.shape)
            at = torch.full((len(rows),), t, device=kit.device)
            z_t = forward_noise(latents[rows], noise, kit.alphas_cumprod[at])
            c = conditions[rows].to(kit.device)
            e = job.meter.run(("attack", len(rows)), partial(kit.eps, z_t, at, c))
            found[rows] += (noise - e).square().flatten(1).mean(dim=1).cpu().float()
    return found / DRAWS


def _gain(
    job: ClientJob, conditions_of: Callable[[Kit, torch.Tensor, torch.Tensor], list[torch.Tensor]]
) -> torch.Tensor:
    """How much less the error is under the payload's condition than under the class's prompt [N].

    Of several conditions the best counts.
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

    def conditions(kit: Kit, labels: torch.Tensor, prompts: torch.Tensor) -> list[torch.Tensor]:
        own = vectors[rows_of(job, payload, labels)].to(kit.device)
        return [own + prompts if job.config.feddeo.tokens == "all" else own]

    return {"descriptions": _gain(job, conditions)}


def _domain_vector(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(DomainVector, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: torch.Tensor) -> list[torch.Tensor]:
        moved = prompts + sent.domain.to(kit.device)
        if sent.offsets is not None:
            moved = moved + sent.offsets[rows_of(job, payload, labels), 0].to(kit.device)
        return [moved]

    return {"vector": _gain(job, conditions)}


def _mixtures(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Mixtures, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: torch.Tensor) -> list[torch.Tensor]:
        rows = rows_of(job, payload, labels)
        first = sent.conditions[rows, 0]
        found = []
        for cluster in range(sent.weights.shape[1]):
            there = (sent.weights[rows, cluster] > 0).view(-1, 1, 1)
            # A cluster that is not there must not win
            found.append(torch.where(there, sent.conditions[rows, cluster], first))
        return found

    scores = {"conditions": _gain(job, conditions)}
    if sent.component_weights is not None:
        kit = load_kit(job.kit, job.device)
        images = job.load(kit.image_size)
        kit.scheduler.set_timesteps(job.config.synthesis.steps)
        a_first = kit.alphas_cumprod[int(kit.scheduler.timesteps[0])].cpu()
        scores["latents"] = _latent_likelihood(job, sent, kit, images, a_first)
        there = sent.component_weights > 0
        # They are of sqrt(a) x_0
        means = cast(torch.Tensor, sent.component_means)[there] / a_first.sqrt()
        scores[PICTURES] = _likeness(kit, images, means, there.nonzero()[:, 0], job, sent)
    return scores


def _latent_likelihood(
    job: ClientJob, sent: Mixtures, kit: Kit, images: Images, a_first: torch.Tensor
) -> torch.Tensor:
    latents, _ = posteriors(kit, images, job)
    x = a_first.sqrt() * latents.float().cpu()
    rows = rows_of(job, sent, images.labels)
    weights = cast(torch.Tensor, sent.component_weights)[rows]
    means = cast(torch.Tensor, sent.component_means)[rows].flatten(2)
    variances = cast(torch.Tensor, sent.component_variances)[rows].flatten(2)
    return mixture_log_likelihood(x.flatten(1), weights, means, variances)


def mixture_log_likelihood(
    x: torch.Tensor, weights: torch.Tensor, means: torch.Tensor, variances: torch.Tensor
) -> torch.Tensor:
    """log sum_k w_k N(x; m_k, v_k) of every row [N].

    Args:
        x: [N, D].
        weights: of each row's own mixture, [N, K]; components with 0 do not count.
        means: [N, K, D].
        variances: [N, K, D], or [N, K, 1] for all numbers alike.
    """
    spread = variances.double().clamp_min(1e-12).expand_as(means)
    squares = (x.double().unsqueeze(1) - means.double()).square() / spread
    logs = -0.5 * (squares + (2 * math.pi * spread).log()).sum(dim=-1)
    return (weights.double().log() + logs).logsumexp(dim=1)


def _concepts(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Concepts, payload)

    def conditions(kit: Kit, labels: torch.Tensor, prompts: torch.Tensor) -> list[torch.Tensor]:
        rows = rows_of(job, payload, labels)
        prompt = concept_prompt(kit.text)
        return [prompt.filled(sent.domain.to(kit.device), sent.vectors[rows].to(kit.device))]

    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    latents, _ = posteriors(kit, images, job)
    distances = torch.cdist(latents.float().cpu().flatten(1), sent.means.flatten(1))
    held = [job.classes.index(name) for name in sent.classes]
    owners = torch.tensor([held.index(label) for label in sent.labels.tolist()])
    return {
        "words": _gain(job, conditions),
        "latents": -distances.amin(dim=1),
        PICTURES: _likeness(kit, images, sent.means, owners, job, sent),
    }


@torch.no_grad()
def _likeness(
    kit: Kit,
    images: Images,
    latents: torch.Tensor,
    owners: torch.Tensor,
    job: ClientJob,
    payload: Payload,
) -> torch.Tensor:
    """How like each image the most like of its class's decoded latents is: PSNR in dB [N].

    Args:
        latents: [M, c, h, w].
        owners: of each, its class's row in the payload [M].
    """
    decoded = []
    for part in latents.split(BATCH):
        z = part.to(kit.device)
        pictures = job.meter.run(("decode", len(z)), partial(kit.decode, z))
        decoded.append(pictures.clamp(-1, 1).float().cpu())
    drawn = torch.cat(decoded).flatten(1)
    found = []
    for x, row in zip(images.batches(1), rows_of(job, payload, images.labels), strict=True):
        errors = (drawn[owners == row] - x.flatten(1)).square().mean(dim=1)
        # Of numbers in [-1, 1]: 10 log10(2^2 / MSE)
        found.append(10 * (4 / errors.amin().clamp_min(1e-12)).log10())
    return torch.stack(found)


# ---- Clusters, mixtures and moments: they lie nearer to what is in them ----


def _embeddings(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    encoder = load_image_encoder(job.kit, job.device)
    images = job.load(encoder.fit)
    embedded = torch.cat([encoder(pixels) for pixels in images.pixels.split(BATCH)])
    levels = torch.full((len(embedded),), job.config.feddisc.noise_level)
    # What an image's noised embedding is on average
    expected = load_embedding_noise(job.kit)(embedded, levels, torch.zeros_like(embedded))
    centres = cast(Embeddings, payload).vectors[rows_of(job, payload, images.labels), :-1]
    distances = (expected.unsqueeze(1) - centres).square().sum(dim=2)
    return {"centres": -distances.amin(dim=1)}


def _feature_statistics(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    features, _ = features_and_labels(job)
    return {"moments": -leverage(features, cast(FeatureStatistics, payload).moments.double())}


def leverage(features: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """f^T (B + lambda I)^-1 f of every row [N].

    At most 1 for a feature that is in B = sum of f f^T. With fewer of them than dimensions it is
    far more for any other one.

    Args:
        features: [N, D].
        moments: B, [D, D].
    """
    # Far above the rounding of 32 bits, far below the features' own spread
    ridge = 1e-4 * moments.diagonal().mean()
    solved = torch.linalg.solve(moments + ridge * torch.eye(len(moments)), features.T)
    return (features * solved.T).sum(dim=1)


def _feature_mixtures(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(FeatureMixtures, payload)
    features, labels = features_and_labels(job)
    rows = rows_of(job, payload, labels)
    return {
        "mixture": mixture_log_likelihood(
            features, sent.weights[rows], sent.means[rows], sent.variances[rows]
        )
    }


# ---- A classifier is surer of what it was trained on; words and votes are said or are not ----


def _classifier(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    sent = cast(Classifier, payload)
    settings = job.config.classifier
    model = rebuild(sent.state, sent.architecture, len(job.classes), settings.small_stem)
    images = job.load(job.config.data.image_size)
    logits = logits_of(model, images.pixels, job.device).double()
    right = torch.nn.functional.one_hot(images.labels, len(job.classes)).bool()
    # LiRA (Carlini et al., arXiv 2112.03570), eq. 6: log(p_y / (1 - p_y))
    others = logits.masked_fill(right, -math.inf).logsumexp(dim=1)
    return {"confidence": logits[right] - others}


def _captions(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    images = job.load(captioner.fit)
    captions: list[str] = []
    for rows in torch.arange(len(images)).split(BATCH):
        captions += captioner(images.pixels[rows], job.meter)
    texts = cast(Captions, payload).texts
    own = [texts[row] for row in rows_of(job, payload, images.labels).tolist()]
    said = [caption in known for caption, known in zip(captions, own, strict=True)]
    return {"captions": torch.tensor(said).double()}


def _votes(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    latents, _ = posteriors(kit, images, job)
    own = votes.errors(kit, latents, images.labels, job).argmin(dim=1)
    winners = cast(Votes, payload).winners[rows_of(job, payload, images.labels)]
    return {"winners": (own == winners).double()}


def _nothing(job: ClientJob, payload: Payload) -> dict[str, torch.Tensor]:
    images = job.load(job.config.data.image_size)
    # The name of a domain is no image's
    return {"name": torch.zeros(len(images))}


ATTACKS: dict[type, Attack] = {
    Descriptions: _descriptions,
    DomainVector: _domain_vector,
    Mixtures: _mixtures,
    Concepts: _concepts,
    Embeddings: _embeddings,
    FeatureStatistics: _feature_statistics,
    FeatureMixtures: _feature_mixtures,
    Classifier: _classifier,
    Captions: _captions,
    Votes: _votes,
    Domain: _nothing,
}
