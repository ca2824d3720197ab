"""Client half of domain-vector: the appearance of its domain, learned over images of all classes.

Ours, after FedDEO (Yang et al., arXiv 2407.19953), which learns a separate description d_y of every
class. Here d_y = tau(prompt of y) + v + w_y. The domain vector v is shared by all classes, so every
image trains it; it is [L, d], or [1, d] shared by all tokens (`domain-vector.tokens`). The class
offset w_y [L, d] is omitted by default. Both minimize FedDEO's eq. 4 together, with everything else
frozen, by Adam with a learning rate that falls to 0 along half a cosine.

FedBiP (arXiv 2410.04810) learns one word per domain and one per class; v has a vector for every
token of the prompt.

Differences from FedDEO:

1. Theirs: each d_y is free and trained on its class's images alone. Ours: all images train v; the
   prompt states the class.
2. Theirs: d_y of every class is sent. Ours: v alone, and w_y with `domain-vector.class-lr` above 0.
3. Theirs: constant learning rate. Ours: small last steps, so that the noise of single images and
   timesteps does not stay in v.
4. Theirs: no DP guarantee. Ours: with `epsilon`, every image learns its own v, for
   `domain-vector.epochs` passes at the constant rate; the vectors are clipped and averaged over
   the client, and noise is added, as DPAgg-TI does with words (Peetathawatchai et al., arXiv
   2411.14639).

Payload for Stable Diffusion 1.5: 77 x 768 numbers, or 768, for any number of classes.
"""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from client_app.context import ClientJob
from client_app.learning.conditions import (
    image_digests,
    learn_condition_per_image,
    load_kit_for_training,
    posteriors,
    train_shared_vectors,
)
from client_app.privacy.mechanisms import (
    clipped_mean,
    mean_distance,
    mean_over_tokens,
    private_mean,
)
from client_app.privacy.sum_noise import SumNoise
from osfl.config import ConditionTraining, RunConfig
from osfl.data.load import Images
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import DomainVector
from osfl.util.minibatches import minibatches
from osfl.util.seeds import generator_of

# Images that learn in parallel, with epsilon
PARALLEL_IMAGES = 16


def make_payload(job: ClientJob) -> DomainVector:
    """Learn v [L, d] or [1, d], and w_y [L, d] of every class if the run asks for them.

    Raises:
        KitError: the kit is missing or corrupt.
        ValueError: the vectors diverged.
    """
    settings = job.config.domain_vector
    kit = load_kit_for_training(job)
    images = job.load(kit.image_size)
    class_labels = images.held()
    names = [job.classes[label] for label in class_labels]
    mean, logvar = posteriors(kit, images, job)
    if job.config.epsilon:
        vectors = vector_per_image(kit, images, mean, logvar, job)
        all_prompts = kit.text.states(job.config.prompts(job.classes)).cpu()
        domain = noisy_mean(vectors, all_prompts, job.config, job.sum_noise)
        return DomainVector(tuple(names), domain)
    owner = torch.tensor([class_labels.index(label) for label in images.labels.tolist()])
    prompts = kit.text(job.config.prompts(names))
    shared = settings.tokens == "all"
    length = 1 if shared else prompts.states.shape[1]
    domain = torch.zeros_like(prompts.states[0, :length]).requires_grad_()
    classes = torch.zeros_like(prompts.states).requires_grad_()
    optimizer = torch.optim.Adam([domain], lr=settings.lr)
    optimizer.add_param_group({"params": [classes], "lr": settings.class_lr})
    generator = generator_of(job.config.seed, "domain-vector", job.client)
    schedule = minibatches(
        torch.arange(len(owner)), settings.epochs, settings.steps, settings.batch_size, generator
    )

    def condition(rows: torch.Tensor) -> Conditioning:
        text = prompts[owner[rows]]
        # d_y = tau(prompt of y) + v + w_y
        return text.with_states(text.states + domain + classes[owner[rows]])

    domain, classes = train_shared_vectors(
        kit,
        [domain, classes],
        condition,
        mean,
        logvar,
        optimizer,
        schedule,
        generator,
        job,
        CosineAnnealingLR(optimizer, len(schedule)),
    )
    offsets = classes.unsqueeze(1) if settings.class_lr else None
    return DomainVector(tuple(names), domain, offsets)


def vector_per_image(
    kit: Kit, images: Images, mean: torch.Tensor, logvar: torch.Tensor, job: ClientJob
) -> torch.Tensor:
    """Return the vectors that the images learn separately, [N, L, d], on the CPU."""
    settings = job.config.domain_vector
    training = ConditionTraining(
        settings.epochs, settings.steps, settings.batch_size, PARALLEL_IMAGES, settings.lr
    )
    start = kit.text(job.config.prompts(job.classes))[images.labels]
    names = image_digests(images)
    conditions = learn_condition_per_image(kit, start, mean, logvar, names, training, job)
    return (conditions - start.states).cpu()


def noisy_mean(
    vectors: torch.Tensor, prompts: torch.Tensor, config: RunConfig, sum_noise: SumNoise
) -> torch.Tensor:
    """Return the noisy mean [L, d] or [1, d] of vectors [N, L, d], as the run configures it.

    Args:
        prompts: encodings of all classes' prompts [C, L, d], the unit of `clip-norm`.
        sum_noise: gets the clipping bound in a secure sum, where the noise is added later.
    """
    limit = config.clip_norm * mean_distance(prompts)
    if config.domain_vector.tokens == "all":
        vectors, limit = mean_over_tokens(vectors, limit)
    center = torch.zeros_like(vectors[0])
    if config.secure_sum:
        sum_noise.limit = limit
        return clipped_mean(vectors, center, limit).float()
    return private_mean(vectors, center, limit, config.epsilon, config.delta)
