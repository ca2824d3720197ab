"""Kits of a recipe of public images: its checks, copies of client images, and the training."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from diffusers import AutoencoderTiny
from PIL import Image as Picture
from rich.progress import Progress
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.data import digits
from osfl.data import near_duplicates as copies
from osfl.data.pictures import open_image, to_pixels
from osfl.kit.check import check_kit
from osfl.kit_training import untrained
from osfl.kit_training.photographs import corpus, denoiser, train_photograph_kit
from osfl.kit_training.photographs.contrast import bidirectional_loss
from osfl.kit_training.photographs.recipe import PhotographRecipe, read_recipe
from osfl.methods import DIFFUSION_PARTS, IMAGE_ENCODER_PARTS
from osfl.models import diffusion, encoders
from tests.helpers.settings import ROOT
from tests.helpers.small_digits import public_digits

SHIPPED = ROOT / "configs" / "kits" / "photographs.toml"
SHARED = ROOT.parent / "shared" / "data"


# ---- The recipe ----


def test_the_shipped_recipe_is_valid_and_names_no_world_as_a_source() -> None:
    recipe = read_recipe(SHIPPED, ["unet.steps=5", "data-root=/data"])
    assert recipe.unet.steps == 5
    assert recipe.path(recipe.sources["cifar10"].data) == Path("/data/cifar10")
    worlds = {"pacs", "office_caltech10", "emoji12", "wbc3"}
    assert set(recipe.exclude) == worlds
    assert not worlds & {source.data for source in recipe.sources.values()}
    vocabulary = {name for words in recipe.names.values() for name in words}
    assert set(recipe.emphasis) <= vocabulary | set(recipe.sources["openclipart"].words)


MINIMAL = """
autoencoder = "taesd"
[sources.a]
data = "a"
templates."" = ["a photo of a {class}"]
"""


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("unet.stepz=5", "unet.stepz: unknown key; must be one of channels"),
        ("unet.steps=many", "unet.steps = 'many': must be a whole number"),
        ("unet.steps=true", "must be a whole number"),
        ("unet=5", "unet = 5: must be a section"),
        ("unet.channels=32", "unet.channels = 32: must be a list"),
        ("held-out=0", "held-out = 0: must be between 0.001 and 0.5"),
        ("image-encoder.lr=0", "image-encoder.lr = 0: must be between"),
        ("sources.a.weight=0", "sources.a.weight = 0: must be between"),
        ("emphasis.dog=0", "emphasis.dog = 0: must be between"),
        ("image-encoder.patch=7", "image-encoder.patch = 7: must divide image-size = 64"),
        ("sources.b.data=b", "sources.b.templates: missing; set sources.b.templates"),
        ("sources.a.templates.art=[]", "must have at least one caption"),
        ('sources.a.templates.art=["art"]', r"must contain \{class\} once"),
        ("names.dog=[]", "names.dog: must have at least one text"),
        ("steps", "'steps': must be key=value"),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    file = tmp_path / "kit.toml"
    file.write_text(MINIMAL)
    read_recipe(file)
    with pytest.raises(ConfigError, match=problem):
        read_recipe(file, [override])


# ---- Copies of client images ----


def split_pixels(split: str, count: int) -> torch.Tensor:
    rows = public_digits(digits.load_split) if split == "public" else digits.load_split(split)
    return torch.from_numpy(rows.images[:count]).permute(0, 3, 1, 2)


def resaved(picture: torch.Tensor, side: int, file: Path) -> torch.Tensor:
    """An image that was enlarged, saved as JPEG, and read again at its old size."""
    image = Picture.fromarray(picture.permute(1, 2, 0).numpy())
    image.resize((side, side), Picture.Resampling.BICUBIC).save(file, quality=90)
    return to_pixels(open_image(file), picture.shape[-1])


@pytest.mark.slow
def test_planted_copies_are_found_among_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact, resized and mirrored ones; no other image comes near, and blocks change nothing."""
    clients = split_pixels("test", 90)
    public = split_pixels("public", 60)
    planted = torch.stack(
        [
            clients[3],
            resaved(clients[70], 96, tmp_path / "a.jpg"),
            clients[20].flip(2),
            resaved(clients[41].flip(2), 50, tmp_path / "b.jpg"),
        ]
    )
    images = torch.cat([public[:30], planted, public[30:]])
    rows = copies.thumbnails(images)
    client_rows = copies.thumbnails(clients)
    correlations = copies.highest_correlation(rows, client_rows)
    assert (correlations > 0.98).nonzero().flatten().tolist() == [30, 31, 32, 33]
    monkeypatch.setattr(copies, "BLOCK", 7)
    assert torch.allclose(copies.highest_correlation(rows, client_rows), correlations, atol=1e-5)
    # One pair by numpy: the mean of 2 x 2 pixels is the thumbnail of 32 x 32
    small = images.float().unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5)).flatten(1).numpy()
    client = clients[20].float().unfold(1, 2, 2).unfold(2, 2, 2).mean(dim=(3, 4)).flatten()
    expected = np.corrcoef(small[0], client.numpy())[0, 1]
    assert (rows[0] @ client_rows[20]).item() == pytest.approx(expected, abs=1e-5)


def test_an_image_of_a_single_color_is_no_copy() -> None:
    gray = torch.full((2, 3, 32, 32), 7, dtype=torch.uint8)
    rows = copies.thumbnails(gray)
    assert copies.highest_correlation(rows, rows).abs().max() < 0.5
    nothing = copies.highest_correlation(rows, torch.empty(0, 768))
    assert nothing.tolist() == [-1, -1]


@pytest.mark.slow
def test_the_copies_of_pacs_in_photoart50_are_found() -> None:
    """The listed ones, which another method found; a third of them is in the 30 % of PACS that
    is not on this machine, and looks like no image of the others.
    """
    if not (SHARED / "pacs").is_dir():
        pytest.skip("PACS and PhotoArt50 are not on this machine (../shared/data)")
    lists = SHARED / "photoart50" / "drop_PhotoArt50_PACS.txt"
    names = {Path(line).name for line in lists.read_text().split()}
    pictures = [
        to_pixels(open_image(row["image"]["bytes"]), 64)
        for row in Dataset.from_parquet(
            [str(f) for f in sorted((SHARED / "photoart50").rglob("*.parquet"))]
        ).cast_column("image", Image(decode=False))
        if row["image"]["path"] in names
    ]
    clients = [
        to_pixels(open_image(file), 64)
        for file in sorted((SHARED / "pacs").rglob("*.jpg"))
        if file.parent.name in ("elephant", "giraffe", "horse", "person")
        and file.parent.parent.name != "sketch"
    ]
    highest = copies.highest_correlation(
        copies.thumbnails(torch.stack(pictures)), copies.thumbnails(torch.stack(clients))
    )
    assert (highest > 0.98).float().mean() > 0.6
    assert not ((highest > 0.9) & (highest < 0.98)).any()


# ---- The corpus ----


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of digits: a parquet folder with domains, image files, client images, a TAESD."""
    root = tmp_path_factory.mktemp("data")
    rows = public_digits(digits.load_split)
    images = [Picture.fromarray(image) for image in rows.images[:60]]
    client = Picture.fromarray(digits.load_split("test").images[7])
    (root / "client").mkdir()
    client.save(root / "client" / "0.png")
    files = []
    for number, image in enumerate([*images[:40], client]):
        files.append(root / "table-images" / f"{number:03}.png")
        files[-1].parent.mkdir(exist_ok=True)
        image.save(files[-1])
    table = Dataset.from_dict(
        {
            "image": [{"bytes": f.read_bytes(), "path": f.name} for f in files],
            "label": [number % 2 for number in range(41)],
            "domain": ["photo" if number % 4 < 2 else "art" for number in range(41)],
        },
        Features(
            image=Image(), label=ClassLabel(names=["tabby_cat", "dog"]), domain=Value("string")
        ),
    )
    (root / "table" / "data").mkdir(parents=True)
    table.to_parquet(root / "table" / "data" / "train-00000.parquet")
    (root / "dropped.txt").write_text("some/folder/000.png\n004.png\n")
    for number, image in enumerate(images[40:]):
        name = ("hot_dog", "dogs", "zoo")[number % 3]
        file = root / "files" / name / f"by_somebody_{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        (image.convert("L") if number % 2 else image).save(file)
    (root / "files" / "zoo" / "broken.png").write_bytes(b"not an image")
    torch.manual_seed(0)
    AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(4, 4, 4),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    ).save_pretrained(root / "taesd")
    return root


RECIPE = """
autoencoder = "taesd"
image-size = 32
samples = 4
held-out = 0.1
exclude = ["client"]
[text]
width = 16
layers = 1
[image-encoder]
width = 16
layers = 1
embedding = 8
steps = 2
more-steps = 1
batch = 4
[unet]
channels = [16, 16]
steps = 2
batch = 4
[sources.table]
data = "table"
domain-column = "domain"
drop = ["dropped.txt"]
templates.photo = ["a photo of a {class}", "an image of {class}"]
templates."" = ["a painting of a {class}"]
[sources.files]
data = "files"
weight = 3
templates.gray = ["a sketch of a {class}"]
templates."" = ["a drawing of a {class}"]
words = ["hot dog", "dog"]
[names]
tabby_cat = ["tabby cat", "cat"]
[emphasis]
cat = 4
"""


def recipe_of(data: Path, tmp_path: Path, *overrides: str) -> PhotographRecipe:
    file = tmp_path / "kit.toml"
    file.write_text(RECIPE)
    return read_recipe(file, [f"data-root={data}", *overrides])


@pytest.mark.slow
def test_the_corpus_has_captions_and_no_copies(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data, tmp_path)
    with Progress(disable=True) as progress:
        public = corpus.load_public_corpus(tmp_path / "work", recipe, progress)
    zeros = {"listed": 0, "unreadable": 0, "copies": 0}
    assert public.counts["table"] == zeros | {"read": 41, "listed": 2, "copies": 1, "kept": 38}
    assert public.counts["files"] == zeros | {"read": 21, "unreadable": 1, "kept": 20}
    captions = {(k.source, k.domain, k.names): k.captions for k in public.kinds}
    assert captions["table", "photo", ("tabby cat", "cat")] == (
        "a photo of a tabby cat",
        "a photo of a cat",
        "an image of tabby cat",
        "an image of cat",
    )
    assert captions["table", "art", ("dog",)] == ("a painting of a dog",)
    names = {k.names[0] for k in public.kinds if k.source == "files"}
    assert names == {"hot dog", "dog", "zoo"}
    assert "a sketch of a hot dog" in public.captions
    assert public.captions[0] == ""
    # Frequencies: 1 to 3 by source, and cats four times as often as dogs
    assert len(public.held_out) == 6
    drawn = public.draw(40_000, torch.Generator().manual_seed(0))
    assert not torch.isin(drawn, public.held_out).any()
    mask = torch.ones(58, dtype=torch.bool)
    mask[public.held_out] = False
    sources = np.array([public.kinds[k].source == "files" for k in public.kind.tolist()])
    cats = np.array(["cat" in public.kinds[k].names for k in public.kind.tolist()])
    weights = np.where(sources, 3 / 20, np.where(cats, 4, 1) / 38) * mask.numpy()
    share = np.bincount(drawn.numpy(), minlength=58) / len(drawn)
    assert np.abs(share - weights / weights.sum()).max() < 0.004
    generator = torch.Generator().manual_seed(0)
    chosen = public.draw_captions(torch.zeros(200, dtype=torch.long), generator)
    kind = public.kinds[int(public.kind[0])]
    assert {public.captions[c] for c in chosen.tolist()} == set(kind.captions)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('exclude=["missing"]', "exclude = 'missing': no such folder; set data-root"),
        ("sources.table.domain-column=style", "has no column 'style'; its columns are image"),
        ('sources.table.drop=["no.txt"]', "sources.table.drop = 'no.txt': cannot be read"),
        ("sources.table.split=none", "sources.table.data = 'table'"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(
    data: Path, tmp_path: Path, override: str, problem: str
) -> None:
    recipe = recipe_of(data, tmp_path, override)
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match=problem):
        corpus.load_public_corpus(tmp_path / "work", recipe, progress)


# ---- The training ----


def test_the_contrastive_loss_counts_shared_captions_once() -> None:
    """UniCL's two sums, in loops over images and distinct texts."""
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    text_of = torch.tensor([0, 2, 0, 1, 2])
    rows = logits.tolist()
    total = 0.0
    for image, text in enumerate(text_of.tolist()):
        by_texts = sum(np.exp(rows[image][t]) for t in range(3))
        by_images = sum(np.exp(rows[i][text]) for i in range(5))
        total -= np.log(np.exp(rows[image][text]) / by_texts)
        total -= np.log(np.exp(rows[image][text]) / by_images)
    assert bidirectional_loss(logits, text_of).item() == pytest.approx(total / 10)


class Interrupted(Exception):
    pass


def breaking_at(calls: list[int], moments: tuple[int, ...], write: Callable) -> Callable:
    """A function that writes a file, counts, and breaks off at some of the calls."""

    def broken(*arguments: object, **named: object) -> None:
        write(*arguments, **named)
        calls.append(1)
        if len(calls) in moments:
            raise Interrupted

    return broken


def test_plain_attention_predicts_the_same(tmp_path: Path) -> None:
    recipe = read_recipe(SHIPPED, ["unet.channels=[32, 64]", "text.width=16"])
    torch.manual_seed(0)
    unet = untrained.new_photograph_unet(recipe, AutoencoderTiny()).eval()
    latents, hidden = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 16)

    def predict() -> torch.Tensor:
        with torch.no_grad():
            prediction: torch.Tensor = unet(latents, 500, hidden).sample
        return prediction

    fused = predict()
    before = set(map(type, unet.attn_processors.values()))
    untrained.unfuse_attention(unet)
    assert before.isdisjoint(map(type, unet.attn_processors.values()))
    assert torch.allclose(predict(), fused, atol=1e-5)


def weights(kit: Path) -> dict[str, bytes]:
    return {str(f.relative_to(kit)): f.read_bytes() for f in kit.rglob("*.safetensors")}


@pytest.mark.slow
def test_an_interrupted_training_ends_with_the_same_kit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchmetrics")
    recipe = recipe_of(data, tmp_path)

    def train(name: str, recipe: PhotographRecipe = recipe, **options: bool) -> dict:
        with Progress(disable=True) as progress:
            kit = tmp_path / name
            return train_photograph_kit(
                kit, tmp_path / f"{name}-work", recipe, "cpu", progress, **options
            )

    with pytest.raises(ConfigError, match="--export: .* has no checkpoint of the UNet yet"):
        train("rough", export=True)
    log = train("quiet")
    assert [stage["steps"] for stage in log["stages"].values()] == [2, 1, 2]
    monkeypatch.setattr(denoiser, "CHUNK", 16)
    calls: list[int] = []
    monkeypatch.setattr(torch, "save", breaking_at(calls, (1, 3), torch.save))
    encoded: list[int] = []
    monkeypatch.setattr(denoiser, "write_record", breaking_at(encoded, (2,), denoiser.write_record))
    for _ in range(3):
        with pytest.raises(Interrupted):
            train("rough")
    train("rough")
    assert (len(calls), len(encoded)) == (3 + 2, 4)
    assert weights(tmp_path / "rough") == weights(tmp_path / "quiet")

    # The finished kit
    kit = tmp_path / "quiet"
    check_kit(str(kit), (*DIFFUSION_PARTS, *IMAGE_ENCODER_PARTS))
    assert diffusion.load_kit(kit).image_size == 32
    assert encoders.load_image_encoder(str(kit), torch.device("cpu")).width == 8
    page = (kit / "README.md").read_text()
    assert "| table | 41 | 2 | 0 | 1 | 38 | 1 |" in page
    assert Picture.open(kit / "samples.png").size == (2 * 10 * 32, 2 * 32)
    assert json.loads((kit / "training.json").read_text())["checks"]["distance"]["images"] == 4

    # More steps continue from the checkpoint; `export` writes it as it is
    longer = recipe_of(data, tmp_path, "unet.steps=3")
    assert train("quiet", longer)["stages"]["unet"]["steps"] == 3
    continued = weights(kit)
    assert continued != weights(tmp_path / "rough")
    train("quiet", recipe, export=True)
    assert weights(kit) == continued
    with pytest.raises(ConfigError, match=r"of another recipe \(another seed\)"):
        train("quiet", recipe_of(data, tmp_path, "seed=1"))


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    def command(*arguments: str) -> str:
        result = CliRunner().invoke(
            app, ["kit", "train", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
        )
        assert result.exit_code == 1
        return " ".join(result.output.split())

    assert "--export requires a recipe file" in command("--export")
    assert "--base is for the digits" in command(str(SHIPPED), "--base", str(tmp_path))
    assert "cannot be read" in command(str(tmp_path / "none.toml"))
    missing = command(str(SHIPPED), f"data-root={tmp_path}", "--work", str(tmp_path / "work"))
    assert "taesd-diffusers" in missing
