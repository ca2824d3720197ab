"""Create a federation's keys and certificates.

The folder contains

    ca.key       the key of the certificate authority (CA), which signs server certificates and
                 never leaves this folder
    ca.crt       the CA's certificate for every node; during a rotation, the new and the old CA's
    server.key, server.pem    the SuperLink's key and certificate
    sealing.key  opens sealed payloads; only for the server's ServerApp
    nodes/       SuperNodes' keys (`osfl.cli.node_keys`)

Keys are on the elliptic curve P-384, as Flower's node authentication requires.
"""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from osfl.config import ConfigError
from osfl.payload.encryption import fingerprint, load_key, new_key, public_bytes
from osfl.util.files import PUBLIC, write_atomically
from osfl.util.text import sanitize

# Names in every server certificate, which the server's own processes connect to
DEFAULT_HOSTS = (
    "localhost",
    "127.0.0.1",
    "::1",
)
# Certificates are valid from this long ago, because a node's clock may be slow
CLOCK_SKEW = timedelta(minutes=5)


def make_ca(folder: Path, days: int = 3650, rotate: bool = False) -> Path:
    """Create a certificate authority, and return `ca.crt`.

    Args:
        folder: folder of the keys and certificates.
        days: days of validity.
        rotate: add the new CA to the current one: `ca.crt` contains both until `drop_old_ca`.

    Raises:
        ConfigError: a CA exists and `rotate` is not set, or does not exist and `rotate` is set.
    """
    key_file = folder / "ca.key"
    certificate_file = folder / "ca.crt"
    existing = [file for file in (certificate_file, key_file) if file.exists()]
    if existing and not rotate:
        raise ConfigError(
            f"{existing[0]} exists. Use this authority, or add a new one with --rotate"
        )
    old = certificate_file.read_bytes() if rotate and certificate_file.is_file() else b""
    if rotate and not old:
        raise ConfigError(
            f"{certificate_file} does not exist, so there is nothing to rotate. Leave out --rotate"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name(f"OSFL CA {datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key.public_key(), days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), True
    )
    certificate = builder.add_extension(usage, True).sign(key, hashes.SHA384())
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    write_atomically(certificate_file, pem + old, PUBLIC)
    write_atomically(key_file, _pem(key))
    return certificate_file


def drop_old_ca(folder: Path) -> Path:
    """End a rotation: leave only the newest certificate in `ca.crt`, and return it.

    Raises:
        ConfigError: there is no CA, or it did not issue the server's certificate.
    """
    newest = _authorities(folder)[0]
    if (folder / "server.pem").is_file():
        try:
            _certificates(folder / "server.pem")[0].verify_directly_issued_by(newest)
        except (InvalidSignature, ValueError) as error:
            raise ConfigError(
                f"{folder / 'server.pem'} was issued by the old CA; create a new one first: osfl "
                "certs server"
            ) from error
    write_atomically(folder / "ca.crt", newest.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return folder / "ca.crt"


def make_server(folder: Path, hosts: Iterable[str], days: int = 397) -> Path:
    """Create or replace the SuperLink's key and certificate, and return `server.pem`.

    Args:
        folder: folder of the keys and certificates.
        hosts: all names and addresses at which nodes reach the server, besides `DEFAULT_HOSTS`.
        days: days of validity, at most the CA's.

    Raises:
        ConfigError: there is no CA, `ca.key` is not its key, or a host is neither a name nor an
            address.
    """
    authority = _authorities(folder)[0]
    signer = _authority_key(folder / "ca.key", authority)
    names = list(dict.fromkeys([*hosts, *DEFAULT_HOSTS]))
    alternatives = x509.SubjectAlternativeName([_host(name) for name in names])
    key = ec.generate_private_key(ec.SECP384R1())
    days = min(days, (authority.not_valid_after_utc - datetime.now(UTC)).days)
    if days < 1:
        raise ConfigError(
            f"the CA in {folder} expires on {authority.not_valid_after_utc:%Y-%m-%d}; rotate it "
            "first: osfl certs ca --rotate"
        )
    certificate = (
        _builder(_name(names[0]), authority.subject, key.public_key(), days)
        .add_extension(alternatives, False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
        )
        .sign(signer, hashes.SHA384())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    write_atomically(folder / "server.key", _pem(key))
    write_atomically(folder / "server.pem", pem, PUBLIC)
    return folder / "server.pem"


def make_sealing_key(folder: Path) -> tuple[Path, str]:
    """Create the key that payloads are sealed to, and return its file and fingerprint.

    Raises:
        ConfigError: the key exists.
    """
    file = folder / "sealing.key"
    if file.exists():
        raise ConfigError(
            f"{file} exists. To replace the key, move the file away; payloads that are in flight "
            "for the old key will be requested again when their job is restarted"
        )
    write_atomically(file, new_key())
    return file, fingerprint(public_bytes(load_key(str(file))))


def describe(folder: Path) -> list[tuple[str, str, datetime]]:
    """Return (file, names, expiry date) of every certificate in the folder.

    Raises:
        ConfigError: there is no CA.
    """
    rows = [
        ("ca.crt", c.subject.rfc4514_string(), c.not_valid_after_utc) for c in _authorities(folder)
    ]
    if (folder / "server.pem").is_file():
        server = _certificates(folder / "server.pem")[0]
        try:
            names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            names = x509.SubjectAlternativeName([])
        rows.append(
            (
                "server.pem",
                ", ".join(str(name.value) for name in names) or "none",
                server.not_valid_after_utc,
            )
        )
    return rows


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer,
        subject,
        public,
        x509.random_serial_number(),
        now - CLOCK_SKEW,
        now + timedelta(days=days),
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.split(".")
    is_valid = all(label.isascii() and label.replace("-", "").isalnum() for label in labels)
    # A name that ends in digits is a mistyped address
    if not is_valid or labels[-1].isdigit() or len(name) > 253:
        raise ConfigError(f"host {name!r}: must be a host name or an IP address, without a port")
    return x509.DNSName(name)


def _authorities(folder: Path) -> list[x509.Certificate]:
    if not (folder / "ca.crt").is_file():
        raise ConfigError(
            f"{folder} has no ca.crt. Create a certificate authority first: osfl certs ca {folder}"
        )
    return _certificates(folder / "ca.crt")


def _certificates(file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a PEM certificate: {sanitize(error)}") from error


def _authority_key(file: Path, authority: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: {sanitize(error)}. Creating server certificates requires the CA's key"
        ) from error
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != authority.public_key()
    ):
        raise ConfigError(
            f"{file} is not the key of the first certificate in {file.with_suffix('.crt')}"
        )
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
