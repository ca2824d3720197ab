"""Collection of the clients' figures for `osfl advise`, in a run that does nothing else."""

import time
from dataclasses import asdict

from flwr.app import RecordDict
from flwr.serverapp import Grid

from osfl.advice import Figures, judge, pool
from osfl.config import RunConfig
from osfl.data.parts import class_names
from osfl.payload.messages import ADVISE, unpack_figures
from osfl.run_folder.events import log_advice
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from osfl.util.log import log
from server_app.federation.exchange import Exchange, InvalidReplyError, RoundError, format_reasons
from server_app.federation.join import join


def advise(grid: Grid, config: RunConfig, folder: RunFolder, status: Status) -> None:
    """Ask the clients that would train for their figures; store and log the rule's verdicts.

    Raises:
        RoundError: too few clients have joined, or none has answered.
    """
    members = join(grid, config, status, [])
    members.end()
    figures, withheld = _collect(grid, config, members.nodes, status)
    shares = {client: asdict(row) for client, row in sorted(figures.items())}
    log_advice(shares, sorted(withheld))
    folder.store_advice(shares, sorted(withheld))
    verdicts = judge(pool(figures.values()), len(class_names(config.data)))
    for kind, verdict in verdicts.items():
        log.info("%s: %s: %s", kind, verdict.verdict, verdict.reason)


def _collect(
    grid: Grid, config: RunConfig, nodes: dict[str, int], status: Status
) -> tuple[dict[str, Figures], set[str]]:
    """Return the figures by client, and the clients that withhold them."""
    status.phase("measuring on clients", len(nodes))
    client_of = {node: client for client, node in nodes.items()}
    # A client that gets the request twice would measure twice, in parallel
    exchange = Exchange(grid, config.deadline, config.deadline)
    figures: dict[str, Figures] = {}
    withheld: set[str] = set()
    failures: dict[str, str] = {}

    def keep(node: int, reply: Figures | None) -> None:
        client = client_of[node]
        if reply is None:
            withheld.add(client)
            status.client(client, "withholds its figures")
        else:
            figures[client] = reply
            status.client(client, "measured")

    def fail(node: int, reason: str) -> None:
        failures[client_of[node]] = reason
        status.client(client_of[node], "failed")
        status.add_warning(f"{client_of[node]} has no figures: {reason}")

    for node in client_of:
        exchange.push(node, ADVISE, RecordDict())
    end = time.monotonic() + config.deadline
    while exchange.pull(_read, keep, fail, end) and time.monotonic() < end:
        status.advance(len(figures) + len(withheld) + len(failures), len(nodes))
        exchange.wait(end)
    exchange.end()
    for node in exchange.pending_nodes():
        fail(node, f"no reply within {config.deadline:g} s (deadline)")
    if not figures and not withheld:
        raise RoundError(f"no client has measured its images{format_reasons(failures)}")
    return figures, withheld


def _read(node: int, content: RecordDict) -> Figures | None:
    """Read a client's reply.

    Raises:
        InvalidReplyError: a figure is not a share.
    """
    try:
        return unpack_figures(content)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidReplyError(f"its figures cannot be used: {error}") from None
