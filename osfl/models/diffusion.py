"""The frozen base diffusion model (the *kit*) that clients and server share.

The only file that imports diffusers, except `osfl/kit_training/untrained.py`.

A kit is a folder in the format of Stable Diffusion (`model_index.json vae/ unet/ text_encoder/
tokenizer/ scheduler/`), such as `kits/digits` or one that `osfl.kit.hub` fetched.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from safetensors import SafetensorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from osfl.kit.check import check_kit, check_steps, check_tiny_autoencoder, check_tiny_decoder
from osfl.kit.fits import Misfit, check_finite, check_loaded
from osfl.kit.folder import KitError
from osfl.kit.headers import Shapes
from osfl.kit.kits import find_model, kit_image_size, weights_variant
from osfl.kit.part_check import TINY_AUTOENCODER
from osfl.kit.shapes import kit_shapes
from osfl.methods import DIFFUSION_PARTS, TINY_DECODER
from osfl.models.conditioning import Conditioning, empty_conditioning
from osfl.models.encoders import TextEncoder, load_text_encoder
from osfl.util.costs import keep_freed_memory
from osfl.util.files import read_json
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderTiny,
        StableDiffusionPipeline,
        StableUnCLIPImg2ImgPipeline,
    )


State = dict[str, torch.Tensor]
# Suffixes of the names of a LoRA's matrices in W + B A, as peft names them
_LORA_A = ".lora_A.weight"
_LORA_B = ".lora_B.weight"
_LORA_BIAS = ".lora_B.bias"
# diffusers' lower bound of a posterior's log-variance
LOWEST_LOGVAR = -30.0
# Solvers for distilled models; they add noise in every step but the last
FEW_STEP_SOLVERS = ("lcm", "tcd")


@dataclass(frozen=True)
class Sampling:
    """Settings of the denoising. All but the defaults approximate the papers' methods."""

    solver: str = "ddim"
    guided_from: int = 0  # first guided timestep
    guided_to: int = 1000  # last guided timestep
    base_steps: int = 0  # number of first steps without the LoRA


@dataclass(frozen=True)
class Autoencoder:
    """E and D of a kit, frozen."""

    vae: "AutoencoderKL | AutoencoderTiny"
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E(x): mean and log-variance of the scaled latents' posterior, each [B, C, h, w].

        A tiny autoencoder (TAESD) has no posterior; its log-variance is the lowest that
        AutoencoderKL's can be, a standard deviation of 3e-7.

        Args:
            images: x, [B, 3, H, W] in [-1, 1].
        """
        output = self.vae.encode(images.to(self.device, self.dtype))
        scale = self.vae.config.scaling_factor
        if not hasattr(output, "latent_dist"):
            latents = output.latents * scale
            return latents, torch.full_like(latents, LOWEST_LOGVAR + 2 * math.log(scale))
        posterior = output.latent_dist
        return posterior.mean * scale, posterior.logvar + 2 * torch.log(torch.tensor(scale))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Return D(z): images [B, 3, H, W], roughly in [-1, 1] (not clamped). Differentiable."""
        scaled = (z / self.vae.config.scaling_factor).to(self.dtype)
        images: torch.Tensor = self.vae.decode(scaled).sample.to(z.dtype)
        return images


@dataclass(frozen=True)
class Kit:
    """E, D (`vae`), eps (`unet`), tau (`text`) and a_t (`alphas_cumprod`), all frozen."""

    vae: "AutoencoderKL | AutoencoderTiny"
    unet: UNet2DConditionModel
    text: TextEncoder
    scheduler: DDIMScheduler
    device: torch.device
    dtype: torch.dtype  # of the networks; latents and images stay in float32
    sampling: Sampling = Sampling()
    tiny_decoder: "AutoencoderTiny | None" = None  # an approximation of D

    @property
    def alphas_cumprod(self) -> torch.Tensor:
        """The noise schedule a_t for t = 0 .. T-1, float32 [T]."""
        schedule: torch.Tensor = self.scheduler.alphas_cumprod.to(self.device)
        return schedule

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of z; (4, 64, 64) for Stable Diffusion 1.5 at 512 px."""
        size = self.unet.config.sample_size
        return self.unet.config.in_channels, size, size

    @property
    def image_size(self) -> int:
        """Side of a decoded image in pixels."""
        halvings = len(self.vae.config.block_out_channels) - 1
        side: int = self.unet.config.sample_size * 2**halvings
        return side

    def eps(self, z: torch.Tensor, t: torch.Tensor, c: Conditioning) -> torch.Tensor:
        """Return the predicted noise eps(z, t, c) in the shape of z.

        The output of a UNet that predicts v (Salimans & Ho, arXiv 2202.00512; Stable Diffusion 2.1)
        is converted: eps = sqrt(a_t) v + sqrt(1 - a_t) z.

        Args:
            z: noisy latents [B, C, H, W].
            t: timesteps, [B] or [].
            c: conditions of B rows.
        """
        arguments = c.unet_arguments(self.dtype, self.image_size)
        output: torch.Tensor = self.unet(z.to(self.dtype), t, **arguments).sample.to(z.dtype)
        if self.scheduler.config.prediction_type == "v_prediction":
            a_t = self.alphas_cumprod[t].to(z.dtype).view(-1, 1, 1, 1)
            return a_t.sqrt() * output + (1 - a_t).sqrt() * z
        return output

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Disable the weights that `load_lora` added."""
        self.unet.disable_lora()
        try:
            yield
        finally:
            self.unet.enable_lora()

    @property
    def autoencoder(self) -> Autoencoder:
        """E and D alone."""
        return Autoencoder(self.vae, self.device, self.dtype)

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E(x) as `Autoencoder.encode` does."""
        return self.autoencoder.encode(images)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Return D(z) as `Autoencoder.decode` does."""
        return self.autoencoder.decode(z)

    def decode_for_guidance(self, z: torch.Tensor) -> torch.Tensor:
        """Return D(z), by the tiny autoencoder if there is one (TAESD takes z without scaling)."""
        if self.tiny_decoder is None:
            return self.decode(z)
        images: torch.Tensor = self.tiny_decoder.decode(z.to(self.dtype)).sample.to(z.dtype)
        return images

    def with_checkpointing(self) -> "Kit":
        """Enable gradient checkpointing, in place: same numbers, less memory.

        Activations are recomputed in the backward pass (Chen et al., arXiv 1604.06174).
        """
        for network in (self.unet, self.vae):
            network.enable_gradient_checkpointing()
        return self


class Attention(AttnProcessor2_0):
    """A UNet's attention by one of torch's implementations, with others as fallback.

    Flash attention, for example, does not support float32 on a GPU. The implementation is selected
    in the processor and not around the UNet, so that gradient checkpointing recomputes activations
    by the same one.
    """

    IMPLEMENTATIONS: ClassVar = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def __init__(self, implementation: str):
        super().__init__()
        first = self.IMPLEMENTATIONS[implementation]
        # MATH comes last: its memory grows with the square of the sequence length
        fallbacks = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
        self._backends = [first, *(backend for backend in fallbacks if backend != first)]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute attention like diffusers' own processor."""
        with sdpa_kernel(self._backends, set_priority=True):
            states: torch.Tensor = super().__call__(*args, **kwargs)
            return states


def load_kit(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Kit:
    """Load a kit, frozen and in eval mode.

    Raises:
        KitError: the folder or a part is missing, its parts do not fit each other, or as
            `load_noise_schedule`.
    """
    source = str(path)
    device = torch.device(device)
    keep_freed_memory()
    check_kit(source, DIFFUSION_PARTS)
    scheduler = load_noise_schedule(source)
    vae = _network(source, "vae", dtype)
    unet = _network(source, "unet", dtype)
    try:
        text = load_text_encoder(source, device, dtype)
    except KitError:
        raise
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"kit = {source!r} cannot be loaded: {sanitize(error)}") from error
    for module in (vae, unet):
        module.to(device).eval().requires_grad_(False)
    return Kit(vae, unet, text, scheduler, device, dtype)


def load_kit_autoencoder(path: str | Path, device: str | torch.device = "cpu") -> Autoencoder:
    """Load a kit's autoencoder alone, in float32, frozen and in eval mode.

    Raises:
        KitError: it is missing or corrupt.
    """
    check_kit(str(path), ("vae",))
    vae = _network(str(path), "vae", torch.float32)
    vae.to(device).eval().requires_grad_(False)
    return Autoencoder(vae, torch.device(device), torch.float32)


def _network(
    source: str, kind: str, dtype: torch.dtype, key: str = "kit", part: str | None = None
) -> Any:
    """Load one of diffusers' networks with all its tensors.

    Args:
        source: a folder.
        kind: the part's kind.
        key: of the configuration, for the error.
        part: its subfolder; None: named like its kind.

    Raises:
        KitError: the network cannot be loaded, or its file lacks a tensor.
    """
    setting = f"{key} = {source!r}"
    part = kind if part is None else part
    try:
        network, info = _network_class(kind, Path(source) / part).from_pretrained(
            source,
            subfolder=part,
            torch_dtype=dtype,
            low_cpu_mem_usage=False,
            use_safetensors=True,
            variant=weights_variant(source, part, kind),
            output_loading_info=True,
        )
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {sanitize(error)}") from error
    check_loaded(info, setting, kind)
    # diffusers does not convert every tensor of a file with several dtypes, and warns of `to`
    tensors = chain(network.parameters(), network.buffers())
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors):
        network.to(dtype)
    check_finite(network, setting, kind)
    return network


def _network_class(kind: str, folder: Path) -> Any:
    """Return the class of a part in a folder; a kit's autoencoder may be of two classes."""
    # Seconds to import, and few runs use it
    from diffusers import AutoencoderTiny

    if kind == "vae" and read_json(folder / "config.json").get("_class_name") == TINY_AUTOENCODER:
        return AutoencoderTiny
    return {
        "vae": AutoencoderKL,
        "unet": UNet2DConditionModel,
        "image_normalizer": StableUnCLIPImageNormalizer,
        TINY_DECODER: AutoencoderTiny,
    }[kind]


def network_misfit(folder: Path, kind: str, shapes: Shapes, sharded: bool) -> Misfit:
    """Compare a file's tensors with those of the network that a folder's settings describe.

    Args:
        sharded: whether the tensors come from several files; diffusers then maps no old names.
    """
    network_class = _network_class(kind, folder)
    with torch.device("meta"):
        network = network_class.from_config(network_class.load_config(folder))
    state: dict[str, Any] = dict(shapes)
    if not sharded:
        network._fix_state_dict_keys_on_load(state)
    required = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    missing = [name for name in required if name not in state]
    mismatched = [
        (name, tuple(state[name]), shape)
        for name, shape in required.items()
        if name in state and tuple(state[name]) != shape
    ]
    return Misfit(tuple(missing), tuple(mismatched))


def load_autoencoder(folder: Path) -> "AutoencoderTiny":
    """Load a tiny autoencoder (TAESD) that a kit is trained on, frozen, in fp32 on the CPU.

    Raises:
        KitError: it is missing or corrupt.
    """
    check_tiny_autoencoder(str(folder), "autoencoder")
    network = _network(str(folder), TINY_DECODER, torch.float32, "autoencoder", "")
    return network.eval().requires_grad_(False)


def load_noise_schedule(source: str) -> DDIMScheduler:
    """Load a kit's noise schedule from its scheduler's settings alone.

    Raises:
        KitError: it cannot be read, or ends at pure noise (a_T = 0), where x0hat is infinite.
    """
    check_kit(source, ("scheduler",))
    try:
        scheduler = DDIMScheduler.from_pretrained(source, subfolder="scheduler")
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(
            f"kit = {source!r}: its scheduler/ cannot be read: {sanitize(error)}"
        ) from error
    if not bool(torch.isfinite(scheduler.alphas_cumprod).all()):
        raise KitError(f"kit = {source!r}: its scheduler's alphas_cumprod is not finite")
    if not bool((scheduler.alphas_cumprod > 0).all()):
        raise KitError(
            f"kit = {source!r} has zero terminal SNR: its scheduler's alphas_cumprod ends at 0, "
            "where a noise prediction implies no image. Use a kit with rescale_betas_zero_snr = "
            "false in scheduler/scheduler_config.json"
        )
    return scheduler


def load_tiny_decoder(source: str, kit: Kit, subfolder: str = "") -> "AutoencoderTiny":
    """Load a tiny autoencoder (TAESD), frozen, on the kit's device.

    Args:
        source: a folder or hub id such as `madebyollin/taesd`.
        subfolder: of the source.

    Raises:
        KitError: it is missing, corrupt, or for other latents or images than the kit's.
    """
    key = "synthesis.tiny-decoder"
    source = find_model(source, TINY_DECODER, key)
    if subfolder:
        check_kit(source, (TINY_DECODER,))
    else:
        check_tiny_decoder(source)
    tiny = _network(source, TINY_DECODER, kit.dtype, key, subfolder)
    tiny.to(kit.device).eval().requires_grad_(False)
    c, h, w = kit.latent_shape
    if tiny.config.latent_channels != c:
        raise KitError(
            f"synthesis.tiny-decoder = {source!r} takes {tiny.config.latent_channels} channels; "
            f"the kit's latents have {c}"
        )
    image = tiny.decode(torch.zeros(1, c, h, w, device=kit.device, dtype=kit.dtype)).sample
    if image.shape[-1] != kit.image_size:
        raise KitError(
            f"synthesis.tiny-decoder = {source!r} makes images of {image.shape[-1]} px; the kit's "
            f"have {kit.image_size}"
        )
    return tiny


def load_lora(file: Path, kit: Kit, fused: bool) -> None:
    """Add a distilled LoRA to a UNet: W + (alpha / r) B A (Hu et al., arXiv 2106.09685).

    Args:
        file: safetensors, with the names of diffusers or of kohya's scripts.
        fused: whether to merge it into W; otherwise `Kit.without_lora` can disable it.

    Raises:
        KitError: it does not fit the UNet.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    key = f"synthesis.lora = {str(file)!r}"
    try:
        state = _add_lora(str(file), kit.unet)
    except (ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise KitError(f"{key} does not fit the kit's UNet: {error}") from error
    if not getattr(kit.unet, "peft_config", None):
        raise KitError(f"{key} has no weights for a UNet")
    stored = sum(name.startswith("unet.") and name.endswith(_LORA_B) for name in state)
    added = sum(isinstance(module, BaseTunerLayer) for module in kit.unet.modules())
    if added != stored:
        raise KitError(
            f"{key} is for {stored} layers of a UNet; the kit's UNet has {added} of them"
        )
    if fused:
        kit.unet.fuse_lora()
        kit.unet.unload_lora()
    kit.unet.to(kit.device, kit.dtype).eval().requires_grad_(False)


def _add_lora(source: str | State, unet: UNet2DConditionModel) -> State:
    """Add the LoRA of a file or a state dict to a UNet; return it with peft's names."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    state, alphas = _with_peft_names(source, unet)
    StableDiffusionLoraLoaderMixin.load_lora_into_unet(
        dict(state), alphas, unet, low_cpu_mem_usage=False
    )
    return state


def _with_peft_names(
    source: str | State, unet: UNet2DConditionModel
) -> tuple[State, dict[str, float] | None]:
    """Return the LoRA tensors of a file or a state dict with peft's names, and their alphas."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.utils import convert_unet_state_dict_to_peft

    loader = StableDiffusionLoraLoaderMixin
    state, alphas = loader.lora_state_dict(source, unet_config=unet.config)
    # diffusers' training scripts mix two naming schemes, of which its loader supports one
    return convert_unet_state_dict_to_peft(state), alphas


def lora_misfits(kit: Path, shapes: Shapes) -> list[str]:
    """Compare the tensors of a LoRA with the layers of a kit's UNet.

    A text encoder's tensors are ignored, as they are when the weights are loaded.

    Args:
        shapes: of the file's tensors.

    Returns:
        For each tensor that fits no layer, its name in the file and the reason.
    """
    unet = _meta_unet(kit)
    state = {name: _lora_tensor(name, shape) for name, shape in shapes.items()}
    renamed, _ = _with_peft_names(dict(state), unet)
    # The library renames the tensors, but they stay the same objects
    new_names = {id(tensor): name for name, tensor in renamed.items()}
    lora_shapes = {name: tuple(tensor.shape) for name, tensor in renamed.items()}
    layers = {
        name: tuple(module.weight.shape)
        for name, module in unet.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    }
    problems = []
    for name, tensor in state.items():
        # A tensor that the library dropped has only its old name
        problem = _lora_problem(new_names.get(id(tensor), name), lora_shapes, layers)
        if problem and tensor.is_meta:
            problems.append(f"{sanitize(name, 200)!r} {problem}")
    if not problems:
        _add_lora(dict(state), unet)
    return problems


def _meta_unet(kit: str | Path) -> UNet2DConditionModel:
    config = UNet2DConditionModel.load_config(kit, subfolder="unet")
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(config)


def _lora_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a meta tensor; for an alpha, whose value the library reads, return 1."""
    is_alpha = name.endswith("alpha") and math.prod(shape) == 1
    return torch.ones(shape) if is_alpha else torch.empty(shape, device="meta")


def _lora_problem(
    name: str, shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, tuple[int, ...]]
) -> str:
    """Return why a LoRA's tensor fits no layer of a UNet; "" if it fits or is a text encoder's.

    Args:
        name: the tensor's name in peft.
        shapes: of all the LoRA's tensors.
        layers: shapes of the UNet's weights, by layer.
    """
    if name.startswith("text_encoder"):
        return ""
    suffixes = (_LORA_A, _LORA_B, _LORA_BIAS)
    suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), "")
    layer = name.removeprefix("unet.").removesuffix(suffix)
    if not (suffix and name.startswith("unet.") and layer in layers):
        return "is for no layer of the UNet"
    stem = name.removesuffix(suffix)
    if missing := [matrix for matrix in (_LORA_A, _LORA_B) if stem + matrix not in shapes]:
        return f"is without its {missing[0]}: a layer needs both matrices"
    rank = shapes[stem + _LORA_A][:1]
    outputs, inputs, *kernel = layers[layer]
    required = {
        _LORA_A: (*rank, inputs, *kernel),
        # A convolution's second matrix has a kernel of 1
        _LORA_B: (outputs, *rank, *(1 for _ in kernel)),
        _LORA_BIAS: (outputs,),
    }[suffix]
    if shapes[name] != required:
        return f"has the shape {list(shapes[name])}; it must be {list(required)}"
    return ""


def save_lora(unet: UNet2DConditionModel, folder: Path) -> None:
    """Write a UNet's LoRA in 16 bits, in the format of `load_lora` and diffusers' pipelines.

    Its alpha must equal its rank, the loaders' default for a file without alphas.
    """
    from diffusers import StableDiffusionPipeline
    from peft.utils import get_peft_model_state_dict

    # peft's names: diffusers' converter renames only attention layers, which its loader then drops
    state = get_peft_model_state_dict(unet)
    half = {name: weight.half().cpu() for name, weight in state.items()}
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=half)


def timesteps(scheduler: DDIMScheduler, steps: int) -> list[int]:
    """Return the timesteps of a schedule with this number of steps, from T down.

    Raises:
        KitError: as `check_steps`.
    """
    check_steps(scheduler.config, steps)
    scheduler.set_timesteps(steps)
    # If T / steps is rounded up, diffusers' trailing spacing has one more timestep, below 0
    return [t for t in scheduler.timesteps.tolist() if t >= 0]


@torch.no_grad()
def unet_flops(source: str) -> int:
    """Return the FLOPs of a forward pass of a kit's UNet for one row, by its settings alone.

    Raises:
        KitError: the settings are missing or corrupt.
    """
    text, latent, image = kit_shapes(source)
    unet = _meta_unet(source)
    with torch.device("meta"):
        z = torch.empty(1, *latent)
        c = empty_conditioning(text, image, unet.config)
        with FlopCounterMode(display=False) as counter:
            unet(z, torch.ones(1), **c.unet_arguments(z.dtype, kit_image_size(source)))
    flops: int = counter.get_total_flops()
    return flops


def new_solver(name: str, scheduler: DDIMScheduler) -> Any:
    """Return diffusers' scheduler for a solver of `Sampling`, on a kit's noise schedule.

    Its prediction type is always noise, which `Kit.eps` returns for every UNet.
    """
    import diffusers

    solver = {
        "dpm-solver++": diffusers.DPMSolverMultistepScheduler,
        "unipc": diffusers.UniPCMultistepScheduler,
        "lcm": diffusers.LCMScheduler,
        "tcd": diffusers.TCDScheduler,
    }[name]
    # These schedulers have the timesteps of the distillation
    if name in FEW_STEP_SOLVERS:
        return solver.from_config(scheduler.config, prediction_type="epsilon")
    return solver.from_config(
        scheduler.config, prediction_type="epsilon", timestep_spacing="trailing"
    )


def forward_noise(x0: torch.Tensor, eps: torch.Tensor, a_t: torch.Tensor) -> torch.Tensor:
    """Return z_t = sqrt(a_t) x0 + sqrt(1 - a_t) eps (DDPM, eq. 4). x0, eps [B, ...]; a_t [B]."""
    a_t = a_t.to(x0.dtype).view(-1, *[1] * (x0.ndim - 1))
    return a_t.sqrt() * x0 + (1 - a_t).sqrt() * eps


def x0hat(z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor) -> torch.Tensor:
    """Return the clean latent that the noise prediction implies (DDIM, eq. 9).

    x0hat = (z - sqrt(1 - a_t) e) / sqrt(a_t).
    """
    return (z - (1 - a_t).sqrt() * e) / a_t.sqrt()


def ddim_step(
    z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor, a_prev: torch.Tensor
) -> torch.Tensor:
    """Return z_prev = sqrt(a_prev) x0hat + sqrt(1 - a_prev) e (DDIM, eq. 12 with sigma = 0)."""
    return a_prev.sqrt() * x0hat(z, e, a_t) + (1 - a_prev).sqrt() * e


@dataclass(frozen=True)
class EmbeddingNoise:
    """Stable unCLIP's noise augmentation of image embeddings, the UNet's image condition."""

    normalizer: StableUnCLIPImageNormalizer
    scheduler: DDPMScheduler

    @torch.no_grad()
    def __call__(
        self, embeddings: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """Return the UNet's image condition [N, 2e].

        It is the noisy embedding, then the sinusoidal encoding of its noise level.

        Args:
            embeddings: [N, e].
            levels: noise levels, [N] int64, 0 .. 999.
            noise: [N, e] standard normal.
        """
        scaled = self.normalizer.scale(embeddings)
        noisy = self.normalizer.unscale(self.scheduler.add_noise(scaled, noise, levels))
        level = get_timestep_embedding(
            levels, embeddings.shape[1], flip_sin_to_cos=True, downscale_freq_shift=0
        )
        return torch.cat([noisy, level.to(noisy.dtype)], dim=1)

    def expected(self, means: torch.Tensor, level: int) -> torch.Tensor:
        """Return the expected image condition [N, 2e] of embeddings of which the mean is known.

        Args:
            means: in the normalizer's units, [N, e].
            level: the noise level, 0 .. 999.
        """
        levels = torch.full((len(means),), level)
        # The level's own noise has mean 0
        return self(self.normalizer.unscale(means), levels, torch.zeros_like(means))


def load_embedding_noise(kit: str) -> EmbeddingNoise:
    """Load `image_normalizer/` and `image_noising_scheduler/` of a Stable unCLIP folder on the CPU.

    Raises:
        KitError: they are missing or corrupt.
    """
    try:
        check_kit(kit, ("image_normalizer", "image_noising_scheduler"))
    except KitError as error:
        raise KitError(f"kit = {kit!r} is not a Stable unCLIP: {error}") from None
    normalizer = _network(kit, "image_normalizer", torch.float32)
    try:
        scheduler = DDPMScheduler.from_pretrained(kit, subfolder="image_noising_scheduler")
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"kit = {kit!r} is not a Stable unCLIP: {sanitize(error)}") from error
    return EmbeddingNoise(normalizer.float().requires_grad_(False), scheduler)


# ---- diffusers' own pipelines, which take seconds to import ----


def load_pipeline(folder: str | Path) -> "StableDiffusionPipeline":
    """Load a kit as diffusers' own pipeline, in fp32 on the CPU, the reference for our samples."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, low_cpu_mem_usage=False
    )
    # Kits are stored in half precision
    pipe.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_unclip_pipeline(folder: str | Path) -> "StableUnCLIPImg2ImgPipeline":
    """Load a Stable unCLIP folder as diffusers' own pipeline, in fp32 on the CPU."""
    from diffusers import StableUnCLIPImg2ImgPipeline

    pipe = StableUnCLIPImg2ImgPipeline.from_pretrained(folder, low_cpu_mem_usage=False)
    pipe.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
