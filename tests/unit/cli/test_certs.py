"""Keys and certificates, against the ssl module and OpenSSH's format as Flower reads it."""

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.cli import certs, node_keys
from osfl.cli.main import app
from osfl.config import ConfigError


def handshake(server: Path, trusted: Path, dialled: str) -> str:
    """Return the error of a client that trusts `trusted` and dials `dialled`, for a server with the
    certificate in `server`: "" if all is well.
    """
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server / "server.pem", server / "server.key")
    near, far = socket.socketpair()

    def answer() -> None:
        try:
            ours.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, ConnectionError):
            far.close()

    thread = threading.Thread(target=answer)
    thread.start()
    theirs = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        theirs.wrap_socket(near, server_hostname=dialled).close()
        return ""
    except ssl.SSLError as error:
        return str(error)
    finally:
        near.close()
        thread.join()


def test_a_server_is_who_its_certificate_names(tmp_path: Path) -> None:
    certs.make_ca(tmp_path)
    certs.make_server(tmp_path, ["fl.example.org", "10.1.2.3", "fd00::1"])
    for name in ("fl.example.org", "10.1.2.3", "fd00::1", "localhost", "127.0.0.1"):
        assert handshake(tmp_path, tmp_path, name) == "", name
    assert "mismatch" in handshake(tmp_path, tmp_path, "other.example.org")
    assert "mismatch" in handshake(tmp_path, tmp_path, "10.1.2.4")
    certs.make_ca(tmp_path / "other")
    assert "CERTIFICATE_VERIFY_FAILED" in handshake(tmp_path, tmp_path / "other", "localhost")


def test_rotation_never_leaves_a_node_out(tmp_path: Path) -> None:
    """Nodes have the old ca.crt; then both; then the server's certificate is the new CA's.

    Then the new ca.crt alone.
    """
    certs.make_ca(tmp_path)
    certs.make_server(tmp_path, ["fl.example.org"])
    old = tmp_path / "old"
    old.mkdir()
    (old / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    for missing in ("ca.key", "ca.crt"):  # it may be kept elsewhere: the other is not replaced
        backup = (tmp_path / missing).rename(tmp_path / "kept")
        with pytest.raises(
            ConfigError,
            match=r"exists. Use this authority, or add a new one with --rotate",
        ):
            certs.make_ca(tmp_path)
        backup.rename(tmp_path / missing)
    certs.make_ca(tmp_path, rotate=True)
    with pytest.raises(ConfigError, match="was issued by the old CA"):
        certs.drop_old_ca(tmp_path)
    assert handshake(tmp_path, tmp_path, "fl.example.org") == ""  # the old server, a node with both
    certs.make_server(tmp_path, ["fl.example.org"])
    assert handshake(tmp_path, tmp_path, "fl.example.org") == ""
    assert "CERTIFICATE_VERIFY_FAILED" in handshake(tmp_path, old, "fl.example.org")
    certs.drop_old_ca(tmp_path)
    assert handshake(tmp_path, tmp_path, "fl.example.org") == ""
    assert len(certs.describe(tmp_path)) == 2


def test_a_server_certificate_does_not_outlive_its_ca(tmp_path: Path) -> None:
    certs.make_ca(tmp_path, days=10)
    certs.make_server(tmp_path, [], days=397)
    (_, authority), (_, server) = ((file, until) for file, _, until in certs.describe(tmp_path))
    assert timedelta(days=8) < server - datetime.now(UTC) <= authority - datetime.now(UTC)
    certs.make_ca(tmp_path / "short", days=1)
    with pytest.raises(ConfigError, match="rotate it first"):
        certs.make_server(tmp_path / "short", [])


def test_private_keys_are_their_owners_alone(tmp_path: Path) -> None:
    certs.make_ca(tmp_path)
    certs.make_server(tmp_path, [])
    node_keys.make_node(tmp_path, "a")
    modes = {
        str(f.relative_to(tmp_path)): f.stat().st_mode & 0o777
        for f in tmp_path.rglob("*")
        if f.is_file()
    }
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert {"ca.key", "server.key", "nodes/a"} <= private
    public = {name for name, mode in modes.items() if mode == 0o644}
    assert public == {"ca.crt", "server.pem", "nodes/a.pub"}
    assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700
    assert not any(
        b"PRIVATE" in (tmp_path / name).read_bytes() for name in modes if name not in private
    )


@pytest.mark.parametrize(
    "host", ["", "fl.example.org:9092", "https://fl.example.org", "a b", "10.0.0.300", "ümlaut.de"]
)
def test_a_wrong_host_is_named(tmp_path: Path, host: str) -> None:
    certs.make_ca(tmp_path)
    with pytest.raises(ConfigError, match="must be a host name or an IP address"):
        certs.make_server(tmp_path, [host])
    assert not (tmp_path / "server.pem").exists()


def test_a_missing_or_strange_ca_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Create a certificate authority first: osfl certs ca"):
        certs.make_server(tmp_path, [])
    with pytest.raises(ConfigError, match="nothing to rotate"):
        certs.make_ca(tmp_path, rotate=True)
    certs.make_ca(tmp_path)
    certs.make_ca(tmp_path / "other")
    (tmp_path / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"is not the key of the first certificate in .*ca\.crt"):
        certs.make_server(tmp_path, [])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match="requires the CA's key"):
        certs.make_server(tmp_path, [])


def test_the_commands(tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(
            app, ["certs", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
        )
        return result.exit_code, result.stdout

    folder = str(tmp_path / "keys")
    assert command("server", folder, "--host", "a.org")[0] == 1
    assert command("ca", folder)[0] == 0
    assert command("ca", folder)[0] == 1
    assert command("server", folder, "--host", "a.org", "--host", "10.0.0.1")[0] == 0
    assert command("node", folder, "site-a", "site-b")[0] == 0
    assert (tmp_path / "keys" / "nodes" / "site-b.pub").is_file()
    code, text = command("show", folder)
    assert code == 0
    # Broken to the terminal's width
    assert all(name in text for name in ("ca.crt", "server.pem", "a.org", "10.0.0.1", "localhost"))
    assert certs.describe(tmp_path / "keys")[1][1] == "a.org, 10.0.0.1, localhost, 127.0.0.1, ::1"
    assert command("ca", folder, "--rotate", "--drop-old")[0] == 1
    assert command("ca", folder, "--rotate", "--days", "9")[0] == 0
    assert left(certs.describe(tmp_path / "keys")[0][2]) == 9
    assert command("ca", folder, "--drop-old")[0] == 1
    assert command("server", folder, "--host", "a.org", "--days", "3")[0] == 0
    assert command("ca", folder, "--drop-old")[0] == 0
    assert [left(until) for _, _, until in certs.describe(tmp_path / "keys")] == [9, 3]


def left(until: datetime) -> int:
    return round((until - datetime.now(UTC)) / timedelta(days=1))


def test_an_expired_certificate_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make_ca(tmp_path, days=30)
    certs.make_server(tmp_path, [], days=3)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return datetime.now(tz) + timedelta(days=4)

    monkeypatch.setattr("osfl.cli.main.datetime", Later)
    result = CliRunner().invoke(app, ["certs", "show", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.count("expired") == 1


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    certs.make_ca(tmp_path)
    (tmp_path / "server.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"server\.pem is not a PEM certificate"):
        certs.describe(tmp_path)
