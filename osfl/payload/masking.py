"""Masks of a secure sum: the server learns the sum of the clients' numbers, and none of them.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
section 4. Numbers x_u of client u are integers modulo 2^32. From a mask of its own, b_u, and a
mask s_uv that it shares with each other client v, it sends

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)    (mod 2^32)

The shared masks cancel in the sum over all clients. Once the server has said whose y_u arrived,
these clients reveal for each client v either s_uv (v did not deliver) or a share of b_v (it did),
and never both.

Differences from the paper:

1. Theirs: clients exchange shares of b_u, and of the key behind s_uv, before the masked numbers,
   in a message of their own. Ours: shares of b_u come with y_u. If v did not deliver, each other
   client reveals the key of s_uv itself, so a single message asks a client for its payload. A
   client that delivered and then does not reveal its s_uv counts as one that did not deliver.
2. Theirs: keys in a Diffie-Hellman group, and a pseudorandom generator in counter mode. Ours:
   X25519, HKDF-SHA256 and ChaCha20. The roster's digest salts every key, so another job or other
   members have other masks.
3. Theirs: none. Ours: a checksum behind the numbers, linear modulo 2^32. The sum of the checksums
   must be the checksum of the sum; masks that do not cancel break this.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from osfl.config import lowest_threshold

KEY_BYTES = 32
# Length of b_u, and of each share of it
SEED_BYTES = 16
# Length of an encrypted share, with its authentication tag
SHARE_BYTES = SEED_BYTES + 16
# Every key encrypts a single share
_NONCE = bytes(12)
Numbers = npt.NDArray[np.uint32]


class MaskingError(ValueError):
    """Keys, shares or masks that do not fit together; the message says which."""


@dataclass(frozen=True)
class Roster:
    """The members of a secure sum, which all of them must see alike.

    Attributes:
        job: the job's id.
        threshold: t, the number of members without which nothing is opened.
        settings: the layout and precision of the numbers, as text.
        keys: every member's public X25519 key (32 bytes), by client, sorted.
    """

    job: str
    threshold: int
    settings: str
    keys: Mapping[str, bytes]

    @property
    def members(self) -> tuple[str, ...]:
        """Return the clients in the roster's order."""
        return tuple(self.keys)

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of all that defines the sum."""
        keys = [[client, key.hex()] for client, key in self.keys.items()]
        text = json.dumps(["osfl secure sum 1", self.job, self.threshold, self.settings, keys])
        return hashlib.sha256(text.encode()).digest()

    @property
    def smallest_sum(self) -> int:
        """Return the fewest members whose sum a server can open (`lowest_threshold`): 2 t - m.

        It is t if the server names the same absent members to all.
        """
        return 2 * self.threshold - len(self.keys)

    def check(self) -> None:
        """Check that no single client's numbers can be opened by these rules.

        Raises:
            MaskingError: the members are unsorted, or share a key; a key is not a public key; or
                the threshold is too low, or above the number of members.
        """
        if list(self.keys) != sorted(set(self.keys)) or len(set(self.keys.values())) < len(
            self.keys
        ):
            raise MaskingError("the members of the secure sum must be sorted, with a key each")
        for member, key in self.keys.items():
            if not is_public_key(key):
                raise MaskingError(f"the key of {member} in this secure sum is not a public key")
        if not lowest_threshold(len(self.keys)) <= self.threshold <= len(self.keys):
            raise MaskingError(
                f"min-clients = {self.threshold}: a secure sum of {len(self.keys)} clients "
                f"requires at least {lowest_threshold(len(self.keys))}"
            )


# ---- Keys ----


def is_public_key(key: bytes) -> bool:
    """Return whether bytes are an X25519 key from which a secret can be derived.

    With a point of low order the secret would be zero, and the exchange fails.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def identity_statement(job: str, client: str, key: bytes) -> bytes:
    """Return the bytes that a site signs with its long-lived key: its public key of one job."""
    return f"osfl secure sum key 1\n{job}\n{client}\n{key.hex()}".encode()


def check_identity(
    roster: Roster, client: str, signature: bytes, identity: Ed25519PublicKey
) -> None:
    """Check a member's signature of its key.

    Raises:
        MaskingError: it is not this site's signature of its key of this job.
    """
    try:
        identity.verify(signature, identity_statement(roster.job, client, roster.keys[client]))
    except InvalidSignature:
        raise MaskingError(
            f"the key of {client} in this secure sum is not signed by the key that this site has "
            "for it (node-config secure-sum-peers)"
        ) from None


def sign_identity(identity: Ed25519PrivateKey, job: str, client: str, key: bytes) -> bytes:
    """Return a site's signature of its key of one job, 64 bytes."""
    return identity.sign(identity_statement(job, client, key))


def pair_key(private: X25519PrivateKey, roster: Roster, client: str, other: str) -> bytes:
    """Return the key of s_uv, 32 bytes, which both clients derive alike.

    Raises:
        MaskingError: the other's public key is not one.
    """
    first, second = sorted((client, other))
    return _agree_on_key(private, roster, other, f"mask\n{first}\n{second}")


def _agree_on_key(private: X25519PrivateKey, roster: Roster, other: str, purpose: str) -> bytes:
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(roster.keys[other]))
    except ValueError:
        raise MaskingError(f"the key of {other} in this secure sum is not a public key") from None
    return _derive_key(secret, roster, purpose)


def _derive_key(secret: bytes, roster: Roster, purpose: str) -> bytes:
    info = f"osfl secure sum 1\n{purpose}".encode()
    return HKDF(SHA256(), KEY_BYTES, roster.digest, info).derive(secret)


# ---- Shares of b_u ----


def encrypt_shares(
    private: X25519PrivateKey, roster: Roster, client: str, seed: bytes
) -> list[bytes]:
    """Split b_u among all members (Shamir); return a share encrypted to each, in their order."""
    shares = Shamir.split(roster.threshold, len(roster.keys), seed, False)
    return [
        ChaCha20Poly1305(_share_key(private, roster, client, member, client)).encrypt(
            _NONCE, share, None
        )
        for member, (_, share) in zip(roster.members, shares, strict=True)
    ]


def decrypt_share(
    private: X25519PrivateKey, roster: Roster, client: str, sender: str, encrypted: bytes
) -> bytes:
    """Return this client's share of a sender's b_u, 16 bytes.

    Raises:
        MaskingError: it is not the sender's share for this client.
    """
    key = _share_key(private, roster, client, sender, sender)
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, encrypted, None)
    except InvalidTag:
        raise MaskingError(f"the share from {sender} cannot be opened") from None


def _share_key(
    private: X25519PrivateKey, roster: Roster, client: str, other: str, sender: str
) -> bytes:
    receiver = other if sender == client else client
    return _agree_on_key(private, roster, other, f"share\n{sender}\n{receiver}")


def combine_shares(roster: Roster, shares: Mapping[str, bytes]) -> bytes:
    """Return b_u from the shares of at least t members.

    Raises:
        MaskingError: there are fewer.
    """
    if len(shares) < roster.threshold:
        raise MaskingError(f"{len(shares)} shares; {roster.threshold} are required")
    index = {member: number for number, member in enumerate(roster.members, 1)}
    chosen = [(index[member], shares[member]) for member in sorted(shares)[: roster.threshold]]
    return bytes(Shamir.combine(chosen, False))


# ---- Masks ----


def expand(key: bytes, count: int) -> Numbers:
    """Return PRG(key): numbers modulo 2^32 from ChaCha20's key stream."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4").astype(np.uint32)


def own_mask(roster: Roster, client: str, seed: bytes, count: int) -> Numbers:
    """Return PRG(b_u)."""
    return expand(_derive_key(seed, roster, f"own\n{client}"), count)


def pair_mask(key: bytes, client: str, other: str, count: int) -> Numbers:
    """Return the term of s_uv in y_u: PRG(s_uv) if u < v, else its negative."""
    mask = expand(key, count)
    return mask if client < other else np.negative(mask)


def mask_numbers(
    numbers: Numbers, private: X25519PrivateKey, roster: Roster, client: str, seed: bytes
) -> Numbers:
    """Return y_u of x_u and its checksum (round 2 of the protocol)."""
    masked = with_checksum(numbers, roster)
    count = len(masked)
    masked += own_mask(roster, client, seed, count)
    for other in roster.members:
        if other != client:
            masked += pair_mask(pair_key(private, roster, client, other), client, other, count)
    return masked


def open_sum(
    masked: Mapping[str, Numbers],
    roster: Roster,
    seeds: Mapping[str, bytes],
    pair_keys: Mapping[tuple[str, str], bytes],
) -> Numbers:
    """Return the sum of x_u over the clients that delivered (round 4 of the protocol).

    Args:
        masked: y_u by client.
        seeds: b_u of the same clients.
        pair_keys: the keys of s_uv by (u, v), for every u that delivered and v that did not.

    Raises:
        MaskingError: the sum does not have its checksum.
    """
    count = len(next(iter(masked.values())))
    total = np.zeros(count, dtype=np.uint32)
    for client, numbers in masked.items():
        total += numbers
        total -= own_mask(roster, client, seeds[client], count)
    for (client, other), key in pair_keys.items():
        total -= pair_mask(key, client, other, count)
    numbers = total[:-1]
    if not np.array_equal(with_checksum(numbers, roster), total):
        raise MaskingError(
            "the secure sum does not have its checksum: some client's masks do not fit the others'"
        )
    return numbers


def with_checksum(numbers: Numbers, roster: Roster) -> Numbers:
    """Return the numbers and behind them their checksum, the sum of a_k x_k with odd a_k."""
    factors = expand(_derive_key(b"", roster, "checksum"), len(numbers)) | np.uint32(1)
    checksum = np.sum(factors * numbers, dtype=np.uint32)
    return np.append(numbers, checksum)


def missing_pairs(roster: Roster, delivered: Iterable[str]) -> list[tuple[str, str]]:
    """Return (u, v) for every client u that delivered and v that did not."""
    present = sorted(delivered)
    absent = [member for member in roster.members if member not in present]
    return [(client, other) for client in present for other in absent]


def to_bytes(numbers: Numbers) -> bytes:
    """Return numbers as bytes, four each, little-endian."""
    return numbers.astype("<u4").tobytes()


def from_bytes(content: bytes | Sequence[int]) -> Numbers:
    """Return the numbers of `to_bytes`."""
    return np.frombuffer(bytes(content), dtype="<u4").astype(np.uint32)
