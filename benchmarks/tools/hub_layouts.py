"""Write random weights in the layouts of the hub's repositories: their files, settings, names of
tensors and outer sizes (77 x 768 text, 4 x 64 x 64 latents).

They test what a foundation model needs without its weights. Networks are narrow and shallow, unless
`full` asks for the real sizes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

State = dict[str, torch.Tensor]

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
END = "<|endoftext|>"
# The names of an autoencoder's attention when Stable Diffusion 1 and 2 were published
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
CROSS = "CrossAttnDownBlock2D"
PNDM = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}
CLIP_PICTURES = {
    "crop_size": 224,
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "resample": 3,
    "size": 224,
}
NARROW_UNET = {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1}
NARROW_VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}


# ---- Kits ----


def sd15(folder: Path, full: bool = False) -> Path:
    """Write stable-diffusion-v1-5/stable-diffusion-v1-5, and CompVis/stable-diffusion-v1-4 alike.

    Args:
        full: 860 M parameters of UNet, 84 M of autoencoder, 123 M of text encoder: 4.3 GB.
    """
    _kit(folder, "StableDiffusionPipeline", PNDM)
    unet = {} if full else NARROW_UNET
    _unet(folder, cross_attention_dim=768, attention_head_dim=8, sample_size=64, **unet)
    _vae(folder, sample_size=512, **({} if full else NARROW_VAE))
    _text(folder, 768, 12, "quick_gelu", 12 if full else 1, 49408 if full else 600)
    return folder


def sd21(folder: Path, base: bool = False) -> Path:
    """Write stabilityai/stable-diffusion-2-1 (768 px, predicts v), or 2-1-base (512 px, noise)."""
    predicted = "epsilon" if base else "v_prediction"
    name = "PNDMScheduler" if base else "DDIMScheduler"
    _kit(
        folder,
        "StableDiffusionPipeline",
        {**PNDM, "_class_name": name, "prediction_type": predicted},
    )
    _unet2(folder, sample_size=64 if base else 96)
    _vae(folder, sample_size=768, **NARROW_VAE)
    _text(folder, 1024, 16, "gelu", 1, 600)
    return folder


def unclip(folder: Path) -> Path:
    """Write stabilityai/stable-diffusion-2-1-unclip: CLIP ViT-H/14's embedding beside the text."""
    scheduler = {**PNDM, "prediction_type": "v_prediction"}
    _kit(folder, "StableUnCLIPImg2ImgPipeline", scheduler)
    _unet2(
        folder,
        sample_size=96,
        class_embed_type="projection",
        projection_class_embeddings_input_dim=2048,
    )
    _vae(folder, old=False, sample_size=768, scaling_factor=0.18215, **NARROW_VAE)
    _text(folder, 1024, 16, "gelu", 1, 600)
    vision = _vision(1280, 16, "gelu", 1024)
    model = CLIPVisionModelWithProjection(CLIPVisionConfig(**vision))
    config = {**vision, "model_type": "clip_vision_model"}
    _write(folder / "image_encoder" / "config.json", config)
    _save(with_positions(model.state_dict()), folder / "image_encoder" / "model.safetensors")
    pictures = {
        **CLIP_PICTURES,
        "crop_size": {"height": 224, "width": 224},
        "size": {"shortest_edge": 224},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
    }
    _write(folder / "feature_extractor" / "preprocessor_config.json", pictures)
    normalizer = {"_class_name": "StableUnCLIPImageNormalizer", "embedding_dim": 1024}
    _write(folder / "image_normalizer" / "config.json", normalizer)
    weights = folder / "image_normalizer" / "diffusion_pytorch_model.safetensors"
    _save(StableUnCLIPImageNormalizer(1024).state_dict(), weights)
    noise = {
        "_class_name": "DDPMScheduler",
        "beta_end": 0.02,
        "beta_schedule": "squaredcos_cap_v2",
        "beta_start": 0.0001,
        "clip_sample": True,
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "variance_type": "fixed_small",
    }
    _write(folder / "image_noising_scheduler" / "scheduler_config.json", noise)
    return folder


def half(folder: Path) -> Path:
    """Keep only a kit's weights in half precision, such as `model.fp16.safetensors`."""
    from safetensors.torch import load_file

    for file in sorted(folder.rglob("*.safetensors")):
        values = {name: _halved(value) for name, value in load_file(file).items()}
        _save(values, file.with_name(f"{file.stem}.fp16.safetensors"))
        file.unlink()
    return folder


def _halved(value: torch.Tensor) -> torch.Tensor:
    return value.half() if value.is_floating_point() else value


def pickled(folder: Path) -> Path:
    """Keep only pickles of a kit's weights, as early repositories do."""
    from safetensors.torch import load_file

    for file in sorted(folder.rglob("*.safetensors")):
        name = "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.bin"
        torch.save(load_file(file), file.with_name(name))
        file.unlink()
    return folder


def _kit(folder: Path, pipeline: str, scheduler: Mapping[str, Any]) -> None:
    """Write a kit's files without weights."""
    parts = {
        "scheduler": ["diffusers", scheduler["_class_name"]],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
    }
    if "UnCLIP" in pipeline:
        parts["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"]
        parts["image_normalizer"] = ["stable_diffusion", "StableUnCLIPImageNormalizer"]
        parts["image_noising_scheduler"] = ["diffusers", "DDPMScheduler"]
    else:
        parts["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
        _write(folder / "safety_checker" / "config.json", {"model_type": "clip"})
    index = {"_class_name": pipeline, "_diffusers_version": "0.6.0", **parts}
    _write(folder / "model_index.json", index)
    _write(folder / "scheduler" / "scheduler_config.json", dict(scheduler))
    _write(folder / "feature_extractor" / "preprocessor_config.json", CLIP_PICTURES)


def _unet(folder: Path, **settings: Any) -> None:
    config = {
        "_class_name": "UNet2DConditionModel",
        "act_fn": "silu",
        "block_out_channels": [320, 640, 1280, 1280],
        "center_input_sample": False,
        "down_block_types": [CROSS, CROSS, CROSS, "DownBlock2D"],
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": 4,
        "layers_per_block": 2,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-05,
        "norm_num_groups": 32,
        "out_channels": 4,
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
        **settings,
    }
    _write(folder / "unet" / "config.json", config)
    state = UNet2DConditionModel.from_config(config).state_dict()
    _save(state, folder / "unet" / "diffusion_pytorch_model.safetensors")


def _unet2(folder: Path, **settings: Any) -> None:
    """Write a UNet of Stable Diffusion 2."""
    merged = {
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "block_out_channels": [40, 80, 80, 80],
        "norm_num_groups": 8,
        "layers_per_block": 1,
        **settings,
    }
    _unet(folder, **merged)


def _vae(folder: Path, old: bool = True, **settings: Any) -> None:
    config = {
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        **settings,
    }
    _write(folder / "vae" / "config.json", config)
    state = {}
    for name, value in AutoencoderKL.from_config(config).state_dict().items():
        state[_old_name(name) if old else name] = value
    _save(state, folder / "vae" / "diffusion_pytorch_model.safetensors")


def _old_name(name: str) -> str:
    if ".attentions." in name:
        for new, old in OLD_NAMES.items():
            name = name.replace(f".{new}.", f".{old}.")
    return name


def _text(folder: Path, width: int, heads: int, act: str, layers: int, tokens: int) -> None:
    """Write a CLIP text encoder, and its tokenizer whose last token ends a text."""
    pad = END if act == "quick_gelu" else "!"
    clip_tokenizer(folder / "tokenizer", tokens, pad)
    config = _text_config(width, heads, act, layers, tokens)
    _write(folder / "text_encoder" / "config.json", {**config, "model_type": "clip_text_model"})
    model = CLIPTextModel(CLIPTextConfig(**config))
    state = {}
    for name, value in model.state_dict().items():
        state[name if name.startswith("text_model.") else f"text_model.{name}"] = value
    state["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    _save(state, folder / "text_encoder" / "model.safetensors")


def _text_config(width: int, heads: int, act: str, layers: int, tokens: int) -> dict[str, Any]:
    return {
        "bos_token_id": 0,
        # As published; a text ends at its highest token
        "eos_token_id": 2,
        "hidden_act": act,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "projection_dim": 768,
        "vocab_size": tokens,
    }


def clip_tokenizer(folder: Path, count: int, pad: str = END) -> None:
    """Write CLIP's tokenizer without learned byte pairs, filled up to `count` tokens."""
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [f"filler{number}" for number in range(count - 2 - len(words))]
    words += ["<|startoftext|>", END]
    _write(folder / "vocab.json", {word: number for number, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": "<|startoftext|>", "eos_token": END, "pad_token": pad}
    _write(folder / "special_tokens_map.json", {**special, "unk_token": END})
    config = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": 77,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": END,
    }
    _write(folder / "tokenizer_config.json", config)


# ---- Image encoders and captioners ----


def _vision(width: int, heads: int, act: str, projection: int) -> dict[str, Any]:
    return {
        "hidden_act": act,
        "hidden_size": width,
        "image_size": 224,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": heads,
        "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "projection_dim": projection,
    }


def with_positions(state: State) -> State:
    """Add the position ids that published files of CLIP have."""
    numbers = {}
    for name, value in state.items():
        if name.endswith("position_embedding.weight"):
            numbers[name.replace("position_embedding.weight", "position_ids")] = value
    positions = {name: torch.arange(len(value))[None] for name, value in numbers.items()}
    return {**state, **positions}


def clip_l(folder: Path) -> Path:
    """Write openai/clip-vit-large-patch14: text and images in one file."""
    text = _text_config(768, 12, "quick_gelu", 1, 600)
    vision = _vision(1024, 16, "quick_gelu", 768)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
    root = {"model_type": "clip", "projection_dim": 768}
    root |= {"text_config": text, "vision_config": vision}
    _write(folder / "config.json", root)
    _save(with_positions(CLIPModel(config).state_dict()), folder / "model.safetensors")
    _write(folder / "preprocessor_config.json", CLIP_PICTURES)
    clip_tokenizer(folder, 600)
    return folder


def dinov2(folder: Path) -> Path:
    """Write facebook/dinov2-base: trained at 518 px, used at 224."""
    config = {
        "model_type": "dinov2",
        "hidden_size": 768,
        "image_size": 518,
        "layerscale_value": 1.0,
        "mlp_ratio": 4,
        "num_attention_heads": 12,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "qkv_bias": True,
        "layer_norm_eps": 1e-06,
    }
    _write(folder / "config.json", config)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    _save(Dinov2Model(Dinov2Config(**settings)).state_dict(), folder / "model.safetensors")
    pictures = {
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "BitImageProcessor",
        "image_std": [0.229, 0.224, 0.225],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 256},
    }
    _write(folder / "preprocessor_config.json", pictures)
    return folder


def blip(folder: Path) -> Path:
    """Write Salesforce/blip-image-captioning-base: 384 px, BERT's words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *"abcdefghijklmnopqrstuvwxyz", "a", "photo", "of", "dog", "[DEC]", "[ENC]"]
    words = list(dict.fromkeys(words))
    begin = words.index("[DEC]")
    text = {
        "bos_token_id": begin,
        "eos_token_id": 2,
        "sep_token_id": 3,
        "pad_token_id": 0,
        "encoder_hidden_size": 768,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "is_decoder": True,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 1,
        "projection_dim": 768,
        "vocab_size": len(words),
    }
    vision = {**_vision(768, 12, "gelu", 512), "image_size": 384, "patch_size": 16}
    config = BlipConfig(text_config=text, vision_config=vision, projection_dim=512)
    root = {"model_type": "blip", "projection_dim": 512}
    root |= {"text_config": text, "vision_config": vision}
    _write(folder / "config.json", root)
    _save(_owned(BlipForConditionalGeneration(config)), folder / "model.safetensors")
    pictures = {"image_processor_type": "BlipImageProcessor", "processor_class": "BlipProcessor"}
    _write(folder / "preprocessor_config.json", {**pictures, **_squeezed(384)})
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = {
        "do_lower_case": True,
        "model_max_length": 512,
        "processor_class": "BlipProcessor",
        "tokenizer_class": "BertTokenizer",
    }
    _write(folder / "tokenizer_config.json", tokenizer)
    return folder


def blip2(folder: Path) -> Path:
    """Write Salesforce/blip2-opt-2.7b: 224 px, 32 queries, OPT's words, weights in two files."""
    letters = sorted(ByteLevel.alphabet())
    words = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<image>"]
    image = words.index("<image>")
    language = {
        "model_type": "opt",
        "vocab_size": len(words),
        "hidden_size": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 256,
        "bos_token_id": 2,
        "eos_token_id": 50118 % len(words),
        "pad_token_id": 1,
    }
    vision = {**_vision(64, 2, "gelu", 64), "qkv_bias": True, "model_type": "blip_2_vision_model"}
    queries = {
        "model_type": "blip_2_qformer",
        "hidden_size": 64,
        "encoder_hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    root = {
        "model_type": "blip-2",
        "image_token_index": image,
        "num_query_tokens": 32,
        "use_decoder_only_language_model": True,
        "text_config": language,
        "vision_config": vision,
        "qformer_config": queries,
    }
    _write(folder / "config.json", root)
    model = Blip2ForConditionalGeneration(Blip2Config.from_pretrained(folder))
    _save_in_shards(_owned(model), folder, "model")
    pictures = {"image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor"}
    _write(folder / "preprocessor_config.json", {**pictures, **_squeezed(224)})
    processor = {"num_query_tokens": 32, "processor_class": "Blip2Processor"}
    _write(folder / "processor_config.json", processor)
    _write(folder / "vocab.json", {word: number for number, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
    _write(folder / "special_tokens_map.json", special)
    _write(folder / "added_tokens.json", {"<image>": image})
    tokenizer = {**special, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    added = {"content": "<image>", "special": True, "normalized": False, "lstrip": False}
    added |= {"rstrip": False, "single_word": False}
    tokenizer["added_tokens_decoder"] = {str(image): added}
    _write(folder / "tokenizer_config.json", {**tokenizer, "processor_class": "Blip2Processor"})
    return folder


def _squeezed(side: int) -> dict[str, Any]:
    """Return BLIP's preprocessing: images are squeezed into a square."""
    return {
        "do_normalize": True,
        "do_resize": True,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "resample": 3,
        "size": {"height": side, "width": side},
    }


# ---- Files ----


def in_shards(folder: Path, part: str, stem: str, variant: str = "") -> None:
    """Split a part's weights into two files and an index."""
    from safetensors.torch import load_file

    file = folder / part / f"{stem}{variant}.safetensors"
    _save_in_shards(load_file(file), folder / part, stem, variant)
    file.unlink()


def _save_in_shards(state: State, folder: Path, stem: str, variant: str = "") -> None:
    names = list(state)
    middle = len(names) // 2
    placed = {}
    for number, share in enumerate((names[:middle], names[middle:]), start=1):
        file = f"{stem}{variant}-{number:05d}-of-00002.safetensors"
        _save({name: state[name] for name in share}, folder / file)
        placed |= dict.fromkeys(share, file)
    size = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    _write(folder / f"{stem}.safetensors.index{variant}.json", index)


def _owned(model: nn.Module) -> State:
    """Return a model's tensors without shared ones: the first name keeps a tensor."""
    pointers: set[int] = set()
    state = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in pointers:
            state[name] = value
        pointers.add(value.data_ptr())
    return state


def _save(state: State, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in state.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
