"""What a run gives: `metrics.json` for machines, `report.html` for people (one file, opens offline)."""

import base64
import io
import json
import platform
import time
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from osfl.files import write_atomically

PACKAGES = ("osfl", "flwr", "torch", "torchvision", "diffusers", "transformers", "datasets", "protobuf")


def write_report(
    folder: Path, classes: tuple[str, ...], kit_download_bytes: Mapping[str, int | None] | None = None
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


def gather(folder: Path, kit_download_bytes: Mapping[str, int | None] | None = None) -> dict[str, Any]:
    """The figures of a run."""
    fetched = kit_download_bytes or {}
    config = _json(folder / "config.json")
    tests = {f.stem: _json(f) for f in sorted((folder / "tests").glob("*.json"))}
    accuracy = {name: {client: _accuracy(matrix) for client, matrix in by_client.items()} for name, by_client in tests.items()}
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
        clients[client]["download_bytes"] = (fetched.get(client) or 0) + sum(file.stat().st_size for file in models)
        clients[client]["upload_bytes"] = 0
    known = _json(folder / "status.json")["clients"] if (folder / "status.json").is_file() else {}
    for client in known:  # one that tested nothing is in the tables too, as not tested
        clients[client].setdefault("upload_bytes", 0)
    for file in sorted((folder / "payloads").glob("*.json")):
        about = _json(file)
        clients[file.stem].update(about["costs"], upload_bytes=about["bytes"])
    any_payload = any((folder / "payloads").glob("*.pb"))
    rounds: dict[str, Any] = (
        _json(done) if (done := folder / "rounds" / "done.json").is_file() else {"round": int(any_payload), "costs": {}}
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
        "accuracy": {name: {**by_client, "average": _mean(by_client)} for name, by_client in accuracy.items()},
        "shown": shown,
        "average": _mean(accuracy[shown]) if shown else _mean({name: _mean(row) for name, row in accuracy.items()}),
        "rounds": rounds["round"],
        "confusion": tests,
        "clients": dict(sorted(clients.items())),
        "kit_not_counted": any(size is None for size in fetched.values()),
        "not_tested": sorted(set(clients) - everywhere),
        "server": {
            "synthetic_images": len(_lines(folder / "manifest.jsonl")),
            "seconds_per_image": seconds / images if images else None,
            "synthesis_seconds": seconds,
            "training_seconds": {name: about["seconds"] for name, about in trained.items()},
        },
        "versions": {"python": platform.python_version(), **{p: v for p in PACKAGES if (v := _version(p))}},
        "platform": platform.platform(),
        "approximations": _approximations(config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kits": [
            name for name in (config.get("kit"), config.get("feddisc.kit") if config["method"] == "feddisc" else "") if name
        ],
        "kit_sha256": config.pop("kit-sha256", ""),
        "config": config,
    }


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


def _timing(line: str) -> dict[str, Any] | None:
    """A line of `timings.jsonl`; None for one that a crash cut short."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _accuracy(matrix: list[list[int]]) -> float:
    """Top-1 accuracy in percent."""
    cells = np.array(matrix)
    return float(100 * np.trace(cells) / max(cells.sum(), 1))


def _mean(by_client: dict[str, float]) -> float:
    return float(np.mean(list(by_client.values()))) if by_client else float("nan")


def _json(file: Path) -> Any:
    return json.loads(file.read_text())


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


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


def _render(folder: Path, metrics: dict[str, Any], classes: tuple[str, ...]) -> str:
    from jinja2 import Environment

    from osfl.report_template import TEMPLATE

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(bytes=human_bytes, flops=human_flops)
    names = list(metrics["clients"])
    return page.from_string(TEMPLATE).render(
        m=metrics,
        names=names,
        grid=_grid(folder, classes),
        confusion=_confusion(metrics, classes),
        upload=_total(metrics, "upload_bytes"),
    )


def _total(metrics: dict[str, Any], key: str) -> float:
    return sum(about.get(key, 0) for about in metrics["clients"].values())


def _png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return base64.b64encode(buffer.getvalue()).decode()


def _grid(folder: Path, classes: tuple[str, ...], most: int = 12) -> str:
    """The first image of every class (columns) and client (rows), as a base64 PNG; empty without synthetic images."""
    from matplotlib.figure import Figure
    from PIL import Image

    first: dict[tuple[str, str], str] = {}
    for line in _lines(folder / "manifest.jsonl"):
        row = json.loads(line)
        first.setdefault((row["client"], row["class"]), row["file"])
    if not first:
        return ""
    clients, shown = (
        sorted({client for client, _ in first}),
        [name for name in classes if any(c == name for _, c in first)][:most],
    )
    figure = Figure(figsize=(0.85 * len(shown) + 1.2, 0.85 * len(clients) + 0.4))
    axes, size = figure.subplots(), 0.95  # one pair of axes for all: a pair for each image takes seconds
    for (client, name), file in first.items():
        if name in shown:
            left, top = shown.index(name), clients.index(client)
            with Image.open(folder / file) as image:
                axes.imshow(image, extent=(left, left + size, top + size, top))
    axes.set(xlim=(0, len(shown)), ylim=(len(clients), 0))
    axes.set_xticks([j + size / 2 for j in range(len(shown))], shown, fontsize=8)
    axes.set_yticks([i + size / 2 for i in range(len(clients))], clients, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return _png(figure)


def _confusion(metrics: dict[str, Any], classes: tuple[str, ...]) -> str:
    """The shown model's confusion matrix over all clients, rows normalised, as a base64 PNG."""
    from matplotlib.figure import Figure

    if not metrics["shown"]:
        return ""
    cells = np.sum([np.array(matrix) for matrix in metrics["confusion"][metrics["shown"]].values()], axis=0)
    share = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    size = max(3.6, 0.42 * len(classes))
    figure = Figure(figsize=(size, size))
    panel = figure.subplots()
    panel.imshow(share, cmap="Blues", vmin=0, vmax=1)
    panel.set(xlabel="predicted", ylabel="true")
    panel.set_xticks(range(len(classes)), classes, rotation=60, ha="right", fontsize=8)
    panel.set_yticks(range(len(classes)), classes, fontsize=8)
    if len(classes) <= 12:
        for (i, j), value in np.ndenumerate(cells):
            if value:
                panel.text(j, i, value, ha="center", va="center", fontsize=7, color="white" if share[i, j] > 0.5 else "black")
    return _png(figure)
