"""FedLMG's server half: classifier-guided images, and three ways to train the global model.

FedLMG (Yang et al., arXiv 2311.08870), sections 3.3 and 3.4. `fedlmg.classifier-weight = 0` or
`fedlmg.bn-weight = 0` switches a loss off (its table 4).

Differences from the paper:

1. Theirs, eq. 10: `e - sqrt(1 - a_t) grad L`. Ours: a plus, because with a loss L the minus
   increases it (Dhariwal & Nichol subtract the gradient of log p). A test shows that L decreases.
2. Theirs: BatchNorm statistics of each image alone ("after feeding the sample s"). Ours: the same
   by default, so that an image does not depend on its batch; with `fedlmg.bn-statistics = "unit"`
   over a whole work unit, in which a client's classes alternate.
3. Theirs: statistics of each BatchNorm layer's output, by their text. Ours: of its input, which the
   running mean and variance describe.
4. Theirs: gradient scale 1. Ours: `fedlmg.gradient-scale`; configs/tables/guidance-losses.toml
   compares 2.
5. Theirs (code): a second UNet pass for the step. Ours: one pass gives the prediction and its
   gradient.
6. Theirs, multi-teacher: the uniform mean. Ours: for each class the mean over the teachers that
   hold it, because the others were not trained on it; `fedlmg.teacher-mean = "plain"` is theirs.
7. Theirs, eq. 12 and 13: KL(student || teacher) as printed. Ours: KL(teacher || student), as
   distillation is usually written.
8. Theirs: the gradient goes through the UNet. Ours: the same by default; `fedlmg.gradient = "x0"`
   is an approximation at half the cost, with d x0hat / dz = sqrt(a_t) I, which holds for data from
   N(0, I) and roughly for latents. (A constant e would give I / sqrt(a_t), which is 200 times too
   large at t = T and gives no usable image.)
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch

from osfl.config import FedLMGConfig, RunConfig
from osfl.models.classifiers import rebuild_classifier
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, x0hat
from osfl.payload.kinds import Classifier
from osfl.util.costs import Cost
from server_app.context import ServerJob
from server_app.costs import rows_with_gradient
from server_app.distillation import strategy_targets, train_strategies
from server_app.pipeline import Models, plan_held_classes, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.guidance import (
    Condition,
    Teacher,
    as_teacher,
    classifier_loss,
    compose,
    guide,
)
from server_app.synthesis.guidance_cost import gradient_cost
from server_app.synthesis.plan import ImageJob, initial_noise, mix_classes
from server_app.synthesis.samplers import Predict, denoise, to_images
from server_app.synthesis.workers import Sample

# (z, t []) -> (e, L [B])
LossAt = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def run(job: ServerJob, payloads: Mapping[str, Classifier]) -> Models:
    """Sample R images per class of every classifier, and train a global model per strategy.

    The strategies are those of FT, MD and SD in `fedlmg.strategies`.
    """
    return run_guided(job, payloads, job.config.fedlmg, sample)


def run_guided(
    job: ServerJob,
    payloads: Mapping[str, Classifier],
    settings: FedLMGConfig,
    sample: Callable[..., torch.Tensor],
) -> Models:
    """Run FedLMG or FedCADO, from classifiers to global models. They differ in `sample`."""
    by_unit = settings.bn_statistics == "unit"
    return synthesize_and_train(
        job,
        payloads,
        partial(sampler, settings=settings, sample=sample),
        plan=plan_mixed if by_unit else plan_held_classes,
        train=partial(train_strategies, settings=settings, teachers_of=teachers_of),
        divisible=not by_unit,
        targets=partial(strategy_targets, settings=settings, teachers_of=teachers_of),
    )


def plan_mixed(job: ServerJob, payloads: Mapping[str, Classifier]) -> list[ImageJob]:
    """Plan R images per class of every classifier, with each client's classes alternating."""
    return mix_classes(plan_held_classes(job, payloads))


def sampler(
    job: ServerJob,
    device: torch.device,
    payloads: Mapping[str, Classifier],
    *,
    settings: FedLMGConfig,
    sample: Callable[..., torch.Tensor],
) -> Sample:
    """Return a function that samples images guided by their clients' classifiers."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    steps = job.config.synthesis.steps
    size = job.config.data.image_size
    prompts = kit.text(job.config.prompts(job.classes))
    # A copy has torch's own memory alignment in every process; the last bit of a sum may depend on
    # the alignment
    teachers = {
        client: as_teacher(deepcopy(teacher.model).to(device))
        for client, teacher in teachers_of(job, payloads).items()
    }
    return lambda jobs: sample(kit, jobs, prompts, teachers, settings, steps, size)


def teachers_of(job: ServerJob, payloads: Mapping[str, Classifier]) -> dict[str, Teacher]:
    """Return the clients' classifiers, frozen."""
    small_stem = job.config.classifier.small_stem
    return {
        client: _rebuild(payload, len(job.classes), small_stem)
        for client, payload in payloads.items()
    }


def _rebuild(payload: Classifier, num_classes: int, small_stem: bool) -> Teacher:
    teacher = as_teacher(
        rebuild_classifier(payload.state, payload.architecture, num_classes, small_stem)
    )
    if not teacher.norms:
        warnings.warn(f"{payload.architecture} has no BatchNorm layer, so L_BN is 0", stacklevel=2)
    return teacher


def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    teachers: Mapping[str, Teacher],
    settings: FedLMGConfig,
    steps: int,
    size: int | None = None,
) -> torch.Tensor:
    """Sample by classifier-guided denoising (FedLMG, section 3.3).

    Args:
        jobs: the images, which may belong to different clients.
        prompts: conditions of every class's prompt.
        teachers: each client's classifier.
        size: side in pixels at which the classifiers were trained.

    Returns:
        uint8 [B, 3, H, W].
    """
    loss_at = guidance_loss(kit, jobs, prompts, teachers, settings, size)
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    return to_images(
        kit, denoise(kit, z, steps, guided_prediction(kit, loss_at, settings.gradient_scale))
    )


def guidance_loss(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    teachers: Mapping[str, Teacher],
    settings: FedLMGConfig,
    size: int | None,
) -> LossAt:
    """Return the function (z, t) -> (e, L(z, t)) of a batch. L is differentiable in z."""
    c0 = kit.text([""])
    labels = torch.tensor([job.label for job in jobs], device=kit.device)
    condition = [Condition(prompts[labels], settings.guidance)]
    rows_of = defaultdict(list)
    for row, job in enumerate(jobs):
        rows_of[job.client].append(row)

    def loss_at(z: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # 1. e: classifier-free guidance on the class's prompt
        with torch.set_grad_enabled(settings.gradient == "full"):
            e = compose(kit, z, t, c0, condition)
        # 2. FedLMG, eq. 8: x0hat = (z - sqrt(1 - a_t) e) / sqrt(a_t)
        x0 = x0hat(z, e, kit.alphas_cumprod[t])
        # The same value with the gradient sqrt(a_t)
        if settings.gradient == "x0":
            x0 = x0.detach() + kit.alphas_cumprod[t].sqrt() * (z - z.detach())
        x = kit.decode_for_guidance(x0)
        # FedLMG, eq. 9: L = CE(F_k(D(x0hat)), y) + lambda L_BN, with each row's client k
        loss = torch.zeros(len(z), device=z.device)
        for client, rows in rows_of.items():
            weights = (settings.classifier_weight, settings.bn_weight)
            losses = classifier_loss(
                teachers[client], x[rows], labels[rows], *weights, size, settings.bn_statistics
            )
            loss = loss.index_add(0, torch.tensor(rows, device=z.device), losses)
        return e, loss

    return loss_at


def guided_prediction(kit: Kit, loss_at: LossAt, scale: float) -> Predict:
    """Return the guided noise prediction for the denoising loop.

    Args:
        loss_at: returns the noise prediction and the loss.
        scale: s.
    """

    def predict(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        z = z.detach().requires_grad_()
        e, loss = loss_at(z, t)
        # 3. FedLMG, eq. 10: e <- e + s sqrt(1 - a_t) grad_z L
        return guide(z, e, kit.alphas_cumprod[t], loss, scale)

    return predict


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the UNet rows per image, with those of the gradient."""
    return rows_with_gradient(config.synthesis.steps, config.fedlmg)


def guidance_cost(config: RunConfig, kit: Kit, most: int) -> Cost:
    """Measure what an image's gradients cost beside the UNet."""
    return gradient_cost(config, config.fedlmg, kit, config.synthesis.steps, most)
