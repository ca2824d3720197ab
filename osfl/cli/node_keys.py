"""A SuperNode's own key: created at the site, never copied, and registered by its public part.

A site sends a PKCS #10 certificate signing request. The site's key signs it, which proves that the
sender has the key and chose the name. The fingerprint is the one that `ssh-keygen -lf NAME.pub`
prints. The site reads it out over a channel that the sender of a forged request does not control,
such as the telephone.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from osfl.config import IDENTIFIER_RULE, ConfigError, is_identifier
from osfl.util.files import PUBLIC, write_atomically
from osfl.util.text import sanitize

# A request has about 600 bytes
MAX_REQUEST_BYTES = 1 << 16


@dataclass(frozen=True)
class NodeKey:
    """A node's public key.

    Attributes:
        name: the node's name.
        file: the private key at the site, or the public key at the operator.
        fingerprint: SHA-256 of the public key, as OpenSSH prints it.
    """

    name: str
    file: Path
    fingerprint: str


def make_node(folder: Path, name: str) -> Path:
    """Create a SuperNode's key pair in OpenSSH's format, and return the private key's file.

    Raises:
        ConfigError: the name is invalid, or has a key already.
    """
    key = _new_key(folder / "nodes" / name, name)
    _write_public(folder / "nodes" / f"{name}.pub", key.public_key(), name)
    return folder / "nodes" / name


def request_key(folder: Path, name: str) -> tuple[NodeKey, Path]:
    """Create a site's key, and return it with the file of the request for the operator.

    Raises:
        ConfigError: the name is invalid, or has a key already.
    """
    key = _new_key(folder / name, name)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA384())
    file = folder / f"{name}.request"
    write_atomically(file, request.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return NodeKey(name, folder / name, key_fingerprint(key.public_key())), file


def read_request(file: Path) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the name and the public key of a site's request.

    Raises:
        ConfigError: the file is not a request, its key did not sign it, its key is not on the
            curve P-384, or its name is invalid.
    """
    try:
        with file.open("rb") as stream:
            request = x509.load_pem_x509_csr(stream.read(MAX_REQUEST_BYTES))
        key = request.public_key()
        is_signed = request.is_signature_valid
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (OSError, ValueError, InvalidSignature) as error:
        raise ConfigError(
            f"{file} is not a request: {sanitize(error)}. The site makes one: osfl certs request "
            "NAME"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"{file}: the key must be on the curve P-384, as Flower requires")
    if not is_signed:
        raise ConfigError(f"{file} is not signed by its key; the site must make a new request")
    name = str(names[0].value) if len(names) == 1 else ""
    if not is_identifier(name):
        raise ConfigError(f"{file}: name {sanitize(name)!r}: {IDENTIFIER_RULE}")
    return name, key


def check_fingerprint(key: ec.EllipticCurvePublicKey, expected: str) -> None:
    """Compare a key with the fingerprint that the site read out.

    Raises:
        ConfigError: they differ.
    """
    actual = key_fingerprint(key)
    if actual != expected.strip():
        raise ConfigError(
            f"--fingerprint {sanitize(expected)}: the request's key has {actual}. It is not the "
            "site's; ask the site for its request again"
        )


def register_key(folder: Path, name: str, key: ec.EllipticCurvePublicKey) -> NodeKey:
    """Add a site's public key to the operator's folder.

    Raises:
        ConfigError: the name has another key.
    """
    file = folder / "nodes" / f"{name}.pub"
    if file.exists() and _public_key(file) != key:
        raise ConfigError(
            f"{file} is another key. To replace it, revoke the node (osfl nodes revoke {name}) and "
            "delete the file"
        )
    _write_public(file, key, name)
    return NodeKey(name, file, key_fingerprint(key))


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key, as `ssh-keygen -l` prints it."""
    digest = serialization.ssh_key_fingerprint(key, hashes.SHA256())
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _new_key(file: Path, name: str) -> ec.EllipticCurvePrivateKey:
    """Create a private key, readable by its owner only."""
    if not is_identifier(name):
        raise ConfigError(f"node {name!r}: {IDENTIFIER_RULE}")
    if file.exists():
        raise ConfigError(
            f"{file} exists. To replace the key, unregister the node and delete the file"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    write_atomically(file, private)
    return key


def _write_public(file: Path, key: ec.EllipticCurvePublicKey, name: str) -> None:
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomically(file, line + f" {name}\n".encode(), PUBLIC)


def _public_key(file: Path) -> object:
    try:
        return serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a public key: {sanitize(error)}") from error
