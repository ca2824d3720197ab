"""Check that a kit's parts fit each other, by their settings alone."""

from collections.abc import Mapping
from typing import Any

from osfl.kit.folder import KitError, KitFolder
from osfl.kit.part_check import SUPPORTED, bad_setting, check_code, check_part, text_settings
from osfl.kit.shapes import text_size
from osfl.methods import CLIP, DIFFUSION_PARTS, LORA, TINY_DECODER
from osfl.util.text import sanitize

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
# Schedulers of distilled models, and of models whose UNet's output means something else
DISTILLED_SCHEDULERS = ("LCMScheduler", "TCDScheduler")
OTHER_PREDICTIONS = {"FlowMatch": "flow", "EDM": "EDM's mix of image and noise"}
# Sizes and crop that a UNet with the added condition text_time takes beside the pooled vector
NUM_TIME_IDS = 6
MAX_SAMPLE_SIZE = 4096  # latent pixels on a side; 128 give an image of 1024
# Hint for each part that a kit may lack
MISSING_PART_HINTS = {
    "captioner": "set captioner to a model",
    "image_encoder": "set image-encoder to a model (FedDISC requires its kit's own)",
    "feature_extractor": "set image-encoder to a model (FedDISC requires its kit's own)",
    TINY_DECODER: "set synthesis.tiny-decoder to a model",
    LORA: "set synthesis.lora to weights",
    CLIP: "set zero-shot.clip to the folder or hub id of a CLIP",
}


def check_settings(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
    """Run the part of `check_kit` that needs only settings and file names, without the weights.

    Args:
        folder: the model's.
        parts: folders and files of it; "" is the folder itself.
        kind: the part that the folder itself is.

    Raises:
        KitError: as `check_kit`.
    """
    parts = folder.with_second_encoder(parts)
    check_each_part(folder, parts, kind)
    check_compatibility(folder, parts, None)


def check_each_part(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
    """Check that every part exists and is of a supported kind.

    Raises:
        KitError: as `check_kit`.
    """
    if "unet" in parts:
        _check_pipeline(folder)
    if missing := [part for part in parts if part and not (folder.has(part) or folder.names(part))]:
        hints = dict.fromkeys(map(_missing_part_hint, missing))
        pronoun = "it" if len(missing) == 1 else "them"
        raise KitError(
            f"{folder.setting} lacks {', '.join(missing)}; this run needs {pronoun}: "
            f"{'; or '.join(hints)}"
        )
    for part in parts:
        check_part(folder, part, kind or part)


def _missing_part_hint(part: str) -> str:
    """Return what to set in place of a part that a kit lacks."""
    if part.startswith("classifiers/"):
        return "set global-model.init or classifier.init, which are kit, to imagenet or none"
    return MISSING_PART_HINTS.get(part, "use a complete kit")


def check_compatibility(
    folder: KitFolder, parts: tuple[str, ...], image_condition: bool | None
) -> None:
    """Check that the parts fit each other.

    Args:
        image_condition: as of `check_kit`.

    Raises:
        KitError: as `check_kit`.
    """
    if set(DIFFUSION_PARTS) <= set(parts):
        _check_diffusion_model(folder, TINY_DECODER in parts, image_condition)
    has_normalizer = "image_normalizer" in parts
    if has_normalizer or (image_condition and folder.has("image_normalizer/config.json")):
        _check_embedding_width(folder)


def _check_pipeline(folder: KitFolder) -> None:
    """Check that the kit is a supported pipeline, by its `model_index.json` if it has one."""
    if not folder.has("model_index.json"):
        _check_single_model(folder)
        return
    index = folder.settings("model_index.json")
    check_code(folder, "model_index.json", index)
    name = str(index.get("_class_name", ""))
    if name not in PIPELINES:
        models = (model for start, model in OTHER_PIPELINES.items() if name.startswith(start))
        model = next(models, "another model")
        raise KitError(
            f"{folder.setting} is {model} ({sanitize(name, 100) or 'unnamed'}); {SUPPORTED}"
        )


def _check_single_model(folder: KitFolder) -> None:
    """Refuse a folder without `model_index.json` that is not a kit at all."""
    if folder.has("unet/config.json"):
        return
    if folder.has("config.json"):
        kind = folder.settings("config.json").get("model_type", "model without a type")
        raise KitError(f"{folder.setting} is a {kind}, not a diffusion model; {SUPPORTED}")
    if any(name.endswith((".safetensors", ".ckpt")) for name in folder.names("")):
        raise KitError(
            f"{folder.setting} is a checkpoint in one file. Convert it to a kit: diffusers' "
            "StableDiffusionPipeline.from_single_file(FILE).save_pretrained(FOLDER)"
        )


def _check_diffusion_model(
    folder: KitFolder, tiny_decoder: bool, image_condition: bool | None
) -> None:
    """Check that the parts of the diffusion model fit each other."""
    unet = folder.settings("unet/config.json")
    vae = folder.settings("vae/config.json")
    text = folder.settings("text_encoder/config.json")
    scheduler = folder.settings("scheduler/scheduler_config.json")
    _check_not_distilled(folder, unet, scheduler)
    _check_prediction_type(folder, scheduler)
    width = text_settings(folder, "text_encoder", text).get("hidden_size", 512)
    if folder.has_second_encoder:
        _check_second_encoder(folder, unet)
        width = text_size(folder)[1] + text_size(folder, "_2")[1]
    if width != unet.get("cross_attention_dim", 1280):
        raise KitError(
            f"{folder.setting}: text width {width}, but the UNet expects "
            f"{unet.get('cross_attention_dim')}"
        )
    channels = vae.get("latent_channels", 4)
    in_channels = unet.get("in_channels", 4)
    if channels != in_channels:
        hint = " (is it a model for inpainting or editing?)" if in_channels > channels else ""
        raise KitError(
            f"{folder.setting}: latents have {channels} channels, but the UNet takes "
            f"{in_channels}{hint}"
        )
    size = unet.get("sample_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SAMPLE_SIZE:
        requirement = f"a whole number from 1 to {MAX_SAMPLE_SIZE}"
        raise bad_setting(folder, "unet/config.json", unet, "sample_size", requirement)
    if tiny_decoder:
        decoder = folder.settings(f"{TINY_DECODER}/config.json")
        decoder_channels = decoder.get("latent_channels", 4)
        if decoder_channels != channels:
            raise KitError(
                f"{folder.setting}: its tiny_decoder takes {decoder_channels} channels; the "
                f"latents have {channels}"
            )
    _check_image_condition(folder, unet, image_condition)


def _check_prediction_type(folder: KitFolder, scheduler: Mapping[str, Any]) -> None:
    prediction = scheduler.get("prediction_type", "epsilon")
    name = str(scheduler.get("_class_name"))
    others = (other for key, other in OTHER_PREDICTIONS.items() if key in name)
    prediction = next(others, prediction)
    if prediction not in ("epsilon", "v_prediction"):
        raise KitError(
            f"{folder.setting} predicts {prediction!r}; it must be epsilon or v_prediction. "
            f"{SUPPORTED}"
        )


def _check_not_distilled(
    folder: KitFolder, unet: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> None:
    """Refuse a model that was distilled for few-step sampling; only its settings show it."""
    evidence = ""
    if unet.get("time_cond_proj_dim"):
        evidence = "LCM: its UNet takes the guidance scale"
    if scheduler.get("_class_name") in DISTILLED_SCHEDULERS:
        evidence = f"its scheduler is a {scheduler['_class_name']}"
    euler = str(scheduler.get("_class_name")).startswith("Euler")
    if euler and scheduler.get("timestep_spacing") == "trailing":
        evidence = "like SD-Turbo: its scheduler's steps are spaced from the end"
    if evidence:
        raise KitError(
            f"{folder.setting} is {FEW_STEPS} ({evidence}), made for 1 to 4 steps without "
            "guidance. Use the model that it was distilled from"
        )


def _check_image_condition(
    folder: KitFolder, unet: Mapping[str, Any], required: bool | None
) -> None:
    kind = unet.get("class_embed_type")
    width = unet.get("projection_class_embeddings_input_dim")
    has_added_condition = unet.get("addition_embed_type") and not folder.has_second_encoder
    if has_added_condition or kind not in (None, "projection"):
        condition = unet.get("addition_embed_type") or kind
        raise KitError(
            f"{folder.setting}: its UNet requires another condition ({condition!r}). {SUPPORTED}"
        )
    if required is False and kind:
        raise KitError(
            f"{folder.setting} is a Stable unCLIP, which is conditioned on an image embedding; "
            f"only FedDISC uses one. {SUPPORTED}"
        )
    if required and not (kind and width):
        raise KitError(
            f"{folder.setting} is not a Stable unCLIP, which FedDISC requires: its UNet takes no "
            "image embedding. Set feddisc.kit to stabilityai/stable-diffusion-2-1-unclip, for "
            "example"
        )


def _check_second_encoder(folder: KitFolder, unet: Mapping[str, Any]) -> None:
    """Check that two text encoders fit each other, and the second one the UNet's added condition.

    No model on the hub passes: SDXL is refused by its pipeline's name.

    Raises:
        KitError: they do not.
    """
    lengths = [text_size(folder, suffix)[0] for suffix in ("", "_2")]
    if lengths[0] != lengths[1]:
        raise KitError(
            f"{folder.setting}: its text encoders take {lengths[0]} and {lengths[1]} tokens; they "
            "must take equally many"
        )
    if unet.get("addition_embed_type") != "text_time":
        raise KitError(
            f"{folder.setting}: with a text_encoder_2, unet/config.json must say "
            "addition_embed_type = 'text_time'"
        )
    time_width = unet.get("addition_time_embed_dim")
    if not isinstance(time_width, int):
        requirement = "a whole number"
        raise bad_setting(folder, "unet/config.json", unet, "addition_time_embed_dim", requirement)
    second = folder.settings("text_encoder_2/config.json")
    width = second.get("projection_dim", 512)
    if not isinstance(width, int):
        file = "text_encoder_2/config.json"
        raise bad_setting(folder, file, second, "projection_dim", "a whole number")
    time = NUM_TIME_IDS * time_width
    if unet.get("projection_class_embeddings_input_dim") != time + width:
        raise KitError(
            f"{folder.setting}: projection_class_embeddings_input_dim in unet/config.json must be "
            f"{time + width}: {time} numbers of time ids and {width} of text_encoder_2's pooled "
            "vector"
        )


def _check_embedding_width(folder: KitFolder) -> None:
    """Check that Stable unCLIP's normalizer, image encoder and UNet agree on the embedding width.

    Raises:
        KitError: two of them differ.
    """
    width = folder.settings("image_normalizer/config.json").get("embedding_dim", 768)
    if folder.has("image_encoder/config.json"):
        encoder = folder.settings("image_encoder/config.json").get("projection_dim", 512)
        if encoder != width:
            raise KitError(
                f"{folder.setting}: the image encoder's embeddings have {encoder} numbers, but "
                f"image_normalizer's have {width}"
            )
    if folder.has("unet/config.json"):
        input_width = folder.settings("unet/config.json").get(
            "projection_class_embeddings_input_dim"
        )
        if input_width not in (None, 2 * width):
            raise KitError(
                f"{folder.setting}: the UNet takes an image condition of {input_width} numbers, "
                f"but image_normalizer makes {2 * width}"
            )
