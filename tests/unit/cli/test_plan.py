"""A table of a paper: presets, published figures beside ours, and the plan before it is run."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from osfl.cli.plan import estimate_rows, show_plan
from osfl.config import ConfigError
from osfl.models.diffusion import load_kit, unet_flops
from osfl.settings import UnseenDataError
from osfl.tables.markdown import as_markdown
from osfl.tables.table_file import read_table
from tests.helpers.settings import ROOT, quick

PAPERS = sorted((ROOT / "configs" / "papers").glob("*.toml"))


def table_file(folder: Path, text: str, **settings: object) -> Path:
    """A table file whose common settings are those of quick runs, and some more."""
    common = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in settings.items()]
    file = folder / "toy.toml"
    file.write_text("\n".join([text, "[common]", *common, ""]))
    return file


PUBLISHED = """
title = "Toy"
source = "Somebody et al., table 7"
seeds = [0, 1]
[rows.A]
method = "fedavg"
[rows."B C"]
method = "ceiling"
[published.A]
client-0 = 50.0
client-9 = 12.5
average = 61.25
[published."B C"]
average = 80
[lacks]
"DENSE" = "a baseline that OSFL does not have"
"""


def record(row: str, seed: int, average: float, client: float) -> dict:
    costs = ("upload_bytes", "download_bytes", "client_flops", "client_seconds")
    return {
        "row": row,
        "seed": seed,
        "average": average,
        "over_images": average,
        "accuracy": {"client-0": client},
        **dict.fromkeys(costs, 0.0),
        "client_memory_mb": 0.0,
        "rounds": 1,
        "server_seconds_per_image": None,
        "versions": {},
        "kit_not_counted": False,
        "not_tested": [],
        "branches": "",
    }


def test_published_figures_stand_beside_ours(tmp_path: Path) -> None:
    """The difference is of the means over the seeds; what one side lacks stays empty."""
    table = read_table(table_file(tmp_path, PUBLISHED))
    records = [record("A", 0, 60.0, 40.0), record("A", 1, 64.0, 47.0)]
    page = as_markdown(table, records, "osfl compare toy.toml", 1)
    assert "Published: Somebody et al., table 7." in page
    assert "| A | client-0 | 50.00 | 43.50 | -6.50 |" in page
    assert "| A | client-9 | 12.50 |  |  |" in page
    assert "| A | average | 61.25 | 62.00 | +0.75 |" in page
    assert "| B C | average | 80.00 |  |  |" in page
    assert "- DENSE: a baseline that OSFL does not have" in page


def test_a_run_of_several_models_has_figures_of_each(tmp_path: Path) -> None:
    text = "source = 'x'\n[rows.LMG]\nmethod = 'fedlmg'\n[published.'LMG MD']\naverage = 70.0\n"
    table = read_table(table_file(tmp_path, text))
    records = [record("LMG FT", 0, 60.0, 40.0), record("LMG MD", 0, 64.0, 47.0)]
    page = as_markdown(table, records, "osfl compare toy.toml", 1)
    assert "| LMG MD | average | 70.00 | 64.00 | -6.00 |" in page


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[published.'A XY']\naverage = 1.0", r"\[published.'A XY'\]: there is no such row"),
        ("[published.Z]\naverage = 1.0", r"\[published.'Z'\]: there is no such row"),
        (
            "[published.A]\naverage = 'high'",
            r"\[published.'A'\] average = 'high': must be",
        ),
        (
            "[publish.A]\naverage = 1.0",
            "'publish' is unknown; the keys of a table file are extends",
        ),
    ],
)
def test_figures_that_belong_nowhere_are_refused(tmp_path: Path, more: str, message: str) -> None:
    file = table_file(tmp_path, f"[rows.A]\nmethod = 'fedavg'\n{more}")
    with pytest.raises(ConfigError, match=message):
        read_table(file)


def test_a_preset_lies_below_what_the_table_says(tmp_path: Path) -> None:
    """The common one, or a row's own; classes are given here, so that no hub is asked."""
    rows = "[rows.A]\nmethod = 'fedavg'\n[rows.B]\nmethod = 'fedavg'\npreset = 'cifar10'"
    settings = {"preset": "office-home", "num-clients": 3, "data.classes": "dog,cat"}
    table = read_table(table_file(tmp_path, rows, **settings, **{"classifier.init": "none"}))
    assert table.rows["A"]["data.name"] == "hf:flwrlabs/office-home"
    assert table.rows["B"]["data.name"] == "hf:uoft-cs/cifar10"
    assert table.rows["A"]["num-clients"] == table.rows["B"]["num-clients"] == 3
    with pytest.raises(ConfigError, match="preset = 'nowhere': 'configs/data/nowhere.toml'"):
        read_table(table_file(tmp_path, rows, preset="nowhere"))


@pytest.mark.slow
def test_a_units_flops_are_those_of_the_loaded_unet(tiny_kit: Path, tiny_unclip: Path) -> None:
    for folder in (tiny_kit, tiny_unclip):
        kit = load_kit(folder)
        c = kit.text(["a"])
        if width := kit.unet.config.projection_class_embeddings_input_dim:
            c = c.with_image(torch.zeros(1, width))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            kit.eps(torch.zeros(1, *kit.latent_shape), torch.tensor([1]), c)
        assert unet_flops(str(folder)) == pytest.approx(counter.get_total_flops(), rel=0.01)
        assert unet_flops(str(folder)) < counter.get_total_flops() + 1


@pytest.mark.slow
def test_a_plan_is_runs_images_passes_and_bytes(tiny_kit: Path, tmp_path: Path) -> None:
    """2 seeds x 2 clients x 10 classes x 3 images, in 4 steps of three branches each."""
    rows = "seeds = [0, 1]\n[rows.DEO]\nmethod = 'feddeo'\n[rows.AVG]\nmethod = 'fedavg'\n"
    settings = quick(kit=str(tiny_kit), synthesis__images_per_class=3, synthesis__steps=4)
    settings |= {"feddeo.guidance-text": 1.0, "rounds.count": 5}
    for key in ("method", "seed", "job-id", "runs-dir"):
        settings.pop(key, None)
    plan = estimate_rows(read_table(table_file(tmp_path, rows, **settings)))
    assert (plan["DEO"].runs, plan["DEO"].images) == (2, 120)
    assert plan["DEO"].flops == 120 * 4 * 3 * unet_flops(str(tiny_kit))
    # Ten classes of 8 x 32 numbers of 4 bytes, and little more
    assert 10_240 < (plan["DEO"].upload or 0) < 11_000
    assert (plan["AVG"].images, plan["AVG"].flops) == (0, 0)
    assert (plan["AVG"].upload or 0) % 5 == 0
    assert (plan["AVG"].upload or 0) > 5 * 1e6


def test_missing_models_and_data_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set that cannot be asked, once; a kit that is not there; the rest is planned."""
    asked: list[str] = []

    def unreached(config) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
        if config.data.classes:
            return tuple(config.data.classes.split(","))
        asked.append(config.data.name)
        raise UnseenDataError("hf:owner/far: the hub is not reached")

    monkeypatch.setattr("osfl.settings._classes", unreached)
    rows = """
    [rows.A]
    method = "fedavg"
    data.name = "hf:owner/far"
    [rows.B]
    method = "ceiling"
    data.name = "hf:owner/far"
    [rows.C]
    method = "feddeo"
    kit = "/nowhere/kit"
    data.name = "folder"
    data.classes = "one,two"
    [rows.D]
    method = "ceiling"
    """
    common = {"classifier.init": "none", "global-model.init": "none"}
    file = table_file(tmp_path, rows, **common)
    with pytest.raises(ConfigError, match="row 'A': hf:owner/far: the hub is not reached"):
        read_table(file)
    asked.clear()
    table = read_table(file, without_data=True)
    assert asked == ["hf:owner/far"]
    plan = estimate_rows(table)
    assert plan["A"].unknown == plan["B"].unknown == "hf:owner/far: the hub is not reached"
    assert (plan["A"].runs, plan["A"].images) == (1, None)
    assert "/nowhere/kit" in plan["C"].unknown
    assert plan["C"].images
    assert plan["D"].unknown == ""
    show_plan(table, 100.0)
    printed = capsys.readouterr().out
    assert printed.count("the hub is not reached") == 1


@pytest.mark.slow
@pytest.mark.parametrize("file", PAPERS, ids=[file.stem for file in PAPERS])
def test_every_papers_table_is_a_table(file: Path) -> None:
    """The settings are ours; the figures are percentages with rows and a source."""
    table = read_table(file, ["data.classes=one,two"])
    assert table.source
    assert table.published or table.lacks
    for row, figures in table.published.items():
        assert row in table.rows or row.rpartition(" ")[0] in table.rows
        assert all(0 < figure <= 100 for figure in figures.values())
        columns = [figure for column, figure in figures.items() if column != "average"]
        if len(columns) > 1 and "average" in figures:
            assert min(columns) <= figures["average"] <= max(columns), row
