"""Text encoders, image encoders and captioners.

The only file that imports transformers, except `osfl/kit_training/untrained.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipForConditionalGeneration,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionModelWithProjection,
    Dinov2Model,
    PreTrainedModel,
)
from transformers.utils import logging

from osfl.kit.check import check_captioner, check_image_encoder
from osfl.kit.fits import Misfit, check_finite, check_loaded
from osfl.kit.folder import KitError
from osfl.kit.headers import Shapes
from osfl.kit.kits import find_model, weights_variant
from osfl.kit.part_check import CAPTIONERS, IMAGE_ENCODERS
from osfl.util.costs import FlopMeter
from osfl.util.pixels import crop_long_side
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from transformers import BitImageProcessor
    from transformers.image_processing_backends import TorchvisionBackend

MAX_TOKENS = 30  # of a caption


@dataclass(frozen=True)
class TextEncoder:
    """The frozen CLIP text encoder tau with its tokenizer."""

    model: CLIPTextModel
    tokenizer: CLIPTokenizer

    @property
    def shape(self) -> tuple[int, int]:
        """(L, d): tokens and width of the last hidden state; (77, 768) for Stable Diffusion 1.5."""
        return self.tokenizer.model_max_length, self.model.config.hidden_size

    def tokens(self, texts: Sequence[str]) -> torch.Tensor:
        """Return token ids [N, L], padded and truncated to the encoder's length."""
        batch = self.tokenizer(
            list(texts), padding="max_length", truncation=True, return_tensors="pt"
        )
        return batch.input_ids.to(self.model.device)

    def count_tokens(self, text: str) -> int:
        """Return a text's number of tokens, without the begin and end tokens."""
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Return tau(text), the last hidden states [N, L, d]."""
        return self.model(self.tokens(texts)).last_hidden_state

    @torch.no_grad()
    def pooled(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the end-of-text token's last hidden state [N, d]."""
        return self.model(self.tokens(texts)).pooler_output


def load_text_encoder(kit: str, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load `text_encoder/` and `tokenizer/` of a Stable Diffusion folder.

    Raises:
        KitError: a tensor is missing or not finite, or the tokenizer cannot be loaded or does not
            fit the encoder.
    """
    model, info = CLIPTextModel.from_pretrained(
        kit,
        subfolder="text_encoder",
        dtype=dtype,
        use_safetensors=True,
        variant=weights_variant(kit, "text_encoder"),
        trust_remote_code=False,
        output_loading_info=True,
    )
    setting = f"kit = {kit!r}"
    check_loaded(info, setting, "text_encoder")
    check_finite(model, setting, "text_encoder")
    tokenizer = _tokenizer(kit, model.config)
    return TextEncoder(model.to(device).eval().requires_grad_(False), tokenizer)


def _tokenizer(kit: str, config: CLIPTextConfig) -> CLIPTokenizer:
    """Load a kit's tokenizer, with at most as many tokens as the text encoder has positions.

    Without a length in its settings, the library's maximum is 10^30.

    Raises:
        KitError: the tokenizer cannot be loaded, or has tokens that the text encoder lacks.
    """
    setting = f"kit = {kit!r}"
    try:
        tokenizer = CLIPTokenizer.from_pretrained(
            kit, subfolder="tokenizer", trust_remote_code=False
        )
        last = max(tokenizer.all_special_ids, default=0)
    # The library raises anything for unexpected files
    except Exception as error:
        raise KitError(
            f"{setting}: its tokenizer/ cannot be loaded: {sanitize(error)}. Fetch it again"
        ) from None
    if last >= config.vocab_size:
        name = tokenizer.convert_ids_to_tokens(last)
        raise KitError(
            f"{setting}: tokenizer/ has the special token {sanitize(name, 80)!r} with id {last}, "
            f"but text_encoder/config.json says vocab_size = {config.vocab_size}; set pad_token, "
            "bos_token and eos_token in tokenizer/tokenizer_config.json to tokens of its vocabulary"
        )
    length = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    tokenizer.model_max_length = length
    return tokenizer


def encoder_misfit(folder: Path, kind: str, shapes: Shapes) -> Misfit:
    """Compare a file's tensors with those of the model that a folder's settings describe.

    transformers itself loads the tensors on the meta device, so that it also maps old names.
    """
    model_class = _model_class(folder, kind)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _quiet():
        _, info = model_class.from_pretrained(
            None,
            config=model_class.config_class.from_pretrained(folder, trust_remote_code=False),
            state_dict=state,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = [
        (name, tuple(shape), tuple(required)) for name, shape, required in info["mismatched_keys"]
    ]
    return Misfit(tuple(sorted(info["missing_keys"])), tuple(sorted(mismatched)))


def _model_class(folder: Path, kind: str) -> type[PreTrainedModel]:
    if kind == "text_encoder":
        return CLIPTextModel
    model_type = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    return _IMAGE_ENCODERS[model_type] if kind == "image_encoder" else _CAPTIONERS[model_type][0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's reports and progress bars."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class ImageEncoder:
    """A frozen image encoder with its preprocessing.

    An embedding is CLIP's projected one, or DINOv2's class token.
    """

    model: CLIPVisionModelWithProjection | Dinov2Model
    processor: "CLIPImageProcessor | BitImageProcessor"

    @property
    def width(self) -> int:
        """Dimension of an embedding; 1024 for Stable unCLIP 2.1."""
        config = self.model.config
        if isinstance(self.model, CLIPVisionModelWithProjection):
            return config.projection_dim
        return config.hidden_size

    @property
    def image_size(self) -> int:
        """Side of the input images in pixels; 256 for DINOv2, which sees the central 224."""
        return _resized_side(self.processor)

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        """Resize a uint8 image [3, H, W] to `image_size`, as the encoder's own processor does."""
        return _fit(self.processor, picture)

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return float32 embeddings [N, e] on the CPU for uint8 images [N, 3, H, W]."""
        rows = []
        for chunk in pixels.split(64):
            inputs = self.processor(list(chunk), return_tensors="pt").pixel_values.to(
                self.model.device, self.model.dtype
            )
            output = self.model(inputs)
            rows.append(output.image_embeds if "image_embeds" in output else output.pooler_output)
        return torch.cat(rows).float().cpu()


@dataclass(frozen=True)
class Captioner:
    """A frozen BLIP or BLIP-2."""

    model: BlipForConditionalGeneration | Blip2ForConditionalGeneration
    processor: BlipProcessor | Blip2Processor

    @property
    def image_size(self) -> int:
        """Side of the input images in pixels."""
        return _resized_side(self.processor.image_processor)

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        """Resize a uint8 image [3, H, W] to `image_size`; BLIP ignores the aspect ratio."""
        return _fit(self.processor.image_processor, picture)

    def __call__(self, pixels: torch.Tensor, meter: FlopMeter | None = None) -> list[str]:
        """Return one caption for each of the uint8 images [N, 3, H, W].

        Decoding is greedy, so the same image always gets the same caption.
        """
        texts = []
        for chunk in pixels.split(16):
            step = partial(self._tokens, chunk)
            if meter:
                tokens = meter.run_by_result(step, lambda tokens: ("caption", *tokens.shape))
            else:
                tokens = step()
            texts += self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    @torch.no_grad()
    def _tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return token ids [N, longest], padded at the end."""
        inputs = self.processor(images=list(pixels), return_tensors="pt").to(self.model.device)
        return self.model.generate(
            inputs.pixel_values.to(self.model.dtype), max_new_tokens=MAX_TOKENS, do_sample=False
        )


def _resized_side(processor: "TorchvisionBackend") -> int:
    """Return the length to which a processor resizes the short side, or both."""
    return processor.size.shortest_edge or processor.size.height


def _fit(processor: "TorchvisionBackend", picture: torch.Tensor) -> torch.Tensor:
    """Resize an image by a processor's own resampling; crop a long one to its center.

    Later the processor no longer resizes the image. It only crops it to the network's input.
    """
    side = _resized_side(processor)
    if processor.size.shortest_edge:
        picture = crop_long_side(picture)
    return processor(
        picture,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        do_rescale=False,
        do_normalize=False,
        return_tensors="pt",
    ).pixel_values[0]


def load_image_encoder(source: str, device: torch.device) -> ImageEncoder:
    """Load a CLIP or DINOv2.

    Args:
        source: a kit (`image_encoder/` and `feature_extractor/`, as in Stable unCLIP), or the
            folder or hub id of the model alone.

    Raises:
        KitError: the model is missing, corrupt or of another kind.
    """
    source = find_model(source, "image_encoder", "image-encoder")
    check_image_encoder(source)
    is_kit = (Path(source) / "image_encoder" / "config.json").is_file()
    part, settings = ("image_encoder", "feature_extractor") if is_kit else ("", "")
    setting = f"image-encoder = {source!r}"
    try:
        model, info = _model_class(Path(source) / part, "image_encoder").from_pretrained(
            source,
            subfolder=part,
            dtype=torch.float32,
            use_safetensors=True,
            variant=weights_variant(source, part, "image_encoder"),
            trust_remote_code=False,
            output_loading_info=True,
        )
        processor = AutoImageProcessor.from_pretrained(
            Path(source) / settings, trust_remote_code=False
        )
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {sanitize(error)}") from error
    check_loaded(info, setting, "image_encoder")
    check_finite(model, setting, "image_encoder")
    return ImageEncoder(model.to(device).eval().requires_grad_(False), processor)


_IMAGE_ENCODERS = dict(
    zip(
        IMAGE_ENCODERS,
        (CLIPVisionModelWithProjection, CLIPVisionModelWithProjection, Dinov2Model),
        strict=True,
    )
)


_CAPTIONERS = dict(
    zip(
        CAPTIONERS,
        (
            (BlipForConditionalGeneration, BlipProcessor),
            (Blip2ForConditionalGeneration, Blip2Processor),
        ),
        strict=True,
    )
)


def load_captioner(source: str, device: torch.device) -> Captioner:
    """Load a BLIP or BLIP-2.

    Args:
        source: a kit with `captioner/`, or the folder or hub id of the model alone.

    Raises:
        KitError: the model is missing, corrupt or of another kind.
    """
    source = find_model(source, "captioner", "captioner")
    check_captioner(source)
    is_kit = (Path(source) / "captioner" / "config.json").is_file()
    folder = Path(source) / "captioner" if is_kit else Path(source)
    setting = f"captioner = {str(folder)!r}"
    try:
        kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
        model_class, processor_class = _CAPTIONERS[kind]
        model, info = model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            variant=weights_variant(str(folder), "", "captioner"),
            trust_remote_code=False,
            output_loading_info=True,
        )
        processor = processor_class.from_pretrained(folder, trust_remote_code=False)
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {sanitize(error)}") from error
    check_loaded(info, setting, "captioner")
    check_finite(model, setting, "captioner")
    return Captioner(model.to(device).eval().requires_grad_(False), processor)
