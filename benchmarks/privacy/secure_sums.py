"""Measure secure sums: bytes of a message, and CPU-seconds to mask and to open.

python -m benchmarks.privacy.secure_sums

The numbers are those of FedCGS with a ResNet-18 and ten classes. Random numbers take as long.
"""

import os
import time

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks.harness import Experiment, Line, command_line
from osfl.config import lowest_threshold
from osfl.payload import wire
from osfl.payload.kinds import FeatureStatistics, Masked
from osfl.payload.masking import (
    SHARE_BYTES,
    Numbers,
    Roster,
    combine_shares,
    decrypt_share,
    encrypt_shares,
    mask_numbers,
    missing_pairs,
    open_sum,
    pair_key,
    to_bytes,
)
from osfl.payload.summands import Layout, to_summands

SIZES = (3, 6, 12, 25, 50)
WIDTH = 512
CLASSES = tuple(f"class-{label}" for label in range(10))
EXPERIMENT = Experiment(
    __file__,
    caption="FedCGS's statistics of a ResNet-18 and ten classes in a secure sum of N clients. "
    "Bytes: of a client's message, and divided by those of the open payload. Mask: CPU-seconds in "
    "which a client masks its numbers and shares its own mask. Open: CPU-seconds in which the "
    "server opens the sum if all deliver, and if as many drop out as may. Revealed: bytes that "
    "another client then reveals in all. The sum is that of the whole numbers, bit for bit.",
)


def example_payload() -> FeatureStatistics:
    """Return statistics of 100 images."""
    draw = torch.Generator().manual_seed(0)
    sums = torch.rand(len(CLASSES), WIDTH, generator=draw)
    triangle = torch.rand(WIDTH * (WIDTH + 1) // 2, generator=draw)
    return FeatureStatistics(CLASSES, torch.full((len(CLASSES),), 10), 10 * sums, 100 * triangle)


def measure(size: int) -> Line:
    """Measure a sum of this many clients.

    Raises:
        RuntimeError: the sum is not exact.
    """
    payload = example_payload()
    tensors = to_summands(payload, CLASSES, [], 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    numbers = Layout(shapes, size, 10_000, 32.0).quantize(tensors)
    private = {f"client-{index:02d}": X25519PrivateKey.generate() for index in range(size)}
    keys = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    roster = Roster("job", lowest_threshold(size), "", keys)
    seeds = {name: os.urandom(16) for name in private}
    first, *_ = private
    start = time.process_time()
    mask_numbers(numbers, private[first], roster, first, seeds[first])
    encrypted = encrypt_shares(private[first], roster, first, seeds[first])
    masking = time.process_time() - start
    masked = {
        name: mask_numbers(numbers, key, roster, name, seeds[name]) for name, key in private.items()
    }
    shares = {name: encrypt_shares(private[name], roster, name, seeds[name]) for name in private}
    opening = []
    for delivered in (list(private), list(private)[: roster.threshold]):
        revealed = _revealed(roster, private, shares, delivered)
        pairs = {
            (name, peer): pair_key(private[name], roster, name, peer)
            for name, peer in missing_pairs(roster, delivered)
        }
        start = time.process_time()
        opened = {name: combine_shares(roster, revealed[name]) for name in delivered}
        total = open_sum({name: masked[name] for name in delivered}, roster, opened, pairs)
        opening.append(time.process_time() - start)
        _check(total, numbers, len(delivered))
    plain = len(wire.encode(payload, "fedcgs", "job", first))
    sent = _message_bytes(masked[first], encrypted, roster)
    absent = size - roster.threshold
    return {
        "N": size,
        "may drop out": absent,
        "bytes": f"{sent:,}",
        "of open": f"{sent / plain:.3f}",
        "mask, s": f"{masking:.2f}",
        "open, s": f"{opening[0]:.2f}",
        "open after drop-outs, s": f"{opening[1]:.2f}",
        "revealed, bytes": f"{32 * absent + 16 * size:,}",
    }


def _revealed(
    roster: Roster,
    private: dict[str, X25519PrivateKey],
    shares: dict[str, list[bytes]],
    delivered: list[str],
) -> dict[str, dict[str, bytes]]:
    """Return the shares of each client that the others decrypt, as many as are required."""
    revealing = delivered[: roster.threshold]
    place = {name: index for index, name in enumerate(roster.members)}
    result: dict[str, dict[str, bytes]] = {}
    for sender in delivered:
        result[sender] = {
            name: decrypt_share(private[name], roster, name, sender, shares[sender][place[name]])
            for name in revealing
        }
    return result


def _message_bytes(masked: Numbers, shares: list[bytes], roster: Roster) -> int:
    numbers = torch.frombuffer(bytearray(to_bytes(masked)), dtype=torch.uint8)
    rows = torch.frombuffer(bytearray(b"".join(shares)), dtype=torch.uint8)
    message = Masked(CLASSES, roster.digest.hex(), numbers, rows.view(-1, SHARE_BYTES))
    return len(wire.encode(message, "fedcgs", "job", "client-00"))


def _check(total: Numbers, numbers: Numbers, clients: int) -> None:
    if not np.array_equal(total, numbers * np.uint32(clients)):
        raise RuntimeError("the opened sum is not the sum of the numbers")


def main() -> None:
    """Measure each number of clients, and write the table."""
    command_line(__doc__).parse_args()
    lines = []
    for size in SIZES:
        lines.append(measure(size))
        print(lines[-1], flush=True)
    EXPERIMENT.write_all(lines)


if __name__ == "__main__":
    main()
