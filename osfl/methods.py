"""The table of methods: what clients send, and the client module and server module of each name.

Modules are named by strings and imported on first use, so that this table needs no torch.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

# Folders of a model bundle (kit)
DIFFUSION_PARTS: tuple[str, ...] = ("vae", "unet", "text_encoder", "tokenizer", "scheduler")
TEXT_PARTS = ("text_encoder", "tokenizer")
IMAGE_ENCODER_PARTS = ("image_encoder", "feature_extractor")
# Optional folders, which few kits have: a tiny autoencoder's decoder, and distilled LoRA weights
# for few-step sampling
TINY_DECODER = "small_decoder"
LORA = "lora"


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None if clients make no
            payload.
        server: module with `run(job, payloads)` in `server_app.methods`; for an iterative baseline
            (`rounds`), module with `strategy(job)` in `server_app.baselines`.
        payload: class in `osfl.payload.kinds` that clients send once; None if they send none.
        sends: text that says what leaves a client; an iterative baseline sends it in every round.
        reveals: text that says what an adversary could learn from it about a client's images.
        client_parts: folders of the kit that a client needs.
        rounds: whether this is an iterative (multi-round) baseline.
        samples: whether the server synthesizes images, and so needs the diffusion model.
        private: the kind of differential privacy that clients can give (`epsilon`): pure,
            approximate (with a `delta`), or "" for none.
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

    @property
    def shares_models(self) -> bool:
        """Return whether others receive clients' models as they are: in rounds, or to test them."""
        return self.rounds or self.server == "local"

    @property
    def features(self) -> bool:
        """Return whether clients send statistics of a frozen classifier's features."""
        return self.payload in ("FeatureStatistics", "FeatureMixtures")


SENDS_NOTHING = "nothing"
CLASSIFIER_REVEALS = (
    "what the images of a class have in common, their BatchNorm statistics, and for many images "
    "whether they are in the training set"
)
SENDS_CLASSIFIER = "its classifier, trained on its own images"
CAPTION_PARTS = ("captioner", *TEXT_PARTS)
SENDS_MODEL_EVERY_ROUND = "its model, in every round"

METHODS: dict[str, Method] = {
    "prompts-only": Method(client=None, server="prompts_only", payload=None, sends=SENDS_NOTHING),
    "prompts-domain": Method(
        client="domain",
        server="prompts_domain",
        payload="Domain",
        sends="the name of its domain",
        reveals="that name",
    ),
    "feddeo": Method(
        client="feddeo",
        server="feddeo",
        payload="Descriptions",
        sends="a learned description of every class",
        reveals="what the images of a class look like, as far as the diffusion model can draw it; "
        "with few images, also whether a given image is among them",
        client_parts=DIFFUSION_PARTS,
        privacy="approximate",
    ),
    "fedlmg": Method(
        client="classifier",
        server="fedlmg",
        payload="Classifier",
        sends=SENDS_CLASSIFIER,
        reveals=CLASSIFIER_REVEALS,
        privacy="approximate",
    ),
    "fedcado": Method(
        client="classifier",
        server="fedcado",
        payload="Classifier",
        sends=SENDS_CLASSIFIER,
        reveals=CLASSIFIER_REVEALS,
        privacy="approximate",
    ),
    "oscar": Method(
        client="oscar",
        server="oscar",
        payload="Encodings",
        sends="the mean encoding of every class's captions",
        reveals="what the captions of a class have in common; for a class with one image, its "
        "caption",
        client_parts=CAPTION_PARTS,
        privacy="approximate",
    ),
    "oscar-pooled": Method(
        client="oscar",
        server="oscar",
        payload="Encodings",
        sends="the mean pooled encoding of every class's captions",
        reveals="what the captions of a class have in common; for a class with one image, its "
        "caption",
        client_parts=CAPTION_PARTS,
        privacy="approximate",
    ),
    "espresso": Method(
        client="espresso",
        server="espresso",
        payload="Mixtures",
        sends="conditions of every class's clusters, and a Gaussian mixture of its noisy latents",
        reveals="what small groups of images look like, blurred means of them, and whether a given "
        "image is among them",
        client_parts=(*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS),
    ),
    "fgl": Method(
        client="fgl",
        server="fgl",
        payload="Captions",
        sends="a caption of every image",
        reveals="everything that these captions say",
        client_parts=("captioner",),
    ),
    "feddisc": Method(
        client="feddisc",
        server="feddisc",
        payload="Embeddings",
        sends="cluster centers and the mean of every class's noisy image embeddings",
        reveals="what small groups of images show, and for many images whether they are among "
        "them; for a class with one image, its noisy embedding",
        client_parts=(*IMAGE_ENCODER_PARTS, "image_normalizer", "image_noising_scheduler"),
        privacy="approximate",
    ),
    "fedbip": Method(
        client="fedbip",
        server="fedbip",
        payload="Concepts",
        sends="learned words for domain and classes, and the latent of every image",
        reveals="every image: its latent decodes to a close reconstruction",
        client_parts=DIFFUSION_PARTS,
    ),
    "domain-vector": Method(
        client="domain_vector",
        server="domain_vector",
        payload="DomainVector",
        sends="a learned vector of its domain",
        reveals="what a client's images have in common",
        client_parts=DIFFUSION_PARTS,
        privacy="approximate",
    ),
    "votes": Method(
        client="votes",
        server="votes",
        payload="Votes",
        sends="for every class, which of the run's candidate domains its images resemble most",
        reveals="which of these domain names fits a class best",
        client_parts=DIFFUSION_PARTS,
        privacy="pure",
    ),
    "fedcgs": Method(
        client="fedcgs",
        server="fedcgs",
        payload="FeatureStatistics",
        sends="the number of images of every class, and sums of their features",
        reveals="what an average image of a class shows; with fewer images than features, also "
        "for every image whether it is in the training set",
        samples=False,
    ),
    "fedpft": Method(
        client="fedpft",
        server="fedpft",
        payload="FeatureMixtures",
        sends="the number of images of every class, and a Gaussian mixture of their features",
        reveals="what groups of images show; with few images, for many of them also whether they "
        "are in the training set",
        samples=False,
        privacy="approximate",
    ),
    "fedavg": Method(
        client=None,
        server="fedavg",
        payload=None,
        sends=SENDS_MODEL_EVERY_ROUND,
        reveals=CLASSIFIER_REVEALS,
        rounds=True,
        samples=False,
    ),
    "fedprox": Method(
        client=None,
        server="fedprox",
        payload=None,
        sends=SENDS_MODEL_EVERY_ROUND,
        reveals=CLASSIFIER_REVEALS,
        rounds=True,
        samples=False,
    ),
    "feddyn": Method(
        client=None,
        server="feddyn",
        payload=None,
        sends=SENDS_MODEL_EVERY_ROUND,
        reveals=CLASSIFIER_REVEALS,
        rounds=True,
        samples=False,
    ),
    "feddf": Method(
        client=None,
        server="feddf",
        payload=None,
        sends=SENDS_MODEL_EVERY_ROUND,
        reveals=CLASSIFIER_REVEALS,
        rounds=True,
        samples=False,
    ),
    "local": Method(
        client="classifier",
        server="local",
        payload="Classifier",
        sends=SENDS_CLASSIFIER,
        reveals=CLASSIFIER_REVEALS,
        samples=False,
        privacy="approximate",
    ),
    "ceiling": Method(
        client=None,
        server="ceiling",
        payload=None,
        sends="nothing: the server holds all images itself, which no real server would",
        samples=False,
    ),
}


def client_module(method: str) -> ModuleType:
    """Import the client module of a method that has one."""
    return importlib.import_module(f"client_app.methods.{METHODS[method].client}")


def server_module(method: str) -> ModuleType:
    """Import the server module of a method."""
    folder = "baselines" if METHODS[method].rounds else "methods"
    return importlib.import_module(f"server_app.{folder}.{METHODS[method].server}")
