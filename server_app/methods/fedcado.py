"""FedCADO's server half.

FedLMG's guidance by each client's classifier, from an initial noise that the classifier has edited.

FedCADO (Yang et al., arXiv 2311.08870v1), "One-Shot Federated Learning with Classifier-Guided
Diffusion Models": initial-noise editing (its algorithm 1, lines 3 to 6), then classifier- and
BatchNorm-guided denoising.

Differences from the paper:

1. Those of server_app/methods/fedlmg.py: the sign of the guidance, statistics of a BatchNorm
   layer's input, one UNet pass a step, KL(teacher || student). Statistics are of each image, as
   theirs, whose algorithm 1 makes one at a time.
2. Theirs: M edits at t = T. Ours: at the first sampling timestep, which is T but for the
   scheduler's spacing.
3. Theirs, silent on what the edits' prediction is guided by: ours is the same classifier-free
   guidance as in denoising.
4. Theirs: ResNet-18 clients, heterogeneous ones in a table. Ours: any torchvision architecture for
   each client (`classifier.architecture`, node-config `architecture`) and for the global model; one
   without BatchNorm gives L_BN = 0 and a warning.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import FedCADOConfig
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Classifier
from server_app.context import ServerJob
from server_app.methods.fedlmg import LossAt, guidance_loss, guided, run_guided
from server_app.pipeline import Models
from server_app.synthesis.guidance import Teacher
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, first_timestep, to_images


def run(job: ServerJob, payloads: Mapping[str, Classifier]) -> Models:
    """R images for every class of every classifier; a global model for each strategy, as FedLMG."""
    return run_guided(job, payloads, job.config.fedcado, sample)


def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: torch.Tensor,
    teachers: Mapping[str, Teacher],
    settings: FedCADOConfig,
    steps: int,
    size: int | None = None,
) -> torch.Tensor:
    """Edit the noise, then denoise under the same loss. Arguments and result as `fedlmg.sample`."""
    loss_at = guidance_loss(kit, jobs, prompts, teachers, settings, size)
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    first = torch.tensor(first_timestep(kit, steps), device=kit.device)
    z = edit_noise(z, first, loss_at, settings.noise_edits, settings.noise_edit_lr)
    return to_images(kit, denoise(kit, z, steps, guided(kit, loss_at, settings.gradient_scale)))


def edit_noise(
    z: torch.Tensor, t: torch.Tensor, loss_at: LossAt, edits: int, lr: float
) -> torch.Tensor:
    """z <- z - eta grad_z L(z, T), M times (FedCADO, algorithm 1)."""
    for _ in range(edits):
        z = z.detach().requires_grad_()
        _, loss = loss_at(z, t)
        (gradient,) = torch.autograd.grad(loss.sum(), z)
        z = z - lr * gradient
    return z.detach()
