"""FedCADO's server half: classifier guidance as in FedLMG, from edited initial noise.

FedCADO (Yang et al., arXiv 2311.08870v1), "One-Shot Federated Learning with Classifier-Guided
Diffusion Models": the initial noise is edited by the client's classifier (algorithm 1, lines 3 to
6), then denoised with classifier and BatchNorm guidance.

Differences from the paper:

1. Those of server_app/methods/fedlmg.py: the sign of the guidance, statistics of a BatchNorm
   layer's input, one UNet pass per step, KL(teacher || student). Statistics are per image, like
   theirs, whose algorithm 1 samples one image at a time.
2. Theirs: M edits at t = T. Ours: M edits at the first sampling timestep, which is T except for the
   scheduler's spacing.
3. Theirs: the guidance of the edits' noise prediction is not specified. Ours: the same
   classifier-free guidance as in denoising.
4. Theirs: ResNet-18 clients, and heterogeneous clients in one table. Ours: any torchvision
   architecture per client (`classifier.architecture`, node-config `architecture`) and for the
   global model. An architecture without BatchNorm has L_BN = 0 and causes a warning.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.config import FedCADOConfig, RunConfig
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Classifier
from osfl.util.costs import Cost
from server_app.context import ServerJob
from server_app.costs import rows_with_gradient
from server_app.methods.fedlmg import LossAt, guidance_loss, guided_prediction, run_guided
from server_app.pipeline import Models
from server_app.synthesis.guidance import Teacher
from server_app.synthesis.guidance_cost import gradient_cost
from server_app.synthesis.plan import ImageJob, initial_noise
from server_app.synthesis.samplers import denoise, first_timestep, to_images


def run(job: ServerJob, payloads: Mapping[str, Classifier]) -> Models:
    """Sample R images per class of every classifier, and train FedLMG's global models."""
    return run_guided(job, payloads, job.config.fedcado, sample)


def sample(
    kit: Kit,
    jobs: Sequence[ImageJob],
    prompts: Conditioning,
    teachers: Mapping[str, Teacher],
    settings: FedCADOConfig,
    steps: int,
    size: int | None = None,
) -> torch.Tensor:
    """Edit the initial noise, then denoise guided by the same loss. See `fedlmg.sample`."""
    loss_at = guidance_loss(kit, jobs, prompts, teachers, settings, size)
    z = initial_noise(jobs, kit.latent_shape, kit.device)
    first = torch.tensor(first_timestep(kit, steps), device=kit.device)
    z = edit_noise(z, first, loss_at, settings.noise_edits, settings.noise_edit_lr)
    return to_images(
        kit, denoise(kit, z, steps, guided_prediction(kit, loss_at, settings.gradient_scale))
    )


def edit_noise(
    z: torch.Tensor, t: torch.Tensor, loss_at: LossAt, edits: int, lr: float
) -> torch.Tensor:
    """Edit initial noise by M steps of gradient descent on the loss.

    Args:
        z: z_T, [B, c, h, w].
        t: the first timestep.
        loss_at: returns the noise prediction and the loss.
        edits: M.
        lr: eta.
    """
    for _ in range(edits):
        z = z.detach().requires_grad_()
        _, loss = loss_at(z, t)
        (gradient,) = torch.autograd.grad(loss.sum(), z)
        # FedCADO, algorithm 1: z <- z - eta grad_z L(z, T)
        z = z - lr * gradient
    return z.detach()


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the UNet rows per image, with those of the edits and of the gradient."""
    return rows_with_gradient(_gradients(config), config.fedcado)


def guidance_cost(config: RunConfig, kit: Kit, most: int) -> Cost:
    """Measure what an image's gradients cost beside the UNet."""
    return gradient_cost(config, config.fedcado, kit, _gradients(config), most)


def _gradients(config: RunConfig) -> int:
    """Return the gradients per image: one for each edit of the noise, and for each step."""
    return config.fedcado.noise_edits + config.synthesis.steps
