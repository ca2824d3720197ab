"""`osfl ui`: its address, the host names that it answers to, and what it refuses."""

import socket
from pathlib import Path

import pytest

from osfl.cli import display
from osfl.cli.ui import allowed_hosts, announce, is_loopback, listen, serve
from osfl.config import ConfigError


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.168.0.1", False), ("localhost.evil", False)),
    ],
)
def test_loopback_is_told_from_other_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    with display.console.capture() as output:
        announce(Path("runs"), host, 1)
    assert ("no password and no encryption" in output.get()) != expected


def test_on_loopback_only_its_names_are_hosts() -> None:
    assert allowed_hosts("127.0.0.1") == ["127.0.0.1", "localhost"]
    assert "[" in allowed_hosts("::1")
    everywhere = allowed_hosts("0.0.0.0")
    assert socket.gethostname() in everywhere
    assert "*" not in everywhere


def test_a_taken_port_and_an_unknown_host_are_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host 300.1.1.1"):
        listen("300.1.1.1", 0)


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("x")
    with pytest.raises(ConfigError, match="--runs-dir .* must be a folder"):
        serve(tmp_path / "runs", "127.0.0.1", 0)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("osfl.cli.ui.find_spec", {"starlette": 1, "jinja2": 1}.get)
    with pytest.raises(
        ConfigError, match=r"requires the package uvicorn: pip install 'osfl\[ui\]'"
    ):
        serve(tmp_path, "127.0.0.1", 0)
