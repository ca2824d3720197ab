"""Training of text conditions through the frozen diffusion model.

FedDEO's descriptions, and the conditions that Espresso learns per cluster.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim.lr_scheduler import LRScheduler

from client_app.context import ClientJob
from osfl.config import ConditionTraining
from osfl.data.load import Images
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Autoencoder, Kit, forward_noise, load_kit
from osfl.util.costs import FlopMeter
from osfl.util.minibatches import minibatches
from osfl.util.seeds import generator_of


def load_kit_for_training(job: ClientJob) -> Kit:
    """Load the client's kit for training, with gradient checkpointing if its node asks for it."""
    kit = load_kit(job.kit, job.device)
    return kit.with_checkpointing() if job.saves_memory else kit


def posteriors(
    kit: Kit | Autoencoder, images: Images, job: ClientJob
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and log-variance of every image's latent posterior E(x), each [N, c, h, w]."""
    encoded = []
    for x in job.batched(images.batches(8), len(images), "encoding image"):
        encoded.append(job.meter.run(("encode", len(x)), partial(kit.encode, x)))
    mean, logvar = (torch.cat(part) for part in zip(*encoded, strict=True))
    return mean, logvar


def train_conditions(
    kit: Kit,
    start: Conditioning,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    rows_of: list[torch.Tensor],
    names: list[str],
    settings: ConditionTraining,
    job: ClientJob,
    may_diverge: bool = False,
    as_offsets: bool = False,
) -> torch.Tensor:
    """Minimize the denoising loss over each condition's own images.

    `settings.conditions_per_batch` conditions share a UNet batch and nothing else. Only hidden
    states are trained; a pooled vector stays the prompt's.

    Args:
        start: initial conditions, G rows, those of prompts.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        rows_of: the images of each condition, G index tensors.
        names: of the conditions. Each name seeds its own random stream.
        may_diverge: whether to return conditions that became NaN or infinite instead of raising.
        as_offsets: whether to train one vector per condition, which is added to each token of
            `start`, instead of the states.

    Returns:
        the trained states [G, L, d], or offsets [G, 1, d].

    Raises:
        ValueError: a condition diverged, and `may_diverge` is False.
    """
    generators = [
        generator_of(job.config.seed, job.config.method, job.client, name) for name in names
    ]
    firsts = range(0, len(start), settings.conditions_per_batch)
    learned = []
    for number, first in enumerate(firsts):
        part = slice(first, first + settings.conditions_per_batch)
        schedules = _schedules(rows_of[part], generators[part], settings)
        group = _Group(start[part], schedules, generators[part], as_offsets)

        def advance(done: int, total: int, number: int = number) -> None:
            job.progress(number * total + done, len(firsts) * total)

        conditions = _learn_together(kit, group, mean, logvar, settings.lr, job.meter, advance)
        if not may_diverge:
            _check_finite([conditions], job.config.method, settings.lr)
        learned.append(conditions)
    return torch.cat(learned)


def _schedules(
    rows_of: list[torch.Tensor], generators: list[torch.Generator], settings: ConditionTraining
) -> list[list[torch.Tensor]]:
    """Draw each condition's minibatches from its own generator."""
    return [
        minibatches(rows, settings.epochs, settings.steps, settings.batch_size, generator)
        for rows, generator in zip(rows_of, generators, strict=True)
    ]


def _check_finite(tensors: Sequence[torch.Tensor], method: str, lr: float) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ValueError(
            f"the conditions of {method} diverged (NaN or infinity); lower {method}.lr = {lr:g}"
        )


def learn_condition_per_image(
    kit: Kit,
    start: Conditioning,
    mean: torch.Tensor,
    logvar: torch.Tensor,
    names: list[str],
    settings: ConditionTraining,
    job: ClientJob,
) -> torch.Tensor:
    """Learn a condition per image [N, L, d]; it is NaN or infinite where it diverged.

    No image influences another's condition, but for rounding within a shared batch: its random
    numbers derive from its own pixels, not from its position. Each condition sees its image
    `settings.epochs` times; `settings.steps` and `batch_size` are ignored.

    Args:
        start: initial conditions, N rows.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        names: of the images, by their pixels (`image_digests`).
    """
    count = len(start)
    per_image = replace(settings, steps=0, batch_size=1)
    rows_of = list(torch.arange(count).split(1))
    return train_conditions(
        kit, start, mean, logvar, rows_of, names, per_image, job, may_diverge=True
    )


def per_image_steps(count: int, settings: ConditionTraining) -> int:
    """Return the number of training steps of `count` images that each learn a condition."""
    groups = -(-count // settings.conditions_per_batch)
    return groups * settings.epochs


def image_digests(images: Images) -> list[str]:
    """Return the SHA-256 of every image's pixels."""
    names = []
    for pixels in images.pixels.split(64):
        names += [hashlib.sha256(image.contiguous().numpy()).hexdigest() for image in pixels]
    return names


@dataclass(frozen=True)
class _Group:
    """Conditions that are learned in parallel.

    Attributes:
        start: initial conditions, G rows.
        schedules: each condition's minibatches of rows.
        generators: each condition's own, so that the composition of the group changes nothing.
        as_offsets: whether vectors [1, d] are learned that are added to every token.
    """

    start: Conditioning
    schedules: list[list[torch.Tensor]]
    generators: list[torch.Generator]
    as_offsets: bool = False

    def initial_vectors(self) -> torch.Tensor:
        """Return [G, L, d], or zeros [G, 1, d]."""
        states = self.start.states
        return torch.zeros_like(states[:, :1]) if self.as_offsets else states

    def conditions(self, learned: list[torch.Tensor], owners: list[int]) -> Conditioning:
        """Return the conditions of a batch's images, B rows."""
        vectors = torch.stack([learned[number] for number in owners])
        prompts = self.start[owners]
        return prompts.with_states(prompts.states + vectors if self.as_offsets else vectors)


@dataclass(frozen=True)
class _Batch:
    """One step's images of every condition that still trains.

    Attributes:
        rows: [B], of the images.
        owners: [B], the number of each image's condition.
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
    """Train a group's vectors; the result is shaped as its initial ones."""
    # One tensor per condition, so that Adam skips a condition whose schedule has ended
    learned = [vector.clone().requires_grad_() for vector in group.initial_vectors()]
    optimizer = torch.optim.Adam(learned, lr=lr)
    total = max(map(len, group.schedules))
    advance(0, total)
    for step in range(total):
        batch = _draw(group, step, len(kit.alphas_cumprod), mean.shape[1:], kit.device)
        std = (0.5 * logvar[batch.rows]).exp()
        x0 = mean[batch.rows] + std * batch.posterior_noise
        z_t = forward_noise(x0, batch.eps, kit.alphas_cumprod[batch.t])
        update = partial(_update, kit, group, learned, optimizer, batch, z_t)
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
        generator = group.generators[number]
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
    optimizer: torch.optim.Optimizer,
    batch: _Batch,
    z_t: torch.Tensor,
) -> None:
    predicted = kit.eps(z_t, batch.t, group.conditions(learned, batch.owners))
    errors = (batch.eps - predicted).square().mean(dim=(1, 2, 3))
    # FedDEO, eq. 4; Espresso, eq. 8: the mean over each condition's own images
    loss = (errors * batch.share).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_shared_vectors(
    kit: Kit,
    learned: list[torch.Tensor],
    condition_of: Callable[[torch.Tensor], Conditioning],
    mean: torch.Tensor,
    logvar: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    schedule: list[torch.Tensor],
    generator: torch.Generator,
    job: ClientJob,
    scheduler: LRScheduler | None = None,
) -> list[torch.Tensor]:
    """Minimize the denoising loss over vectors that all of a client's images share.

    Args:
        learned: the tensors that `optimizer` updates.
        condition_of: maps images' rows [B] to their conditions, computed from `learned`.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
        schedule: the rows of each step.

    Returns:
        `learned`, on the CPU in float32.

    Raises:
        ValueError: the vectors diverged.
    """

    def update(rows: torch.Tensor, z_t: torch.Tensor, t: torch.Tensor, eps: torch.Tensor) -> None:
        # FedDEO, eq. 4, over images of all classes
        loss = (eps - kit.eps(z_t, t, condition_of(rows))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    job.progress(0, len(schedule))
    for step, rows in enumerate(schedule, start=1):
        count = len(rows)
        t = torch.randint(len(kit.alphas_cumprod), (count,), generator=generator).to(kit.device)
        eps = torch.randn(count, *mean.shape[1:], generator=generator).to(kit.device)
        noise = torch.randn(count, *mean.shape[1:], generator=generator).to(kit.device)
        x0 = mean[rows] + (0.5 * logvar[rows]).exp() * noise
        z_t = forward_noise(x0, eps, kit.alphas_cumprod[t])
        job.meter.run(("all", count), partial(update, rows, z_t, t, eps))
        if scheduler is not None:
            scheduler.step()
        job.progress(step, len(schedule))
    results = [part.detach().float().cpu() for part in learned]
    _check_finite(results, job.config.method, optimizer.defaults["lr"])
    return results
