"""The conditions of a denoiser: the text encoder returns them, and the UNet takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from osfl.kit.compatibility import NUM_TIME_IDS


@dataclass(frozen=True)
class Conditioning:
    """The conditions of B rows of a batch.

    Methods, guidance and samplers select, join and expand its rows, and pass it to `Kit.eps`. Only
    the text encoder and this file know its parts. A client learns or sends `states`; the other
    parts are those of the prompt whose states they replace (`with_states`).

    Attributes:
        states: hidden states that the UNet attends to, [B, L, d].
        pooled: vector of the whole text that the UNet adds to its timestep's, [B, p], as in SDXL
            (Podell et al., arXiv 2307.01952, section 2.1); None for other kits.
        image: image condition of an unCLIP UNet, [B, 2e]; None for other kits.
    """

    states: torch.Tensor
    pooled: torch.Tensor | None = None
    image: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | Sequence[int] | torch.Tensor) -> "Conditioning":
        """Select rows; the result has a batch axis too."""
        return self._map(lambda part: part[rows])

    def expand(self, count: int) -> "Conditioning":
        """Repeat a single row `count` times, as a view."""
        return self._map(lambda part: part.expand(count, *part.shape[1:]))

    def to(self, device: torch.device) -> "Conditioning":
        """Move all parts to a device."""
        return self._map(lambda part: part.to(device))

    def with_states(self, states: torch.Tensor) -> "Conditioning":
        """Replace the hidden states; the length L may differ."""
        return replace(self, states=states)

    def with_image(self, image: torch.Tensor) -> "Conditioning":
        """Add image conditions [B, 2e]."""
        return replace(self, image=image)

    def unet_arguments(self, dtype: torch.dtype, image_size: int) -> dict[str, Any]:
        """Return the arguments of diffusers' UNet2DConditionModel besides latents and timestep.

        Args:
            dtype: of the UNet.
            image_size: side of the decoded images in pixels.
        """
        image = self.image if self.image is None else self.image.to(dtype)
        arguments: dict[str, Any] = {
            "encoder_hidden_states": self.states.to(dtype),
            "class_labels": image,
        }
        if self.pooled is not None:
            arguments["added_cond_kwargs"] = {
                "text_embeds": self.pooled.to(dtype),
                "time_ids": _time_ids(self.pooled, image_size),
            }
        return arguments

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Conditioning":
        """Apply a function to every part."""
        pooled = None if self.pooled is None else change(self.pooled)
        image = None if self.image is None else change(self.image)
        return Conditioning(change(self.states), pooled, image)


def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
    """Join conditions along the batch.

    Raises:
        ValueError: some have a part that others lack.
    """
    return Conditioning(
        torch.cat([part.states for part in parts]),
        _join("pooled vectors", [part.pooled for part in parts]),
        _join("image conditions", [part.image for part in parts]),
    )


def _join(name: str, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    if len(tensors) not in (0, len(parts)):
        raise ValueError(f"{len(tensors)} of {len(parts)} conditions have {name}; all or none must")
    return torch.cat(tensors) if tensors else None


def _time_ids(pooled: torch.Tensor, image_size: int) -> torch.Tensor:
    """Return SDXL's original size, crop and target size of every row, [B, 6]: (S, S, 0, 0, S, S).

    Podell et al., arXiv 2307.01952, section 2.2: whole images of side S, not cropped.
    """
    # Filled on the device: a copy from the host would synchronize with the GPU in every step
    ids = torch.full((len(pooled), NUM_TIME_IDS), float(image_size), device=pooled.device)
    ids[:, 2:4] = 0
    return ids


def empty_conditioning(text: tuple[int, int], image: int, unet: Mapping[str, Any]) -> Conditioning:
    """Return one row with the shapes that a UNet takes and arbitrary values, to count FLOPs.

    Args:
        text: (L, d).
        image: width of the image condition, or 0.
        unet: the UNet's settings.
    """
    pooled = None
    if unet.get("addition_embed_type") == "text_time":
        time = NUM_TIME_IDS * unet["addition_time_embed_dim"]
        pooled = torch.empty(1, unet["projection_class_embeddings_input_dim"] - time)
    return Conditioning(torch.empty(1, *text), pooled, torch.empty(1, image) if image else None)
