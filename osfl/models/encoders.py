"""Text encoders, image encoders and captioners of a kit.

The only file that imports transformers.
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
from osfl.kit.kits import find_model, variant_of
from osfl.kit.part_check import CAPTIONERS, IMAGE_ENCODERS
from osfl.util.costs import FlopMeter
from osfl.util.pixels import cut_ends
from osfl.util.text import plain

if TYPE_CHECKING:
    from transformers import BitImageProcessor
    from transformers.image_processing_backends import TorchvisionBackend

MAX_TOKENS = 30  # of a caption


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
        batch = self.tokenizer(
            list(texts), padding="max_length", truncation=True, return_tensors="pt"
        )
        return batch.input_ids.to(self.model.device)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has, without the marks of its begin and end."""
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """tau(text): the last hidden states [N, L, d]."""
        return self.model(self.tokens(texts)).last_hidden_state

    @torch.no_grad()
    def pooled(self, texts: Sequence[str]) -> torch.Tensor:
        """The end-of-text token's last hidden state [N, d]."""
        return self.model(self.tokens(texts)).pooler_output


def load_text_encoder(kit: str, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """The `text_encoder/` and `tokenizer/` of a Stable-Diffusion-format folder.

    Raises:
        KitError: a tensor is missing or not finite, or the tokenizer cannot be loaded or does not
            fit.
    """
    model, info = CLIPTextModel.from_pretrained(
        kit,
        subfolder="text_encoder",
        dtype=dtype,
        use_safetensors=True,
        variant=variant_of(kit, "text_encoder"),
        trust_remote_code=False,
        output_loading_info=True,
    )
    setting = f"kit = {kit!r}"
    check_loaded(info, setting, "text_encoder")
    check_finite(model, setting, "text_encoder")
    tokenizer = _tokenizer(kit, model.config)
    return TextEncoder(model.to(device).eval().requires_grad_(False), tokenizer)


def _tokenizer(kit: str, config: CLIPTextConfig) -> CLIPTokenizer:
    """Return a kit's tokenizer, which makes no more tokens than the text encoder has places.

    Settings without a length stand for one of 10^30 tokens.

    Raises:
        KitError: it cannot be loaded, or has tokens that the text encoder lacks.
    """
    setting = f"kit = {kit!r}"
    try:
        tokenizer = CLIPTokenizer.from_pretrained(
            kit, subfolder="tokenizer", trust_remote_code=False
        )
        last = max(tokenizer.all_special_ids, default=0)
    # Whatever the library raises for files that somebody wrote
    except Exception as error:
        raise KitError(
            f"{setting}: its tokenizer/ cannot be loaded: {plain(error)}. Fetch it again"
        ) from None
    if last >= config.vocab_size:
        name = tokenizer.convert_ids_to_tokens(last)
        raise KitError(
            f"{setting}: tokenizer/ has the special token {plain(name, 80)!r} with number {last}, "
            f"but text_encoder/config.json says vocab_size = {config.vocab_size}; set pad_token, "
            "bos_token and eos_token in tokenizer/tokenizer_config.json to tokens of its own"
        )
    length = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    tokenizer.model_max_length = length
    return tokenizer


def misfit_of_encoder(place: Path, kind: str, shapes: Shapes) -> Misfit:
    """Compare a file's tensors with those of the model that a folder's settings describe.

    transformers itself loads tensors without numbers, so that old names are mapped as it maps them.
    """
    of_model = _model_class(place, kind)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _quiet():
        _, info = of_model.from_pretrained(
            None,
            config=of_model.config_class.from_pretrained(place, trust_remote_code=False),
            state_dict=state,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = [(name, tuple(has), tuple(want)) for name, has, want in info["mismatched_keys"]]
    return Misfit(tuple(sorted(info["missing_keys"])), tuple(sorted(mismatched)))


def _model_class(place: Path, kind: str) -> type[PreTrainedModel]:
    if kind == "text_encoder":
        return CLIPTextModel
    found = AutoConfig.from_pretrained(place, trust_remote_code=False).model_type
    return _IMAGE_ENCODERS[found] if kind == "image_encoder" else _CAPTIONERS[found][0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own reports and bars, until the end."""
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

    CLIP's projected embedding, or DINOv2's class token.
    """

    model: CLIPVisionModelWithProjection | Dinov2Model
    processor: "CLIPImageProcessor | BitImageProcessor"

    @property
    def width(self) -> int:
        """Numbers in an embedding; 1024 for Stable unCLIP 2.1."""
        config = self.model.config
        return (
            config.projection_dim
            if isinstance(self.model, CLIPVisionModelWithProjection)
            else config.hidden_size
        )

    @property
    def image_size(self) -> int:
        """Pixels on a side of what it is given: of DINOv2 256, of which it sees the middle 224."""
        return _resized_to(self.processor)

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        """A picture [3, H, W] uint8 at `image_size`, resized as the encoder's own processor does
        it.
        """
        return _fit(self.processor, picture)

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, e] float32 on the CPU of uint8 images [N, 3, H, W]."""
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
        """Pixels on a side that the captioner sees."""
        return _resized_to(self.processor.image_processor)

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        """A picture [3, H, W] uint8 at `image_size`: BLIP's processor squeezes it into a square."""
        return _fit(self.processor.image_processor, picture)

    def __call__(self, pixels: torch.Tensor, meter: FlopMeter | None = None) -> list[str]:
        """A caption for each of the uint8 images [N, 3, H, W].

        Greedy decoding, so the same image gets the same caption.
        """
        texts = []
        for chunk in pixels.split(16):
            step = partial(self._tokens, chunk)
            tokens = (
                meter.run_then(step, lambda tokens: ("caption", *tokens.shape)) if meter else step()
            )
            texts += self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    @torch.no_grad()
    def _tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Token ids [N, longest], the end filled up."""
        inputs = self.processor(images=list(pixels), return_tensors="pt").to(self.model.device)
        return self.model.generate(
            inputs.pixel_values.to(self.model.dtype), max_new_tokens=MAX_TOKENS, do_sample=False
        )


def _resized_to(processor: "TorchvisionBackend") -> int:
    """The short side, or every side, that a processor resizes to."""
    return processor.size.shortest_edge or processor.size.height


def _fit(processor: "TorchvisionBackend", picture: torch.Tensor) -> torch.Tensor:
    """What a processor resizes a picture to, by its own resampling; of a long one the middle.

    The processor itself then resizes nothing, and cuts out of the middle what the network sees.
    """
    side = _resized_to(processor)
    if processor.size.shortest_edge:
        picture = cut_ends(picture)
    return processor(
        picture,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        do_rescale=False,
        do_normalize=False,
        return_tensors="pt",
    ).pixel_values[0]


def load_image_encoder(source: str, device: torch.device) -> ImageEncoder:
    """CLIP or DINOv2.

    From a kit (`image_encoder/` and `feature_extractor/`, as Stable unCLIP has them), or a folder
    or hub id of its own.

    Raises:
        KitError: neither is there, or it is another kind of model.
    """
    source = find_model(source, "image_encoder", "image-encoder")
    check_image_encoder(source)
    of_kit = (Path(source) / "image_encoder" / "config.json").is_file()
    part, settings = ("image_encoder", "feature_extractor") if of_kit else ("", "")
    setting = f"image-encoder = {source!r}"
    try:
        model, info = _model_class(Path(source) / part, "image_encoder").from_pretrained(
            source,
            subfolder=part,
            dtype=torch.float32,
            use_safetensors=True,
            variant=variant_of(source, part, "image_encoder"),
            trust_remote_code=False,
            output_loading_info=True,
        )
        processor = AutoImageProcessor.from_pretrained(
            Path(source) / settings, trust_remote_code=False
        )
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {plain(error)}") from error
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
    """BLIP or BLIP-2 from a kit's `captioner/`, or from a folder or hub id of its own.

    Raises:
        KitError: it is not there, damaged, or another kind of model.
    """
    source = find_model(source, "captioner", "captioner")
    check_captioner(source)
    of_kit = (Path(source) / "captioner" / "config.json").is_file()
    place = Path(source) / "captioner" if of_kit else Path(source)
    setting = f"captioner = {str(place)!r}"
    try:
        kind = AutoConfig.from_pretrained(place, trust_remote_code=False).model_type
        of_model, of_processor = _CAPTIONERS[kind]
        model, info = of_model.from_pretrained(
            place,
            dtype=torch.float32,
            use_safetensors=True,
            variant=variant_of(str(place), "", "captioner"),
            trust_remote_code=False,
            output_loading_info=True,
        )
        processor = of_processor.from_pretrained(place, trust_remote_code=False)
    # Whatever the library raises for settings that somebody wrote
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {plain(error)}") from error
    check_loaded(info, setting, "captioner")
    check_finite(model, setting, "captioner")
    return Captioner(model.to(device).eval().requires_grad_(False), processor)
