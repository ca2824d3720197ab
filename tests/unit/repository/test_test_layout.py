"""The tests' own layout: a room for each of the code's, and no test module imports another."""

import ast
from pathlib import Path

from tests.helpers.settings import ROOT

TESTS = ROOT / "tests"


def imported_modules(file: Path) -> set[str]:
    """Names of everything a file may import, in full and at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_test_module_is_imported() -> None:
    """Code that two test modules share lies in tests/helpers."""
    for file in [*TESTS.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in imported_modules(file):
            parts = name.split(".")
            inside = parts[0] == "tests" and parts[1:2] != ["helpers"]
            assert not inside, (file, name)
            assert parts[0] != "conftest", (file, name)
            assert not any(part.startswith("test_") for part in parts), (file, name)


def test_helpers_hold_no_tests() -> None:
    helpers = sorted((TESTS / "helpers").rglob("*.py"))
    assert helpers
    for file in helpers:
        assert not file.name.startswith("test_"), file
        functions = [n for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "name")]
        assert not any(str(n.name).startswith("test_") for n in functions), file


def test_unit_tests_mirror_the_tree() -> None:
    """Each folder of tests/unit is a room of the code, but for what tests the repository itself."""
    folders = {file.parent.relative_to(TESTS / "unit") for file in TESTS.glob("unit/**/test_*.py")}
    for folder in folders - {Path("repository"), Path("tools")}:
        assert (ROOT / "osfl" / folder).is_dir() or (ROOT / folder).is_dir(), folder


def test_modules_have_names_of_their_own() -> None:
    """Pytest imports test modules by their bare names."""
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))
