"""FedDEO's client half: one description a class, learned through the frozen diffusion model.

FedDEO (Yang et al., arXiv 2407.19953), section 3.2: a description d_y of class y takes the place of the prompt's encoding and minimises
`|| eps - eps(sqrt(a_t) E(x) + sqrt(1 - a_t) eps, t, d_y) ||^2` over the client's images of y; everything else is frozen.

Differences from the paper:

1. Theirs (code): SGD, lr 10, fp16. Ours: Adam in fp32 (`feddeo.lr`); the sweep is in benchmarks/.
2. Theirs (code): images normalised with CLIP's mean and deviation. Ours: [-1, 1], what the VAE was trained on.
3. Theirs: the VAE encodes the images in every step. Ours: once; each step draws a new sample from the stored posterior (the same
   distribution at a fraction of the cost).
4. Theirs: one class after the other. Ours: `feddeo.classes-at-once` classes in one UNet batch; exact, as no term couples two classes and each class has
   its own stream of random numbers.

Payload for Stable Diffusion 1.5: 77 x 768 numbers a class, 3.548 M for 60 classes.
"""

from dataclasses import replace
from functools import partial

import torch

from client_app.job import ClientJob
from osfl.diffusion import Kit, forward_noise, load_kit
from osfl.payloads import Descriptions
from osfl.seeds import generator_of


def make_payload(job: ClientJob) -> Descriptions:
    """Learn d_y [L, d] for every class the client holds.

    Raises:
        KitError: the kit is missing or damaged.
        ValueError: the descriptions diverged.
    """
    kit = load_kit(job.kit, job.device)
    images = job.load(kit.image_size)
    held = images.held()
    names = [job.classes[label] for label in held]
    encoded = [job.meter.run(("encode", len(x)), partial(kit.encode, x)) for x in images.batches(8)]
    mean, logvar = (torch.cat(part) for part in zip(*encoded, strict=True))
    start = kit.text(job.config.synthesis.prompts(names))
    learned, groups = [], [*range(0, len(held), at_once := job.config.feddeo.classes_at_once)]
    for number, first in enumerate(groups):
        part = slice(first, first + at_once)
        share = replace(job, progress=partial(_advance, job, number, len(groups)))
        learned.append(learn_descriptions(kit, start[part], mean, logvar, images.labels, held[part], names[part], share))
    return Descriptions(tuple(names), torch.cat(learned).float().cpu())


def _advance(job: ClientJob, number: int, groups: int, done: int, total: int) -> None:
    job.progress(number * total + done, groups * total)


def learn_descriptions(
    kit: Kit,
    start: torch.Tensor,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    labels: torch.Tensor,
    held: list[int],
    names: list[str],
    job: ClientJob,
) -> torch.Tensor:
    """Minimise the denoising loss over the descriptions; the classes share a UNet batch and nothing else.

    Args:
        start: tau(prompt), [C, L, d].
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        labels: [N]; `held` are its C distinct values and `names` their classes.

    Returns:
        descriptions [C, L, d].
    """
    settings = job.config.feddeo
    descriptions = [d.clone().requires_grad_() for d in start]  # one tensor a class: a class that is done is left alone
    optimiser = torch.optim.Adam(descriptions, lr=settings.lr)
    randomness = [generator_of(job.config.seed, "feddeo", job.client, name) for name in names]
    rows_of = [(labels == label).nonzero().flatten() for label in held]
    schedules = [
        _minibatches(rows, settings.epochs, settings.batch_size, g) for rows, g in zip(rows_of, randomness, strict=True)
    ]
    total = max(len(s) for s in schedules)
    alphas_cumprod = kit.alphas_cumprod

    for step in range(total):
        rows, t, posterior_noise, eps, owner = [], [], [], [], []
        for index, (schedule, generator) in enumerate(zip(schedules, randomness, strict=True)):
            if step < len(schedule):
                batch = schedule[step]
                rows.append(batch)
                t.append(torch.randint(len(alphas_cumprod), (len(batch),), generator=generator))
                posterior_noise.append(torch.randn(len(batch), *mean.shape[1:], generator=generator))
                eps.append(torch.randn(len(batch), *mean.shape[1:], generator=generator))
                owner += [index] * len(batch)
        chosen, steps, noise = torch.cat(rows), torch.cat(t).to(kit.device), torch.cat(eps).to(kit.device)
        x0 = mean[chosen] + (0.5 * logvar[chosen]).exp() * torch.cat(posterior_noise).to(kit.device)
        z_t = forward_noise(x0, noise, alphas_cumprod[steps])
        share = torch.tensor([1 / len(schedules[i][step]) for i in owner], device=kit.device)  # mean over a class's own images

        def update(z_t=z_t, steps=steps, noise=noise, owner=owner, share=share) -> None:  # type: ignore[no-untyped-def]
            guess = kit.eps(z_t, steps, torch.stack([descriptions[i] for i in owner]))
            loss = ((noise - guess).square().mean(dim=(1, 2, 3)) * share).sum()  # FedDEO, eq. 4
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        job.meter.run(("description", len(owner)), update)
        job.progress(step + 1, total)
    learned = torch.stack([d.detach() for d in descriptions])
    if not torch.isfinite(learned).all():
        raise ValueError(f"the descriptions diverged (NaN or infinity); lower feddeo.lr = {settings.lr:g}")
    return learned


def _minibatches(rows: torch.Tensor, epochs: int, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """`epochs` passes over `rows`, each in a new order, cut into batches."""
    return [batch for _ in range(epochs) for batch in rows[torch.randperm(len(rows), generator=generator)].split(size)]
