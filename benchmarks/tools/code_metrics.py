"""Measures of the code's language and shape.

    python -m benchmarks.tools.code_metrics            # as a table
    python -m benchmarks.tools.code_metrics --list     # and every place that counts
    python -m benchmarks.tools.code_metrics --root X   # of another checkout

Docstrings and assignments are read from the syntax tree of osfl, client_app and server_app.
Complexity is ruff's C901 (McCabe), type errors are mypy's, strict as pyproject.toml says.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from osfl.methods import METHODS

PRODUCT = ("osfl", "client_app", "server_app")
GENERATED = "payload_pb2"
# First words that front a phrase, where the docstring of a function has a verb
BANNED_OPENINGS = """
Of What Who Whose Whether How So Those That As By To It Its They Their Where Which Why
"""
# Pronouns and participles, which do not say what a variable holds
BANNED_NAMES = """
about ball begun done form found given has held it kept known left made more one other others own
rest said seen taken that them they this those told wanted wants what whole
"""
LONGEST_FUNCTION = 50
HIGHEST_COMPLEXITY = 20
# Docs that are generated from the code
GENERATED_PAGES = ("configuration.md",)


def main() -> None:
    """Print the measures of a checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print every place that counts")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout to measure")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    for measure, text, places in measures(root):
        print(f"{measure:<44}{text:>12}")
        if arguments.list:
            for place in places:
                print(f"    {place}")


def measures(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield every measure with its value and the places that count."""
    trees = {file: ast.parse(file.read_text()) for file in python_files(root, *PRODUCT)}
    docstrings, odd_docstrings = opening_words(trees)
    yield "docstrings with a banned first word", share(odd_docstrings, docstrings), odd_docstrings
    assignments, odd_names = assigned_names(trees)
    yield "assignments to a pronoun or participle", share(odd_names, assignments), odd_names
    branches = name_branches(trees, root)
    yield "branches on method names outside methods", str(len(branches)), branches
    long_functions = functions_longer_than(LONGEST_FUNCTION, trees)
    yield f"functions of over {LONGEST_FUNCTION} lines", str(len(long_functions)), long_functions
    complex_functions = too_complex(root)
    text = f"functions of complexity over {HIGHEST_COMPLEXITY}"
    yield text, str(len(complex_functions)), complex_functions
    type_errors = strict_errors(root)
    yield "errors of mypy", str(len(type_errors)), type_errors
    for name, folders in {
        "product": PRODUCT,
        "tests": ["tests"],
        "benchmarks": ["benchmarks"],
    }.items():
        yield f"lines of {name}", f"{lines_of(root, *folders):,}", []
    yield "words of README.md", f"{words_of([root / 'README.md']):,}", []
    pages = [page for page in (root / "docs").rglob("*.md") if page.name not in GENERATED_PAGES]
    yield "words of docs, without generated pages", f"{words_of(pages):,}", []


def python_files(root: Path, *folders: str) -> list[Path]:
    """Return the Python files of some folders, without generated code."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    return [file for file in files if GENERATED not in file.name]


def share(part: list[str], total: int) -> str:
    """Return "part of total" as a percentage."""
    return f"{100 * len(part) / total:.1f} %"


def opening_words(trees: dict[Path, ast.Module]) -> tuple[int, list[str]]:
    """Return how many docstrings there are, and those that begin with a banned word."""
    count = 0
    places = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            if text := ast.get_docstring(node):
                count += 1
                if text.split()[0].strip("`,.:") in BANNED_OPENINGS.split():
                    place = getattr(node, "lineno", 1)
                    places.append(f"{file}:{place}: {text.splitlines()[0]}")
    return count, places


def assigned_names(trees: dict[Path, ast.Module]) -> tuple[int, list[str]]:
    """Return how many names are assigned, and those that are pronouns or participles."""
    count = 0
    places = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                count += 1
                if node.id in BANNED_NAMES.split():
                    places.append(f"{file}:{node.lineno}: {node.id}")
    return count, places


def name_branches(trees: dict[Path, ast.Module], root: Path) -> list[str]:
    """Return the comparisons with a method's or a payload's name outside methods."""
    names = set(METHODS) | {method.payload for method in METHODS.values() if method.payload}
    places = []
    for file, tree in trees.items():
        if "methods" in file.relative_to(root).as_posix() or "baselines" in file.parts:
            continue
        for node in ast.walk(tree):
            compared = []
            if isinstance(node, ast.Compare):
                compared = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                compared = [node.value]
            constants = {leaf.value for leaf in _leaves(compared)}
            if constants & names:
                places.append(f"{file}:{node.lineno}: {', '.join(sorted(constants & names))}")
    return places


def _leaves(nodes: list[ast.expr]) -> Iterator[ast.Constant]:
    for node in nodes:
        elements = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
        for element in elements:
            if isinstance(element, ast.Constant) and isinstance(element.value, str):
                yield element


def functions_longer_than(lines: int, trees: dict[Path, ast.Module]) -> list[str]:
    """Return the functions of more lines, docstring included."""
    places = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > lines:
                    places.append(f"{file}:{node.lineno}: {node.name}, {length} lines")
    return places


def too_complex(root: Path) -> list[str]:
    """Return the functions whose cyclomatic complexity is above the limit, by ruff."""
    limit = f"lint.mccabe.max-complexity={HIGHEST_COMPLEXITY}"
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--config", limit]
    command += ["--output-format", "concise", "--no-cache", *PRODUCT]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if "C901" in line]


def strict_errors(root: Path) -> list[str]:
    """Return the errors of mypy, by the checkout's own settings."""
    command = [sys.executable, "-m", "mypy"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if re.search(r": error:", line)]


def lines_of(root: Path, *folders: str) -> int:
    """Return the lines of all Python files of some folders."""
    return sum(len(file.read_text().splitlines()) for file in python_files(root, *folders))


def words_of(pages: list[Path]) -> int:
    """Return the words of some pages. The bars of tables and other signs alone are none."""
    words = [word for page in pages for word in page.read_text().split()]
    return sum(bool(re.search(r"\w", word)) for word in words)


if __name__ == "__main__":
    main()
