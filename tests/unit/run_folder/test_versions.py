"""The versions of a model in the report of the run that made the last one."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from osfl.run_folder.continuation_store import Continuation
from osfl.run_folder.forgotten_store import Removal, name_digest
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.report.versions import MAX_LABELS, MAX_LINES, section_values
from tests.helpers.run_folders import run_folder

GOOD = [[4, 0], [1, 3]]
WEAK = [[2, 2], [2, 2]]


def make_version(
    root: Path, number: int, clients: str, carried: str = "", tests: dict[str, Any] | None = None
) -> RunFolder:
    """A run with a payload of each client (a letter), which continues that of the number before."""
    matrices = dict.fromkeys(clients, GOOD) if tests is None else tests
    folder = RunFolder(run_folder(root / f"v{number}", {"FT": matrices} if matrices else {}))
    digests = {client: hashlib.sha256(client.encode()).hexdigest() for client in clients}
    for client in clients:
        record = {"sha256": digests[client], "bytes": 1, "costs": {}}
        folder.store_payload(client, client.encode(), record)
    if number > 1:
        last = f"v{number - 1}"
        payloads = {client: digests[client] for client in carried}
        jobs = dict.fromkeys(carried, last)
        classes = dict.fromkeys(carried, ("cat", "dog"))
        folder.store_continuation(
            Continuation(str(root / last), last, number, payloads, jobs, classes)
        )
    write_report(folder.path, ("cat", "dog"))
    return folder


def history_of(folder: RunFolder) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(folder.metrics_file.read_text())["version"]["history"]
    return rows


def lines_of(page: str) -> dict[str, list[str]]:
    """The points of each line in the plot of versions."""
    plot = page[page.index('aria-label="accuracy, %') :]
    plot = plot[: plot.index("</svg>")]
    lines = re.findall(r'<polyline [^>]*points="([^"]*)"><title>([^<]*)</title>', plot)
    return {name: points.split() for points, name in lines}


def test_the_last_version_shows_all_versions(tmp_path: Path) -> None:
    first = make_version(tmp_path, 1, "ab", tests={"a": GOOD, "b": WEAK})
    make_version(tmp_path, 2, "abc", "ab")
    third = make_version(tmp_path, 3, "bcd", "bc", tests={"b": GOOD, "d": WEAK})
    assert "Versions</h2>" not in first.report_file.read_text()
    first_entry, second_entry = history_of(third)
    # The client a is no client of the third version, and so it is not named
    assert first_entry["accuracy"] == {"b": 50.0}
    assert (
        first_entry["number"],
        first_entry["carried"],
        first_entry["new"],
        first_entry["average"],
    ) == (1, 0, 2, 68.75)
    assert second_entry["accuracy"] == {"b": 87.5, "c": 87.5}
    assert (
        second_entry["number"],
        second_entry["carried"],
        second_entry["new"],
        second_entry["average"],
    ) == (2, 2, 1, 87.5)
    page = third.report_file.read_text()
    assert "Versions</h2>" in page
    lines = lines_of(page)
    assert {name: len(points) for name, points in lines.items()} == {
        "b": 3,
        "c": 1,
        "d": 1,
        "average": 3,
    }
    # From left to right; a higher accuracy is higher
    places = [tuple(map(float, point.split(","))) for point in lines["b"]]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert places[0][1] > places[1][1] == places[2][1]
    titles = re.findall(r"<title>(version \d: \d \w+)</title>", page)
    assert titles == [
        *("version 1: 0 carried", "version 1: 2 new", "version 2: 2 carried"),
        *("version 2: 1 new", "version 3: 2 carried", "version 3: 1 new"),
    ]


def test_a_version_that_has_forgotten_a_client_shows_what_it_has_today(tmp_path: Path) -> None:
    first = make_version(tmp_path, 1, "ab")
    leaver = Removal("v1", name_digest("b"), "", "recomputed", True, "1", "then")
    first.store_removal(first.new_forgotten_file(), leaver)
    for file in first.path.glob("payloads/b.*"):
        file.unlink()
    shutil.rmtree(first.path / "tests")
    write_report(first.path, ("cat", "dog"))
    second = make_version(tmp_path, 2, "ac", "a")
    (row,) = history_of(second)
    assert (row["new"], row["forgotten"], row["average"], row["accuracy"]) == (1, 1, None, {})
    assert "<td>1</td><td>1</td><td>1</td>" in second.report_file.read_text()
    assert len(lines_of(second.report_file.read_text())["average"]) == 1


def test_a_version_without_results_is_said_to_be_gone(tmp_path: Path) -> None:
    first = make_version(tmp_path, 1, "ab")
    second = make_version(tmp_path, 2, "abc", "ab")
    first.metrics_file.write_text("no JSON")
    third = make_version(tmp_path, 3, "abcd", "abc")
    assert history_of(third)[0] == {"number": 1, "job": "v1"}
    assert "its folder has no results" in third.report_file.read_text()
    # Without the second's record the first is unknown
    shutil.rmtree(second.path)
    write_report(third.path, ("cat", "dog"))
    assert history_of(third) == [{"number": 2, "job": "v2"}]


def test_many_versions_and_clients_stay_readable() -> None:
    clients = {f"client-{number:03d}": {"upload_bytes": 1} for number in range(40)}
    row = {"carried": 40, "new": 0, "finished": "now", "forgotten": 0, "from_model": False}
    history = [
        {**row, "number": number, "job": f"v{number}", "average": 50.0, "accuracy": {}}
        for number in range(1, 60)
    ]
    tests = dict.fromkeys([*clients, "average"], 50.0)
    metrics = {
        "job_id": "v60",
        "version": {"number": 60, "new": [], "from_model": True, "history": history},
        "clients": clients,
        "accuracy": {"FT": tests},
        "shown": "FT",
    }
    values = section_values(metrics)
    assert values["versions_unplotted"] == 40 - MAX_LINES
    assert len(values["versions_legend"]) == MAX_LINES
    labels = re.findall(r'text-anchor="middle">(\d+)<', values["versions_plot"])
    assert len(labels) == MAX_LABELS
    assert values["model_versions"][-1]["from_model"]
    assert section_values({**metrics, "version": {}}) == {}
