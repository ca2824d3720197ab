"""Tables: what a table file asks for, and what becomes of its runs."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osfl.config import ConfigError
from osfl.tables.files import write_table
from osfl.tables.markdown import _costs
from osfl.tables.plot import plot
from osfl.tables.records import as_csv, records_of
from osfl.tables.runner import Outcome, Runner
from osfl.tables.table_file import Cell, TableFile, read_table
from tests.helpers.run_outcomes import metrics, outcome
from tests.helpers.settings import ROOT, defaults, quick

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
    same, other = (
        read_table(write(tmp_path), [f"synthesis.steps={n}"]).cells()[3].job_id for n in (3, 4)
    )
    assert (same == cells[3].job_id, other == cells[3].job_id) == (True, False)
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
    [("adaptation.steps=9", False), ("adaptation.lr=0.5", True), ("deadline=9", True)],
)
def test_a_row_that_adapts_is_another_run(tmp_path: Path, setting: str, same: bool) -> None:
    """What a run with a job id of its own may change, but for how the model is adapted."""
    first = read_table(write(tmp_path)).cells()[0]
    other = read_table(write(tmp_path), [setting]).cells()[0]
    assert (first.job_id == other.job_id) == same


def test_a_grid_multiplies_the_rows(tmp_path: Path) -> None:
    file = write(tmp_path, TABLE + '[grid]\n"synthesis.steps" = [2, 5]\nnum-clients = [2, 3]\n')
    rows = read_table(file).rows
    assert list(rows)[:4] == [f"ceiling steps={s} num-clients={n}" for s in (2, 5) for n in (2, 3)]
    assert len(rows) == 8
    assert (
        rows["Espresso C+G steps=5 num-clients=3"]["synthesis.steps"],
        rows["ceiling steps=2 num-clients=3"]["num-clients"],
    ) == (5, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
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


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "tables").glob("*.toml")), ids=lambda file: file.stem
)
def test_the_shipped_tables_are_sound(file: Path) -> None:
    assert read_table(file).cells()


def test_the_digits_table_has_every_method() -> None:
    from osfl.methods import METHODS

    rows = read_table(ROOT / "configs" / "tables" / "digits.toml").rows
    assert {row["method"] for row in rows.values()} == set(METHODS)
    switches = [
        (row.get("espresso.gmm", True), row.get("espresso.z-sampling", True))
        for row in rows.values()
        if row["method"] == "espresso"
    ]
    assert sorted(switches) == [(False, False), (False, True), (True, False), (True, True)]


def test_costs_that_were_not_sent_are_said(tmp_path: Path) -> None:
    """With an epsilon a client sends none; bytes are counted by the server."""
    private = metrics("votes", {"FT": {"a": 40.0, "average": 40.0}})
    for about in private["clients"].values():
        about["epsilon"] = 1.0
        for key in ("flops", "seconds", "peak_memory_mb"):
            about.pop(key)
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
    one = {"FT": {"a": 40.0, "average": 40.0}, "FT, adapted": {"a": 60.0, "average": 60.0}}
    two = {name: {"a": 50.0, "average": 50.0} for name in ("FT", "FT, adapted", "MD")}
    outcomes = [
        outcome("X", 0, metrics=metrics("x", one)),
        outcome("Y", 0, metrics=metrics("y", two)),
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
    plain = [outcome("X", 0, metrics=metrics("x", {"FT": one["FT"]}))]
    write_table(table, plain, tmp_path, "osfl compare t.toml", 1)
    assert "adapted" not in (tmp_path / "t.md").read_text()


def test_rows_are_paired_by_seed(tmp_path: Path) -> None:
    """By hand: 4, 6 and 8 points apart are 6.0 with s = 2, and t(2) = 4.3027 times 2 / sqrt(3)
    is 4.97. 4, -10 and 5 are -0.33 with s = 8.39, and 20.83.
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
    about = {"average": 50.0, "download_bytes": 1e8}
    plot(
        [
            {"row": name, "upload_bytes": size, **about}
            for name, size in (("A", 44_739_300), ("B", 44_739_311))
        ],
        tmp_path / "x.png",
    )
    assert len(spans) == 2
    for (low, high), size in zip(spans, (44_739_305, 144_739_305), strict=True):
        assert high / low >= 9.99
        assert (low * high) ** 0.5 == pytest.approx(size, rel=1e-3)


def test_what_is_not_known_or_not_tested_is_said(tmp_path: Path) -> None:
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
    """What `quick` changes, as key=value."""
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
    done = osfl(*command)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "good, seed 0: done" in done.stdout, done.stdout
    assert "bad, seed 0: failed" in done.stdout, done.stdout
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| good |" in page
    assert "- bad, seed 0: " in page
    assert "/nowhere/weights.safetensors" in page
    again = osfl(*command, "--rows", "good")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "good, seed 0: done before" in again.stdout, again.stdout


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
    assert {cell.row: about.error for cell, about in runner.outcomes.items()} == {
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
    done, cell = read_table(file, settings).cells()
    finished = {
        "metrics.json": metrics("ceiling", {"real": {"a": 40.0, "average": 40.0}}),
        "status.json": {"phase": "finished"},
    }
    for name, content in finished.items():
        (tmp_path / "runs" / done.job_id).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / done.job_id / name).write_text(json.dumps(content))
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
