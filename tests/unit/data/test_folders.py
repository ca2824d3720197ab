"""Own folders: a test cut by patient, keys without an effect, and files that systems leave."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import DataConfig, NodeConfig
from osfl.data import load
from osfl.data.load import check_headers, load_images
from osfl.data.partition import DataError
from osfl.data.parts import check_clients, check_images, folder_notes, list_folder, simulated_folder
from tests.helpers.image_folders import FOLDER, grey

PATIENTS = 12
BLANK = ["classifier.init=none", "global-model.init=none"]


def site(home: Path, split: str = "train") -> NodeConfig:
    """Two to four images of each patient; patients 0 to 2 have images of both classes."""
    for patient in range(PATIENTS):
        for number in range(2 + patient % 3):
            is_other = number % 2 if patient < 3 else patient % 2
            name = "dog" if is_other else "cat"
            grey(home / split / name / f"P {patient}" / f"{number}.png", 10 * patient + number)
    return NodeConfig(data_dir=str(home))


def patients(config: DataConfig, place: NodeConfig, split: str) -> set[str]:
    return {file.parent.name for file, _ in list_folder(config, place, split)}


def settings(root: Path, clients: int) -> list[str]:
    chosen = [f"data.root={root}", f"num-clients={clients}", "data.classes=cat,dog"]
    return ["data.name=folder", *chosen]


# ---- A test that is cut from train/ ----


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_without_a_test_folder_each_patient_is_on_one_side(tmp_path: Path, share: float) -> None:
    place = site(tmp_path)
    config = replace(FOLDER, test_share=share)
    check_images(config, place, 0)
    train = patients(config, place, "train")
    test = patients(config, place, "test")
    assert train
    assert test
    assert not train & test
    assert len(train | test) == PATIENTS
    sides = [list_folder(config, place, split) for split in ("train", "test")]
    every = sorted(file for listed in sides for file, _ in listed)
    assert every == sorted((tmp_path / "train").rglob("*.png"))
    assert abs(len(sides[1]) - share * len(every)) <= 4
    pixels = load_images(config, place, "test", 0).pixels
    assert len(pixels) == len(sides[1])


def test_the_side_of_a_patient_is_the_sites_own(tmp_path: Path) -> None:
    """Whatever the seed, the place of the folder and the order of the classes."""
    first = site(tmp_path / "a")
    second = site(tmp_path / "b")
    chosen = patients(FOLDER, first, "test")
    assert patients(FOLDER, second, "test") == chosen
    assert patients(replace(FOLDER, classes="dog,cat"), first, "test") == chosen
    labels = [load_images(FOLDER, first, "test", seed).labels.tolist() for seed in (0, 1)]
    assert labels[0] == labels[1]


def test_images_beside_patients_are_cut_one_by_one(tmp_path: Path) -> None:
    for number in range(20):
        grey(tmp_path / "train" / "cat" / f"{number}.png", number)
        grey(tmp_path / "train" / "dog" / f"{number}.png", number)
    place = NodeConfig(data_dir=str(tmp_path))
    counts = Counter(label for _, label in list_folder(FOLDER, place, "test"))
    assert counts == {0: 4, 1: 4}
    grey(tmp_path / "train" / "dog" / "Ada" / "1.png", 1)
    assert len(list_folder(FOLDER, place, "train")) + len(list_folder(FOLDER, place, "test")) == 41


def test_a_patient_of_both_spellings_is_one(tmp_path: Path) -> None:
    names = ("Zo\N{LATIN SMALL LETTER E WITH DIAERESIS}", "Zoe\N{COMBINING DIAERESIS}")
    for name, animal in zip(names, ("cat", "dog"), strict=True):
        grey(tmp_path / "train" / animal / name / "1.png", 1)
    with pytest.raises(DataError, match="the classes have too few images or subfolders"):
        list_folder(FOLDER, NodeConfig(data_dir=str(tmp_path)), "test")


def test_a_folder_of_tests_is_taken_as_it_is(tmp_path: Path) -> None:
    place = site(tmp_path)
    site(tmp_path, "test")
    for split in ("train", "test"):
        files = [file for file, _ in list_folder(FOLDER, place, split)]
        assert sorted(files) == sorted((tmp_path / split).rglob("*.png"))
    assert not any("test-share" in note for note in folder_notes(FOLDER, {"a": place}))


@pytest.mark.parametrize("name", ["Test", "tests", "val"])
def test_another_folder_beside_train_is_not_passed_over(tmp_path: Path, name: str) -> None:
    place = site(tmp_path)
    site(tmp_path, name)
    for split in ("train", "test"):
        with pytest.raises(DataError, match=f"no folder test/, but '{name}'. Rename"):
            list_folder(FOLDER, place, split)


def test_a_site_that_demands_a_guarantee_needs_a_test_folder(tmp_path: Path) -> None:
    """One image replaced would move others between training and test."""
    place = replace(site(tmp_path), epsilon=1.0)
    for split in ("train", "test"):
        with pytest.raises(DataError, match="demands a guarantee.*add a folder test/"):
            list_folder(FOLDER, place, split)
    site(tmp_path, "test")
    assert list_folder(FOLDER, place, "test")


def test_the_check_and_a_run_tell_of_the_share(tmp_path: Path) -> None:
    site(tmp_path / "north")
    for command in (["data", "check"], ["run", "--dry-run", "method=local", *BLANK]):
        result = CliRunner().invoke(app, [*command, *settings(tmp_path, 1)], env={"COLUMNS": "300"})
        words = " ".join(result.output.split())
        assert result.exit_code == 0, result.output
        assert f"north: {tmp_path / 'north'} has no folder test/; data.test-share = 0.2" in words


# ---- A patient in training and in test ----


def test_a_patient_in_training_and_test_is_reported_with_clients_and_folders(
    tmp_path: Path,
) -> None:
    for client in ("north", "south"):
        for split in ("train", "test"):
            grey(tmp_path / client / split / "cat" / f"{client} {split}" / "1.png", 1)
    grey(tmp_path / "north" / "train" / "cat" / "Ada" / "1.png", 1)
    grey(tmp_path / "south" / "test" / "dog" / "Ada" / "2.png", 1)
    grey(tmp_path / "south" / "train" / "dog" / "Bea" / "1.png", 1)
    grey(tmp_path / "south" / "test" / "cat" / "Bea" / "1.png", 1)
    grey(tmp_path / "north" / "test" / "cat" / "Bea" / "1.png", 1)
    ada = (
        f"Ada: training of north ({tmp_path}/north/train/cat/Ada), "
        f"test of south ({tmp_path}/south/test/dog/Ada)"
    )
    bea = (
        f"Bea: training of south ({tmp_path}/south/train/dog/Bea), "
        f"test of south ({tmp_path}/south/test/cat/Bea)"
    )
    for command in (["data", "check"], ["run", "--dry-run", "method=local", *BLANK]):
        result = CliRunner().invoke(app, [*command, *settings(tmp_path, 2)], env={"COLUMNS": "900"})
        words = " ".join(result.output.split())
        assert result.exit_code == 0, result.output
        assert "groups (such as patients) with images in both training and test: 2" in words
        assert ada in words
        assert bea in words


def test_at_most_ten_patients_are_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        site(tmp_path / "a", split)
    notes = check_clients(replace(FOLDER, root=str(tmp_path)), 1, 0)
    assert len(notes) == 12
    assert notes[0].endswith("in both training and test: 12")
    assert notes[-1] == "  and 2 more"


# ---- Keys without an effect ----


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("data.partition", "label", "set it to 'domain'"),
        ("data.partition", "dirichlet", "set it to 'domain'"),
        ("data.partition", "dirichlet-domain", "set it to 'domain'"),
        ("data.partition", "iid", "set it to 'domain'"),
        ("data.shards-per-client", 3, "set it to 2"),
        ("data.alpha", 0.1, "set it to 0.5"),
        ("data.subset", "small", "set it to ''"),
        ("data.max-per-class", 5, "set it to 0"),
        ("data.train-split", "training", "set it to 'train'"),
        ("data.test-split", "val", "set it to ''"),
        ("data.group-column", "patient", "set it to ''"),
    ],
)
def test_a_key_that_folders_do_not_have_is_refused(
    tmp_path: Path, key: str, value: object, fix: str
) -> None:
    site(tmp_path / "a")
    arguments = [*settings(tmp_path, 1), f"{key}={value}"]
    for command in (["data", "check"], ["run", "--dry-run", "method=local", *BLANK]):
        result = CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "400"})
        words = " ".join(result.output.split())
        assert result.exit_code == 1
        assert f"{key} = {value!r}: has no effect" in words
        assert fix in words


# ---- Files that systems leave ----

LEFT = ("Thumbs.db", "thumbs.db", "Desktop.ini", ".DS_Store", "._1.png", "Icon\r")
FOLDERS_LEFT = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")


def leave(folder: Path) -> None:
    """Write what systems leave; a picture in a folder of theirs is no image of the site's."""
    for name in LEFT:
        (folder / name).write_bytes(b"\x00\x05\x16\x07 no picture")
    for name in FOLDERS_LEFT:
        grey(folder / name / "1.png", 200)
        (folder / name / "._2.png").write_bytes(b"\x00\x05\x16\x07 no picture")


def test_files_of_operating_systems_are_ignored(tmp_path: Path) -> None:
    site(tmp_path / "north")
    site(tmp_path / "north", "test")
    before = load_images(FOLDER, NodeConfig(data_dir=str(tmp_path / "north")), "train", 0)
    for folder in [tmp_path, *tmp_path.rglob("*")]:
        if folder.is_dir():
            leave(folder)
    place = NodeConfig(partition_id=0, num_partitions=1)
    config = replace(FOLDER, root=str(tmp_path))
    assert simulated_folder(config, place) == tmp_path / "north"
    after = load_images(config, place, "train", 0)
    assert after.pixels.equal(before.pixels)  # type: ignore[union-attr,arg-type]
    for command in (["data", "check"], ["run", "--dry-run", "method=local", *BLANK]):
        result = CliRunner().invoke(app, [*command, *settings(tmp_path, 1)], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        assert not any(name in result.output for name in ("humbs", "._", "MACOSX", "eaDir"))


# ---- Images that cannot be read ----


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_dry_run_names_a_file_that_is_no_picture(tmp_path: Path, split: str) -> None:
    for side in ("train", "test"):
        site(tmp_path / "north", side)
        site(tmp_path / "south", side)
    broken = tmp_path / "south" / split / "dog" / "P 3" / "0.png"
    broken.write_bytes(b"<html>")
    arguments = [*settings(tmp_path, 2), "method=local", *BLANK]
    result = CliRunner().invoke(app, ["run", "--dry-run", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert f"{broken}: not a readable image" in " ".join(result.output.split())


def test_floating_point_pixels_are_reported_before_a_run(tmp_path: Path) -> None:
    site(tmp_path / "a")
    site(tmp_path / "a", "test")
    Image.new("F", (8, 8), 0.5).save(tmp_path / "a" / "train" / "cat" / "x.tif")
    with pytest.raises(DataError, match=r"x\.tif: not a readable image .floating-point pixels"):
        check_headers(replace(FOLDER, root=str(tmp_path)), 1, 0)


def test_opening_images_before_a_run_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(tmp_path / "a")
    site(tmp_path / "a", "test")
    count = 2 * len(list((tmp_path / "a" / "train").rglob("*.png")))
    config = replace(FOLDER, root=str(tmp_path))
    assert check_headers(config, 1, 0) == []
    monkeypatch.setattr(load, "HEADER_SECONDS", 0)
    (note,) = check_headers(config, 1, 0)
    assert note == f"0 of {count} images were opened; `osfl data check` opens all"
