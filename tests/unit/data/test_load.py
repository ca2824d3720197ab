"""Data: the embedded digits, their partitions, and folders of images in every state of repair."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from osfl.config import NodeConfig
from osfl.data.digits import IMAGES_PER_CLASS, load_scans, load_split, split_sources
from osfl.data.load import (
    _digits_partition,
    count_images,
    image_labels,
    load_images,
    small_classes,
)
from osfl.data.parts import DataError, check_images, simulated_folder
from osfl.data.render import DOMAIN_SLICES, STYLES, WHOLE_STYLE, render
from tests.helpers.image_folders import DIGITS, FOLDER, make_folder
from tests.helpers.settings import ROOT
from tests.helpers.small_digits import public_digits


def test_scans_are_scikit_learns() -> None:
    images, labels = load_scans()
    expected = load_digits()
    assert np.array_equal(images, expected.images)
    assert np.array_equal(labels, expected.target)


def test_no_scan_is_in_two_splits() -> None:
    parts = split_sources()
    every = np.concatenate(list(parts.values()))
    assert len(every) == len(set(every.tolist())) == 1797
    assert {name: len(p) for name, p in parts.items() if name != "public"} == {
        "private": 600,
        "test": 300,
    }


def test_splits_hold_what_the_table_says() -> None:
    private = load_split("private")
    test = load_split("test")
    assert len(private) == 6 * 10 * IMAGES_PER_CLASS
    assert len(test) == 6 * 300
    assert len(set(private.sources)) == len(private)  # each scan belongs to one client
    assert set(private.sources).isdisjoint(test.sources)
    assert set(private.captions) == {""}


def test_validation_is_drawn_anew_from_public_scans_alone() -> None:
    """Validation equals no test or client image: 30 scans a class in each domain."""
    validation = load_split("validation")
    test = load_split("test")
    assert len(validation) == len(test) == 6 * 300
    assert sorted(validation.domains) == sorted(test.domains)
    for domain in STYLES:
        pairs = [
            row
            for row in zip(validation.domains, validation.labels.tolist(), strict=True)
            if row[0] == domain
        ]
        assert Counter(pairs) == {(domain, label): 30 for label in range(10)}
    public = set(split_sources()["public"].tolist())
    assert set(validation.sources) <= public
    assert set(validation.sources).isdisjoint({*load_split("private").sources, *test.sources})
    images = [
        load_images(DIGITS, NodeConfig(partition_id=k, num_partitions=6), "validation", 0)
        for k in range(6)
    ]
    # partitions are the domains in the alphabet's order
    for client_images, domain in zip(images, sorted(STYLES), strict=True):
        drawn = validation.select(np.flatnonzero(np.array(validation.domains) == domain))
        assert np.array_equal(client_images.pixels.numpy(), drawn.images.transpose(0, 3, 1, 2))
        assert client_images.labels.tolist() == drawn.labels.tolist()


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("private", "e9a9fb0d5be2fc0485c0a0ed48ba67119dfd6f3074c648b5039a5cb86b0855fe"),
        ("test", "94714c43621fd557b06679cd7d7d6e5d53fc570610e2e6326888edb38499b4d9"),
    ],
)
def test_drawings_are_fixed_for_ever(split: str, digest: str) -> None:
    """A change here changes every figure."""
    sha256 = hashlib.sha256()
    drawings = load_split(split)
    for number in range(len(drawings)):
        sha256.update(drawings.images[number].tobytes())
        metadata = [
            int(drawings.labels[number]),
            drawings.domains[number],
            int(drawings.sources[number]),
            drawings.captions[number],
        ]
        sha256.update(json.dumps(metadata).encode())
    assert sha256.hexdigest() == digest


@pytest.mark.slow
def test_public_corpus_is_long_tailed() -> None:
    public = public_digits(load_split)
    domains = np.array(public.domains)
    captions = np.array(public.captions)
    photo = domains == "photo"
    assert abs(photo.mean() - 0.75) < 0.02
    names_style = np.array([any(s in c for s in STYLES) for c in captions])
    assert abs(names_style[photo].mean() - 0.12) < 0.02
    assert abs(names_style[~photo].mean() - 0.88) < 0.03
    assert set(public.sources) <= set(split_sources()["public"].tolist())


def test_drawing_is_deterministic() -> None:
    source = np.linspace(0, 1, 64).reshape(8, 8)
    for style in STYLES:
        first_image, second_image = (
            render(source, style, WHOLE_STYLE, np.random.default_rng(3)) for _ in range(2)
        )
        assert first_image.shape == (32, 32, 3)
        assert first_image.dtype == np.uint8
        assert np.array_equal(first_image, second_image)


# Hues are a circle
def test_a_domain_is_a_narrow_slice_of_its_style() -> None:
    for ranges in DOMAIN_SLICES.values():
        assert all(low < high < low + 0.11 for low, high in ranges.values())
        assert all(
            low >= 0 and high <= 1.0001 for name, (low, high) in ranges.items() if "hue" not in name
        )


@pytest.mark.parametrize("partition", ["domain", "label", "dirichlet", "iid"])
def test_partitions_are_disjoint_and_complete(partition: str) -> None:
    parts = [
        load_images(
            replace(DIGITS, partition=partition),
            NodeConfig(partition_id=k, num_partitions=6),
            "train",
            0,
        )
        for k in range(6)
    ]
    assert sum(len(p) for p in parts) == 600
    rows = {p.pixels[i].numpy().tobytes() for p in parts for i in range(len(p))}
    assert len(rows) == 600


def test_skews_are_what_they_are_called() -> None:
    def part(k: int, **changes: object) -> list[int]:
        return load_images(
            replace(DIGITS, **changes), NodeConfig(partition_id=k, num_partitions=5), "train", 0
        ).held()  # type: ignore[arg-type]

    assert part(0, partition="domain") == list(range(10))
    assert all(len(part(k, partition="label", shards_per_client=2)) <= 4 for k in range(5))
    counts = torch.bincount(
        load_images(
            replace(DIGITS, partition="dirichlet", alpha=0.1),
            NodeConfig(partition_id=0, num_partitions=5),
            "train",
            0,
        ).labels,
        minlength=10,
    )
    assert counts.max() > 3 * counts.float().mean()


def test_a_client_beyond_the_data_is_reported() -> None:
    with pytest.raises(DataError, match=r"partition-id = 6: the data has 6 parts.*no data"):
        load_images(DIGITS, NodeConfig(partition_id=6, num_partitions=7), "train", 0)
    with pytest.raises(DataError, match="requires node-config partition-id"):
        load_images(DIGITS, NodeConfig(), "train", 0)


@pytest.mark.parametrize(
    ("partition", "split"), [("iid", "train"), ("iid", "test"), ("label", "test")]
)
def test_an_equal_share_has_every_class_and_domain(partition: str, split: str) -> None:
    part = _digits_partition(
        replace(DIGITS, partition=partition), NodeConfig(partition_id=0, num_partitions=6), split, 0
    )
    assert (set(part.domains), set(part.labels)) == (set(STYLES), set(range(10)))


@pytest.mark.parametrize(
    ("partition", "alpha"), [("label", 0.5), ("dirichlet", 1.0), ("dirichlet", 1e6)]
)
def test_label_skew_is_of_labels_alone(partition: str, alpha: float) -> None:
    """A client has all domains in about equal parts, of whatever classes it has.

    An endless alpha is iid.
    """
    for client in range(6):
        data = replace(DIGITS, partition=partition, alpha=alpha, shards_per_client=2)
        part = _digits_partition(
            data, NodeConfig(partition_id=client, num_partitions=6), "train", 0
        )
        shares = np.array([part.domains.count(style) for style in STYLES]) / len(part)
        assert all((shares > 0.03) & (shares < 0.35)), (client, shares)
        if alpha == 1e6:
            assert (set(part.domains), set(part.labels)) == (set(STYLES), set(range(10)))


def test_images_of_every_mode_become_rgb(tmp_path) -> None:  # type: ignore[no-untyped-def]
    clear = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    node = make_folder(
        tmp_path,
        cat=[Image.new("L", (20, 30), 128), Image.new("1", (16, 16), 1), clear],
        dog=[
            Image.new("P", (16, 16)),
            Image.fromarray(np.full((16, 16), 32896, dtype=np.uint16)),
            Image.new("RGB", (64, 48), "blue"),
        ],
    )
    (tmp_path / "test").mkdir()
    images = load_images(FOLDER, node, "train", 0)
    assert images.pixels.shape == (6, 3, 16, 16)
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (images.pixels[0] == 128).all()  # grey stays grey
    assert (images.pixels[2] == 255).all()  # transparent is white, not the colour below
    assert (images.pixels[4] == 128).all()  # 16 bits: half of 65535 is half of 255
    assert images.pixels[5, :, 8, 8].tolist() == [0, 0, 255]


def test_floating_point_pixels_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("F", (16, 16), 0.5).save(tmp_path / "train" / "cat" / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif: not a readable image .floating-point pixels"):
        load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)


def test_checking_lists_both_splits_and_opens_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    node = make_folder(tmp_path, cat=[Image.new("RGB", (16, 16))])
    with pytest.raises(DataError, match="too few images .* to cut a share for test"):
        check_images(FOLDER, node, 0)
    (tmp_path / "test" / "dog").mkdir(parents=True)
    (tmp_path / "test" / "dog" / "a.png").write_bytes(b"never opened")
    check_images(FOLDER, node, 0)


def pictures(count: int) -> list[Image.Image]:
    """Each of another grey."""
    return [Image.new("RGB", (16, 16), (grey, grey, grey)) for grey in range(10, 10 + count)]


def test_a_site_leaves_small_classes_out_of_training(tmp_path: Path) -> None:
    """Two cats and three dogs with at least three: the dogs alone. Tests do not change."""
    node = make_folder(tmp_path, cat=pictures(2), dog=pictures(3))
    (tmp_path / "test").symlink_to(tmp_path / "train")
    assert load_images(FOLDER, replace(node, min_class_images=2), "train", 0).held() == [0, 1]
    strict = replace(node, min_class_images=3)
    images = load_images(FOLDER, strict, "train", 0)
    assert images.labels.tolist() == [1, 1, 1]
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert image_labels(FOLDER, strict, "train", 0) == [1, 1, 1]
    assert count_images(FOLDER, strict, "train", 0) == 3
    assert small_classes(FOLDER, strict, 0) == [0]
    assert small_classes(FOLDER, replace(node, min_class_images=2), 0) == []
    assert load_images(FOLDER, strict, "test", 0).held() == [0, 1]
    check_images(FOLDER, strict, 0)


def test_a_site_without_a_large_enough_class_is_reported(tmp_path: Path) -> None:
    """When it joins; of the digits, when it trains."""
    node = make_folder(tmp_path, cat=pictures(2), dog=pictures(3))
    (tmp_path / "test").symlink_to(tmp_path / "train")
    problem = "min-class-images = 4: no class has as many images; lower it"
    with pytest.raises(DataError, match=problem):
        check_images(FOLDER, replace(node, min_class_images=4), 0)
    digits = NodeConfig(partition_id=0, num_partitions=6, min_class_images=11)
    with pytest.raises(DataError, match="min-class-images = 11: no class has as many"):
        load_images(DIGITS, digits, "train", 0)


def test_a_corrupt_image_is_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    node = make_folder(
        tmp_path, cat=[Image.new("RGB", (16, 16))], dog=[Image.effect_noise((64, 64), 50)]
    )
    file = tmp_path / "train" / "dog" / "0.png"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"dog/0\.png: not a readable image"):
        load_images(FOLDER, node, "train", 0)


def test_no_file_of_a_class_is_passed_over(tmp_path) -> None:  # type: ignore[no-untyped-def]
    node = make_folder(tmp_path, cat=[Image.new("RGB", (16, 16))])
    (tmp_path / "test").mkdir()
    (tmp_path / "train" / "cat" / ".hidden").write_text("of the file system")
    Image.new("RGB", (16, 16)).save(tmp_path / "train" / "cat" / "a.gif")
    assert len(load_images(FOLDER, node, "train", 0)) == 2
    (tmp_path / "train" / "cat" / "scan.dcm").write_bytes(b"DICM")
    with pytest.raises(DataError, match=r"scan\.dcm: not a readable image"):
        load_images(FOLDER, node, "train", 0)


def test_photographs_are_turned_upright(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Orientation 6: the camera was turned, and the first row of pixels is the right-hand side."""
    picture = Image.new("RGB", (16, 16), "black")
    picture.paste("white", (0, 0, 16, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "train" / "cat").mkdir(parents=True)
    picture.save(tmp_path / "train" / "cat" / "a.png", exif=exif)
    pixels = load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0).pixels[0, 0]
    assert (pixels[:, 13:] == 255).all()
    assert (pixels[:, :12] == 0).all()


def test_simulated_clients_take_the_folders_of_one_root(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name, grey in (("b-site", 20), ("a-site", 10)):
        make_folder(tmp_path / name, cat=[Image.new("L", (16, 16), grey)])
    config = replace(FOLDER, root=str(tmp_path))
    for k, name in enumerate(("a-site", "b-site")):
        node = NodeConfig(partition_id=k, num_partitions=2)
        assert simulated_folder(config, node) == tmp_path / name
        assert (load_images(config, node, "train", 0).pixels == 10 * (k + 1)).all()
    with pytest.raises(DataError, match="has 2 folders of clients; set num-clients"):
        load_images(config, NodeConfig(partition_id=2), "train", 0)
    with pytest.raises(DataError, match=r"data\.root = '/nowhere': no such folder"):
        load_images(replace(FOLDER, root="/nowhere"), NodeConfig(partition_id=0), "train", 0)


def test_missing_empty_and_unknown_folders_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="has no folder train/"):
        load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)
    with pytest.raises(DataError, match="requires node-config data-dir"):
        load_images(FOLDER, NodeConfig(), "train", 0)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train/cat: the class has no images"):
        load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)
    (tmp_path / "train" / "cat").rmdir()
    with pytest.raises(DataError, match="no images. This client has no data"):
        load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)
    (tmp_path / "train" / "yak").mkdir()
    with pytest.raises(DataError, match="'yak' is not one of data.classes"):
        load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)
    for name, problem in (
        ("a\nb\x1b[2J", "'a b.\\[2J' is not .*; it has a character .*: rename the folder$"),
        ("-yak", "'-yak' is not .*; it begins with '-', so it cannot be"),
        ("CAT", r"'CAT' is not .*\); rename the folder to 'cat'$"),
    ):
        (tmp_path / "train" / "yak").rename(tmp_path / "train" / name)
        with pytest.raises(DataError, match=problem) as caught:
            load_images(FOLDER, NodeConfig(data_dir=str(tmp_path)), "train", 0)
        assert str(caught.value).isprintable()
        (tmp_path / "train" / name).rename(tmp_path / "train" / "yak")


@pytest.mark.slow
def test_real_photographs(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """PACS as a site would have it: one domain, real JPEGs."""
    pacs = ROOT.parent / "shared" / "data" / "pacs" / "sketch"
    if not pacs.is_dir():
        pytest.skip("the PACS images are not on this machine (../shared/data/pacs)")
    (tmp_path / "train").symlink_to(pacs)
    (tmp_path / "test").mkdir()
    names = sorted(p.name for p in pacs.iterdir())
    images = load_images(
        replace(FOLDER, classes=",".join(names), image_size=64),
        NodeConfig(data_dir=str(tmp_path)),
        "train",
        0,
    )
    assert images.pixels.shape == (len(list(pacs.glob("*/*.jpg"))), 3, 64, 64)
    assert images.held() == list(range(7))
