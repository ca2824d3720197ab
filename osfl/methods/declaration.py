"""The declaration of a method, `Method`, and the parts of a kit that it may name.

Imports neither torch nor the configuration, which imports the methods.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig

# Folders of a model bundle (kit)
DIFFUSION_PARTS: tuple[str, ...] = ("vae", "unet", "text_encoder", "tokenizer", "scheduler")
TEXT_PARTS = ("text_encoder", "tokenizer")
IMAGE_ENCODER_PARTS = ("image_encoder", "feature_extractor")
# Of Stable unCLIP, for its noise on image embeddings
EMBEDDING_NOISE_PARTS = ("image_normalizer", "image_noising_scheduler")
CAPTION_PARTS = ("captioner", *TEXT_PARTS)
# Optional folders, which few kits have: a tiny autoencoder's decoder, and distilled LoRA weights
# for few-step sampling
TINY_DECODER = "tiny_decoder"
LORA = "lora"
# A whole CLIP: both towers, tokenizer and preprocessing
CLIP = "clip"


def no_problems(run: "RunConfig") -> Iterator[str]:
    """Yield nothing: every configuration can be run."""
    yield from ()


def no_text(run: "RunConfig") -> str:
    """Return "": there is nothing to say about a run."""
    return ""


def never(run: "RunConfig") -> bool:
    """Return False for every run."""
    return False


def same_dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes as they are."""
    return sizes


def published(config: Mapping[str, Any]) -> str:
    """Return "": every configuration is the published method."""
    return ""


@dataclass(frozen=True)
class Method:
    """The declaration of a method. Modules are named by strings and imported on first use.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None if clients make no
            payload. A name with a dot is a full module name.
        server: module in `server_app.methods` with `run(job, payloads)`, and with the functions of
            `server_app.costs` whose defaults are not its own; for an iterative baseline (`rounds`),
            module in `server_app.baselines` with `strategy(job)`. A name with a dot is a full
            module name.
        payload: class in `osfl.payload.kinds` that clients send once; None if they send none.
        sends: text that names what leaves a client; an iterative baseline sends it in every round.
        reveals: text that names what an adversary could learn from it about a client's images.
        client_parts: folders of the kit that a client needs.
        rounds: whether this is an iterative (multi-round) baseline.
        samples: whether the server synthesizes images, and so needs the diffusion model.
        privacy: the kind of differential privacy that clients can give (`epsilon`): pure,
            approximate (with a `delta`), or "" for none.
        section: name of the method's section of the run-config; "" without one. If it has a key
            `kit`, the method may sample with that kit in place of the run's.
        settings: dataclass of the section, of a method in an installed package.
        numbers: whether the payload's numbers may be encoded with a loss, must be exact, or do not
            exist.
        teachers: whether the clients' classifiers guide the sampling and teach the global model.
        global_model: whether there is one; otherwise every client has a model of its own.
        averages: whether an iterative baseline's server only averages models, so that
            `rounds.aggregation` can replace the mean.
        distills: whether an iterative baseline's result is a distilled model of
            `global-model.architecture`, and not the mean of models of one architecture.
        image_conditions: whether the kit's UNet is conditioned on image embeddings (unCLIP).
        trained_on: text that names the training data of the global model; "": the usual data
            (`osfl.inference.description`).
        summand_bound: the largest magnitude of an image's numbers in a secure sum, unless
            `secure-sum-bound` is set; 0: payloads do not add up.
        zero_shot: whether the global model is a CLIP with the classes' names as its head, which
            is not trained.
        all_classes: whether the server synthesizes classes that a client does not hold, although
            the client sends a payload.
        dimensions: changes the kit's sizes of `osfl.payload.fields.DIMENSIONS` into the run's.
        problems: yields what keeps a run with this method from working, beside the problems that
            its section finds itself.
        guarantee_problem: returns the setting that rules out a guarantee (`epsilon`), with a hint;
            "" if there is none.
        sum_problem: returns the setting that rules out a secure sum, with a hint; "" if there is
            none.
        guarantee_note: describes what `epsilon` changes about the clients' work; "" for nothing.
        table_note: describes how a flat run-config differs from the published method; "" if it
            does not.
    """

    client: str | None
    server: str
    payload: str | None
    sends: str
    reveals: str = ""
    client_parts: tuple[str, ...] = ()
    rounds: bool = False
    samples: bool = True
    privacy: Literal["", "pure", "approximate"] = ""
    section: str = ""
    settings: type | None = None
    numbers: Literal["lossy", "exact", "none"] = "lossy"
    teachers: bool = False
    global_model: bool = True
    averages: bool = False
    distills: bool = False
    image_conditions: bool = False
    trained_on: str = ""
    zero_shot: bool = False
    summand_bound: float = 0.0
    all_classes: Callable[["RunConfig"], bool] = never
    dimensions: Callable[["RunConfig", Mapping[str, int]], Mapping[str, int]] = same_dimensions
    problems: Callable[["RunConfig"], Iterator[str]] = no_problems
    guarantee_problem: Callable[["RunConfig"], str] = no_text
    sum_problem: Callable[["RunConfig"], str] = no_text
    guarantee_note: Callable[["RunConfig"], str] = no_text
    table_note: Callable[[Mapping[str, Any]], str] = published

    @property
    def shares_models(self) -> bool:
        """Return whether others receive clients' models as they are: in rounds, or to test them."""
        return self.rounds or not self.global_model

    @property
    def sends_classifier(self) -> bool:
        """Return whether a client's payload is the classifier that it trained."""
        return self.payload == "Classifier"

    @property
    def trains_classifier(self) -> bool:
        """Return whether clients train a classifier, each of its own architecture."""
        return self.rounds or self.sends_classifier

    @property
    def features(self) -> bool:
        """Return whether clients send statistics of a frozen classifier's features."""
        return self.payload in ("FeatureStatistics", "FeatureMixtures")

    @property
    def loads_initial_weights(self) -> bool:
        """Return whether clients load a classifier's initial weights by themselves."""
        return self.sends_classifier or self.features

    @property
    def trains_on_images(self) -> bool:
        """Return whether the server trains a classifier of `[global-model]` on images."""
        return self.global_model and not (self.rounds or self.features or self.zero_shot)

    @property
    def samples_payloads(self) -> bool:
        """Return whether the server synthesizes images from what clients send."""
        return self.samples and self.payload is not None

    @property
    def samples_prompts(self) -> bool:
        """Return whether the server could synthesize an image from a prompt alone."""
        return self.samples and not (self.teachers or self.image_conditions)

    @property
    def learns(self) -> bool:
        """Return whether clients learn their payload from their images, by gradients or fits."""
        return self.trains_classifier or ("unet" in self.client_parts and self.numbers != "none")

    @property
    def mixing_problem(self) -> str:
        """Return why a client of a mixed run cannot send this method's payload alone, or ""."""
        if self._exclusion or self.samples:
            return self._exclusion
        return "makes no images; put it behind a method that does, as in domain-vector+fedcgs"

    @property
    def addition_problem(self) -> str:
        """Return why this method's payload cannot be sent beside one that makes images, or ""."""
        if self._exclusion or not self.samples:
            return self._exclusion
        return "makes images itself; put it first, or list it as a kind of its own"

    @property
    def _exclusion(self) -> str:
        """Return why this method cannot be part of a mixed run; "" if it can."""
        if self.payload is None:
            return "is iterative" if self.rounds else "has no payload"
        if self.settings is not None:
            return "is of an installed package with a section of its own"
        if self.image_conditions:
            return "samples with a kit of its own"
        return "" if self.global_model else "trains no global model"

    def synthesizes_all_classes(self, run: "RunConfig") -> bool:
        """Return whether the server synthesizes every class for every client."""
        return self.payload is None or self.all_classes(run)
