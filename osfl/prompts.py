"""FedBiP's prompt, whose two words client and server replace: "a S style of a V"."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from osfl.encoders import TextEncoder


def concept_prompts(names: Sequence[str]) -> list[str]:
    """For every class; x stands where S goes, and V is the class's last token."""
    return [f"a x style of a {name}" for name in names]


def concept_positions(text: "TextEncoder", names: Sequence[str]) -> list[tuple[int, int]]:
    """Where S and V are among the tokens of every class's prompt."""
    positions = []
    for name in names:
        before = text.count_tokens("a") + 1  # the begin-of-text token comes first
        whole = text.count_tokens(concept_prompts([name])[0])
        positions.append((before, min(whole, text.shape[0] - 2)))
    return positions


def with_concepts(
    base: torch.Tensor,
    places: Sequence[tuple[int, int]],
    domain: torch.Tensor,
    vectors: torch.Tensor,
) -> torch.Tensor:
    """The prompts' encodings [B, L, d] with S [B, d] and V [B, d] at their places; differentiable in both."""
    rows, s, v = (
        torch.arange(len(base)),
        torch.tensor([p[0] for p in places]),
        torch.tensor([p[1] for p in places]),
    )
    condition = base.clone()
    condition[rows, s] = domain.to(base.dtype)
    condition[rows, v] = vectors.to(base.dtype)
    return condition
