"""The hyperparameters of `osfl kit train`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the stages: steps, batch sizes, learning rates and sizes of networks."""

    seed: int = 0
    vae_steps: int = 2500
    vae_batch: int = 32
    vae_lr: float = 1e-3
    kl_weight: float = 2e-6
    denoiser_steps: int = 5400
    denoiser_batch: int = 64
    denoiser_lr: float = 1e-3
    style_weight: float = 5.0  # relative frequency of images whose caption names a style
    caption_dropout: float = 0.10
    ema_decay: float = 0.999
    text_length: int = 16
    text_width: int = 64
    classifiers: tuple[str, ...] = (
        "resnet18",
        "resnet50",
        "vgg16",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "shufflenet_v2_x1_0",
    )
    classifier_steps: int = 800
    classifier_batch: int = 64
    classifier_lr: float = 1e-3
    image_encoder_steps: int = 1500
    image_encoder_batch: int = 96
    image_encoder_lr: float = 1e-3
    image_encoder_width: int = 96
    embedding: int = 64
    captioner_steps: int = 4000
    captioner_batch: int = 64
    captioner_lr: float = 1e-3
    captioner_width: int = 96
    unclip_steps: int = 2500
    unclip_batch: int = 64
    unclip_lr: float = 5e-4
    unclip_caption_dropout: float = 0.5
    unclip_image_dropout: float = 0.1
    tiny_decoder_steps: int = 1500
    tiny_decoder_batch: int = 64
    tiny_decoder_lr: float = 2e-3
    tiny_decoder_width: int = 24
    lora_steps: int = 2400
    lora_batch: int = 64
    lora_lr: float = 1e-3
    lora_rank: int = 32
    lora_guidance: float = 2.0  # distilled into the weights; the methods' usual scale
    lora_schedule: int = 50  # sampling steps of the guided teacher
