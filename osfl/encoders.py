"""Text encoders of a kit. The only file that imports transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
    tokenizer = CLIPTokenizer().train_new_from_iterator([list(captions)], vocab_size=1000)
    tokenizer.model_max_length = length
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
