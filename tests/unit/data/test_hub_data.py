"""A data set by its name on a hub: one on loopback, through the hub's own client libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.loopback_hub import REVISION, hub
from tests.helpers.named_data import CLASSES, rows

TOLD = "print(','.join(resolve_config(sys.argv[1:])[0].data.classes.split(',')))"
FEDAVG = ("method=fedavg", "classifier.init=none")
ASK = (sys.executable, "-c", f"import sys; from osfl.settings import resolve_config; {TOLD}")


def osfl(home: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the libraries read the hub's address when they are imported."""
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COLUMNS": "200",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    if not address:
        environment.pop("HF_ENDPOINT")
        environment["HF_HUB_OFFLINE"] = "1"
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as `push_to_hub` makes it: a card with the columns, and parquet files."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / "owner" / "toy"
    (folder / "data").mkdir(parents=True)
    part = rows()
    part.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    names = "\n".join(f"          '{n}': {name}" for n, name in enumerate(CLASSES))
    (folder / "README.md").write_text(
        "---\n"
        "dataset_info:\n"
        "  features:\n"
        "  - name: image\n    dtype: image\n"
        "  - name: domain\n    dtype: string\n"
        "  - name: label\n    dtype:\n      class_label:\n        names:\n"
        f"{names}\n"
        "  splits:\n"
        f"  - name: train\n    num_bytes: 1\n    num_examples: {len(part)}\n"
        "configs:\n"
        "- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "---\n"
    )
    return root


@pytest.mark.slow
def test_a_data_set_is_fetched_once_and_then_there_without_a_network(
    repositories: Path, tmp_path: Path
) -> None:
    settings = ["data.name=hf:owner/toy@" + REVISION, "num-clients=2", "method=fedavg"]
    settings.append("classifier.init=none")
    check = [str(Path(sys.executable).parent / "osfl"), "data", "check", *settings]
    with hub(repositories) as server:
        answer = osfl(tmp_path, server.address, *ASK, *settings)
        assert answer.stdout.strip() == "alarm_clock,Dog,mouse", answer.stderr
        # The card alone says the classes: no image was fetched for them
        assert not [name for name in server.fetched if name.endswith(".parquet")]
        result = osfl(tmp_path, server.address, *check)
        assert result.returncode == 0, result.stderr
        # Standard output is the table alone: the bar shows seconds, which differ
        assert "━━" in result.stderr
        assert "0:0" not in result.stdout
        fetched = [name for name in server.fetched if name.endswith(".parquet")]
        assert fetched == ["owner/toy/data/train-00000-of-00001.parquet"]
        again = osfl(tmp_path, server.address, *check)
        assert again.stdout == result.stdout
        assert [name for name in server.fetched if name.endswith(".parquet")] == fetched
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "Clipart 24 6 3 of 3 8 8 12 x 8" in words
    away = osfl(tmp_path, "", *check)
    assert away.returncode == 0, away.stderr
    assert away.stdout == result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_card_names_no_files_of_this_machine(tmp_path: Path, there: bool) -> None:
    """In the same words whether there are such files; nothing of them is said."""
    (tmp_path / "hospital").mkdir()
    if there:
        rows().to_parquet(tmp_path / "hospital" / "patients.parquet")
    card = tmp_path / "hub" / "owner" / "evil" / "README.md"
    card.parent.mkdir(parents=True)
    files = f"- split: train\n    path: {tmp_path}/hospital/*.parquet\n"
    card.write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n  {files}---\n")
    settings = ["data.name=hf:owner/evil@" + REVISION, "num-clients=1", "method=fedavg"]
    settings += ["classifier.init=none", "data.classes=mouse,Dog", "data.partition=iid"]
    check = [str(Path(sys.executable).parent / "osfl"), "data", "check", *settings]
    with hub(tmp_path / "hub") as server:
        result = osfl(tmp_path, server.address, *check)
    assert result.returncode == 1
    words = " ".join((result.stdout + result.stderr).split())
    assert "its card names data files that are missing or outside the data set" in words
    assert "hospital" not in words


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_know_is_reported(repositories: Path, tmp_path: Path) -> None:
    with hub(repositories) as server:
        result = osfl(tmp_path, server.address, *ASK, "data.name=hf:owner/no", *FEDAVG)
    assert result.returncode == 1
    assert "data.name = 'hf:owner/no': cannot be read" in result.stderr
    assert "set data.root to the folder of a copy" in result.stderr
