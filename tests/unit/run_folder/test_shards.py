"""Synthetic images as WebDataset shards."""

import shutil
from pathlib import Path

import pytest
from datasets import load_dataset
from torchvision.transforms.v2.functional import pil_to_tensor
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.run_folder.shards import write_shards
from tests.helpers.run_folders import TWO_NAMES, make_run_of_colors


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_of_colors(tmp_path / "run")


def test_shards_are_read_as_a_webdataset(run: Path, tmp_path: Path) -> None:
    """Hugging Face's own reader reads every image once, with its label and its source, in another
    order than the run's.
    """
    files = write_shards(run, tmp_path / "out", 4)
    assert [Path(file).name for file in files] == ["00000.tar", "00001.tar", "00002.tar"]
    rows = load_dataset(
        "webdataset",
        data_files=files,
        split="train",
        cache_dir=str(tmp_path / "hf"),
    )
    seeds = [row["json"]["seed"] for row in rows]
    assert sorted(seeds) == list(range(10)) != seeds
    for row in rows:
        number = row["json"]["seed"]
        assert (row["cls"], row["json"]["class"], row["json"]["client"]) == (
            number // 5,
            TWO_NAMES[number // 5],
            f"site-{number % 2}",
        )
        assert set(pil_to_tensor(row["png"]).flatten().tolist()) == {20 * number}


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    first_shards, second_shards = (
        [Path(file).read_bytes() for file in write_shards(run, tmp_path / name, 4)]
        for name in ("one", "other")
    )
    assert first_shards == second_shards


def test_an_interrupted_command_goes_on(run: Path, tmp_path: Path) -> None:
    """Interruptions after the first shard, and within the second, of which a part is left."""

    def stop(finished: int, total: int) -> None:
        raise KeyboardInterrupt

    expected = [Path(file).read_bytes() for file in write_shards(run, tmp_path / "whole", 4)]
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_shards(run, out, 4, stop)
    assert sorted(file.name for file in out.iterdir()) == ["00000.tar", "shards.json"]
    (out / "00001.tar.part").write_bytes(b"half")
    first = (out / "00000.tar").stat()
    seen: list[tuple[int, int]] = []
    files = write_shards(run, out, 4, lambda *counts: seen.append(counts))
    assert [Path(file).read_bytes() for file in files] == expected
    assert (out / "00000.tar").stat().st_mtime_ns == first.st_mtime_ns
    assert not (out / "00001.tar.part").exists()
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_a_corrupt_or_missing_image_is_not_written(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "images/site-0/000-cat/00000.png", run / "images/site-1/000-cat/00003.png")
    with pytest.raises(ConfigError, match=r"00003.png is not the image.*osfl run"):
        write_shards(run, tmp_path / "out", 100)
    assert not list((tmp_path / "out").glob("*.tar*"))
    (run / "manifest.jsonl").unlink()
    with pytest.raises(ConfigError, match="has not finished its synthesis"):
        write_shards(run, tmp_path / "out", 100)


@pytest.mark.parametrize("damage", ["empty", "cut"])
def test_a_corrupt_manifest_leaves_no_file(run: Path, tmp_path: Path, damage: str) -> None:
    content = (run / "manifest.jsonl").read_bytes()
    (run / "manifest.jsonl").write_bytes(b"" if damage == "empty" else content[:-9])
    with pytest.raises(OSError, match=r"manifest.jsonl is corrupt; repeat the same `osfl run`"):
        write_shards(run, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_shards_of_something_else_are_left_alone(run: Path, tmp_path: Path) -> None:
    """Shards of another size, another run, or unknown origin."""
    before = [Path(file).read_bytes() for file in write_shards(run, tmp_path / "out", 5)]
    with pytest.raises(
        ConfigError, match="has shards of another run, or of another size; set an empty folder"
    ):
        write_shards(run, tmp_path / "out", 6)
    manifest = (run / "manifest.jsonl").read_text().splitlines(keepends=True)
    (run / "manifest.jsonl").write_text("".join(reversed(manifest)))
    with pytest.raises(ConfigError, match="has shards of another run"):
        write_shards(run, tmp_path / "out", 5)
    assert [file.read_bytes() for file in sorted((tmp_path / "out").glob("*.tar"))] == before
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "a.tar").touch()
    with pytest.raises(ConfigError, match="has shards of another run"):
        write_shards(run, tmp_path / "strange", 5)


def test_the_command(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["shards", str(run), str(tmp_path / "out"), "--size", "5"])
    assert (result.exit_code, "2 shards in" in result.stdout.replace("\n", "")) == (0, True)
    (run / "manifest.jsonl").unlink()
    result = CliRunner().invoke(app, ["shards", str(run), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "manifest.jsonl does not exist" in result.stdout.replace("\n", "")
