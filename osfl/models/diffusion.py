"""The frozen diffusion model ("kit") that clients and server share.

The only file that imports diffusers.

A kit is a Stable-Diffusion-format folder (`model_index.json vae/ unet/ text_encoder/ tokenizer/
scheduler/`): `kits/digits`, or what `osfl.kit.hub` fetched.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from osfl.kit.check import check_kit, check_small_decoder, check_steps
from osfl.kit.fits import Misfit, check_finite, check_loaded
from osfl.kit.folder import KitError
from osfl.kit.headers import Shapes
from osfl.kit.kits import find_model, kit_shapes, variant_of
from osfl.methods import DIFFUSION_PARTS, SMALL_DECODER
from osfl.models.encoders import TextEncoder, load_text_encoder
from osfl.util.text import plain

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderTiny,
        StableDiffusionPipeline,
        StableUnCLIPImg2ImgPipeline,
    )


State = dict[str, torch.Tensor]
# How the names of a LoRA's two matrices end in peft: of W + B A
_LORA_A = ".lora_A.weight"
_LORA_B = ".lora_B.weight"
_LORA_BIAS = ".lora_B.bias"
# With noise of their own in every step but the last
FEW_STEP_SOLVERS = ("lcm", "tcd")


@dataclass(frozen=True)
class Sampling:
    """How latents are denoised; all but the defaults are approximations of what the papers do."""

    solver: str = "ddim"
    guided_from: int = 0  # timesteps from here ...
    guided_to: int = 1000  # ... to here are guided
    base_steps: int = 0  # the first ones, without the few-step weights


@dataclass(frozen=True)
class Kit:
    """E, D (`vae`), eps (`unet`), tau (`text`) and a_t (`alphas_cumprod`), all frozen."""

    vae: AutoencoderKL
    unet: UNet2DConditionModel
    text: TextEncoder
    scheduler: DDIMScheduler
    device: torch.device
    dtype: torch.dtype  # of the networks; latents and images stay in float32
    sampling: Sampling = Sampling()
    small_decoder: "AutoencoderTiny | None" = None  # an approximation of D

    @property
    def alphas_cumprod(self) -> torch.Tensor:
        """a_t for t = 0 .. T-1, float32 [T]."""
        return self.scheduler.alphas_cumprod.to(self.device)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of z; (4, 64, 64) for Stable Diffusion 1.5 at 512 px."""
        size = self.unet.config.sample_size
        return self.unet.config.in_channels, size, size

    @property
    def image_size(self) -> int:
        """Pixels on a side of a decoded image."""
        return self.unet.config.sample_size * 2 ** (len(self.vae.config.block_out_channels) - 1)

    def eps(
        self, z: torch.Tensor, t: torch.Tensor, c: torch.Tensor, image: torch.Tensor | None = None
    ) -> torch.Tensor:
        """eps(z, t, c): the predicted noise. z [B, C, H, W], t [B] or [], c [B, L, d].

        Image [B, 2e]: an unCLIP UNet's condition.

        A UNet that predicts v (Salimans & Ho, arXiv 2202.00512; Stable Diffusion 2.1) is read as
        eps = sqrt(a_t) v + sqrt(1 - a_t) z.
        """
        image = image if image is None else image.to(self.dtype)
        output = self.unet(
            z.to(self.dtype), t, encoder_hidden_states=c.to(self.dtype), class_labels=image
        ).sample.to(z.dtype)
        if self.scheduler.config.prediction_type == "v_prediction":
            a_t = self.alphas_cumprod[t].to(z.dtype).view(-1, 1, 1, 1)
            return a_t.sqrt() * output + (1 - a_t).sqrt() * z
        return output

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """The UNet as it was before `load_lora`, until the end."""
        self.unet.disable_lora()
        try:
            yield
        finally:
            self.unet.enable_lora()

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """E(x).

        Mean and log-variance of the scaled latents' posterior, each [B, C, h, w], of images [B, 3,
        H, W] in [-1, 1].
        """
        posterior = self.vae.encode(images.to(self.device, self.dtype)).latent_dist
        scale = self.vae.config.scaling_factor
        return posterior.mean * scale, posterior.logvar + 2 * torch.log(torch.tensor(scale))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """D(z): images [B, 3, H, W], about [-1, 1] (not clamped), differentiable."""
        return self.vae.decode((z / self.vae.config.scaling_factor).to(self.dtype)).sample.to(
            z.dtype
        )

    def decode_for_guidance(self, z: torch.Tensor) -> torch.Tensor:
        """D(z), or where there is a small decoder what it makes of z (TAESD takes z as it is)."""
        if self.small_decoder is None:
            return self.decode(z)
        return self.small_decoder.decode(z.to(self.dtype)).sample.to(z.dtype)

    def checkpointed(self) -> "Kit":
        """The same, but a gradient's activations are computed again in place of being kept (Chen et
        al., arXiv 1604.06174): same numbers, less memory.
        """
        for network in (self.unet, self.vae):
            network.enable_gradient_checkpointing()
        return self


class Attention(AttnProcessor2_0):
    """A UNet's attention by one of torch's implementations, or by another where that one cannot
    (flash attention in float32 on a GPU, say).

    In the processor and not around the UNet, so that activations which are computed again for a
    gradient are computed alike.
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
        # The latter's memory grows with the square of the length
        others = (
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        )
        self._backends = [first, *(other for other in others if other != first)]

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        """As diffusers' own."""
        with sdpa_kernel(self._backends, set_priority=True):
            return super().__call__(*args, **named)


def load_kit(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Kit:
    """Load a Stable-Diffusion-format folder, frozen and in eval mode.

    Raises:
        KitError: nothing there, a part is missing, its parts do not fit each other, or as
            `check_schedule`.
    """
    source = str(path)
    device = torch.device(device)
    check_kit(source, DIFFUSION_PARTS)
    scheduler = check_schedule(source)
    vae = _network(source, "vae", dtype)
    unet = _network(source, "unet", dtype)
    try:
        text = load_text_encoder(source, device, dtype)
    except KitError:
        raise
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(f"kit = {source!r} cannot be loaded: {plain(error)}") from error
    for module in (vae, unet):
        module.to(device).eval().requires_grad_(False)
    return Kit(vae, unet, text, scheduler, device, dtype)


def _network(
    source: str, kind: str, dtype: torch.dtype, key: str = "kit", part: str | None = None
) -> Any:
    """Load one of diffusers' networks with all its tensors.

    Args:
        source: a folder.
        kind: which part it is.
        key: of the configuration, for the error.
        part: where in the folder it is; None: in one of its kind's name.

    Raises:
        KitError: it cannot be loaded, or its file lacks a tensor.
    """
    setting = f"{key} = {source!r}"
    part = kind if part is None else part
    try:
        network, info = _network_class(kind).from_pretrained(
            source,
            subfolder=part,
            torch_dtype=dtype,
            low_cpu_mem_usage=False,
            use_safetensors=True,
            variant=variant_of(source, part, kind),
            output_loading_info=True,
        )
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {plain(error)}") from error
    check_loaded(info, setting, kind)
    # Of a file with numbers of several types diffusers leaves some as they are
    network.to(dtype)
    check_finite(network, setting, kind)
    return network


def _network_class(kind: str) -> Any:
    # Seconds to import, and few runs use one
    from diffusers import AutoencoderTiny

    return {
        "vae": AutoencoderKL,
        "unet": UNet2DConditionModel,
        "image_normalizer": StableUnCLIPImageNormalizer,
        SMALL_DECODER: AutoencoderTiny,
    }[kind]


def misfit_of_network(place: Path, kind: str, shapes: Shapes, sharded: bool) -> Misfit:
    """Compare a file's tensors with those of the network that a folder's settings describe.

    Args:
        sharded: whether they are of several files, of which diffusers maps no old names.
    """
    network_class = _network_class(kind)
    with torch.device("meta"):
        network = network_class.from_config(network_class.load_config(place))
    state: dict[str, Any] = dict(shapes)
    if not sharded:
        network._fix_state_dict_keys_on_load(state)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    missing = [name for name in wanted if name not in state]
    mismatched = [
        (name, tuple(state[name]), shape)
        for name, shape in wanted.items()
        if name in state and tuple(state[name]) != shape
    ]
    return Misfit(tuple(missing), tuple(mismatched))


def check_schedule(source: str) -> DDIMScheduler:
    """A kit's noise schedule, by its scheduler's settings alone.

    Raises:
        KitError: it cannot be read, or ends at pure noise (a_T = 0): there x0hat is infinite.
    """
    check_kit(source, ("scheduler",))
    try:
        scheduler = DDIMScheduler.from_pretrained(source, subfolder="scheduler")
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(
            f"kit = {source!r}: its scheduler/ cannot be read: {plain(error)}"
        ) from error
    if not bool(torch.isfinite(scheduler.alphas_cumprod).all()):
        raise KitError(f"kit = {source!r}: its scheduler's alphas_cumprod is not finite")
    if not bool((scheduler.alphas_cumprod > 0).all()):
        raise KitError(
            f"kit = {source!r} has zero terminal SNR: its scheduler's alphas_cumprod ends at 0, "
            "where "
            "no noise prediction tells an image. Take another kit, or one whose "
            "scheduler/scheduler_config.json has rescale_betas_zero_snr = false"
        )
    return scheduler


def load_small_decoder(source: str, kit: Kit, subfolder: str = "") -> "AutoencoderTiny":
    """A decoder in the format of TAESD, frozen, on the kit's device.

    Args:
        source: a folder or hub id such as `madebyollin/taesd`.
        subfolder: where in it.

    Raises:
        KitError: it is not there, is damaged, or is of other latents or images than the kit's.
    """
    key = "synthesis.small-decoder"
    source = find_model(source, SMALL_DECODER, key)
    if subfolder:
        check_kit(source, (SMALL_DECODER,))
    else:
        check_small_decoder(source)
    small = _network(source, SMALL_DECODER, kit.dtype, key, subfolder)
    small.to(kit.device).eval().requires_grad_(False)
    c, h, w = kit.latent_shape
    if small.config.latent_channels != c:
        raise KitError(
            f"synthesis.small-decoder = {source!r} takes {small.config.latent_channels} channels; "
            f"the kit's latents have {c}"
        )
    made = small.decode(torch.zeros(1, c, h, w, device=kit.device, dtype=kit.dtype)).sample
    if made.shape[-1] != kit.image_size:
        raise KitError(
            f"synthesis.small-decoder = {source!r} makes images of {made.shape[-1]} px; the kit's "
            f"have {kit.image_size}"
        )
    return small


def load_lora(file: Path, kit: Kit, fused: bool) -> None:
    """Add few-step weights to a UNet: W + (alpha / r) B A (LoRA, Hu et al., arXiv 2106.09685).

    Args:
        file: safetensors, in diffusers' names or those of kohya's scripts.
        fused: whether they become part of W; else `Kit.without_lora` can do without them.

    Raises:
        KitError: they do not fit the UNet.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    key = f"synthesis.lora = {str(file)!r}"
    try:
        state = _add_lora(str(file), kit.unet)
    except (ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise KitError(f"{key} does not fit the kit's UNet: {error}") from error
    if not getattr(kit.unet, "peft_config", None):
        raise KitError(f"{key} has nothing for a UNet")
    wanted = sum(name.startswith("unet.") and name.endswith(_LORA_B) for name in state)
    taken = sum(isinstance(module, BaseTunerLayer) for module in kit.unet.modules())
    if taken != wanted:
        raise KitError(f"{key} is for {wanted} layers of a UNet, of which the kit's takes {taken}")
    if fused:
        kit.unet.fuse_lora()
        kit.unet.unload_lora()
    kit.unet.to(kit.device, kit.dtype).eval().requires_grad_(False)


def _add_lora(given: str | State, unet: UNet2DConditionModel) -> State:
    """Put the weights of a file, or of a state dict, into a UNet; return them in peft's names."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    state, alphas = _in_pefts_names(given, unet)
    StableDiffusionLoraLoaderMixin.load_lora_into_unet(
        dict(state), alphas, unet, low_cpu_mem_usage=False
    )
    return state


def _in_pefts_names(
    given: str | State, unet: UNet2DConditionModel
) -> tuple[State, dict[str, float] | None]:
    """Return the LoRA tensors of a file or a state dict, and their alphas."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.utils import convert_unet_state_dict_to_peft

    loader = StableDiffusionLoraLoaderMixin
    state, alphas = loader.lora_state_dict(given, unet_config=unet.config)
    # Training scripts of diffusers mix two kinds of names, of which its loader takes one
    return convert_unet_state_dict_to_peft(state), alphas


def misfits_of_lora(kit: Path, shapes: Shapes) -> list[str]:
    """Compare the tensors of few-step weights with the layers of a kit's UNet.

    Tensors of a text encoder are passed over, as they are when the weights are loaded.

    Args:
        shapes: of the file's tensors.

    Returns:
        for each tensor that fits no layer, its name in the file and why.
    """
    unet = _unet_without_numbers(kit)
    state = {name: _lora_tensor(name, shape) for name, shape in shapes.items()}
    renamed, _ = _in_pefts_names(dict(state), unet)
    # The library renames the tensors; they stay the same objects
    new_names = {id(tensor): name for name, tensor in renamed.items()}
    has = {name: tuple(tensor.shape) for name, tensor in renamed.items()}
    layers = {
        name: tuple(module.weight.shape)
        for name, module in unet.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    }
    found = []
    for name, tensor in state.items():
        # What the library has left out is known by its old name alone
        problem = _lora_problem(new_names.get(id(tensor), name), has, layers)
        if problem and tensor.is_meta:
            found.append(f"{plain(name, 200)!r} {problem}")
    if not found:
        _add_lora(dict(state), unet)
    return found


def _unet_without_numbers(kit: str | Path) -> UNet2DConditionModel:
    config = UNet2DConditionModel.load_config(kit, subfolder="unet")
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(config)


def _lora_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without numbers; of an alpha, which the library reads, 1."""
    is_alpha = name.endswith("alpha") and math.prod(shape) == 1
    return torch.ones(shape) if is_alpha else torch.empty(shape, device="meta")


def _lora_problem(
    name: str, has: Mapping[str, tuple[int, ...]], layers: Mapping[str, tuple[int, ...]]
) -> str:
    """Say why a tensor of a LoRA fits no layer of a UNet; "": it fits one, or is a text encoder's.

    Args:
        name: in peft.
        has: the shapes of all tensors.
        layers: the shapes of the layers' weights.
    """
    if name.startswith("text_encoder"):
        return ""
    end = next((end for end in (_LORA_A, _LORA_B, _LORA_BIAS) if name.endswith(end)), "")
    layer = name.removeprefix("unet.").removesuffix(end)
    if not (end and name.startswith("unet.") and layer in layers):
        return "is for no layer of the UNet"
    stem = name.removesuffix(end)
    if missing := [half for half in (_LORA_A, _LORA_B) if stem + half not in has]:
        return f"is without its {missing[0]}: a layer needs both matrices"
    rank = has[stem + _LORA_A][:1]
    out, into, *kernel = layers[layer]
    wanted = {
        _LORA_A: (*rank, into, *kernel),
        # Of a convolution, with a kernel of 1
        _LORA_B: (out, *rank, *(1 for _ in kernel)),
        _LORA_BIAS: (out,),
    }[end]
    if has[name] != wanted:
        return f"has the shape {list(has[name])}; it must be {list(wanted)}"
    return ""


def save_lora(unet: UNet2DConditionModel, folder: Path) -> None:
    """Write a UNet's LoRA weights as `load_lora` and diffusers' pipelines take them, in 16 bits.

    Their alpha must be their rank, which is what the loaders take where a file has none.
    """
    from diffusers import StableDiffusionPipeline
    from peft.utils import get_peft_model_state_dict

    # In peft's names: diffusers' converter renames the attention's alone, and its loader then
    # leaves them out
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
    # Where T / steps is rounded up, diffusers' trailing spacing has a further one, below 0
    return [t for t in scheduler.timesteps.tolist() if t >= 0]


@torch.no_grad()
def unet_flops(source: str) -> int:
    """FLOPs of one row's way through a kit's UNet, by its settings alone.

    Raises:
        KitError: they are missing or damaged.
    """
    (length, width), latent, image = kit_shapes(source)
    unet = _unet_without_numbers(source)
    with torch.device("meta"):
        z = torch.empty(1, *latent)
        text = torch.empty(1, length, width)
        labels = torch.empty(1, image) if image else None
        with FlopCounterMode(display=False) as counter:
            unet(z, torch.ones(1), encoder_hidden_states=text, class_labels=labels)
    return counter.get_total_flops()


def new_solver(name: str, scheduler: DDIMScheduler) -> Any:
    """diffusers' scheduler of a solver that `Sampling` names, on a kit's noise schedule.

    `Kit.eps` predicts noise, whatever the UNet does.
    """
    import diffusers

    solver = {
        "dpm-solver++": diffusers.DPMSolverMultistepScheduler,
        "unipc": diffusers.UniPCMultistepScheduler,
        "lcm": diffusers.LCMScheduler,
        "tcd": diffusers.TCDScheduler,
    }[name]
    # Distilled on timesteps of their own
    if name in FEW_STEP_SOLVERS:
        return solver.from_config(scheduler.config, prediction_type="epsilon")
    return solver.from_config(
        scheduler.config, prediction_type="epsilon", timestep_spacing="trailing"
    )


def forward_noise(x0: torch.Tensor, eps: torch.Tensor, a_t: torch.Tensor) -> torch.Tensor:
    """z_t = sqrt(a_t) x0 + sqrt(1 - a_t) eps (DDPM, eq. 4). x0, eps [B, ...]; a_t [B]."""
    a_t = a_t.to(x0.dtype).view(-1, *[1] * (x0.ndim - 1))
    return a_t.sqrt() * x0 + (1 - a_t).sqrt() * eps


def x0hat(z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor) -> torch.Tensor:
    """x0hat = (z - sqrt(1 - a_t) e) / sqrt(a_t) (DDIM, eq. 9).

    The clean latent that the noise prediction implies.
    """
    return (z - (1 - a_t).sqrt() * e) / a_t.sqrt()


def ddim_step(
    z: torch.Tensor, e: torch.Tensor, a_t: torch.Tensor, a_prev: torch.Tensor
) -> torch.Tensor:
    """z_prev = sqrt(a_prev) x0hat + sqrt(1 - a_prev) e (DDIM, eq. 12 with sigma = 0)."""
    return a_prev.sqrt() * x0hat(z, e, a_t) + (1 - a_prev).sqrt() * e


@dataclass(frozen=True)
class EmbeddingNoise:
    """How Stable unCLIP noises an image embedding before the UNet sees it."""

    normalizer: StableUnCLIPImageNormalizer
    scheduler: DDPMScheduler

    @torch.no_grad()
    def __call__(
        self, embeddings: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """The UNet's image condition [N, 2e].

        The noised embedding, then the sinusoidal encoding of its level.

        Args:
            embeddings: [N, e].
            levels: noise levels, [N] int64, 0 .. 999.
            noise: [N, e] standard normal.
        """
        scaled = self.normalizer.scale(embeddings)
        noised = self.normalizer.unscale(self.scheduler.add_noise(scaled, noise, levels))
        level = get_timestep_embedding(
            levels, embeddings.shape[1], flip_sin_to_cos=True, downscale_freq_shift=0
        )
        return torch.cat([noised, level.to(noised.dtype)], dim=1)


def load_embedding_noise(kit: str) -> EmbeddingNoise:
    """The `image_normalizer/` and `image_noising_scheduler/` of a Stable-unCLIP-format folder; on
    the CPU.

    Raises:
        KitError: they are not there, or damaged.
    """
    try:
        check_kit(kit, ("image_normalizer", "image_noising_scheduler"))
    except KitError as error:
        raise KitError(f"kit = {kit!r} is no Stable unCLIP: {error}") from None
    normalizer = _network(kit, "image_normalizer", torch.float32)
    try:
        scheduler = DDPMScheduler.from_pretrained(kit, subfolder="image_noising_scheduler")
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(f"kit = {kit!r} is no Stable unCLIP: {plain(error)}") from error
    return EmbeddingNoise(normalizer.float().requires_grad_(False), scheduler)


# ---- As diffusers' own pipelines, which take seconds to import ----


def load_pipeline(folder: str | Path) -> "StableDiffusionPipeline":
    """A kit as diffusers' own pipeline, in fp32 on the CPU.

    What our samples are checked against.
    """
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, low_cpu_mem_usage=False
    )
    pipe.to(torch.float32)  # kits are stored in half precision
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_unclip_pipeline(folder: str | Path) -> "StableUnCLIPImg2ImgPipeline":
    """A Stable unCLIP folder as diffusers' own pipeline, in fp32 on the CPU."""
    from diffusers import StableUnCLIPImg2ImgPipeline

    pipe = StableUnCLIPImg2ImgPipeline.from_pretrained(folder, low_cpu_mem_usage=False)
    pipe.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
