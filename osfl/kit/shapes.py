"""The sizes of a kit's conditions and latents, by its settings alone."""

from pathlib import Path

from osfl.kit.folder import KitError, KitFolder


def kit_shapes(kit: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """Return (text condition (L, d), latent (c, h, w), image-condition width or 0) of a kit.

    Only the settings are read, with the libraries' defaults.

    Raises:
        KitError: the settings are missing, or a size is not a whole number.
    """
    folder = KitFolder(f"kit = {kit!r}", Path(kit))
    unet = folder.settings("unet/config.json")
    length, width = text_size(folder)
    if folder.has_second_encoder:
        width += text_size(folder, "_2")[1]
    channels = unet.get("in_channels", 4)
    size = unet.get("sample_size")
    # With text_time, the key is the width of pooled vector and time ids
    image = unet.get("projection_class_embeddings_input_dim") or 0
    image = 0 if unet.get("addition_embed_type") else image
    try:
        side = int(size)  # type: ignore[arg-type]
        return (length, width), (int(channels), side, side), int(image)
    except (TypeError, ValueError):
        raise _bad_size(folder) from None


def text_size(folder: KitFolder, suffix: str = "") -> tuple[int, int]:
    """Return (L, d): tokens and width of a text encoder's states, by its settings.

    Args:
        suffix: of the folders' names, "_2" for the second text encoder's.

    Raises:
        KitError: as `kit_shapes`.
    """
    text = folder.settings(f"text_encoder{suffix}/config.json")
    # A full CLIP nests its text encoder's settings
    text = text["text_config"] if isinstance(text.get("text_config"), dict) else text
    positions = text.get("max_position_embeddings", 77)
    file = f"tokenizer{suffix}/tokenizer_config.json"
    tokenizer = folder.settings(file) if folder.has(file) else {}
    # A tokenizer without a maximum length makes any number of tokens
    tokens = tokenizer.get("model_max_length") or positions
    try:
        return int(min(tokens, positions)), int(text.get("hidden_size", 512))
    except (TypeError, ValueError):
        raise _bad_size(folder) from None


def _bad_size(folder: KitFolder) -> KitError:
    return KitError(
        f"{folder.setting} cannot be read: a size in the settings of its unet, text_encoder or "
        "tokenizer must be a whole number"
    )
