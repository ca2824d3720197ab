"""A copy of the project that a test adds something to, and runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.settings import ROOT

PACKAGES = ("osfl", "client_app", "server_app")
GO = """
import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]
from functools import partial
from tests.helpers.loop_grid import LoopGrid, begin_task
from tests.helpers.settings import quick
from tests.helpers.small_digits import few_digits
import osfl; assert osfl.__file__.startswith(sys.argv[1]), osfl.__file__
from client_app.app import app
from osfl.cli.estimate import estimate_run
from server_app.app import run_job
from osfl.config import parse_run_config
from osfl.data import digits
begin_task()
digits.load_split = partial(few_digits, digits.load_split)
for name in sys.argv[4:]:
    config = quick(method=name, kit=sys.argv[3])
    # As --dry-run does
    estimate_run(parse_run_config(config))
    grid = LoopGrid(app, config, [{"partition-id": k, "num-partitions": 2} for k in range(2)])
    run_job(grid, parse_run_config(config), name)
"""


def copy_project(folder: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    shutil.copy(ROOT / "pyproject.toml", folder)


def add_method(folder: Path, name: str, declaration: str) -> None:
    """Declare a method in a copy: a file, and two lines in the table.

    Args:
        name: the method's.
        declaration: the expression of its `METHOD`.
    """
    methods = folder / "osfl" / "methods"
    imports = "from osfl.methods.declaration import DIFFUSION_PARTS, Method"
    (methods / f"{name}.py").write_text(f'"""Toy."""\n\n{imports}\n\nMETHOD = {declaration}\n')
    table = methods / "__init__.py"
    line = "from osfl.methods.votes import METHOD as VOTES\n"
    text = table.read_text()
    assert text.count(line) == 1
    constant = name.upper()
    text = text.replace(line, f"from osfl.methods.{name} import METHOD as {constant}\n{line}")
    table.write_text(text.replace("\n}\n", f'\n    "{name}": {constant},\n}}\n', 1))


def run_toys(folder: Path, kit: Path, *names: str) -> subprocess.CompletedProcess:
    """A run of each of these methods by the copy: two clients, everything in one process."""
    (folder / "go.py").write_text(GO)
    environment = {
        **os.environ,
        "OSFL_RUNS": str(folder / "runs"),
        "OSFL_CACHE": str(folder / "cache"),
        "OSFL_STATE": str(folder / "state"),
    }
    command = [sys.executable, "go.py", str(folder), str(ROOT), str(kit), *names]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
