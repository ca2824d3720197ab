"""Outcomes of runs for tables."""

from osfl.tables.runner import Outcome
from osfl.tables.table_file import Cell


def metrics(method: str, accuracy: dict[str, dict[str, float]], **server: object) -> dict:
    client_metrics = {
        "upload_bytes": 1000,
        "download_bytes": 2e6,
        "flops": 3e12,
        "seconds": 4.4,
        "peak_memory_mb": 512.0,
    }
    # 100 test images of every client
    confusion = {
        name: {c: [[round(v), 100 - round(v)], [0, 0]] for c, v in row.items() if c != "average"}
        for name, row in accuracy.items()
    }
    return {
        "method": method,
        "accuracy": accuracy,
        "over_images": {name: row["average"] for name, row in accuracy.items()},
        "confusion": confusion,
        "config": {},
        "rounds": 1,
        "clients": {"a": {**client_metrics, "upload_bytes": 500}, "b": client_metrics},
        "server": {"seconds_per_image": 0.25, "synthetic_images": 240, **server},
        "versions": {"torch": "1", "flwr": "2"},
        "not_tested": [],
    }


def outcome(row: str, seed: int, **kwargs) -> Outcome:  # type: ignore[no-untyped-def]
    return Outcome(Cell(row, seed, f"{row}-{seed}", ()), **kwargs)
