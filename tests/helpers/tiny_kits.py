"""Kits of the digits kit's shape with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Lock a folder that all workers of a test run share; yield True to the one that makes it."""
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield not done.exists()
        done.touch()


def make_tiny_kit(folder: Path) -> None:
    import torch

    from osfl.data.digits import CLASSES
    from osfl.kit_training import untrained
    from osfl.models import classifiers

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
