"""benchmarks/styles.py: whose images are shown and looked at, and what the table says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import main_table, server, styles
from benchmarks.clients import CLIENTS, DOMAINS
from benchmarks.poison import together
from osfl.data.load import Images
from osfl.models.classifiers import normalise
from osfl.payloads import Domain
from osfl.prompts import DIGITS
from server_app.job import ServerJob
from server_app.synthesis.images import SyntheticSet


class Shade(nn.Module):
    """Sees the class whose number the first pixel has."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shades = torch.arange(10.0).view(10, 1, 1, 1).expand(-1, 3, 1, 1) / 127.5 - 1
        known = normalise(shades)[:, 0, 0, 0]
        return -(images[:, 0, 0, 0, None] - known).abs()


def images(client: str, values: list[int], labels: list[int], side: int = 4) -> SyntheticSet:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, side, side)
    return SyntheticSet(pixels.clone(), torch.tensor(labels), (client,) * len(labels))


def test_a_column_is_a_class() -> None:
    """Of class 0 the images 10 and 11, of class 3 30 and 31; a third of a class is not shown."""
    grid = styles.in_columns(images("client-0", [30, 10, 31, 11, 32], [3, 0, 3, 0, 3]))
    assert grid.shape == (3, 2 * 5 + 1, 2 * 5 + 1)
    assert grid[0, [2, 2, 7, 7], [2, 7, 2, 7]].tolist() == [10, 30, 11, 31]
    assert grid[0, 0, 0] == 255


def test_a_row_has_each_styles_share() -> None:
    """Client k's four images show class 0, and k of them say so; of six clients at most four."""
    parts = []
    for number, client in enumerate(CLIENTS):
        right = min(number, 4)
        parts.append(images(client, [0, 0, 0, 0], [0] * right + [1] * (4 - right)))
    found = styles.line("a row", Shade(), parts)
    assert [found[style] for style in DOMAINS] == ["0.0", "25.0", "50.0", "75.0", "100.0", "100.0"]
    assert found["average"] == "58.3"
    assert found[""] == "a row"


def test_what_is_drawn_is_the_main_tables_row_but_for_what_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def render(job: ServerJob, plan: list[Any], sampler: object) -> SyntheticSet:
        seen.append((job.config, job.clients, plan))
        return images("client-3", [0], [0])

    sent = {client: Domain(DIGITS, name) for client, name in zip(CLIENTS, DOMAINS, strict=True)}
    monkeypatch.setattr(main_table, "WORK", tmp_path)
    monkeypatch.setattr(styles, "sent", lambda settings: sent)
    monkeypatch.setattr(server, "render", render)
    styles.drawn("prompts-domain", ("client-3",), 2, {"prompts-domain.guidance": 4.5})
    styles.drawn("prompts-domain", CLIENTS, 3, {})
    (changed, one, plan), (plain, every, whole) = seen
    usual = main_table.config_of(main_table.settings_of("prompts-domain", styles.SEED))
    assert changed.prompts_domain.guidance == 4.5
    assert plain.prompts_domain == usual.prompts_domain
    assert changed.synthesis.steps == plain.synthesis.steps == usual.synthesis.steps
    assert (one, every) == (("client-3",), CLIENTS)
    assert (len(plan), len(whole)) == (2 * 10, 3 * 10 * 6)
    assert {planned.client for planned in plan} == {"client-3"}


@pytest.mark.parametrize("style", ["", "neon"])
def test_the_picture_and_the_table(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real images first, then every guidance. With a style's name there is its picture alone."""
    asked: list[tuple[str, tuple[str, ...], int, dict[str, float]]] = []

    def drawn(row: str, clients: Any, count: int, own: Any) -> SyntheticSet:
        asked.append((row, tuple(clients), count, own))
        # Of every second client the second image shows the first class
        made = [images(client, [0, 1 - int(client[-1]) % 2], [0, 1]) for client in clients]
        pixels = torch.cat([one.pixels for one in made])
        owners = tuple(client for client in clients for _ in range(2))
        return SyntheticSet(pixels, torch.tensor([0, 1] * len(clients)), owners)

    def one_right(split: str) -> list[Any]:
        assert split == "validation"
        part = images("", [0, 0], [0, 1])
        return [Images(part.pixels, part.labels)] * 6

    def reconstructed(own: SyntheticSet, config: Any) -> SyntheticSet:
        return replace(own, pixels=own.pixels + 100)

    # The real images have ten times their client's number
    parts = [images(client, [10 * k, 10 * k], [0, 1]) for k, client in enumerate(CLIENTS)]
    whole = together(parts)
    monkeypatch.setattr(styles, "WORK", tmp_path)
    monkeypatch.setattr(styles, "TABLES", tmp_path)
    monkeypatch.setattr(styles, "drawn", drawn)
    monkeypatch.setattr(styles, "real", one_right)
    monkeypatch.setattr(styles, "of_clients", lambda: whole)
    monkeypatch.setattr(styles, "reconstructed", reconstructed)
    monkeypatch.setattr(styles, "classifier", Shade)
    monkeypatch.setattr("sys.argv", ["styles", *([style] if style else [])])
    styles.main()
    client = "client-2" if style else "client-3"
    shown = [("domain-vector", (client,), 2, {}), ("prompts-domain", (client,), 2, {})]
    assert asked[:2] == shown
    # Four sets one above the other, each with an image of two classes: real, through the
    # autoencoder, and what is drawn
    picture = Image.open(tmp_path / f"styles-{style or 'painting'}.png")
    assert picture.size == (styles.SCALE * 11, styles.SCALE * 4 * 6)
    own = 10 * int(client[-1])
    columns = [
        [picture.getpixel((styles.SCALE * x + 1, styles.SCALE * y + 1))[0] for y in (2, 8, 14, 20)]
        for x in (2, 7)
    ]
    assert columns[0] == [own, own + 100, 0, 0]
    assert columns[1] == [own, own + 100, int(client[-1]) % 2 == 0, int(client[-1]) % 2 == 0]
    if style:
        assert len(asked) == 2
        assert not (tmp_path / "styles.json").exists()
        return
    rows = json.loads((tmp_path / "styles.json").read_text())["rows"]
    assert [rows[0][""], rows[0]["average"]] == ["real images", "50.0"]
    for row in rows[1:]:
        assert [row[name] for name in DOMAINS] == ["100.0", "50.0"] * 3
        assert row["average"] == "75.0"
    assert [row[""] for row in rows[1:]] == [
        f"{row}, guidance {guidance:g}"
        for row, figures in styles.GUIDANCE.items()
        for guidance in figures
    ]
    assert [one[3] for one in asked[2:]] == [
        {f"{row}.guidance": guidance}
        for row, figures in styles.GUIDANCE.items()
        for guidance in figures
    ]
    assert {one[1:3] for one in asked[2:]} == {(CLIENTS, 10)}
