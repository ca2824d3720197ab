"""Kits of the digits kit's shape with random weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def make_once(folder: Path, make: Callable[[], None]) -> Path:
    """Make a folder that all workers of a test run share, in the first of them; return it."""
    marker = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not marker.exists():
            make()
            marker.touch()
    return folder


def make_tiny_kit(folder: Path) -> None:
    import torch

    from osfl.data.digits import CLASSES
    from osfl.kit_training import untrained
    from osfl.models import classifiers
    from tests.helpers.encoder_folders import save_whole_clip

    torch.manual_seed(0)
    text = untrained.new_text_encoder(
        [f"an image of {name}" for name in CLASSES], length=8, width=32
    )
    untrained.pipeline(untrained.new_vae(), untrained.new_unet(32), text).save_pretrained(folder)
    (folder / "classifiers").mkdir()
    for architecture in ("resnet18", "shufflenet_v2_x1_0"):
        model = classifiers.build_classifier(architecture, 24, small_stem=True)
        classifiers.save_initial_weights(
            model, folder / "classifiers" / f"{architecture}.safetensors"
        )
    captioner = untrained.new_captioner([f"a neon of a {name}" for name in CLASSES], 32, 16)
    captioner.model.save_pretrained(folder / "captioner")
    captioner.processor.save_pretrained(folder / "captioner")
    encoder = untrained.new_image_encoder(32, 16, 12)
    encoder.model.save_pretrained(folder / "image_encoder")
    encoder.processor.save_pretrained(folder / "feature_extractor")
    save_whole_clip(folder / "clip")


def make_tiny_unclip(tiny_kit: Path, folder: Path) -> None:
    import torch

    from osfl.kit_training import untrained
    from osfl.models import diffusion, encoders

    torch.manual_seed(1)
    kit = diffusion.load_kit(tiny_kit)
    encoder = encoders.load_image_encoder(str(tiny_kit), torch.device("cpu"))
    unet = untrained.new_unclip_unet(kit.unet, encoder.width)
    # Else embeddings would do nothing
    torch.nn.init.normal_(unet.class_embedding.linear_2.weight, std=0.1)
    noise = untrained.new_embedding_noise(
        torch.linspace(-1, 1, encoder.width), torch.linspace(0.5, 2, encoder.width)
    )
    untrained.unclip_pipeline(kit, unet, encoder, noise).save_pretrained(folder)


def make_tiny_pair(tiny_kit: Path, folder: Path) -> None:
    """The tiny kit with two text encoders of different widths, tokens and vocabularies, whose
    states are joined, and a UNet that adds a pooled vector and the image's size, as SDXL's.
    """
    import torch
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from osfl.data.digits import CLASSES
    from osfl.kit_training import untrained
    from osfl.models import diffusion

    torch.manual_seed(2)
    kit = diffusion.load_kit(tiny_kit)
    captions = [f"an old image of {name}" for name in CLASSES]
    second = untrained.new_text_encoder(captions, length=8, width=24)
    settings = {**second.model.config.to_dict(), "projection_dim": 20}
    projecting = CLIPTextModelWithProjection(CLIPTextConfig.from_dict(settings))
    unet = UNet2DConditionModel.from_config(
        {
            **kit.unet.config,
            "cross_attention_dim": 32 + 24,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 6 * 4 + 20,
        }
    )
    untrained.pipeline(kit.vae, unet, kit.text).save_pretrained(folder)
    projecting.save_pretrained(folder / "text_encoder_2")
    second.tokenizer.save_pretrained(folder / "tokenizer_2")
    for part in ("classifiers", "captioner", "image_encoder", "feature_extractor", "clip"):
        shutil.copytree(tiny_kit / part, folder / part)


def make_tiny_autoencoder_kit(tiny_kit: Path, folder: Path) -> None:
    """Copy a kit with a tiny autoencoder (TAESD) with random weights in place of its own."""
    import shutil

    import torch
    from diffusers import AutoencoderTiny

    torch.manual_seed(2)
    shutil.copytree(tiny_kit, folder)
    shutil.rmtree(folder / "vae")
    AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        scaling_factor=0.5,
    ).save_pretrained(folder / "vae")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("AutoencoderKL", "AutoencoderTiny"))
