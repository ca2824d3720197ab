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

import io

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

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
    return RecordDict({"model": ArrayRecord(state), "header": header})


def unpack_model(content: RecordDict) -> tuple[dict[str, torch.Tensor], str, bool]:
    """(state dict, architecture, small stem) of `pack_model`; arrays are read without unpickling."""
    header = content.config_records["header"]
    return read_arrays(content.array_records["model"]), str(header["architecture"]), bool(header["small-stem"])


def read_arrays(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """A state dict as it was sent; read without unpickling."""
    return {name: torch.from_numpy(np.load(io.BytesIO(array.data), allow_pickle=False)) for name, array in arrays.items()}
