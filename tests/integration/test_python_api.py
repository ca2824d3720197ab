"""Runs from Python: settings, and what a run's folder gives."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import osfl
from osfl.api import _job
from osfl.launch.views import pick_display
from osfl.settings import default_config
from tests.helpers.settings import quick
from tests.helpers.whole_runs import start_once

pytestmark = pytest.mark.slow


@pytest.fixture
def run(home: Path, tiny_kit: Path) -> osfl.Run:
    settings = quick(kit=str(tiny_kit), synthesis__images_per_class=2)
    return osfl.open_run(start_once(home, settings))


def test_a_finished_run_gives_its_figures_images_and_model(run: osfl.Run) -> None:
    assert (run.job, run.summary.state) == ("job", "finished")
    assert run.metrics["average"] == run.summary.accuracy
    assert run.report.read_text().startswith("<!")
    assert len(run.images()) == 2 * 10 * 2
    images = run.images("client-1", "three")
    files = sorted((run.folder / "images" / "client-1").glob("003-three/*.png"))
    assert len(images) == len(files) == 2
    for image, file in zip(images, files, strict=True):
        assert (np.asarray(image) == np.asarray(Image.open(file))).all()
    model = run.model()
    logits = model.module(model.transform(images[0])[None])
    assert logits.shape == (1, len(model.classes))
    table = run._repr_html_()
    assert "client-0" in table
    assert f"{run.metrics['average']:.1f}" in table


def test_errors_say_what_there_is(run: osfl.Run) -> None:
    with pytest.raises(osfl.ConfigError, match="no images of client 'x'; set one of client-0, cl"):
        run.images("x")
    with pytest.raises(osfl.ConfigError, match="no images of class 'ten'; set one of eight, five"):
        run.images("client-0", "ten")
    with pytest.raises(osfl.ConfigError, match="no model 'X'; its models: FT"):
        run.model("X")
    with pytest.raises(osfl.ConfigError, match="no such folder; runs in .*: job"):
        osfl.open_run(run.folder.with_name("other"))
    next((run.folder / "images" / "client-0").rglob("*.png")).write_bytes(b"")
    with pytest.raises(OSError, match="is missing or corrupt; repeat the same"):
        run.images("client-0")
    for name in ("metrics.json", "report.html"):
        (run.folder / name).unlink()
    with pytest.raises(osfl.ConfigError, match="this run has not finished"):
        _ = run.metrics
    with pytest.raises(osfl.ConfigError, match="this run has not finished"):
        _ = run.report


def test_keys_are_spelled_as_python_does_or_as_files_do(tmp_path: Path) -> None:
    """Later settings take precedence, and keywords over all of them."""
    layers = ({"synthesis": {"steps": 3, "images-per-class": 7}}, "synthesis.steps=4", "demo")
    keys = {"feddeo__batch_size": 5, "data__root": tmp_path, "public_domains": ["neon", "photo"]}
    job = _job(({"seed": 9}, *layers), {"method": "feddeo", **keys}, tmp_path)
    # configs/demo.toml sets 10 steps and 10 images per class
    assert (job.config.synthesis.steps, job.config.synthesis.images_per_class) == (10, 10)
    assert (job.config.method, job.config.seed) == ("feddeo", 9)
    assert (job.config.feddeo.batch_size, job.config.data.root) == (5, str(tmp_path))
    assert job.config.public_domain_names == ("neon", "photo")
    assert job.folder.path.parent == tmp_path


def test_without_a_method_the_recommended_settings_come_first(tmp_path: Path) -> None:
    job = _job((), {"synthesis__images_per_class": 3}, tmp_path)
    assert job.config.method == "domain-vector" != default_config()["method"]
    assert (job.config.domain_vector.steps, job.config.synthesis.images_per_class) == (600, 3)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sede": 1}, r"unknown key \(did you mean seed\?\)"),
        ({"seed": None}, "seed = None: must be a string, a number"),
        ({"job_id": "a/b"}, "job-id = 'a/b'"),
    ],
)
def test_wrong_settings_are_errors_before_anything_starts(
    tmp_path: Path, keys: dict, problem: str
) -> None:
    with pytest.raises(osfl.ConfigError, match=problem):
        osfl.run("demo", runs=tmp_path, **keys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_cannot_work_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kit = str(tmp_path / "no-such-kit")
    for progress, lines in ((False, ""), (True, "checking settings, data and models\n")):
        with pytest.raises(osfl.ConfigError, match="no-such-kit"):
            osfl.run(method="feddeo", kit=kit, runs=tmp_path / "runs", progress=progress)
        assert capfd.readouterr() == (lines, "")


def test_without_a_terminal_each_phase_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    states = [
        {"phase": "joining", "phases": [{"phase": "joining"}], "clients": {"a": "joined"}},
        {"phase": "finished", "phases": [{"phase": "joining"}, {"phase": "finished"}]},
    ]
    for progress in (True, False):
        display = pick_display(progress)
        with display.view() as view:
            for state in states:
                view.show(state)
        display.print("done")
        lines = capsys.readouterr().out.splitlines()
        texts = [line.partition(" ")[2] for line in lines[:-1]]
        assert texts == (["joining", "a: joined"] if progress else [])
        assert lines[-1:] == (["done"] if progress else [])


def test_the_package_is_imported_without_its_libraries() -> None:
    program = (
        "import sys, osfl\n"
        "assert not {'torch', 'flwr', 'rich', 'PIL', 'numpy'} & set(sys.modules), sys.modules\n"
        "names = [getattr(osfl, name) for name in osfl.__all__ if name != 'load_model']\n"
        "assert not {'torch', 'mlflow', 'IPython'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
