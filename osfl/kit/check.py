"""Whether a kit can be used, before anybody works with it.

By names, settings and the headers of the weights. No weight is loaded.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from osfl.kit.fits import DIFFUSERS_MODELS, TRANSFORMERS_MODELS, check_fit, check_lora_fit
from osfl.kit.headers import Shapes, tensor_shapes
from osfl.kit.kits import (
    DIFFUSION_PARTS,
    LORA,
    SETTINGS,
    TINY_DECODER,
    WEIGHTS,
    KitError,
    KitFolder,
    file_in,
    find_model,
    inner_settings,
)
from osfl.util.files import CorruptFileError, placeholder_problem
from osfl.util.text import sanitize

CAPTIONERS = ("blip", "blip-2")  # by their model_type
IMAGE_ENCODERS = ("clip_vision_model", "clip", "dinov2")  # by their model_type
PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableUnCLIPPipeline",
    "StableUnCLIPImg2ImgPipeline",
)
FEW_STEPS = "a few-step model"
OTHER_PIPELINES = {
    "StableDiffusionXL": "SDXL",
    "StableDiffusion3": "SD3",
    "Flux": "FLUX",
    "LatentConsistency": f"{FEW_STEPS} (LCM)",
}
TAKEN = (
    "OSFL takes kits of Stable Diffusion 1.x and 2.x, such as "
    "stable-diffusion-v1-5/stable-diffusion-v1-5, and for FedDISC Stable unCLIP"
)
# Parts that a library loads by their settings.
MODELS = (*DIFFUSERS_MODELS, *TRANSFORMERS_MODELS)
# Of each group, one file must be there.
NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tokenizer": (("tokenizer.json", "vocab.json"),),
    "scheduler": (("scheduler_config.json",),),
    "image_noising_scheduler": (("scheduler_config.json",),),
    "feature_extractor": (("preprocessor_config.json",),),
    "captioner": (
        ("preprocessor_config.json", "processor_config.json"),
        ("tokenizer.json", "vocab.txt", "vocab.json"),
    ),
}
SCHEDULER_TIMESTEPS = 1000  # where the settings do not say how many
SCHEDULERS = ("scheduler", "image_noising_scheduler")
# Schedulers of models that were distilled, or that read the UNet's output in another way
DISTILLED = ("LCMScheduler", "TCDScheduler")
OTHER_PREDICTIONS = {"FlowMatch": "flow", "EDM": "EDM's mix of image and noise"}
LARGEST_SAMPLE = 4096  # latent pixels on a side; 128 are an image of 1024
# Special tokens of a tokenizer: those that every text has, and those that it may lack
MARKS_OF_TEXT = ("bos_token", "eos_token")
OTHER_MARKS = ("pad_token", "unk_token")
# Settings of a noise schedule: their words, the default first, and the ranges of their numbers
SCHEDULE_WORDS: Mapping[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": ("leading", "linspace", "trailing"),
    "set_alpha_to_one": (True, False),
    "rescale_betas_zero_snr": (False, True),
}
SCHEDULE_NUMBERS: Mapping[str, tuple[float, float]] = {
    "num_train_timesteps": (2, 100_000),
    "steps_offset": (0, 1),
    "beta_start": (1e-8, 1.0),
    "beta_end": (1e-8, 1.0),
}
CODE_KEYS = ("auto_map", "custom_pipelines")
# The way out where a part is missing.
INSTEAD = {
    "captioner": "name one with captioner=",
    "image_encoder": "name one with image-encoder= (FedDISC needs its kit's own)",
    "feature_extractor": "name one with image-encoder= (FedDISC needs its kit's own)",
    TINY_DECODER: "name one with synthesis.small-decoder=",
    LORA: "name some with synthesis.lora=",
}


def check_kit(
    kit: str, parts: Iterable[str], key: str = "kit", image_condition: bool | None = None
) -> None:
    """Whether some of a kit's parts can be loaded, and fit each other.

    Args:
        kit: a folder.
        parts: folders and files of it.
        key: of the configuration, for messages.
        image_condition: whether its UNet must take an image's embedding, as Stable unCLIP's does,
            or must not; None: either.

    Raises:
        KitError: the kit is not there, is of another kind, or a file is missing,
            damaged, or of another size.
    """
    parts = tuple(parts)
    if not parts:
        return
    folder = open_kit(kit, key)
    _check_each(folder, parts)
    shapes = {part: _check_weights(folder, part, part) for part in parts}
    _check_all(folder, parts, image_condition)
    for part in parts:
        _check_fit(folder, part, part, shapes[part])


def check_settings(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
    """As `check_kit`, by the settings and the names of the files: the weights may not be there yet.

    Args:
        folder: the model's.
        parts: folders and files of it; "" is the folder itself.
        kind: which part the folder itself is.

    Raises:
        KitError: as `check_kit`.
    """
    _check_each(folder, parts, kind)
    _check_all(folder, parts, None)


def _check_each(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
    """Whether every part is there, and of the kind that OSFL takes."""
    if "unet" in parts:
        _check_pipeline(folder)
    if missing := [part for part in parts if part and not (folder.has(part) or folder.names(part))]:
        outs = dict.fromkeys(INSTEAD.get(part, "use a whole kit") for part in missing)
        needed = "it" if len(missing) == 1 else "them"
        raise KitError(
            f"{folder.setting} lacks {', '.join(missing)}; this run needs {needed}: "
            f"{'; or '.join(outs)}"
        )
    for part in parts:
        _check_part(folder, part, kind or part)


def _check_all(folder: KitFolder, parts: tuple[str, ...], image_condition: bool | None) -> None:
    """Whether the parts fit each other."""
    if set(DIFFUSION_PARTS) <= set(parts):
        _check_together(folder, TINY_DECODER in parts, image_condition)
    noised = "image_normalizer" in parts
    if noised or (image_condition and folder.has("image_normalizer/config.json")):
        _check_embedding(folder)


def check_steps(settings: Mapping[str, Any], steps: int) -> None:
    """Check that a noise schedule has timesteps for this number of steps.

    Args:
        settings: of its scheduler, as `check_kit` has checked them.

    Raises:
        KitError: it has fewer, or its `steps_offset` moves the first one beyond them.
    """
    count = settings.get("num_train_timesteps", SCHEDULER_TIMESTEPS)
    offset = settings.get("steps_offset", 0)
    spacing = settings.get("timestep_spacing", SCHEDULE_WORDS["timestep_spacing"][0])
    # The other spacings begin at the last timestep
    first = (steps - 1) * (count // steps) + offset if spacing == "leading" else count - 1
    if steps > count or first >= count:
        raise KitError(
            f"synthesis.steps = {steps}: the kit's schedule has {count} timesteps, and its "
            f"steps_offset is {offset}; set synthesis.steps to fewer"
        )


def check_captioner(source: str) -> None:
    """Whether a folder or hub id that `captioner` names is a BLIP or BLIP-2 that can be
    loaded.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, "captioner", "captioner"), "captioner")
    part = folder.place_of("captioner")
    _check_part(folder, part, "captioner")
    _check_fit(folder, part, "captioner", _check_weights(folder, part, "captioner"))


def check_image_encoder(source: str) -> None:
    """Whether a folder or hub id that `image-encoder` names is a CLIP or DINOv2 that can be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    folder = open_kit(find_model(source, "image_encoder", "image-encoder"), "image-encoder")
    part = folder.place_of("image_encoder")
    _check_part(folder, part, "image_encoder")
    shapes = _check_weights(folder, part, "image_encoder")
    settings = "feature_extractor" if part else ""
    _need(folder, settings, ("preprocessor_config.json", "processor_config.json"))
    _check_fit(folder, part, "image_encoder", shapes)


def check_small_decoder(source: str) -> None:
    """Whether a folder or hub id that `synthesis.small-decoder` names is in TAESD's format, and can
    be loaded.

    Raises:
        KitError: as `check_kit`.
    """
    key = "synthesis.small-decoder"
    folder = open_kit(find_model(source, TINY_DECODER, key), key)
    _check_part(folder, "", TINY_DECODER)
    _check_fit(folder, "", TINY_DECODER, _check_weights(folder, "", TINY_DECODER))


def check_lora(source: str, kit: str) -> None:
    """Check that what `synthesis.lora` names are weights for a kit's UNet, and peft is installed.

    Args:
        kit: the folder of the kit that draws, which `kit` stands for.

    Raises:
        KitError: as `check_kit`.
    """
    file = lora_file(source, kit)
    folder = KitFolder(f"synthesis.lora = {source!r}", file.parent)
    check_lora_fit(folder.setting, file.name, open_kit(kit), _lora_shapes(folder, file.name))


def _lora_shapes(folder: KitFolder, file: str) -> Shapes:
    shapes = _shapes(folder, file)
    if not any("lora" in name for name in shapes):
        raise KitError(f"{folder.setting}: {file} has no tensors of a LoRA")
    return shapes


def lora_file(source: str, kit: str) -> Path:
    """The file of few-step weights: a file itself, or that of a folder, a hub's model or the kit.

    Args:
        kit: the folder of the kit that draws, which `kit` stands for.

    Raises:
        KitError: it is not there, or no safetensors.
    """
    key = f"synthesis.lora = {source!r}"
    if Path(source).is_file():
        if not source.endswith(".safetensors"):
            raise KitError(f"{key}: must be a file of safetensors; a pickle could run code")
        return Path(source)
    if source == "kit":
        folder = open_kit(kit)
        _check_each(folder, (LORA,))
        return folder.path / folder.weights(LORA)[0]
    folder = open_kit(find_model(source, LORA, "synthesis.lora"), "synthesis.lora")
    _check_part(folder, "", LORA)
    return folder.path / folder.weights("", LORA)[0]


# ---- Folders ----


def open_kit(name: str, key: str = "kit") -> KitFolder:
    """A model's folder.

    Raises:
        KitError: no such folder.
    """
    setting = f"{key} = {name!r}"
    if not Path(name).is_dir():
        raise KitError(f"{setting}: no such folder. Give an absolute path or a hub id (owner/name)")
    return KitFolder(setting, Path(name))


def _shapes(folder: KitFolder, file: str, is_network: bool = False) -> Shapes:
    """The shape of every tensor in a file of weights, by its header.

    Args:
        is_network: as of `tensor_shapes`.

    Raises:
        KitError: the file is missing or damaged, or its header speaks of more or fewer bytes than
            it has.
    """
    if not folder.has(file):
        raise KitError(f"{folder.setting} lacks {file}, which its index names; fetch it")
    try:
        return tensor_shapes(folder.path / file, is_network)
    except CorruptFileError as error:
        raise KitError(
            f"{folder.setting}: {file} cannot be loaded: {error}. Fetch it again"
        ) from None


# ---- One part ----


def _check_part(folder: KitFolder, part: str, kind: str) -> None:
    """Whether a part has the files that its loader reads, and is of a kind that it takes."""
    if part.endswith(".safetensors"):
        return
    if kind != "backbone":
        _check_settings_files(folder, part)
    if kind == "image_encoder" and part:
        _check_settings_files(folder, "feature_extractor")
    if kind in SCHEDULERS:
        _check_scheduler(folder, file_in(part, "scheduler_config.json"))
    if kind == "tokenizer":
        _check_tokenizer(folder, part)
    for group in NEEDED.get(kind, ()):
        _need(folder, part, group)
    if kind not in WEIGHTS:
        return
    if kind == LORA:
        if not folder.weights(part, kind):
            raise KitError(_no_weights(folder, part, WEIGHTS[kind]))
        return
    _need(folder, part, ("config.json",))
    config = folder.settings(file_in(part, "config.json"))
    _check_model(folder, part, kind, config)
    if kind == "vae":
        _check_latents(folder, part, config)
    if not folder.weights(part, kind):
        raise KitError(_no_weights(folder, part, WEIGHTS[kind]))


def _check_settings_files(folder: KitFolder, part: str) -> None:
    """Check the files beside the weights, before a library reads them or runs what they name.

    Raises:
        KitError: one cannot be read, or asks for code of the model's own.
    """
    for file in (file_in(part, name) for name in SETTINGS):
        if not (folder.path / file).is_file():
            continue
        if not file.endswith(".json"):
            _check_text(folder, file)
            continue
        settings = folder.settings(file)
        if file.endswith("config.json"):
            _check_code(folder, file, settings)


def _check_text(folder: KitFolder, file: str) -> None:
    with open(folder.path / file, "rb") as opened:
        problem = placeholder_problem(opened.read(200))
    if problem:
        raise KitError(f"{folder.setting}: {file} cannot be loaded: {problem}. Fetch it again")


def _check_code(folder: KitFolder, file: str, settings: Mapping[str, Any]) -> None:
    for key, value in inner_settings(settings):
        if key in CODE_KEYS and value:
            raise KitError(
                f"{folder.setting}: {file} has {key}, which names Python code of the model's own. "
                "OSFL runs none; take a model that the installed libraries know"
            )


def _check_scheduler(folder: KitFolder, file: str) -> None:
    """Check the settings of a noise schedule that are used; a missing one has its default.

    Raises:
        KitError: one of them has another type or is out of range.
    """
    if not folder.has(file):
        return  # said where it is needed
    settings = folder.settings(file)
    if not isinstance(settings.get("_class_name", ""), str):
        raise _odd(folder, file, settings, "_class_name", "a text")
    for key, allowed in SCHEDULE_WORDS.items():
        if settings.get(key, allowed[0]) not in allowed:
            raise _odd(folder, file, settings, key, f"one of {', '.join(map(repr, allowed))}")
    for key, (low, high) in SCHEDULE_NUMBERS.items():
        value = settings.get(key, low)
        whole = isinstance(low, int)
        if not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise _odd(folder, file, settings, key, f"{kind} from {low} to {high}")
    betas = settings.get("trained_betas")
    if betas is not None and not _are_betas(
        betas, settings.get("num_train_timesteps", SCHEDULER_TIMESTEPS)
    ):
        wanted = "null, or a number from 0 to 1 for each of num_train_timesteps"
        raise _odd(folder, file, settings, "trained_betas", wanted)


def _check_tokenizer(folder: KitFolder, part: str) -> None:
    """Check what a tokenizer's settings say of its length and its special tokens.

    Raises:
        KitError: one of them has another type, or tokenizer.json lacks the tokenizer.
    """
    file = file_in(part, "tokenizer.json")
    if folder.has(file) and not isinstance(folder.settings(file).get("model"), dict):
        raise KitError(f"{folder.setting}: {file} lacks its object model; fetch it again")
    file = file_in(part, "tokenizer_config.json")
    if not folder.has(file):
        return
    settings = folder.settings(file)
    length = settings.get("model_max_length")
    if length is not None and not (_is_number(length) and length >= 1):
        raise _odd(folder, file, settings, "model_max_length", "null, or a number of at least 1")
    for key in MARKS_OF_TEXT:
        if not isinstance(settings.get(key, ""), (str, dict)):
            raise _odd(folder, file, settings, key, "a text")
    for key in OTHER_MARKS:
        if not isinstance(settings.get(key, ""), (str, dict, type(None))):
            raise _odd(folder, file, settings, key, "a text, or null")
    _check_special_tokens(folder, part, settings)


def _check_special_tokens(folder: KitFolder, part: str, settings: Mapping[str, Any]) -> None:
    """Check that a tokenizer's special tokens are in its vocabulary.

    A library adds one that is not, with a number beyond the text encoder's embeddings.

    Raises:
        KitError: a token is missing.
    """
    vocabulary = _vocabulary(folder, part)
    for key in (*MARKS_OF_TEXT, *OTHER_MARKS):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if vocabulary and isinstance(text, str) and text not in vocabulary:
            file = file_in(part, "tokenizer_config.json")
            raise KitError(
                f"{folder.setting}: {file} names the special token {sanitize(text, 80)!r}, which "
                "its "
                f"vocabulary lacks; set {key} to one of its tokens"
            )


def _vocabulary(folder: KitFolder, part: str) -> set[str]:
    """Return a tokenizer's tokens; none where its files do not list them."""
    file = file_in(part, "tokenizer.json")
    if not folder.has(file):
        file = file_in(part, "vocab.json")
        return set(folder.settings(file)) if folder.has(file) else set()
    settings = folder.settings(file)
    tokens = settings["model"].get("vocab")
    added = settings.get("added_tokens")
    names = {str(token.get("content")) for token in added or [] if isinstance(token, dict)}
    return {*tokens, *names} if isinstance(tokens, dict) else set()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_latents(folder: KitFolder, part: str, config: Mapping[str, Any]) -> None:
    """Check how an autoencoder's latents are scaled.

    Raises:
        KitError: they have no scale, or are moved as well, which Stable Diffusion's are not.
    """
    file = file_in(part, "config.json")
    scale = config.get("scaling_factor", 1.0)
    if not (_is_number(scale) and 0 < scale < math.inf):
        raise _odd(folder, file, config, "scaling_factor", "a number above 0")
    for key in ("shift_factor", "latents_mean", "latents_std"):
        if config.get(key) not in (None, 0):
            raise _odd(folder, file, config, key, f"null. {TAKEN}")


def _are_betas(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values)


def _odd(
    folder: KitFolder, file: str, settings: Mapping[str, Any], key: str, wanted: str
) -> KitError:
    value = sanitize(repr(settings.get(key)), 100)
    return KitError(f"{folder.setting}: {file} says {key} = {value}; it must be {wanted}")


def _check_weights(folder: KitFolder, part: str, kind: str) -> Shapes:
    """Return the shapes of a part's tensors, of its models' kinds; they have its settings' sizes.

    Raises:
        KitError: a file of weights cannot be read, or has other sizes.
    """
    if part.endswith(".safetensors"):
        return _shapes(folder, part)
    if kind not in WEIGHTS:
        return {}
    if kind == LORA:
        return _lora_shapes(folder, folder.weights(part, kind)[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.weights(part, kind):
        if file.endswith(".safetensors"):
            shapes |= _shapes(folder, file, is_network=True)
    _check_sizes(folder, part, kind, folder.settings(file_in(part, "config.json")), shapes)
    return shapes


def _check_fit(folder: KitFolder, part: str, kind: str, shapes: Shapes) -> None:
    """Check that the weights of a model have all its tensors."""
    if kind in MODELS:
        sharded = folder.weights(part, kind)[0].endswith(".json")
        check_fit(folder, part, kind, shapes, sharded)
    if kind == LORA:
        check_lora_fit(folder.setting, folder.weights(part, kind)[0], folder, shapes)


def _need(folder: KitFolder, part: str, group: tuple[str, ...]) -> None:
    if not any(folder.has(file_in(part, name)) for name in group):
        raise KitError(
            f"{folder.setting} lacks {' or '.join(file_in(part, name) for name in group)}"
        )


def _no_weights(folder: KitFolder, part: str, stem: str) -> str:
    wanted = file_in(part, f"{stem}.safetensors")
    names = folder.names(part)
    message = f"{folder.setting} lacks {wanted}"
    variants = [n for n in names if n.startswith(f"{stem}.") and n.endswith(".safetensors")]
    pickles = [n for n in names if n.endswith((".bin", ".ckpt", ".pt", ".pth"))]
    if variants:
        return (
            f"{message}; there is the variant {variants[0]} alone. Copy it to that name (weights "
            "of 16 bits are made 32 when they are loaded), or fetch the whole ones"
        )
    if pickles:
        return (
            f"{message}; there is {pickles[0]} alone, a pickle, which could run code. Take a "
            "repository with safetensors, or save it anew: from_pretrained, then save_pretrained"
        )
    return f"{message}; fetch it"


def _check_model(folder: KitFolder, part: str, kind: str, config: Mapping[str, Any]) -> None:
    """Whether it is the kind of model that the part's loader makes."""
    classes: dict[str, tuple[str, ...]] = {
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        TINY_DECODER: ("AutoencoderTiny",),
        "image_normalizer": ("StableUnCLIPImageNormalizer",),
    }
    types: dict[str, tuple[str, ...]] = {
        "text_encoder": ("clip_text_model", "clip"),
        "captioner": CAPTIONERS,
        "image_encoder": IMAGE_ENCODERS,
    }
    # timm says what it is, when it builds it
    if kind == "backbone":
        return
    if config.get("quantization_config"):
        raise _odd(
            folder,
            file_in(part, "config.json"),
            config,
            "quantization_config",
            "absent: take weights of 16 or 32 bits",
        )
    key = "_class_name" if kind in classes else "model_type"
    allowed = classes[kind] if kind in classes else types[kind]
    if (found := config.get(key)) not in allowed:
        what = kind.replace("_", " ")
        raise KitError(
            f"{folder.setting}: {file_in(part, 'config.json')} is of a {found!r}; "
            f"{what} must be one of {', '.join(allowed)}"
        )


def _check_sizes(
    folder: KitFolder, part: str, kind: str, config: Mapping[str, Any], shapes: Shapes
) -> None:
    """Whether some tensors, which others of their file hang on, have the settings' sizes."""
    text = _text_settings(folder, part, config) if kind == "text_encoder" else config
    # (end of the tensor's name, axis, the setting's name, its value)
    wanted = {
        "unet": (
            ("conv_in.weight", 1, "in_channels", config.get("in_channels")),
            ("attn2.to_k.weight", 1, "cross_attention_dim", config.get("cross_attention_dim")),
        ),
        "vae": (
            ("decoder.conv_in.weight", 1, "latent_channels", config.get("latent_channels")),
            ("encoder.conv_in.weight", 1, "in_channels", config.get("in_channels")),
        ),
        "text_encoder": (
            ("embeddings.token_embedding.weight", 1, "hidden_size", text.get("hidden_size")),
            ("embeddings.token_embedding.weight", 0, "vocab_size", text.get("vocab_size")),
        ),
        "image_normalizer": (("mean", 1, "embedding_dim", config.get("embedding_dim")),),
    }.get(kind, ())
    at = partial(file_in, part)
    if not shapes:
        raise KitError(f"{folder.setting}: {at(WEIGHTS[kind])}.safetensors has no tensors")
    for end, axis, name, value in wanted:
        tensor = next((tensor for tensor in shapes if tensor.endswith(end)), None)
        if tensor is None:
            raise KitError(f"{folder.setting}: the weights in {part}/ have no {end}")
        size = shapes[tensor][axis : axis + 1]
        if value is not None and size != (value,):
            raise KitError(
                f"{folder.setting}: {tensor} in {part}/ has the shape {list(shapes[tensor])}, "
                f"but {at('config.json')} says {name} = {value}"
            )


def _text_settings(folder: KitFolder, part: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a text encoder, which a whole CLIP has as `text_config`."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise KitError(
            f"{folder.setting}: {file_in(part, 'config.json')} says text_config = "
            f"{sanitize(repr(text), 100)}; it must be an object of settings"
        )
    return text


# ---- Parts together ----


def _check_pipeline(folder: KitFolder) -> None:
    """Whether it is a kit of our kind, by its `model_index.json`, where it has one."""
    if not folder.has("model_index.json"):
        alone = not folder.has("unet/config.json")
        if alone and folder.has("config.json"):
            what = folder.settings("config.json").get("model_type", "model without a type")
            raise KitError(f"{folder.setting} is a {what}, no diffusion model; {TAKEN}")
        if alone and any(name.endswith((".safetensors", ".ckpt")) for name in folder.names("")):
            raise KitError(
                f"{folder.setting} is a checkpoint in one file. Make a kit of it: diffusers' "
                "StableDiffusionPipeline.from_single_file(FILE).save_pretrained(FOLDER)"
            )
        return
    index = folder.settings("model_index.json")
    _check_code(folder, "model_index.json", index)
    found = str(index.get("_class_name", ""))
    if found not in PIPELINES:
        known = (name for start, name in OTHER_PIPELINES.items() if found.startswith(start))
        what = next(known, "another model")
        raise KitError(f"{folder.setting} is {what} ({sanitize(found, 100) or 'unnamed'}); {TAKEN}")


def _check_together(folder: KitFolder, small_decoder: bool, image_condition: bool | None) -> None:
    """Whether the parts of the diffusion model fit each other."""
    unet, vae, text, scheduler = (
        folder.settings(f"{part}/{file}")
        for part, file in (
            ("unet", "config.json"),
            ("vae", "config.json"),
            ("text_encoder", "config.json"),
            ("scheduler", "scheduler_config.json"),
        )
    )
    _check_many_steps(folder, unet, scheduler)
    predicted = scheduler.get("prediction_type", "epsilon")
    name = str(scheduler.get("_class_name"))
    predicted = next((what for key, what in OTHER_PREDICTIONS.items() if key in name), predicted)
    if predicted not in ("epsilon", "v_prediction"):
        raise KitError(
            f"{folder.setting} predicts {predicted!r}; it must be epsilon or v_prediction. {TAKEN}"
        )
    width = _text_settings(folder, "text_encoder", text).get("hidden_size", 512)
    if width != unet.get("cross_attention_dim", 1280):
        raise KitError(
            f"{folder.setting}: text width {width}, but the UNet expects "
            f"{unet.get('cross_attention_dim')}"
        )
    channels = vae.get("latent_channels", 4)
    taken = unet.get("in_channels", 4)
    if channels != taken:
        more = " (is it a model for inpainting or editing?)" if taken > channels else ""
        raise KitError(
            f"{folder.setting}: latents have {channels} channels, but the UNet takes {taken}{more}"
        )
    size = unet.get("sample_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_SAMPLE:
        wanted = f"a whole number from 1 to {LARGEST_SAMPLE}"
        raise _odd(folder, "unet/config.json", unet, "sample_size", wanted)
    if small_decoder:
        small = folder.settings(f"{TINY_DECODER}/config.json").get("latent_channels", 4)
        if small != channels:
            raise KitError(
                f"{folder.setting}: its small_decoder takes {small} channels; the latents have "
                f"{channels}"
            )
    _check_image_condition(folder, unet, image_condition)


def _check_many_steps(
    folder: KitFolder, unet: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> None:
    """Whether it was distilled into few steps, which has its settings alone to show it."""
    known = ""
    if unet.get("time_cond_proj_dim"):
        known = "LCM: its UNet takes the guidance's scale"
    if scheduler.get("_class_name") in DISTILLED:
        known = f"its scheduler is a {scheduler['_class_name']}"
    euler = str(scheduler.get("_class_name")).startswith("Euler")
    if euler and scheduler.get("timestep_spacing") == "trailing":
        known = "as SD-Turbo: its scheduler's steps are spaced from the end"
    if known:
        raise KitError(
            f"{folder.setting} is {FEW_STEPS} ({known}), made to be drawn in 1 to 4 steps without "
            "guidance. Take the model that it was made of"
        )


def _check_image_condition(folder: KitFolder, unet: Mapping[str, Any], wanted: bool | None) -> None:
    kind = unet.get("class_embed_type")
    width = unet.get("projection_class_embeddings_input_dim")
    if unet.get("addition_embed_type") or kind not in (None, "projection"):
        what = unet.get("addition_embed_type") or kind
        raise KitError(f"{folder.setting}: its UNet wants a further condition ({what!r}). {TAKEN}")
    if wanted is False and kind:
        raise KitError(
            f"{folder.setting} is a Stable unCLIP, which draws from an image's embedding: for "
            "FedDISC "
            f"alone. {TAKEN}"
        )
    if wanted and not (kind and width):
        raise KitError(
            f"{folder.setting} is no Stable unCLIP, which FedDISC needs: its UNet takes no image's "
            "embedding. "
            "Take stabilityai/stable-diffusion-2-1-unclip, say (feddisc.kit=)"
        )


def _check_embedding(folder: KitFolder) -> None:
    """Whether Stable unCLIP's noise, image encoder and UNet speak of embeddings of one width."""
    width = folder.settings("image_normalizer/config.json").get("embedding_dim", 768)
    if folder.has("image_encoder/config.json"):
        encoder = folder.settings("image_encoder/config.json").get("projection_dim", 512)
        if encoder != width:
            raise KitError(
                f"{folder.setting}: the image encoder's embeddings have {encoder} numbers, but "
                f"image_normalizer's {width}"
            )
    if folder.has("unet/config.json"):
        taken = folder.settings("unet/config.json").get("projection_class_embeddings_input_dim")
        if taken not in (None, 2 * width):
            raise KitError(
                f"{folder.setting}: the UNet takes an image condition of {taken} numbers, but "
                f"image_normalizer makes {2 * width}"
            )
