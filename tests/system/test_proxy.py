"""deploy/proxy: Caddy before the SuperLink lets nodes through, and nothing else."""

import ssl
import subprocess
import time
from pathlib import Path

import pytest

from osfl.launch.flower import free_ports
from tests.helpers.proxy import CLOSED, PROXY_FILES, make_site_certificate, post, trust
from tests.helpers.system_tools import (
    BIN,
    GRPC,
    TWO_CLASSES,
    Federation,
    make_images,
    quick_arguments,
    wait_for,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not (BIN / "caddy").exists(), reason="Caddy is not installed: make setup"),
]

FLEET = "/flwr.proto.Fleet/PullMessages" if GRPC else "/v1/fleet/pull-messages"


def begin_caddy(federation: Federation, name: str, file: str, **settings: str) -> int:
    """Start Caddy with a file of deploy/proxy, and return the port where it listens."""
    (port,) = free_ports(1)
    ports = {"OSFL_PROXY_PORT": str(port), "OSFL_SITE_PORT": str(port)}
    command = ["caddy", "run", "--config", str(PROXY_FILES / file), "--adapter", "caddyfile"]
    keys = {"OSFL_KEYS": str(federation.keys), "XDG_DATA_HOME": str(federation.folder / "caddy")}
    federation.begin(name, *command, **ports, **keys, **settings)
    wait_for(
        lambda: "serving initial configuration" in federation.log(name),
        60,
        lambda: federation.log(name),
    )
    return port


def begin_proxy(federation: Federation, **settings: str) -> int:
    """Start the server's proxy before its SuperLink, and return its port."""
    addresses = {
        "OSFL_ADDRESS": "127.0.0.1",
        "OSFL_FLEET": f"127.0.0.1:{federation.fleet}",
        "OSFL_SUPERLINK": f"127.0.0.1:{federation.control}",
    }
    return begin_caddy(federation, "proxy", "Caddyfile", **addresses, **settings)


def is_in(federation: Federation, name: str) -> bool:
    return "SuperNode ID" in federation.log(name)


@pytest.mark.timeout(400)
def test_nodes_pass_the_proxy_and_control_does_not(
    federation: Federation, tmp_path: Path, tiny_kit: Path
) -> None:
    federation.begin_superlink()
    port = begin_proxy(federation)
    make_images(tmp_path / "images")
    federation.register("site-a")
    config = f"client-id='site-a' data-dir='{tmp_path / 'images'}' domain='photo'"
    config += f" cache-dir='{tmp_path / 'cache'}'"
    federation.begin_node("site-a", *federation.trusting("site-a"), config=config, fleet=port)
    wait_for(lambda: is_in(federation, "site-a"), 60, lambda: federation.log("site-a"))

    trusting = trust(federation.keys)
    for path in CLOSED:
        assert post(trusting, "127.0.0.1", port, path) == 403, path
    # The SuperLink itself has them, and the proxy leaves the fleet's to it
    for path in CLOSED[:3]:
        assert post(trusting, "127.0.0.1", federation.control, path) not in (403, 404), path
    assert post(trusting, "127.0.0.1", port, FLEET) != 403
    configured = tmp_path / "flwr" / "config.toml"
    direct = configured.read_text()
    configured.write_text(direct.replace(str(federation.control), str(port)))
    listed = subprocess.run(
        [BIN / "flwr", "supernode", "list", "test", "--format", "json"],
        env=federation.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "site-a" not in listed.stdout
    configured.write_text(direct)
    assert federation.statuses() == ["online"]

    settings = {**TWO_CLASSES, "num_clients": 1, "join_timeout": 60.0}
    run = federation.begin_run(
        *quick_arguments(tiny_kit, method="prompts-domain", job_id="proxied", **settings)
    )
    assert run.wait(timeout=240) == 0, federation.log("run")[-3000:]
    assert (tmp_path / "server" / "proxied" / "payloads" / "site-a.pb").is_file()


@pytest.mark.timeout(300)
def test_mutual_tls_is_for_sites_with_a_certificate(federation: Federation) -> None:
    """A registered key alone does not pass; the site's proxy shows the certificate."""
    federation.begin_superlink()
    port = begin_proxy(federation, OSFL_CLIENT_CERTIFICATES="require_and_verify")
    make_site_certificate(federation.keys)
    for name in ("with-certificate", "without"):
        federation.register(name)
    site = begin_caddy(federation, "site-proxy", "site.Caddyfile", OSFL_PROXY=f"127.0.0.1:{port}")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        post(trust(federation.keys), "127.0.0.1", port, FLEET)
    federation.begin_node("without", *federation.trusting("without"), fleet=port)
    trusting = federation.trusting("with-certificate")
    federation.begin_node("with-certificate", *trusting, fleet=site)
    wait_for(
        lambda: is_in(federation, "with-certificate"),
        60,
        lambda: federation.log("with-certificate") + federation.log("site-proxy"),
    )
    # As long as the other one took
    time.sleep(10)
    assert not is_in(federation, "without"), federation.log("without")
    assert federation.statuses().count("online") == 1
