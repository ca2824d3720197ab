"""`osfl forget`: remove a client from a run, and compute the results again without it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from osfl.cli import display
from osfl.cli.signing import load_signing_key
from osfl.config import ConfigError
from osfl.launch.views import ConsoleDisplay
from osfl.run_folder.forget import finish_removal, remove_client
from osfl.run_folder.forgotten_store import RECOMPUTED, Removal
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.listing import find_run
from osfl.run_folder.status import read_status
from osfl.util.log import log
from server_app.federation.exchange import RoundError
from server_app.recompute import recompute


def forget_client(run: Path, client: str, names_client: bool, key_file: Path | None) -> None:
    """Remove a client from a run, compute the results again, and say what was not reached.

    Args:
        run: the run's folder.
        names_client: whether the record has the client's name, not only its SHA-256.
        key_file: the private key of `osfl certs signer` that signs the record; None: unsigned.

    Raises:
        ConfigError: as `remove_client`; or the results cannot be computed again. The next call
            tries that again.
    """
    key = None if key_file is None else load_signing_key(key_file)
    # A link or `.` has another name than the run
    folder = RunFolder(find_run(run).resolve())
    file = remove_client(folder, client, names_client, key)
    removal = folder.removals()[file]
    if removal.state == RECOMPUTED:
        display.print_text(
            f"the client was removed on {removal.removed}, and the results are those without it"
        )
        _show(folder, file, removal)
        return
    display.print_text(
        f"removed {len(removal.files):,} files; computing the results again without the client"
    )
    try:
        with _progress(folder):
            images, seconds = recompute(folder)
    # For example, the key of sealed payloads may be on another machine
    except (ConfigError, RoundError) as error:
        raise ConfigError(
            f"the client is removed, but the run has no results: {error}\nRepeat the command to "
            "compute them"
        ) from None
    _show(folder, file, finish_removal(folder, file, images, seconds, key))


@contextmanager
def _progress(folder: RunFolder) -> Iterator[None]:
    """Show the run's phases in place of its log, whose warnings are in the report, too."""
    ended = Event()

    def show() -> None:
        with ConsoleDisplay(display.console).view() as view:
            while not ended.wait(0.3):
                view.show(read_status(folder.path))

    thread = Thread(target=show, daemon=True)
    level = log.level
    log.setLevel(logging.ERROR)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        log.setLevel(level)


def _show(folder: RunFolder, file: Path, removal: Removal) -> None:
    models = ", ".join(model.stem for model in folder.model_files()) or "none"
    display.print_text(
        f"synthesized {removal.recomputed['images']:,} images of other clients again, in "
        f"{removal.recomputed['seconds']:.1f} s with the training; models: {models}"
    )
    display.print_text("not reached:")
    for text in removal.not_reached:
        display.print_text(f"- {text}")
    display.print_text(f"record: {file}")
