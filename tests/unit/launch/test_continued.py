"""Settings of `osfl run --continue`."""

from pathlib import Path

import pytest

from osfl.config import ConfigError, flatten, parse_run_config
from osfl.launch.continued import continued_settings
from osfl.run_folder.layout import RunFolder
from tests.helpers.settings import quick


@pytest.fixture
def first(tmp_path: Path) -> RunFolder:
    """A run that continues another one itself."""
    folder = RunFolder(tmp_path / "runs" / "first")
    changes = {"new_clients": 2, "continue_from_model": True, "job_id": "first", "seed": 7}
    config = parse_run_config(quick(method="votes", continue_from="other", **changes))
    folder.write_json("config.json", flatten(config))
    return folder


@pytest.mark.parametrize("is_named", [True, False])
def test_a_simulation_has_the_settings_of_the_run_that_it_continues(
    first: RunFolder, is_named: bool
) -> None:
    """Except for those of that run alone. Settings of the user's own follow."""
    name = "first" if is_named else str(first.path)
    inherited, overrides, keys = continued_settings(
        name, ["a", "b"], ["num-clients=4"], first.path.parent, ""
    )
    assert isinstance(inherited, dict)
    assert (inherited["method"], inherited["seed"]) == ("votes", 7)
    assert not inherited.keys() & {"job-id", "continue-from", "continue-from-model", "new-clients"}
    assert overrides == "num-clients=4"
    assert keys == {"continue-from": str(first.path), "replace-clients": "a,b"}


def test_a_servers_run_has_the_users_settings_alone() -> None:
    keys = {"continue-from": "study", "replace-clients": ""}
    assert continued_settings("study", [], ["study.toml"], None, "test") == ["study.toml", keys]


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--continue 'none': .*none is not the folder of a run"):
        continued_settings("none", [], [], tmp_path, "")
