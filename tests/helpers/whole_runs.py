"""Whole runs of client and server in one process, and what they leave."""

import json
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


def metrics(home: Path, job: str = "job") -> dict:
    return json.loads((home / "runs" / job / "metrics.json").read_text())


class Killed(BaseException):
    """Stands for the process's end: no handler for exceptions sees it."""


def files(folder: Path, *names: str) -> dict[str, bytes]:
    found = [
        p
        for name in names
        for p in ([folder / name] if (folder / name).is_file() else (folder / name).rglob("*"))
    ]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.is_file()}


def swap_payload(change) -> object:  # type: ignore[no-untyped-def]
    """A tamper that changes the payload bytes of client 1 and leaves the header alone."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            blob = change(unpack_bytes(reply.content.array_records["payload"]))
            reply.content["payload"] = pack_bytes(blob, "osfl.payload.v1")
        return reply

    return tamper
