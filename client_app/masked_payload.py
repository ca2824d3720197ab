"""A client's payload as a summand of a secure sum. Imports torch, as joining must not."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from client_app.errors import PublicConfigError
from client_app.privacy.sum_noise import SumNoise
from client_app.secure_sum import Secrets, record_masked
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import image_labels
from osfl.data.parts import class_names
from osfl.payload import wire
from osfl.payload.kinds import Masked, Payload
from osfl.payload.masking import (
    SHARE_BYTES,
    Numbers,
    Roster,
    encrypt_shares,
    mask_numbers,
    to_bytes,
)
from osfl.payload.summands import NOISY_TENSORS, SummandError, run_layout, to_summands
from osfl.util.files import write_atomically

# The masked payload, kept because the shares in it are random
_FILE = "masked.pb"


def make_masked_payload(
    blob: bytes,
    roster: Roster,
    secrets: Secrets,
    config: RunConfig,
    node: NodeConfig,
    client: str,
    folder: Path,
) -> bytes:
    """Mask a payload, and keep the result: a job has only one.

    Args:
        blob: the encoded payload.
        roster, secrets: from `accept_roster`.
        folder: this client's folder for the job.

    Raises:
        PublicConfigError: a number of the payload exceeds the sum's range, the server's layout of
            the numbers is another, or the clipping bound of the noise is missing.
    """
    classes = class_names(config.data)
    payload = wire.decode_trusted(blob, config.method, classes)
    images = _image_counts(payload, classes, config, node)
    tensors = to_summands(payload, classes, images, len(config.votes.words))
    numbers = _numbers(tensors, roster, config, folder)
    seed = bytes.fromhex(secrets.seed)
    masked = mask_numbers(numbers, secrets.private_key, roster, client, seed)
    shares = b"".join(encrypt_shares(secrets.private_key, roster, client, seed))
    summand = Masked(
        classes,
        roster.digest.hex(),
        _as_tensor(to_bytes(masked)),
        _as_tensor(shares).view(-1, SHARE_BYTES),
    )
    sent = wire.encode(summand, config.method, roster.job, client)
    write_atomically(folder / _FILE, sent)
    record_masked(folder, secrets, roster, wire.digest(sent))
    return sent


def _numbers(
    tensors: Mapping[str, torch.Tensor], roster: Roster, config: RunConfig, folder: Path
) -> Numbers:
    """Return the integers that a client adds; with an epsilon, noisy ones.

    Raises:
        PublicConfigError: as `make_masked_payload`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = run_layout(config, shapes, len(roster.keys))
    if layout.text != roster.settings:
        raise PublicConfigError(
            "secure-sum = true: the server expects other numbers than this client's payload has; "
            "use the same kit and classifier on both"
        )
    try:
        numbers = layout.quantize(tensors)
    except SummandError as error:
        # The error reveals that a number is too large, and nothing else about the images
        raise PublicConfigError(str(error)) from None
    if config.epsilon and any(name in NOISY_TENSORS for name in shapes):
        numbers += _noise(folder).draw(layout, config, roster.smallest_sum)
    return numbers


def _noise(folder: Path) -> SumNoise:
    """Return the noise of the payload in a folder.

    Raises:
        PublicConfigError: its record is missing; nothing may be sent without noise.
    """
    noise = SumNoise.load(folder)
    if noise is None or not noise.limit > 0:
        raise PublicConfigError(
            "secure-sum = true: the clipping bound of this job's payload is missing, so it "
            "cannot get its noise; use another job-id"
        )
    return noise


def stored_masked_payload(secrets: Secrets, folder: Path) -> bytes | None:
    """Return the masked payload of an earlier request; None if there was none.

    Raises:
        PublicConfigError: it is missing or corrupt. Other numbers under the same masks, or other
            shares of them, must not be sent.
    """
    if not secrets.masked:
        return None
    file = folder / _FILE
    sent = file.read_bytes() if file.is_file() else b""
    if wire.digest(sent) != secrets.masked:
        raise PublicConfigError(
            "secure-sum = true: the masked payload of this job is missing or corrupt; use another "
            "job-id"
        )
    return sent


def _image_counts(
    payload: Payload, classes: tuple[str, ...], config: RunConfig, node: NodeConfig
) -> list[int]:
    """Return the number of training images of each of the payload's classes."""
    counts = Counter(image_labels(config.data, node, "train", config.seed))
    return [counts[classes.index(name)] for name in payload.classes]


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
