"""Check one part of a kit, by its file names, its settings and the headers of its weights."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from osfl.kit.fits import DIFFUSERS_MODELS, TRANSFORMERS_MODELS, check_lora_fit, check_tensor_shapes
from osfl.kit.folder import SETTINGS, WEIGHTS, KitError, KitFolder, part_path, walk_settings
from osfl.kit.headers import Shapes, tensor_shapes
from osfl.methods import CLIP, LORA, TINY_DECODER
from osfl.util.files import CorruptFileError, placeholder_problem
from osfl.util.text import sanitize

TINY_AUTOENCODER = "AutoencoderTiny"  # TAESD; its encoder is deterministic
CAPTIONERS = ("blip", "blip-2")  # by their model_type
IMAGE_ENCODERS = ("clip_vision_model", "clip", "dinov2")  # by their model_type
# Supported values of a part's _class_name (diffusers) or model_type (transformers)
_DIFFUSERS_CLASSES: Mapping[str, tuple[str, ...]] = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL", TINY_AUTOENCODER),
    TINY_DECODER: (TINY_AUTOENCODER,),
    "image_normalizer": ("StableUnCLIPImageNormalizer",),
}
_TRANSFORMERS_TYPES: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("clip_text_model", "clip"),
    "text_encoder_2": ("clip_text_model",),
    "captioner": CAPTIONERS,
    "image_encoder": IMAGE_ENCODERS,
    CLIP: ("clip",),
}
SUPPORTED = (
    "OSFL supports kits of Stable Diffusion 1.x and 2.x, such as "
    "stable-diffusion-v1-5/stable-diffusion-v1-5, and Stable unCLIP for FedDISC"
)
# Parts that a library loads by their settings
MODELS = (*DIFFUSERS_MODELS, *TRANSFORMERS_MODELS)
# A part needs at least one file of each group
REQUIRED_FILES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tokenizer": (("tokenizer.json", "vocab.json"),),
    "tokenizer_2": (("tokenizer.json", "vocab.json"),),
    "scheduler": (("scheduler_config.json",),),
    "image_noising_scheduler": (("scheduler_config.json",),),
    "feature_extractor": (("preprocessor_config.json",),),
    "captioner": (
        ("preprocessor_config.json", "processor_config.json"),
        ("tokenizer.json", "vocab.txt", "vocab.json"),
    ),
    CLIP: (
        ("preprocessor_config.json", "processor_config.json"),
        ("tokenizer.json", "vocab.json"),
    ),
}
SCHEDULER_TIMESTEPS = 1000  # the default
SCHEDULERS = ("scheduler", "image_noising_scheduler")
# Special tokens that a tokenizer must have, and those that may be null
REQUIRED_TOKENS = ("bos_token", "eos_token")
OPTIONAL_TOKENS = ("pad_token", "unk_token")
# Choices of a noise schedule, the default first, and the ranges of its numbers
SCHEDULE_CHOICES: Mapping[str, tuple[Any, ...]] = {
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


# ---- Settings ----


def check_part(folder: KitFolder, part: str, kind: str) -> None:
    """Check that a part has the files that its loader reads, and is of a supported kind.

    Raises:
        KitError: a file is missing or corrupt, or the kind is not supported.
    """
    if part.endswith(".safetensors"):
        return
    if kind != "backbone":
        _check_settings_files(folder, part)
    if kind == "image_encoder" and part:
        _check_settings_files(folder, "feature_extractor")
    if kind in SCHEDULERS:
        _check_scheduler(folder, part_path(part, "scheduler_config.json"))
    if kind in ("tokenizer", "tokenizer_2", CLIP):
        _check_tokenizer(folder, part)
    for group in REQUIRED_FILES.get(kind, ()):
        require_one_of(folder, part, group)
    if kind not in WEIGHTS:
        return
    if kind != LORA:
        require_one_of(folder, part, ("config.json",))
        config = folder.settings(part_path(part, "config.json"))
        _check_model_type(folder, part, kind, config)
        if kind == "vae":
            _check_latents(folder, part, config)
    if not folder.weights(part, kind):
        raise KitError(_missing_weights_message(folder, part, WEIGHTS[kind]))


def _check_settings_files(folder: KitFolder, part: str) -> None:
    """Check the files beside the weights before a library reads them or runs code they name.

    Raises:
        KitError: a file cannot be read, or requests code of the model's own.
    """
    for file in (part_path(part, name) for name in SETTINGS):
        if not (folder.path / file).is_file():
            continue
        if not file.endswith(".json"):
            _check_text_file(folder, file)
            continue
        settings = folder.settings(file)
        if file.endswith("config.json"):
            check_code(folder, file, settings)


def _check_text_file(folder: KitFolder, file: str) -> None:
    with open(folder.path / file, "rb") as stream:
        problem = placeholder_problem(stream.read(200))
    if problem:
        raise KitError(f"{folder.setting}: {file} cannot be loaded: {problem}. Fetch it again")


def check_code(folder: KitFolder, file: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that name Python code of the model's own.

    Raises:
        KitError: they do.
    """
    for key, value in walk_settings(settings):
        if key in CODE_KEYS and value:
            raise KitError(
                f"{folder.setting}: {file} has {key}, which names Python code of the model's own. "
                "OSFL never runs it; use a model that the installed libraries support"
            )


def _check_scheduler(folder: KitFolder, file: str) -> None:
    """Check the settings of a noise schedule that are used; a missing one has its default.

    Raises:
        KitError: one of them has the wrong type or is out of range.
    """
    # `check_part` reports a missing file
    if not folder.has(file):
        return
    settings = folder.settings(file)
    if not isinstance(settings.get("_class_name", ""), str):
        raise bad_setting(folder, file, settings, "_class_name", "a string")
    for key, allowed in SCHEDULE_CHOICES.items():
        if settings.get(key, allowed[0]) not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise bad_setting(folder, file, settings, key, f"one of {choices}")
    for key, (low, high) in SCHEDULE_NUMBERS.items():
        value = settings.get(key, low)
        is_integer = isinstance(low, int)
        if not isinstance(value, int if is_integer else (int, float)) or not low <= value <= high:
            kind = "a whole number" if is_integer else "a number"
            raise bad_setting(folder, file, settings, key, f"{kind} from {low} to {high}")
    betas = settings.get("trained_betas")
    timesteps = settings.get("num_train_timesteps", SCHEDULER_TIMESTEPS)
    if betas is not None and not _are_betas(betas, timesteps):
        requirement = "null, or num_train_timesteps numbers from 0 to 1"
        raise bad_setting(folder, file, settings, "trained_betas", requirement)


def _are_betas(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values)


def _check_tokenizer(folder: KitFolder, part: str) -> None:
    """Check a tokenizer's maximum length and special tokens.

    Raises:
        KitError: one of them has the wrong type, or tokenizer.json lacks the tokenizer.
    """
    file = part_path(part, "tokenizer.json")
    if folder.has(file) and not isinstance(folder.settings(file).get("model"), dict):
        raise KitError(f"{folder.setting}: {file} lacks its object model; fetch it again")
    file = part_path(part, "tokenizer_config.json")
    if not folder.has(file):
        return
    settings = folder.settings(file)
    length = settings.get("model_max_length")
    if length is not None and not (_is_number(length) and length >= 1):
        requirement = "null, or a number of at least 1"
        raise bad_setting(folder, file, settings, "model_max_length", requirement)
    for key in REQUIRED_TOKENS:
        if not isinstance(settings.get(key, ""), (str, dict)):
            raise bad_setting(folder, file, settings, key, "a string")
    for key in OPTIONAL_TOKENS:
        if not isinstance(settings.get(key, ""), (str, dict, type(None))):
            raise bad_setting(folder, file, settings, key, "a string or null")
    _check_special_tokens(folder, part, settings)


def _check_special_tokens(folder: KitFolder, part: str, settings: Mapping[str, Any]) -> None:
    """Check that a tokenizer's special tokens are in its vocabulary.

    The library would add a missing one, with an id beyond the text encoder's embeddings.

    Raises:
        KitError: a token is missing.
    """
    vocabulary = _vocabulary(folder, part)
    for key in (*REQUIRED_TOKENS, *OPTIONAL_TOKENS):
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if vocabulary and isinstance(text, str) and text not in vocabulary:
            file = part_path(part, "tokenizer_config.json")
            raise KitError(
                f"{folder.setting}: {file} names the special token {sanitize(text, 80)!r}, which "
                f"its vocabulary lacks; set {key} to one of its tokens"
            )


def _vocabulary(folder: KitFolder, part: str) -> set[str]:
    """Return a tokenizer's tokens; the empty set if its files do not list them."""
    file = part_path(part, "tokenizer.json")
    if not folder.has(file):
        file = part_path(part, "vocab.json")
        return set(folder.settings(file)) if folder.has(file) else set()
    settings = folder.settings(file)
    tokens = settings["model"].get("vocab")
    added = settings.get("added_tokens")
    names = {str(token.get("content")) for token in added or [] if isinstance(token, dict)}
    return {*tokens, *names} if isinstance(tokens, dict) else set()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_latents(folder: KitFolder, part: str, config: Mapping[str, Any]) -> None:
    """Check how an autoencoder scales its latents.

    Raises:
        KitError: the scale is not positive, or the latents are also shifted, which Stable
            Diffusion's are not.
    """
    file = part_path(part, "config.json")
    scale = config.get("scaling_factor", 1.0)
    if not (_is_number(scale) and 0 < scale < math.inf):
        raise bad_setting(folder, file, config, "scaling_factor", "a number above 0")
    for key in ("shift_factor", "latents_mean", "latents_std"):
        if config.get(key) not in (None, 0):
            raise bad_setting(folder, file, config, key, f"null. {SUPPORTED}")


def _check_model_type(folder: KitFolder, part: str, kind: str, config: Mapping[str, Any]) -> None:
    """Check that a part's settings describe a model that its loader supports."""
    # timm refuses an unknown model when it builds it
    if kind == "backbone":
        return
    file = part_path(part, "config.json")
    if config.get("quantization_config"):
        requirement = "absent: use weights of 16 or 32 bits"
        raise bad_setting(folder, file, config, "quantization_config", requirement)
    if kind in _DIFFUSERS_CLASSES:
        model_type = config.get("_class_name")
        allowed = _DIFFUSERS_CLASSES[kind]
    else:
        model_type = config.get("model_type")
        allowed = _TRANSFORMERS_TYPES[kind]
    if model_type not in allowed:
        raise KitError(
            f"{folder.setting}: {file} describes a {model_type!r}; "
            f"{kind.replace('_', ' ')} must be one of {', '.join(allowed)}"
        )


def text_settings(folder: KitFolder, part: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a text encoder, which a full CLIP nests as `text_config`.

    Raises:
        KitError: `text_config` is not an object.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        file = part_path(part, "config.json")
        raise bad_setting(folder, file, config, "text_config", "an object of settings")
    return text


def bad_setting(
    folder: KitFolder, file: str, settings: Mapping[str, Any], key: str, requirement: str
) -> KitError:
    """Return the error for a setting with an invalid value."""
    value = sanitize(repr(settings.get(key)), 100)
    return KitError(f"{folder.setting}: {file} says {key} = {value}; it must be {requirement}")


def require_one_of(folder: KitFolder, part: str, group: tuple[str, ...]) -> None:
    """Check that a part has at least one file of a group.

    Raises:
        KitError: it has none.
    """
    if not any(folder.has(part_path(part, name)) for name in group):
        names = " or ".join(part_path(part, name) for name in group)
        raise KitError(f"{folder.setting} lacks {names}")


# ---- Weights ----


def check_weights(folder: KitFolder, part: str, kind: str) -> Shapes:
    """Return the shapes of a part's tensors after checking the main ones against its settings.

    Raises:
        KitError: a weights file cannot be read, or has other sizes.
    """
    if part.endswith(".safetensors"):
        return _tensor_shapes(folder, part)
    if kind not in WEIGHTS:
        return {}
    if kind == LORA:
        return lora_shapes(folder, folder.weights(part, kind)[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.weights(part, kind):
        if file.endswith(".safetensors"):
            shapes |= _tensor_shapes(folder, file, is_network=True)
    _check_sizes(folder, part, kind, folder.settings(part_path(part, "config.json")), shapes)
    return shapes


def check_tensors(folder: KitFolder, part: str, kind: str, shapes: Shapes) -> None:
    """Check that a model's weights have every tensor that its settings require.

    Raises:
        KitError: a tensor is missing or has another shape.
    """
    if kind in MODELS:
        sharded = folder.weights(part, kind)[0].endswith(".json")
        check_tensor_shapes(folder, part, kind, shapes, sharded)
    if kind == LORA:
        check_lora_fit(folder.setting, folder.weights(part, kind)[0], folder, shapes)


def lora_shapes(folder: KitFolder, file: str) -> Shapes:
    """Return the shapes of a LoRA file's tensors.

    Raises:
        KitError: the file cannot be read, or holds no LoRA.
    """
    shapes = _tensor_shapes(folder, file)
    if not any("lora" in name for name in shapes):
        raise KitError(f"{folder.setting}: {file} has no tensors of a LoRA")
    return shapes


def _tensor_shapes(folder: KitFolder, file: str, is_network: bool = False) -> Shapes:
    """Return the shape of every tensor in a weights file, by its header.

    Args:
        is_network: as of `tensor_shapes`.

    Raises:
        KitError: the file is missing or corrupt, or its size differs from what its header states.
    """
    if not folder.has(file):
        raise KitError(f"{folder.setting} lacks {file}, which its index names; fetch it")
    try:
        return tensor_shapes(folder.path / file, is_network)
    except CorruptFileError as error:
        raise KitError(
            f"{folder.setting}: {file} cannot be loaded: {error}. Fetch it again"
        ) from None


def _missing_weights_message(folder: KitFolder, part: str, stem: str) -> str:
    names = folder.names(part)
    message = f"{folder.setting} lacks {part_path(part, f'{stem}.safetensors')}"
    variants = [n for n in names if n.startswith(f"{stem}.") and n.endswith(".safetensors")]
    pickles = [n for n in names if n.endswith((".bin", ".ckpt", ".pt", ".pth"))]
    if variants:
        return (
            f"{message}; the only weights there are the variant {variants[0]}. Copy it to that "
            "name (weights of 16 bits become 32 when they are loaded), or fetch the full-precision "
            "ones"
        )
    if pickles:
        return (
            f"{message}; the only weights there are {pickles[0]}, a pickle, which could run code. "
            "Use a repository with safetensors, or convert it: from_pretrained, then "
            "save_pretrained"
        )
    return f"{message}; fetch it"


def _check_sizes(
    folder: KitFolder, part: str, kind: str, config: Mapping[str, Any], shapes: Shapes
) -> None:
    """Check the sizes of the tensors on which the others depend against the settings."""
    text = text_settings(folder, part, config) if kind.startswith("text_encoder") else config
    text_tensors = (
        ("embeddings.token_embedding.weight", 1, "hidden_size", text.get("hidden_size")),
        ("embeddings.token_embedding.weight", 0, "vocab_size", text.get("vocab_size")),
    )
    if config.get("_class_name") == TINY_AUTOENCODER:
        # Its layers have numbers; `check_tensors` compares them all
        kind = TINY_DECODER
    # (end of the tensor's name, axis, the setting's name, its value)
    expected = {
        "unet": (
            ("conv_in.weight", 1, "in_channels", config.get("in_channels")),
            ("attn2.to_k.weight", 1, "cross_attention_dim", config.get("cross_attention_dim")),
        ),
        "vae": (
            ("decoder.conv_in.weight", 1, "latent_channels", config.get("latent_channels")),
            ("encoder.conv_in.weight", 1, "in_channels", config.get("in_channels")),
        ),
        "text_encoder": text_tensors,
        "text_encoder_2": text_tensors,
        "image_normalizer": (("mean", 1, "embedding_dim", config.get("embedding_dim")),),
    }.get(kind, ())
    path = partial(part_path, part)
    if not shapes:
        raise KitError(f"{folder.setting}: {path(WEIGHTS[kind])}.safetensors has no tensors")
    for suffix, axis, name, value in expected:
        tensor = next((tensor for tensor in shapes if tensor.endswith(suffix)), None)
        if tensor is None:
            raise KitError(f"{folder.setting}: the weights in {part}/ have no {suffix}")
        size = shapes[tensor][axis : axis + 1]
        if value is not None and size != (value,):
            raise KitError(
                f"{folder.setting}: {tensor} in {part}/ has the shape {list(shapes[tensor])}, "
                f"but {path('config.json')} says {name} = {value}"
            )
