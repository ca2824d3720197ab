"""Verification that a run's folder is complete and as it was written.

Images, payloads and models have their SHA-256 in records beside them: `units/*.jsonl`,
`payloads/*.json`, `models/*.json`. These records and every other file of a finished run have theirs
in `SHA256SUMS`, which is written last (`sha256sum -c SHA256SUMS` reads it, too). The exceptions are
`status.json`, which must say `finished`, the launcher's `server.log`, and what no result depends
on: `curves/` and `tensorboard/`.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.run_folder.forgotten_store import record_problems, signer_of
from osfl.run_folder.image_store import image_digest, read_image, read_rows
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import CHECKSUMS, UNRECORDED, RunFolder
from osfl.util.files import CorruptFileError, read_json, write_atomically
from osfl.util.text import sanitize

_RECORDS = (
    *("*.json", "*.jsonl", "*.html", "payloads/*.json", "units/*.jsonl", "models/*.json"),
    *("tests/*.json", "histograms/*.json", "rounds/*.json", "rounds/*.safetensors"),
    *("contribution/*.json", "forgotten/*.json", "previous/*.safetensors", "*.bin"),
)


@dataclass(frozen=True)
class Finding:
    """The verification of one kind of file.

    Attributes:
        kind: the plural of its name, such as `models`.
        intact: the number of intact files.
        problems: a problem for each of the others.
    """

    kind: str
    intact: int
    problems: tuple[str, ...]

    @property
    def counted(self) -> str:
        """The number of intact files with their kind, such as `1 model`."""
        return f"{self.intact} {self.kind.removesuffix('s') if self.intact == 1 else self.kind}"


def image_problem(folder: Path, row: dict[str, Any]) -> str:
    """Return the problem with the image of a manifest's row; "" if it is intact."""
    name = sanitize(row["file"])
    if not os.path.isfile(folder / row["file"]):
        return f"{name} is missing"
    picture = read_image(folder / row["file"])
    if picture is None:
        return f"{name} cannot be read"
    if image_digest(picture) != row["sha256"]:
        return f"{name} is not the image that was synthesized"
    return ""


# ---- The whole folder ----


def contains_run(folder: Path) -> bool:
    """Return whether a folder contains a run, or what remains of one."""
    traces = ("config.json", "status.json", "metrics.json", "payloads", "units", CHECKSUMS)
    return any(os.path.lexists(folder / name) for name in traces)


def verify_run(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Finding]:
    """Read and check everything that a run has stored. Corrupt files are reported, never raised.

    Args:
        folder: `runs/<job id>`; the run need not have finished.
        progress: called with (images read, all images).
    """
    rows, problems = _unit_rows(folder)
    intact = 0
    with ThreadPoolExecutor() as readers:
        image_problems = readers.map(lambda row: image_problem(folder, row), rows)
        for number, problem in enumerate(image_problems, start=1):
            problems += [problem] if problem else []
            intact += not problem
            progress(number, len(rows))
    findings = [
        _check_recorded_files(folder, "payloads", ".pb", _reused_payloads(folder)),
        Finding("images", intact, tuple(problems)),
        _check_manifest(folder, rows),
        _check_recorded_files(folder, "models", ".safetensors"),
        *_check_removals(folder),
    ]
    reported = {problem for finding in findings for problem in finding.problems}
    records = _check_records(folder)
    unreported = tuple(problem for problem in records.problems if problem not in reported)
    return [*findings, Finding("records", records.intact, unreported)]


def write_checksums(folder: Path) -> None:
    """Write `SHA256SUMS` of all records at the end of a run, which also shows missing files."""
    names = [
        str(file.relative_to(folder))
        for pattern in _RECORDS
        for file in sorted(folder.glob(pattern))
        if file.name not in UNRECORDED and os.path.isfile(file)
    ]
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / CHECKSUMS, f"# {len(names)} files\n{''.join(lines)}".encode())


def check_checksum(folder: Path, name: str) -> None:
    """Check a record of a run against `SHA256SUMS`, if it is listed there.

    Raises:
        CorruptFileError: the record is missing or corrupt.
    """
    digest = read_checksums(folder).get(name)
    if digest and (problem := _problem(folder, name, digest)):
        raise CorruptFileError(f"{folder}: {problem}; {HINT_RECREATE}")


def _unit_rows(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all work units, sorted by file, and the problems with units."""
    rows = []
    problems = []
    for unit in sorted(RunFolder(folder).unit_files()):
        try:
            rows += read_rows(unit)
        except OSError:
            problems.append(_corruption(folder, unit))
    rows.sort(key=lambda row: row["file"])
    return rows, problems


def _check_removals(folder: Path) -> list[Finding]:
    """Check the records of forgotten clients and their signatures; [] if there are none."""
    files = RunFolder(folder).forgotten_files()
    problems = tuple(record_problems(files))
    return [Finding("removal records", len(files) - len(problems), problems)] if files else []


def signature_lines(folder: Path) -> list[str]:
    """Return a line for each intact removal record that says which key has signed it."""
    lines = []
    for file in RunFolder(folder).forgotten_files():
        with suppress(OSError):
            key = signer_of(file)
            signer = f"signed by the Ed25519 key {key}" if key else "not signed"
            lines.append(f"forgotten/{file.name}: {signer}")
    return lines


def _check_manifest(folder: Path, unit_rows: list[dict[str, Any]]) -> Finding:
    """Check that every row of `manifest.jsonl` equals a row of a work unit.

    A run has a manifest from the end of its synthesis on.
    """
    file = RunFolder(folder).manifest_file
    if not os.path.lexists(file):
        return Finding("manifest rows", 0, ())
    try:
        rows = read_rows(file)
    except OSError:
        return Finding("manifest rows", 0, (_corruption(folder, file),))
    rows_by_file = {row["file"]: row for row in unit_rows}
    problems = tuple(
        f"manifest.jsonl: the row of {sanitize(row['file'])} differs from that of its work unit"
        for row in rows
        if rows_by_file.get(row["file"]) != row
    )
    return Finding("manifest rows", len(rows) - len(problems), problems)


def _reused_payloads(folder: Path) -> dict[str, str] | None:
    """Return the SHA-256 of the payloads that a run is bound to; None for its own payloads."""
    try:
        source = RunFolder(folder).payload_source()
    # The check of the records reports it
    except OSError:
        return None
    return None if source is None else source.payloads


def _check_recorded_files(
    folder: Path, kind: str, ending: str, bound_to: Mapping[str, str] | None = None
) -> Finding:
    """Check files whose digest is in a JSON file beside them; both must exist.

    Args:
        bound_to: the digests that the files must have in any case, by name.
    """
    files = [*(folder / kind).glob(f"*{ending}"), *(folder / kind).glob("*.json")]
    results = []
    for name in sorted({file.stem for file in files}):
        record = folder / kind / f"{name}.json"
        try:
            digest = read_json(record).get("sha256")
        except OSError:
            results.append(_corruption(folder, record))
            continue
        if bound_to is not None and bound_to.get(name) != digest:
            results.append(f"{sanitize(f'{kind}/{name}{ending}')} is not in payloads-from.json")
            continue
        results.append(_problem(folder, f"{kind}/{name}{ending}", digest))
    return Finding(kind, results.count(""), tuple(problem for problem in results if problem))


def _check_records(folder: Path) -> Finding:
    """Check `status.json` and all files that `SHA256SUMS` lists, for a finished run.

    Of an unfinished run only `config.json` is checked.
    """
    run = RunFolder(folder)
    phase = None
    sealed = os.path.lexists(folder / CHECKSUMS)
    ended = os.path.lexists(run.metrics_file) or os.path.lexists(run.report_file)
    problems = []
    try:
        phase = read_json(run.status_file).get("phase")
    except OSError:
        # A run that has just started has none
        if sealed or ended or os.path.lexists(run.status_file):
            problems.append(_corruption(folder, run.status_file))
    else:
        if sealed and phase != "finished":
            problems.append("status.json does not say that the run has finished")
    if sealed or phase == "finished" or (phase is None and ended):
        sums = read_checksums(folder)
        results = [_problem(folder, name, digest) for name, digest in sums.items()]
        problems += [] if sums else [_corruption(folder, folder / CHECKSUMS)]
    else:
        results = [_config_problem(folder)]
    problems += [problem for problem in results if problem]
    return Finding("records", results.count(""), tuple(problems))


def _config_problem(folder: Path) -> str:
    file = RunFolder(folder).config_file
    try:
        read_json(file)
    except OSError:
        return _corruption(folder, file)
    return ""


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the digests by file; {} if `SHA256SUMS` is missing or corrupt."""
    if not os.path.isfile(folder / CHECKSUMS):
        return {}
    try:
        head, *lines = (folder / CHECKSUMS).read_text().split("\n")
    except (OSError, ValueError):
        return {}
    matches = [re.fullmatch(r"([0-9a-f]{64})  (\w[\w./-]*)", line) for line in lines[:-1]]
    digests = {match[2]: match[1] for match in matches if match and ".." not in match[2]}
    is_complete = head == f"# {len(lines) - 1} files" and lines[-1:] == [""]
    return digests if is_complete and len(digests) == len(matches) else {}


def _problem(folder: Path, name: str, digest: object) -> str:
    """Return the problem with a file, by its SHA-256; "" if it is intact."""
    try:
        is_intact = os.path.isfile(folder / name) and sha256_of(folder / name) == digest
    except OSError:
        return f"{sanitize(name)} cannot be read"
    return "" if is_intact else _corruption(folder, folder / name)


def _corruption(folder: Path, file: Path) -> str:
    name = sanitize(file.relative_to(folder))
    if not os.path.lexists(file):
        return f"{name} is missing"
    return f"{name} is corrupt"


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
