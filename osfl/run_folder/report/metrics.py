"""A run's metrics, gathered from its folder into `metrics.json` and `report.html`."""

import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from osfl.config import approximations, split_names
from osfl.methods import METHODS
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.model_store import ADAPTED
from osfl.run_folder.report.page import render, scores
from osfl.util.files import CorruptFileError, read_json, write_atomically

# Follows a model's name, for the results of the clients' adapted models
ADAPTED_SUFFIX = ", adapted"
# A model's confusion matrices by client
Matrices = Mapping[str, list[list[int]]]
# Keys of `metrics.json` that its readers require, with their types
_METRICS = {
    "method": str,
    "accuracy": dict,
    "over_images": dict,
    "clients": dict,
    "server": dict,
    "rounds": int,
    "versions": dict,
    "not_tested": list,
    "confusion": dict,
    "config": dict,
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
        kit_download_bytes: the size of the kit's parts that each client needs, in bytes; None if
            unknown.

    Returns:
        the metrics.
    """
    run = RunFolder(folder)
    metrics = gather(folder, kit_download_bytes)
    write_atomically(run.metrics_file, (json.dumps(metrics, indent=1) + "\n").encode())
    page = render(folder, metrics, classes, _lines(run.manifest_file))
    write_atomically(run.report_file, page.encode())
    return metrics


def gather(
    folder: Path, kit_download_bytes: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Gather the metrics of a run."""
    kit_bytes = kit_download_bytes or {}
    run = RunFolder(folder)
    config = _json(run.config_file)
    status = _json_or_empty(run.status_file)
    tests = _tests(run)
    withheld = _json_or_empty(run.withheld_file).get("clients", [])
    rounds = _rounds(run)
    clients = _clients(run, tests, status, kit_bytes, config)
    # Costs of iterative baselines, summed over the rounds
    for client, costs in rounds["costs"].items():
        download_bytes = clients[client].get("download_bytes", 0) + costs["download_bytes"]
        clients[client].update(costs, download_bytes=download_bytes)
        clients[client].setdefault("upload_bytes", 0)
    return {
        "job_id": folder.name,
        "method": config["method"],
        "seed": config["seed"],
        **_accuracies(tests, config["method"]),
        "rounds": rounds["round"],
        "round_seconds": _seconds_of_rounds(rounds.get("times", [])),
        "phases": _seconds_of_phases(status.get("phases", []), time.time()),
        "confusion": tests,
        "adapted": _adapted(tests),
        "clients": dict(sorted(clients.items())),
        "sends": _sends(config["method"]),
        "reveals": METHODS[config["method"]].reveals,
        "epsilons": sorted({row["epsilon"] for row in clients.values() if "epsilon" in row}),
        "delta": max((row.get("delta", 0.0) for row in clients.values()), default=0.0),
        "kit_not_counted": any(size is None for size in kit_bytes.values()),
        "warnings": status.get("warnings", []),
        "agreement": _json_or_empty(run.scores_file).get("clients", {}),
        "influence": _influence(run, config),
        "withheld": withheld,
        "not_tested": _not_tested(
            tests, set(split_names(config.get("left-out", "")) or clients) - set(withheld)
        ),
        "server": _server(run),
        "versions": _versions(),
        "platform": platform.platform(),
        "approximations": approximations(config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_kits(run, config),
        "config": config,
    }


def _tests(run: RunFolder) -> dict[str, Matrices]:
    """Read the tests by model; a global model comes before its adapted ones."""
    return {file.stem.replace(ADAPTED, ADAPTED_SUFFIX): _json(file) for file in run.test_files()}


def _adapted(tests: Mapping[str, Matrices]) -> dict[str, int]:
    """Count for each global model the clients that reported a test of their adapted model."""
    return {
        name.removesuffix(ADAPTED_SUFFIX): len(by_client)
        for name, by_client in tests.items()
        if name.endswith(ADAPTED_SUFFIX)
    }


def _sends(method: str) -> str:
    """Return the text that says what left the clients; "" if nothing did."""
    row = METHODS[method]
    return row.sends if row.payload or row.rounds else ""


def _accuracies(tests: Mapping[str, Matrices], method: str) -> dict[str, Any]:
    """Compute all metrics of the confusion matrices, by model and for all clients together."""
    accuracy = {}
    for name, by_client in tests.items():
        accuracy[name] = {client: _accuracy(matrix) for client, matrix in by_client.items()}
    averages = {name: _mean(by_client) for name, by_client in accuracy.items()}
    # FT if there is one: a choice by accuracy on the clients' test images would be biased
    shown_model = ""
    if any(accuracy.values()) and method != "local":
        shown_model = "FT" if "FT" in accuracy else next(iter(accuracy))
    return {
        "accuracy": {
            name: {**by_client, "average": averages[name]} for name, by_client in accuracy.items()
        },
        "shown": shown_model,
        "over_images": {name: accuracy_over_images(by_client) for name, by_client in tests.items()},
        "scores": {name: _scores(by_client) for name, by_client in tests.items()},
        "average": averages[shown_model] if shown_model else _mean(averages),
    }


def _clients(
    run: RunFolder,
    tests: Mapping[str, Matrices],
    status: Mapping[str, Any],
    kit_bytes: Mapping[str, int | None],
    config: Mapping[str, Any],
) -> dict[str, dict[str, float]]:
    """Return the traffic of every client, and the costs of its payload."""
    clients: dict[str, dict[str, float]] = defaultdict(dict)
    # Models without a test only score images, and stay on the server
    models = [file for file in run.model_files() if file.stem in tests]
    # The models of method local are the payloads
    models = models or run.payload_files()
    model_bytes = sum(file.stat().st_size for file in models)
    # Each model is sent again for its adaptation
    model_bytes *= 2 if config.get("adaptation.steps") else 1
    testers = {client for by_client in tests.values() for client in by_client}
    for client in testers:
        clients[client]["download_bytes"] = (kit_bytes.get(client) or 0) + model_bytes
        clients[client]["upload_bytes"] = 0
    # Clients without a test appear in the tables as not tested
    for client in status.get("clients", {}):
        clients[client].setdefault("upload_bytes", 0)
    for file in run.payload_records():
        record = _json(file)
        clients[file.stem].update(record["costs"], upload_bytes=record["bytes"])
    return clients


def _not_tested(tests: Mapping[str, Matrices], clients: Iterable[str]) -> list[str]:
    """List the clients that did not test every global model, and so drop out of comparisons.

    Args:
        clients: the clients that should have tested.
    """
    # Clients need not report on their adapted models
    testers = [
        set(by_client) for name, by_client in tests.items() if not name.endswith(ADAPTED_SUFFIX)
    ]
    complete = set.intersection(*testers) if testers else set()
    return sorted(set(clients) - complete)


def _influence(run: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the clients' contributions.

    Without the setting the result is {}: a file that exists anyway is an earlier run's.
    """
    if not config.get("influence", False):
        return {}
    return _json_or_empty(run.contributions_file)


def _rounds(run: RunFolder) -> dict[str, Any]:
    """Read the record of the last round, or make one for a one-shot method."""
    if run.round_record_file.is_file():
        return _json(run.round_record_file)
    return {"round": int(bool(run.payload_files())), "costs": {}}


def _seconds_of_rounds(times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute the duration of each round.

    Args:
        times: the number of every round, and the seconds from the first round's start to its end.
            The first entry may be a later round, if an older version ran those before it.
    """
    durations = []
    number = 0
    seconds = 0.0
    for time_of_round in times:
        rounds = max(1, time_of_round["round"] - number)
        duration = (time_of_round["seconds"] - seconds) / rounds
        durations.append({"round": time_of_round["round"], "seconds": max(0.0, duration)})
        number = time_of_round["round"]
        seconds = time_of_round["seconds"]
    return durations


def _seconds_of_phases(phases: Sequence[Mapping[str, Any]], end: float) -> list[dict[str, Any]]:
    """Compute the duration of each phase.

    Args:
        phases: name and start of each, in seconds since 1970.
        end: the end of the last phase.
    """
    starts = [*(phase["began"] for phase in phases), end]
    return [
        # A clock may be set back
        {"phase": phase["phase"], "seconds": max(0.0, next_start - phase["began"])}
        for phase, next_start in zip(phases, starts[1:], strict=True)
    ]


def _server(run: RunFolder) -> dict[str, Any]:
    """Return the server's costs."""
    timings = [timing for line in _lines(run.timings_file) if (timing := _timing(line))]
    images = sum(timing["images"] for timing in timings)
    seconds = sum(timing["seconds"] for timing in timings)
    models = {file.stem: _json(file) for file in run.model_records()}
    return {
        "synthetic_images": len(_lines(run.manifest_file)),
        "seconds_per_image": seconds / images if images else None,
        "synthesis_seconds": seconds,
        "training_seconds": {name: record["seconds"] for name, record in models.items()},
        # Iterative baselines do not count them
        "trained_images": {
            name: record["images"] for name, record in models.items() if "images" in record
        },
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if number := _version(package):
            versions[package] = number
    return versions


def _kits(run: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kits whose files the run used, and the SHA-256 over the list of these files."""
    digests = _json_or_empty(run.kit_file)
    kit = config.get("kit")
    sampling = config.get("feddisc.kit") if config["method"] == "feddisc" else kit
    kits = {"payloads": sampling, "images": sampling, "models": kit}
    names = list(dict.fromkeys(name for step, name in kits.items() if name and digests.get(step)))
    digest = hashlib.sha256(run.kit_file.read_bytes()).hexdigest() if names else ""
    return {"kits": names, "kit_sha256": digest}


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read `metrics.json` of a finished run.

    Raises:
        CorruptFileError: it is missing or corrupt.
    """
    file = RunFolder(folder).metrics_file
    metrics = read_json(file, cure=HINT_RECREATE)
    if not _are_metrics(metrics):
        raise CorruptFileError(f"{file} is corrupt; {HINT_RECREATE}")
    return metrics


def _are_metrics(metrics: dict[str, Any]) -> bool:
    """Check the types of all that `osfl show` prints and `osfl compare` aggregates."""
    if not all(isinstance(metrics.get(key), kind) for key, kind in _METRICS.items()):
        return False
    accuracy = metrics["accuracy"]
    rows = [*accuracy.values(), *metrics["clients"].values()]
    if not all(isinstance(row, dict) and all(map(_is_number, row.values())) for row in rows):
        return False
    warnings = metrics.get("warnings", [])
    if not isinstance(warnings, list):
        return False
    texts = [*metrics["not_tested"], *warnings, *metrics["versions"].values()]
    server = metrics["server"]
    seconds = server.get("seconds_per_image", "")
    return (
        all(isinstance(text, str) for text in texts)
        and all("average" in row for row in accuracy.values())
        and set(accuracy) <= set(metrics["over_images"])
        and all(map(_is_number, metrics["over_images"].values()))
        and isinstance(server.get("synthetic_images"), int)
        and (seconds is None or _is_number(seconds))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _timing(line: str) -> dict[str, Any] | None:
    """Parse a line of `timings.jsonl`; None if a crash truncated it."""
    try:
        timing = json.loads(line)
        return {key: float(timing[key]) for key in ("images", "seconds")}
    except (KeyError, RecursionError, TypeError, ValueError):
        return None


def _accuracy(matrix: list[list[int]] | np.ndarray) -> float:
    """Compute the top-1 accuracy in percent."""
    cells = np.array(matrix)
    return float(100 * np.trace(cells) / max(cells.sum(), 1))


def accuracy_over_images(matrices: Matrices) -> float:
    """Compute the top-1 accuracy in percent over all clients' test images, as in OSCAR's tables."""
    return _accuracy(_pooled(matrices)) if matrices else float("nan")


def _scores(matrices: Matrices) -> dict[str, float | None]:
    """Compute balanced accuracy and macro-F1 over all clients' test images; None without any."""
    if not matrices:
        return {"balanced_accuracy": None, "macro_f1": None}
    return {**scores(_pooled(matrices))}


def _pooled(matrices: Matrices) -> np.ndarray:
    """Sum the confusion matrices of at least one client."""
    return np.sum([np.array(matrix) for matrix in matrices.values()], axis=0)


def _mean(by_client: dict[str, float]) -> float:
    return float(np.mean(list(by_client.values()))) if by_client else float("nan")


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, cure="remove it, and repeat the same `osfl run` to recreate it")


def _json_or_empty(file: Path) -> dict[str, Any]:
    return _json(file) if file.is_file() else {}


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
