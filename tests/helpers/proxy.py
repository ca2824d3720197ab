"""Tools for tests of deploy/proxy: Caddy's routes, and a site's certificate."""

import http.client
import re
import shlex
import ssl
import subprocess
from pathlib import Path

from tests.helpers.settings import ROOT

PROXY_FILES = ROOT / "deploy" / "proxy"
# Whoever reaches them runs code on every node, or is the ServerApp of a run
CLOSED = [
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/runtime/push-messages",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/%2E%2E%2Fcontrol/list-runs",
    "//v1/control/list-runs",
    "/flwr.proto.Fleet/../../v1/control/list-runs",
    "/flwr.proto.Control/ListRuns",
    "/flwr.proto.ServerAppIo/PushMessages",
    "/health",
    "/",
]


def trust(keys: Path) -> ssl.SSLContext:
    """Return TLS settings of a program that trusts ca.crt and has no certificate to show."""
    return ssl.create_default_context(cafile=keys / "ca.crt")


def post(settings: ssl.SSLContext, host: str, port: int, path: str) -> int:
    """Return the status of an empty request with a path that is sent as it is."""
    connection = http.client.HTTPSConnection(host, port, timeout=30, context=settings)
    try:
        connection.request("POST", path, body=b"")
        return connection.getresponse().status
    finally:
        connection.close()


def make_site_certificate(keys: Path) -> None:
    """Run the commands of site.Caddyfile, with all keys in one folder."""
    comments = (PROXY_FILES / "site.Caddyfile").read_text()
    lines = re.findall(r"^#   (\w+ = .*)$", comments, re.MULTILINE)
    assert len(lines) == 2
    (keys / "client.ext").write_text("\n".join(lines) + "\n")
    commands = re.findall(r"^#   (openssl .*?) {2,}#", comments, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = subprocess.run(shlex.split(command), cwd=keys, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
