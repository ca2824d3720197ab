"""The server's part of a run without any client: from stored payloads to models and a report."""

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic
from typing import Any, NoReturn

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import read_timings
from server_app.app import run_in_folder


class EmptyGrid(Grid):
    """A federation in which no node is online."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return no node."""
        return []

    def get_node_ids(self) -> Iterable[int]:
        """Return no node."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send nothing, because there is no node to send a message to."""
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return no message."""
        return []

    def set_run(self, run: Any) -> None:
        """Ignore Flower's run, which this federation does not have."""

    @property
    def run(self) -> NoReturn:
        """Raise an error: Flower has no run for this federation."""
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise an error: no message can be sent."""
        raise NotImplementedError

    def send_and_receive(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise an error: no message can be sent."""
        raise NotImplementedError


def recompute(folder: RunFolder) -> tuple[int, float]:
    """Make a run's results again from its payloads and images, without asking a client.

    The global models stay untested until clients are online in a later `osfl run` of the job.

    Args:
        folder: of a run whose payloads are bound to it (`payloads-from.json`).

    Returns:
        the number of images that were drawn, and the seconds.

    Raises:
        ConfigError: the folder has no run; and the errors of `run_in_folder`.
    """
    stored = folder.stored_config()
    if stored is None:
        raise ConfigError(f"{folder.path} is not the folder of a run; set it to one")
    config = offline_config(parse_run_config(stored), folder)
    drawn_before = _drawn_images(folder)
    start = monotonic()
    run_in_folder(EmptyGrid(), config, folder)
    return _drawn_images(folder) - drawn_before, monotonic() - start


def offline_config(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the settings of a run that waits for no client, not even for one that only tests.

    Its payloads are those that it is bound to, and it needs all of them.
    """
    source = folder.payload_source()
    needed = len(folder.payload_files() if source is None else source.payloads)
    return replace(
        config,
        join_timeout=0.0,
        payloads_from="",
        continue_from="",
        held_out="",
        min_clients=needed,
    )


def _drawn_images(folder: RunFolder) -> int:
    """Return the number of images that work units of the run have drawn so far."""
    return sum(int(timing["images"]) for timing in read_timings(folder))
