"""What a run gives: `metrics.json` for machines, `report.html` for people (one file, opens offline)."""

import base64
import hashlib
import io
import json
import platform
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from osfl.files import DamageError, read_json, write_atomically
from osfl.run_folder.layout import MADE_ANEW
from osfl.words import plain

MOST_PICTURED = 12  # classes
MOST_WORDS = 2000  # characters of a setting, or of any other text on the page
# What those who read `metrics.json` count on
_METRICS = {
    "method": str,
    "accuracy": dict,
    "over_images": dict,
    "clients": dict,
    "server": dict,
    "rounds": int,
    "versions": dict,
    "not_tested": list,
}
PACKAGES = (
    "osfl",
    "flwr",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "datasets",
    "protobuf",
)


def write_report(
    folder: Path,
    classes: tuple[str, ...],
    kit_download_bytes: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Gather a run's folder into `metrics.json` and `report.html`.

    Args:
        folder: `runs/<job id>`.
        classes: the run's class names.
        kit_download_bytes: what each client had to fetch of the kit before it could begin; None where that is not known.

    Returns:
        the metrics.
    """
    metrics = gather(folder, kit_download_bytes)
    write_atomically(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
    page = _render(folder, metrics, classes)
    write_atomically(folder / "report.html", page.encode())
    return metrics


def gather(
    folder: Path, kit_download_bytes: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """The figures of a run."""
    fetched = kit_download_bytes or {}
    config = _json(folder / "config.json")
    tests = {f.stem: _json(f) for f in sorted((folder / "tests").glob("*.json"))}
    accuracy = {
        name: {client: _accuracy(matrix) for client, matrix in by_client.items()}
        for name, by_client in tests.items()
    }
    everywhere = (
        set.intersection(*map(set, accuracy.values())) if accuracy else set()
    )  # models are compared where all were tested
    shown = ""  # FT where there is one: by their accuracy on the clients' test images nobody could choose
    if accuracy and config["method"] != "local":
        shown = "FT" if "FT" in accuracy else next(iter(accuracy))
    clients: dict[str, dict[str, float]] = defaultdict(dict)
    for client in {c for by_client in tests.values() for c in by_client}:
        models = list((folder / "models").glob("*.safetensors")) or (folder / "payloads").glob(
            "*.pb"
        )  # Local's are the payloads
        clients[client]["download_bytes"] = (fetched.get(client) or 0) + sum(
            file.stat().st_size for file in models
        )
        clients[client]["upload_bytes"] = 0
    status = _json(folder / "status.json") if (folder / "status.json").is_file() else {}
    # One that tested nothing is in the tables too, as not tested
    for client in status.get("clients", {}):
        clients[client].setdefault("upload_bytes", 0)
    for file in sorted((folder / "payloads").glob("*.json")):
        about = _json(file)
        clients[file.stem].update(about["costs"], upload_bytes=about["bytes"])
    any_payload = any((folder / "payloads").glob("*.pb"))
    rounds: dict[str, Any] = (
        _json(done)
        if (done := folder / "rounds" / "done.json").is_file()
        else {"round": int(any_payload), "costs": {}}
    )
    for client, about in rounds["costs"].items():  # FedAvg and its kin: summed over the rounds
        both = clients[client].get("download_bytes", 0) + about["download_bytes"]
        clients[client].update(about, download_bytes=both)
        clients[client].setdefault("upload_bytes", 0)
    timings = [t for line in _lines(folder / "timings.jsonl") if (t := _timing(line))]
    images, seconds = sum(t["images"] for t in timings), sum(t["seconds"] for t in timings)
    trained = {f.stem: _json(f) for f in sorted((folder / "models").glob("*.json"))}
    return {
        "job_id": folder.name,
        "method": config["method"],
        "seed": config["seed"],
        "accuracy": {
            name: {**by_client, "average": _mean(by_client)} for name, by_client in accuracy.items()
        },
        "shown": shown,
        "over_images": {name: over_images(by_client) for name, by_client in tests.items()},
        "average": _mean(accuracy[shown])
        if shown
        else _mean({name: _mean(row) for name, row in accuracy.items()}),
        "rounds": rounds["round"],
        "confusion": tests,
        "clients": dict(sorted(clients.items())),
        "kit_not_counted": any(size is None for size in fetched.values()),
        "warnings": status.get("warnings", []),
        "not_tested": sorted(set(clients) - everywhere),
        "server": {
            "synthetic_images": len(_lines(folder / "manifest.jsonl")),
            "seconds_per_image": seconds / images if images else None,
            "synthesis_seconds": seconds,
            "training_seconds": {name: about["seconds"] for name, about in trained.items()},
        },
        "versions": {
            "python": platform.python_version(),
            **{p: v for p in PACKAGES if (v := _version(p))},
        },
        "platform": platform.platform(),
        "approximations": _approximations(config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kits": [
            name
            for name in (
                config.get("kit"),
                config.get("feddisc.kit") if config["method"] == "feddisc" else "",
            )
            if name
        ],
        "kit_sha256": _kit_sha256(folder),
        "config": config,
    }


def _kit_sha256(folder: Path) -> str:
    """Over all files of a kit that the run came from."""
    file = folder / "kit.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _approximations(config: dict[str, Any]) -> list[str]:
    """What was sampled otherwise than the papers do, for speed."""
    found = []
    if (solver := config.get("synthesis.solver", "ddim")) != "ddim":
        found.append(f"solver {solver}")
    interval = (config.get("synthesis.guided-from", 0), config.get("synthesis.guided-to", 1000))
    if interval != (0, 1000):
        found.append("guidance at timesteps {} to {} alone".format(*interval))
    if (every := config.get("synthesis.cache-interval", 1)) > 1:
        found.append(f"the UNet's inner blocks at one of {every} steps")
    if config["method"] in ("fedlmg", "fedcado"):
        if config.get(f"{config['method']}.gradient", "full") != "full":
            found.append("the classifier's gradient at x0")
        if config.get("synthesis.small-decoder", ""):
            found.append("guidance through a small decoder")
    return found


def read_metrics(folder: Path) -> dict[str, Any]:
    """`metrics.json` of a run that has finished.

    Raises:
        DamageError: it is missing, or not as `write_report` wrote it.
    """
    metrics = read_json(folder / "metrics.json", cure=MADE_ANEW)
    good = all(isinstance(metrics.get(key), kind) for key, kind in _METRICS.items())
    if good:
        rows = [*metrics["accuracy"].values(), *metrics["clients"].values(), metrics["server"]]
        good = all(isinstance(row, dict) for row in rows)
        good = good and all("average" in row for row in metrics["accuracy"].values())
        good = good and set(metrics["accuracy"]) <= set(metrics["over_images"])
        good = good and {"synthetic_images", "seconds_per_image"} <= set(metrics["server"])
    if not good:
        raise DamageError(f"{folder / 'metrics.json'} is not as it was written; {MADE_ANEW}")
    return metrics


def _timing(line: str) -> dict[str, Any] | None:
    """A line of `timings.jsonl`; None for one that a crash cut short."""
    try:
        timing = json.loads(line)
        return {key: float(timing[key]) for key in ("images", "seconds")}
    except (KeyError, RecursionError, TypeError, ValueError):
        return None


def _accuracy(matrix: list[list[int]]) -> float:
    """Top-1 accuracy in percent."""
    cells = np.array(matrix)
    return float(100 * np.trace(cells) / max(cells.sum(), 1))


def over_images(matrices: Mapping[str, list[list[int]]]) -> float:
    """Top-1 accuracy in percent over all clients' test images together, as OSCAR's tables have it."""
    if not matrices:
        return float("nan")
    return _accuracy(np.sum([np.array(matrix) for matrix in matrices.values()], axis=0).tolist())


def _mean(by_client: dict[str, float]) -> float:
    return float(np.mean(list(by_client.values()))) if by_client else float("nan")


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, cure="remove it, and the same `osfl run` again makes what it was for")


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- The page ----


def human_bytes(count: float) -> str:
    """1234567 to '1.23 MB' (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError


def human_flops(count: float) -> str:
    """3.2e12 to '3.2 TFLOP'."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "0" if count == 0 else f"{count:.0f} FLOP"


@cache
def _page() -> Any:
    from jinja2 import Environment

    from osfl.run_folder.report_template import TEMPLATE

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    page.filters.update(bytes=human_bytes, flops=human_flops)
    return page.from_string(TEMPLATE)


def _shown(value: Any) -> Any:
    """What the page shows of a value: plain words, but for what is marked as safe (pictures)."""
    return plain(value, MOST_WORDS) if type(value) is str else value


def _render(folder: Path, metrics: dict[str, Any], classes: tuple[str, ...]) -> str:
    pictures, pictured = _pictures(folder, classes)
    return str(
        _page().render(
            m=metrics,
            names=list(metrics["clients"]),
            classes=classes,
            pictures=pictures,
            pictured=pictured,
            confusion=_confusion(metrics),
            upload=_total(metrics, "upload_bytes"),
        )
    )


def _total(metrics: dict[str, Any], key: str) -> float:
    return sum(about.get(key, 0) for about in metrics["clients"].values())


def _pictures(
    folder: Path, classes: tuple[str, ...]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The first image of every client and class, by client, then class, as a data URL of at most 128 px a side; and which classes these are."""
    from markupsafe import Markup
    from PIL import Image

    first: dict[str, dict[str, str]] = defaultdict(dict)
    for line in _lines(folder / "manifest.jsonl"):
        row = json.loads(line)
        first[row["client"]].setdefault(row["class"], row["file"])
    shown = [name for name in classes if any(name in files for files in first.values())][
        :MOST_PICTURED
    ]
    pictures: dict[str, dict[str, str]] = {client: {} for client in sorted(first)}
    for client, files in first.items():
        for name in files.keys() & shown:
            buffer = io.BytesIO()
            with Image.open(folder / files[name]) as image:
                image.thumbnail((128, 128))
                image.save(buffer, format="png")
            encoded = base64.b64encode(buffer.getvalue()).decode()
            pictures[client][name] = Markup(f"data:image/png;base64,{encoded}")
    return pictures, shown


def _confusion(metrics: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """The shown model's confusion matrix over all clients: rows of (images, percent of the row's); [] where no model is shown."""
    if not metrics["shown"]:
        return []
    cells = np.sum(
        [np.array(matrix) for matrix in metrics["confusion"][metrics["shown"]].values()], axis=0
    )
    shares = (100 * cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)).round().astype(int)
    return [
        list(zip(*rows, strict=True)) for rows in zip(cells.tolist(), shares.tolist(), strict=True)
    ]
