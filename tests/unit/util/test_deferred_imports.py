"""Modules whose code runs when something of theirs is used, and the libraries that stay whole."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from osfl.util import deferred_imports
from osfl.util.deferred_imports import (
    DeferringFinder,
    stand_in_break,
    stand_in_class,
    stand_in_disable,
    stand_in_function,
    stand_in_mark,
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of the parts of a package `late` that ran; the package is deferred."""
    folder = tmp_path / "late"
    folder.mkdir()
    note = "import late_runs\nlate_runs.RUNS.append({!r})\n"
    (tmp_path / "late_runs.py").write_text("RUNS = []\n")
    (folder / "__init__.py").write_text(
        note.format("late")
        + "VALUE = 3\nmarked, hidden, breaks = [], [], []\n"
        + "def double(x):\n    return 2 * x\n"
        + "def mark(function):\n    marked.append(function)\n    return function\n"
        + "def disable(fn, *args):\n    hidden.append((fn, args))\n    return fn\n"
        + "def pause():\n    breaks.append(1)\n"
        + "class Part:\n    pass\n"
    )
    (folder / "alone.py").write_text(note.format("alone"))
    (folder / "needy.py").write_text(note.format("needy"))
    (folder / "deferred.py").write_text(note.format("deferred") + "NAME = 'deferred'\n")
    stand_ins = {
        "Part": stand_in_class,
        "disable": stand_in_disable,
        "double": stand_in_function,
        "mark": stand_in_mark,
        "pause": stand_in_break,
    }
    monkeypatch.setattr(deferred_imports, "STAND_INS", {"late": stand_ins, "late.deferred": {}})
    monkeypatch.setattr(deferred_imports, "INDEPENDENT", ("late.alone",))
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder(), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("late_runs").RUNS
    for name in [name for name in sys.modules if name.partition(".")[0] in ("late", "late_runs")]:
        del sys.modules[name]


def test_a_module_runs_once_and_at_the_first_use(runs: list[str]) -> None:
    late = importlib.import_module("late")
    assert runs == []
    assert late.VALUE == 3
    assert late.VALUE == 3
    assert runs == ["late"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = late.nothing
    assert importlib.reload(late).VALUE == 3


def test_a_submodule_needs_its_packages_code_unless_listed(runs: list[str]) -> None:
    importlib.import_module("late.alone")
    importlib.import_module("late.deferred")
    assert runs == ["alone"]
    importlib.import_module("late.needy")
    assert runs == ["alone", "late", "needy"]


def test_a_package_runs_before_its_deferred_submodule(runs: list[str]) -> None:
    assert importlib.import_module("late.deferred").NAME == "deferred"
    assert runs == ["late", "deferred"]


def test_a_function_runs_the_code_when_it_is_called(runs: list[str]) -> None:
    from late import double  # type: ignore[import-not-found]

    assert runs == []
    assert double(4) == 8
    assert runs == ["late"]


def test_a_class_has_no_instance_before_the_code_ran(runs: list[str]) -> None:
    late = importlib.import_module("late")
    part = late.Part
    assert not isinstance(3, part)
    assert part | None
    assert runs == []
    assert late.VALUE == 3
    assert isinstance(late.Part(), part)
    assert not isinstance(3, part)


def test_marks_are_applied_when_the_code_ran(runs: list[str]) -> None:
    late = importlib.import_module("late")

    @late.mark
    def function() -> None:
        pass

    assert runs == []
    assert late.VALUE == 3
    assert late.marked == [function]


def test_a_function_is_hidden_from_a_compiler_that_ran(runs: list[str]) -> None:
    late = importlib.import_module("late")

    @late.disable
    def function(x: int) -> int:
        return x + 1

    @late.disable()
    def other(x: int) -> int:
        return x + 2

    late.pause()
    assert (function(1), other(1)) == (2, 3)
    assert runs == []
    assert late.VALUE == 3
    assert (function(1), function(2), other(1)) == (2, 3, 3)
    assert [fn for fn, _ in late.hidden] == [function.__wrapped__, other.__wrapped__]
    assert late.breaks == []


def test_code_that_fails_runs_again(runs: list[str], tmp_path: Path) -> None:
    file = tmp_path / "late" / "deferred.py"
    file.write_text("raise OSError('the disk is away')\n")
    deferred = importlib.import_module("late.deferred")
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is away"):
            _ = deferred.NAME


TRAINING = """
import osfl
import torch, torchvision
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from transformers import CLIPTextModel
from osfl.util.deferred_imports import STAND_INS, is_deferred
import sys

layer = torch.nn.Linear(2, 2)
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
    optimizer = kind(layer.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
for name in STAND_INS:
    assert name not in sys.modules or is_deferred(sys.modules[name]), name

compiled = torch.compile(lambda x: torch.sin(2 * x), backend="eager")
assert torch.equal(compiled(torch.ones(3)), torch.sin(2 * torch.ones(3)))
assert not is_deferred(torch._dynamo)
# What diffusers decorated before the compiler ran
assert id(BasicTransformerBlock) in torch._dynamo.trace_rules._allowed_callable_ids.function_ids
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
from diffusers import DiTTransformer2DModel
import scipy.stats
from scipy.optimize import linear_sum_assignment, minimize
assert scipy.stats.norm.cdf(0) == 0.5
assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
"""


@pytest.mark.slow
def test_training_needs_no_compiler_and_compiling_works_after_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAINING], check=True, timeout=300)
