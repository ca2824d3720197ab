"""The version of the model that a run makes, and what it was trained on."""

import hashlib
from collections.abc import Iterable
from typing import Any

from osfl.run_folder.layout import RunFolder

# Hex digits of a digest in a label that people read
DIGITS = 16


def version_of(folder: RunFolder, clients: Iterable[str]) -> dict[str, Any]:
    """Return the version of the models of a run that continues another one; {} for other runs.

    Args:
        clients: the clients whose payloads the models were made from.

    Returns:
        `number`: of the version. `job`: the one that it continues. `carried`, `new`: the clients
        whose payloads are from there, and the others. `from_model`: whether training started from
        the earlier models. `payloads`: the SHA-256 over all payloads.
    """
    record = folder.continuation()
    if record is None:
        return {}
    names = sorted(clients)
    carried = [
        name for name in names if folder.payload_job(name, folder.path.name) != folder.path.name
    ]
    digests = [f"{name} {folder.payload_digest(name)}" for name in names]
    return {
        "number": record.version,
        "job": record.job,
        "carried": carried,
        "new": [name for name in names if name not in carried],
        "from_model": record.from_model,
        "payloads": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    }


def version_label(folder: RunFolder, clients: Iterable[str]) -> str:
    """Describe the version of the models of a run that continues another one; "" for other runs.

    The text names no client, because it is written to the model's file.
    """
    version = version_of(folder, clients)
    if not version:
        return ""
    count = len(version["carried"]) + len(version["new"])
    start = "trained anew"
    if version["from_model"]:
        start = f"trained from the model of job {version['job']}"
    return (
        f"version {version['number']}, of {count} payloads: {len(version['carried'])} that job "
        f"{version['job']} had, {len(version['new'])} new; SHA-256 {version['payloads'][:DIGITS]}; "
        f"{start}"
    )
