"""Folders of a test's own for every program of benchmarks/."""

from pathlib import Path

import pytest

from benchmarks import harness


@pytest.fixture(autouse=True)
def benchmark_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write results and tables below `tmp_path`."""
    monkeypatch.setattr(harness, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(harness, "BENCHMARKS", tmp_path / "benchmarks")
