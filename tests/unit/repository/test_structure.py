"""The rules of CONTRIBUTING.md, enforced."""

import ast
import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from osfl.launch import flower as launch
from osfl.methods import METHODS
from tests.helpers.settings import ROOT
from tests.helpers.toy import PACKAGES


def sources() -> list[Path]:
    return [
        p
        for package in PACKAGES
        for p in sorted((ROOT / package).rglob("*.py"))
        if "v1" not in p.parts
    ]


def imports(file: Path) -> set[str]:
    """Top-level names of everything a file imports, at any depth of nesting."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


# Copied into a folder that transformers loads; the first is imported by no module
EXPORTED = ("osfl/models/modeling_osfl.py", "osfl/models/clip_classifier.py")


def test_the_halves_do_not_import_each_other() -> None:
    """The command stands above both."""
    for file in sources():
        if file.is_relative_to(ROOT / "osfl" / "cli"):
            continue
        package = file.relative_to(ROOT).parts[0]
        forbidden = {
            "osfl": {"client_app", "server_app"},
            "client_app": {"server_app"},
            "server_app": {"client_app"},
        }[package]
        assert not imports(file) & forbidden, file


@pytest.mark.slow
def test_heavy_libraries_have_one_door_each() -> None:
    """But for what builds the untrained parts of a kit, and for code that exports contain."""
    doors = {"diffusers": "osfl/models/diffusion.py", "transformers": "osfl/models/encoders.py"}
    for library, door in doors.items():
        users = {str(f.relative_to(ROOT)) for f in sources() if library in imports(f)}
        assert users - set(EXPORTED) == {door, "osfl/kit_training/untrained.py"}
    exported = EXPORTED[0].removesuffix(".py").replace("/", ".")
    assert not any(exported in modules for modules in import_graph().values())


def test_no_room_imports_one_above_it() -> None:
    """The command and the kits' recipe stand above all; who reads a run's folder needs no model."""
    for file in sources():
        name = file.relative_to(ROOT).as_posix()
        text = file.read_text()
        above = {"osfl.cli": "osfl/cli/", "osfl.kit_training": ("osfl/kit_training/", "osfl/cli/")}
        for package, users in above.items():
            used = re.search(
                rf"(from|import) {re.escape(package)}\b|import_module.*{package}", text
            )
            assert name.startswith(users) or not used, (name, package)
        if name.startswith("osfl/run_folder/"):
            assert "osfl.models" not in text, name


# Imports inside functions that close a circle, each with its reason
LATE_IMPORTS = {
    # The check of a part's tensors builds the library's model. The libraries' only doors are in
    # osfl.models, which checks a kit before it loads it
    ("osfl.kit.fits", "osfl.models.diffusion"),
    ("osfl.kit.fits", "osfl.models.encoders"),
}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside a node at any depth, but not what only the type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from statements(child)


def own_imports(tree: ast.Module) -> set[str]:
    """The project's modules that a module imports, at its top or inside functions."""
    modules: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in names if is_own(name)}
            # The package's own names, beside its modules
            modules |= inside if inside == names else inside | {str(node.module)}
    return {name if is_module(name) else f"{name}.__init__" for name in modules if is_own(name)}


def is_module(name: str) -> bool:
    return (ROOT / f"{name.replace('.', '/')}.py").is_file()


def is_own(name: str) -> bool:
    return is_module(name) or is_module(f"{name}.__init__")


def import_graph() -> dict[str, set[str]]:
    return {
        file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): own_imports(
            ast.parse(file.read_text())
        )
        for file in sources()
    }


@pytest.mark.slow
def test_imports_run_in_no_circle() -> None:
    """Imports inside functions are imports too, but for those that are listed."""
    graph = import_graph()
    for module, late in LATE_IMPORTS:
        graph[module].remove(late)
    order = list(TopologicalSorter(graph).static_order())  # a circle raises CycleError
    assert order.index("osfl.methods.__init__") < order.index("osfl.config.__init__")
    for module, late in LATE_IMPORTS:
        with pytest.raises(CycleError):
            TopologicalSorter({**graph, module: graph[module] | {late}}).prepare()


def test_an_import_inside_a_function_is_seen() -> None:
    late = """
from typing import TYPE_CHECKING
from osfl import payload
if TYPE_CHECKING:
    from osfl.config import RunConfig
def kit():
    if True:
        import osfl.settings
        from osfl.kit import kits, hub
        from osfl.methods import METHODS
"""
    modules = {"osfl.settings", "osfl.kit.kits", "osfl.kit.hub"}
    assert own_imports(ast.parse(late)) == modules | {
        "osfl.methods.__init__",
        "osfl.payload.__init__",
    }


_RUN_FILES = re.compile(
    r"(^|/)((status|metrics|synthesis|kit|config)\.json|server\.log|report\.html|SHA256SUMS)$"
    r"|\.jsonl|(^|/)(payloads|units|rounds|tests|models|images)/"
)
_RUN_FOLDERS = {"payloads", "units", "rounds", "tests", "models", "images"}


def paths_of_runs(file: Path) -> list[str]:
    """The text constants of a file that spell a path inside a run's folder."""
    of_kits = {"models", "kit", "kit_training"} & set(file.parts)
    paths = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A text with blanks is prose; kits have a config.json too
            spelled = _RUN_FILES.search(node.value) and not re.search(r"\s", node.value)
            if spelled and not (of_kits and node.value.endswith("config.json")):
                paths.append(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = node.right.value if isinstance(node.right, ast.Constant) else None
            if right in _RUN_FOLDERS:
                paths.append(str(right))
    return paths


# It would be found elsewhere
def test_only_run_folder_spells_paths_inside_a_runs_folder() -> None:
    room = ROOT / "osfl" / "run_folder"
    spelled = {file.relative_to(ROOT).as_posix(): paths_of_runs(file) for file in sources()}
    inside = {name for name in spelled if (ROOT / name).is_relative_to(room)}
    assert {name: paths for name, paths in spelled.items() if paths and name not in inside} == {}
    assert {"rounds/done.json", "kit.json", "units"} <= {
        p for name in inside for p in spelled[name]
    }


def test_nothing_is_ever_unpickled() -> None:
    for file in sources():
        text = file.read_text()
        assert not re.search(r"pickle\.load|allow_pickle=True|weights_only=False", text), file
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, (file, call)


def test_the_flower_apps_are_plain_assignments() -> None:
    """Flower refuses an annotated or re-exported `app`."""
    for name in ("client_app/app.py", "server_app/app.py"):
        targets = [
            n.targets[0].id
            for n in ast.parse((ROOT / name).read_text()).body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        ]
        assert "app" in targets


def test_the_bundle_is_the_checkouts(tmp_path: Path) -> None:
    """`osfl run` submits a copy.

    Flower makes of it what it would make of the checkout by `fab-include`.
    """
    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(launch.copy_app(tmp_path / "app"))))
    included = {
        p.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for p in (ROOT / package).rglob("*.py")
    }
    assert {name for name in bundle.namelist() if not name.startswith(".info")} == included | {
        "LICENSE",
        "pyproject.toml",
    }
    assert (
        bundle.read("osfl/payload/wire.py") == (ROOT / "osfl" / "payload" / "wire.py").read_bytes()
    )


# Upper and lower bounds
WITHOUT_PAPER = ("local", "ceiling", "real-and-synthetic")


def test_every_method_has_its_modules_and_lists_its_differences() -> None:
    for name, method in METHODS.items():
        declaration = ROOT / "osfl" / "methods" / f"{name.replace('-', '_')}.py"
        assert "METHOD = " in declaration.read_text(), name
        for half, module in (("client_app", method.client), ("server_app", method.server)):
            if module:
                file = ROOT / half / ("baselines" if method.rounds else "methods") / f"{module}.py"
                assert file.is_file(), (name, file)
                assert len(file.read_text().splitlines()) <= 250
                docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
                assert "Differences" in docstring or name in WITHOUT_PAPER, file


WITHOUT_DIFFUSION = """
import sys
from pathlib import Path

def refuse(*libraries):
    loaded = set(libraries) & set(sys.modules)
    assert not loaded, loaded

import client_app.app
refuse("torch", "datasets", "sklearn")
import client_app.handlers, client_app.methods.fedcgs, server_app.app, server_app.methods.fedcgs
import osfl.cli.estimate
refuse("torchvision", "sklearn")
from osfl.config import parse_run_config
from tests.helpers.loop_grid import LoopGrid, begin_task
from tests.helpers.settings import quick
begin_task()
for method in ("fedcgs", "local", "fedavg", "fedpft"):
    if method == "fedpft":
        refuse("sklearn")
    settings = quick(method=method, kit=sys.argv[1], rounds__count=1)
    nodes = [{"partition-id": part, "num-partitions": 2} for part in range(2)]
    grid = LoopGrid(client_app.app.app, settings, nodes)
    server_app.app.run_job(grid, parse_run_config(settings), method)
    assert (Path("runs") / method / "report.html").is_file()
refuse("diffusers", "transformers", "peft", "datasets", "flwr_datasets", "matplotlib")
"""


@pytest.mark.slow
def test_a_process_imports_no_more_than_its_work(tmp_path: Path, tiny_kit: Path) -> None:
    """Joining needs no torch, methods without diffusion no diffusers, the digits no datasets.

    Each client handles each message in a process of its own.
    """
    folders = {f"OSFL_{name.upper()}": name for name in ("runs", "cache", "state")}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DIFFUSION, str(tiny_kit)],
        cwd=tmp_path,
        env={**os.environ, **folders, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_no_registry_and_no_machine_path_is_committed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        file = ROOT / name
        if (
            file.suffix in {".py", ".toml", ".md", ".txt", ".yml", ".yaml", ".json", ".sh"}
            or file.name == "Makefile"
        ):
            assert not re.search(r"index-url[ =]+\S*:|/" + "root/", file.read_text()), name
