"""The privacy ledger: the epsilon and delta that a client has spent, over all jobs.

Privacy losses add up: messages with epsilon 1 and 2 about the same images have epsilon 3 together
(basic composition; Dwork et al., 2006).
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

from filelock import FileLock

from osfl.config import ConfigError, NodeConfig
from osfl.util.files import (
    OWNER_ONLY,
    CorruptFileError,
    make_private_folder,
    read_record,
    write_record,
)
from osfl.util.text import sanitize

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Draw:
    """A noisy message about this site's images.

    Attributes:
        job: the id of the job that requested it.
        key: the payload's cache key; "" in ledgers of older versions.
        epsilon, delta: its DP guarantee.
        kept: whether the payload was finished, and may have been sent.
    """

    job: str
    key: str
    epsilon: float
    delta: float
    kept: bool


def ledger_folder(node: NodeConfig) -> Path:
    """Return the folder of this site's ledger. It is not a cache: losing it would reset the budget.

    Raises:
        ConfigError: `ledger-dir` is not an absolute path.
    """
    if node.ledger_dir and not Path(node.ledger_dir).expanduser().is_absolute():
        raise ConfigError(f"node-config ledger-dir = {node.ledger_dir!r}: must be an absolute path")
    return Path(node.ledger_dir or os.environ.get("OSFL_STATE", "~/.osfl/state")).expanduser()


@dataclass(frozen=True)
class Ledger:
    """The draws of one client.

    Attributes:
        folder: where this site keeps its ledgers.
        client: its id.
        older: the cache folder, where older versions kept the ledger; None imports nothing.
    """

    folder: Path
    client: str
    older: Path | None = None

    @property
    def file(self) -> Path:
        """The ledger's file."""
        return self.folder / f"{self.client}.ledger.json"

    def spend(
        self, job_id: str, key: str, epsilon: float, delta: float, limit: float = 0.0
    ) -> tuple[float, float]:
        """Book a draw before it is made, and return the sums of epsilon and delta so far.

        A draw whose payload was not finished revealed nothing, so the same job and settings book it
        only once.

        Args:
            limit: upper bound of the sum of epsilon; 0 sets none.

        Raises:
            ConfigError: the sum would exceed the limit.
            CorruptFileError: the ledger is corrupt.
        """
        with self._locked():
            draws = self._with(job_id, key, epsilon, delta, limit)
            self._write(draws)
        return float(_sum(draw.epsilon for draw in draws)), float(_sum(d.delta for d in draws))

    def check(self, job_id: str, key: str, epsilon: float, limit: float) -> None:
        """Check that a draw would stay within the limit, without booking it.

        Raises:
            ConfigError: as `spend`.
        """
        self._with(job_id, key, epsilon, 0.0, limit)

    def _with(
        self, job_id: str, key: str, epsilon: float, delta: float, limit: float
    ) -> list[Draw]:
        draws = self.draws()
        if not any(_matches(draw, job_id, key) and not draw.kept for draw in draws):
            draws.append(Draw(job_id, key, epsilon, delta, kept=False))
        total = _sum(draw.epsilon for draw in draws)
        if limit and total > _exact(limit):
            requester = f"job {job_id!r}" if job_id else "this run"
            raise ConfigError(
                f"node-config epsilon-total = {limit:g}: with {requester} this client would "
                f"have spent epsilon = {float(total):g}. Increase the total, or start a new ledger "
                "with other images"
            )
        return draws

    def mark_finished(self, job_id: str, key: str) -> None:
        """Record that a draw's payload is finished, so that another draw spends epsilon again."""
        with self._locked():
            draws = self.draws()
            if any(_matches(draw, job_id, key) and not draw.kept for draw in draws):
                self._write(
                    replace(draw, kept=True) if _matches(draw, job_id, key) else draw
                    for draw in draws
                )

    def is_pending(self, job_id: str, key: str) -> bool:
        """Return whether a draw of this job and key is booked but its payload is unfinished."""
        return any(_matches(draw, job_id, key) and not draw.kept for draw in self.draws())

    def draws(self) -> list[Draw]:
        """Return all draws; those of an older version's ledger if there is no new one.

        Raises:
            CorruptFileError: the ledger is corrupt.
        """
        hint = "restore the site's ledger from a backup: without it the sum is unknown"
        # A dangling link is an unmounted volume, not a missing ledger
        if not os.path.lexists(self.file):
            return self._older_draws()
        try:
            return [Draw(**draw) for draw in read_record(self.file, hint)["draws"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{sanitize(self.file, 1000)} is corrupt ({sanitize(error, 100)}); {hint}"
            ) from None

    def _older_draws(self) -> list[Draw]:
        """Return the draws that an older version booked in the cache folder."""
        older = None if self.older is None else self.older / f"{self.client}.epsilon"
        if older is None or not older.is_file():
            log.warning(
                "%s: starting a new privacy ledger in %s. If this client has spent epsilon before, "
                "stop it and restore its earlier ledger there",
                *(self.client, self.folder),
            )
            return []
        log.warning("%s: moving the privacy ledger from %s to %s", self.client, older, self.file)
        try:
            lines = [json.loads(line) for line in older.read_text().splitlines()]
            return [
                Draw(
                    str(line["job"]), "", float(line["epsilon"]), float(line.get("delta", 0)), True
                )
                for line in lines
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(
                f"{sanitize(older, 1000)} is corrupt ({sanitize(error, 100)}); restore it from a "
                "backup, "
                "or remove it to start a new ledger"
            ) from None

    def _write(self, draws: Iterable[Draw]) -> None:
        write_record(self.file, {"draws": [asdict(draw) for draw in draws]})

    def _locked(self) -> FileLock:
        make_private_folder(self.folder)
        return FileLock(f"{self.file}.lock", mode=OWNER_ONLY)


@dataclass(frozen=True)
class BookedDraw:
    """One payload's entry in a ledger."""

    ledger: Ledger
    job: str
    key: str

    def book(self, epsilon: float, delta: float, limit: float) -> tuple[float, float]:
        """Book the draw as `Ledger.spend` does."""
        return self.ledger.spend(self.job, self.key, epsilon, delta, limit)

    def finish(self) -> None:
        """Mark the draw as finished, as `Ledger.mark_finished` does."""
        self.ledger.mark_finished(self.job, self.key)

    def is_pending(self) -> bool:
        """Return the same as `Ledger.is_pending`."""
        return self.ledger.is_pending(self.job, self.key)


def _matches(draw: Draw, job_id: str, key: str) -> bool:
    return (draw.job, draw.key) == (job_id, key)


def _sum(values: Iterable[float]) -> Fraction:
    return sum(map(_exact, values), Fraction(0))


def _exact(value: float) -> Fraction:
    """Return the exact decimal that a site wrote, so that three times 0.1 is 0.3."""
    return Fraction(repr(value))
