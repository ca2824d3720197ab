"""The repository's root, and run configurations for tests."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "configs" / "tables"
# Those of the frontier are read with their data (tests/unit/cli/test_frontier.py)
SHIPPED_TABLES = sorted(set(TABLES.glob("*.toml")) - set(TABLES.glob("frontier-*.toml")))


def defaults() -> dict[str, Any]:
    """The run-config of pyproject.toml, flat."""
    from flwr.common.config import flatten_dict

    return flatten_dict(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )


def plain_classifier(**settings: Any) -> Any:
    """A ResNet-18's settings with random first weights and plain SGD, and some of them changed."""
    from osfl.config import parse_run_config

    plain = {"architecture": "resnet18", "init": "none", "momentum": 0.0, "weight_decay": 0.0}
    return replace(parse_run_config(quick()).classifier, **{**plain, **settings})


def quick(**overrides: Any) -> dict[str, Any]:
    """The defaults with everything that costs time cut down; names as in Python (`feddeo__lr`)."""
    config = {
        **defaults(),
        "num-clients": 2,
        "join-timeout": 5.0,
        "deadline": 60.0,
        "data.image-size": 16,
        "synthesis.images-per-class": 1,
        "synthesis.steps": 2,
        "synthesis.unit-size": 8,
        "synthesis.batch-size": 8,
        "synthesis.parallel-units": 1,
        # an eighth of a ResNet-18, to train and to send
        "classifier.architecture": "shufflenet_v2_x1_0",
        "classifier.epochs": 1,
        "classifier.batch-size": 50,
        "global-model.architecture": "shufflenet_v2_x1_0",
        "global-model.epochs": 1,
        "global-model.batch-size": 50,
        "feddeo.epochs": 1,
        "feddeo.batch-size": 10,
        "fedcado.noise-edits": 1,
        "espresso.epochs": 1,
        "espresso.batch-size": 10,
        "espresso.noise-draws": 2,
        "espresso.clusters": 2,
        "espresso.components": 2,
        "fedld.components": 2,
        "fedld.noise-draws": 2,
        "feddisc.clusters": 2,
        "fedbip.epochs": 1,
        "fedbip.batch-size": 50,
        "domain-vector.epochs": 1,
        "domain-vector.batch-size": 50,
        "votes.draws": 2,
        "rounds.count": 2,
        "rounds.proxy-images": 8,
        "rounds.distillation-steps": 1,
    }
    config.update(
        {key.replace("__", ".").replace("_", "-"): value for key, value in overrides.items()}
    )
    unknown = set(config) - set(defaults())
    assert not unknown, unknown
    return config
