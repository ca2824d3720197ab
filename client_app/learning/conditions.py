"""Conditions learned through the frozen diffusion model.

What FedDEO calls descriptions and Espresso learns for every cluster.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim.lr_scheduler import LRScheduler

from client_app.context import ClientJob
from osfl.config import ConditionTraining
from osfl.data.load import Images
from osfl.models.diffusion import Kit, forward_noise, load_kit
from osfl.util.costs import FlopMeter
from osfl.util.minibatches import minibatches
from osfl.util.seeds import generator_of


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
    may_diverge: bool = False,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Minimise the denoising loss over each condition's own images.

    `settings.at_once` conditions share a UNet batch and nothing else.

    Args:
        start: where what is learned begins, [G, L, d], or [G, 1, d] that every token gets.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        rows_of: the images of each condition, G index tensors.
        names: of the conditions; each has its own stream of random numbers, by its name.
        may_diverge: whether conditions that became NaN or infinity are returned as they are.
        base: what each condition is beside what is learned, [G, L, d]; None: nothing.

    Returns:
        what is learned, as `start`.

    Raises:
        ValueError: a condition diverged, and may not.
    """
    randomness = [
        generator_of(job.config.seed, job.config.method, job.client, name) for name in names
    ]
    firsts = range(0, len(start), settings.at_once)
    learned = []
    for number, first in enumerate(firsts):
        part = slice(first, first + settings.at_once)
        schedules = []
        for rows, generator in zip(rows_of[part], randomness[part], strict=True):
            schedules.append(
                minibatches(rows, settings.epochs, settings.steps, settings.batch_size, generator)
            )
        beside = None if base is None else base[part]
        group = _Group(start[part], schedules, randomness[part], beside)

        def advance(done: int, total: int, number: int = number) -> None:
            job.progress(number * total + done, len(firsts) * total)

        conditions = _learn_together(kit, group, mean, logvar, settings.lr, job.meter, advance)
        if not may_diverge and not torch.isfinite(conditions).all():
            raise ValueError(
                f"the conditions diverged (NaN or infinity); lower {job.config.method}.lr = "
                f"{settings.lr:g}"
            )
        learned.append(conditions)
    return torch.cat(learned)


def learn_condition_of_each(
    kit: Kit,
    start: torch.Tensor,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    names: list[str],
    settings: ConditionTraining,
    job: ClientJob,
) -> torch.Tensor:
    """A condition of every image by itself [N, L, d]; NaN or infinity where it diverged.

    No other image touches it, but for the rounding of the batch that it shares: its random numbers
    come from its own pixels, not from its place. Each sees its image `settings.epochs` times;
    `settings.steps` and `batch_size` do not count.

    Args:
        start: where the conditions begin, [N, L, d].
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        names: of the images, by their pixels (`image_names`).
    """
    count = len(start)
    alone = replace(settings, steps=0, batch_size=1)
    rows_of = list(torch.arange(count).split(1))
    return learn_conditions(kit, start, mean, logvar, rows_of, names, alone, job, may_diverge=True)


def steps_of_each(count: int, settings: ConditionTraining) -> int:
    """In how many steps so many images learn by themselves."""
    groups = -(-count // settings.at_once)
    return groups * settings.epochs


def image_names(images: Images) -> list[str]:
    """SHA-256 of every image's pixels."""
    found = []
    for pixels in images.pixels.split(64):
        found += [hashlib.sha256(one.contiguous().numpy()).hexdigest() for one in pixels]
    return found


@dataclass(frozen=True)
class _Group:
    """Conditions that are learned side by side.

    Attributes:
        start: [G, L, d], or [G, 1, d].
        schedules: each one's minibatches of rows.
        randomness: each one's own, so that who learns beside it changes nothing.
        base: [G, L, d], which is added to each; None: nothing is.
    """

    start: torch.Tensor
    schedules: list[list[torch.Tensor]]
    randomness: list[torch.Generator]
    base: torch.Tensor | None = None

    def conditions(self, learned: list[torch.Tensor], owners: list[int]) -> torch.Tensor:
        """Of some images, [B, L, d]."""
        own = torch.stack([learned[number] for number in owners])
        return own if self.base is None else self.base[owners] + own


@dataclass(frozen=True)
class _Batch:
    """One step's images of every condition that is not done.

    Attributes:
        rows: [B], of the images.
        owners: of each image, the number of its condition.
        share: [B], 1 over the number of images that its condition has in the step.
        t: [B], timesteps.
        posterior_noise, eps: [B, c, h, w].
    """

    rows: torch.Tensor
    owners: list[int]
    share: torch.Tensor
    t: torch.Tensor
    posterior_noise: torch.Tensor
    eps: torch.Tensor


def _learn_together(
    kit: Kit,
    group: _Group,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    lr: float,
    meter: FlopMeter,
    advance: Callable[[int, int], None],
) -> torch.Tensor:
    """What a group learns, as its start."""
    # One tensor each: a condition that is done is left alone
    learned = [c.clone().requires_grad_() for c in group.start]
    optimiser = torch.optim.Adam(learned, lr=lr)
    total = max(map(len, group.schedules))
    advance(0, total)
    for step in range(total):
        batch = _draw(group, step, len(kit.alphas_cumprod), mean.shape[1:], kit.device)
        std = (0.5 * logvar[batch.rows]).exp()
        x0 = mean[batch.rows] + std * batch.posterior_noise
        z_t = forward_noise(x0, batch.eps, kit.alphas_cumprod[batch.t])
        update = partial(_update, kit, group, learned, optimiser, batch, z_t)
        meter.run(("condition", len(batch.rows)), update)
        advance(step + 1, total)
    return torch.stack([c.detach() for c in learned])


def _draw(
    group: _Group, step: int, timesteps: int, shape: torch.Size, device: torch.device
) -> _Batch:
    rows = []
    owners = []
    shares = []
    t = []
    posterior_noise = []
    eps = []
    for number, schedule in enumerate(group.schedules):
        if step >= len(schedule):
            continue
        count = len(schedule[step])
        generator = group.randomness[number]
        rows.append(schedule[step])
        owners += [number] * count
        shares += [1 / count] * count
        t.append(torch.randint(timesteps, (count,), generator=generator))
        posterior_noise.append(torch.randn(count, *shape, generator=generator))
        eps.append(torch.randn(count, *shape, generator=generator))
    return _Batch(
        torch.cat(rows),
        owners,
        torch.tensor(shares, device=device),
        torch.cat(t).to(device),
        torch.cat(posterior_noise).to(device),
        torch.cat(eps).to(device),
    )


def _update(
    kit: Kit,
    group: _Group,
    learned: list[torch.Tensor],
    optimiser: torch.optim.Optimizer,
    batch: _Batch,
    z_t: torch.Tensor,
) -> None:
    guess = kit.eps(z_t, batch.t, group.conditions(learned, batch.owners))
    errors = (batch.eps - guess).square().mean(dim=(1, 2, 3))
    # FedDEO, eq. 4; Espresso, eq. 8: of each condition the mean over its own images
    loss = (errors * batch.share).sum()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def learn_from_all(
    kit: Kit,
    learned: list[torch.Tensor],
    condition_of: Callable[[torch.Tensor], torch.Tensor],
    mean: torch.Tensor,
    logvar: torch.Tensor,
    optimiser: torch.optim.Optimizer,
    schedule: list[torch.Tensor],
    generator: torch.Generator,
    job: ClientJob,
    scheduler: LRScheduler | None = None,
) -> list[torch.Tensor]:
    """Minimise the denoising loss over what all of a client's images share.

    Args:
        learned: what `optimiser` changes.
        condition_of: some images' rows [B] to their conditions [B, L, d], of `learned`.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        schedule: the rows of each step.

    Returns:
        `learned`, on the CPU in float32.

    Raises:
        ValueError: it diverged.
    """

    def update(rows: torch.Tensor, z_t: torch.Tensor, t: torch.Tensor, eps: torch.Tensor) -> None:
        # FedDEO, eq. 4, over images of all classes
        loss = (eps - kit.eps(z_t, t, condition_of(rows))).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    job.progress(0, len(schedule))
    for done, rows in enumerate(schedule, start=1):
        count = len(rows)
        t = torch.randint(len(kit.alphas_cumprod), (count,), generator=generator).to(kit.device)
        eps = torch.randn(count, *mean.shape[1:], generator=generator).to(kit.device)
        noise = torch.randn(count, *mean.shape[1:], generator=generator).to(kit.device)
        x0 = mean[rows] + (0.5 * logvar[rows]).exp() * noise
        z_t = forward_noise(x0, eps, kit.alphas_cumprod[t])
        job.meter.run(("all", count), partial(update, rows, z_t, t, eps))
        if scheduler is not None:
            scheduler.step()
        job.progress(done, len(schedule))
    found = [part.detach().float().cpu() for part in learned]
    if not all(torch.isfinite(part).all() for part in found):
        method = job.config.method
        raise ValueError(
            f"what {method} learns diverged (NaN or infinity); lower {method}.lr = "
            f"{optimiser.defaults['lr']:g}"
        )
    return found
