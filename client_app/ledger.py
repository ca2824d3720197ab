"""What a client has given away under guarantees, over all jobs.

Differential privacy adds up: messages with epsilon 1 and 2 about the same images are together one
with epsilon 3 (basic composition; Dwork et al., 2006).
"""

import json
from pathlib import Path
from typing import Any

from filelock import FileLock

from osfl.config import ConfigError
from osfl.files import OWNER_ONLY, write_atomically


def spend(
    folder: Path, client: str, job_id: str, epsilon: float, delta: float, limit: float
) -> tuple[float, float]:
    """Write down what a message will give away, before it is made; returns both sums so far.

    Args:
        folder: where the site's ledger is kept.
        limit: of the sum of epsilon; 0: none.

    Raises:
        ConfigError: it would be more than the site allows.
    """
    file = _file(folder, client)
    with FileLock(f"{file}.lock", mode=OWNER_ONLY):
        spent = _spent(file)
        total = sum(float(one["epsilon"]) for one in spent) + epsilon
        deltas = sum(float(one.get("delta", 0)) for one in spent) + delta
        _refuse_beyond(total, limit, f"job {job_id!r}")
        lines = [json.dumps(one) for one in spent]
        lines.append(json.dumps({"job": job_id, "epsilon": epsilon, "delta": delta}))
        # Whole or not at all: a torn line could not be added up
        write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    return total, deltas


def check_total(folder: Path, client: str, epsilon: float, limit: float) -> None:
    """Check that one more message is within what the site allows; nothing is written down.

    Raises:
        ConfigError: it is not.
    """
    spent = sum(float(one["epsilon"]) for one in _spent(_file(folder, client)))
    _refuse_beyond(spent + epsilon, limit, "this run")


def _file(folder: Path, client: str) -> Path:
    return folder / f"{client}.epsilon"


def _spent(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _refuse_beyond(total: float, limit: float, asker: str) -> None:
    if limit and total > limit:
        raise ConfigError(
            f"node-config epsilon-total = {limit:g}: with {asker} this client would have given "
            "away more; its site may raise the total, or begin a new one with other images"
        )
