"""Models in the hub's layouts, with random weights: the files, names, settings and sizes that
others see are those of the published ones.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.tools import hub_layouts
from osfl.kit.check import check_captioner, check_image_encoder, check_kit
from osfl.methods import DIFFUSION_PARTS
from osfl.models.diffusion import (
    load_embedding_noise,
    load_kit,
    load_pipeline,
    load_unclip_pipeline,
)
from osfl.models.encoders import load_captioner, load_image_encoder
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.samplers import ddim

CPU = torch.device("cpu")
TEXTS = ["A photo of a Dog", "an art painting of a guitar"]
UNCLIP_PARTS = (*DIFFUSION_PARTS, "image_normalizer", "image_noising_scheduler")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pictures(side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (2, 3, side, side), generator=generator, dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "text", "latent", "size"),
    [
        (hub_layouts.sd15, (77, 768), (4, 64, 64), 512),
        (partial(hub_layouts.sd21, base=True), (77, 1024), (4, 64, 64), 512),
        (hub_layouts.sd21, (77, 1024), (4, 96, 96), 768),
    ],
    ids=["1.5", "2.1-base", "2.1"],
)
def test_stable_diffusion_is_sampled_as_diffusers_samples_it(
    tmp_path: Path,
    layout: Callable[[Path], Path],
    text: tuple[int, int],
    latent: tuple[int, int, int],
    size: int,
) -> None:
    """Latents of an image of 128 pixels agree to 1e-5 in fp32; 2.1 predicts v."""
    torch.manual_seed(0)
    folder = layout(tmp_path / "kit")
    check_kit(str(folder), DIFFUSION_PARTS, image_condition=False)
    kit = load_kit(folder)
    assert (kit.text.shape, kit.latent_shape, kit.image_size) == (text, latent, size)
    pipeline = load_pipeline(folder)
    pipeline.scheduler = kit.scheduler
    z = random(1, 4, 16, 16)
    theirs = pipeline(
        TEXTS[:1],
        height=128,
        width=128,
        latents=z,
        num_inference_steps=2,
        guidance_scale=7.5,
        output_type="latent",
    ).images

    def sampled(text: str) -> torch.Tensor:
        condition = Condition(kit.text([text]), 7.5)
        return ddim(kit, z, 2, lambda z, t: compose(kit, z, t, kit.text([""]), [condition]))

    with torch.no_grad():
        assert (sampled(TEXTS[0]) - theirs).norm() / theirs.norm() < 1e-5
        # So that the comparison above is one of texts too
        assert (sampled(TEXTS[1]) - theirs).norm() / theirs.norm() > 1e-4


@pytest.mark.slow
def test_latents_are_decoded_as_diffusers_decodes_them(tmp_path: Path) -> None:
    folder = hub_layouts.sd15(tmp_path / "kit")
    kit = load_kit(folder)
    vae = load_pipeline(folder).vae
    z = random(1, *kit.latent_shape)
    with torch.no_grad():
        theirs = vae.decode(z / vae.config.scaling_factor).sample
        assert theirs.shape == (1, 3, 512, 512)
        assert torch.allclose(kit.decode(z), theirs, atol=1e-5)


@pytest.mark.slow
def test_stable_unclip_is_sampled_as_diffusers_samples_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = hub_layouts.unclip(tmp_path / "kit")
    check_kit(str(folder), UNCLIP_PARTS, image_condition=True)
    kit = load_kit(folder)
    pipeline = load_unclip_pipeline(folder)
    pipeline.scheduler = kit.scheduler
    encoder = load_image_encoder(str(folder), CPU)
    embeddings = encoder(pictures(40))[:1]
    assert (encoder.width, embeddings.shape) == (1024, (1, 1024))
    z = random(1, 4, 16, 16)
    theirs = pipeline(
        prompt=TEXTS[:1],
        height=128,
        width=128,
        image_embeds=embeddings,
        noise_level=500,
        latents=z,
        guidance_scale=3.0,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
    ).images
    drawn = torch.randn(1, 1024, generator=torch.Generator().manual_seed(7))
    image = load_embedding_noise(str(folder))(embeddings, torch.tensor([500]), drawn)
    with torch.no_grad():
        condition = Condition(kit.text(TEXTS[:1]).with_image(image), 3.0)
        nothing = kit.text([""]).with_image(torch.zeros_like(image))
        ours = ddim(kit, z, 2, lambda z, t: compose(kit, z, t, nothing, [condition]))
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_weights_with_their_old_names_are_where_they_belong(tmp_path: Path) -> None:
    """An autoencoder's attention, and a text encoder below `text_model`."""
    folder = hub_layouts.sd15(tmp_path / "kit")
    kit = load_kit(folder)
    stored = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    attention = kit.vae.decoder.mid_block.attentions[0]
    for ours, theirs in ((attention.to_q, "query"), (attention.to_out[0], "proj_attn")):
        name = f"decoder.mid_block.attentions.0.{theirs}.weight"
        assert torch.equal(ours.weight, stored[name])
    stored = load_file(folder / "text_encoder" / "model.safetensors")
    table = kit.text.model.get_input_embeddings().weight
    assert torch.equal(table, stored["text_model.embeddings.token_embedding.weight"])


def test_the_end_of_a_text_is_found_by_its_number(tmp_path: Path) -> None:
    """Published settings give another one, 2."""
    kit = load_kit(hub_layouts.sd15(tmp_path / "kit"))
    tokens = kit.text.tokens(["a b"])[0].tolist()
    end = max(tokens)
    assert tokens.index(end) == 3
    states = kit.text.states(["a b"])[0]
    assert torch.allclose(kit.text.pooled(["a b"])[0], states[3], atol=1e-6)


def test_clips_images_are_taken_out_of_the_whole_clip(tmp_path: Path) -> None:
    """CLIP ViT-L/14's file has the text encoder too."""
    from transformers import CLIPModel

    folder = str(hub_layouts.clip_l(tmp_path / "clip"))
    check_image_encoder(folder)
    encoder = load_image_encoder(folder, CPU)
    assert (encoder.width, encoder.image_size) == (768, 224)
    inputs = encoder.processor(list(pictures(40)), return_tensors="pt").pixel_values
    with torch.no_grad():
        model = CLIPModel.from_pretrained(folder)
        expected = model.visual_projection(model.vision_model(inputs).pooler_output)
    assert torch.allclose(encoder(pictures(40)), expected, atol=1e-5)


def test_dinov2_sees_224_of_256_pixels(tmp_path: Path) -> None:
    """The position embeddings, of 518 px, are resized; the embedding is the class token's."""
    folder = str(hub_layouts.dinov2(tmp_path / "dinov2"))
    check_image_encoder(folder)
    encoder = load_image_encoder(folder, CPU)
    assert (encoder.width, encoder.image_size) == (768, 256)
    inputs = encoder.processor(list(pictures(300)), return_tensors="pt").pixel_values
    assert inputs.shape == (2, 3, 224, 224)
    with torch.no_grad():
        expected = encoder.model(inputs).last_hidden_state[:, 0]
    assert torch.allclose(encoder(pictures(300)), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "size"), [(hub_layouts.blip, 384), (hub_layouts.blip2, 224)], ids=["1", "2"]
)
def test_blips_captions_are_its_own(
    tmp_path: Path, layout: Callable[[Path], Path], size: int
) -> None:
    """Word by word the likeliest, 30 at most."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    # With which neither ends a text at once
    torch.manual_seed(1)
    folder = str(layout(tmp_path / "captioner"))
    check_captioner(folder)
    captioner = load_captioner(folder, CPU)
    assert captioner.image_size == size
    stored = {}
    for file in Path(folder).glob("*.safetensors"):
        stored |= load_file(file)
    loaded = captioner.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    inputs = processor(images=list(pictures(40)), return_tensors="pt")
    tokens = model.generate(inputs.pixel_values, max_new_tokens=30, do_sample=False)
    expected = [text.strip() for text in processor.batch_decode(tokens, skip_special_tokens=True)]
    texts = captioner(pictures(40))
    assert texts == expected
    assert all(texts)
    assert texts == captioner(pictures(40))
