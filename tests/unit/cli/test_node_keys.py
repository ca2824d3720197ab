"""Node keys, as Flower and OpenSSH read them, and requests that an operator must not accept."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from osfl.cli import node_keys
from osfl.cli.main import app
from osfl.config import ConfigError


def signed_request(name: str, curve: ec.EllipticCurve) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    key = ec.generate_private_key(curve)
    request = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA384())
    return request.public_bytes(serialization.Encoding.PEM)


def test_node_keys_are_what_flower_reads(tmp_path: Path) -> None:
    file = node_keys.make_node(tmp_path, "site-a")
    private = load_ssh_private_key(file.read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "nodes" / "site-a.pub").read_bytes())
    assert private.public_key() == public
    assert private.curve.name == "secp384r1"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="unregister the node"):
        node_keys.make_node(tmp_path, "site-a")
    with pytest.raises(ConfigError, match="must be 1 to 64 letters"):
        node_keys.make_node(tmp_path, "../site-a")


def test_a_site_keeps_its_key_and_the_operator_gets_the_public_part(tmp_path: Path) -> None:
    site = tmp_path / "site"
    key, request = node_keys.request_key(site, "site-a")
    assert key.file.stat().st_mode & 0o777 == 0o600
    assert request.stat().st_mode & 0o777 == 0o644
    assert b"PRIVATE" not in request.read_bytes()
    name, public = node_keys.read_request(request)
    registered = node_keys.register_key(tmp_path / "keys", name, public)
    private = load_ssh_private_key(key.file.read_bytes(), None)
    assert load_ssh_public_key(registered.file.read_bytes()) == private.public_key()
    assert registered.file == tmp_path / "keys" / "nodes" / "site-a.pub"
    assert registered.fingerprint == key.fingerprint
    assert sorted(file.name for file in (tmp_path / "keys").rglob("*")) == ["nodes", "site-a.pub"]
    with pytest.raises(ConfigError, match="site-a exists"):
        node_keys.request_key(site, "site-a")
    assert load_ssh_private_key(key.file.read_bytes(), None).public_key() == public


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_the_fingerprint_is_that_of_openssh(tmp_path: Path) -> None:
    key, request = node_keys.request_key(tmp_path, "site-a")
    registered = node_keys.register_key(tmp_path, *node_keys.read_request(request))
    printed = subprocess.run(
        ["ssh-keygen", "-lf", str(registered.file)], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split()[1] == key.fingerprint


def test_a_name_keeps_its_key_until_the_operator_deletes_it(tmp_path: Path) -> None:
    _, first = node_keys.request_key(tmp_path / "a", "site-a")
    _, second = node_keys.request_key(tmp_path / "b", "site-a")
    name, public = node_keys.read_request(first)
    file = node_keys.register_key(tmp_path, name, public).file
    node_keys.register_key(tmp_path, name, public)
    with pytest.raises(ConfigError, match=r"is another key\. To replace it, revoke the node"):
        node_keys.register_key(tmp_path, *node_keys.read_request(second))
    assert load_ssh_public_key(file.read_bytes()) == public


def test_a_request_with_another_key_or_name_is_refused(tmp_path: Path) -> None:
    """One changed byte of the name or the key, and the signature is not the key's."""
    _, file = node_keys.request_key(tmp_path, "site-a")
    request = x509.load_pem_x509_csr(file.read_bytes())
    data = request.public_bytes(serialization.Encoding.DER)
    changed = data.replace(b"site-a", b"site-b")
    assert changed != data
    forged = x509.load_der_x509_csr(changed).public_bytes(serialization.Encoding.PEM)
    file.write_bytes(forged)
    with pytest.raises(ConfigError, match="is not signed by its key"):
        node_keys.read_request(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a request"),
        (
            b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
            "is no",
        ),
        (signed_request("site-a", ec.SECP256R1()), "must be on the curve P-384"),
        (signed_request("../site-a", ec.SECP384R1()), r"name '\.\./site-a': must be 1 to 64"),
        (signed_request("a\x1b[2Jb", ec.SECP384R1()), "must be 1 to 64"),
    ],
)
def test_an_unfit_request_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "site-a.request"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        node_keys.read_request(file)
    assert "\x1b" not in str(error.value)
    with pytest.raises(ConfigError, match="is not a request"):
        node_keys.read_request(tmp_path / "missing.request")


def test_the_commands(tmp_path: Path) -> None:
    def command(*arguments: str, answer: str = "") -> tuple[int, str]:
        result = CliRunner().invoke(
            app, ["certs", *arguments], input=answer, env={"COLUMNS": "200", "TERM": "dumb"}
        )
        return result.exit_code, result.output

    site = str(tmp_path / "site")
    keys = str(tmp_path / "keys")
    code, text = command("request", "site-a", "--folder", site)
    assert code == 0
    digest = text.split("fingerprint: ")[1].strip()
    request = f"{site}/site-a.request"
    public = tmp_path / "keys" / "nodes" / "site-a.pub"
    wrong_digest = "SHA256:" + "A" * 43
    code, text = command("register", keys, request, "--fingerprint", wrong_digest)
    assert code == 1
    assert "It is not the site's" in text
    assert command("register", keys, request, answer="n\n")[0] == 1
    assert command("register", keys, request)[0] == 1
    assert not public.exists()
    code, text = command("register", keys, request, "--fingerprint", digest)
    assert code == 0
    assert f"flwr supernode register {public} CONNECTION --name site-a" in text
    public.unlink()
    code, text = command("register", keys, request, answer="y\n")
    assert code == 0
    assert f"Does site-a read out {digest}?" in text
    assert public.is_file()
