"""FedBiP's prompt, whose two words client and server replace: "a S style of a V"."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osfl.models.encoders import TextEncoder
from osfl.util.prompts import fill_prompt

PROMPT = "a x style of a x"  # an x where S goes, and one where V goes


@dataclass(frozen=True)
class ConceptPrompt:
    """The encoding of the prompt, unpadded: of one length whatever the classes are called."""

    base: torch.Tensor  # [Lu, d]: begin, a, S, style, of, a, V, end
    domain_place: int
    class_place: int

    def filled(self, domain: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Conditions [B, Lu, d] with S [B, d] and V [B, d] in their places.

        Differentiable in both.
        """
        condition = self.base.repeat(len(vectors), 1, 1)
        condition[:, self.domain_place] = domain.to(condition.dtype)
        condition[:, self.class_place] = vectors.to(condition.dtype)
        return condition


def concept_prompt(text: TextEncoder) -> ConceptPrompt:
    """The prompt's encoding, x at both places; an encoder too short for it loses words before V."""
    length = min(text.count_tokens(PROMPT) + 2, text.shape[0])
    # CLIP's text encoder looks back alone: what is padded after the end changes nothing before it.
    return ConceptPrompt(text([PROMPT])[0, :length], _domain_place(text), length - 2)


def concept_starts(text: TextEncoder, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where S [d] and V [C, d] begin: at x, and at the last token of each class's name."""
    prompts = concept_prompts(names)
    encodings = text(prompts)
    last = text.shape[0] - 2
    places = [min(text.count_tokens(prompt), last) for prompt in prompts]
    vectors = [encoding[place] for encoding, place in zip(encodings, places, strict=True)]
    return encodings[0, _domain_place(text)], torch.stack(vectors)


def _domain_place(text: TextEncoder) -> int:
    # the begin-of-text token comes first
    return text.count_tokens("a") + 1


def concept_prompts(names: Sequence[str]) -> list[str]:
    """The prompts where the words begin; x stands where S goes."""
    return [fill_prompt("a x style of a {class}", {"class": name}) for name in names]
