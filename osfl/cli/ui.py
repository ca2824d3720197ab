"""`osfl ui`: serve the local web page on the runs of a folder."""

import ipaddress
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from osfl.cli import display
from osfl.config import ConfigError

# Seconds that connections have to end after Ctrl-C
GRACE_SECONDS = 2
LOOPBACK_NAMES = ("localhost", "127.0.0.1")


def serve(runs: Path, host: str, port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        runs: the folder of the runs, which need not exist yet.
        host: the address or name to listen on.
        port: the port; 0: a free one.

    Raises:
        ConfigError: the packages are missing, the folder is a file, or the address cannot be used.
    """
    _check_packages()
    if os.path.lexists(runs) and not runs.is_dir():
        raise ConfigError(f"--runs-dir {runs} must be a folder")
    import uvicorn

    from osfl.ui.app import create_app

    server: uvicorn.Server | None = None

    def is_ending() -> bool:
        return server is not None and server.should_exit

    app = create_app(Path(os.path.abspath(runs)), allowed_hosts(host), is_ending)
    listener = listen(host, port)
    # A read-only page needs no lifespan events, web sockets or log of requests
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(settings)
    announce(runs, host, listener.getsockname()[1])
    # Python may raise a Ctrl-C again that the server has already handled
    with listener, suppress(KeyboardInterrupt):
        server.run([listener])
    display.console.print("ended")


def allowed_hosts(host: str) -> list[str]:
    """Return the names that a request's Host header may have when the page is served on `host`."""
    names = {*LOOPBACK_NAMES, host}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
        for addresses in psutil.net_if_addrs().values():
            names |= {address.address for address in addresses}
    # Starlette cuts the header at its first colon, so "[" is left of any IPv6 address. Allowing it
    # is safe: DNS rebinding requires a name, and no name is an IPv6 address
    return sorted({"[" if ":" in name else name for name in names} - {""})


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_packages() -> None:
    missing = [name for name in ("starlette", "uvicorn", "jinja2") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"osfl ui requires the package {missing[0]}: pip install 'osfl[ui]'")


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    Raises:
        ConfigError: the address is unknown, or its port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error}; set --port to a free port, or 0"
        ) from None


def announce(runs: Path, host: str, port: int) -> None:
    """Print the page's address, and a warning if others can reach it."""
    address = f"[{host}]" if ":" in host else host
    display.print_text(f"runs in {runs}: http://{address}:{port}/ (Ctrl-C ends it)")
    if not is_loopback(host):
        display.print_text(
            f"warning: --host {host}: anyone who can reach this machine can read these runs, "
            "their images and reports; there is no password and no encryption"
        )
