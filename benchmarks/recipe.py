"""The training recipe of the tables, and the settings of their rows."""

from benchmarks.federation import DOMAINS, Settings
from osfl.config import Scalar

# configs/recipes/digits.toml
TRAINING: Settings = {
    "num-clients": 6,
    "synthesis.images-per-class": 30,
    "global-model.lr": 0.05,
    "global-model.batch-size": 32,
    "global-model.schedule": "one-cycle",
    "global-model.warm-up": 0.3,
    "global-model.label-smoothing": 0.1,
    "global-model.augmentation": "affine-color",
}
# Guidance is as in configs/tables/digits.toml: each method's best on the validation split; votes
# has the guidance of prompts-domain. Conditions are learned in 600 steps.
SYSTEMS: dict[str, Settings] = {
    "prompts-only": {"method": "prompts-only", "prompts-only.guidance": 3.0},
    "prompts-domain": {"method": "prompts-domain", "prompts-domain.guidance": 2.0},
    "FGL": {"method": "fgl", "fgl.guidance": 5.0},
    "FedDISC": {
        "method": "feddisc",
        "feddisc.guidance-cluster": 1.0,
        "feddisc.guidance-domain": 1.0,
    },
    "FedBiP": {"method": "fedbip", "fedbip.steps": 600, "fedbip.guidance": 3.0},
    "FedCADO": {"method": "fedcado", "fedcado.strategies": "ft", "fedcado.guidance": 7.5},
    "FedLMG": {"method": "fedlmg", "fedlmg.strategies": "ft", "fedlmg.guidance": 2.0},
    "FedDEO": {
        "method": "feddeo",
        "feddeo.steps": 600,
        "feddeo.guidance-text": 3.75,
        "feddeo.guidance-description": 3.75,
    },
    "FedDEO description alone": {
        "method": "feddeo",
        "feddeo.steps": 600,
        "feddeo.guidance-description": 2.0,
    },
    "OSCAR": {"method": "oscar", "oscar.guidance": 5.0},
    "OSCAR-pooled": {"method": "oscar-pooled", "oscar.guidance": 1.5},
    "Espresso": {"method": "espresso", "espresso.steps": 600, "espresso.guidance": 1.5},
    "domain-vector": {"method": "domain-vector", "domain-vector.steps": 600},
    "votes": {"method": "votes", "votes.guidance": 2.0},
}
COMMON: Settings = {
    **TRAINING,
    # Eleven epochs of 1,800 images
    "global-model.steps": 627,
    "global-model.precision": "float32",
    # A GPU takes many small images in a batch
    "synthesis.unit-size": 300,
}
VECTOR = SYSTEMS["domain-vector"]
LONG: Settings = {"global-model.steps": 2508, "global-model.precision": "bfloat16"}
# Ten times as many images drawn in a quarter of the steps, and a training that is four times as
# long; the row "ceiling, as long" trains as long on real images
MANY: Settings = {
    **VECTOR,
    "synthesis.images-per-class": 300,
    "synthesis.steps": 5,
    "domain-vector.guidance": 1.5,
    **LONG,
}
# Systems whose payloads are encoded with every payload-codec
CODED: dict[str, Settings] = {
    "FedDEO description alone": SYSTEMS["FedDEO description alone"],
    "FedDEO, one for all tokens": {**SYSTEMS["FedDEO description alone"], "feddeo.tokens": "all"},
    "OSCAR": SYSTEMS["OSCAR"],
    "domain-vector": VECTOR,
}
ROWS: dict[str, Settings] = {
    "ceiling": {"method": "ceiling"},
    **SYSTEMS,
    "domain-vector, 300 images": MANY,
    "domain-vector, 300 images, UniPC, 6 steps": {
        **MANY,
        "synthesis.solver": "unipc",
        "synthesis.steps": 6,
    },
    # Noisy-label filtering by cross-fitting
    "domain-vector, 300 images, checked": {**MANY, "label-filter": "filter"},
    "ceiling, as long": {"method": "ceiling", **LONG},
    "domain-vector, 10 sampling steps": {**VECTOR, "synthesis.steps": 10},
    "domain-vector, UniPC, 6 steps": {**VECTOR, "synthesis.solver": "unipc", "synthesis.steps": 6},
    "domain-vector, guided at 200 to 800": {
        **VECTOR,
        "synthesis.guided-from": 200,
        "synthesis.guided-to": 800,
    },
    "domain-vector, features cached, 1 of 2": {**VECTOR, "synthesis.cache-interval": 2},
    # The weights were distilled with guidance
    "domain-vector, LCM, 4 steps": {
        **VECTOR,
        "synthesis.lora": "kit",
        "synthesis.solver": "lcm",
        "synthesis.steps": 4,
        "domain-vector.guidance": 1.0,
    },
    "domain-vector, public domains": {
        **VECTOR,
        "public-domains": ", ".join(DOMAINS),
        # Five epochs of 3,600 images
        "global-model.steps": 565,
    },
    "domain-vector, one for all tokens": {**VECTOR, "domain-vector.tokens": "all"},
    "domain-vector, one for all tokens, epsilon 1": {
        **VECTOR,
        "domain-vector.tokens": "all",
        "epsilon": 1.0,
        # Chosen on validation images by benchmarks.privacy.noisy_mean
        "clip-norm": 1.5,
    },
    "votes, epsilon 1": {**SYSTEMS["votes"], "epsilon": 1.0},
    "votes of all classes together, epsilon 0.1": {
        **SYSTEMS["votes"],
        "votes.granularity": "client",
        "epsilon": 0.1,
    },
    "FedDEO, one for all tokens": CODED["FedDEO, one for all tokens"],
    **{
        f"{row}, {codec}": {**settings, "payload-codec": codec}
        for row, settings in CODED.items()
        for codec in ("int8", "int4")
    },
}
PARTITIONS: dict[str, Settings] = {
    "domain": {},
    "label": {"data.partition": "label"},
    "dirichlet": {"data.partition": "dirichlet", "data.alpha": 0.1},
}
# Under label skew: the five papers' systems, and ours, which draws every class for every client,
# but a third of the images, because clients hold about a third of the classes
PAPERS = ("FedCADO", "FedLMG", "FedDEO", "FedDEO description alone", "OSCAR", "Espresso")
SKEWED_ROWS: dict[str, Settings] = {
    **{row: ROWS[row] for row in ("ceiling", "prompts-only", *PAPERS)},
    "domain-vector, all classes": {
        **VECTOR,
        "domain-vector.classes": "all",
        "synthesis.images-per-class": 10,
    },
}


def rows_of(partition: str) -> dict[str, Settings]:
    """Return the rows of a partition's table."""
    return ROWS if partition == "domain" else SKEWED_ROWS


def settings_of(row: str, seed: int, partition: str = "domain") -> dict[str, Scalar]:
    """Return a row's settings, over what all rows have."""
    return {**COMMON, **PARTITIONS[partition], **rows_of(partition)[row], "seed": seed}
