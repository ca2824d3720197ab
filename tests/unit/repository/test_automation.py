"""The workflow of continuous integration and the commit hook."""

import re
import tomllib
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from pre_commit.clientlib import load_config

from tests.helpers.settings import ROOT


def workflow_jobs() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    return workflow["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_checks_all_pythons_and_tests_one() -> None:
    """Lint and fast tests on the oldest and the newest Python, all tests once, docs strictly."""
    jobs = workflow_jobs()
    versions = jobs["check"]["strategy"]["matrix"]["python-version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = SpecifierSet(project["requires-python"])
    minors = [f"3.{minor}" for minor in range(20) if f"3.{minor}" in supported]
    assert versions == [minors[0], minors[-1]]
    assert commands(jobs["check"])[-1] == "make check"
    assert commands(jobs["test"])[-1] == ".ci/run"
    assert commands(jobs["docs"])[-1] == "make docs"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_workflow_calls_targets_that_exist() -> None:
    recipe = (ROOT / "Makefile").read_text()
    for job in workflow_jobs().values():
        for command in commands(job):
            for target in re.findall(r"^make (\S+)", command):
                assert re.search(rf"^{target}:", recipe, re.MULTILINE), command
    assert "mkdocs build --strict" in recipe
    assert "pre-commit install" in recipe


def test_the_commit_hook_fetches_nothing_and_its_files_exist() -> None:
    config = load_config(ROOT / ".pre-commit-config.yaml")
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    # pre-commit reads the first as the second, its newer name
    assert {hook["language"] for hook in hooks} <= {"system", "unsupported"}
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        for name in (program, *(word for word in arguments if word.startswith("tests/"))):
            assert (ROOT / name).is_file(), name
