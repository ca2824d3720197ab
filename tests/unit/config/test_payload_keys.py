"""Keys that shape payloads, and those that only the server uses: the marks are right."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from client_app import handlers
from client_app.app import client_settings
from osfl.config import (
    NOT_IDENTITY,
    NodeConfig,
    RunConfig,
    flatten,
    parse_run_config,
    payload_settings,
    schema,
)
from osfl.methods import METHODS
from osfl.util.markers import OneOf, markers_of
from tests.helpers.settings import quick

SENDING = [name for name, method in METHODS.items() if method.client]
NODE = NodeConfig(partition_id=0, num_partitions=2, domain="sketch")


class Reads:
    """The keys of a run-config that code reads, without those that it only copies."""

    def __init__(self) -> None:
        self.keys = set[str]()
        # Each section's name, by its object's id; the objects stay alive with it
        self._sections: dict[int, tuple[str, Any]] = {}
        self._names = {
            type(getattr(parse_run_config(quick()), item.name)): item.name
            for item in reversed(dataclasses.fields(RunConfig))
        }

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        kinds = {kind for kind in self._names if dataclasses.is_dataclass(kind)}
        with patch.context() as inner:
            for kind in {RunConfig, *kinds}:
                inner.setattr(kind, "__getattribute__", self._reader(kind))
            yield

    def _reader(self, kind: type) -> Any:
        names = {item.name for item in dataclasses.fields(kind)}

        def read(section: Any, name: str) -> Any:
            value = object.__getattribute__(section, name)
            # `replace` and `flatten` walk over all fields
            copies = sys._getframe(1).f_code.co_name in ("replace", "_replace", "flatten")
            if name in names and not copies:
                self._note(section, name, value)
            return value

        return read

    def _note(self, section: Any, name: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            self._sections[id(value)] = (name, value)
            return
        entry = self._sections.get(id(section))
        # A copy of a section has the name of its class's first one
        prefix = entry[0] if entry else self._names.get(type(section), "")
        self.keys.add(f"{prefix}.{name}".lstrip(".").replace("_", "-"))


def payload_of(config: RunConfig, folder: Path) -> bytes:
    """The bytes of a client's payload."""
    folder.mkdir(exist_ok=True)
    settings, node, client = client_settings(config, NODE)
    kits = [settings.sampling_kit]
    return handlers._payload([settings], node, client, "job", kits, folder)[0]


def other_value(key: str, value: Any) -> Any:
    """Another value of a key's type."""
    for rule in markers_of(schema()[key], OneOf):
        return next(choice for choice in rule.choices if choice != value)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"other {value}"


def with_other_server_keys(config: RunConfig) -> RunConfig:
    """The settings with another value of every key that shapes no payload. Nothing checks them."""
    fixed = {*payload_settings(config), *NOT_IDENTITY}
    for key, value in flatten(config).items():
        if key not in fixed:
            config = with_value(config, key, other_value(key, value))
    return config


def with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    section, _, name = key.replace("-", "_").rpartition(".")
    if not section:
        return dataclasses.replace(config, **{name: value})
    part = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: part})


# One method of each client half, with its settings
HALVES = {METHODS[name].client: (name, dict[str, Any]()) for name in reversed(SENDING)}
VARIANTS = [
    *HALVES.values(),
    *((name, {"epsilon": 1.0}) for name, _ in HALVES.values() if METHODS[name].privacy),
    ("feddeo", {"feddeo__tokens": "all", "payload_codec": "int8"}),
    ("domain-vector", {"domain_vector__class_lr": 0.1}),
    ("espresso", {"espresso__mixture_fit": "sampled"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), VARIANTS, ids=str)
def test_server_keys_shape_no_payload(
    method: str,
    settings: dict[str, Any],
    home: Path,
    tiny_kit: Path,
    tiny_unclip: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client reads none of them for its payload, whose bytes are the same with all others."""
    kits = {"kit": str(tiny_kit), "feddisc__kit": str(tiny_unclip)}
    config = parse_run_config(quick(method=method, **kits, **settings))
    reads = Reads()
    with reads.recording(monkeypatch):
        blob = payload_of(config, home / "payload")
    assert reads.keys >= {"seed", "method"}
    assert reads.keys - NOT_IDENTITY <= set(payload_settings(config))
    copy = with_other_server_keys(config)
    assert len([key for key in flatten(config) if flatten(config)[key] != flatten(copy)[key]]) > 40
    assert payload_settings(config) == payload_settings(copy)
    # Noise from the operating system is another one each time
    is_noisy = config.epsilon or method == "feddisc"
    assert is_noisy or payload_of(copy, home / "other") == blob


@pytest.mark.parametrize(
    ("method", "free", "shaping"),
    [
        ("oscar", "oscar.guidance synthesis.steps synthesis.solver", "synthesis.prompt captioner"),
        ("feddeo", "feddeo.guidance-text oscar.guidance", "feddeo.epochs synthesis.prompt seed"),
        ("fedld", "fedld.guidance feddeo.lr global-model.lr", "synthesis.steps fedld.components"),
        ("espresso", "espresso.z-sampling defense", "synthesis.steps espresso.clusters kit"),
        ("fedcado", "fedcado.noise-edits fedlmg.guidance", "classifier.lr num-clients held-out"),
        ("fgl", "fgl.prompt synthesis.prompt class-balance", "data.classes epsilon"),
    ],
)
def test_some_keys_by_hand(method: str, free: str, shaping: str) -> None:
    settings = payload_settings(parse_run_config(quick(method=method)))
    assert not set(free.split()) & set(settings)
    assert set(shaping.split()) <= set(settings)
    assert not NOT_IDENTITY & set(settings)


def test_an_installed_client_half_may_read_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    method = dataclasses.replace(METHODS["oscar"], client="package.client")
    monkeypatch.setitem(METHODS, "oscar", method)
    config = parse_run_config(quick(method="oscar"))
    keys = {key for key in flatten(config) if key != "oscar.guidance"}
    assert set(payload_settings(config)) == keys - NOT_IDENTITY
