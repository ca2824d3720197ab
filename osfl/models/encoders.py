"""Text encoders, image encoders and captioners.

The only file that imports transformers, except `osfl/kit_training/untrained.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipForConditionalGeneration,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionModelWithProjection,
    Dinov2Model,
    PreTrainedModel,
)
from transformers.utils import logging

from osfl.kit.check import check_captioner, check_clip, check_image_encoder
from osfl.kit.fits import Misfit, check_finite, check_loaded
from osfl.kit.folder import KitError
from osfl.kit.headers import Shapes
from osfl.kit.kits import find_model, has_second_encoder, weights_variant
from osfl.kit.part_check import CAPTIONERS, IMAGE_ENCODERS
from osfl.methods import CLIP, oscar
from osfl.models.clip_classifier import ClipClassifier, tower_of
from osfl.models.conditioning import Conditioning
from osfl.util.costs import FlopMeter
from osfl.util.log import log
from osfl.util.pixels import crop_long_side
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from transformers import BitImageProcessor
    from transformers.image_processing_backends import TorchvisionBackend

# osfl's display has bars of its own
logging.disable_progress_bar()


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
        return _token_ids(self.tokenizer, texts).to(self.model.device)

    def count_tokens(self, text: str) -> int:
        """Return a text's number of tokens, without the begin and end tokens."""
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    def __call__(self, texts: Sequence[str]) -> Conditioning:
        """Return tau(text), one row per text."""
        return Conditioning(self.states(texts))

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the last hidden states [N, L, d]."""
        states: torch.Tensor = self.model(self.tokens(texts)).last_hidden_state
        return states

    @torch.no_grad()
    def pooled(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the end-of-text token's last hidden state [N, d]."""
        state: torch.Tensor = self.model(self.tokens(texts)).pooler_output
        return state

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all weights."""
        return list(self.model.parameters())


@dataclass(frozen=True)
class TextEncoderPair(TextEncoder):
    """Two text encoders whose hidden states are joined along the feature axis, as in SDXL.

    Podell et al., arXiv 2307.01952, section 2.1: the states before the last layer of both encoders,
    and the projected end-of-text state of the second one as the pooled vector.
    """

    second: CLIPTextModelWithProjection
    second_tokenizer: CLIPTokenizer

    @property
    def shape(self) -> tuple[int, int]:
        """(L, d1 + d2): tokens and joined width; (77, 2048) for SDXL."""
        length, width = super().shape
        return length, width + self.second.config.hidden_size

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Conditioning:
        """Return tau(text), one row per text."""
        first = self.model(self.tokens(texts), output_hidden_states=True)
        ids = _token_ids(self.second_tokenizer, texts).to(self.second.device)
        second = self.second(ids, output_hidden_states=True)
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return Conditioning(states, second.text_embeds)

    def states(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the joined hidden states [N, L, d1 + d2]."""
        return self(texts).states

    def pooled(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the joined hidden states of both end-of-text tokens [N, d1 + d2]."""
        first_width = self.model.config.hidden_size
        first, second = self.states(texts).split([first_width, self.second.config.hidden_size], -1)
        return torch.cat(
            [
                _end_states(first, self.tokenizer, texts),
                _end_states(second, self.second_tokenizer, texts),
            ],
            dim=-1,
        )

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all weights of both encoders."""
        return [*self.model.parameters(), *self.second.parameters()]


def _token_ids(tokenizer: CLIPTokenizer, texts: Sequence[str]) -> torch.Tensor:
    _warn_of_long_texts(tokenizer, tuple(texts))
    batch = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
    token_ids: torch.Tensor = batch.input_ids
    return token_ids


@lru_cache(maxsize=16)
def _warn_of_long_texts(tokenizer: CLIPTokenizer, texts: tuple[str, ...]) -> None:
    """Warn once of texts whose end the encoder does not see, such as the name of a class.

    A text may be of a sealed payload, and a log passes through the SuperLink: it is not named.
    """
    room = tokenizer.model_max_length
    lengths = [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids]
    longest = max(lengths, default=0)
    if longest > room:
        log.warning(
            "%d of %d texts are cut to the %d tokens that the text encoder reads; the longest has "
            "%d. Shorten the method's prompt, or names by data.words",
            *(sum(count > room for count in lengths), len(texts), room, longest),
        )


def _end_states(
    states: torch.Tensor, tokenizer: CLIPTokenizer, texts: Sequence[str]
) -> torch.Tensor:
    """Return each text's state [N, d] at its first end-of-text token."""
    ends = (_token_ids(tokenizer, texts) == tokenizer.eos_token_id).int().argmax(dim=1)
    return states[torch.arange(len(states)), ends.to(states.device)]


def load_text_encoder(kit: str, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load `text_encoder/` and `tokenizer/` of a Stable Diffusion folder.

    A folder that also has `text_encoder_2/` and `tokenizer_2/` gives a pair.

    Raises:
        KitError: a tensor is missing or not finite, or a tokenizer cannot be loaded or does not
            fit its encoder.
    """
    model = _text_model(kit, "text_encoder", dtype).to(device)
    tokenizer = _tokenizer(kit, model.config)
    if not has_second_encoder(kit):
        return TextEncoder(model, tokenizer)
    second = _text_model(kit, "text_encoder_2", dtype).to(device)
    return TextEncoderPair(model, tokenizer, second, _tokenizer(kit, second.config, "_2"))


def _text_model(kit: str, part: str, dtype: torch.dtype) -> Any:
    """Load one text encoder, frozen and in eval mode."""
    model_class = CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection
    model, info = model_class.from_pretrained(
        kit,
        subfolder=part,
        dtype=dtype,
        use_safetensors=True,
        variant=weights_variant(kit, part),
        trust_remote_code=False,
        output_loading_info=True,
    )
    setting = f"kit = {kit!r}"
    check_loaded(info, setting, part)
    check_finite(model, setting, part)
    return model.eval().requires_grad_(False)


def _tokenizer(kit: str, config: CLIPTextConfig, suffix: str = "") -> CLIPTokenizer:
    """Load a kit's tokenizer, with at most as many tokens as the text encoder has positions.

    Without a length in its settings, the library's maximum is 10^30.

    Args:
        suffix: of the folders' names, "_2" for the second text encoder's.

    Raises:
        KitError: as `_load_tokenizer`.
    """
    settings_file = f"text_encoder{suffix}/config.json"
    return _load_tokenizer(f"kit = {kit!r}", kit, f"tokenizer{suffix}", config, settings_file)


def _load_tokenizer(
    setting: str, source: str, part: str, config: CLIPTextConfig, settings_file: str
) -> CLIPTokenizer:
    """Load the tokenizer of a part as `_tokenizer` does.

    Args:
        setting: the model as the user named it, for messages.
        config: of the text encoder, from `settings_file`.

    Raises:
        KitError: the tokenizer cannot be loaded, or has tokens that the text encoder lacks.
    """
    try:
        tokenizer = CLIPTokenizer.from_pretrained(source, subfolder=part, trust_remote_code=False)
        last = max(tokenizer.all_special_ids, default=0)
    # The library raises anything for unexpected files
    except Exception as error:
        raise KitError(
            f"{setting}: its {part}/ cannot be loaded: {sanitize(error)}. Fetch it again"
        ) from None
    if last >= config.vocab_size:
        name = tokenizer.convert_ids_to_tokens(last)
        raise KitError(
            f"{setting}: {part}/ has the special token {sanitize(name, 80)!r} with id {last}, but "
            f"{settings_file} says vocab_size = {config.vocab_size}; set "
            f"pad_token, bos_token and eos_token in {part}/tokenizer_config.json to tokens of its "
            "vocabulary"
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
    model_class: type[PreTrainedModel] = CLIPTextModel
    if kind == "text_encoder_2":
        model_class = CLIPTextModelWithProjection
    elif kind == CLIP:
        model_class = CLIPModel
    elif kind != "text_encoder":
        model_type = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
        is_captioner = kind == "captioner"
        model_class = _CAPTIONERS[model_type][0] if is_captioner else _IMAGE_ENCODERS[model_type]
    return model_class


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
        has_projection = isinstance(self.model, CLIPVisionModelWithProjection)
        dimension: int = config.projection_dim if has_projection else config.hidden_size
        return dimension

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
        token_ids: torch.Tensor = self.model.generate(
            inputs.pixel_values.to(self.model.dtype),
            max_new_tokens=oscar.CAPTION_TOKENS,
            do_sample=False,
        )
        return token_ids


def _resized_side(processor: "TorchvisionBackend") -> int:
    """Return the length to which a processor resizes the short side, or both."""
    side: int = processor.size.shortest_edge or processor.size.height
    return side


def _fit(processor: "TorchvisionBackend", picture: torch.Tensor) -> torch.Tensor:
    """Resize an image by a processor's own resampling; crop a long one to its center.

    Later the processor no longer resizes the image. It only crops it to the network's input.
    """
    side = _resized_side(processor)
    if processor.size.shortest_edge:
        picture = crop_long_side(picture)
    pixels: torch.Tensor = processor(
        picture,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        do_rescale=False,
        do_normalize=False,
        return_tensors="pt",
    ).pixel_values[0]
    return pixels


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


@dataclass(frozen=True)
class Clip:
    """A frozen CLIP: image tower, text tower and logit scale."""

    model: CLIPModel
    tokenizer: CLIPTokenizer
    processor: "TorchvisionBackend"

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return float32 embeddings [N, e] of norm 1, on the CPU."""
        ids = _token_ids(self.tokenizer, texts).to(self.model.device)
        embeddings = self.model.get_text_features(ids).pooler_output
        return torch.nn.functional.normalize(embeddings.float(), dim=1).cpu()

    def fit(self, picture: torch.Tensor) -> torch.Tensor:
        """Resize a uint8 image [3, H, W] as the model's own processor does."""
        return _fit(self.processor, picture)

    @torch.no_grad()
    def classify(self, pixels: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
        """Return the index of the text with the largest cosine to each image, [N], on the CPU.

        Radford et al., arXiv 2103.00020, section 3.1.2.

        Args:
            pixels: [N, 3, H, W] uint8.
        """
        encodings = self.encode_texts(texts)
        nearest = []
        for chunk in pixels.split(64):
            inputs = self.processor(list(chunk), return_tensors="pt").pixel_values
            images = self.model.get_image_features(inputs.to(self.model.device)).pooler_output
            nearest.append((images.float().cpu() @ encodings.T).argmax(dim=1))
        return torch.cat(nearest)

    @torch.no_grad()
    def classifier(self, encodings: torch.Tensor) -> tuple[ClipClassifier, str]:
        """Return the image tower with a head of class encodings, in eval mode, and its name.

        Args:
            encodings: text embeddings of norm 1, [C, e].

        Raises:
            KitError: the tower is of a kind that the classifier cannot be.
        """
        try:
            tower = tower_of(self.model.config.vision_config)
        except ValueError as error:
            raise KitError(f"the settings of CLIP's image tower: {error}") from None
        classifier = ClipClassifier(tower, len(encodings))
        names = ("vision_model.", "visual_projection.")
        state = {
            name: value for name, value in self.model.state_dict().items() if name.startswith(names)
        }
        classifier.tower.load_state_dict({**classifier.tower.state_dict(), **state})
        for name, statistics in (("mean", "image_mean"), ("std", "image_std")):
            values = torch.tensor(getattr(self.processor, statistics))
            classifier.get_buffer(name).copy_(values.view(3, 1, 1))
        classifier.head.weight.copy_(self.model.logit_scale.exp().cpu() * encodings)
        classifier.head.bias.zero_()
        return classifier.eval(), str(tower)


def load_clip(source: str, device: torch.device) -> Clip:
    """Load a whole CLIP, in float32.

    Args:
        source: a kit with `clip/`, or the folder or hub id of the model alone.

    Raises:
        KitError: the model is missing, corrupt or of another kind.
    """
    setting = f"zero-shot.clip = {source!r}"
    check_clip(source)
    source = find_model(source, CLIP, "zero-shot.clip")
    part = CLIP if (Path(source) / CLIP / "config.json").is_file() else ""
    try:
        model, info = CLIPModel.from_pretrained(
            source,
            subfolder=part,
            dtype=torch.float32,
            use_safetensors=True,
            variant=weights_variant(source, part, CLIP),
            trust_remote_code=False,
            output_loading_info=True,
        )
        processor = AutoImageProcessor.from_pretrained(Path(source) / part, trust_remote_code=False)
    # The library raises anything for unexpected settings
    except Exception as error:
        raise KitError(f"{setting} cannot be loaded: {sanitize(error)}") from error
    check_loaded(info, setting, CLIP)
    check_finite(model, setting, CLIP)
    settings_file = f"{part}/config.json" if part else "config.json"
    text_config = model.config.text_config
    tokenizer = _load_tokenizer(setting, source, part, text_config, settings_file)
    return Clip(model.to(device).eval().requires_grad_(False), tokenizer, processor)
