"""What server and clients say to each other: message types, headers, and the model on its way back.

=====================  ==========================================  ==================================================
message                server -> client                            client -> server
=====================  ==========================================  ==================================================
query.join             digests of the kit's weights                client id, installed version
train                  job id                                      payload (one array of bytes), header, costs
query.acknowledge      job id: stored, forget your copy            nothing
evaluate               global model, its architecture              confusion matrix, seconds
train (with rounds)    global model, round, job id                 trained model, number of images, costs
=====================  ==========================================  ==================================================

Everything else that a client needs is in the run-config, which Flower gives to both sides.
"""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save

from osfl import wire

JOIN = "query.join"
ACKNOWLEDGE = "query.acknowledge"

COST_KEYS = ("seconds", "flops", "peak_memory_mb", "images", "resent")


def pack_payload(blob: bytes, costs: dict[str, float]) -> RecordDict:
    """The reply to `train`. The payload goes as one array: Flower sends arrays in chunks of 5 MB, a config as one piece."""
    array = Array(dtype="uint8", shape=(len(blob),), stype="osfl.payload.v1", data=blob)
    header = ConfigRecord({"version": wire.VERSION, "sha256": wire.digest(blob)})
    return RecordDict({"payload": ArrayRecord({"payload": array}), "header": header, "costs": MetricRecord({**costs})})


def unpack_payload(content: RecordDict, client: str) -> tuple[bytes, str, dict[str, float]]:
    """(payload, sha256 of the header, costs); the payload is not decoded yet. It is taken out of `content`: a large one is held once.

    Raises:
        wire.PayloadError: a part is missing or of the wrong type.
    """
    try:
        blob = content.array_records["payload"]["payload"].data
        sha256 = content.config_records["header"]["sha256"]
        costs = {key: float(content.metric_records["costs"][key]) for key in COST_KEYS}  # type: ignore[arg-type]
        del content["payload"]
    except (KeyError, TypeError, ValueError) as error:
        raise wire.PayloadError(client, "reply", f"{error} is missing or of the wrong type") from None
    if not isinstance(blob, bytes) or not isinstance(sha256, str):
        raise wire.PayloadError(client, "reply", "payload or sha256 has the wrong type")
    if not all(np.isfinite(value) and value >= 0 for value in costs.values()):
        raise wire.PayloadError(client, "costs", f"{costs}: must be finite and not negative")
    return blob, sha256, costs


def pack_model(state: dict[str, torch.Tensor], architecture: str, small_stem: bool) -> RecordDict:
    """A global model for `evaluate`."""
    header = ConfigRecord({"architecture": architecture, "small-stem": small_stem})
    return RecordDict({"model": pack_state(state), "header": header})


def unpack_model(content: RecordDict) -> tuple[dict[str, torch.Tensor], str, bool]:
    """(state dict, architecture, small stem) of `pack_model`."""
    header = content.config_records["header"]
    return unpack_state(content.array_records["model"]), str(header["architecture"]), bool(header["small-stem"])


def pack_state(state: dict[str, torch.Tensor]) -> ArrayRecord:
    """A state dict as one array, in safetensors' format.

    Flower sends, stores and fetches every array of a record by itself, and each costs it some ten milliseconds on every hop: a ResNet-18 has 122.
    """
    blob = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    return ArrayRecord({"state": Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)})


def unpack_state(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """The state dict of `pack_state`; nothing is unpickled, and no more is allocated than came.

    Raises:
        ValueError: it is something else.
    """
    if set(record) != {"state"}:
        raise ValueError("its model must be one array, 'state'")
    try:
        return load(record["state"].data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its model is not in safetensors' format: {error}") from None
