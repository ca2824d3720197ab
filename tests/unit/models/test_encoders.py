"""Encoders and captioners.

What they are loaded as, and that an image's or a text's result is its own.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from osfl.kit.shapes import kit_shapes
from osfl.methods import oscar
from osfl.models import encoders

CPU = torch.device("cpu")
LONG = " ".join(["an image of seven"] * 10)


@pytest.fixture(scope="module")
def text(tiny_kit: Path) -> encoders.TextEncoder:
    return encoders.load_text_encoder(str(tiny_kit), CPU, torch.float32)


def pictures(count: int) -> torch.Tensor:
    pixels = torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return pixels.to(torch.uint8)


def test_texts_of_all_lengths_have_the_encoders(text: encoders.TextEncoder) -> None:
    length, width = text.shape
    texts = ["", "six", LONG]
    assert text.tokens(texts).shape == (3, length)
    assert text.states(texts).shape == (3, length, width)
    assert text.tokens(texts)[2, -1] == text.tokenizer.eos_token_id
    for row, sentence in zip(text.states(texts), texts, strict=True):
        assert torch.allclose(row, text.states([sentence])[0], atol=1e-6)


def test_texts_that_are_cut_are_counted_once(
    text: encoders.TextEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a prompt is the name of its class; its domain may be of a sealed payload."""
    length, _ = text.shape
    whole = "an image of six of six"
    assert text.count_tokens(whole) + 2 == length
    text.states(["six", whole])
    assert not caplog.records
    for _ in range(2):
        text.states(["six", f"{LONG} and more"])
    (record,) = caplog.records
    tokens = text.count_tokens(f"{LONG} and more") + 2
    expected = f"1 of 2 texts are cut to the {length} tokens .* has {tokens}. Shorten"
    assert re.match(expected, record.getMessage())
    assert "seven" not in record.getMessage()


def test_a_texts_tokens_are_counted_without_the_marks(text: encoders.TextEncoder) -> None:
    assert text.count_tokens("") == 0
    assert text.count_tokens("an image of six") == 4


def test_the_shape_is_known_without_the_weights(text: encoders.TextEncoder, tiny_kit: Path) -> None:
    assert kit_shapes(str(tiny_kit))[0] == text.shape


@pytest.fixture(params=["clip", "dinov2"])
def encoder(
    request: pytest.FixtureRequest, tiny_kit: Path, tmp_path: Path
) -> encoders.ImageEncoder:
    """The kit's CLIP, and a DINOv2 from a folder of its own in half precision."""
    if request.param == "clip":
        return encoders.load_image_encoder(str(tiny_kit), CPU)
    config = Dinov2Config(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    Dinov2Model(config).half().save_pretrained(tmp_path)
    edge = {"height": 28, "width": 28}
    BitImageProcessor(size={"shortest_edge": 28}, crop_size=edge).save_pretrained(tmp_path)
    return encoders.load_image_encoder(str(tmp_path), CPU)


def test_an_embedding_is_the_images_own(encoder: encoders.ImageEncoder) -> None:
    images = pictures(66)
    together = encoder(images)
    assert together.shape == (66, encoder.width)
    assert together.dtype == torch.float32
    alone = torch.cat([encoder(images[row : row + 1]) for row in (0, 63, 64, 65)])
    assert torch.allclose(together[[0, 63, 64, 65]], alone, atol=1e-5)
    assert not torch.allclose(together[0], together[65], atol=1e-3)


def test_a_loaded_encoder_is_frozen_and_in_evaluation_mode(
    text: encoders.TextEncoder, encoder: encoders.ImageEncoder, tiny_kit: Path
) -> None:
    for model in (text.model, encoder.model, encoders.load_captioner(str(tiny_kit), CPU).model):
        assert not model.training
        assert model.dtype == torch.float32
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_captioner_in_half_precision_writes_in_full(tiny_kit: Path, tmp_path: Path) -> None:
    """From a folder of its own, as a hub's."""
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    captioner.model.half().save_pretrained(tmp_path)
    captioner.processor.save_pretrained(tmp_path)
    assert encoders.load_captioner(str(tmp_path), CPU).model.dtype == torch.float32


@pytest.mark.slow
def test_a_caption_is_the_images_own(tiny_kit: Path) -> None:
    """Greedy, without the marks, of at most thirty tokens, whatever is captioned beside it."""
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    images = pictures(18)
    captions = captioner(images)
    assert len(captions) == 18
    for row in (0, 15, 16, 17):
        assert captioner(images[row : row + 1]) == [captions[row]]
    assert not any("[" in caption or caption != caption.strip() for caption in captions)
    tokens = captioner._tokens(images)
    assert tokens.shape[1] <= 2 + oscar.CAPTION_TOKENS
    assert torch.equal(tokens, captioner._tokens(images))


def test_a_caption_ends_after_thirty_tokens(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captioner never ends by itself. The mark of the beginning is before the tokens."""
    captioner = encoders.load_captioner(str(tiny_kit), CPU)
    monkeypatch.setattr(captioner.model.config.text_config, "sep_token_id", 10**6)
    assert captioner._tokens(pictures(2)).shape == (2, 1 + 30)
