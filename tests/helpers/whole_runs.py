"""Whole runs of client and server in one process, and what they leave."""

import json
import shutil
import tempfile
from pathlib import Path

from flwr.app import Message

from client_app.app import app
from osfl.config import parse_run_config
from osfl.payload.messages import pack_bytes, unpack_bytes
from server_app.app import run_job
from tests.helpers.loop_grid import LoopGrid


def nodes(count: int) -> list[dict]:
    return [{"partition-id": k, "num-partitions": count} for k in range(count)]


def start(config: dict, job: str = "job", count: int | None = None, tamper=None) -> LoopGrid:  # type: ignore[no-untyped-def]
    grid = LoopGrid(
        app, config, nodes(count if count is not None else config["num-clients"]), tamper
    )
    run_job(grid, parse_run_config(config), job)
    return grid


FINISHED: dict[str, Path] = {}


def start_once(home: Path, config: dict, job: str = "job") -> Path:
    """The folder of a finished run. It is made once in a process, and copied after that."""
    folder = home / "runs" / job
    key = json.dumps([job, config], sort_keys=True)
    if key in FINISHED:
        return Path(shutil.copytree(FINISHED[key], folder))
    start(config, job)
    storage = tempfile.mkdtemp(prefix="finished-", dir=home.parent)
    FINISHED[key] = Path(shutil.copytree(folder, Path(storage) / job))
    return folder


def metrics(home: Path, job: str = "job") -> dict:
    return json.loads((home / "runs" / job / "metrics.json").read_text())


class Killed(BaseException):
    """Stands for the process's end: no handler for exceptions sees it."""


def files(folder: Path, *names: str) -> dict[str, bytes]:
    paths = [
        p
        for name in names
        for p in ([folder / name] if (folder / name).is_file() else (folder / name).rglob("*"))
    ]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.is_file()}


def swap_payload(change) -> object:  # type: ignore[no-untyped-def]
    """A tamper that changes the payload bytes of client 1 and leaves the header alone."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            blob = change(unpack_bytes(reply.content.array_records["payload"]))
            reply.content["payload"] = pack_bytes(blob, "osfl.payload.v1")
        return reply

    return tamper
