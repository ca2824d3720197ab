"""Rounds: where a run begins, and where it goes on."""

from pathlib import Path
from types import SimpleNamespace

import torch

from osfl.config import parse_run_config
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app.baselines.run import _resume
from server_app.context import ServerJob
from tests.helpers.settings import quick


def test_a_new_run_begins_with_nothing_done(home: Path) -> None:
    config = parse_run_config(quick())
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a",))
    start = {"weight": torch.ones(2)}
    assert _resume(job, SimpleNamespace(), start) == (0, 0.0, start, {})  # type: ignore[arg-type]
