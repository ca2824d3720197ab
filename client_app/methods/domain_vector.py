"""domain-vector's client half: what its domain looks like, learned over the images of all classes.

Ours, after FedDEO (Yang et al., arXiv 2407.19953), which learns a description d_y of every class
by itself. Here d_y = tau(prompt of y) + v + w_y: v is one for the domain, and every image teaches
it; it is [L, d], or [1, d] that every token gets (`domain-vector.tokens`). w_y [L, d] is what a
class adds, and is left out by default. FedDEO's eq. 4 is minimised over both together, everything
else frozen, by Adam with a learning rate that falls to 0 along half a cosine.

FedBiP (arXiv 2410.04810) learns one word for a domain, beside one a class; v has a vector for every
token of the prompt.

Differences from FedDEO:

1. Theirs: d_y are free, and each has its class's images alone. Ours: v has all of them; its prompt
   says what the class is.
2. Theirs: d_y of every class is sent. Ours: v alone, and w_y with `domain-vector.class-lr` above 0.
3. Theirs: constant learning rate. Ours: the last steps are small, so that the noise of single
   images and timesteps does not stay in v.
4. Theirs: no guarantee. Ours: with `epsilon` every image learns a v by itself, for
   `domain-vector.epochs` passes at the constant rate; they are clipped, averaged over the client
   and noised, as DPAgg-TI does with words (Peetathawatchai et al., arXiv 2411.14639).

Payload for Stable Diffusion 1.5: 77 x 768 numbers, or 768, however many classes there are.
"""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from client_app.context import ClientJob
from client_app.learning.conditions import (
    image_names,
    learn_condition_of_each,
    learn_from_all,
    load_kit_to_learn,
    posteriors,
)
from client_app.privacy.mechanisms import common_to_tokens, private_mean, spread
from osfl.config import ConditionTraining, RunConfig
from osfl.data.load import Images
from osfl.models.diffusion import Kit
from osfl.payload.kinds import DomainVector
from osfl.util.minibatches import minibatches
from osfl.util.seeds import generator_of

AT_ONCE = 16  # images that learn side by side, with epsilon


def make_payload(job: ClientJob) -> DomainVector:
    """Learn v [L, d] or [1, d], and w_y [L, d] of every class where the run asks for them.

    Raises:
        KitError: the kit is missing or damaged.
        ValueError: they diverged.
    """
    settings = job.config.domain_vector
    kit = load_kit_to_learn(job)
    images = job.load(kit.image_size)
    held = images.held()
    names = [job.classes[label] for label in held]
    mean, logvar = posteriors(kit, images, job)
    if job.config.epsilon:
        vectors = vector_of_each(kit, images, mean, logvar, job)
        every_prompt = kit.text(job.config.prompts(job.classes)).cpu()
        return DomainVector(tuple(names), noised_mean(vectors, every_prompt, job.config))
    owner = torch.tensor([held.index(label) for label in images.labels.tolist()])
    prompts = kit.text(job.config.prompts(names))
    alike = settings.tokens == "all"
    domain = torch.zeros_like(prompts[0][:1] if alike else prompts[0]).requires_grad_()
    classes = torch.zeros_like(prompts).requires_grad_()
    optimiser = torch.optim.Adam([domain], lr=settings.lr)
    optimiser.add_param_group({"params": [classes], "lr": settings.class_lr})
    generator = generator_of(job.config.seed, "domain-vector", job.client)
    schedule = minibatches(
        torch.arange(len(owner)), settings.epochs, settings.steps, settings.batch_size, generator
    )

    def condition(rows: torch.Tensor) -> torch.Tensor:
        # d_y = tau(prompt of y) + v + w_y
        return prompts[owner[rows]] + domain + classes[owner[rows]]

    domain, classes = learn_from_all(
        kit,
        [domain, classes],
        condition,
        mean,
        logvar,
        optimiser,
        schedule,
        generator,
        job,
        CosineAnnealingLR(optimiser, len(schedule)),
    )
    offsets = classes.unsqueeze(1) if settings.class_lr else None
    return DomainVector(tuple(names), domain, offsets)


def vector_of_each(
    kit: Kit, images: Images, mean: torch.Tensor, logvar: torch.Tensor, job: ClientJob
) -> torch.Tensor:
    """What every image learns by itself [N, L, d], on the CPU."""
    settings = job.config.domain_vector
    training = ConditionTraining(
        settings.epochs, settings.steps, settings.batch_size, AT_ONCE, settings.lr
    )
    start = kit.text(job.config.prompts(job.classes))[images.labels]
    names = image_names(images)
    conditions = learn_condition_of_each(kit, start, mean, logvar, names, training, job)
    return (conditions - start).cpu()


def noised_mean(vectors: torch.Tensor, prompts: torch.Tensor, config: RunConfig) -> torch.Tensor:
    """[L, d] or [1, d] of vectors [N, L, d], as the run asks for it.

    Args:
        prompts: encodings of all classes' prompts [C, L, d], by which `clip-norm` is measured.
    """
    limit = config.clip_norm * spread(prompts)
    if config.domain_vector.tokens == "all":
        vectors, limit = common_to_tokens(vectors, limit)
    nowhere = torch.zeros_like(vectors[0])
    return private_mean(vectors, nowhere, limit, config.epsilon, config.delta)
