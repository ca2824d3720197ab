"""deploy/slurm: what the jobs run, without Slurm, whose own part is the lines with #SBATCH."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from osfl.cli import certs, node_keys
from osfl.launch.guard import end_process_tree
from tests.helpers.settings import ROOT
from tests.helpers.system_tools import BIN, GRPC, TWO_CLASSES, make_images, quick_arguments

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not GRPC, reason="deploy/ is for the pinned Flower"),
]

JOBS = ROOT / "deploy" / "slurm"


@pytest.mark.timeout(400)
def test_the_jobs_run_a_federation_and_end_with_it(tmp_path: Path, tiny_kit: Path) -> None:
    study = tmp_path / "study"
    certs.make_ca(study / "keys")
    names = ["client-0", "client-1"]
    for name in names:
        node_keys.make_node(study / "keys", name)
        make_images(tmp_path / "sites" / name)
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OSFL_FOLDER": str(study),
        "OSFL_IMAGES": str(tmp_path / "sites"),
        "OSFL_HOST": "localhost",
        "OSFL_NODE_CONFIG": "domain='photo' allowed-dirs='/'",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path / "local"),
        "COLUMNS": "200",
        "TERM": "dumb",
    }
    (tmp_path / "local").mkdir()
    processes: dict[str, subprocess.Popen] = {}

    def submit(name: str, job: int, *arguments: str, **settings: str) -> None:
        with open(tmp_path / f"{name}.log", "wb") as log:
            processes[name] = subprocess.Popen(
                ["bash", *arguments],
                env={**environment, "SLURM_JOB_ID": str(job), **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    settings = {**TWO_CLASSES, "num_clients": 2, "join_timeout": 120.0}
    run = quick_arguments(tiny_kit, method="prompts-domain", job_id="study1", **settings)
    # Ports depend on the job, which no other test may have at the same time
    job = os.getpid()
    try:
        submit("server", job, str(JOBS / "server.sbatch"), *run)
        for number, name in enumerate(names):
            client = str(JOBS / "clients.sbatch")
            submit(name, job + 1, client, str(job), SLURM_ARRAY_TASK_ID=str(number))
        assert processes["server"].wait(timeout=300) == 0, log("server")[-3000:]
        for name in names:
            assert processes[name].wait(timeout=120) == 0, log(name)[-3000:]
    finally:
        for process in processes.values():
            end_process_tree(process.pid)
    folder = study / "runs" / "study1"
    assert sorted(file.stem for file in (folder / "payloads").glob("*.pb")) == names
    assert set(json.loads((folder / "metrics.json").read_text())["clients"]) == set(names)
    # Nothing is left on the machines
    assert not list(study.glob("server-*"))
    assert list((tmp_path / "local").iterdir()) == []
