"""`osfl data check`, and the data sets of configs/data, each against a copy of its columns."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from osfl.cli.data_check import near_duplicates
from osfl.cli.main import app
from osfl.config import NodeConfig, parse_run_config
from osfl.data.near_duplicates import thumbnails
from osfl.data.parts import check_images, class_names
from osfl.data.pictures import to_pixels
from osfl.methods import METHODS
from osfl.settings import flatten_toml, resolve_config
from tests.helpers.settings import ROOT, defaults

PRESETS = sorted(file.stem for file in (ROOT / "configs" / "data").glob("*.toml"))


def drawing(seed: int, size: int = 64) -> Image.Image:
    image = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(image)
    draw = np.random.default_rng(seed)
    for _ in range(12):
        corners = sorted(draw.uniform(0, 1, 2)), sorted(draw.uniform(0, 1, 2))
        box = [corners[0][0], corners[1][0], corners[0][1], corners[1][1]]
        colour = tuple(map(int, draw.integers(0, 256, 3)))
        pen.rectangle([int(place * size) for place in box], fill=colour)
    return image


def thumbnail(image: Image.Image) -> torch.Tensor:
    return thumbnails(to_pixels(image, 64)[None])[0]


def test_the_same_picture_is_found_whatever_its_size_and_shade() -> None:
    train = {str(seed): thumbnail(drawing(seed)) for seed in range(40)}
    larger = drawing(7).resize((200, 200))
    darker = drawing(11).point(lambda value: value * 0.8)
    mirrored = drawing(13).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tests = {"a": thumbnail(larger), "b": thumbnail(darker), "c": thumbnail(mirrored)}
    tests |= {f"new {seed}": thumbnail(drawing(seed)) for seed in range(100, 140)}
    assert near_duplicates(train, tests) == ["a and 7", "b and 11", "c and 13"]
    assert near_duplicates({}, tests) == near_duplicates(train, {}) == []


def folders(root: Path) -> None:
    for number, client in enumerate(("north", "south")):
        for split, each in (("train", 3), ("test", 2)):
            for label, name in enumerate(("cat", "dog")):
                folder = root / client / split / name
                folder.mkdir(parents=True)
                for image in range(each):
                    seed = 1000 * number + 100 * label + 10 * len(split) + image
                    drawing(seed).save(folder / f"{image}.png")


def test_the_check_counts_and_names_what_is_broken(tmp_path: Path) -> None:
    folders(tmp_path)
    settings = ["data.name=folder", f"data.root={tmp_path}", "data.classes=cat,dog"]
    command = ["data", "check", *settings, "num-clients=2"]
    sound = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert sound.exit_code == 0, sound.output
    words = " ".join(sound.output.replace("│", " ").split())
    assert "north 6 4 2 of 2 3 3 64 x 64" in words
    assert "unreadable images: 0" in words
    assert "near-duplicates of training images: 0" in words
    broken = tmp_path / "south" / "train" / "dog" / "1.png"
    broken.write_bytes(b"no picture")
    twin = (tmp_path / "north" / "train" / "cat" / "2.png").read_bytes()
    (tmp_path / "south" / "test" / "cat" / "0.png").write_bytes(twin)
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    words = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"unreadable images: 1 {broken}: not a readable image" in words
    assert "near-duplicates of training images: 1" in words
    assert "south/test/cat/0.png and north:" in words
    assert "north/train/cat/2.png" in words


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.roto=/x"], "data.roto: unknown key"),
        (["data.root=/nowhere"], "data.root = '/nowhere': no such folder"),
        (["data.root=/nowhere", "data.name=hf:a/b", "data.classes="], "no such folder"),
    ],
)
def test_wrong_settings_are_reported_in_one_line(settings: list[str], message: str) -> None:
    arguments = ["data.name=folder", "data.classes=cat,dog", *settings]
    result = CliRunner().invoke(app, ["data", "check", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def copy_of(preset: str, folder: Path) -> dict:
    """A copy with the preset's columns, domains and splits: two images of each class and domain."""
    text = (ROOT / "configs" / "data" / f"{preset}.toml").read_text()
    settings = flatten_toml(tomllib.loads(text))
    data = parse_run_config({**defaults(), **settings, "kit": "/kit"}).data
    names = data.classes.split(",") if "," in data.classes else [f"class {n}" for n in range(100)]
    rows: dict[str, list] = {data.image_column: [], data.label_column: [], data.domain_column: []}
    for domain in range(settings["num-clients"]):
        for name in names:
            for _ in range(4):
                rows[data.image_column].append(Image.new("RGB", (2, 2)))
                rows[data.label_column].append(name)
                rows[data.domain_column].append(f"domain {domain}")
    part = Dataset.from_dict(rows).class_encode_column(data.label_column)
    splits = {data.train_split: part}
    if data.test_split:
        splits[data.test_split] = part
    DatasetDict(splits).save_to_disk(folder)
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fits_a_copy_of_its_data_set_with_every_method(
    preset: str, tmp_path: Path
) -> None:
    file = str(ROOT / "configs" / "data" / f"{preset}.toml")
    overrides = ["kit=/kit", "feddisc.kit=/unclip", "rounds.proxy=/proxy"]
    if 'name = "folder"' in Path(file).read_text():
        for method in METHODS:
            resolve_config([file, *overrides, f"method={method}", "data.classes=cat,dog"])
        return
    settings = copy_of(preset, tmp_path / "copy")
    overrides.append(f"data.root={tmp_path / 'copy'}")
    for method in METHODS:
        config, _ = resolve_config([file, *overrides, f"method={method}"])
    clients = settings["num-clients"]
    assert config.num_clients == clients
    assert len(class_names(config.data)) in (90, 100, len(config.data.classes.split(",")))
    for part in (0, clients - 1):
        check_images(config.data, NodeConfig(partition_id=part, num_partitions=clients), 0)


SHARED = ROOT.parent / "shared" / "data"
WORLDS = sorted(file.stem for file in (ROOT / "configs" / "worlds").glob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_test_image_of_a_world_looks_like_a_training_image(world: str) -> None:
    copy = SHARED / world.replace("-", "_")
    if not copy.is_dir():
        pytest.skip(f"the images of {world} are not on this machine (../shared/data)")
    file = str(ROOT / "configs" / "worlds" / f"{world}.toml")
    result = CliRunner().invoke(app, ["data", "check", file, f"data.root={copy}"])
    assert result.exit_code == 0, result.output
    assert "near-duplicates of training images: 0" in " ".join(result.output.split())


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_fits_every_method(world: str) -> None:
    """Small images, which methods of other kits and proxies accept."""
    file = str(ROOT / "configs" / "worlds" / f"{world}.toml")
    overrides = ["kit=/kit", "feddisc.kit=/unclip", "rounds.proxy=/proxy", "data.root=/data"]
    if "classes = " not in Path(file).read_text():
        overrides.append("data.classes=one,two")
    for method in METHODS:
        config, _ = resolve_config([file, *overrides, f"method={method}"])
        assert config.data.image_size == 64
        assert config.data.split_by == "near-duplicates"


def test_every_data_set_is_in_the_table_of_the_docs() -> None:
    page = (ROOT / "docs" / "your-data.md").read_text()
    table = page.partition("| file in configs/data |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(re.findall("`([^`]+)`", " ".join(cells))) == PRESETS
