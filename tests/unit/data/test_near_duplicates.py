"""Near-duplicates: their groups, and splits that keep a group on one side."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image

from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data import near_duplicates, sides
from osfl.data.load import load_images
from osfl.data.named import load_rows
from osfl.data.near_duplicates import group_near_duplicates, most_similar, thumbnails
from osfl.data.partition import DataError
from osfl.data.parts import check_clients, list_folder
from osfl.data.pins import check_pins
from osfl.data.sides import merge_groups
from tests.helpers.named_data import data, node
from tests.helpers.settings import quick


def noise(seed: int, size: int = 16) -> Image.Image:
    """An image that looks like no other seed's."""
    levels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((32, 32), Image.Resampling.NEAREST)


def mirror(seed: int) -> Image.Image:
    return noise(seed).transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def between(first: int, second: int, share: float) -> Image.Image:
    return Image.blend(noise(first), noise(second), share)


def test_a_chain_of_near_duplicates_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the chain do not look alike, but each link does."""
    pictures = [noise(1), noise(2), mirror(1), between(1, 3, 0.12), between(1, 3, 0.24), noise(4)]
    pixels = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in pictures])
    rows = thumbnails(pixels)
    links = [float(rows[i] @ rows[j]) for i, j in ((0, 3), (3, 4), (0, 4))]
    assert links[0] > 0.98 < links[1]
    assert links[2] < 0.98
    for block in (4096, 2, 1):
        monkeypatch.setattr(near_duplicates, "BLOCK", block)
        assert group_near_duplicates(rows).tolist() == [0, 1, 0, 0, 0, 2]
        highest, nearest = most_similar(rows[2:4], rows[[1, 5, 0]])
        assert nearest.tolist() == [2, 2]
        assert highest[0].item() == pytest.approx(1.0, abs=1e-5)


def test_merged_groups_are_the_finest_that_hold_both_kinds() -> None:
    first = np.array([0, 0, 1, 2, 3, 4])
    second = np.array([7, 8, 8, 9, 5, 5])
    assert merge_groups(first, second).tolist() == [0, 0, 0, 1, 2, 2]


def splits(**images: list[Image.Image]) -> DatasetDict:
    """Splits of the images, of two classes and domains in turn."""
    tables = {}
    for split, pictures in images.items():
        places = range(len(pictures))
        columns = {
            "image": pictures,
            "label": [place % 2 for place in places],
            "domain": [("north", "south")[place // 2 % 2] for place in places],
        }
        tables[split] = Dataset.from_dict(columns)
    return DatasetDict(tables)


def side(config, split: str, seed: int = 0, parts: int = 2, place: Callable = node) -> set[bytes]:  # type: ignore[no-untyped-def]
    """The pixels of all clients' images of a split."""
    pixels: set[bytes] = set()
    for part in range(parts):
        images = load_images(config, place(part, parts), split, seed, 32).pixels
        pixels |= {image.numpy().tobytes() for image in images}
    return pixels


def content(picture: Image.Image) -> bytes:
    return np.array(picture).transpose(2, 0, 1).tobytes()


@pytest.mark.parametrize("partition", ["domain", "iid", "dirichlet-domain"])
def test_a_test_image_that_looks_like_a_training_image_trains(
    partition: str, tmp_path: Path
) -> None:
    """Also one that only looks like such a test image, and whoever has the training image."""
    train = [noise(seed) for seed in range(40)]
    # Of the other domain and class than its original
    copies = [mirror(2), between(5, 99, 0.12), between(5, 99, 0.24)]
    unique_images = [noise(seed) for seed in range(100, 117)]
    folder = tmp_path / partition
    splits(train=train, test=[*unique_images, *copies]).save_to_disk(folder)
    settings = {"classes": "cat,dog", "partition": partition, "test_split": "test", "alpha": 5.0}
    config = data(folder, split_by="near-duplicates", **settings)
    for seed in (0, 3):
        assert side(config, "test", seed) == {content(picture) for picture in unique_images}
        assert side(config, "train", seed) == {content(p) for p in (*train, *copies)}
    stored = data(folder, **settings)
    assert content(copies[0]) in side(stored, "test")


def test_a_share_has_whole_groups_of_all_clients(tmp_path: Path) -> None:
    """Copies at two clients are on the same side, and no other image moves with the seed."""
    # One group fewer in the north, so that the clients' own cuts would differ
    pictures = [noise(300), noise(301), noise(302), noise(303)]
    pictures += [mirror(300), noise(305), noise(306), noise(307)]
    for seed in range(20):
        # The copy's domain is the other one
        pictures += [noise(seed), noise(100 + seed), mirror(19 - seed), noise(200 + seed)]
    splits(train=pictures).save_to_disk(tmp_path / "all")
    settings = {"classes": "cat,dog", "partition": "domain", "test_share": 0.25}
    config = data(tmp_path / "all", split_by="near-duplicates", **settings)
    test = side(config, "test")
    assert test == side(config, "test", 1)
    assert len(test) == pytest.approx(0.25 * len(pictures), abs=4)
    assert not test & side(config, "train")
    twins = [(content(noise(seed)) in test, content(mirror(seed)) in test) for seed in range(20)]
    assert {(True, True), (False, False)} == set(twins)
    for part in range(2):
        labels = load_images(config, node(part), "test", 0).labels.tolist()
        # 22 images of the class that has no copies at the other client
        assert labels.count(1) == 6
    plain = side(data(tmp_path / "all", **settings), "test")
    sides_of = [{content(noise(n)) in plain, content(mirror(n)) in plain} for n in range(20)]
    assert {True, False} in sides_of


def test_a_part_of_its_own_is_split_alike(tmp_path: Path) -> None:
    unique_images = [noise(seed) for seed in range(20, 24)]
    splits(train=[noise(seed) for seed in range(8)], test=[*unique_images, mirror(3)]).save_to_disk(
        tmp_path / "part"
    )
    place = NodeConfig(data_dir=str(tmp_path / "part"))
    config = data(classes="cat,dog", split_by="near-duplicates")
    assert len(load_rows(config, place, "test", 0)) == len(unique_images)
    assert len(load_rows(config, place, "train", 0)) == 9


def test_groups_of_a_column_stay_whole_too(tmp_path: Path) -> None:
    """A patient's second test image follows the first, which looks like a training image."""
    parts = splits(train=[noise(seed) for seed in range(8)], test=[mirror(3), noise(20), noise(21)])
    patients = {"train": [f"P {n}" for n in range(8)], "test": ["Ada", "Ada", "Eve"]}
    columned = {name: part.add_column("patient", patients[name]) for name, part in parts.items()}
    DatasetDict(columned).save_to_disk(tmp_path / "scans")
    config = data(
        tmp_path / "scans",
        classes="cat,dog",
        partition="iid",
        test_split="test",
        group_column="patient",
        split_by="near-duplicates",
    )
    assert list(load_rows(config, node(0, 1), "test", 0)["group"]) == ["Eve"]
    assert list(load_rows(config, node(0, 1), "train", 0)["group"]).count("Ada") == 2


def write(folder: Path, **pictures: Image.Image) -> None:
    folder.mkdir(parents=True)
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.png")


def test_folders_keep_near_duplicates_on_one_side(tmp_path: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        train = {str(seed): noise(10 * label + seed) for seed in range(6)}
        write(tmp_path / "site" / "train" / name, **train)
        tests = {"copy": mirror(10 * label + 2), "new": noise(50 + label)}
        write(tmp_path / "site" / "test" / name, **tests)
    place = NodeConfig(data_dir=str(tmp_path / "site"))
    config = data(name="folder", classes="cat,dog", split_by="near-duplicates")
    tests = [file.stem for file, _ in list_folder(config, place, "test")]
    assert tests == ["new", "new"]
    trained = [file.stem for file, _ in list_folder(config, place, "train")]
    assert sorted(trained)[-2:] == ["copy", "copy"]
    assert len(trained) == 14
    assert len(load_images(config, place, "train", 0)) == 14


def test_folders_of_classes_alone_are_cut_by_share(tmp_path: Path) -> None:
    """PACS's domains are stored so; a copy is where its original is."""
    for number, client in enumerate(("art", "photo")):
        for label, name in enumerate(("cat", "dog")):
            first = 100 * number + 10 * label
            pictures = {str(seed): noise(first + seed) for seed in range(8)}
            copies = {f"copy{seed}": mirror(first + seed) for seed in range(8)}
            write(tmp_path / client / name, **pictures, **copies)
    config = data(tmp_path, name="folder", classes="cat,dog", split_by="near-duplicates")
    notes = check_clients(config, 2, 0)
    assert (
        "has no folder test/; data.test-share = 0.2 of its images is used for testing" in notes[0]
    )
    for part in range(2):
        tests, trained = (list_folder(config, node(part, 2), s) for s in ("test", "train"))
        assert len(tests) + len(trained) == 32
        names = {file.stem.removeprefix("copy") + file.parent.name for file, _ in tests}
        assert len(tests) == 2 * len(names) > 0
        assert {label for _, label in tests} == {0, 1}
    (tmp_path / "art" / "others").mkdir()
    with pytest.raises(DataError, match="has no folder train/; move the classes' folders"):
        list_folder(config, node(0, 2), "train")


def test_groups_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's next message finds them in its cache, without torch."""
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "site" / "train" / "cat", a=noise(1), b=mirror(1), c=noise(2))
    write(tmp_path / "site" / "train" / "dog", a=noise(3), b=noise(4), c=noise(5))
    place = NodeConfig(data_dir=str(tmp_path / "site"))
    config = data(name="folder", classes="cat,dog", split_by="near-duplicates")
    first = list_folder(config, place, "test")
    monkeypatch.setattr(sides, "_computed_groups", lambda count, read: 1 / 0)
    assert list_folder(config, place, "test") == first
    (record,) = (tmp_path / "cache" / "near-duplicates").iterdir()
    record.write_text("{}")
    with pytest.raises(ZeroDivisionError):
        list_folder(config, place, "test")
    command = "import osfl.data.parts, sys; print('torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert listed.stdout.strip() == "False"


def test_an_unreadable_image_is_a_group_of_its_own(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / "train" / name, a=noise(1), b=noise(2))
        for number in range(2):
            (tmp_path / "train" / name / f"{number}.png").write_bytes(b"no picture")
    config = data(name="folder", classes="cat,dog", split_by="near-duplicates")
    place = NodeConfig(data_dir=str(tmp_path))
    listed = [len(list_folder(config, place, split)) for split in ("train", "test")]
    assert sum(listed) == 8
    with pytest.raises(DataError, match="not a readable image"):
        load_images(config, place, "train", 0)


def test_a_site_that_demands_a_guarantee_refuses(tmp_path: Path) -> None:
    for key, value in (("split_by", "near-duplicates"), ("domains", "north")):
        config = data(tmp_path, **{key: value})
        check_pins(config, NodeConfig())
        with pytest.raises(ConfigError, match="this site demands a guarantee, but one image"):
            check_pins(config, NodeConfig(epsilon=1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__split_by": "near-duplicates"}, "data.split-by = 'near-duplicates': must be empty"),
        ({"data__domains": "photo"}, "data.domains = 'photo': must be empty"),
        (
            {"data__domains": "a", "data__name": "folder", "data__classes": "cat,dog"},
            "data.domains = 'a': has no effect with data.name = 'folder'",
        ),
        ({"data__split_by": "faces"}, "data.split-by = 'faces': must be one of empty, near-dup"),
    ],
)
def test_where_the_keys_have_no_effect_they_are_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_config(quick(**settings))


def test_only_the_listed_domains_are_used(tmp_path: Path) -> None:
    splits(train=[noise(seed) for seed in range(8)]).save_to_disk(tmp_path / "all")
    config = data(tmp_path / "all", classes="cat,dog", domains="south")
    for partition in ("domain", "iid"):
        chosen = data(tmp_path / "all", classes="cat,dog", domains="south", partition=partition)
        domains = [
            name
            for split in ("train", "test")
            for name in load_rows(chosen, node(0, 1), split, 0)["domain"]
        ]
        assert domains == ["south"] * 4
    assert "4 rows left out, with a domain outside data.domains" in check_clients(config, 1, 0)[0]
    missing = data(tmp_path / "all", classes="cat,dog", domains="south,east")
    with pytest.raises(DataError, match="has no domain 'east'; its domains are north, south"):
        load_rows(missing, node(0, 1), "train", 0)
