"""Messages between server and clients: types, headers, and the encoding of models and payloads.

Each message type with the content of the request and of the reply:

- `query.join`. Request: digests of the kit's weights, and the key to seal payloads to. Reply:
  client id, installed version, architecture, the number of training images if the method weights
  clients by it and the client gives no guarantee, and whether its site asks for synthetic images.
- `train`. Request: job id, and the key to seal the payload to. Reply: payload (as bytes), header,
  costs.
- `query.acknowledge`. Request: job id, and the SHA-256 of the open payload that the server has
  stored, whose copy the client can delete, or the identity of the rounds that have ended. The
  reply is empty.
- `evaluate`. Request: global model, its architecture and name, job id, and whether the client
  personalizes it first; with the first model synthetic images for a site that asked
  (`osfl.payload.samples`). Reply: confusion matrix, seconds and, without a guarantee, histograms
  (`osfl.metrics.messages`), or that the site withholds the matrix.
- `evaluate` with the record `LOCAL_BASELINE`. Request: as above. Reply: confusion matrix of a model
  that the client trained alone, and how often either model is correct; or that it is withheld.
- `train`, for an iterative baseline. Request: model, its architecture, round, job id, identity of
  the rounds. Reply: trained model, number of images, costs.
- `query.advise`. Request: nothing. Reply: at most three shares of training images (`osfl.advice`),
  or that the site withholds them.

Everything else that a client needs is in the run-config, which Flower gives to both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save

from osfl.advice import Figures
from osfl.config import IDENTIFIER_RULE, is_identifier
from osfl.payload import wire

JOIN = "query.join"
ACKNOWLEDGE = "query.acknowledge"
ADVISE = "query.advise"
# Replaces the confusion matrix in a reply to `evaluate` if the site does not send it
WITHHELD = "withheld"

PART_BYTES = 2**26
# Upper bound on a tensor's name, type, shape and offsets in the header of safetensors' format
HEADER_BYTES = 500
# Upper bound on a client's images
MAX_IMAGES = 10**9
# Costs that a client reports, each with its upper bound: a higher value cannot be true
MAX_COSTS = {
    # Thirty years
    "seconds": 1e9,
    # Thirty years of a machine of 1 PFLOP/s
    "flops": 1e24,
    # 100 TB
    "peak_memory_mb": 1e8,
    "images": float(MAX_IMAGES),
    "resent": 1.0,
    # Of the guarantee; 0 for none
    "epsilon": 20.0,
    "delta": 1.0,
}
COST_KEYS = tuple(MAX_COSTS)
# A client with a guarantee, or in a secure sum, sends only these: seconds, FLOPs, memory and counts
# are exact functions of its images
PRIVATE_COST_KEYS = ("resent", "epsilon", "delta")


def pack_acknowledgement(job_id: str, sha256: str = "", rounds: str = "") -> RecordDict:
    """Pack the content of `query.acknowledge`.

    Args:
        sha256: digest of the open payload that the server has stored; "" after the last round of an
            iterative baseline, which has no payload.
        rounds: the identity of an iterative baseline's rounds, which have ended; else "".
    """
    return RecordDict({"job": ConfigRecord({"job": job_id, "sha256": sha256, "rounds": rounds})})


def unpack_acknowledgement(content: RecordDict) -> str:
    """Return the SHA-256 that an acknowledgement names; "" if it names none."""
    return str(content.config_records["job"].get("sha256", ""))


def select_costs(costs: Mapping[str, float], is_masked: bool = False) -> dict[str, float]:
    """Select the costs that a client sends from all that it measured.

    Args:
        is_masked: whether its payload is a summand of a secure sum.
    """
    keys = PRIVATE_COST_KEYS if costs["epsilon"] or is_masked else COST_KEYS
    return {key: costs[key] for key in keys}


def pack_payload(blob: bytes, costs: Mapping[str, float]) -> RecordDict:
    """Pack the reply to `train`.

    The payload travels as arrays because Flower splits those into chunks of 5 MB, but sends a
    config in one piece.
    """
    header = ConfigRecord({"version": wire.VERSION, "sha256": wire.digest(blob)})
    return RecordDict(
        {
            "payload": pack_bytes(blob, "osfl.payload.v1"),
            "header": header,
            "costs": MetricRecord({**costs}),
        }
    )


def unpack_payload(
    content: RecordDict, expected: wire.Expected, overhead: int = 0
) -> tuple[bytes, str, dict[str, float]]:
    """Return the encoded payload, the SHA-256 that its header states, and the costs.

    The payload is removed from `content`, so that a large one is in memory only once.

    Args:
        overhead: bytes that sealing adds to a payload; 0 for an open one.

    Raises:
        wire.PayloadError: a part is missing or of the wrong type, a cost cannot be true, or the
            payload is too large (which is checked before it is copied).
    """
    client = expected.client
    try:
        arrays = content.array_records
        wire.check_size(size_of(arrays["payload"]) - overhead, expected)
        blob = unpack_bytes(arrays["payload"])
        sha256 = content.config_records["header"]["sha256"]
        figures = cast(Mapping[str, float], content.metric_records["costs"])
        is_private = figures["epsilon"] or expected.masked
        needed = PRIVATE_COST_KEYS if is_private else COST_KEYS
        costs = {key: float(figures[key]) for key in COST_KEYS if key in needed or key in figures}
        # Deletes it from `content` too; the reverse would leave it in `arrays`
        del arrays["payload"]
    except wire.PayloadError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise wire.PayloadError(
            client, "reply", f"{error} is missing or of the wrong type"
        ) from None
    if not isinstance(sha256, str):
        raise wire.PayloadError(client, "reply", "sha256 has the wrong type")
    try:
        check_costs(costs)
    except ValueError as error:
        raise wire.PayloadError(client, "costs", str(error)) from None
    return blob, sha256, costs


def check_costs(costs: Mapping[str, float]) -> None:
    """Check that the costs which a client reports, all or some of them, can be true.

    Raises:
        ValueError: one cannot; the message names it.
    """
    for key, value in costs.items():
        # Also refuses NaN
        if not 0 <= value <= MAX_COSTS[key]:
            raise ValueError(f"{key} = {value:g} cannot be true; expected 0 to {MAX_COSTS[key]:g}")
        if key == "images" and value != int(value):
            raise ValueError(f"{key} = {value:g}: must be a whole number")


@dataclass(frozen=True)
class SentModel:
    """A global model as it is sent to a client.

    Attributes:
        state: the state dict.
        architecture, small_stem: the classifier that the state dict belongs to.
        job: id of the run.
        name: name of the model within the run.
        personalizes: whether the client personalizes the model before it tests it.
    """

    state: dict[str, torch.Tensor]
    architecture: str
    small_stem: bool
    job: str
    name: str
    personalizes: bool = False


def pack_model(model: SentModel) -> RecordDict:
    """Pack a global model for `evaluate`."""
    header = ConfigRecord(
        {
            "architecture": model.architecture,
            "small-stem": model.small_stem,
            "job": model.job,
            "name": model.name,
            "adapts": model.personalizes,
        }
    )
    return RecordDict({"model": pack_state(model.state), "header": header})


def unpack_model(content: RecordDict) -> SentModel:
    """Unpack a model of `pack_model`.

    Raises:
        ValueError: the content is not such a model, or its names are not safe as file names.
    """
    header = content.config_records["header"]
    job = str(header["job"])
    name = str(header["name"])
    for key, identifier in (("job", job), ("name", name)):
        if not is_identifier(identifier):
            raise ValueError(f"the model's {key} {identifier[:80]!r}: {IDENTIFIER_RULE}")
    return SentModel(
        unpack_state(content.array_records["model"]),
        str(header["architecture"]),
        bool(header["small-stem"]),
        job,
        name,
        bool(header["adapts"]),
    )


@dataclass(frozen=True)
class LocalTest:
    """A client's test of the model that it trained alone, beside the global model.

    Attributes:
        confusion: the local model's counts of [true class, predicted class].
        pairs: the number of test images that both models classify correctly, the global model
            alone, the local model alone, and neither.
    """

    confusion: list[list[int]]
    pairs: tuple[int, ...]


def pack_local_test(test: LocalTest, seconds: float) -> RecordDict:
    """Pack the reply to `evaluate` with a local-only baseline."""
    cells = [cell for row in test.confusion for cell in row]
    pairs = list(test.pairs)
    metrics = MetricRecord({"seconds": seconds, "confusion": cells, "pairs": pairs})
    return RecordDict({"metrics": metrics})


def pack_figures(figures: Figures) -> RecordDict:
    """Pack the reply to `query.advise`: the shares that the client has."""
    shares = {name: share for name, share in vars(figures).items() if share is not None}
    return RecordDict({"metrics": MetricRecord(dict(shares))})


def unpack_figures(content: RecordDict) -> Figures | None:
    """Unpack the reply to `query.advise`; None if the site withholds its figures.

    Raises:
        ValueError: a figure is not a share, or has an unknown name.
    """
    metrics = content.metric_records["metrics"]
    if WITHHELD in metrics:
        return None
    names = [field.name for field in fields(Figures)]
    for name, share in metrics.items():
        if name not in names:
            raise ValueError(f"its figure {name[:80]!r} is unknown; expected {', '.join(names)}")
        # Also refuses NaN
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"its figure {name} must be a share from 0 to 1")
    return Figures(**{name: float(cast(float, share)) for name, share in metrics.items()})


def pack_withheld() -> RecordDict:
    """Pack the reply of a site that withholds its test result: it depends on no image."""
    return RecordDict({"metrics": MetricRecord({"seconds": 0.0, WITHHELD: 1})})


def pack_state(state: dict[str, torch.Tensor]) -> ArrayRecord:
    """Pack a state dict in safetensors' format, as few arrays.

    Flower sends, stores and fetches every array of a record separately, which takes about ten
    milliseconds per array and hop; a ResNet-18 has 122 tensors.
    """
    return pack_bytes(
        save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}),
        "safetensors",
    )


def unpack_state(record: ArrayRecord, tensors: int | None = None) -> dict[str, torch.Tensor]:
    """Unpack a state dict of `pack_state`.

    Nothing is unpickled, and no more memory is allocated than was received.

    Args:
        tensors: the expected number of tensors, which bounds the size of the header: parsing a
            header of many empty tensors takes more than 20 times its bytes. None: no bound, for a
            state dict from the server.

    Raises:
        ValueError: the record is not such a state dict.
    """
    try:
        blob = unpack_bytes(record)
        if tensors is not None and int.from_bytes(blob[:8], "little") > tensors * HEADER_BYTES:
            raise ValueError(f"its header is longer than {tensors} tensors require")
        return load(blob)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its model is not in safetensors' format: {error}") from None


def pack_bytes(blob: bytes, stype: str) -> ArrayRecord:
    """Pack bytes as arrays of at most 64 MB, named 0000, 0001, and so on.

    Flower needs two more copies of an array while it assembles it, so that arrays should be small.
    """
    parts = [blob[start : start + PART_BYTES] for start in range(0, max(len(blob), 1), PART_BYTES)]
    return ArrayRecord(
        {
            f"{number:04d}": Array(dtype="uint8", shape=(len(part),), stype=stype, data=part)
            for number, part in enumerate(parts)
        }
    )


def unpack_bytes(record: ArrayRecord) -> bytes:
    """Unpack the bytes of `pack_bytes`.

    Raises:
        KeyError, TypeError: the record was not made by it.
    """
    return b"".join(record[f"{number:04d}"].data for number in range(len(record)))


def size_of(record: ArrayRecord) -> int:
    """Return the number of bytes that `pack_bytes` was given."""
    return sum(len(part.data) for part in record.values())
