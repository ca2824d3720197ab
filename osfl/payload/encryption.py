"""Sealed payloads, which only the server can open: HPKE (RFC 9180) to the server's public key.

TLS ends at the SuperLink: its process, its database and their backups hold all payloads in the
clear. Of a sealed payload they hold only ciphertext. This protects against an honest-but-curious
SuperLink. A malicious one could distribute other app code, or forge payloads, because HPKE's base
mode does not authenticate the sender.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from flwr.app import ConfigRecord, RecordDict

from osfl.config import ConfigError
from osfl.util.text import sanitize

if TYPE_CHECKING:
    from pyhpke import CipherSuite

# Size of an X25519 public key
KEY_BYTES = 32
# Bytes that sealing adds to a payload: the ephemeral public key and the tag
OVERHEAD = KEY_BYTES + 16


class SealError(ValueError):
    """A payload that is corrupt, or sealed to another key, job or client."""


def new_key() -> bytes:
    """Generate a private key, in PEM."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(file: str) -> X25519PrivateKey:
    """Load the server's private key.

    Raises:
        ConfigError: the file is missing or unreadable, or does not hold such a key.
    """
    try:
        key = serialization.load_pem_private_key(Path(file).expanduser().read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"sealing-key = {file!r}: {sanitize(error)}. It must be a readable file on the server, "
            "made by `osfl certs sealing`"
        ) from error
    if not isinstance(key, X25519PrivateKey):
        raise ConfigError(
            f"sealing-key = {file!r}: must be an X25519 key; make one with `osfl certs sealing`"
        )
    return key


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Return the public key, which clients receive with the run, as 32 bytes."""
    return key.public_key().public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """Return the SHA-256 of a public key in hex, which a site sets as `seal-to` to pin the key."""
    return hashlib.sha256(public).hexdigest()


def pack_public_key(public: bytes | None) -> dict[str, ConfigRecord]:
    """Pack the key that payloads must be sealed to into a request's record; {} without a key."""
    return {} if public is None else {"sealing": ConfigRecord({"public-key": public})}


def unpack_public_key(content: RecordDict) -> bytes | None:
    """Return the key that `pack_public_key` packed, or None.

    Raises:
        ValueError: it is not a key.
    """
    if "sealing" not in content.config_records:
        return None
    public = content.config_records["sealing"].get("public-key")
    if not isinstance(public, bytes) or len(public) != KEY_BYTES:
        raise ValueError(f"the server's sealing key must have {KEY_BYTES} bytes")
    return public


def seal(blob: bytes, public: bytes, job: str, client: str) -> bytes:
    """Seal a payload: ephemeral public key [32 bytes], ciphertext, tag [16 bytes].

    Args:
        blob: the encoded payload.
        public: the server's public key, 32 bytes.
        job, client: names that the ciphertext is bound to; it opens for no others.

    Raises:
        ValueError: `public` is not a public key.
    """
    # An optional dependency, which only runs with sealing need
    from pyhpke import KEMKey

    recipient_key = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(public))
    ephemeral, sender = _suite().create_sender_context(recipient_key, info=_info(job, client))
    return ephemeral + sender.seal(blob)


def open_sealed(sealed: bytes, key: X25519PrivateKey, job: str, client: str) -> bytes:
    """Open a sealed payload.

    Raises:
        SealError: it is corrupt, or sealed to another key, job or client.
    """
    from pyhpke import KEMKey, PyHPKEError

    ephemeral = sealed[:KEY_BYTES]
    try:
        recipient = _suite().create_recipient_context(
            ephemeral, KEMKey.from_pyca_cryptography_key(key), info=_info(job, client)
        )
        # A view spares a copy of a large payload
        return recipient.open(cast(bytes, memoryview(sealed)[KEY_BYTES:]))
    except (PyHPKEError, ValueError):
        raise SealError(
            "cannot be opened: it is corrupt, or not sealed to this server's key (sealing-key) "
            "for this job and client"
        ) from None


def _suite() -> "CipherSuite":
    from pyhpke import AEADId, CipherSuite, KDFId, KEMId

    return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.AES256_GCM)


def _info(job: str, client: str) -> bytes:
    """Return HPKE's `info`. It is unambiguous because neither name has a line break."""
    return f"osfl payload 1\n{job}\n{client}".encode()
