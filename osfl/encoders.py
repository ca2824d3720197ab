"""Text encoders of a kit. The only file that imports transformers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


@dataclass(frozen=True)
class TextEncoder:
    """tau: a frozen CLIP text encoder with its tokenizer."""

    model: CLIPTextModel
    tokenizer: CLIPTokenizer

    @property
    def shape(self) -> tuple[int, int]:
        """(L, d): tokens and width of the last hidden state; (77, 768) for Stable Diffusion 1.5."""
        return self.tokenizer.model_max_length, self.model.config.hidden_size

    def tokens(self, texts: Sequence[str]) -> torch.Tensor:
        """Token ids [N, L], padded and cut to the encoder's length."""
        batch = self.tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
        return batch.input_ids.to(self.model.device)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """tau(text): the last hidden states [N, L, d]."""
        return self.model(self.tokens(texts)).last_hidden_state


def load_text_encoder(kit: str, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """The `text_encoder/` and `tokenizer/` of a Stable-Diffusion-format folder or hub id."""
    model = CLIPTextModel.from_pretrained(kit, subfolder="text_encoder", dtype=dtype)
    tokenizer = CLIPTokenizer.from_pretrained(kit, subfolder="tokenizer")
    return TextEncoder(model.to(device).eval().requires_grad_(False), tokenizer)


def new_text_encoder(captions: Sequence[str], length: int, width: int) -> TextEncoder:
    """An untrained miniature CLIP text encoder whose tokenizer is learned from `captions`."""
    tokenizer = _train_tokenizer(captions, length)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return TextEncoder(CLIPTextModel(config), tokenizer)


def _train_tokenizer(captions: Sequence[str], length: int) -> CLIPTokenizer:
    """A byte-pair tokenizer in which every word of the captions is one token.

    The library's own trainer breaks ties in the order of a hash map: it numbers tokens differently from call to call, and a resumed
    training would meet other numbers than it began with. Here ties are broken alphabetically.
    """
    split = CLIPTokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = Counter(word for caption, count in Counter(captions).items() for word, _ in split(caption) for _ in range(count))
    pieces = {word: [*word[:-1], word[-1] + "</w>"] for word in words}
    merges: list[tuple[str, str]] = []
    while pairs := Counter({pair: 0 for p in pieces.values() for pair in pairwise(p)}):
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = {word: _merge(parts, best) for word, parts in pieces.items()}
    letters = sorted(ByteLevel.alphabet())
    order = [
        "<|startoftext|>",
        "<|endoftext|>",
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *("".join(m) for m in merges),
    ]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(dict.fromkeys(order))}, merges=merges)
    tokenizer.model_max_length = length
    return tokenizer


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged
