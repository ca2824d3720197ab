"""The rules of CONTRIBUTING.md, enforced."""

import ast
import io
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from osfl.cli import launch
from osfl.methods import METHODS
from tests.helpers.settings import ROOT
from tests.helpers.toy import PACKAGES, add_row, copy_project, run_toy


def sources() -> list[Path]:
    return [
        p
        for package in PACKAGES
        for p in sorted((ROOT / package).rglob("*.py"))
        if "v1" not in p.parts
    ]


def imports(file: Path) -> set[str]:
    """Top-level names of everything a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


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


def test_heavy_libraries_have_one_door_each() -> None:
    """But for what builds the untrained parts of a kit."""
    doors = {"diffusers": "osfl/models/diffusion.py", "transformers": "osfl/models/encoders.py"}
    for library, door in doors.items():
        users = {str(f.relative_to(ROOT)) for f in sources() if library in imports(f)}
        assert users == {door, "osfl/kit_training/untrained.py"}


def test_nobody_imports_what_stands_above() -> None:
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


def own_imports(file: Path) -> set[str]:
    """The project's modules that are imported with this one."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found |= {f"{name}.__init__" for name in found}
    return {name for name in found if (ROOT / f"{name.replace('.', '/')}.py").is_file()}


def test_imports_run_in_no_circle() -> None:
    graph = {}
    for file in sources():
        name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        graph[name] = own_imports(file)
    order = list(TopologicalSorter(graph).static_order())  # a circle raises CycleError
    assert order.index("osfl.methods") < order.index("osfl.config.__init__")


_RUN_FILES = re.compile(
    r"(^|/)((status|metrics|synthesis|kit|config)\.json|server\.log|report\.html|SHA256SUMS)$"
    r"|\.jsonl|(^|/)(payloads|units|rounds|tests|models|images)/"
)
_RUN_FOLDERS = {"payloads", "units", "rounds", "tests", "models", "images"}


def paths_of_runs(file: Path) -> list[str]:
    """The text constants of a file that spell a path inside a run's folder."""
    of_kits = {"models", "kit", "kit_training"} & set(file.parts)
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A text with blanks is prose; kits have a config.json too
            spelled = _RUN_FILES.search(node.value) and not re.search(r"\s", node.value)
            if spelled and not (of_kits and node.value.endswith("config.json")):
                found.append(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = node.right.value if isinstance(node.right, ast.Constant) else None
            if right in _RUN_FOLDERS:
                found.append(str(right))
    return found


# It would be found elsewhere
def test_nobody_but_run_folder_spells_a_path_inside_a_runs_folder() -> None:
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


def test_every_method_has_its_modules_and_lists_its_differences() -> None:
    for name, method in METHODS.items():
        for half, module in (("client_app", method.client), ("server_app", method.server)):
            if module:
                file = ROOT / half / ("baselines" if method.rounds else "methods") / f"{module}.py"
                assert file.is_file(), (name, file)
                assert len(file.read_text().splitlines()) <= 250
                docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
                assert "Differences" in docstring or name in ("local", "ceiling"), file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [
        (
            "client_app.app, client_app.handlers, client_app.methods.classifier",
            {"diffusers", "transformers", "datasets", "sklearn"},
        ),
        (
            "client_app.methods.fedcgs, client_app.methods.fedpft, "
            "client_app.learning.local_training",
            {"diffusers", "transformers", "torchvision"},
        ),
        (
            "server_app.app, server_app.methods.fedcgs, server_app.methods.fedpft, "
            "server_app.methods.local, server_app.baselines.fedavg, osfl.cli.estimate",
            {"diffusers", "transformers", "torchvision"},
        ),
        ("client_app.app", {"torch"}),  # joining and forgetting, each a process of its own
    ],
)
def test_a_phone_needs_no_more_than_its_work(modules: str, unneeded: set[str]) -> None:
    """The client half of FedLMG loads neither diffusers nor transformers, nor what only the digits
    need.
    """
    code = f"import sys, {modules}; print(sorted({unneeded} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


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


TOY = '''"""Toy. Differences: none."""
from osfl.payload.kinds import Descriptions
def make_payload(job):
    import torch
    held = job.load(32).held()
    return Descriptions(tuple(job.classes[i] for i in held), torch.zeros(len(held), *SHAPE))
'''
TOY_SERVER = '''"""Toy. Differences: none."""
from server_app.pipeline import synthesize_and_train
from server_app.methods.feddeo import sampler
def run(job, payloads):
    return synthesize_and_train(job, payloads, sampler)
'''


@pytest.mark.slow
def test_a_method_is_added_with_few_edits(tmp_path: Path, tiny_kit: Path) -> None:
    """Contributing's steps, literally: a row, a client half, a server half; then it runs.

    Nothing else is touched.
    """
    copy_project(tmp_path)
    row = (
        '"toy": Method(client="toy", server="toy", payload="Descriptions", sends="a toy", '
        "client_parts=DIFFUSION_PARTS)"
    )
    add_row(tmp_path, row)  # edit 1
    client = tmp_path / "client_app" / "methods" / "toy.py"
    client.write_text(TOY.replace("SHAPE", "(8, 32)"))  # edit 2
    (tmp_path / "server_app" / "methods" / "toy.py").write_text(TOY_SERVER)  # edit 3
    done = run_toy(tmp_path, tiny_kit)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs" / "job" / "report.html").is_file()
