"""Checks of a kit's parts together, by their settings alone."""

from collections.abc import Mapping
from typing import Any

from osfl.kit.folder import KitError, KitFolder
from osfl.kit.part_check import TAKEN, bad_setting, check_code, check_part, text_settings
from osfl.methods import DIFFUSION_PARTS, LORA, SMALL_DECODER
from osfl.util.text import plain

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
# Schedulers of models that were distilled, or that read the UNet's output in another way
DISTILLED = ("LCMScheduler", "TCDScheduler")
OTHER_PREDICTIONS = {"FlowMatch": "flow", "EDM": "EDM's mix of image and noise"}
LARGEST_SAMPLE = 4096  # latent pixels on a side; 128 are an image of 1024
# The way out where a part is missing.
INSTEAD = {
    "captioner": "name one with captioner=",
    "image_encoder": "name one with image-encoder= (FedDISC needs its kit's own)",
    "feature_extractor": "name one with image-encoder= (FedDISC needs its kit's own)",
    SMALL_DECODER: "name one with synthesis.small-decoder=",
    LORA: "name some with synthesis.lora=",
}


def check_settings(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
    """As `check_kit`, by the settings and the names of the files: the weights may not be there yet.

    Args:
        folder: the model's.
        parts: folders and files of it; "" is the folder itself.
        kind: which part the folder itself is.

    Raises:
        KitError: as `check_kit`.
    """
    check_each_part(folder, parts, kind)
    check_compatibility(folder, parts, None)


def check_each_part(folder: KitFolder, parts: tuple[str, ...], kind: str = "") -> None:
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
        check_part(folder, part, kind or part)


def check_compatibility(
    folder: KitFolder, parts: tuple[str, ...], image_condition: bool | None
) -> None:
    """Whether the parts fit each other."""
    if set(DIFFUSION_PARTS) <= set(parts):
        _check_together(folder, SMALL_DECODER in parts, image_condition)
    noised = "image_normalizer" in parts
    if noised or (image_condition and folder.has("image_normalizer/config.json")):
        _check_embedding(folder)


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
    check_code(folder, "model_index.json", index)
    found = str(index.get("_class_name", ""))
    if found not in PIPELINES:
        known = (name for start, name in OTHER_PIPELINES.items() if found.startswith(start))
        what = next(known, "another model")
        raise KitError(f"{folder.setting} is {what} ({plain(found, 100) or 'unnamed'}); {TAKEN}")


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
    width = text_settings(folder, "text_encoder", text).get("hidden_size", 512)
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
        raise bad_setting(folder, "unet/config.json", unet, "sample_size", wanted)
    if small_decoder:
        small = folder.settings(f"{SMALL_DECODER}/config.json").get("latent_channels", 4)
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
