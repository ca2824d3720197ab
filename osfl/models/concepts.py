"""FedBiP's prompt "a S style of a V", whose concepts S and V the client learns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osfl.models.conditioning import Conditioning
from osfl.models.encoders import TextEncoder
from osfl.util.prompts import fill_prompt

# One x stands for S, the other for V
PROMPT = "a x style of a x"


@dataclass(frozen=True)
class ConceptPrompt:
    """The encoding of the prompt without padding; its length does not depend on the class names."""

    base: Conditioning  # one row of Lu states: begin, a, S, style, of, a, V, end
    domain_position: int
    class_position: int

    def filled(self, domain: torch.Tensor, vectors: torch.Tensor) -> Conditioning:
        """Return conditions of B rows with S ([B, d] or [d]) and V [B, d] in place of x.

        Differentiable in both.
        """
        prompts = self.base.expand(len(vectors))
        states = prompts.states.clone()
        states[:, self.domain_position] = domain.to(states.dtype)
        states[:, self.class_position] = vectors.to(states.dtype)
        return prompts.with_states(states)


def encode_concept_prompt(text: TextEncoder) -> ConceptPrompt:
    """Encode the prompt with x for S and V; a short encoder drops words before V."""
    length = min(text.count_tokens(PROMPT) + 2, text.shape[0])
    # CLIP's text encoder is causal: padding after the end changes nothing before it
    prompt = text([PROMPT])
    base = prompt.with_states(prompt.states[:, :length])
    return ConceptPrompt(base, _domain_position(text), length - 2)


def initial_concepts(text: TextEncoder, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the initial S [d], at x, and V [C, d], at the last token of each class name."""
    prompts = initial_prompts(names)
    encodings = text.states(prompts)
    last = text.shape[0] - 2
    positions = [min(text.count_tokens(prompt), last) for prompt in prompts]
    vectors = [encoding[i] for encoding, i in zip(encodings, positions, strict=True)]
    return encodings[0, _domain_position(text)], torch.stack(vectors)


def _domain_position(text: TextEncoder) -> int:
    # The begin-of-text token comes first
    return text.count_tokens("a") + 1


def initial_prompts(names: Sequence[str]) -> list[str]:
    """Return the initial prompt of each class, with x for S."""
    return [fill_prompt("a x style of a {class}", {"class": name}) for name in names]
