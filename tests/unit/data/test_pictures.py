"""Pictures of every kind and state of repair: read, or refused by the name of their file."""

import io
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional
from typer.testing import CliRunner

from osfl.cli.data_check import inspect_split
from osfl.cli.main import app
from osfl.config import NodeConfig, RunConfig
from osfl.data import pictures
from osfl.data.load import load_images
from osfl.data.near_duplicates import group_near_duplicates
from osfl.data.partition import DataError
from osfl.data.pictures import open_image, open_stored_image, to_pixels, traits_of
from osfl.models.encoders import ImageEncoder
from osfl.settings import resolve_config
from osfl.util.pixels import MAX_ASPECT_RATIO, crop_long_side
from server_app.baselines.proxy import ImageFiles
from tests.helpers.image_folders import FOLDER, make_folder
from tests.helpers.pictures import encoded, noise
from tests.helpers.settings import ROOT


def damaged(content: bytes, seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    broken = bytearray(content)
    for place in draw.integers(0, len(broken), draw.integers(1, 6)):
        broken[place] = draw.integers(256)
    return bytes(broken if seed % 3 else broken[: draw.integers(1, len(broken))])


def one_file(folder: Path, content: bytes, name: str = "scan.img") -> NodeConfig:
    place = folder / "train" / "cat"
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(content)
    return NodeConfig(data_dir=str(folder))


@pytest.mark.parametrize(
    "kind", ["png", "jpeg", "tiff", "gif", "webp", "ico", "im", "avif", "dds", "jpeg2000", "sgi"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_read_or_named(kind: str, tmp_path: Path) -> None:
    content = encoded(noise(24, 20), kind)
    assert len(load_images(FOLDER, one_file(tmp_path, content), "train", 0)) == 1
    refused = 0
    for seed in range(60):
        node = one_file(tmp_path, damaged(content, seed))
        try:
            load_images(FOLDER, node, "train", 0)
        except DataError as error:
            refused += 1
            assert "train/cat/scan.img: not a readable image" in str(error)
    assert refused > 5


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, TypeError, IndexError, MemoryError])
def test_whatever_a_decoder_raises_names_the_file(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = one_file(tmp_path, encoded(noise(24, 20), "png"))

    def fails(*_: object) -> None:
        raise kind("of a plug-in")

    monkeypatch.setattr(Image.Image, "convert", fails)
    with pytest.raises(DataError, match="scan.img: not a readable image"):
        load_images(FOLDER, node, "train", 0)
    with pytest.raises(ValueError, match=r"rounds.proxy: .*scan.img is not a readable image"):
        _ = ImageFiles([tmp_path / "train" / "cat" / "scan.img"], 16)[0]


def test_a_scan_above_pillows_limit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow's own limit, lowered here, stays in force elsewhere."""
    content = encoded(noise(24, 20), "png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 20 // 2 - 1)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(content))
    images = load_images(FOLDER, one_file(tmp_path, content), "train", 0)
    assert torch.equal(images.pixels[0], to_pixels(noise(24, 20), 16))
    assert Image.MAX_IMAGE_PIXELS == 24 * 20 // 2 - 1
    row = {"bytes": content, "path": None}
    assert open_stored_image(row).size == (24, 20)


def test_a_scan_beyond_our_own_limit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 24 * 20)
    assert len(load_images(FOLDER, one_file(tmp_path, encoded(noise(24, 20), "png")), "train", 0))
    node = one_file(tmp_path, encoded(noise(25, 20), "png"))
    with pytest.raises(DataError, match=r"25 x 20 pixels; an image must have at most 480: scale"):
        load_images(FOLDER, node, "train", 0)


# ---- Shapes ----


def uncut(image: Image.Image, size: int) -> torch.Tensor:
    """The whole picture resized, then cut, as before."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    resized = functional.resize(pixels, [size], antialias=True)
    return functional.center_crop(resized, [size, size])


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("width", [20, 23, 41, 77, 80])
def test_an_ordinary_picture_is_as_it_was_to_the_bit(width: int, size: int) -> None:
    """Up to four short sides long, upright or not."""
    for image in (noise(width, 20), noise(20, width)):
        assert torch.equal(to_pixels(image, size), uncut(image, size))


def test_photographs_are_as_they_were_to_the_bit() -> None:
    pacs = ROOT.parent / "shared" / "data" / "pacs"
    if not pacs.is_dir():
        pytest.skip("the PACS images are not on this machine (../shared/data/pacs)")
    for file in sorted(pacs.glob("*/*/*.jpg"))[::70]:
        with Image.open(file) as image:
            wide = image.crop((0, 20, 96, 60))
            for size in (32, 224):
                assert torch.equal(to_pixels(image, size), uncut(image, size))
                assert torch.equal(to_pixels(wide, size), uncut(wide, size))


@pytest.mark.parametrize("shape", [(900, 20), (20, 901), (5000, 40), (99, 9)])
def test_a_long_picture_loses_its_ends_alone(shape: tuple[int, int]) -> None:
    """A smooth one: within two levels, for its middle may lie half a pixel aside."""
    width, height = shape
    across = np.linspace(0, 200, max(shape))
    levels = np.broadcast_to(across if width > height else across[:, None], (height, width))
    image = Image.fromarray(levels.astype(np.uint8))
    before = uncut(image, 32).int()
    assert (to_pixels(image, 32).int() - before).abs().max() <= 2
    cut = crop_long_side(torch.zeros(3, height, width))
    assert max(cut.shape[1:]) == MAX_ASPECT_RATIO * min(cut.shape[1:])


def test_a_line_of_pixels_takes_little_memory(tmp_path: Path) -> None:
    """Resized whole, 30,000 x 4 pixels at 512 would be 3.8 million pixels wide."""
    from osfl.models.encoders import load_image_encoder
    from tests.helpers.encoder_folders import save_clip

    line = Image.new("RGB", (30_000, 4), "red")
    encoder: ImageEncoder = load_image_encoder(str(save_clip(tmp_path)), torch.device("cpu"))
    to_pixels(noise(24, 20), 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pixels in (to_pixels(line, 512), to_pixels(line, encoder.fit)):
        assert (pixels[0] == 255).all()
        assert (pixels[1] == 0).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


# ---- The check ----


def run_config(root: Path) -> RunConfig:
    settings = ["data.name=folder", f"data.root={root}", "data.classes=cat,dog", "method=local"]
    return resolve_config([*settings, *("classifier.init=none", "global-model.init=none")])[0]


def waves(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:64, 0:64]
    wave = np.sin(columns / draw.uniform(3, 20)) * np.cos(rows / draw.uniform(3, 20))
    return 20_000 + 19_000 * wave


@pytest.mark.parametrize("read", ["16 bits", "lab", "transparent", "turned", "float"])
def test_the_check_reads_and_refuses_what_a_run_does(read: str, tmp_path: Path) -> None:
    picture = {
        "16 bits": Image.fromarray(waves(0).astype(np.uint16)),
        "lab": noise(24, 20).convert("LAB"),
        "transparent": Image.new("RGBA", (8, 8), (255, 0, 0, 0)),
        "turned": noise(24, 20),
        "float": Image.fromarray(waves(0).astype(np.float32)),
    }[read]
    folder = tmp_path / "a" / "train" / "cat"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    if read == "turned":
        exif[0x0112] = 6
    picture.save(folder / "a.tif", exif=exif)
    config = run_config(tmp_path)
    node = NodeConfig(partition_id=0, num_partitions=1)
    inspection = inspect_split(config, node, "train")
    try:
        load_images(replace(FOLDER, root=str(tmp_path)), node, "train", 0)
    except DataError as error:
        assert [str(error)] == inspection.broken
        assert read == "float"
        return
    assert inspection.broken == []
    assert list(inspection.sizes) == [(20, 24) if read == "turned" else picture.size]


def test_different_pictures_of_16_bits_do_not_look_alike(tmp_path: Path) -> None:
    rows = []
    for seed in range(6):
        image = Image.fromarray(waves(seed).astype(np.uint16))
        make_folder(tmp_path / str(seed) / "a", cat=[image])
        node = NodeConfig(partition_id=0, num_partitions=1)
        inspection = inspect_split(run_config(tmp_path / str(seed)), node, "train")
        rows += list(inspection.thumbnails.values())
    assert len(set(group_near_duplicates(torch.stack(rows)).tolist())) == 6


def colours_of_16_bits(top: int) -> bytes:
    """A PNG of three channels of 16 bits, which Pillow reads and cannot write."""
    import struct
    import zlib

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    draw = np.random.default_rng(0)
    values = draw.integers(0, top, (8, 8, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_12_bits_in_files_of_16_and_frames_are_distinguished() -> None:
    draw = np.random.default_rng(0)
    for top, is_dark in ((4096, True), (60_000, False)):
        grey = Image.fromarray(draw.integers(0, top, (20, 24), dtype=np.uint16))
        for content in (encoded(grey, "png"), encoded(grey, "tiff"), colours_of_16_bits(top)):
            assert traits_of(open_image(content)).is_dark is is_dark
    night = Image.new("RGB", (8, 8), (9, 9, 9))
    assert not traits_of(open_image(encoded(night, "png"))).is_dark
    frames = [noise(24, 20), Image.new("RGB", (24, 20)), noise(24, 20)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "tiff", save_all=True, append_images=frames[1:])
    assert traits_of(open_image(buffer.getvalue())).frames == 3
    assert traits_of(open_image(encoded(night, "png"))).frames == 1


def test_the_check_counts_frames_and_dark_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "a" / split / "cat"
        folder.mkdir(parents=True)
        noise(24, 20).save(folder / "plain.png")
    draw = np.random.default_rng(0)
    dark = Image.fromarray(draw.integers(0, 4096, (20, 24), dtype=np.uint16))
    dark.save(tmp_path / "a" / "train" / "cat" / "dark.png")
    stack = [noise(24, 20), Image.new("RGB", (24, 20))]
    stack[0].save(
        tmp_path / "a" / "test" / "cat" / "stack.tif", save_all=True, append_images=stack[1:]
    )
    command = ["data", "check", "data.name=folder", f"data.root={tmp_path}", "num-clients=1"]
    result = CliRunner().invoke(app, [*command, "data.classes=cat,dog"], env={"COLUMNS": "300"})
    words = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert f"images with several frames, of which a run reads the first: 1 {tmp_path}" in words
    assert "cat/stack.tif: 2 frames" in words
    assert "16-bit images that use less than a sixteenth of their range (rescale them): 1" in words
    assert "cat/dark.png" in words


# ---- Rows ----


def test_a_row_holds_bytes_a_path_or_nothing(tmp_path: Path) -> None:
    content = encoded(noise(24, 20), "png")
    file = tmp_path / "a.png"
    file.write_bytes(content)
    expected = to_pixels(noise(24, 20), 16)
    for value in (content, {"bytes": content, "path": None}, {"bytes": None, "path": str(file)}):
        assert torch.equal(to_pixels(open_stored_image(value), 16), expected)
    grey = to_pixels(open_stored_image(content, "L"), 16)
    assert torch.equal(grey[0], grey[1])
    for value in (None, b"", {"bytes": None, "path": None}):
        with pytest.raises(ValueError, match="the row has no image"):
            open_stored_image(value)
    with pytest.raises(ValueError, match="the row has a URL"):
        open_stored_image({"bytes": None, "path": "https://example.org/a.png"})


@pytest.mark.parametrize("levels", [(-1000, 3000), (0, 70_000), (0, 2**31 - 1)])
def test_whole_numbers_beyond_16_bits_are_refused(levels: tuple[int, int], tmp_path: Path) -> None:
    """A CT's Hounsfield units, say, which would be clipped to black and white."""
    scan = np.linspace(*levels, 400).astype(np.int32).reshape(20, 20)
    where = one_file(tmp_path, encoded(Image.fromarray(scan), "tiff"), "ct.tif")
    message = f"ct.tif: .*pixels from {levels[0]} to {levels[1]}; they must be from 0 to 65535"
    with pytest.raises(DataError, match=message):
        load_images(FOLDER, where, "train", 0)
    inside = Image.fromarray(np.full((20, 20), 2**16 - 1, np.int32))
    assert (to_pixels(inside, 20) == 255).all()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "a web page"),
        (b"", "it is empty"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, or a video; save it as JPEG or PNG"),
        (b"hello", "Pillow does not know its format"),
    ],
)
def test_a_file_that_is_no_picture_is_named_by_its_kind(
    content: bytes, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"x.png: not a readable image \(.*{cause}"):
        load_images(FOLDER, one_file(tmp_path, content, "x.png"), "train", 0)
    if content:
        with pytest.raises(ValueError, match=cause):
            open_stored_image({"bytes": content, "path": None})
