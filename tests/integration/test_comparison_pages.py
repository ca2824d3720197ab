"""A site's own images beside the synthetic ones: on a page that stays there, for sites that ask."""

import base64
import io
import json
import logging
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from client_app import comparison
from client_app.app import app
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import open_images
from osfl.payload.messages import pack_bytes
from osfl.payload.samples import Sample, pack_samples
from osfl.run_folder.image_store import decode_png
from server_app.app import run_job
from server_app.federation import samples as server_samples
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes


class RecordingGrid(LoopGrid):
    """Keeps every request and reply."""

    def __init__(self, config: dict[str, Any], sites: list[dict[str, Any]]) -> None:
        super().__init__(app, config, sites, self._record)
        self.requests: list[tuple[int, str, RecordDict]] = []
        self.replies: list[tuple[int, str, RecordDict]] = []

    def push_messages(self, messages):  # type: ignore[no-untyped-def]
        messages = list(messages)
        for message in messages:
            kind = message.metadata.message_type
            self.requests.append((message.metadata.dst_node_id - 100, kind, message.content))
        return super().push_messages(messages)

    def _record(self, node: int, kind: str, reply: Message) -> Message:
        if reply.has_content():
            self.replies.append((node, kind, reply.content))
        return reply


def run(home: Path, kit: Path, folders: dict[int, Path], **settings: Any) -> RecordingGrid:
    defaults = {"kit": str(kit), "seed": 4, "synthesis__images_per_class": 2}
    config = quick(**{**defaults, **settings})
    sites: list[dict[str, Any]] = [{**node} for node in nodes(2)]
    for node, folder in folders.items():
        sites[node]["comparison-dir"] = str(folder)
    grid = RecordingGrid(config, sites)
    run_job(grid, parse_run_config(config), "job")
    return grid


def records(contents: list[tuple[int, str, RecordDict]], node: int, kind: str) -> list[set[str]]:
    return [
        set(content) for receiver, name, content in contents if (receiver, name) == (node, kind)
    ]


def pictures(page: str, text: str) -> list[np.ndarray]:
    """Return the pixels of a page's pictures that have this text."""
    urls = re.findall(f'alt="{text}" src="data:image/jpeg;base64,([^"]+)"', page)
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(url))).convert("RGB"), float)
        for url in urls
    ]


def is_like(picture: np.ndarray, original: Image.Image) -> bool:
    large = original.convert("RGB").resize(picture.shape[1::-1], Image.Resampling.NEAREST)
    # JPEG's error; other images differ by tens
    return bool(np.abs(picture - np.asarray(large, float)).mean() < 6)


def small(original: Image.Image) -> Image.Image:
    """Return an image in the run's size."""
    return original.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR)


@pytest.mark.slow
def test_a_site_that_asks_gets_a_page_and_the_others_messages_stay(
    home: Path, tiny_kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home / "site"
    grid = run(home, tiny_kit, {0: folder}, personalization__steps=1)
    (file,) = folder.iterdir()
    assert file.name == "job-client-0.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    page = file.read_text()
    assert "default-src 'none'; img-src data:" in page
    assert "<script" not in page

    job = home / "runs" / "job"
    rows = [json.loads(line) for line in (job / "manifest.jsonl").read_text().splitlines()]
    synthetic = pictures(page, "two, synthetic")
    files = [row["file"] for row in rows if (row["client"], row["class"]) == ("client-0", "two")]
    assert len(synthetic) == len(files) == 2
    for picture, name in zip(synthetic, files, strict=True):
        assert is_like(picture, Image.open(job / name))
    config = parse_run_config(grid.run_config)
    part = NodeConfig(partition_id=0, num_partitions=2)
    images = open_images(config.data, part, "train", config.seed)
    originals = [images.read(n) for n, label in enumerate(images.labels) if label == 2]
    site_pictures = pictures(page, "two, own")
    assert len(site_pictures) == min(4, len(originals)) > 1
    for picture in site_pictures:
        assert any(is_like(picture, small(original)) for original in originals)
    negatives = [images.read(n) for n, label in enumerate(images.labels) if label != 2]
    assert not any(is_like(site_pictures[0], small(negative)) for negative in negatives)

    model = {"model", "header"}
    sample = {"synthetic-images", "synthetic-header"}
    assert records(grid.requests, 0, "evaluate") == [model | sample, model]
    assert records(grid.requests, 1, "evaluate") == [model, model]
    for node in (0, 1):
        replies = records(grid.replies, node, "evaluate")
        assert replies == [{"metrics", "histograms", "calibration"}] * 2
    keys = [set(content["join"]) for _, kind, content in grid.replies if kind == "query.join"]
    assert keys[0] - keys[1] == {"comparison"}
    assert keys[1] <= {"client", "version", "architecture", "images"}


@pytest.mark.slow
def test_only_the_first_model_brings_images(home: Path, tiny_kit: Path) -> None:
    settings = {"method": "fedlmg", "fedlmg__strategies": "ft,md", "classifier__init": "none"}
    grid = run(home, tiny_kit, {0: home / "site"}, global_model__init="none", **settings)
    first, second = records(grid.requests, 0, "evaluate")
    assert first - second == {"synthetic-images", "synthetic-header"}
    assert second == {"model", "header"}


@pytest.mark.slow
def test_no_page_without_images_and_a_failure_costs_no_test(
    home: Path, tiny_kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that cannot be written is an error in the site's log."""
    folder = home / "site"
    (folder / "job-client-0.html").mkdir(parents=True)
    run(home, tiny_kit, {0: folder, 1: home / "other"})
    assert f"comparison-dir = {folder}: the page cannot be written" in caplog.text
    assert (home / "other" / "job-client-1.html").is_file()
    assert set(json.loads((home / "runs" / "job" / "tests" / "FT.json").read_text())) == {
        "client-0",
        "client-1",
    }
    node = NodeConfig(partition_id=0, num_partitions=2, comparison_dir=str(home / "none"))
    comparison.write_comparison(RecordDict(), parse_run_config(quick()), node, "client-0")
    assert not (home / "none").exists()


def test_a_relative_folder_is_refused_before_the_work(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(Exception, match="comparison-dir = 'here': must be an absolute path"):
        run(home, tiny_kit, {0: Path("here")}, join_timeout=1.0)


def png(side: int, level: int = 9, **settings: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), (level, level, level)).save(stream, "png", **settings)
    return stream.getvalue()


def message(samples: list[Sample], **changes: Any) -> RecordDict:
    """Return a request to test a model with these images, and some records of it changed."""
    content: dict[str, Any] = {"header": ConfigRecord({"job": "job"}), **pack_samples(samples)}
    return RecordDict({**content, **changes})


def with_text(size: int, compressed: bool) -> bytes:
    """Return a PNG with a text of this size, compressed or not."""
    text = PngInfo()
    text.add_text("x", "0" * size, zip=compressed)
    return png(8, pnginfo=text)


GOOD = Sample(1, png(32))


def headed(labels: Any, sizes: Any) -> RecordDict:
    """Return a message with one image, and another header."""
    header = ConfigRecord({"labels": labels, "sizes": sizes})
    return message([GOOD], **{"synthetic-header": header})


HOSTILE: dict[str, RecordDict] = {
    "no image": message([Sample(0, b"<svg onload=alert(1)>")]),
    "a GIF": message([Sample(0, b"GIF89a" + bytes(50))]),
    "cut": message([Sample(0, png(32)[:-20])]),
    "longer": message([Sample(0, png(32) + b"more")]),
    "a wide image": message([Sample(0, png(129))]),
    "a bomb": message([Sample(0, with_text(2**26, compressed=True))]),
    "no such class": message([Sample(10, png(8))]),
    "a class below none": message([Sample(-1, png(8))]),
    "five of a class": message([Sample(3, png(8))] * 5),
    "an empty image": message([Sample(3, b"")]),
    "too many bytes": message([Sample(0, with_text(2**23, compressed=False))]),
    "bytes of no image": message(
        [GOOD], **{"synthetic-images": pack_bytes(GOOD.content + b"more", "png")}
    ),
    "no header": RecordDict(
        {"header": ConfigRecord({"job": "job"}), "synthetic-images": pack_bytes(b"1", "png")}
    ),
    "another number": headed([1, 2], [len(GOOD.content)]),
    "other sizes": headed([1], [5]),
    "numbers with a point": headed([1.0], [len(GOOD.content)]),
    "texts": headed("1", "2"),
    "no arrays": message([GOOD], **{"synthetic-images": ArrayRecord([np.zeros(3)])}),
    "a job that is a path": message([GOOD], header=ConfigRecord({"job": "../job"})),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_the_server_sends_instead_writes_no_page(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = home / "site"
    node = NodeConfig(partition_id=0, num_partitions=2, comparison_dir=str(folder))
    comparison.write_comparison(HOSTILE[kind], parse_run_config(quick()), node, "client-0")
    assert "the page cannot be written" in caplog.text
    assert not list(home.rglob("*.html"))


def test_a_large_image_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the header is read of an image that is larger than the server may send."""

    def fail(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    content = png(4000)
    monkeypatch.setattr(Image.Image, "convert", fail)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    assert decode_png(content, 128) is None


def test_a_page_holds_no_byte_as_it_was_sent(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pictures are encoded again, and names are escaped."""
    caplog.set_level(logging.INFO)
    text = PngInfo()
    text.add_text("note", "<script>")
    sent = png(32, pnginfo=text)
    node = NodeConfig(partition_id=0, num_partitions=2, comparison_dir=str(home / "site"))
    config = parse_run_config(quick())
    comparison.write_comparison(message([Sample(1, sent)]), config, node, "client-0")
    page = (home / "site" / "job-client-0.html").read_text()
    assert base64.b64encode(sent).decode() not in page
    assert len(pictures(page, "one, synthetic")) == 1
    row = comparison.Row("<script>alert(1)</script>", [], [])
    assert "<script" not in comparison.render([row], "feddeo", "job", "client-0")


@pytest.mark.slow
def test_a_sample_ends_where_it_would_be_too_large(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image of every class comes first."""
    monkeypatch.setattr(server_samples, "MAX_IMAGES", 12)
    grid = run(home, tiny_kit, {0: home / "site"})
    sent = next(c for n, kind, c in grid.requests if (n, kind) == (0, "evaluate"))
    labels = sent["synthetic-header"]["labels"]
    assert labels == [*range(10), 0, 1]
    files = server_samples._files_of(server_samples.RunFolder(home / "runs" / "job"), ["client-0"])
    (home / "runs" / "job" / files["client-0"]["three"][0]).write_bytes(b"corrupt")
    samples = server_samples._read(home / "runs" / "job", files["client-0"], ["two", "three"])
    assert [sample.label for sample in samples] == [0, 0, 1]
    monkeypatch.setattr(server_samples, "MAX_BYTES", 1)
    assert server_samples._read(home / "runs" / "job", files["client-0"], ["two", "three"]) == []
