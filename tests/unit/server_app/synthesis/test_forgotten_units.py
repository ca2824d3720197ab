"""A plan without a client: the units of all others stay, whatever the kind of payload."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osfl.config import parse_run_config
from osfl.data.digits import CLASSES
from osfl.methods import METHODS, server_module
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import Status
from server_app import pipeline
from server_app.context import ServerJob
from server_app.synthesis.plan import ImageJob, Unit, cut_units
from tests.helpers.settings import quick

HELD = {"a": CLASSES[:4], "b": CLASSES[2:9], "c": CLASSES[5:6]}
SAMPLED = [name for name, method in METHODS.items() if method.samples_payloads]


class PlannedError(Exception):
    """Ends a method's server half once its plan is made."""


@pytest.mark.parametrize("method", SAMPLED)
@pytest.mark.parametrize("forgotten", HELD)
def test_other_clients_units_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, forgotten: str
) -> None:
    def units(clients: list[str]) -> list[Unit]:
        plans: list[list[ImageJob]] = []

        def planned(job: ServerJob, jobs: list[ImageJob], *rest: Any) -> None:
            plans.append(jobs)
            raise PlannedError

        monkeypatch.setattr(pipeline, "synthesize", planned)
        config = parse_run_config(quick(method=method, synthesis__images_per_class=3))
        job = ServerJob(config, RunFolder(tmp_path), Status(tmp_path), tuple(clients))
        payloads = {client: SimpleNamespace(classes=HELD[client]) for client in clients}
        with pytest.raises(PlannedError):
            server_module(method).run(job, payloads)
        return cut_units(plans[0], 4, {client: f"{client}'s" for client in clients}, {"steps": 2})

    with_all = units(list(HELD))
    other_units = [unit for unit in with_all if unit.jobs[0].client != forgotten]
    assert 0 < len(other_units) < len(with_all)
    assert units([client for client in HELD if client != forgotten]) == other_units
