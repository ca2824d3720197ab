"""Whether a run's folder holds what was written to it, and all of it.

Images, payloads and models have their SHA-256 in records beside them: `units/*.jsonl`,
`payloads/*.json`, `models/*.json`. These, and every other file of a finished run, have theirs in
`SHA256SUMS`, which is written last (`sha256sum -c SHA256SUMS` reads it too). Not in it are
`status.json`, which must say `finished`, and the launcher's `server.log`.
"""

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.run_folder.layout import (
    MADE_ANEW,
    NOT_A_RECORD,
    SUMS,
    picture_digest,
    read_picture,
    read_rows,
)
from osfl.util.files import DamageError, read_json, write_atomically
from osfl.util.text import plain

_RECORDS = (
    *("*.json", "*.jsonl", "*.html", "payloads/*.json", "units/*.jsonl", "models/*.json"),
    *("tests/*.json", "rounds/*.json", "rounds/*.safetensors", "influence/*.json"),
)


@dataclass(frozen=True)
class Finding:
    """Of the files of one kind.

    How many are as they were written, and what is wrong with the others.
    """

    kind: str
    good: int
    wrong: tuple[str, ...]

    @property
    def counted(self) -> str:
        """The good ones, such as `1 model`."""
        return f"{self.good} {self.kind.removesuffix('s') if self.good == 1 else self.kind}"


def picture_problem(folder: Path, row: dict[str, Any]) -> str:
    """What is wrong with the image of a manifest's row; empty: nothing."""
    name = plain(row["file"])
    if not os.path.isfile(folder / row["file"]):
        return f"{name} is missing"
    picture = read_picture(folder / row["file"])
    if picture is None:
        return f"{name} cannot be read"
    if picture_digest(picture) != row["sha256"]:
        return f"{name} is another image than the one that was made"
    return ""


# ---- The whole folder ----


def is_run(folder: Path) -> bool:
    """Whether a run was ever here, however much of it is left."""
    signs = ("config.json", "status.json", "metrics.json", "payloads", "units", SUMS)
    return any(os.path.lexists(folder / name) for name in signs)


def verify_run(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Finding]:
    """Read everything that a run has stored. Damage is reported, never raised.

    Args:
        folder: `runs/<job id>`; the run may be going on.
        progress: called with (images read, images in all).
    """
    rows, wrong = _rows_of_units(folder)
    good = 0
    with ThreadPoolExecutor() as readers:
        problems = readers.map(lambda row: picture_problem(folder, row), rows)
        for done, problem in enumerate(problems, start=1):
            wrong += [problem] if problem else []
            good += not problem
            progress(done, len(rows))
    found = [
        _of_vouched(folder, "payloads", ".pb"),
        Finding("images", good, tuple(wrong)),
        _of_manifest(folder, rows),
        _of_vouched(folder, "models", ".safetensors"),
    ]
    told = {problem for finding in found for problem in finding.wrong}
    records = _of_records(folder)
    new = tuple(problem for problem in records.wrong if problem not in told)
    return [*found, Finding("records", records.good, new)]


def seal(folder: Path) -> None:
    """The end of a run: `SHA256SUMS` of all its records, by which a missing one is noticed."""
    names = [
        str(file.relative_to(folder))
        for pattern in _RECORDS
        for file in sorted(folder.glob(pattern))
        if file.name not in NOT_A_RECORD and os.path.isfile(file)
    ]
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / SUMS, f"# {len(names)} files\n{''.join(lines)}".encode())


def check_sealed(folder: Path, name: str) -> None:
    """Whether a record of a finished run is the one that was sealed; of another, nobody can say.

    Raises:
        DamageError: it is not.
    """
    digest = _read_sums(folder).get(name)
    if digest and (problem := _problem(folder, name, digest)):
        raise DamageError(f"{folder}: {problem}; {MADE_ANEW}")


def _rows_of_units(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """(the rows of all units, by file; what is wrong with units)."""
    rows = []
    wrong = []
    for unit in sorted((folder / "units").glob("*.jsonl")):
        try:
            rows += read_rows(unit)
        except OSError:
            wrong.append(_damaged(folder, unit))
    rows.sort(key=lambda row: row["file"])
    return rows, wrong


def _of_manifest(folder: Path, pictures: list[dict[str, Any]]) -> Finding:
    """`manifest.jsonl`, which a run has from the end of its synthesis on, names images of its units
    alone.
    """
    file = folder / "manifest.jsonl"
    if not os.path.lexists(file):
        return Finding("manifest rows", 0, ())
    try:
        rows = read_rows(file)
    except OSError:
        return Finding("manifest rows", 0, (_damaged(folder, file),))
    known = {row["file"]: row for row in pictures}
    wrong = tuple(
        f"manifest.jsonl: {plain(row['file'])} is in no unit as it is there"
        for row in rows
        if known.get(row["file"]) != row
    )
    return Finding("manifest rows", len(rows) - len(wrong), wrong)


def _of_vouched(folder: Path, kind: str, ending: str) -> Finding:
    """Files that have their digest in a JSON file beside them: none is without the other."""
    files = [*(folder / kind).glob(f"*{ending}"), *(folder / kind).glob("*.json")]
    found = []
    for name in sorted({file.stem for file in files}):
        record = folder / kind / f"{name}.json"
        try:
            digest = read_json(record).get("sha256")
        except OSError:
            found.append(_damaged(folder, record))
            continue
        found.append(_problem(folder, f"{kind}/{name}{ending}", digest))
    return Finding(kind, found.count(""), tuple(problem for problem in found if problem))


def _of_records(folder: Path) -> Finding:
    """Of a finished run all that `SHA256SUMS` names, and `status.json`.

    Else `config.json` alone.
    """
    phase = None
    sealed = os.path.lexists(folder / SUMS)
    ended = any(os.path.lexists(folder / name) for name in ("metrics.json", "report.html"))
    wrong = []
    try:
        phase = read_json(folder / "status.json").get("phase")
    except OSError:
        # A run that has just begun has none
        if sealed or ended or os.path.lexists(folder / "status.json"):
            wrong.append(_damaged(folder, folder / "status.json"))
    else:
        if sealed and phase != "finished":
            wrong.append("status.json does not say that the run has finished")
    if sealed or phase == "finished" or (phase is None and ended):
        sums = _read_sums(folder)
        found = [_problem(folder, name, digest) for name, digest in sums.items()]
        wrong += [] if sums else [_damaged(folder, folder / SUMS)]
    else:
        found = [_config_problem(folder)]
    return Finding("records", found.count(""), (*wrong, *(text for text in found if text)))


def _config_problem(folder: Path) -> str:
    try:
        read_json(folder / "config.json")
    except OSError:
        return _damaged(folder, folder / "config.json")
    return ""


def _read_sums(folder: Path) -> dict[str, str]:
    """The digests by file; none if `SHA256SUMS` is not as it was written."""
    if not os.path.isfile(folder / SUMS):
        return {}
    try:
        head, *lines = (folder / SUMS).read_text().split("\n")
    except (OSError, ValueError):
        return {}
    digests = [re.fullmatch(r"([0-9a-f]{64})  (\w[\w./-]*)", line) for line in lines[:-1]]
    names = {match[2]: match[1] for match in digests if match and ".." not in match[2]}
    whole = head == f"# {len(lines) - 1} files" and lines[-1:] == [""]
    return names if whole and len(names) == len(digests) else {}


def _problem(folder: Path, name: str, digest: object) -> str:
    """What is wrong with a file, by its SHA-256; empty: nothing."""
    try:
        sound = os.path.isfile(folder / name) and _sha256(folder / name) == digest
    except OSError:
        return f"{plain(name)} cannot be read"
    return "" if sound else _damaged(folder, folder / name)


def _damaged(folder: Path, file: Path) -> str:
    name = plain(file.relative_to(folder))
    if not os.path.lexists(file):
        return f"{name} is missing"
    return f"{name} is not as it was written"


def _sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
