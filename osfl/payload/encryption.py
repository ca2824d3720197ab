"""Payloads that the server alone can read: HPKE (RFC 9180) to a key of the server's.

TLS ends at the SuperLink. Its process, its database and their backups hold what passes through;
of a sealed payload they hold ciphertext. That is against whoever looks on. A SuperLink that is
itself hostile hands out the app's code, and could hand out other code; and it could make a payload
of its own, for HPKE's base mode does not say who one is from.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from flwr.app import ConfigRecord, RecordDict

from osfl.config import ConfigError
from osfl.util.text import plain

if TYPE_CHECKING:
    from pyhpke import CipherSuite

KEY_BYTES = 32  # of a public key, and of the one that a message brings
# What a sealed payload has more than an open one: that key, and the tag
OVERHEAD = KEY_BYTES + 16


class SealError(ValueError):
    """A payload that is not sealed to this key, or not for this job and client; or damaged."""


def new_key() -> bytes:
    """A private key in PEM."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(file: str) -> X25519PrivateKey:
    """The server's private key.

    Raises:
        ConfigError: the file is not there, or holds something else.
    """
    try:
        key = serialization.load_pem_private_key(Path(file).expanduser().read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"sealing-key = {file!r}: {plain(error)}. It must be the file that `osfl certs "
            "sealing` made, on the server, and readable there"
        ) from error
    if not isinstance(key, X25519PrivateKey):
        raise ConfigError(
            f"sealing-key = {file!r}: is a key of another kind; make one with `osfl certs sealing`"
        )
    return key


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public key, which clients get with the run, in 32 bytes."""
    return key.public_key().public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """SHA-256 of a public key in hex: what a site writes into its node-config."""
    return hashlib.sha256(public).hexdigest()


def pack_public_key(public: bytes | None) -> dict[str, ConfigRecord]:
    """The record of a question that says which key payloads are sealed to; none without a key."""
    return {} if public is None else {"sealing": ConfigRecord({"public-key": public})}


def unpack_public_key(content: RecordDict) -> bytes | None:
    """The key of `pack_public_key`.

    Raises:
        ValueError: it is no key.
    """
    if "sealing" not in content.config_records:
        return None
    public = content.config_records["sealing"].get("public-key")
    if not isinstance(public, bytes) or len(public) != KEY_BYTES:
        raise ValueError(f"the server's sealing key is not {KEY_BYTES} bytes")
    return public


def seal(blob: bytes, public: bytes, job: str, client: str) -> bytes:
    """A payload, sealed: the message's own public key [32 bytes], ciphertext, and tag [16].

    Args:
        public: the server's, 32 bytes.
        job, client: whose payload it is; it opens as nobody else's.

    Raises:
        ValueError: it is no public key.
    """
    # Only who seals needs it
    from pyhpke import KEMKey

    to = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(public))
    own, sender = _suite().create_sender_context(to, info=_about(job, client))
    return own + sender.seal(blob)


def open_sealed(sealed: bytes, key: X25519PrivateKey, job: str, client: str) -> bytes:
    """The payload.

    Raises:
        SealError: it cannot be opened.
    """
    from pyhpke import KEMKey, PyHPKEError

    own = sealed[:KEY_BYTES]
    try:
        recipient = _suite().create_recipient_context(
            own, KEMKey.from_pyca_cryptography_key(key), info=_about(job, client)
        )
        # A view, for a payload is large
        return recipient.open(cast(bytes, memoryview(sealed)[KEY_BYTES:]))
    except (PyHPKEError, ValueError):
        raise SealError(
            "cannot be opened: it is not sealed to this server's key (sealing-key) for this job "
            "and client, or damaged"
        ) from None


def _suite() -> "CipherSuite":
    from pyhpke import AEADId, CipherSuite, KDFId, KEMId

    return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.AES256_GCM)


def _about(job: str, client: str) -> bytes:
    # Neither has a line break
    return f"osfl payload 1\n{job}\n{client}".encode()
