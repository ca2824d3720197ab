"""README and docs/: what they point at exists, and they name what there is."""

import re
from functools import cache
from pathlib import Path

import pytest
import typer

from osfl.cli.main import app
from osfl.methods import METHODS
from tests.helpers.settings import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[`|&;/ ])osfl ((?:--)?[a-z][a-z-]*)(?: ([a-z]+))?", re.MULTILINE)
CONFIG = re.compile(r"configs/[\w/-]+\.toml")


def prose(page: Path) -> str:
    """A page without its code, where brackets are no links and `#` is no heading."""
    return CODE.sub("", FENCE.sub("", page.read_text()))


def code(page: Path) -> str:
    """A page's code alone, a line for each piece."""
    text = page.read_text()
    pieces = FENCE.findall(text)
    pieces += [piece.strip("`") for piece in CODE.findall(FENCE.sub("", text))]
    return "\n".join(pieces)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site both make them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
        anchor = words.replace(" ", "-")
        assert "--" not in anchor, f"{page.name}: GitHub and the site differ about {heading!r}"
        found.add(anchor)
    return found


def subcommands() -> dict[str, set[str]]:
    """The commands of `osfl`, and those of each that is a group."""
    command = typer.main.get_command(app)
    return {name: set(getattr(sub, "commands", {})) for name, sub in command.commands.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_anchors_and_pictures_exist(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if not link.startswith("https://")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_reached_from_readme_and_index() -> None:
    """A page of results from the first page of results."""
    docs = ROOT / "docs"
    for page in PAGES:
        if page.name.startswith("results-"):
            assert f"({page.name})" in (docs / "results.md").read_text(), page.name
        elif page not in (README, docs / "index.md"):
            assert f"(docs/{page.name})" in README.read_text(), page.name
            assert f"({page.name})" in (docs / "index.md").read_text(), page.name
        if page not in (README, docs / "index.md"):
            assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text(), page.name


def test_readme_is_read_to_its_end() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "methods.md"], ids=lambda page: page.name)
def test_every_method_is_named(page: Path) -> None:
    named = set(re.findall(r"`([a-z-]+)`", page.read_text()))
    assert set(METHODS) <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_config_files_exist(page: Path) -> None:
    there = subcommands()
    for name, sub in COMMAND.findall(code(page)):
        if name.startswith("--"):
            continue
        assert name in there, f"{page.name}: osfl {name}"
        if there[name] and sub:
            assert sub in there[name], f"{page.name}: osfl {name} {sub}"
    for config in CONFIG.findall(page.read_text()):
        assert (ROOT / config).is_file(), f"{page.name}: {config}"


def test_the_commands_of_the_pages_are_found() -> None:
    """Else the test above would pass by finding nothing."""
    found = [match for page in PAGES for match in COMMAND.findall(code(page))]
    assert {"run", "show", "compare", "verify", "shards", "certs", "kit"} <= {m[0] for m in found}
    assert ("certs", "server") in found
