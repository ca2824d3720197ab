"""Data sets by name: rows, labels, partitions, shares and caps, of copies in the hub's formats."""

from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageColumn
from flwr_datasets.partitioner import IidPartitioner
from PIL import Image

from osfl.config import ConfigError, DataConfig, NodeConfig, parse_run_config
from osfl.data import named, shares
from osfl.data.load import count_images, domain_name, image_labels, load_images
from osfl.data.named import load_rows
from osfl.data.partition import DataError
from osfl.data.parts import check_images, class_names, client_name
from osfl.settings import resolve_config
from osfl.util.pixels import LazyPixels, concatenate
from tests.helpers.named_data import CLASSES, DOMAINS, EACH, data, node, rows, shade
from tests.helpers.settings import defaults


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files like the hub's: a card with the features, and a parquet file of each split."""
    folder = tmp_path_factory.mktemp("data") / "toy"
    splits = DatasetDict(train=rows(), test=rows(4))
    for split, part in splits.items():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        part.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def pictures(config: DataConfig, place: NodeConfig, split: str, seed: int = 0) -> set[tuple]:
    """The pictures of a node, each as (domain, class, number)."""
    images = load_images(config, place, split, seed)
    triples = set()
    for pixels, label in zip(images.pixels, images.labels.tolist(), strict=True):
        red, green, blue = pixels[:, 0, 0].tolist()
        assert green == label * 50
        triples.add((red // 100, label, blue))
    assert len(triples) == len(images)
    return triples


def everything(each: int = EACH) -> set[tuple]:
    triples = set()
    for domain in range(len(DOMAINS)):
        for label in range(len(CLASSES)):
            triples |= {(domain, label, number) for number in range(each)}
    return triples


def test_a_domain_is_a_client_and_a_share_is_its_test(parquet: Path) -> None:
    """Ten images of a class, test-share 0.2: two of each class are tests, eight are not."""
    config = data(parquet)
    all_pictures = set()
    for part, domain in enumerate(["Clipart", "Real_World"]):
        train = pictures(config, node(part), "train")
        test = pictures(config, node(part), "test")
        assert not train & test
        assert train | test == {picture for picture in everything() if picture[0] == part}
        assert Counter(label for _, label, _ in test) == {0: 2, 1: 2, 2: 2}
        assert domain_name(config, node(part), 0) == domain
        all_pictures |= train | test
    assert all_pictures == everything()


@pytest.mark.parametrize("classes", ["alarm_clock,Dog,mouse", "mouse,Dog,alarm_clock", "Dog,mouse"])
def test_the_test_share_is_the_same_whatever_the_run(parquet: Path, classes: str) -> None:
    """With another seed, order or choice of classes no training image becomes a test image."""
    stored = pictures(data(parquet), node(0), "test")
    places = {CLASSES.index(name.replace("_", " ")) for name in classes.split(",")}
    for seed in (0, 1, 8):
        tests = load_rows(data(parquet, classes=classes), node(0), "test", seed)["image"]
        images = [Image.open(BytesIO(image["bytes"])) for image in tests]
        pixels = {tuple(image.getpixel((0, 0))) for image in images}
        assert pixels == {(0, label * 50, number) for _, label, number in stored if label in places}


def test_a_split_is_not_both_trained_on_and_tested_on(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.test-split = 'train': must not be data.train-s"):
        parse_run_config({**defaults(), "data.test-split": "train"})
    # A saved part's own test split counts where the run names none
    DatasetDict(train=rows(), test=rows(4)).save_to_disk(tmp_path / "part")
    site = NodeConfig(data_dir=str(tmp_path / "part"))
    with pytest.raises(DataError, match="data.train-split = 'test': must differ from the split"):
        load_images(data(train_split="test"), site, "train", 0)


def test_a_client_of_several_domains_has_no_domain(parquet: Path) -> None:
    config = data(parquet, partition="iid")
    assert domain_name(config, node(0), 0) == ""


def test_a_split_of_tests_is_the_domains_own(parquet: Path) -> None:
    config = data(parquet, test_split="test")
    assert pictures(config, node(1), "test") == {p for p in everything(4) if p[0] == 1}
    assert pictures(config, node(1), "train") == {p for p in everything() if p[0] == 1}


@pytest.mark.parametrize("partition", ["label", "dirichlet", "iid"])
def test_partitions_are_disjoint_and_complete(parquet: Path, partition: str) -> None:
    config = data(parquet, partition=partition, test_split="test", alpha=0.5)
    for split, each in (("train", EACH), ("test", 4)):
        parts = [pictures(config, node(part, 3), split) for part in range(3)]
        assert sum(map(len, parts)) == len(everything(each))
        assert set.union(*parts) == everything(each)
        if partition == "iid" or split == "test":
            # Shuffled before they are cut: no client has one class or domain alone
            assert all(len({p[0] for p in part}) == 2 for part in parts)
            assert all(len({p[1] for p in part}) == 3 for part in parts)
        if split == "test":
            assert {len(part) for part in parts} == {len(everything(4)) // 3}


def test_a_few_classes_each_are_label_skew(parquet: Path) -> None:
    config = data(parquet, partition="label", shards_per_client=1, test_split="test")
    client_classes = [set(image_labels(config, node(part, 3), "train", 0)) for part in range(3)]
    assert sorted(map(tuple, client_classes)) == [(0,), (1,), (2,)]
    several = data(parquet, partition="label", shards_per_client=5, test_split="test")
    counts = [Counter(image_labels(several, node(part, 3), "train", 0)) for part in range(3)]
    assert all(len(count) > 1 for count in counts)
    # Shards of one size, five each: 60 / 15 = 4 images
    assert {sum(count.values()) for count in counts} == {20}


def test_another_seed_is_another_cut(parquet: Path) -> None:
    config = data(parquet, partition="iid", test_split="test")
    assert pictures(config, node(0), "train", 0) != pictures(config, node(0), "train", 1)


def test_both_skews_cut_each_domain_by_itself(parquet: Path) -> None:
    config = data(parquet, partition="dirichlet-domain", test_split="test", alpha=0.3)
    domains = []
    union: set[tuple] = set()
    for part in range(4):
        train = pictures(config, node(part, 4), "train")
        domains.append({picture[0] for picture in train})
        assert not union & train
        union |= train
    assert domains == [{0}, {0}, {1}, {1}]
    assert union == everything()
    with pytest.raises(DataError, match="3 clients cannot share 2 domains evenly"):
        pictures(config, node(0, 3), "train")


def test_a_cap_is_of_each_class_and_by_the_seed(parquet: Path) -> None:
    config = data(parquet, max_per_class=3, test_split="test")
    chosen = pictures(config, node(0), "train")
    assert Counter(label for _, label, _ in chosen) == {0: 3, 1: 3, 2: 3}
    assert chosen == pictures(config, node(0), "train")
    assert chosen != pictures(config, node(0), "train", seed=1)
    assert len(pictures(config, node(0), "test")) == 12


def test_classes_have_their_stored_names(parquet: Path) -> None:
    """In the run's order, and those that are not the run's stay out."""
    config = data(parquet, classes="mouse,alarm_clock")
    images = load_images(config, node(0), "train", 0)
    greens = {0: 100, 1: 0}
    assert set(images.labels.tolist()) == {0, 1}
    for pixels, label in zip(images.pixels, images.labels.tolist(), strict=True):
        assert int(pixels[1, 0, 0]) == greens[label]
    with pytest.raises(DataError, match="no class 'cat'; its classes are alarm_clock, Dog, mouse"):
        load_images(data(parquet, classes="cat,Dog"), node(0), "train", 0)


def test_the_run_takes_the_stored_names(parquet: Path) -> None:
    chosen = ["data.name=hf:owner/toy", f"data.root={parquet}", "method=fedavg"]
    chosen.append("classifier.init=none")
    config, overrides = resolve_config(chosen)
    assert class_names(config.data) == ("alarm_clock", "Dog", "mouse")
    assert overrides["data.classes"] == "alarm_clock,Dog,mouse"
    config, _ = resolve_config([*chosen, "data.classes=1-2"])
    assert class_names(config.data) == ("Dog", "mouse")
    with pytest.raises(ConfigError, match="'1-3': hf:owner/toy has the classes 0 to 2"):
        resolve_config([*chosen, "data.classes=1-3"])
    with pytest.raises(DataError, match="data.classes: must contain class names"):
        class_names(data(parquet, classes=""))


def test_numbers_and_texts_are_classes_too(tmp_path: Path) -> None:
    """Camelyon's labels are 0 and 1 without names; others' are texts."""
    images = [shade(0, 0, number) for number in range(4)]
    for name, labels in (("numbers", [0, 1, 1, 0]), ("texts", ["no", "yes", "yes", "no"])):
        Dataset.from_dict({"image": images, "label": labels}).save_to_disk(tmp_path / name)
        config = data(tmp_path / name, classes="no,yes", partition="iid")
        assert sorted(image_labels(config, node(0, 1), "test", 0)) == [0, 1]
        with pytest.raises(DataError, match="stores no names for the labels in its column 'label'"):
            named.stored_classes(config)


def test_a_node_takes_a_part_that_flwr_datasets_saved(tmp_path: Path) -> None:
    partitioner = IidPartitioner(num_partitions=2)
    partitioner.dataset = rows().shuffle(seed=0)
    union: set[tuple] = set()
    for part in range(2):
        folder = tmp_path / f"partition_{part}"
        partitioner.load_partition(part).save_to_disk(folder)
        place = NodeConfig(data_dir=str(folder))
        # Whatever the run's data are called: the folder is this node's
        for name in ("hf:owner/toy", "folder"):
            config = data(name=name)
            train = pictures(config, place, "train")
            test = pictures(config, place, "test")
            assert not train & test
            assert len(train | test) == 30
        union |= train | test
    assert union == everything()
    both = DatasetDict(train=rows(2), test=rows(1))
    both.save_to_disk(tmp_path / "both")
    place = NodeConfig(data_dir=str(tmp_path / "both"))
    assert pictures(data(), place, "test") == everything(1)
    assert pictures(data(), place, "train") == everything(2)


def test_counting_and_joining_open_no_image(tmp_path: Path) -> None:
    """The rows hold no image, only bytes that cannot be decoded."""
    broken = Dataset.from_dict(
        {
            "image": [{"bytes": b"no image", "path": None}] * 8,
            "label": [0, 1] * 4,
            "domain": ["a"] * 8,
        },
        features=Features(image=ImageColumn(), label=Value("int64"), domain=Value("string")),
    )
    broken.save_to_disk(tmp_path / "broken")
    config = data(tmp_path / "broken", classes="cat,dog")
    check_images(config, node(0), 0)
    assert count_images(config, node(0), "train", 0) == 6
    with pytest.raises(
        DataError, match="hf:owner/toy, train image 0 of this client: not a readable image"
    ):
        load_images(config, node(0), "train", 0)


def test_more_images_than_memory_are_decoded_as_they_are_taken(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data(parquet)
    images = load_images(config, node(0), "train", 0)
    monkeypatch.setattr("osfl.data.load.MAX_DECODED_BYTES", images.pixels.nbytes - 1)
    lazy = load_images(config, node(0), "train", 0)
    assert isinstance(lazy.pixels, LazyPixels)
    assert torch.equal(lazy.labels, images.labels)
    order = torch.randperm(len(images))
    assert torch.equal(lazy.pixels[order], images.pixels[order])
    assert torch.equal(torch.cat(list(lazy.pixels.split(7))), images.pixels)
    assert lazy.pixels.to(torch.device("meta"))[order].device.type == "meta"
    both = concatenate([lazy.pixels, images.pixels])
    backwards = torch.arange(len(both)).flip(0)
    assert torch.equal(both[backwards], torch.cat([images.pixels, images.pixels]).flip(0))
    assert torch.equal(torch.cat(list(lazy.batches(7))), torch.cat(list(images.batches(7))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_column": "y"}, "has no column 'y', only image, domain, label"),
        ({"image_column": "picture"}, "has no column 'picture'"),
        ({"domain_column": "site"}, "requires data.domain-column, .* are "),
        ({"train_split": "training"}, "data.train-split = 'training': .* the splits train, test"),
        ({"test_split": "valid"}, "data.test-split = 'valid': .* the splits train, test"),
    ],
)
def test_missing_splits_and_columns_are_named(parquet: Path, settings: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_images(data(parquet, **settings), node(0), 0)


def test_parts_and_places_that_are_not_there_are_named(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="partition-id = 2: hf:owner/toy is cut into 2 parts"):
        check_images(data(parquet), node(2), 0)
    with pytest.raises(DataError, match="requires node-config partition-id.* or data-dir"):
        check_images(data(parquet), NodeConfig(), 0)
    with pytest.raises(DataError, match="60 images cannot be cut into 61 parts"):
        check_images(data(parquet, partition="iid"), node(0, 61), 0)
    with pytest.raises(DataError, match="data.root = '/nowhere': no such folder"):
        check_images(data("/nowhere"), node(0), 0)
    with pytest.raises(DataError, match="cannot be read .*hf:OWNER/NAME@REVISION"):
        check_images(data(tmp_path), node(0), 0)
    with pytest.raises(ConfigError, match="data.name = 'hf:toy': must be digits, folder, or hf:"):
        resolve_config(["data.name=hf:toy"])


def test_names_and_revisions() -> None:
    assert named.repository_of("hf:flwrlabs/pacs@abc123") == ("flwrlabs/pacs", "abc123")
    assert named.repository_of("hf:flwrlabs/pacs") == ("flwrlabs/pacs", None)


def test_the_share_is_at_least_one_of_two() -> None:
    """One image of one holds nothing out, two one, ten with 0.99 nine."""
    labels = np.array([0, 1, 1, *[2] * 10])
    test = shares._share(np.arange(13), labels, 0.01, "test")
    assert Counter(labels[test].tolist()) == {1: 1, 2: 1}
    test = shares._share(np.arange(13), labels, 0.99, "test")
    assert Counter(labels[test].tolist()) == {0: 1, 1: 1, 2: 9}


def test_a_client_is_called_as_its_domain(parquet: Path, tmp_path: Path) -> None:
    """Only a data set that is partitioned by domain names clients; a hospital's number says
    nothing.
    """
    config = data(parquet, partition="domain")
    assert [client_name(config, node(part), 0) for part in (0, 1)] == ["Clipart", "Real_World"]
    assert client_name(data(parquet, partition="iid"), node(1), 0) == "client-1"
    numbered = rows().map(lambda row: {"domain": str(DOMAINS.index(row["domain"]))})
    folder = tmp_path / "numbered" / "data"
    folder.mkdir(parents=True)
    numbered.to_parquet(folder / "train-00000-of-00001.parquet")
    config = data(folder.parent, partition="domain")
    assert client_name(config, node(1), 0) == "client-1"
