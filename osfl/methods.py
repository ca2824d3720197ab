"""The methods: which client half and which server half a name stands for. Modules are imported late, by name."""

import importlib
from dataclasses import dataclass
from types import ModuleType

# Folders of a kit.
DIFFUSION_PARTS: tuple[str, ...] = ("vae", "unet", "text_encoder", "tokenizer", "scheduler")
TEXT_PARTS = ("text_encoder", "tokenizer")
IMAGE_ENCODER_PARTS = ("image_encoder", "feature_extractor")
SMALL_DECODER = "small_decoder"  # a part that few kits have


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        client: module in `client_app.methods` with `make_payload(job)`; None: clients send nothing.
        server: module in `server_app.methods` with `run(job, payloads)`; of a method with rounds, in `server_app.averaging` with `strategy(job)`.
        payload: class in `osfl.payloads` that clients send; None: nothing.
        client_parts: what a client needs of the kit.
        rounds: whether it is one of those they compare with that send models to and fro.
        samples: whether the server needs the diffusion model.
    """

    client: str | None
    server: str
    payload: str | None
    client_parts: tuple[str, ...] = ()
    rounds: bool = False
    samples: bool = True


METHODS: dict[str, Method] = {
    "prompts-only": Method(client=None, server="prompts_only", payload=None),
    "prompts-domain": Method(client="domain", server="prompts_domain", payload="Domain"),
    "feddeo": Method(
        client="feddeo", server="feddeo", payload="Descriptions", client_parts=DIFFUSION_PARTS
    ),
    "fedlmg": Method(client="classifier", server="fedlmg", payload="Classifier"),
    "fedcado": Method(client="classifier", server="fedcado", payload="Classifier"),
    "oscar": Method(
        client="oscar", server="oscar", payload="Encodings", client_parts=("captioner", *TEXT_PARTS)
    ),
    "oscar-pooled": Method(
        client="oscar", server="oscar", payload="Encodings", client_parts=("captioner", *TEXT_PARTS)
    ),
    "espresso": Method(
        client="espresso",
        server="espresso",
        payload="Mixtures",
        client_parts=(*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS),
    ),
    "fgl": Method(client="fgl", server="fgl", payload="Captions", client_parts=("captioner",)),
    "feddisc": Method(
        client="feddisc",
        server="feddisc",
        payload="Embeddings",
        client_parts=(*IMAGE_ENCODER_PARTS, "image_normalizer", "image_noising_scheduler"),
    ),
    "fedbip": Method(
        client="fedbip", server="fedbip", payload="Concepts", client_parts=DIFFUSION_PARTS
    ),
    "fedavg": Method(client=None, server="fedavg", payload=None, rounds=True, samples=False),
    "fedprox": Method(client=None, server="fedprox", payload=None, rounds=True, samples=False),
    "feddyn": Method(client=None, server="feddyn", payload=None, rounds=True, samples=False),
    "feddf": Method(client=None, server="feddf", payload=None, rounds=True, samples=False),
    "local": Method(client="classifier", server="local", payload="Classifier", samples=False),
    "ceiling": Method(client=None, server="ceiling", payload=None, samples=False),
}


def client_half(method: str) -> ModuleType:
    """The client module of a method that has one."""
    return importlib.import_module(f"client_app.methods.{METHODS[method].client}")


def server_half(method: str) -> ModuleType:
    """The server module of a method."""
    folder = "averaging" if METHODS[method].rounds else "methods"
    return importlib.import_module(f"server_app.{folder}.{METHODS[method].server}")
