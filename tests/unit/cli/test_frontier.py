"""Tables of the frontier: configs/frontier with random weights in the hub's layouts, and the
measured ones in configs/tables with their data.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tools import hub_layouts
from osfl.cli.plan import Row, estimate_rows
from osfl.config.toml import read_toml
from osfl.kit.run_check import check_run_models
from osfl.settings import flatten_toml, resolve_config
from osfl.tables.table_file import TableFile, as_arguments, read_table
from tests.helpers.settings import ROOT, TABLES

SHARED = ROOT.parent / "shared" / "data"
# The measured tables, and the folders of their data
WORLDS = {"pacs": "pacs", "wbc3": "wbc3", "emoji12": "emoji12"}
FRONTIERS = sorted((ROOT / "configs" / "frontier").glob("*.toml"))
DRAWN = ("prompts-only", "prompts-domain", "domain-vector", "FedDEO", "OSCAR", "Espresso", "FedLMG")
# A square of features and the sums of each class: D (D + 1) / 2 and C D numbers in float32
WIDTHS = {
    "FedCGS ResNet-18": 512,
    "FedCGS CLIP B/16": 768,
    "FedCGS CLIP L/14": 1024,
    "FedCGS DINOv2": 768,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Narrow models in the layouts that the tables name."""
    root = tmp_path_factory.mktemp("hub")
    layouts: dict[str, Callable[[Path], Path]] = {
        "kit": hub_layouts.sd15,
        "image-encoder": hub_layouts.dinov2,
        "captioner": hub_layouts.blip,
    }
    return [f"{key}={write(root / key)}" for key, write in layouts.items()]


def read(file: Path, models: list[str]) -> TableFile:
    # The classes of Office-Home are on the hub alone, and so are pretrained weights
    classes = ["data.classes=Bed,Chair,Lamp"] if file.stem == "office-home" else []
    inits = ["classifier.init=none", "global-model.init=none"]
    return read_table(file, [*models, *classes, *inits])


@pytest.mark.slow
@pytest.mark.parametrize("file", FRONTIERS, ids=lambda file: file.stem)
def test_every_row_is_estimated(file: Path, models: list[str]) -> None:
    pytest.importorskip("timm")
    table = read(file, models)
    rows: dict[str, Row] = estimate_rows(table)
    assert [row.unknown for row in rows.values()] == [""] * len(rows)
    config, _ = resolve_config(as_arguments(table.rows["ceiling"]))
    classes = len(config.data.classes.split(","))
    clients = config.num_clients
    for name, row in rows.items():
        images = clients * classes * 30 * len(table.seeds) if name in DRAWN else 0
        assert row.images == images, name
        assert bool(row.flops) == (name in DRAWN), name
    for name, width in WIDTHS.items():
        numbers = classes * width + width * (width + 1) // 2
        upload = rows[name].upload
        assert upload is not None
        assert 4 * numbers < upload < 4 * numbers + 40 * classes + 1000, name
    assert rows["prompts-only"].upload == rows["ceiling"].upload == 0
    # The frontier goes to a ResNet-18 in each of a hundred rounds
    assert rows["FedAvg 100"].upload == pytest.approx(100 * rows["local"].upload, rel=0.01)
    for name in ("FedCGS DINOv2", "OSCAR", "Espresso"):
        config, _ = resolve_config(as_arguments(table.rows[name]))
        check_run_models(config)


@pytest.mark.parametrize("name", ["pacs", "domainnet-10"])
def test_every_row_is_read_without_the_hub(name: str) -> None:
    """The classes of Office-Home are on the hub alone."""
    table = read_table(ROOT / "configs" / "frontier" / f"{name}.toml")
    assert set(DRAWN) | set(WIDTHS) < set(table.rows)
    settings = table.rows["FedCGS CLIP B/16"]
    assert settings["classifier.architecture"] == "timm:vit_base_patch16_clip_224.openai"
    assert settings["data.image-size"] == 224


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_measured_frontiers_differ_only_in_words_and_steps(world: str) -> None:
    """At least twenty rows, of every family of one-shot learning."""
    pytest.importorskip("timm")
    if not (SHARED / WORLDS[world]).is_dir():
        pytest.skip(f"needs ../shared/data/{WORLDS[world]}")
    inits = ["classifier.init=none", "global-model.init=none"]
    data = f"data.root={SHARED / WORLDS[world]}"
    table = read_table(TABLES / f"frontier-{world}.toml", ["kit=/kits/photographs", data, *inits])
    assert replace(table, seeds=table.seeds[:1]).cells()
    words = {"preset", "votes.candidates", "synthesis.prompt"}
    # Designers whose names are long
    words |= {"data.words"} if world == "emoji12" else set()
    # A tenth of the images of PACS
    steps = {"classifier.steps", "global-model.steps"} if world == "wbc3" else set()
    content = read_toml(TABLES / f"frontier-{world}.toml")
    if world != "pacs":
        assert content["extends"] == "frontier-pacs.toml"
        assert set(content) == {"extends", "title", "common"}
        assert set(flatten_toml(content["common"])) == words | steps
    assert len(table.rows) > 20
    methods = {str(settings["method"]) for settings in table.rows.values()}
    assert methods > {"ceiling", "local", "fedavg", "zero-shot", "fedcgs", "fedpft", "feddeo"}
    assert table.rows["FedDEO description alone"].get("feddeo.guidance-text", 0.0) == 0.0
