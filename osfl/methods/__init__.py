"""The methods: what clients send, and the client module and server module of each name.

Every module declares one method, and is torch-free. An installed package adds a method with an
entry point in the group `osfl.methods` (docs/adding-a-method.md).
"""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from osfl.methods.ceiling import METHOD as CEILING
from osfl.methods.declaration import (
    CAPTION_PARTS,
    CLIP,
    DIFFUSION_PARTS,
    EMBEDDING_NOISE_PARTS,
    IMAGE_ENCODER_PARTS,
    LORA,
    TEXT_PARTS,
    TINY_DECODER,
    Method,
)
from osfl.methods.domain_vector import METHOD as DOMAIN_VECTOR
from osfl.methods.espresso import METHOD as ESPRESSO
from osfl.methods.fedavg import METHOD as FEDAVG
from osfl.methods.fedbip import METHOD as FEDBIP
from osfl.methods.fedcado import METHOD as FEDCADO
from osfl.methods.fedcgs import METHOD as FEDCGS
from osfl.methods.feddeo import METHOD as FEDDEO
from osfl.methods.feddf import METHOD as FEDDF
from osfl.methods.feddisc import METHOD as FEDDISC
from osfl.methods.feddyn import METHOD as FEDDYN
from osfl.methods.fedld import METHOD as FEDLD
from osfl.methods.fedlmg import METHOD as FEDLMG
from osfl.methods.fedpft import METHOD as FEDPFT
from osfl.methods.fedprox import METHOD as FEDPROX
from osfl.methods.fgl import METHOD as FGL
from osfl.methods.installed import installed_methods
from osfl.methods.latent_gaussian import METHOD as LATENT_GAUSSIAN
from osfl.methods.local import METHOD as LOCAL
from osfl.methods.mixed import METHOD as MIXED
from osfl.methods.oscar import METHOD as OSCAR
from osfl.methods.oscar_pooled import METHOD as OSCAR_POOLED
from osfl.methods.prompts_domain import METHOD as PROMPTS_DOMAIN
from osfl.methods.prompts_only import METHOD as PROMPTS_ONLY
from osfl.methods.real_and_synthetic import METHOD as REAL_AND_SYNTHETIC
from osfl.methods.votes import METHOD as VOTES
from osfl.methods.zero_shot import METHOD as ZERO_SHOT

__all__ = [
    "CAPTION_PARTS",
    "CLIP",
    "DIFFUSION_PARTS",
    "EMBEDDING_NOISE_PARTS",
    "IMAGE_ENCODER_PARTS",
    "LORA",
    "METHODS",
    "REFUSED",
    "TEXT_PARTS",
    "TINY_DECODER",
    "Method",
    "client_module",
    "server_module",
]

BUILT_IN: dict[str, Method] = {
    "prompts-only": PROMPTS_ONLY,
    "prompts-domain": PROMPTS_DOMAIN,
    "feddeo": FEDDEO,
    "fedlmg": FEDLMG,
    "fedcado": FEDCADO,
    "oscar": OSCAR,
    "oscar-pooled": OSCAR_POOLED,
    "espresso": ESPRESSO,
    "fedld": FEDLD,
    "latent-gaussian": LATENT_GAUSSIAN,
    "fgl": FGL,
    "feddisc": FEDDISC,
    "fedbip": FEDBIP,
    "domain-vector": DOMAIN_VECTOR,
    "votes": VOTES,
    "mixed": MIXED,
    "fedcgs": FEDCGS,
    "fedpft": FEDPFT,
    "zero-shot": ZERO_SHOT,
    "fedavg": FEDAVG,
    "fedprox": FEDPROX,
    "feddyn": FEDDYN,
    "feddf": FEDDF,
    "local": LOCAL,
    "ceiling": CEILING,
    "real-and-synthetic": REAL_AND_SYNTHETIC,
}

# All methods by name, those of installed packages last
METHODS: dict[str, Method]
# The reason for each name whose declaration in an installed package is refused
REFUSED: dict[str, str]


@cache
def _tables() -> tuple[dict[str, Method], dict[str, str]]:
    installed, refused = installed_methods(BUILT_IN)
    return BUILT_IN | installed, refused


def __getattr__(name: str) -> dict[str, Any]:
    """Return METHODS or REFUSED; installed packages are loaded on first use.

    Loading them while this package is imported would be too early, because their modules import it.
    """
    if name not in ("METHODS", "REFUSED"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    methods, refused = _tables()
    return methods if name == "METHODS" else refused


def client_module(method: str) -> ModuleType:
    """Import the client module of a method that has one."""
    return _import_half("client_app.methods", str(_tables()[0][method].client))


def server_module(method: str) -> ModuleType:
    """Import the server module of a method."""
    declaration = _tables()[0][method]
    folder = "baselines" if declaration.rounds else "methods"
    return _import_half(f"server_app.{folder}", declaration.server)


def _import_half(package: str, name: str) -> ModuleType:
    return importlib.import_module(name if "." in name else f"{package}.{name}")
