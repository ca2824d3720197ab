"""Prompts: the names of classes and domains as words, and FedBiP's, whose two words client and server replace: "a S style of a V"."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from osfl.data.render import CLASSES

if TYPE_CHECKING:
    from osfl.encoders import TextEncoder


# By sound: "an hourglass", "a unicorn"; of what folders are called, as far as the first letters tell.
_VOWEL = re.compile("[aeiou]|hour|honest|honou?r|heir")
_CONSONANT = re.compile(r"eu|ew|one\b|once\b|uni(?![nm])|us[aeu]|usb|ut[ei]|ufo\b|uk[eu]")


def in_words(name: str) -> str:
    """The name of a class or domain, often a folder's, as words: `alarm_clock` is "alarm clock", `Real_World` "real world"."""
    return " ".join(name.replace("_", " ").split()).lower()


def fill(template: str, names: Mapping[str, str], caption: str = "") -> str:
    """A prompt: the template with names in the place of {class} and {domain}, as words, and a text in that of {caption}.

    "a {class}" becomes "an alarm clock" where the word begins with a vowel's sound. Not with the embedded digits: their kit has
    learned "a eight".
    """
    texts = {name: in_words(text) for name, text in names.items()} | {"caption": caption}
    digits = names.get("class") in CLASSES

    def put(found: re.Match[str]) -> str:
        article, text = found["article"] or "", texts.get(found["name"], found["braces"])
        if article and not digits and _VOWEL.match(text) and not _CONSONANT.match(text):
            article = f"{article[0]}n "
        return article + text

    return re.sub(r"(?P<article>\b[Aa] )?(?P<braces>\{(?P<name>\w+)\})", put, template)


PROMPT = "a x style of a x"  # an x where S goes, and one where V goes


@dataclass(frozen=True)
class ConceptPrompt:
    """The encoding of the prompt, unpadded: of one length whatever the classes are called."""

    base: torch.Tensor  # [Lu, d]: begin, a, S, style, of, a, V, end
    domain_place: int
    class_place: int

    def filled(self, domain: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Conditions [B, Lu, d] with S [B, d] and V [B, d] in their places; differentiable in both."""
        condition = self.base.repeat(len(vectors), 1, 1)
        condition[:, self.domain_place] = domain.to(condition.dtype)
        condition[:, self.class_place] = vectors.to(condition.dtype)
        return condition


def concept_prompt(text: "TextEncoder") -> ConceptPrompt:
    """The prompt's encoding, x at both places; an encoder too short for it loses words before V."""
    length = min(text.count_tokens(PROMPT) + 2, text.shape[0])
    # CLIP's text encoder looks back alone: what is padded after the end changes nothing before it.
    return ConceptPrompt(text([PROMPT])[0, :length], _domain_place(text), length - 2)


def concept_starts(text: "TextEncoder", names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where S [d] and V [C, d] begin: at x, and at the last token of each class's name."""
    prompts = concept_prompts(names)
    encodings = text(prompts)
    last = text.shape[0] - 2
    places = [min(text.count_tokens(prompt), last) for prompt in prompts]
    vectors = [encoding[place] for encoding, place in zip(encodings, places, strict=True)]
    return encodings[0, _domain_place(text)], torch.stack(vectors)


def _domain_place(text: "TextEncoder") -> int:
    # the begin-of-text token comes first
    return text.count_tokens("a") + 1


def concept_prompts(names: Sequence[str]) -> list[str]:
    """The prompts where the words begin; x stands where S goes."""
    return [fill("a x style of a {class}", {"class": name}) for name in names]
