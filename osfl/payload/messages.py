"""What server and clients say to each other: message types, headers, and the model on its way back.

What a message asks with, and what its reply says:

- `query.join`: digests of the kit's weights, and the key that payloads are sealed to; client id,
  installed version, architecture, and the number of its training images where the method weights by
  it and the client gives no guarantee.
- `train`: job id, and that key; payload (as bytes), header, costs.
- `query.acknowledge`: job id, and the SHA-256 of the open payload that the server has stored, whose
  copy at the client can go, or the identity of the rounds that have ended; nothing.
- `evaluate`: global model, its architecture and name, job id, whether the client adapts it first;
  confusion matrix, seconds; or that the site withholds the former.
- `train`, of a method with rounds: model, its architecture, round, job id, identity of the rounds;
  trained model, number of images, costs.

Everything else that a client needs is in the run-config, which Flower gives to both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save

from osfl.config import is_identifier
from osfl.payload import wire

JOIN = "query.join"
ACKNOWLEDGE = "query.acknowledge"
# In a reply to `evaluate`, in place of the confusion matrix that its site does not tell
WITHHELD = "withheld"

PART_BYTES = 2**26
HEADER_BYTES = 500  # of a tensor's name, type, shape and place in safetensors' format, at most
MOST_IMAGES = 10**9  # of a client
# What a client says of its work, and the most that can be true: what it says goes into tables
COSTS = {
    "seconds": 1e9,  # thirty years
    "flops": 1e24,  # thirty years of a machine of 1 PFLOP/s
    "peak_memory_mb": 1e8,  # 100 TB
    "images": float(MOST_IMAGES),
    "resent": 1.0,
    "epsilon": 20.0,  # of its guarantee; 0: none
    "delta": 1.0,
}
COST_KEYS = tuple(COSTS)
# With a guarantee nothing else is sent: seconds, FLOPs, memory and counts are exact functions of
# the images
PRIVATE_COST_KEYS = ("resent", "epsilon", "delta")


def pack_acknowledgement(job_id: str, sha256: str = "", rounds: str = "") -> RecordDict:
    """The content of `query.acknowledge`.

    Args:
        sha256: of the open payload that the server has stored; "" after the last round of a method
            with rounds, which has none.
        rounds: the identity of the rounds that have ended; "" of a method without.
    """
    return RecordDict({"job": ConfigRecord({"job": job_id, "sha256": sha256, "rounds": rounds})})


def acknowledged_digest(content: RecordDict) -> str:
    """Return the SHA-256 that an acknowledgement names; "" if it names none."""
    return str(content.config_records["job"].get("sha256", ""))


def sent_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Return the costs that a client sends, of all that it measured."""
    keys = PRIVATE_COST_KEYS if costs["epsilon"] else COST_KEYS
    return {key: costs[key] for key in keys}


def pack_payload(blob: bytes, costs: Mapping[str, float]) -> RecordDict:
    """The reply to `train`.

    The payload goes as arrays: Flower sends those in chunks of 5 MB, a config as one piece.
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
    """(payload, sha256 of the header, costs); the payload is not decoded yet.

    It is taken out of `content`: a large one is held once.

    Args:
        overhead: bytes that it has beyond a payload, where it is sealed.

    Raises:
        wire.PayloadError: a part is missing or of the wrong type, or the payload is too large
            (before it is copied).
    """
    client = expected.client
    try:
        arrays = content.array_records
        wire.check_size(size_of(arrays["payload"]) - overhead, expected)
        blob = unpack_bytes(arrays["payload"])
        sha256 = content.config_records["header"]["sha256"]
        figures = cast(Mapping[str, float], content.metric_records["costs"])
        needed = PRIVATE_COST_KEYS if figures["epsilon"] else COST_KEYS
        costs = {key: float(figures[key]) for key in COST_KEYS if key in needed or key in figures}
        del arrays["payload"]  # and with it the one in `content`, not the other way round
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
    """Whether what a client says of its work, or a part of it, can be true.

    Raises:
        ValueError: a figure that is not; names it.
    """
    for key, value in costs.items():
        if not 0 <= value <= COSTS[key]:  # NaN is not, either
            raise ValueError(f"{key} = {value:g} cannot be true; expected 0 to {COSTS[key]:g}")
        if key == "images" and value != int(value):
            raise ValueError(f"{key} = {value:g} is no number of images")


@dataclass(frozen=True)
class SentModel:
    """A global model, as a client gets it.

    Attributes:
        state: its numbers.
        architecture, small_stem: what they are of.
        job, name: of the run, and of the model in it.
        adapts: whether the client is to adapt it before it tests it.
    """

    state: dict[str, torch.Tensor]
    architecture: str
    small_stem: bool
    job: str
    name: str
    adapts: bool = False


def pack_model(model: SentModel) -> RecordDict:
    """A global model for `evaluate`."""
    header = ConfigRecord(
        {
            "architecture": model.architecture,
            "small-stem": model.small_stem,
            "job": model.job,
            "name": model.name,
            "adapts": model.adapts,
        }
    )
    return RecordDict({"model": pack_state(model.state), "header": header})


def unpack_model(content: RecordDict) -> SentModel:
    """What `pack_model` packed.

    Raises:
        ValueError: it is something else, or its names could be no file's.
    """
    header = content.config_records["header"]
    job = str(header["job"])
    name = str(header["name"])
    for key, one in (("job", job), ("name", name)):
        if not is_identifier(one):
            raise ValueError(
                f"the model's {key} {one[:80]!r}: must be 1 to 64 letters, digits, '-' or '_'"
            )
    return SentModel(
        unpack_state(content.array_records["model"]),
        str(header["architecture"]),
        bool(header["small-stem"]),
        job,
        name,
        bool(header["adapts"]),
    )


def pack_state(state: dict[str, torch.Tensor]) -> ArrayRecord:
    """A state dict in safetensors' format.

    Flower sends, stores and fetches every array of a record by itself, and each costs it some ten
    milliseconds on every hop: a ResNet-18 has 122.
    """
    return pack_bytes(
        save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}),
        "safetensors",
    )


def unpack_state(record: ArrayRecord, tensors: int | None = None) -> dict[str, torch.Tensor]:
    """The state dict of `pack_state`; nothing is unpickled, and no more is allocated than came.

    Args:
        tensors: how many it should have; None: it is from the server. A header of empty ones
            would cost more than 20 times its bytes.

    Raises:
        ValueError: it is something else.
    """
    try:
        blob = unpack_bytes(record)
        if tensors is not None and int.from_bytes(blob[:8], "little") > tensors * HEADER_BYTES:
            raise ValueError(f"its header is longer than {tensors} tensors need")
        return load(blob)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its model is not in safetensors' format: {error}") from None


def pack_bytes(blob: bytes, stype: str) -> ArrayRecord:
    """Bytes as arrays of at most 64 MB, named 0000, 0001, ....

    While Flower puts an array together it holds it twice more.
    """
    parts = [blob[start : start + PART_BYTES] for start in range(0, max(len(blob), 1), PART_BYTES)]
    return ArrayRecord(
        {
            f"{n:04d}": Array(dtype="uint8", shape=(len(p),), stype=stype, data=p)
            for n, p in enumerate(parts)
        }
    )


def unpack_bytes(record: ArrayRecord) -> bytes:
    """The bytes of `pack_bytes`.

    Raises:
        KeyError, TypeError: it is something else.
    """
    return b"".join(record[f"{number:04d}"].data for number in range(len(record)))


def size_of(record: ArrayRecord) -> int:
    """How many bytes `pack_bytes` was given."""
    return sum(len(part.data) for part in record.values())
