"""Client half of FedDEO: one description per class, learned through the frozen diffusion model.

FedDEO (Yang et al., arXiv 2407.19953), section 3.2: a description d_y of class y replaces the
prompt's encoding and minimizes `|| eps - eps(sqrt(a_t) E(x) + sqrt(1 - a_t) eps, t, d_y) ||^2` over
the client's images of y; everything else is frozen.

Differences from the paper:

1. Theirs (code): SGD, lr 10, fp16. Ours: Adam in fp32 (`feddeo.lr`);
   configs/tables/description-training.toml is the sweep.
2. Theirs (code): images normalized with CLIP's mean and deviation. Ours: [-1, 1], the range that
   the VAE was trained on.
3. Theirs: the VAE encodes the images in every step. Ours: once; each step draws a new sample from
   the stored posterior (the same distribution at a fraction of the cost).
4. Theirs: one class after the other. Ours: `feddeo.conditions-per-batch` classes in one UNet
   batch; exact, as no term couples two classes and each class has its own random stream.
5. Theirs: no DP guarantee. Ours: with `epsilon`, every image learns its own condition, for
   `feddeo.epochs` passes; the differences from the prompt's encoding are clipped and averaged, and
   noise is added, as DPAgg-TI does with words (Peetathawatchai et al., arXiv 2411.14639).

With `feddeo.tokens = "all"`, d_y is the prompt's encoding plus one vector shared by all tokens, d_y
= tau(prompt of y) + u_y, and u_y is sent.

A description replaces the prompt's hidden states. A kit with a pooled vector keeps the prompt's,
which the server knows and no client sends.

Payload for Stable Diffusion 1.5: 77 x 768 numbers per class, 3.548 M for 60 classes; u_y has 768.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from client_app.context import ClientJob, Progress
from client_app.learning.conditions import (
    image_digests,
    learn_condition_per_image,
    load_kit_for_training,
    per_image_steps,
    posteriors,
    train_conditions,
)
from client_app.privacy.mechanisms import private_mean_of_class
from osfl.data.load import Images
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Descriptions


def make_payload(job: ClientJob) -> Descriptions:
    """Learn d_y [L, d], or u_y [1, d], of every class that the client holds.

    Raises:
        KitError: the kit is missing or corrupt.
        ValueError: the descriptions diverged.
    """
    kit = load_kit_for_training(job)
    images = job.load(kit.image_size)
    class_labels = images.held()
    names = [job.classes[label] for label in class_labels]
    mean, logvar = posteriors(kit, images, job)
    rows_of = [(images.labels == label).nonzero().flatten() for label in class_labels]
    if job.config.epsilon:
        means = _noisy_means(kit, images, rows_of, mean, logvar, job)
        return Descriptions(tuple(names), torch.stack(means))
    prompts = kit.text(job.config.prompts(names))
    # With offsets, d_y = tau(prompt of y) + u_y
    shared = job.config.feddeo.tokens == "all"
    learned = train_conditions(
        kit, prompts, mean, logvar, rows_of, names, job.config.feddeo, job, as_offsets=shared
    )
    return Descriptions(tuple(names), learned.float().cpu())


def _noisy_means(
    kit: Kit,
    images: Images,
    rows_of: list[torch.Tensor],
    mean: torch.Tensor,
    logvar: torch.Tensor,
    job: ClientJob,
) -> list[torch.Tensor]:
    """Return each class's noisy mean of its images' conditions, [L, d] or [1, d]."""
    prompts = kit.text(job.config.prompts(job.classes))
    shared = job.config.feddeo.tokens == "all"
    conditions_by_class = descriptions_per_image(kit, prompts, images, rows_of, mean, logvar, job)
    states = prompts.states.cpu()
    means = []
    for label, conditions in zip(images.held(), conditions_by_class, strict=True):
        noise = job.sum_noise
        mean_state = private_mean_of_class(conditions, states, label, job.config, shared, noise)
        means.append(mean_state)
    return means


def descriptions_per_image(
    kit: Kit,
    prompts: Conditioning,
    images: Images,
    rows_of: list[torch.Tensor],
    mean: torch.Tensor,
    logvar: torch.Tensor,
    job: ClientJob,
) -> Iterator[torch.Tensor]:
    """Yield the conditions that images learn separately, class by class: [n, L, d] on the CPU.

    Args:
        prompts: initial conditions, of all classes of the run.
        rows_of: the images of each class that the client holds.
        mean, logvar: posterior of every image's latents, [N, c, h, w].
    """
    names = image_digests(images)
    settings = job.config.feddeo
    all_steps = sum(per_image_steps(len(rows), settings) for rows in rows_of)
    offset = 0
    for label, rows in zip(images.held(), rows_of, strict=True):
        start = prompts[[label]].expand(len(rows))
        image_keys = [names[row] for row in rows.tolist()]
        class_job = replace(job, progress=partial(_report, job.progress, offset, all_steps))
        conditions = learn_condition_per_image(
            kit, start, mean[rows], logvar[rows], image_keys, settings, class_job
        )
        offset += per_image_steps(len(rows), settings)
        yield conditions.cpu()


def _report(progress: Progress, offset: int, all_steps: int, done: int, total: int) -> None:
    """Report one class's steps as steps of all classes."""
    progress(offset + done, all_steps)
