"""Ed25519 signatures (RFC 8032) of records, so that a reader can tell who wrote one."""

from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def sign(message: bytes, key: Ed25519PrivateKey) -> dict[str, str]:
    """Return a message's signature, with the public key that verifies it, both in hex."""
    public = key.public_key().public_bytes_raw().hex()
    return {"algorithm": "Ed25519", "public-key": public, "value": key.sign(message).hex()}


def signing_key(signature: Mapping[str, Any], message: bytes) -> str:
    """Return the public key, in hex, that signed a message; "" if the signature is invalid."""
    try:
        public = bytes.fromhex(signature["public-key"])
        value = bytes.fromhex(signature["value"])
        Ed25519PublicKey.from_public_bytes(public).verify(value, message)
    except (InvalidSignature, KeyError, TypeError, ValueError):
        return ""
    return public.hex() if signature.get("algorithm") == "Ed25519" else ""
