"""Build the untrained parts of a miniature kit, and diffusers' pipelines that write it."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    BlipTextConfig,
    BlipVisionConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from osfl.models.diffusion import EmbeddingNoise, Kit
from osfl.models.encoders import Captioner, ImageEncoder, TextEncoder

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, StableDiffusionPipeline, StableUnCLIPImg2ImgPipeline

    from osfl.kit_training.photographs.recipe import PhotographRecipe


# ---- The diffusion model. diffusers' pipelines take seconds to import ----


def new_vae() -> AutoencoderKL:
    """Build an autoencoder of 0.5 M parameters: 32 x 32 images to 4 x 8 x 8 latents (f = 4)."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 48, 48),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )


def new_unet(text_width: int) -> UNet2DConditionModel:
    """Build a text-conditioned UNet of 3.1 M parameters on 4 x 8 x 8 latents."""
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 128),
        layers_per_block=1,
        cross_attention_dim=text_width,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def new_photograph_unet(recipe: "PhotographRecipe", vae: "AutoencoderTiny") -> UNet2DConditionModel:
    """Build a text-conditioned UNet on a tiny autoencoder's latents, with attention everywhere."""
    unet = recipe.unet
    depth = len(unet.channels)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    return UNet2DConditionModel(
        sample_size=recipe.image_size // factor,
        in_channels=vae.config.latent_channels,
        out_channels=vae.config.latent_channels,
        down_block_types=("CrossAttnDownBlock2D",) * depth,
        up_block_types=("CrossAttnUpBlock2D",) * depth,
        block_out_channels=unet.channels,
        layers_per_block=unet.layers,
        cross_attention_dim=recipe.text.width,
        attention_head_dim=unet.heads,
        norm_num_groups=min(16, *unet.channels),
    )


def unfuse_attention(unet: UNet2DConditionModel) -> None:
    """Replace torch's fused attention, whose backward pass is slow on a CPU.

    In bfloat16 it takes 43 % of a training step there; plain products take 3 %.
    """
    unet.set_attn_processor(AttnProcessor())


def new_unclip_unet(text_to_image: UNet2DConditionModel, embedding: int) -> UNet2DConditionModel:
    """Build a UNet conditioned on text and an image embedding, from a text-conditioned one.

    It starts with the same function, because the new projection ends in zeros.
    """
    config = {
        **text_to_image.config,
        "class_embed_type": "projection",
        "projection_class_embeddings_input_dim": 2 * embedding,
    }
    unet = UNet2DConditionModel.from_config(config)
    new = {
        name: value
        for name, value in unet.state_dict().items()
        if name.startswith("class_embedding.")
    }
    unet.load_state_dict({**text_to_image.state_dict(), **new})
    torch.nn.init.zeros_(unet.class_embedding.linear_2.weight)
    torch.nn.init.zeros_(unet.class_embedding.linear_2.bias)
    return unet


def new_embedding_noise(mean: torch.Tensor, std: torch.Tensor) -> EmbeddingNoise:
    """Build the noise augmentation of embeddings, with the noise schedule of Stable unCLIP 2.1.

    Args:
        mean: of the embeddings, [e].
        std: of the embeddings, [e].
    """
    normalizer = StableUnCLIPImageNormalizer(len(mean))
    normalizer.mean.data = mean[None].clone()
    normalizer.std.data = std[None].clone()
    return EmbeddingNoise(
        normalizer.requires_grad_(False), DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    )


def new_tiny_decoder(width: int) -> "AutoencoderTiny":
    """Build a tiny autoencoder (TAESD) for `new_vae`'s latents.

    Its encoder is unused, and as small as possible.
    """
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(width,) * 3,
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(2, 2, 1),
        latent_channels=4,
    )


def new_scheduler() -> DDIMScheduler:
    """Build Stable Diffusion 1.5's noise schedule."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def pipeline(
    vae: "AutoencoderKL | AutoencoderTiny", unet: UNet2DConditionModel, text: TextEncoder
) -> "StableDiffusionPipeline":
    """Build diffusers' own pipeline, whose `save_pretrained` writes the Stable Diffusion folder."""
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        text_encoder=text.model,
        tokenizer=text.tokenizer,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def unclip_pipeline(
    kit: Kit, unet: UNet2DConditionModel, encoder: ImageEncoder, noise: EmbeddingNoise
) -> "StableUnCLIPImg2ImgPipeline":
    """Build diffusers' own unCLIP pipeline with the kit's text encoder, VAE and scheduler."""
    from diffusers import StableUnCLIPImg2ImgPipeline

    return StableUnCLIPImg2ImgPipeline(
        feature_extractor=encoder.processor,
        image_encoder=encoder.model,
        image_normalizer=noise.normalizer,
        image_noising_scheduler=noise.scheduler,
        tokenizer=kit.text.tokenizer,
        text_encoder=kit.text.model,
        unet=unet,
        scheduler=kit.scheduler,
        vae=kit.vae,
    )


# ---- Text encoder, image encoder, captioner ----


def new_text_encoder(captions: Sequence[str], length: int, width: int) -> TextEncoder:
    """Build a miniature CLIP text encoder with a tokenizer trained on `captions`."""
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
    """Train a byte-pair tokenizer in which every word of the captions is one token.

    Ties are broken alphabetically. The library's own trainer breaks them in the order of a hash
    map, so that its token ids differ between calls and a resumed training could not continue.
    """
    split = CLIPTokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = Counter(
        word
        for caption, count in Counter(captions).items()
        for word, _ in split(caption)
        for _ in range(count)
    )
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
    tokenizer = CLIPTokenizer(
        vocab={token: number for number, token in enumerate(dict.fromkeys(order))}, merges=merges
    )
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


def new_image_encoder(size: int, width: int, projection: int) -> ImageEncoder:
    """Build a miniature CLIP image encoder with patches of 4 px and four layers."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=projection,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=size,
        patch_size=4,
    )
    edge = {"height": size, "width": size}
    processor = CLIPImageProcessor(size=edge, crop_size=edge, do_center_crop=False)
    return ImageEncoder(CLIPVisionModelWithProjection(config), processor)


def new_clip(
    captions: Sequence[str], recipe: "PhotographRecipe"
) -> tuple[CLIPModel, CLIPTokenizer, CLIPImageProcessor]:
    """Build a miniature CLIP with a tokenizer trained on `captions`, and its preprocessing."""
    text = recipe.text
    image = recipe.image_encoder
    tokenizer = _train_tokenizer(captions, text.length)
    text_settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": text.width,
        "intermediate_size": 4 * text.width,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "max_position_embeddings": text.length,
        "projection_dim": image.embedding,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    image_settings = {
        "hidden_size": image.width,
        "intermediate_size": 4 * image.width,
        "num_hidden_layers": image.layers,
        "num_attention_heads": image.heads,
        "projection_dim": image.embedding,
        "image_size": recipe.image_size,
        "patch_size": image.patch,
    }
    config = CLIPConfig(
        text_config=text_settings, vision_config=image_settings, projection_dim=image.embedding
    )
    edge = {"height": recipe.image_size, "width": recipe.image_size}
    processor = CLIPImageProcessor(size=edge, crop_size=edge, do_center_crop=False)
    return CLIPModel(config), tokenizer, processor


def image_tower(clip: CLIPModel) -> CLIPVisionModelWithProjection:
    """Return the image encoder of a CLIP, as a model of its own."""
    tower = CLIPVisionModelWithProjection(clip.config.vision_config)
    names = ("vision_model.", "visual_projection.")
    state = {key: value for key, value in clip.state_dict().items() if key.startswith(names)}
    tower.load_state_dict(state)
    return tower


def new_captioner(captions: Sequence[str], size: int, width: int) -> Captioner:
    """Build a miniature BLIP whose WordPiece vocabulary is the words of `captions`."""
    words = sorted({word for caption in captions for word in caption.replace(",", " , ").split()})
    vocabulary = {
        token: number
        for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    }
    tokenizer = BertTokenizer(vocab=vocabulary)
    text = BlipTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        encoder_hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=width**-0.5,
        # BLIP starts decoding with another token than training; here both use the same one
        bos_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=size,
        patch_size=4,
        # BERT's 0.02 is for a width of 768; here attention would stay uniform
        initializer_range=width**-0.5,
    )
    config = BlipConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=width
    )
    edge = {"height": size, "width": size}
    processor = BlipProcessor(BlipImageProcessor(size=edge), tokenizer)
    return Captioner(BlipForConditionalGeneration(config), processor)
