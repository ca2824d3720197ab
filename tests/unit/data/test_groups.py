"""Groups of images, patients' say: on one side of training and test, and with one client."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageColumn
from PIL import Image
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import DataConfig, NodeConfig
from osfl.data.load import load_images
from osfl.data.named import load_rows
from osfl.data.partition import DataError, Rows, node_rows
from osfl.data.parts import check_clients, check_images, list_folder
from osfl.launch import flower as launch
from tests.helpers.image_folders import FOLDER, grey
from tests.helpers.named_data import data, node

PATIENTS = 24


def scans(patients: int = PATIENTS, first: int = 0) -> Dataset:
    """1 to 5 images of each patient, who has one class; one image in seven has no patient."""
    columns: dict[str, list] = {"image": [], "label": [], "patient": []}
    draw = np.random.default_rng(0)
    for patient in range(first, first + patients):
        for _ in range(draw.integers(1, 6)):
            number = len(columns["image"])
            columns["image"].append(Image.new("RGB", (8, 8), (number, 0, 0)))
            columns["label"].append(patient % 2)
            columns["patient"].append(None if number % 7 == 0 else f"P {patient}")
    features = Features(image=ImageColumn(), label=Value("int64"), patient=Value("string"))
    return Dataset.from_dict(columns, features=features)


def image_groups(config: DataConfig, place: NodeConfig, split: str, seed: int) -> set[str]:
    return set(load_rows(config, place, split, seed)["group"]) - {""}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans") / "all"
    scans().save_to_disk(folder)
    return folder


@pytest.mark.parametrize("partition", ["iid", "label", "dirichlet"])
@pytest.mark.parametrize("seed", range(5))
def test_a_group_stays_with_one_client_on_one_side(root: Path, partition: str, seed: int) -> None:
    settings = {"partition": partition, "group_column": "patient", "shards_per_client": 2}
    config = data(root, classes="cat,dog", alpha=5.0, **settings)
    sides: list[set[str]] = []
    images = 0
    for part in range(3):
        for split in ("train", "test"):
            sides.append(image_groups(config, node(part, 3), split, seed))
            images += len(load_images(config, node(part, 3), split, seed))
    assert sum(map(len, sides)) == len(set.union(*sides))
    assert all(sides[::2])
    if partition != "label":
        assert len(set.union(*sides)) == len(set(scans()["patient"]) - {None})
        assert images == len(scans())


def test_without_the_column_patients_are_on_both_sides(root: Path) -> None:
    """The purpose of the key."""
    config = data(root, classes="cat,dog", partition="iid")
    patients = {}
    for split in ("train", "test"):
        pixels = load_images(config, node(0, 1), split, 0).pixels
        numbers = pixels[:, 0, 0, 0].tolist()
        patients[split] = set(np.array(scans()["patient"], dtype=object)[numbers]) - {None}
    assert patients["train"] & patients["test"]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_a_share_by_group_is_near_the_share_of_each_class(root: Path, share: float) -> None:
    config = data(
        root, classes="cat,dog", partition="iid", group_column="patient", test_share=share
    )
    totals = Counter(scans()["label"])
    for seed in range(5):
        test = Counter(load_rows(config, node(0, 1), "test", seed)["label"])
        for label in (0, 1):
            assert abs(test[label] - share * totals[label]) <= 3


def test_a_part_is_shared_out_by_group_too(root: Path) -> None:
    place = NodeConfig(data_dir=str(root))
    config = data(classes="cat,dog", group_column="patient")
    train, test = (image_groups(config, place, split, 0) for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_a_group_in_two_splits_is_refused(tmp_path: Path) -> None:
    for name, first, problem in (("apart", 50, ""), ("both", PATIENTS - 2, "2 groups have images")):
        DatasetDict(train=scans(), test=scans(6, first)).save_to_disk(tmp_path / name)
        config = data(tmp_path / name, classes="cat,dog", partition="iid", test_split="test")
        check_images(config, node(0, 1), 0)
        grouped = replace(config, group_column="patient")
        for place in (node(0, 1), NodeConfig(data_dir=str(tmp_path / name))):
            if not problem:
                check_images(grouped, place, 0)
                continue
            with pytest.raises(DataError, match=f"data.group-column = 'patient': {problem}"):
                check_images(grouped, place, 0)


@pytest.mark.parametrize("partition", ["domain", "dirichlet-domain"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_group_at_two_clients_is_refused(tmp_path: Path, partition: str, split: str) -> None:
    """A patient whose images lie in two domains, among the images of one split."""
    columns = {
        "image": [Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(16)],
        "label": [0, 1] * 8,
        "domain": ["north"] * 8 + ["south"] * 8,
        "patient": [f"P {number // 2}" for number in range(16)],
    }
    apart = Dataset.from_dict(columns)
    other_columns = {**columns, "patient": [f"Q {number // 2}" for number in range(16)]}
    held_out = Dataset.from_dict(other_columns)
    alone = {**other_columns, "patient": ["Ada", "", "", *["Q"] * 5, "", *["R"] * 6, "Ada"]}
    parts = {"train": apart, "test": held_out}
    settings = {"classes": "cat,dog", "partition": partition, "group_column": "patient"}
    DatasetDict(parts).save_to_disk(tmp_path / "apart")
    DatasetDict({**parts, split: Dataset.from_dict(alone)}).save_to_disk(tmp_path / "shared")
    check_clients(data(tmp_path / "apart", test_split="test", **settings), 2, 0)
    config = data(tmp_path / "shared", test_split="test", **settings)
    for part in (0, 1):
        with pytest.raises(DataError) as caught:
            check_images(config, node(part, 2), 0)
        assert str(caught.value).startswith(
            "data.group-column = 'patient': group 'Ada' has images in the domains 'north' and "
            f"'south', which data.partition = {partition!r} assigns to two clients. Set "
        )
    check_clients(replace(config, partition="iid"), 2, 0)
    check_images(replace(config, group_column=""), node(0, 2), 0)


def test_a_column_that_is_not_there_is_named(root: Path) -> None:
    config = data(root, classes="cat,dog", partition="iid", group_column="case")
    with pytest.raises(DataError, match="data.group-column = 'case': there is no such column"):
        check_images(config, node(0, 1), 0)


def test_each_image_in_a_group_of_its_own_is_cut_as_without_groups() -> None:
    config = data(partition="dirichlet")
    labels = np.random.default_rng(0).integers(0, 3, 60)
    for part in range(3):
        plain = node_rows(config, Rows(labels), part, 3, 0)
        grouped = node_rows(config, Rows(labels, groups=np.arange(60)), part, 3, 0)
        assert plain.tolist() == grouped.tolist()


# ---- Folders ----


def test_folders_within_a_class_are_read(tmp_path: Path) -> None:
    cat = tmp_path / "train" / "cat"
    grey(cat / "a.png", 1)
    grey(cat / "patient 1" / "visit" / "b.png", 2)
    grey(cat / "patient 1" / "c.png", 3)
    grey(cat / ".cache" / "hidden.png", 4)
    grey(tmp_path / "elsewhere" / "d.png", 5)
    (tmp_path / "test").mkdir()
    (cat / "patient 2").symlink_to(tmp_path / "elsewhere")
    (cat / "patient 3").mkdir()
    place = NodeConfig(data_dir=str(tmp_path))
    pixels = load_images(FOLDER, place, "train", 0).pixels
    assert sorted(pixels[:, 0, 0, 0].tolist()) == [1, 2, 3, 5]
    (cat / "lost.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match="lost.png: not a readable image"):
        load_images(FOLDER, place, "train", 0)


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    grey(tmp_path / "train" / "cat" / "a.png", 1)
    (tmp_path / "train" / "cat" / "again").symlink_to(tmp_path / "train" / "cat")
    with pytest.raises(DataError, match="more than 8 folders deep within a class"):
        list_folder(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train")


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("cat ", "it starts or ends with a blank: rename the folder to 'cat'"),
        (" cat", "it starts or ends with a blank: rename the folder to 'cat'"),
        ("cat,big", "it has a comma, which separates the names in data.classes"),
        ("CAT", "rename the folder to 'cat'"),
        ("ｃat", "rename the folder to 'cat'"),
    ],
)
def test_a_folder_that_looks_like_a_class_says_how_it_differs(
    tmp_path: Path, folder: str, problem: str
) -> None:
    grey(tmp_path / "train" / folder / "a.png", 1)
    with pytest.raises(DataError, match=f"is not one of data.classes.*{problem}"):
        list_folder(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train")


def test_hidden_folders_are_passed_over_and_accents_compared(tmp_path: Path) -> None:
    place = NodeConfig(data_dir=str(tmp_path))
    config = replace(FOLDER, classes="caf\N{LATIN SMALL LETTER E WITH ACUTE},dog")
    grey(tmp_path / "train" / "cafe\N{COMBINING ACUTE ACCENT}" / "a.png", 1)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    assert [label for _, label in list_folder(config, place, "train")] == [0]
    grey(tmp_path / "train" / "caf\N{LATIN SMALL LETTER E WITH ACUTE}" / "a.png", 1)
    with pytest.raises(DataError, match="two folders are called"):
        list_folder(config, place, "train")


# ---- Told before a run starts ----


@pytest.mark.parametrize("name", ["Site A", "Köln", "average", "x" * 65])
def test_a_clients_folder_that_can_be_no_name_is_named(tmp_path: Path, name: str) -> None:
    for split in ("train", "test"):
        grey(tmp_path / name / split / "cat" / "a.png", 1)
    with pytest.raises(DataError, match=f"{name}: .*rename the folder"):
        check_clients(replace(FOLDER, root=str(tmp_path)), 1, 0)


def digits(*settings: str) -> list[str]:
    return ["classifier.init=none", "global-model.init=none", "method=local", *settings]


IMPOSSIBLE = [
    (
        ["data.partition=label", "num-clients=100", "data.shards-per-client=50"],
        "data.shards-per-client = 50: 600 images cannot be cut into 5000 shards. Set "
        "data.shards-per-client to at most 6, or num-clients to at most 12",
    ),
    (["data.partition=iid", "num-clients=601"], "set num-clients to at most 600"),
    (
        ["data.partition=dirichlet", "num-clients=400", "data.alpha=0.01"],
        "leave a client without any. Set num-clients to at most",
    ),
]


# One of them is enough for a run, which checks the same in a process of its own
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "settings", "problem"),
    [*((["data", "check"], *row) for row in IMPOSSIBLE), (["run"], *IMPOSSIBLE[0])],
)
def test_an_impossible_partition_is_reported_before_a_run_starts(
    command: list[str], settings: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: object) -> None:
        raise AssertionError("the SuperLink starts")

    monkeypatch.setattr(launch, "local_superlink", starts)
    result = CliRunner().invoke(app, [*command, *digits(*settings)], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert problem in " ".join(result.output.split())


def test_the_largest_values_in_an_error_work(tmp_path: Path) -> None:
    """12 images among five clients: two shards each, or four clients of three."""
    columns = {"image": [Image.new("RGB", (8, 8))] * 12, "label": [0, 1] * 6}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "a")
    config = data(tmp_path / "a", classes="cat,dog", partition="label", test_share=0.5)
    for clients, shards in ((5, 3), (13, 1)):
        with pytest.raises(DataError, match="cannot be cut"):
            check_images(replace(config, shards_per_client=shards), node(0, clients), 0)
    for clients, shards in ((5, 2), (4, 3)):
        chosen = replace(config, shards_per_client=shards)
        sizes = [len(load_rows(chosen, node(part, clients), "train", 0)) for part in range(clients)]
        assert min(sizes) > 0
    uneven = replace(config, partition="dirichlet", alpha=0.01)
    with pytest.raises(DataError, match="Set num-clients to at most") as caught:
        check_images(uneven, node(0, 11), 0)
    most = int(str(caught.value).partition("at most ")[2].partition(",")[0])
    rows = np.array(columns["label"])
    assert len(node_rows(uneven, Rows(rows), most - 1, most, 0)) > 0
