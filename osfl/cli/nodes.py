"""`osfl nodes`: list and revoke a federation's nodes by their registered names.

Flower's own command identifies nodes by their ids only. This one sends the same requests, through
Flower's code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from rich.table import Table

from osfl.cli import display
from osfl.config import ConfigError
from osfl.util.text import sanitize

UNREGISTERED = "unregistered"


def show_nodes(connection: str) -> None:
    """Print the name, id and state of every registered node.

    Raises:
        ConfigError: the connection is unknown, or the SuperLink did not reply.
    """
    table = Table("name", "node id", "state", "since")
    table.columns[1].no_wrap = True
    with _superlink(connection) as superlink:
        nodes = _registered(superlink)
    for node in sorted(nodes, key=lambda node: node.name):
        times = {"online": node.last_activated_at, "offline": node.last_deactivated_at}
        since = times.get(node.status) or node.registered_at
        table.add_row(
            display.escape_text(node.name or "(no name)"),
            str(node.node_id),
            display.escape_text(node.status),
            display.escape_text(since[:16].replace("T", " ")),
        )
    display.console.print(table)


def revoke(connection: str, name: str) -> None:
    """Unregister a node, so that its key is no longer accepted.

    Args:
        connection: a SuperLink of the user's Flower configuration; "" for its default.
        name: the node's name or id.

    Raises:
        ConfigError: no node or several nodes have the name, the connection is unknown, or the
            SuperLink did not reply.
    """
    with _superlink(connection) as superlink:
        node = _find(_registered(superlink), name)
        superlink.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
    text = f"{node.name or 'node'} ({node.node_id}) is unregistered; its key is no longer accepted"
    display.print_text(sanitize(text))


def _find(nodes: list[NodeInfo], name: str) -> NodeInfo:
    matches = [node for node in nodes if name in (node.name, str(node.node_id))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(str(node.node_id) for node in matches)
        raise ConfigError(f"{name!r}: several nodes have this name; use an id instead: {ids}")
    names = ", ".join(sorted(sanitize(node.name or node.node_id) for node in nodes))
    raise ConfigError(f"{name!r}: no such node; registered nodes: {names or 'none'}")


def _registered(superlink: ControlHttpClient) -> list[NodeInfo]:
    nodes = superlink.ListNodes(ListNodesRequest()).nodes_info
    return [node for node in nodes if node.status != UNREGISTERED]


@contextmanager
def _superlink(connection: str) -> Iterator[ControlHttpClient]:
    try:
        client = init_http_client_from_connection(read_superlink_connection(connection or None))
        try:
            with flwr_cli_exc_handler():
                yield client
        finally:
            client.close()
    except click.ClickException as error:
        raise ConfigError(f"--connection {connection}: {sanitize(error.message)}") from None
