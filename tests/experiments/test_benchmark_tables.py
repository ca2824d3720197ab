"""What benchmarks share: rows that a command makes, rows that a table keeps, and whose images."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command_line, some_of, with_others
from benchmarks.clients import real

ORDER = ("FGL", "OSCAR, pooled", "Espresso")


def test_rows_of_others_stay_if_their_settings_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "guidance.json"
    new = [{"": "OSCAR, pooled", "best": "2"}, {"": "FGL", "best": "3"}]
    assert with_others(new, file, "seeds 0", ORDER) == [new[1], new[0]]
    old = [{"": "FGL", "best": "9"}, {"": "Espresso", "best": "5"}]
    file.write_text(json.dumps({"rows": old, "about": "seeds 0 2 cores"}))
    assert with_others(new, file, "seeds 0", ORDER) == [new[1], new[0], old[1]]
    assert with_others(new, file, "seeds 1", ORDER) == [new[1], new[0]]


@pytest.mark.parametrize("known", [ORDER, (10, 20), (0.0, 0.5)])
def test_a_command_makes_what_was_asked_for_or_all(known: tuple[Any, ...]) -> None:
    parser = command_line("What it makes.")
    assert some_of([known[1]], known, parser) == [known[1]]
    assert some_of([], known, parser) == list(known)


def test_what_is_unknown_ends_the_command_and_names_what_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = command_line("First line.\n\n    python -m it   # as it stands")
    with pytest.raises(SystemExit) as ended:
        some_of(["FGL", "FedSomething"], ORDER, parser)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'FedSomething': must be some of FGL; OSCAR, pooled; Espresso" in said
    assert "First line.\n\n    python -m it   # as it stands" in parser.format_help()


def test_clients_have_a_hundred_images_to_learn_from_and_three_hundred_to_be_tested_on() -> None:
    for split, count in (("train", 100), ("test", 300)):
        found = real(split)
        assert [len(part) for part in found] == [count] * 6
        assert all(len(set(part.labels.tolist())) == 10 for part in found)
        # Each in its own style
        means = {round(float(part.pixels.float().mean()), 2) for part in found}
        assert len(means) == 6
