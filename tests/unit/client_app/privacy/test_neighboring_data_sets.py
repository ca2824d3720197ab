"""Everything that a client sends under a guarantee, twice, with one training image replaced.

The mechanisms' adjacency is replacement (`client_app/privacy/mechanisms.py`): by another image of
the same class, or for votes and classifiers by one of another class that leaves the payload's list
of classes, and the number of images, as they are. What is declared noisy here is a mechanism's
output. Everything else must be equal.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image

from client_app.app import app
from osfl.config import RunConfig, parse_run_config
from osfl.methods import METHODS
from osfl.models.classifiers import build_classifier
from osfl.payload import wire
from osfl.payload.fields import fields_of
from osfl.payload.kinds import kind_of
from osfl.payload.messages import SentModel, pack_model, unpack_payload
from server_app.expected import expected_payload
from tests.helpers.analytic import random_pixels
from tests.helpers.settings import quick

PRIVATE = tuple(name for name, method in METHODS.items() if method.privacy)
# Where the guarantee covers an image's class, too
ANY_CLASS = ("votes", *(name for name in PRIVATE if METHODS[name].payload == "Classifier"))
CLASSES = ("three", "eight")
# By the kind of payload, the fields that a mechanism draws
NOISY = {
    "Descriptions": {"vectors"},
    "Encodings": {"vectors"},
    "Embeddings": {"vectors"},
    "DomainVector": {"domain"},
    "FeatureMixtures": {"means", "variances"},
    "LatentStatistics": {"sums", "squares"},
    "Votes": {"winners"},
    # Its parameters; BatchNorm's statistics are the initial weights'
    "Classifier": {"state"},
}
# Of BatchNorm: not trained
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
ADAPTING = (True, False)


def save(folder: Path, name: str, label: int, seed: int) -> None:
    """An image whose size in bytes is its own, too."""
    file = folder / CLASSES[label] / name
    file.parent.mkdir(parents=True, exist_ok=True)
    (pixels,) = random_pixels(1, 16, seed=seed)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)


def site(folder: Path, replaced: str) -> Path:
    """Three training images of each class and two tests; of the last class one is another.

    Args:
        replaced: by which: "" (none), "same class" or "other class".
    """
    for label in range(2):
        for number in range(3):
            save(folder / "train", f"{number}.png", label, 10 * label + number)
        for number in range(2):
            save(folder / "test", f"test-{number}.png", label, 30 + 10 * label + number)
    if replaced:
        (folder / "train" / CLASSES[1] / "2.png").unlink()
        save(folder / "train", "patient.png", replaced == "same class", 99)
    return folder


def config_of(method: str, kit: Path, unclip: Path, **settings: Any) -> dict[str, Any]:
    base_settings = {
        "method": method,
        "kit": str(kit),
        "feddisc__kit": str(unclip),
        "data__name": "folder",
        "data__classes": ",".join(CLASSES),
        "classifier__steps": 1,
        "classifier__init": "none",
        "global_model__init": "none",
        # Local has no global model that a client could adapt
        "personalization__steps": 0 if method == "local" else 3,
        "num_clients": 1,
        "epsilon": 2.0,
        "delta": 1e-4,
        "job_id": "job",
    }
    return quick(**{**base_settings, **settings})


def sent(config: dict[str, Any], node: dict[str, Any], home: Path) -> Iterator[tuple[str, Any]]:
    """Return a client's answers by the kind of message: a reply, or an error."""
    job = RecordDict({"job": ConfigRecord({"job": "job"}), "kit": ConfigRecord({})})
    yield "join", answer("query.join", job, config, node)
    yield "train", answer("train", job, config, node)
    yield "acknowledge", answer("query.acknowledge", job, config, node)
    # The payload is asked for again
    yield "resent", answer("train", job, config, node)
    torch.manual_seed(0)
    model = build_classifier("shufflenet_v2_x1_0", len(CLASSES), small_stem=True)
    for adapts in ADAPTING:
        for keeps in ("", str(home)):
            asked = SentModel(model.state_dict(), "shufflenet_v2_x1_0", True, "job", "FT", adapts)
            node_config = {**node, "models-dir": keeps}
            yield (
                f"evaluate {adapts} {keeps}",
                answer("evaluate", pack_model(asked), config, node_config),
            )


def answer(kind: str, content: RecordDict, config: dict[str, Any], node: dict[str, Any]) -> Any:
    message = Message(content, dst_node_id=7, message_type=kind)
    message.metadata.__dict__["_message_id"] = "1"
    try:
        return app(message, Context(1, 7, node, RecordDict(), config)).content
    except Exception as error:
        return type(error).__name__, str(error)


def quiet_parts(content: Any, config: RunConfig) -> dict[str, Any]:
    """All of an answer that is not declared noisy, flat."""
    if not isinstance(content, RecordDict):
        return {"error": content}
    parts: dict[str, Any] = {"records": sorted(content)}
    for name, metrics in content.metric_records.items():
        parts |= {f"{name}.{key}": value for key, value in metrics.items()}
    for name, values in content.config_records.items():
        parts |= {f"{name}.{key}": value for key, value in values.items()}
    assert set(content.array_records) <= {"payload"}
    if "payload" in content.array_records:
        # The digest of noise is noise
        assert parts.pop("header.sha256")
        parts |= of_payload(content, config)
    return parts


def of_payload(content: RecordDict, config: RunConfig) -> dict[str, Any]:
    expected = expected_payload(config, "job")("site-a")
    blob, sha256, _ = unpack_payload(content, expected)
    payload = wire.decode(blob, expected, sha256)
    kind = type(payload).__name__
    parts: dict[str, Any] = {"kind": kind, "bytes": len(blob)}
    for name in fields_of(kind_of(kind)):
        value = getattr(payload, name)
        if isinstance(value, dict):
            names = [key for key in value if key.endswith(STATISTICS)]
            parts |= {f"{name} {key}": value[key].tolist() for key in names}
            parts |= {f"{name} {key} shape": list(value[key].shape) for key in value}
        elif isinstance(value, torch.Tensor):
            parts[f"{name} shape"] = (list(value.shape), value.dtype)
            value = value.tolist()
        if name not in NOISY[kind]:
            parts[name] = value
    return parts


def captured(
    config: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch, replaced: str, **own: Any
) -> dict[str, Any]:
    """Everything that one site sends, less what is declared noisy, by question and part."""
    place = home / (replaced or "as it is")
    monkeypatch.setenv("OSFL_CACHE", str(place / "cache"))
    node = {"client-id": "site-a", "data-dir": str(site(place / "data", replaced)), **own}
    parsed = parse_run_config(config)
    models_folder = place / "models"
    models_folder.mkdir()
    parts = {}
    for number, (_, content) in enumerate(sent(config, node, models_folder)):
        parts |= {f"{number} {key}": value for key, value in quiet_parts(content, parsed).items()}
    return parts


def pairs() -> list[tuple[str, str]]:
    same = [(method, "same class") for method in PRIVATE]
    return same + [(method, "other class") for method in ANY_CLASS]


@pytest.mark.slow
@pytest.mark.flops
@pytest.mark.parametrize(("method", "replaced"), pairs())
def test_one_image_changes_nothing_but_what_is_noisy(
    home: Path,
    tiny_kit: Path,
    tiny_unclip: Path,
    method: str,
    replaced: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The site demands the guarantee, and tells its test results."""
    config = config_of(method, tiny_kit, tiny_unclip)
    policy = {"epsilon": 2.0, "epsilon-total": 8.0, "test-results": "exact"}
    here, there = (captured(config, home, monkeypatch, which, **policy) for which in ("", replaced))
    assert not [key for key in here if key.endswith("error")]
    assert {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("asker", ["site", "run"])
@pytest.mark.parametrize("why", ["images", "labels"])
def test_errors_are_the_same_whatever_the_images(
    home: Path,
    tiny_kit: Path,
    tiny_unclip: Path,
    why: str,
    asker: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sites have other images, and neither can take part."""
    policy = {"epsilon": 2.0} if asker == "site" else {}
    config = config_of("votes", tiny_kit, tiny_unclip)
    site_parts = []
    for name in ("Ada", "Berta"):
        place = home / name
        if why == "images":
            site(place, "")
            for file in (place / "train").glob("*/*"):
                file.write_text(f"the report of {name}")
        else:
            save(place / "train" / name, "0.png", 0, 1)
            save(place / "test" / name, "0.png", 0, 1)
        monkeypatch.setenv("OSFL_CACHE", str(place / "cache"))
        node = {"client-id": "site-a", "data-dir": str(place), "test-results": "exact", **policy}
        answers = [content for _, content in sent(config, node, home)]
        site_parts.append([quiet_parts(content, parse_run_config(config)) for content in answers])
    assert site_parts[0] == site_parts[1]
    codes = [parts["error"] for parts in site_parts[0] if "error" in parts]
    assert ("ClientError", "DATA (its own log has the details)") in codes
