"""The methods: what clients send, and which client half and server half a name stands for.

Modules are imported late, by name.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

# Folders of a kit.
DIFFUSION_PARTS: tuple[str, ...] = ("vae", "unet", "text_encoder", "tokenizer", "scheduler")
TEXT_PARTS = ("text_encoder", "tokenizer")
IMAGE_ENCODER_PARTS = ("image_encoder", "feature_extractor")
# A part that few kits have.
SMALL_DECODER = "small_decoder"
LORA = "lora"  # weights that turn a kit into a few-step one


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None: clients make no
            payload.
        server: module in `server_app.methods` with `run(job, payloads)`; of a method with rounds,
            in `server_app.baselines` with `strategy(job)`.
        payload: class in `osfl.payload.kinds` that clients send once; None: they send none.
        sends: what leaves a client, in words; of a method with rounds it is no payload, and is sent
            in every round.
        reveals: what somebody could learn from that of a client's images, in words.
        client_parts: what a client needs of the kit.
        rounds: whether it is one of those they compare with that send models to and fro.
        samples: whether the server needs the diffusion model.
        private: the differential privacy that clients can give (`epsilon`): pure, approximate
            (with a `delta`), or "" for none.
    """

    client: str | None
    server: str
    payload: str | None
    sends: str
    reveals: str = ""
    client_parts: tuple[str, ...] = ()
    rounds: bool = False
    samples: bool = True
    private: Literal["", "pure", "approximate"] = ""

    @property
    def open_models(self) -> bool:
        """Whether clients' models come to others as they are: in rounds, or to be tested."""
        return self.rounds or self.server == "local"

    @property
    def features(self) -> bool:
        """Whether clients send what a frozen classifier's features are like."""
        return self.payload in ("FeatureStatistics", "FeatureMixtures")


NOTHING = "nothing"
FROM_CLASSIFIER = (
    "what the images of a class have in common, their BatchNorm statistics, and of many an image "
    "whether it was trained on"
)
CLASSIFIER = "its classifier, trained on its own images"
CAPTION_PARTS = ("captioner", *TEXT_PARTS)
MODEL_EVERY_ROUND = "its model, in every round"

METHODS: dict[str, Method] = {
    "prompts-only": Method(client=None, server="prompts_only", payload=None, sends=NOTHING),
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
        "of a few images, also whether one is among them",
        client_parts=DIFFUSION_PARTS,
        private="approximate",
    ),
    "fedlmg": Method(
        client="classifier",
        server="fedlmg",
        payload="Classifier",
        sends=CLASSIFIER,
        reveals=FROM_CLASSIFIER,
        private="approximate",
    ),
    "fedcado": Method(
        client="classifier",
        server="fedcado",
        payload="Classifier",
        sends=CLASSIFIER,
        reveals=FROM_CLASSIFIER,
        private="approximate",
    ),
    "oscar": Method(
        client="oscar",
        server="oscar",
        payload="Encodings",
        sends="the mean encoding of every class's captions",
        reveals="what the captions of a class have in common; of a single image, its caption",
        client_parts=CAPTION_PARTS,
        private="approximate",
    ),
    "oscar-pooled": Method(
        client="oscar",
        server="oscar",
        payload="Encodings",
        sends="the mean pooled encoding of every class's captions",
        reveals="what the captions of a class have in common; of a single image, its caption",
        client_parts=CAPTION_PARTS,
        private="approximate",
    ),
    "espresso": Method(
        client="espresso",
        server="espresso",
        payload="Mixtures",
        sends="conditions of every class's clusters, and a mixture of its noised latents",
        reveals="what groups of a few images look like, blurred means of them, and whether an "
        "image is among them",
        client_parts=(*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS),
    ),
    "fgl": Method(
        client="fgl",
        server="fgl",
        payload="Captions",
        sends="a caption of every image",
        reveals="these words, which anybody can read",
        client_parts=("captioner",),
    ),
    "feddisc": Method(
        client="feddisc",
        server="feddisc",
        payload="Embeddings",
        sends="cluster centres and the mean of every class's noised image embeddings",
        reveals="what groups of a few images are about, and of many an image whether it is among "
        "them; of a single image, its embedding with noise",
        client_parts=(*IMAGE_ENCODER_PARTS, "image_normalizer", "image_noising_scheduler"),
        private="approximate",
    ),
    "fedbip": Method(
        client="fedbip",
        server="fedbip",
        payload="Concepts",
        sends="learned words for domain and classes, and the latent of every image",
        reveals="every image: its latent decodes to a close likeness",
        client_parts=DIFFUSION_PARTS,
    ),
    "domain-vector": Method(
        client="domain_vector",
        server="domain_vector",
        payload="DomainVector",
        sends="a learned vector of its domain",
        reveals="what the images of a client have in common",
        client_parts=DIFFUSION_PARTS,
        private="approximate",
    ),
    "votes": Method(
        client="votes",
        server="votes",
        payload="Votes",
        sends="which of the run's candidates every class's images look like",
        reveals="which of these words fits a class best",
        client_parts=DIFFUSION_PARTS,
        private="pure",
    ),
    "fedcgs": Method(
        client="fedcgs",
        server="fedcgs",
        payload="FeatureStatistics",
        sends="how many images of every class, and sums of their features",
        reveals="what an average image of a class is about; and of every image, if there are "
        "fewer than features, whether it is there",
        samples=False,
    ),
    "fedpft": Method(
        client="fedpft",
        server="fedpft",
        payload="FeatureMixtures",
        sends="how many images of every class, and a Gaussian mixture of their features",
        reveals="what groups of images are about; with few images, of many an image whether it "
        "is there",
        samples=False,
        private="approximate",
    ),
    "fedavg": Method(
        client=None,
        server="fedavg",
        payload=None,
        sends=MODEL_EVERY_ROUND,
        reveals=FROM_CLASSIFIER,
        rounds=True,
        samples=False,
    ),
    "fedprox": Method(
        client=None,
        server="fedprox",
        payload=None,
        sends=MODEL_EVERY_ROUND,
        reveals=FROM_CLASSIFIER,
        rounds=True,
        samples=False,
    ),
    "feddyn": Method(
        client=None,
        server="feddyn",
        payload=None,
        sends=MODEL_EVERY_ROUND,
        reveals=FROM_CLASSIFIER,
        rounds=True,
        samples=False,
    ),
    "feddf": Method(
        client=None,
        server="feddf",
        payload=None,
        sends=MODEL_EVERY_ROUND,
        reveals=FROM_CLASSIFIER,
        rounds=True,
        samples=False,
    ),
    "local": Method(
        client="classifier",
        server="local",
        payload="Classifier",
        sends=CLASSIFIER,
        reveals=FROM_CLASSIFIER,
        samples=False,
        private="approximate",
    ),
    "ceiling": Method(
        client=None,
        server="ceiling",
        payload=None,
        sends="nothing: the server has all their images itself, as no real server has",
        samples=False,
    ),
}


def client_half(method: str) -> ModuleType:
    """The client module of a method that has one."""
    return importlib.import_module(f"client_app.methods.{METHODS[method].client}")


def server_half(method: str) -> ModuleType:
    """The server module of a method."""
    folder = "baselines" if METHODS[method].rounds else "methods"
    return importlib.import_module(f"server_app.{folder}.{METHODS[method].server}")
