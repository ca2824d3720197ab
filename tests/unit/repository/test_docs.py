"""README, docs/ and the notes of the benchmarks: links and commands exist, methods are named."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from osfl.cli.main import app
from osfl.methods import METHODS
from tests.helpers.settings import ROOT
from tests.helpers.toy import PACKAGES

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
BENCHMARKS = ROOT / "benchmarks"
NOTES = [BENCHMARKS / "README.md", *sorted((BENCHMARKS / "notes").glob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[`|&;/ ])osfl ((?:--)?[a-z][a-z-]*)(?: ([a-z]+))?", re.MULTILINE)
WORDS = 20_000
CONFIG = re.compile(r"configs/[\w/-]+\.toml")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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
    names = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
        anchor = words.replace(" ", "-")
        assert "--" not in anchor, f"{page.name}: GitHub and the site differ about {heading!r}"
        names.add(anchor)
    return names


def subcommands() -> dict[str, set[str]]:
    """The commands of `osfl`, and those of each that is a group."""
    command = typer.main.get_command(app)
    return {name: set(getattr(sub, "commands", {})) for name, sub in command.commands.items()}


@pytest.mark.parametrize("page", PAGES + NOTES, ids=page_id)
def test_links_anchors_and_pictures_exist(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if not link.startswith("https://")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_reached_from_readme_and_index() -> None:
    """A page such as running-compare.md is linked from its first page, running.md."""
    for page in PAGES:
        if page in (README, DOCS / "index.md"):
            continue
        first = DOCS / f"{page.stem.partition('-')[0]}.md"
        if first != page and first.is_file():
            assert f"({page.name})" in first.read_text(), page.name
        else:
            assert f"(docs/{page.name})" in README.read_text(), page.name
            assert f"({page.name})" in (DOCS / "index.md").read_text(), page.name
        assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text(), page.name
    for note in NOTES[1:]:
        assert f"notes/{note.name})" in (DOCS / "results.md").read_text(), note.name


def test_readme_is_read_to_its_end() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 160


def words(page: Path) -> int:
    """Count the words; a table's bars and rulers are none."""
    return sum(bool(re.search(r"\w", word)) for word in page.read_text().split())


def test_pages_stay_short() -> None:
    """Count docs/configuration.md too, which is generated."""
    assert words(README) <= 800
    assert sum(map(words, PAGES[1:])) <= WORDS


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "methods.md"], ids=lambda page: page.name)
def test_every_method_is_named(page: Path) -> None:
    named = set(re.findall(r"`([a-z-]+)`", page.read_text()))
    assert set(METHODS) <= named


@pytest.mark.parametrize("page", PAGES + NOTES, ids=page_id)
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
    commands = [match for page in PAGES for match in COMMAND.findall(code(page))]
    assert {"run", "show", "compare", "verify", "shards", "certs", "kit"} <= {
        m[0] for m in commands
    }
    assert ("certs", "server") in commands


def test_the_names_in_the_example_of_adding_a_method_exist() -> None:
    """tests/system/test_own_method.py runs them, as a package."""
    page = (DOCS / "adding-a-method.md").read_text()
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for node in ast.parse(example).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGES):
                source = (ROOT / f"{str(node.module).replace('.', '/')}.py").read_text()
                for alias in node.names:
                    name = rf"^(def|class) {alias.name}\b"
                    assert re.search(name, source, re.MULTILINE), alias.name
