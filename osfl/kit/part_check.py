"""Checks of one part of a kit, by names, settings and the headers of the weights."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from osfl.kit.fits import DIFFUSERS_MODELS, TRANSFORMERS_MODELS, check_fit, check_lora_fit
from osfl.kit.folder import SETTINGS, WEIGHTS, KitError, KitFolder, file_in, inner_settings
from osfl.kit.headers import Shapes, tensor_shapes
from osfl.methods import LORA, SMALL_DECODER
from osfl.util.files import DamageError, placeholder
from osfl.util.text import plain

CAPTIONERS = ("blip", "blip-2")  # by their model_type
IMAGE_ENCODERS = ("clip_vision_model", "clip", "dinov2")  # by their model_type
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


def check_part(folder: KitFolder, part: str, kind: str) -> None:
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
        require_one_of(folder, part, group)
    if kind not in WEIGHTS:
        return
    if kind == LORA:
        if not folder.weights(part, kind):
            raise KitError(_no_weights(folder, part, WEIGHTS[kind]))
        return
    require_one_of(folder, part, ("config.json",))
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
            check_code(folder, file, settings)


def _check_text(folder: KitFolder, file: str) -> None:
    with open(folder.path / file, "rb") as opened:
        problem = placeholder(opened.read(200))
    if problem:
        raise KitError(f"{folder.setting}: {file} cannot be loaded: {problem}. Fetch it again")


def check_code(folder: KitFolder, file: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that name Python code of the model's own."""
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
        raise bad_setting(folder, file, settings, "_class_name", "a text")
    for key, allowed in SCHEDULE_WORDS.items():
        if settings.get(key, allowed[0]) not in allowed:
            raise bad_setting(
                folder, file, settings, key, f"one of {', '.join(map(repr, allowed))}"
            )
    for key, (low, high) in SCHEDULE_NUMBERS.items():
        value = settings.get(key, low)
        whole = isinstance(low, int)
        if not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise bad_setting(folder, file, settings, key, f"{kind} from {low} to {high}")
    betas = settings.get("trained_betas")
    if betas is not None and not _are_betas(
        betas, settings.get("num_train_timesteps", SCHEDULER_TIMESTEPS)
    ):
        wanted = "null, or a number from 0 to 1 for each of num_train_timesteps"
        raise bad_setting(folder, file, settings, "trained_betas", wanted)


def _are_betas(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values)


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
        raise bad_setting(
            folder, file, settings, "model_max_length", "null, or a number of at least 1"
        )
    for key in MARKS_OF_TEXT:
        if not isinstance(settings.get(key, ""), (str, dict)):
            raise bad_setting(folder, file, settings, key, "a text")
    for key in OTHER_MARKS:
        if not isinstance(settings.get(key, ""), (str, dict, type(None))):
            raise bad_setting(folder, file, settings, key, "a text, or null")
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
                f"{folder.setting}: {file} names the special token {plain(text, 80)!r}, which its "
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
        raise bad_setting(folder, file, config, "scaling_factor", "a number above 0")
    for key in ("shift_factor", "latents_mean", "latents_std"):
        if config.get(key) not in (None, 0):
            raise bad_setting(folder, file, config, key, f"null. {TAKEN}")


def bad_setting(
    folder: KitFolder, file: str, settings: Mapping[str, Any], key: str, wanted: str
) -> KitError:
    """Return the error for a setting with a bad value."""
    value = plain(repr(settings.get(key)), 100)
    return KitError(f"{folder.setting}: {file} says {key} = {value}; it must be {wanted}")


def require_one_of(folder: KitFolder, part: str, group: tuple[str, ...]) -> None:
    """Check that a part has at least one file of a group."""
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
        SMALL_DECODER: ("AutoencoderTiny",),
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
        raise bad_setting(
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


def check_weights(folder: KitFolder, part: str, kind: str) -> Shapes:
    """Return the shapes of a part's tensors, of its models' kinds; they have its settings' sizes.

    Raises:
        KitError: a file of weights cannot be read, or has other sizes.
    """
    if part.endswith(".safetensors"):
        return _shapes(folder, part)
    if kind not in WEIGHTS:
        return {}
    if kind == LORA:
        return lora_shapes(folder, folder.weights(part, kind)[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.weights(part, kind):
        if file.endswith(".safetensors"):
            shapes |= _shapes(folder, file, is_network=True)
    _check_sizes(folder, part, kind, folder.settings(file_in(part, "config.json")), shapes)
    return shapes


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
    except DamageError as error:
        raise KitError(
            f"{folder.setting}: {file} cannot be loaded: {error}. Fetch it again"
        ) from None


def lora_shapes(folder: KitFolder, file: str) -> Shapes:
    """Return the shapes of a LoRA file's tensors."""
    shapes = _shapes(folder, file)
    if not any("lora" in name for name in shapes):
        raise KitError(f"{folder.setting}: {file} has no tensors of a LoRA")
    return shapes


def _check_sizes(
    folder: KitFolder, part: str, kind: str, config: Mapping[str, Any], shapes: Shapes
) -> None:
    """Whether some tensors, which others of their file hang on, have the settings' sizes."""
    text = text_settings(folder, part, config) if kind == "text_encoder" else config
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


def text_settings(folder: KitFolder, part: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a text encoder, which a whole CLIP has as `text_config`."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise KitError(
            f"{folder.setting}: {file_in(part, 'config.json')} says text_config = "
            f"{plain(repr(text), 100)}; it must be an object of settings"
        )
    return text


def check_tensors(folder: KitFolder, part: str, kind: str, shapes: Shapes) -> None:
    """Check that the weights of a model have all its tensors."""
    if kind in MODELS:
        sharded = folder.weights(part, kind)[0].endswith(".json")
        check_fit(folder, part, kind, shapes, sharded)
    if kind == LORA:
        check_lora_fit(folder.setting, folder.weights(part, kind)[0], folder, shapes)
