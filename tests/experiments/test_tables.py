"""Tables of benchmarks/: each has the command and the caption of a program that exists."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.accuracy import method_comparison
from benchmarks.harness import Experiment
from benchmarks.privacy import payload_codecs
from benchmarks.recipe import PARTITIONS
from tests.helpers.settings import ROOT

BENCHMARKS = ROOT / "benchmarks"
TABLES = sorted(BENCHMARKS.glob("*/tables/*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
PAGES += [BENCHMARKS / "README.md", *BENCHMARKS.glob("notes/*.md"), *ROOT.glob("docs/*.md")]
COMMAND = re.compile(r"python -m (benchmarks[\w.]+)")
# Programs with one table whose caption depends on no result
PLAIN = (
    "accuracy.domain_generalization",
    "accuracy.feature_hyperparameters",
    "accuracy.guidance_scale",
    "accuracy.image_quality",
    "accuracy.personalization",
    "accuracy.photograph_kit",
    "accuracy.training_ablation",
    "privacy.accuracy_by_epsilon",
    "privacy.membership_inference",
    "privacy.noisy_mean",
    "privacy.payload_codecs",
    "robustness.false_positives",
    "robustness.inflated_counts",
    "robustness.poisoning",
    "speed.client_memory",
)


def check_modules(text: str) -> int:
    """Check that the programs of all commands exist, and count them."""
    commands = COMMAND.findall(text)
    for module in commands:
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    return len(commands)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_table_has_its_command(table: Path) -> None:
    text = table.read_text()
    assert check_modules(text) or "`osfl compare configs/tables/" in text
    content = table.with_suffix(".json")
    if content.is_file():
        assert json.loads(content.read_text())["about"] in text


def test_commands_of_the_pages_exist() -> None:
    counts = {page.name: check_modules(page.read_text()) for page in PAGES}
    assert counts["README.md"] > 0
    assert counts["Makefile"] > 0
    assert sum(counts.values()) > 40


def check_caption(experiment: Experiment, seeds: tuple[int, ...] = ()) -> None:
    """Check the caption of a stored table: otherwise a new row would drop the others."""
    table = BENCHMARKS / Path(experiment.file).parent.name / "tables"
    content = json.loads((table / f"{experiment.table_file(seeds).name}.json").read_text())
    assert content["about"].startswith(experiment.about(seeds))


@pytest.mark.parametrize("name", PLAIN)
def test_a_stored_table_has_the_caption_of_its_program(name: str) -> None:
    check_caption(import_module(f"benchmarks.{name}").EXPERIMENT)


def test_programs_of_several_tables_have_their_captions() -> None:
    for partition in PARTITIONS:
        check_caption(method_comparison.experiment(partition))
    check_caption(method_comparison.experiment("domain"), (0, 1, 2))
    check_caption(payload_codecs.BYTES)
