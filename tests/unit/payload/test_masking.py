"""The masks of secure sums: what cancels, what opens, and what does not."""

import hashlib
import hmac
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from osfl.config import lowest_threshold
from osfl.payload.masking import (
    MaskingError,
    Numbers,
    Roster,
    check_identity,
    combine_shares,
    decrypt_share,
    encrypt_shares,
    expand,
    from_bytes,
    mask_numbers,
    missing_pairs,
    open_sum,
    own_mask,
    pair_key,
    sign_identity,
    to_bytes,
)

COUNT = 40


class Federation:
    """Clients with keys, seeds, random numbers, and their masked numbers and shares."""

    def __init__(self, size: int, job: str = "job", threshold: int = 0, seed: int = 0):
        draw = np.random.default_rng(seed)
        names = [f"client-{index:02d}" for index in range(size)]
        self.private = {name: X25519PrivateKey.from_private_bytes(draw.bytes(32)) for name in names}
        keys = {name: key.public_key().public_bytes_raw() for name, key in self.private.items()}
        self.roster = Roster(job, threshold or lowest_threshold(size), "layout", keys)
        self.roster.check()
        self.seeds = {name: draw.bytes(16) for name in names}
        self.numbers = {name: draw.integers(0, 2**32, COUNT, dtype=np.uint32) for name in names}
        self.masked = {name: self.mask(name) for name in names}
        self.shares = {
            name: encrypt_shares(self.private[name], self.roster, name, self.seeds[name])
            for name in names
        }

    def mask(self, name: str) -> Numbers:
        return mask_numbers(
            self.numbers[name], self.private[name], self.roster, name, self.seeds[name]
        )

    def seed_of(self, name: str, revealing: Iterable[str]) -> bytes:
        """Return b_u from the shares that these clients decrypt."""
        shares = {
            client: decrypt_share(
                self.private[client], self.roster, client, name, self.share_for(client, name)
            )
            for client in revealing
        }
        return combine_shares(self.roster, shares)

    def share_for(self, client: str, sender: str) -> bytes:
        return self.shares[sender][self.roster.members.index(client)]

    def open(self, delivered: list[str], revealing: list[str]) -> Numbers:
        seeds = {name: self.seed_of(name, revealing) for name in delivered}
        pairs = {
            (u, v): pair_key(self.private[u], self.roster, u, v)
            for u, v in missing_pairs(self.roster, delivered)
        }
        masked = {name: self.masked[name] for name in delivered}
        return open_sum(masked, self.roster, seeds, pairs)


def total(federation: Federation, names: Iterable[str]) -> Numbers:
    """Return the sum modulo 2^32 in Python's whole numbers."""
    columns = zip(*(federation.numbers[name].tolist() for name in names), strict=True)
    return np.array([sum(column) % 2**32 for column in columns], dtype=np.uint32)


@pytest.mark.parametrize("size", [3, 4, 6, 11])
def test_the_sum_is_exact_whoever_drops_out(size: int) -> None:
    federation = Federation(size)
    members = list(federation.roster.members)
    threshold = federation.roster.threshold
    for absent in range(size - threshold + 1):
        # The first or the last members are absent before they deliver
        for delivered in (members[absent:], members[: size - absent]):
            # Others vanish before they reveal: only as many as must reveal shares
            for revealing in (delivered[:threshold], delivered[-threshold:]):
                result = federation.open(delivered, revealing)
                assert np.array_equal(result, total(federation, delivered))


@pytest.mark.slow
def test_the_sum_of_fifty_is_exact() -> None:
    federation = Federation(50)
    delivered = list(federation.roster.members)[: federation.roster.threshold]
    result = federation.open(delivered, delivered)
    assert np.array_equal(result, total(federation, delivered))


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for 32 bytes of SHA-256."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\1", hashlib.sha256)


def stream(key: bytes, count: int) -> list[int]:
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    content = cipher.update(bytes(4 * count))
    return [int.from_bytes(content[at : at + 4], "little") for at in range(0, 4 * count, 4)]


def test_masked_numbers_follow_the_papers_equation() -> None:
    federation = Federation(3)
    salt = federation.roster.digest
    first, middle, last = federation.roster.members

    def shared(other: str) -> list[int]:
        public = X25519PublicKey.from_public_bytes(federation.roster.keys[other])
        names = "\n".join(sorted((middle, other)))
        info = f"osfl secure sum 1\nmask\n{names}".encode()
        return stream(hkdf(federation.private[middle].exchange(public), salt, info), COUNT + 1)

    info = f"osfl secure sum 1\nown\n{middle}".encode()
    self_mask = stream(hkdf(federation.seeds[middle], salt, info), COUNT + 1)
    factors = stream(hkdf(b"", salt, b"osfl secure sum 1\nchecksum"), COUNT)
    x = federation.numbers[middle].tolist()
    x.append(sum((a | 1) * value for a, value in zip(factors, x, strict=True)))
    # y_u = x_u + PRG(b_u) + the mask with the later client - the mask with the earlier one
    later, earlier = shared(last), shared(first)
    expected = [(x[k] + self_mask[k] + later[k] - earlier[k]) % 2**32 for k in range(COUNT + 1)]
    assert federation.masked[middle].tolist() == expected


def test_the_key_stream_is_chacha20() -> None:
    # RFC 8439, appendix A.1, test vector 1
    expected = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert to_bytes(expand(bytes(32), 8)) == expected
    assert np.array_equal(from_bytes(expected), expand(bytes(32), 8))


def test_a_payload_stays_masked_without_one_of_its_masks() -> None:
    """Each mask alone hides the numbers: the own one, and that with any single other client."""
    federation = Federation(4)
    name = federation.roster.members[0]
    peers = federation.roster.members[1:]
    count = COUNT + 1
    self_mask = own_mask(federation.roster, name, federation.seeds[name], count)
    keys = {
        peer: pair_key(federation.private[name], federation.roster, name, peer) for peer in peers
    }
    without_own = federation.masked[name].copy()
    for key in keys.values():
        without_own -= expand(key, count)
    remainders = [without_own]
    for hidden in peers:
        remainder = federation.masked[name] - self_mask
        for peer in peers:
            if peer != hidden:
                remainder = remainder - expand(keys[peer], count)
        remainders.append(remainder)
    for remainder in remainders:
        assert not (remainder[:-1] == federation.numbers[name]).any()


def test_fewer_shares_than_the_threshold_do_not_open() -> None:
    federation = Federation(6)
    name, threshold = federation.roster.members[0], federation.roster.threshold
    with pytest.raises(MaskingError, match=f"{threshold - 1} shares; {threshold} are required"):
        federation.seed_of(name, federation.roster.members[: threshold - 1])
    # Nor does the polynomial of a lower degree that they would determine
    lower = Federation(6, threshold=threshold)
    object.__setattr__(lower.roster, "threshold", threshold - 1)
    shares = {
        client: decrypt_share(
            federation.private[client],
            federation.roster,
            client,
            name,
            federation.share_for(client, name),
        )
        for client in federation.roster.members[: threshold - 1]
    }
    assert combine_shares(lower.roster, shares) != federation.seeds[name]


def test_masks_that_do_not_cancel_are_noticed() -> None:
    federation = Federation(4)
    members = list(federation.roster.members)
    deviant = members[1]
    federation.masked[deviant] = federation.masked[deviant] + np.uint32(1)
    with pytest.raises(MaskingError, match="does not have its checksum"):
        federation.open(members, members)


def test_a_mask_of_another_job_or_of_other_members_does_not_fit() -> None:
    """A replayed payload breaks the sum."""
    members = list(Federation(4).roster.members)
    for other_federation in (Federation(4, job="other"), Federation(5)):
        federation = Federation(4)
        federation.masked[members[2]] = other_federation.masked[members[2]]
        with pytest.raises(MaskingError, match="does not have its checksum"):
            federation.open(members, members)


def test_a_share_opens_for_its_receiver_alone() -> None:
    federation = Federation(4)
    first, second, third, _ = federation.roster.members
    share = federation.share_for(second, first)
    for client, sender in ((third, first), (second, third)):
        with pytest.raises(MaskingError, match=f"the share from {sender} cannot be opened"):
            decrypt_share(federation.private[client], federation.roster, client, sender, share)
    # Both directions of a pair have keys of their own, or one key would encrypt two shares
    with pytest.raises(MaskingError, match=f"the share from {second} cannot be opened"):
        decrypt_share(federation.private[first], federation.roster, first, second, share)


def test_a_roster_must_be_safe() -> None:
    roster = Federation(4).roster

    def changed(keys: dict[str, bytes], threshold: int = 3) -> Roster:
        return Roster(roster.job, threshold, roster.settings, keys)

    keys = dict(roster.keys)
    first, second = list(keys)[:2]
    reversed_keys = dict(reversed(keys.items()))
    for wrong in ({**keys, second: keys[first]}, reversed_keys):
        with pytest.raises(MaskingError, match="must be sorted, with a key each"):
            changed(wrong).check()
    # A point of low order, with which every secret is zero
    for no_key in (b"short", bytes(32)):
        with pytest.raises(MaskingError, match=f"the key of {second} .* is not a public key"):
            changed({**keys, second: no_key}).check()
    with pytest.raises(MaskingError, match="min-clients = 2: a secure sum of 4 clients requires"):
        changed(keys, threshold=2).check()
    low_order = changed({**keys, second: bytes(32)})
    with pytest.raises(MaskingError, match=f"the key of {second} .* is not a public key"):
        pair_key(X25519PrivateKey.generate(), low_order, first, second)


@pytest.mark.parametrize("members", range(2, 60))
def test_the_lowest_threshold_leaves_two_clients_unopened(members: int) -> None:
    threshold = lowest_threshold(members)
    assert (
        Roster("job", threshold, "", dict.fromkeys(map(str, range(members)), b"")).smallest_sum >= 2
    )
    assert threshold == 2 or 2 * (threshold - 1) - members < 2


def test_rosters_differ_by_every_part() -> None:
    roster = Federation(3).roster
    keys = dict(roster.keys)
    first = next(iter(keys))
    variants = [
        roster,
        Roster("other", roster.threshold, roster.settings, keys),
        Roster(roster.job, roster.threshold - 1, roster.settings, keys),
        Roster(roster.job, roster.threshold, "other", keys),
        Roster(roster.job, roster.threshold, roster.settings, {**keys, first: bytes(32)}),
        Roster(roster.job, roster.threshold, roster.settings, {**keys, "d": bytes(32)}),
    ]
    digests = sorted(variant.digest for variant in variants)
    assert all(digest != next_digest for digest, next_digest in pairwise(digests))


def test_a_signature_holds_for_one_site_job_and_key() -> None:
    federation = Federation(3)
    first, second, _ = federation.roster.members
    site = Ed25519PrivateKey.generate()
    key = federation.roster.keys[first]
    signature = sign_identity(site, "job", first, key)
    check_identity(federation.roster, first, signature, site.public_key())
    other_key = federation.roster.keys[second]
    wrong = [
        (first, sign_identity(site, "other", first, key)),
        (first, sign_identity(site, "job", second, key)),
        (first, sign_identity(site, "job", first, other_key)),
        (first, b""),
        (second, signature),
    ]
    for client, wrong_signature in wrong:
        with pytest.raises(MaskingError, match=f"the key of {client} .* is not signed"):
            check_identity(federation.roster, client, wrong_signature, site.public_key())
