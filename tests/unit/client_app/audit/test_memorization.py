"""The memorization test: are synthetic images nearer to training images than by chance?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms.v2.functional import to_pil_image
from typer.testing import CliRunner

from client_app.audit import copies
from client_app.audit.copies import Embeddings, measure_memorization
from osfl.cli.main import app as cli
from osfl.config import NodeConfig, parse_run_config
from osfl.data.load import load_images
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start_once


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_a_line(places: list[float], labels: list[int]) -> Embeddings:
    return Embeddings(torch.tensor(places).float().view(-1, 1), torch.tensor(labels))


def test_each_synthetic_image_is_held_against_its_own_class() -> None:
    """Class 0: training images 0 and 10, test images 2 and 7. 0.5 is nearer to 0; 6 to 7; 1 is as
    far from 0 as from 2, and counts half. Class 1: training 100, test 0; 90 is nearer to 100. Class
    2 has no test image. So 2.5 of 4. The nearest pair is 0.5 apart; between training images and the
    nearest test image are 2, 3 and 100.
    """
    drawn = on_a_line([0.5, 6, 1, 90, 5], [0, 0, 0, 1, 2])
    train = on_a_line([0, 10, 100, 5], [0, 0, 1, 2])
    test = on_a_line([2, 7, 0], [0, 0, 1])
    result = measure_memorization(drawn, train, test, source())
    assert result.images == 4
    assert result.nearer == pytest.approx(2.5 / 4)
    assert result.closest == pytest.approx(0.5 / 3)


def test_test_images_are_as_many_as_training_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of either would be nearer by their number alone: of 1,000 places one is always near."""
    # What chance explains is not asked for
    monkeypatch.setattr(copies, "NUM_PERMUTATIONS", 1)
    few = on_a_line([0.5], [0])
    many = on_a_line([k / 1000 for k in range(1000)], [0] * 1000)
    drawn = on_a_line([0.3337, 0.6663], [0, 0])
    shares = [measure_memorization(drawn, many, few, source(seed)).nearer for seed in range(200)]
    # A single place of the thousand is nearer to 0.3337 than 0.5 is in a third of the cases
    assert 0.2 < sum(shares) / 200 < 0.47
    shares = [measure_memorization(drawn, few, many, source(seed)).nearer for seed in range(200)]
    assert 0.53 < sum(shares) / 200 < 0.8


def test_the_closest_is_sought_among_all_training_images() -> None:
    """Ten of them and one test image; a copy of the last is a copy, whichever is drawn."""
    train = on_a_line(list(map(float, range(10))), [0] * 10)
    for seed in range(10):
        result = measure_memorization(
            on_a_line([9.0], [0]), train, on_a_line([20.0], [0]), source(seed)
        )
        assert result.closest == 0


def cloud(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 16, generator=source(seed))


def test_copies_are_seen_and_likenesses_are_not() -> None:
    """Two classes of thirty images; sixty copies, blurred, or sixty more of the same kind."""
    labels = torch.tensor([0, 1] * 30)
    train = Embeddings(cloud(60, 1), labels)
    test = Embeddings(cloud(60, 2), labels)
    copies = Embeddings(train.embeddings + 0.3 * cloud(60, 3), labels)
    result = measure_memorization(copies, train, test, source())
    assert result.nearer > 0.95
    assert result.copied
    assert result.closest < 0.5
    low, high = result.by_chance
    assert 0.3 < low < 0.5 < high < 0.7
    for seed in range(4, 9):
        alike = measure_memorization(Embeddings(cloud(60, seed), labels), train, test, source(seed))
        assert 0.25 < alike.nearer < 0.75
        assert alike.closest > 0.5


def test_chance_brings_what_it_says() -> None:
    """Some two of forty audits without copies are above their range, and not ten."""
    labels = torch.zeros(20, dtype=torch.int64)
    above = 0
    for seed in range(40):
        drawn, train, test = (Embeddings(cloud(20, 100 + 3 * seed + k), labels) for k in range(3))
        above += measure_memorization(drawn, train, test, source(seed)).copied
    assert above <= 5


def test_without_a_class_of_all_three_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no class has synthetic, training and test images"):
        measure_memorization(
            on_a_line([0], [0]), on_a_line([0], [0]), on_a_line([0], [1]), source()
        )


@pytest.fixture
def done(home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has drawn two images of each class for two clients."""
    monkeypatch.chdir(home)
    config = quick(method="prompts-domain", kit=str(tiny_kit), synthesis__images_per_class=2)
    return start_once(home, config)


def copied(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["audit", *map(str, arguments)])


@pytest.mark.slow
def test_a_runs_images_are_held_against_its_clients(done: Path) -> None:
    result = copied("--run", done, "--out", "found.json")
    assert result.exit_code == 0, result.output
    measures = json.loads(Path("found.json").read_text())
    assert list(measures) == ["client-0", "client-1"]
    assert all(
        measure["images"] == 20 and 0 <= measure["nearer"] <= 1 for measure in measures.values()
    )
    client_result = copied(
        *("--run", done, "--node-config", "partition-id=1 num-partitions=2", "--out", "one.json")
    )
    assert client_result.exit_code == 0, client_result.output
    assert json.loads(Path("one.json").read_text()) == {"client-1": measures["client-1"]}


@pytest.mark.slow
def test_images_that_are_training_images_are_noticed(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two training images of each class, in the place of what was drawn, against two test images;
    pictures are made equal for the encoder once more.
    """
    config = parse_run_config(quick())
    for number in range(2):
        node = NodeConfig(partition_id=number, num_partitions=2)
        images = load_images(config.data, node, "train", 0, 32)
        for label in range(10):
            pictures = images.pixels[(images.labels == label).nonzero().flatten()[:2]]
            folder = next(done.glob(f"images/client-{number}/{label:03d}-*"))
            files = sorted(folder.glob("*.png"))
            for file, picture in zip(files, pictures, strict=True):
                to_pil_image(picture).save(file)
    result = copied("--run", done, "--out", "found.json")
    assert result.exit_code == 0, result.output
    for measure in json.loads(Path("found.json").read_text()).values():
        assert measure["nearer"] > 0.6
        assert measure["closest"] < 0.01
    assert "*" in result.output


@pytest.mark.slow
def test_a_client_without_images_is_named_and_the_others_are_compared(done: Path) -> None:
    manifest = done / "manifest.jsonl"
    rows = [line for line in manifest.read_text().splitlines() if '"client-1"' in line]
    manifest.write_text("".join(f"{row}\n" for row in rows))
    result = copied("--run", done, "--out", "found.json")
    assert result.exit_code == 0, result.output
    assert "client-0: the run has no synthetic images of this client" in result.output
    assert list(json.loads(Path("found.json").read_text())) == ["client-1"]


@pytest.mark.slow
def test_a_folder_without_run_is_refused(done: Path, tmp_path: Path) -> None:
    assert "is not the folder of a run" in copied("--run", tmp_path / "none").output
    refused = copied("method=oscar", "--run", done)
    assert refused.exit_code == 1
    assert "method=oscar: --run uses the run's settings; leave out others" in refused.output
    node = 'partition-id=0 num-partitions=2 client-id="stranger"'
    refused = copied("--run", done, "--node-config", node)
    assert refused.exit_code == 1
    assert "stranger: the run has no synthetic images of this client" in refused.output
    assert "has no synthetic images of these clients" in refused.output
    picture = next(done.glob("images/client-0/*/*.png"))
    picture.write_bytes(b"x")
    refused = copied("--run", done)
    assert refused.exit_code == 1
    assert "is not readable; `osfl run` recreates it" in refused.output
