"""Tables: what a table file asks for, and what becomes of its runs."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.config import ConfigError
from osfl.tables.files import write_table
from osfl.tables.markdown import _costs
from osfl.tables.plot import frontier, marker_size, plot
from osfl.tables.records import as_csv, describe_sharing, records_of
from osfl.tables.runner import Outcome, Runner
from osfl.tables.table_file import Cell, TableFile, read_table
from tests.helpers.run_outcomes import metrics, outcome
from tests.helpers.settings import ROOT, SHIPPED_TABLES, defaults, quick

TABLE = """
title = "Two methods"
seeds = [0, 1]
[common]
num-clients = 2
[rows.ceiling]
method = "ceiling"
[rows."Espresso C+G"]
method = "espresso"
espresso.z-sampling = false
"""


def write(folder: Path, text: str = TABLE, name: str = "table.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_cells_are_rows_times_seeds_with_all_their_settings(tmp_path: Path) -> None:
    table = read_table(write(tmp_path), ["synthesis.steps=3"])
    assert (table.title, table.seeds, list(table.rows)) == (
        "Two methods",
        (0, 1),
        ["ceiling", "Espresso C+G"],
    )
    cells = table.cells()
    assert [(c.row, c.seed) for c in cells] == [
        ("ceiling", 0),
        ("Espresso C+G", 0),
        ("ceiling", 1),
        ("Espresso C+G", 1),
    ]
    assert re.fullmatch("table-Espresso-C-G-s1-[0-9a-f]{8}", cells[3].job_id)
    assert len({c.job_id for c in cells}) == 4
    same_id, other_id = (
        read_table(write(tmp_path), [f"synthesis.steps={n}"]).cells()[3].job_id for n in (3, 4)
    )
    assert (same_id == cells[3].job_id, other_id == cells[3].job_id) == (True, False)
    expected = {
        "num-clients=2",
        "method=espresso",
        "espresso.z-sampling=false",
        "synthesis.steps=3",
        "seed=1",
    }
    assert set(cells[3].settings) == expected
    assert [c.row for c in read_table(write(tmp_path), seeds="5", rows="ceiling").cells()] == [
        "ceiling"
    ]
    assert read_table(write(tmp_path), seeds="5").seeds == (5,)


@pytest.mark.parametrize(
    ("setting", "same"),
    [
        ("personalization.steps=9", False),
        ("personalization.lr=0.5", True),
        ("deadline=9", True),
    ],
)
def test_a_row_that_adapts_is_another_run(tmp_path: Path, setting: str, same: bool) -> None:
    """Keys that may change in a run with a job id of its own, but for adaptation."""
    first = read_table(write(tmp_path)).cells()[0]
    changed_cell = read_table(write(tmp_path), [setting]).cells()[0]
    assert (first.job_id == changed_cell.job_id) == same


@pytest.mark.parametrize("folder", ["", "~"])
def test_a_row_with_other_weights_under_the_same_name_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = tmp_path / "weights.safetensors"
    ids = []
    for content in (b"first", b"second", b"first"):
        weights.write_bytes(content)
        name = f"{folder or tmp_path}/{weights.name}"
        settings = [f"global-model.init={name}", "global-model.architecture=resnet18"]
        ids.append(read_table(write(tmp_path), settings).cells()[0].job_id)
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize(
    "setting", ["secure-sum=true", "continue-from=/runs/a", "payloads-from=/runs/a"]
)
def test_rows_that_cannot_reuse_payloads_share_none(
    tmp_path: Path, tiny_kit: Path, setting: str
) -> None:
    """Rows that differ in the synthesis alone; they are not those without the key either."""
    table = '[common]\nmethod = "oscar"\n[rows.a]\n[rows.b]\nsynthesis.steps = 9\n'
    alone = read_table(write(tmp_path, table), [f"kit={tiny_kit}"], seeds="0").cells()
    assert alone[0].payload_key == alone[1].payload_key != ""
    cells = read_table(write(tmp_path, table), [f"kit={tiny_kit}", setting], seeds="0").cells()
    assert [cell.payload_key for cell in cells] == ["", ""]
    assert not {cell.job_id for cell in cells} & {cell.job_id for cell in alone}


def test_a_grid_multiplies_the_rows(tmp_path: Path) -> None:
    file = write(tmp_path, TABLE + '[grid]\n"synthesis.steps" = [2, 5]\nnum-clients = [2, 3]\n')
    rows = read_table(file).rows
    assert list(rows)[:4] == [f"ceiling steps={s} num-clients={n}" for s in (2, 5) for n in (2, 3)]
    assert len(rows) == 8
    assert (
        rows["Espresso C+G steps=5 num-clients=3"]["synthesis.steps"],
        rows["ceiling steps=2 num-clients=3"]["num-clients"],
    ) == (5, 3)


def test_a_table_has_what_it_does_not_set_of_the_one_that_it_extends(tmp_path: Path) -> None:
    """Keys of [common] one by one, and whole rows."""
    base = (
        "title = 'Base'\nseeds = [3]\nreference = 'a'\n"
        "[common]\nnum-clients = 2\nfeddeo.epochs = 7\nfeddeo.lr = 0.1\n"
        "[rows.a]\nmethod = 'feddeo'\n[rows.b]\nmethod = 'feddeo'\nfeddeo.lr = 0.2\n"
    )
    (tmp_path / "base.toml").write_text(base)
    text = (
        "extends = 'base.toml'\ntitle = 'Other'\n[common]\nfeddeo.epochs = 9\n"
        "[rows.b]\nmethod = 'oscar'\n[rows.c]\nmethod = 'fedlmg'\n"
    )
    table = read_table(write(tmp_path, text))
    assert (table.title, table.seeds, table.reference) == ("Other", (3,), "a")
    common = {"num-clients": 2, "feddeo.epochs": 9, "feddeo.lr": 0.1}
    methods = {"a": "feddeo", "b": "oscar", "c": "fedlmg"}
    assert table.rows == {row: {**common, "method": name} for row, name in methods.items()}


def test_only_a_table_that_is_there_and_whole_is_extended(tmp_path: Path) -> None:
    file = write(tmp_path, "extends = 'base.toml'")
    with pytest.raises(ConfigError, match="extends = 'base.toml': .*base.toml: cannot be read"):
        read_table(file)
    base = tmp_path / "base.toml"
    base.write_text("extends = 'first.toml'\n[rows.a]")
    with pytest.raises(ConfigError, match="extends another one itself; name 'first.toml'"):
        read_table(file)
    base.write_text("row = 1")
    with pytest.raises(ConfigError, match="base.toml: 'row' is unknown"):
        read_table(file)
    base.write_text("[common]\nnum-clients = 2")
    with pytest.raises(ConfigError, match=r"has no \[rows.NAME\]"):
        read_table(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = 1\n[rows.a]", "extends = 1: must be a string"),
        ("seeds = [0", "not valid TOML"),
        ("seeds = [0]", r"has no \[rows.NAME\]"),
        ("row = 1", "'row' is unknown"),
        ("[rows.a]\nmethod = 'magic'", "row 'a': invalid run-config:\n  method = 'magic'"),
        (
            "[rows.a]\nfeddeo.epoch = 1",
            r"row 'a'.*feddeo.epoch: unknown key \(did you mean feddeo.epochs\?\)",
        ),
        ("[rows.'a, b']", "name must not have a comma"),
        ("seeds = ['x']\n[rows.a]", "must be integers"),
        ("[rows.a]\nruns-dir = '/tmp'", "row 'a': runs-dir = '/tmp': the table sets this key"),
        ("[common]\nseed = 3\n[rows.a]", "row 'a': seed = 3: the table sets this key"),
        ("reference = 'b'\n[rows.a]", "reference = 'b': there is no such row; the rows are a"),
        ("[rows.a]\n[grid]\nseed = 3", r"\[grid\] seed: must be a list"),
    ],
)
def test_a_wrong_table_is_named_before_anything_runs(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_table(write(tmp_path, text)).cells()
    with pytest.raises(ConfigError, match="'nobody': .* has no such row; the rows are ceiling"):
        read_table(write(tmp_path), rows="nobody")


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED_TABLES, ids=lambda file: file.stem)
def test_the_shipped_tables_are_sound(file: Path) -> None:
    """The cells of other seeds differ in the seed alone."""
    table = read_table(file)
    assert replace(table, seeds=table.seeds[:1]).cells()


def test_the_digits_table_has_every_method() -> None:
    from osfl.methods import METHODS

    rows = read_table(ROOT / "configs" / "tables" / "digits.toml").rows
    # They need a CLIP, and another run; a mixed run is made of the others
    apart = {"zero-shot", "real-and-synthetic", "mixed"}
    assert {row["method"] for row in rows.values()} == set(METHODS) - apart
    switches = [
        (row.get("espresso.gmm", True), row.get("espresso.z-sampling", True))
        for row in rows.values()
        if row["method"] == "espresso"
    ]
    assert sorted(switches) == [(False, False), (False, True), (True, False), (True, True)]


def test_missing_costs_are_reported(tmp_path: Path) -> None:
    """With an epsilon a client sends none; bytes are counted by the server."""
    private = metrics("votes", {"FT": {"a": 40.0, "average": 40.0}})
    for client in private["clients"].values():
        client["epsilon"] = 1.0
        for key in ("flops", "seconds", "peak_memory_mb"):
            client.pop(key)
    records = records_of(outcome("votes", 0, metrics=private))
    assert records[0]["client_flops"] is None
    assert _costs(records)[2:5] == ["not sent"] * 3
    assert _costs(records)[0] == "1 kB"
    assert "votes,0,40.0,40.0,40.0,1,1000,2000000.0,,,,0.25" in as_csv(records)


def test_figures_by_hand(tmp_path: Path) -> None:
    """FedX: averages 50 and 54 give 52.0 ± 2.8; Local's models become their mean.

    The largest client's costs; an error stands below.
    """
    outcomes = [
        outcome(
            "FedX", 0, metrics=metrics("fedx", {"FT": {"a": 40.0, "b": 60.0, "average": 50.0}})
        ),
        outcome(
            "local",
            0,
            metrics=metrics(
                "local",
                {
                    "a": {"a": 90.0, "b": 10.0, "average": 50.0},
                    "b": {"a": 0.0, "b": 80.0, "average": 40.0},
                },
            ),
        ),
        outcome(
            "FedX", 1, metrics=metrics("fedx", {"FT": {"a": 44.0, "b": 64.0, "average": 54.0}})
        ),
        outcome("local", 1, error="no disk"),
    ]
    table = TableFile("t", "A title", (0, 1), {"FedX": {}, "local": {}})
    records = write_table(table, outcomes, tmp_path, "osfl compare t.toml", 2)
    page = (tmp_path / "t.md").read_text()
    assert (
        "| FedX | 42.0 | 62.0 | **52.0** ± 2.8 | 1 kB | 2 MB | 3 TFLOP | 4 | 512 | 0.250 | 1 |"
        in page
    )
    assert "| local | 45.0 | 45.0 | **45.0** |" in page
    assert page.startswith("**A title**")
    assert "- local, seed 1: no disk" in page
    assert (
        "; mean of seeds 0, 1, ± the standard deviation of the average; "
        "the average over clients equals the average over all test images. Costs" in page
    )
    assert "`osfl compare t.toml`, 2 runs in parallel" in page
    lines = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [(line["row"], line["seed"], line["average"], line["error"]) for line in lines] == [
        ("FedX", "0", "50.0", ""),
        ("FedX", "1", "54.0", ""),
        ("local", "0", "45.0", ""),
        ("local", "1", "", "no disk"),
    ]
    assert (lines[0]["a"], lines[0]["upload_bytes"], lines[0]["client_memory_mb"]) == (
        "40.0",
        "1000",
        "512.0",
    )
    assert (tmp_path / "t.png").stat().st_size > 10_000
    assert len(records) == 4


def test_an_adapted_model_has_a_row_beside_its_models(tmp_path: Path) -> None:
    """A run of one model keeps its name, by which others are held against it."""
    one_model = {"FT": {"a": 40.0, "average": 40.0}, "FT, adapted": {"a": 60.0, "average": 60.0}}
    two_models = {name: {"a": 50.0, "average": 50.0} for name in ("FT", "FT, adapted", "MD")}
    outcomes = [
        outcome("X", 0, metrics=metrics("x", one_model)),
        outcome("Y", 0, metrics=metrics("y", two_models)),
    ]
    table = TableFile("t", "", (0,), {"X": {}, "Y": {}}, reference="X")
    records = write_table(table, outcomes, tmp_path, "osfl compare t.toml", 1)
    assert [(record["row"], record["average"]) for record in records] == [
        ("X", 40.0),
        ("X, adapted", 60.0),
        ("Y FT", 50.0),
        ("Y FT, adapted", 50.0),
        ("Y MD", 50.0),
    ]
    page = (tmp_path / "t.md").read_text()
    assert "test images; adapted: after personalization on its own training images; seed 0" in page
    assert page.count("adapted: after") == 1
    plain = [outcome("X", 0, metrics=metrics("x", {"FT": one_model["FT"]}))]
    write_table(table, plain, tmp_path, "osfl compare t.toml", 1)
    assert "adapted" not in (tmp_path / "t.md").read_text()


def test_rows_are_paired_by_seed(tmp_path: Path) -> None:
    """4, 6 and 8 points apart are 6.0 with s = 2, and t(2) = 4.3027 times 2 / sqrt(3) is 4.97. 4,
    -10 and 5 are -0.33 with s = 8.39, and 20.83.
    """

    def run(row: str, seed: int, average: float) -> Outcome:
        figures = {"FT": {"a": average, "average": average}}
        return outcome(row, seed, metrics=metrics("fedx", figures))

    averages = {
        "base": {0: 50.0, 1: 60.0, 2: 40.0},
        "better": {0: 54.0, 1: 66.0, 2: 48.0},
        "worse": {0: 46.0, 1: 54.0, 2: 32.0},
        "unsure": {0: 54.0, 1: 50.0, 2: 45.0, 7: 99.0},
        "same": {1: 61.5, 2: 41.5},
        "once": {2: 38.0},
        "elsewhere": {9: 38.0},
    }
    outcomes = [run(row, s, v) for row, figures in averages.items() for s, v in figures.items()]
    table = TableFile("t", "T", (0, 1, 2), {row: {} for row in averages}, reference="base")
    write_table(table, outcomes, tmp_path, "osfl compare t.toml", 2)
    page = (tmp_path / "t.md").read_text()
    assert "Difference of the average to base, in percentage points, paired by seed" in page
    assert r"| better | +6.0 \* | +1.0 to +11.0 | 3 |" in page
    assert r"| worse | -6.0 \* | -11.0 to -1.0 | 3 |" in page
    assert "| unsure | -0.3 | -21.2 to +20.5 | 3 |" in page
    assert r"| same | +1.5 \* | +1.5 to +1.5 | 2 |" in page
    assert "| once | -2.0 |  | 1 |" in page
    assert "| elsewhere | +" not in page.partition("Difference")[2]
    assert "| base | +0.0" not in page


def test_the_plots_axes_span_a_decade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all rows send nearly the same."""
    from matplotlib.figure import Figure

    spans = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **named: spans.extend(axes.get_xlim() for axes in self.axes),
    )
    record = {"average": 50.0, "download_bytes": 1e8}
    plot(
        [
            {"row": name, "upload_bytes": size, **record}
            for name, size in (("A", 44_739_300), ("B", 44_739_311))
        ],
        tmp_path / "x.png",
    )
    assert len(spans) == 2
    for (low, high), size in zip(spans, (44_739_305, 144_739_305), strict=True):
        assert high / low >= 9.99
        assert (low * high) ** 0.5 == pytest.approx(size, rel=1e-3)


def test_an_unknown_download_is_not_plotted_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the left, both rows; on the right, the one whose kit was counted."""
    from matplotlib.figure import Figure

    drawn: list[list[float]] = []

    def places(self: Figure, *args: Any, **named: Any) -> None:
        drawn.extend(
            [float(bars.lines[0].get_xdata()[0]) for bars in axes.containers] for axes in self.axes
        )

    monkeypatch.setattr(Figure, "savefig", places)
    record = {"average": 50.0, "upload_bytes": 1000, "download_bytes": 10**6}
    plot(
        [{"row": "A", **record}, {"row": "B", **record, "kit_not_counted": True}],
        tmp_path / "x.png",
    )
    assert drawn == [[1000, 1000], [1_001_000]]


def test_the_frontier_is_above_all_that_sends_less() -> None:
    points = [(100.0, 50.0), (0.0, 40.0), (10.0, 39.0), (0.0, 30.0), (50.0, 60.0), (90.0, 60.0)]
    assert frontier(points) == [(0.0, 40.0), (50.0, 60.0)]
    assert frontier([]) == []


def test_a_markers_area_grows_with_the_model() -> None:
    resnet18 = marker_size(44.7e6)
    assert marker_size(4 * 44.7e6) == pytest.approx(2 * resnet18)
    assert marker_size(None) == resnet18
    assert marker_size(1e3) < marker_size(20e6) < marker_size(1e12) <= 32


def test_rows_that_send_nothing_are_at_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper bound alone is a line: it is no federation."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(self: Figure, *args: object, **named: object) -> None:
        figures.append(self)
        savefig(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    rows = [("prompts", 0, 40.0), ("vector", 4_000, 78.0), ("feddeo", 41_000, 70.0)]
    records = [
        {"row": name, "upload_bytes": size, "average": mean, "download_bytes": 1e6}
        for name, size, mean in rows
    ]
    bound = {"row": "ceiling", "upload_bytes": 0, "average": 86.0, "download_bytes": 1e6}
    plot([*records, {**bound, "is_reference": True}], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    uploads, both = figures[0].axes
    assert uploads.get_xscale() == "symlog"
    assert uploads.get_xlim()[0] < 0
    assert both.get_xscale() == "log"
    lines = {line.get_linestyle(): line for line in uploads.lines if len(line.get_xdata()) > 1}
    assert list(lines["--"].get_ydata()) == [86.0, 86.0]
    assert lines["-"].get_drawstyle() == "steps-post"
    assert list(lines["-"].get_xdata()) == [0, 4_000]
    assert list(lines["-"].get_ydata()) == [40.0, 78.0]


def test_unknown_and_untested_figures_are_marked(tmp_path: Path) -> None:
    """b did not test Local's second model: the mean is over a, and the table names b.

    A hub's model has no size.
    """
    local = metrics(
        "local", {"a": {"a": 90.0, "b": 10.0, "average": 50.0}, "b": {"a": 30.0, "average": 30.0}}
    )
    hub = metrics("fedx", {"FT": {"a": 40.0, "average": 40.0}})
    outcomes = [
        outcome("local", 0, metrics={**local, "not_tested": ["b"]}),
        outcome("hub", 0, metrics={**hub, "kit_not_counted": True}),
    ]
    write_table(TableFile("t", "", (0,), {"local": {}, "hub": {}}), outcomes, tmp_path, "", 1)
    page = (tmp_path / "t.md").read_text()
    assert "| local | 60.0 | **60.0** | 1 kB | 2 MB |" in page
    untested = "Some clients did not test every model; averages are over the others:\n\n- local"
    assert f"{untested}, seed 0: b" in page
    assert "| 1 kB | 2 MB + kit |" in page
    assert "test images; seed 0; the average" in page


def test_several_global_models_are_rows_of_their_own() -> None:
    two = {name: {"a": value, "average": value} for name, value in (("FT", 50.0), ("SD", 60.0))}
    records = records_of(outcome("FedLMG", 0, metrics=metrics("fedlmg", two)))
    assert [(r["row"], r["average"]) for r in records] == [("FedLMG FT", 50.0), ("FedLMG SD", 60.0)]


def settings_of(**overrides: object) -> list[str]:
    """Return what `quick` changes, as key=value."""
    base = defaults()
    changed = {key: value for key, value in quick(**overrides).items() if base[key] != value}
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changed.items()
    ]


@pytest.mark.system
def test_a_table_of_real_runs(tmp_path: Path, tiny_kit: Path, osfl) -> None:  # type: ignore[no-untyped-def]
    """One row that works and one that fails: table, CSV, plot, exit code 1.

    Again: the finished one is used as it is.
    """
    file = write(
        tmp_path,
        "title = 'Small'\n[common]\nnum-clients = 2\n[rows.good]\nmethod = 'prompts-only'\n"
        "[rows.bad]\nmethod = 'ceiling'\nglobal-model.init = '/nowhere/weights.safetensors'\n",
    )
    settings = settings_of(kit=str(tiny_kit), join_timeout=120.0)
    command = [
        "compare",
        str(file),
        *settings,
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "out"),
    ]
    result = osfl(*command)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "good, seed 0: done" in result.stderr, result.stderr
    assert "bad, seed 0: failed" in result.stderr, result.stderr
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| good |" in page
    assert "- bad, seed 0: " in page
    assert "/nowhere/weights.safetensors" in page
    again = osfl(*command, "--rows", "good")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "good, seed 0: done before" in again.stderr, again.stderr


def test_a_failure_before_an_interruption_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that failed has its error; one that the interruption ended has none of its own."""
    runner = Runner(tmp_path, 1)
    bad, good, slow = (outcome(name, 0).cell for name in ("bad", "good", "slow"))

    def run(cell: Cell) -> Outcome:
        if cell is bad:
            raise OSError("no disk")
        if cell is slow:
            runner._stopped.set()
            return Outcome(cell, error="stopped")
        return Outcome(cell, {"method": "fedx"})

    monkeypatch.setattr(runner, "run", run)
    runner.run_all([slow, good, bad])  # the last begins
    assert {cell.row: result.error for cell, result in runner.outcomes.items()} == {
        "bad": "OSError: no disk",
        "good": "",
    }


def test_quick_references_are_run_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed by seed, each from its last row to its first; the outcomes are in the table's order."""
    runner = Runner(tmp_path, 1)
    ran = []
    cells = [outcome(row, seed).cell for seed in (3, 1) for row in ("ceiling", "local", "slow")]
    monkeypatch.setattr(runner, "run", lambda cell: ran.append(cell.job_id) or Outcome(cell))
    assert [o.cell for o in runner.run_all(cells)] == cells
    assert ran == ["slow-3", "local-3", "ceiling-3", "slow-1", "local-1", "ceiling-1"]


@pytest.mark.system
def test_an_interrupted_table_leaves_no_process_and_shows_what_is_done(
    tmp_path: Path, tiny_kit: Path
) -> None:
    import psutil

    file = write(
        tmp_path,
        "[common]\nnum-clients = 2\n[rows.done]\nmethod = 'ceiling'\n[rows.one]\nmethod = "
        "'prompts-only'\n",
    )
    settings = settings_of(kit=str(tiny_kit), join_timeout=120.0)
    first_cell, cell = read_table(file, settings).cells()
    finished = {
        "metrics.json": metrics("ceiling", {"real": {"a": 40.0, "average": 40.0}}),
        "status.json": {"phase": "finished"},
    }
    for name, content in finished.items():
        (tmp_path / "runs" / first_cell.job_id).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / first_cell.job_id / name).write_text(json.dumps(content))
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "osfl"),
            "compare",
            str(file),
            *settings,
            "--runs",
            "runs",
            "--out",
            "out",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "runs" / f"{cell.job_id}.log"
    end = time.monotonic() + 300
    while not log.is_file():  # Flower has taken the run
        assert time.monotonic() < end, "no run began"
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    # As Ctrl-C, which a test runner in the background may have to ignore
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command resumes" in output
    assert "failed" not in output
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| done | 40.0 |" in page
    assert "- one, seed 0: not run yet" in page
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, alive


SWEEP = """
[common]
method = "feddeo"
num-clients = 2
[rows.weak]
feddeo.guidance-description = 1.0
[rows.strong]
feddeo.guidance-description = 5.0
[rows.long]
feddeo.epochs = 7
[rows.none]
method = "prompts-only"
"""


def test_rows_with_the_same_clients_have_the_same_payloads(tmp_path: Path, tiny_kit: Path) -> None:
    """Seed and client keys tell payloads apart; a job id is what it was before payloads shared."""
    cells = read_table(write(tmp_path, SWEEP), [f"kit={tiny_kit}"], seeds="0,1").cells()
    keys = {(cell.row, cell.seed): cell.payload_key for cell in cells}
    assert keys["weak", 0] == keys["strong", 0]
    assert keys["none", 0] == keys["none", 1] == ""
    several = {keys[name] for name in (("weak", 0), ("weak", 1), ("long", 0), ("none", 0))}
    assert len(several) == 4
    assert len({cell.job_id for cell in cells}) == len(cells)
    sealed = read_table(write(tmp_path, SWEEP), [f"kit={tiny_kit}", "sealing-key=/k"]).cells()
    assert [cell.job_id for cell in sealed] == [cell.job_id for cell in cells[:4]]
    assert sealed[0].payload_key != keys["weak", 0]


def sharing_cells(*names: str) -> list[Cell]:
    """Cells of one seed; the first letter of a name is that of its payloads, - for none."""
    return [Cell(name, 0, name, (), name[0].strip("-")) for name in names]


def leave(runs: Path, job: str, **content: object) -> None:
    """Leave what a run leaves: payloads, and files with a JSON content each (`a_b` is a-b)."""
    (runs / job / "payloads").mkdir(parents=True)
    (runs / job / "payloads" / "client-0.pb").write_bytes(b"payload")
    for name, value in content.items():
        (runs / job / f"{name.replace('_', '-')}.json").write_text(json.dumps(value))


def test_the_first_row_makes_the_payloads_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makers run before those that wait for them; a cell whose maker failed makes its own."""
    cells = sharing_cells("a1", "a2", "b1", "b2", "-", "a3")
    runner = Runner(tmp_path, 2)
    ran = []
    sources = {}

    def run(cell: Cell) -> Outcome:
        ran.append(cell.row)
        sources[cell.row] = runner._source(cell)
        if cell.row == "b1":
            return Outcome(cell, error="broken")
        leave(tmp_path, cell.job_id)
        return Outcome(cell, {"method": "fedx"})

    monkeypatch.setattr(runner, "run", run)
    runner.run_all(cells)
    assert sorted(ran[:3]) == ["-", "a1", "b1"]
    shared = [f"payloads-from={tmp_path / 'a1'}"]
    assert sources == {"a1": [], "a2": shared, "a3": shared, "b1": [], "b2": [], "-": []}


def test_runs_keep_the_payloads_that_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with payloads makes those of the others, and one that is bound to others keeps them."""
    cells = sharing_cells("a1", "a2", "a3", "a4")
    leave(tmp_path, "a2", status={"phase": "finished"}, metrics=metrics("oscar", {}))
    leave(tmp_path, "a3")
    source = {"run": "/elsewhere/x", "job": "x", "payloads": {}}
    leave(tmp_path, "a4", payloads_from=source)
    runner = Runner(tmp_path, 1)
    sources = {}

    def call(cell: Cell, command: list[str]) -> tuple[int, str]:
        sources[cell.row] = [word for word in command if word.startswith("payloads-from=")]
        return 1, "error no"

    monkeypatch.setattr(runner, "_call", call)
    runner.run_all(cells)
    assert sources == {
        "a1": [f"payloads-from={tmp_path / 'a2'}"],
        "a3": [],
        "a4": ["payloads-from=/elsewhere/x"],
    }


def test_the_hours_that_clients_did_not_work() -> None:
    """The seconds of the payloads' clients, once for every run that used them again."""
    runs = [outcome(row, 0, metrics=metrics("oscar", {})) for row in "abc"]
    assert describe_sharing(runs) == ""
    for number, run in enumerate(runs):
        run.metrics["payloads_from"] = "a" if number else ""
        run.metrics["clients"] = {"x": {"seconds": 5400.0}, "y": {"seconds": 1800.0}}
    start = (
        "2 of the runs use the payloads of another run with the same settings of the clients, "
        "which saved"
    )
    assert describe_sharing(runs) == f"{start} 4 client-hours."
    runs[2].metrics["clients"]["y"] = {"epsilon": 1.0}
    hidden = "without clients that do not send their time"
    assert describe_sharing(runs) == f"{start} 3.5 client-hours, {hidden}."
