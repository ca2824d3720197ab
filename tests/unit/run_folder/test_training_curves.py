"""The loss of the global model's training, as the run's folder keeps it."""

from pathlib import Path

import pytest

from osfl.run_folder.layout import RunFolder


@pytest.mark.parametrize(
    ("steps", "points"), [(0, 0), (3, 3), (500, 500), (1203, 401), (1201, 401)]
)
def test_a_training_curve_has_the_means_of_equal_windows(
    tmp_path: Path, steps: int, points: int
) -> None:
    run = RunFolder(tmp_path)
    run.store_curve("FT", [float(step) for step in range(1, steps + 1)])
    curve = run.training_curves()["FT"]
    assert len(curve) == points
    if steps:
        # The last window of 1,201 steps has one step alone
        size = 3 if steps > 500 else 1
        assert curve[0] == (size, (1 + size) / 2)
        assert curve[-1] == (steps, steps if steps != 1203 else 1202.0)


def test_a_corrupt_curve_is_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.store_curve("FT", [1.0])
    for name, content in (("a", "{"), ("b", "{}"), ("c", '{"steps": [1], "loss": []}')):
        (tmp_path / "curves" / f"{name}.json").write_text(content)
    (tmp_path / "curves" / "d.json").write_text('{"steps": 1, "loss": 1}')
    assert list(run.training_curves()) == ["FT"]
