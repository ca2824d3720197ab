"""Both averages, of clients and of images, and what a table says of a row beyond its figures."""

import csv
import re
from pathlib import Path

import pytest

from osfl.run_folder.report.metrics import gather, write_report
from osfl.settings import default_config
from osfl.tables.files import write_table
from osfl.tables.runner import Outcome
from osfl.tables.table_file import TableFile, read_table
from tests.helpers.run_folders import run_folder
from tests.helpers.run_outcomes import metrics, outcome
from tests.helpers.settings import ROOT, SHIPPED_TABLES

# a: 6 of 8 right; b: 1 of 32. The clients' average is 39.1 %; of the 40 images 7 are right, 17.5 %.
UNEQUAL = {"a": [[3, 1], [1, 3]], "b": [[1, 15], [16, 0]]}


def test_clients_count_once_or_by_their_images(tmp_path: Path) -> None:
    equal = {"a": [[3, 1], [1, 3]], "b": [[1, 3], [3, 1]]}
    result = gather(run_folder(tmp_path / "x", {"FT": UNEQUAL, "MD": equal}))
    assert result["accuracy"]["FT"] == {"a": 75.0, "b": 3.125, "average": 39.0625}
    assert result["over_images"] == {"FT": 17.5, "MD": 50.0}
    assert result["accuracy"]["MD"]["average"] == 50.0


def test_the_report_shows_both(tmp_path: Path) -> None:
    write_report(run_folder(tmp_path / "x", {"FT": UNEQUAL}), ("cat", "dog"))
    page = (tmp_path / "x" / "report.html").read_text()
    assert "<th>average</th><th>all images</th><th>balanced</th><th>macro-F1</th></tr>" in page
    figures = re.findall(r'<td class="heat"[^>]*>([\d.]+)</td>', page)
    # Of 20 true cats 4 are right, of 20 dogs 3; predicted were 21 cats and 19 dogs
    assert figures[:4] == ["39.1", "17.5", "17.5", "17.4"]
    # Each client: its accuracy, balanced accuracy and macro-F1
    assert figures[4:10] == ["75.0", "75.0", "75.0", "3.1", "3.1", "3.0"]
    # The weakest class first: accuracy, precision, F1
    assert figures[10:] == ["15.0", "15.8", "15.4", "20.0", "19.0", "19.5"]


def test_the_shown_model_is_one_that_was_tested(tmp_path: Path) -> None:
    matrix = [[3, 1], [1, 3]]
    metrics = write_report(
        run_folder(tmp_path / "x", {"FT": {}, "S": {"a": matrix}}), ("cat", "dog")
    )
    assert (metrics["shown"], metrics["average"]) == ("S", 75.0)


def table_of(tmp_path: Path, outcomes: list[Outcome]) -> str:
    rows: dict = {result.cell.row: {} for result in outcomes}
    write_table(TableFile("t", "", (0,), rows), outcomes, tmp_path, "", 1)
    return (tmp_path / "t.md").read_text()


def test_a_table_has_a_column_for_all_images_where_they_differ(tmp_path: Path) -> None:
    """Local's, over its models: 17.5 and 50 % of the images.

    Where b did not test, a's images alone.
    """
    accuracy = {"a": {"a": 75.0, "b": 3.125, "average": 39.0625}}
    two = accuracy | {"b": {"a": 50.0, "b": 50.0, "average": 50.0}}
    both = {"a": UNEQUAL, "b": {"a": [[2, 2], [2, 2]], "b": [[8, 8], [8, 8]]}}
    partly = {"a": UNEQUAL, "b": {"a": both["b"]["a"]}}
    cells = [
        outcome("FedX", 0, metrics=metrics("fedx", accuracy) | {"over_images": {"a": 17.5}}),
        outcome("local", 0, metrics=metrics("local", two) | {"confusion": both}),
        outcome("some", 0, metrics=metrics("local", _without_b(two)) | {"confusion": partly}),
    ]
    page = table_of(tmp_path, cells)
    assert "| a | b | average | all images | upload |" in page
    assert "| FedX | 75.0 | 3.1 | **39.1** | 17.5 | 1 kB |" in page
    assert "| local | 62.5 | 26.6 | **44.5** | 33.8 | 1 kB |" in page
    assert "| some | 62.5 | nan | **62.5** | 62.5 | 1 kB |" in page
    assert "average: over clients; all images: over the test images of all clients" in page
    lines = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [line["over_images"] for line in lines] == ["17.5", "33.75", "62.5"]


def _without_b(accuracy: dict) -> dict:
    return {"a": accuracy["a"], "b": {"a": accuracy["b"]["a"], "average": accuracy["b"]["a"]}}


def test_a_table_without_a_difference_says_so(tmp_path: Path) -> None:
    accuracy = {"FT": {"a": 40.0, "b": 60.0, "average": 50.0}}
    page = table_of(tmp_path, [outcome("FedX", 0, metrics=metrics("fedx", accuracy))])
    assert "all images |" not in page
    assert "the average over clients equals the average over all test images" in page


@pytest.mark.parametrize(
    ("text", "description", "sentence"),
    [
        (3.0, 3.0, ""),
        (0.0, 2.0, "FedX is guided by the description alone (FedDEO's eq. 5 without its text"),
        (2.0, 0.0, "FedX is guided by the text alone (FedDEO's eq. 5 without its description)"),
    ],
)
def test_a_table_says_which_branches_feddeo_was_guided_by(
    tmp_path: Path, text: float, description: float, sentence: str
) -> None:
    scales = {"feddeo.guidance-text": text, "feddeo.guidance-description": description}
    record = metrics("feddeo", {"FT": {"a": 40.0, "average": 40.0}}) | {"config": scales}
    page = table_of(tmp_path, [outcome("FedX", 0, metrics=record)])
    assert (sentence in page) if sentence else ("guided by" not in page)


@pytest.mark.parametrize("file", SHIPPED_TABLES, ids=lambda file: file.stem)
def test_shipped_rows_that_are_called_feddeo_run_both_of_its_branches(file: Path) -> None:
    for name, row in read_table(file).rows.items():
        scales = {**default_config(), **row}
        if scales["method"] == "feddeo":
            both = all(scales[f"feddeo.guidance-{b}"] for b in ("text", "description"))
            assert both != ("description alone" in name), name


@pytest.mark.parametrize("name", ["digits", "label-skew"])
def test_learned_conditions_have_as_many_steps_in_a_table(name: str) -> None:
    learns = ("feddeo", "espresso", "fedbip")
    rows = read_table(ROOT / "configs" / "tables" / f"{name}.toml").rows.values()
    steps = {row[f"{row['method']}.steps"] for row in rows if row["method"] in learns}
    assert len(steps) == 1
    assert steps.pop() > 0
