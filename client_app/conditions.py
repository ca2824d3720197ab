"""Conditions learned through the frozen diffusion model.

What FedDEO calls descriptions and Espresso learns for every cluster.
"""

from functools import partial

import torch

from client_app.job import ClientJob
from osfl.config import ConditionTraining
from osfl.data.load import Images
from osfl.models.diffusion import Kit, forward_noise, load_kit
from osfl.seeds import generator_of


def load_kit_to_learn(job: ClientJob) -> Kit:
    """The client's kit, with as little memory for gradients as its node asks for."""
    kit = load_kit(job.kit, job.device)
    return kit.checkpointed() if job.saves_memory else kit


def posteriors(kit: Kit, images: Images, job: ClientJob) -> tuple[torch.Tensor, torch.Tensor]:
    """E(x) of every image: mean and log-variance of its latents' posterior, each [N, c, h, w]."""
    encoded = []
    done = 0
    job.progress(done, len(images), "encoding image")
    for x in images.batches(8):
        encoded.append(job.meter.run(("encode", len(x)), partial(kit.encode, x)))
        done += len(x)
        job.progress(done, len(images), "encoding image")
    mean, logvar = (torch.cat(part) for part in zip(*encoded, strict=True))
    return mean, logvar


def learn_conditions(
    kit: Kit,
    start: torch.Tensor,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    rows_of: list[torch.Tensor],
    names: list[str],
    settings: ConditionTraining,
    job: ClientJob,
) -> torch.Tensor:
    """Minimise the denoising loss over each condition's own images.

    `settings.at_once` conditions share a UNet batch and nothing else.

    Args:
        start: where the conditions begin, [G, L, d].
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        rows_of: the images of each condition, G index tensors.
        names: of the conditions; each has its own stream of random numbers, by its name.

    Returns:
        conditions [G, L, d].

    Raises:
        ValueError: a condition diverged.
    """
    learned = []
    groups = [*range(0, len(start), settings.at_once)]
    for number, first in enumerate(groups):
        part = slice(first, first + settings.at_once)

        def advance(done: int, total: int, number: int = number) -> None:
            job.progress(number * total + done, len(groups) * total)

        learned.append(
            _learn_together(
                kit, start[part], mean, logvar, rows_of[part], names[part], settings, job, advance
            )
        )
    return torch.cat(learned)


def _learn_together(  # type: ignore[no-untyped-def]
    kit, start, mean, logvar, rows_of, names, settings, job, advance
) -> torch.Tensor:
    # One tensor each: a condition that is done is left alone
    conditions = [c.clone().requires_grad_() for c in start]
    optimiser = torch.optim.Adam(conditions, lr=settings.lr)
    randomness = [
        generator_of(job.config.seed, job.config.method, job.client, name) for name in names
    ]
    schedules = [
        minibatches(rows, settings.epochs, settings.steps, settings.batch_size, g)
        for rows, g in zip(rows_of, randomness, strict=True)
    ]
    total = max(len(s) for s in schedules)
    alphas_cumprod = kit.alphas_cumprod

    advance(0, total)
    for step in range(total):
        rows = []
        t = []
        posterior_noise = []
        eps = []
        owner = []
        for index, (schedule, generator) in enumerate(zip(schedules, randomness, strict=True)):
            if step < len(schedule):
                batch = schedule[step]
                rows.append(batch)
                t.append(torch.randint(len(alphas_cumprod), (len(batch),), generator=generator))
                posterior_noise.append(
                    torch.randn(len(batch), *mean.shape[1:], generator=generator)
                )
                eps.append(torch.randn(len(batch), *mean.shape[1:], generator=generator))
                owner += [index] * len(batch)
        chosen = torch.cat(rows)
        steps = torch.cat(t).to(kit.device)
        noise = torch.cat(eps).to(kit.device)
        x0 = mean[chosen] + (0.5 * logvar[chosen]).exp() * torch.cat(posterior_noise).to(kit.device)
        z_t = forward_noise(x0, noise, alphas_cumprod[steps])
        # Mean over a condition's own images
        share = torch.tensor([1 / len(schedules[i][step]) for i in owner], device=kit.device)

        def update(z_t=z_t, steps=steps, noise=noise, owner=owner, share=share) -> None:  # type: ignore[no-untyped-def]
            guess = kit.eps(z_t, steps, torch.stack([conditions[i] for i in owner]))
            loss = (
                (noise - guess).square().mean(dim=(1, 2, 3)) * share
            ).sum()  # FedDEO, eq. 4; Espresso, eq. 8
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        job.meter.run(("condition", len(owner)), update)
        advance(step + 1, total)
    learned = torch.stack([c.detach() for c in conditions])
    if not torch.isfinite(learned).all():
        raise ValueError(
            f"the conditions diverged (NaN or infinity); lower {job.config.method}.lr = "
            f"{settings.lr:g}"
        )
    return learned


def minibatches(
    rows: torch.Tensor, epochs: int, steps: int, size: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Passes over `rows`, each in a new order, in batches: `epochs` passes, or `steps` batches."""
    if steps:
        epochs = -(-steps // -(-len(rows) // size))
    batches = [
        batch
        for _ in range(epochs)
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(size)
    ]
    return batches[:steps] if steps else batches
