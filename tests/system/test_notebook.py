"""The notebook of docs, executed as a reader executes it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.settings import ROOT

NOTEBOOK = ROOT / "docs" / "demo.ipynb"


def test_the_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.system
def test_the_notebook_runs_and_shows_progress_table_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of two minutes, of which other tests may take the cores
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=850, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    run, figures, images, model, report = (
        cell for cell in notebook.cells if cell.cell_type == "code"
    )
    pages = [output.data["text/html"] for output in run.outputs if "data" in output]
    assert "synthesis" in pages[0]
    assert "client-1" in pages[-1]
    assert "average" in pages[-1]
    assert "image/png" in images.outputs[-1].data
    average, upload = eval(figures.outputs[-1].data["text/plain"])
    assert 0 <= average <= 100
    assert upload > 1000
    probabilities = eval(model.outputs[-1].data["text/plain"])
    assert list(probabilities)[:3] == ["zero", "one", "two"]
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-4)
    assert "report.html" in report.outputs[-1].data["text/plain"]
    assert "finished" in report.outputs[-1].data["text/plain"]
