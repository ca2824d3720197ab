"""The field's words, in names, docstrings and pages (docs/glossary.md)."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.tools.code_metrics import PRODUCT, assigned_names, opening_words, python_files
from tests.helpers.settings import ROOT

# One process parses every file
pytestmark = pytest.mark.xdist_group("trees")

# Not the field's words, or spelled otherwise than the libraries do
BANNED = re.compile(
    r"\b(liars?|nobody|noised|normalis\w+|initialis\w+|optimis(?!er\")\w+|serialis\w+|regularis\w+"
    r'|synthesis(e|ed|es|ing)|coloured|colours?|behaviours?|centres?(?!"))\b',
    re.IGNORECASE,
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
OTHERS = ("benchmarks", "tests")
MOST_ODD_NAMES = 0.005


@cache
def trees(folders: tuple[str, ...] = PRODUCT) -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in python_files(ROOT, *folders)}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    for some_trees, enough in ((trees(), 1000), (trees(OTHERS), 2000)):
        count, places = opening_words(some_trees)
        assert count > enough
        assert places == []


def test_names_say_what_they_hold() -> None:
    """Half a percent are left: neighbors, and the fields of records on disk."""
    for some_trees, enough in ((trees(), 5000), (trees(OTHERS), 15_000)):
        count, places = assigned_names(some_trees)
        assert count > enough
        assert len(places) <= MOST_ODD_NAMES * count, places


def test_banned_words_do_not_come_back() -> None:
    pages = [ROOT / page for page in PAGES] + sorted((ROOT / "docs").glob("*.md"))
    places = []
    for file in [*trees(), *pages]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if match := BANNED.search(line):
                places.append(f"{file.relative_to(ROOT)}:{number}: {match.group()}")
    assert places == []
