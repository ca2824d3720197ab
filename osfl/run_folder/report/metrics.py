"""What a run gives: `metrics.json` for machines, `report.html` for people."""

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
from osfl.run_folder.layout import ADAPTED, MADE_ANEW
from osfl.run_folder.report.page import render, scores
from osfl.util.files import DamageError, read_json, write_atomically

# Behind a model's name: what clients made of it
AND_ADAPTED = ", adapted"
Matrices = Mapping[str, list[list[int]]]  # of a model: confusion matrices by client
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
        kit_download_bytes: what each client had to fetch of the kit before it could begin; None
            where that is not known.

    Returns:
        the metrics.
    """
    metrics = gather(folder, kit_download_bytes)
    write_atomically(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
    page = render(folder, metrics, classes, _lines(folder / "manifest.jsonl"))
    write_atomically(folder / "report.html", page.encode())
    return metrics


def gather(
    folder: Path, kit_download_bytes: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """The figures of a run."""
    fetched = kit_download_bytes or {}
    config = _json(folder / "config.json")
    status = _json_or_nothing(folder / "status.json")
    tests = _tests(folder / "tests")
    withheld = _json_or_nothing(folder / "withheld.json").get("clients", [])
    rounds = _rounds(folder)
    clients = _clients(folder, tests, status, fetched, config)
    for client, about in rounds["costs"].items():  # FedAvg and its kin: summed over the rounds
        both = clients[client].get("download_bytes", 0) + about["download_bytes"]
        clients[client].update(about, download_bytes=both)
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
        "epsilons": sorted({a["epsilon"] for a in clients.values() if "epsilon" in a}),
        "delta": max((a.get("delta", 0.0) for a in clients.values()), default=0.0),
        "kit_not_counted": any(size is None for size in fetched.values()),
        "warnings": status.get("warnings", []),
        "agreement": _json_or_nothing(folder / "agreement.json").get("clients", {}),
        "influence": _influence(folder, config),
        "withheld": withheld,
        "not_tested": _not_tested(
            tests, set(split_names(config.get("left-out", "")) or clients) - set(withheld)
        ),
        "server": _server(folder),
        "versions": _versions(),
        "platform": platform.platform(),
        "approximations": approximations(config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_kits(folder, config),
        "config": config,
    }


def _tests(folder: Path) -> dict[str, Matrices]:
    """By the models' names; a model before what clients made of it."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stem)
    return {file.stem.replace(ADAPTED, AND_ADAPTED): _json(file) for file in files}


def _adapted(tests: Mapping[str, Matrices]) -> dict[str, int]:
    """Of each global model, how many clients told of what they made of it."""
    return {
        name.removesuffix(AND_ADAPTED): len(found)
        for name, found in tests.items()
        if name.endswith(AND_ADAPTED)
    }


def _sends(method: str) -> str:
    """What left a client for the global model, in words; "" where nothing did."""
    sends = METHODS[method]
    return sends.sends if sends.payload or sends.rounds else ""


def _accuracies(tests: Mapping[str, Matrices], method: str) -> dict[str, Any]:
    """All that follows from the confusion matrices, of one model and of the clients together."""
    accuracy = {}
    for name, by_client in tests.items():
        accuracy[name] = {client: _accuracy(matrix) for client, matrix in by_client.items()}
    averages = {name: _mean(by_client) for name, by_client in accuracy.items()}
    # FT where there is one: by their accuracy on the clients' test images nobody could choose
    shown = ""
    if any(accuracy.values()) and method != "local":
        shown = "FT" if "FT" in accuracy else next(iter(accuracy))
    return {
        "accuracy": {
            name: {**by_client, "average": averages[name]} for name, by_client in accuracy.items()
        },
        "shown": shown,
        "over_images": {name: over_images(by_client) for name, by_client in tests.items()},
        "scores": {name: _scores(by_client) for name, by_client in tests.items()},
        "average": averages[shown] if shown else _mean(averages),
    }


def _clients(
    folder: Path,
    tests: Mapping[str, Matrices],
    status: Mapping[str, Any],
    fetched: Mapping[str, int | None],
    config: Mapping[str, Any],
) -> dict[str, dict[str, float]]:
    """What every client sent and received, and what its payload cost it."""
    clients: dict[str, dict[str, float]] = defaultdict(dict)
    # Not those that only judge images, and stay here
    models = [file for file in (folder / "models").glob("*.safetensors") if file.stem in tests]
    # Local's are the payloads
    models = models or list((folder / "payloads").glob("*.pb"))
    sent = sum(file.stat().st_size for file in models)
    # To be adapted it is sent once more
    sent *= 2 if config.get("adaptation.steps") else 1
    tested = {client for by_client in tests.values() for client in by_client}
    for client in tested:
        clients[client]["download_bytes"] = (fetched.get(client) or 0) + sent
        clients[client]["upload_bytes"] = 0
    # One that tested nothing is in the tables too, as not tested
    for client in status.get("clients", {}):
        clients[client].setdefault("upload_bytes", 0)
    for file in sorted((folder / "payloads").glob("*.json")):
        about = _json(file)
        clients[file.stem].update(about["costs"], upload_bytes=about["bytes"])
    return clients


def _not_tested(tests: Mapping[str, Matrices], clients: Iterable[str]) -> list[str]:
    """Models are compared where all were tested.

    Args:
        clients: that were to test.
    """
    # Of what it made for itself a client need not tell
    models = [set(found) for name, found in tests.items() if not name.endswith(AND_ADAPTED)]
    everywhere = set.intersection(*models) if models else set()
    return sorted(set(clients) - everywhere)


def _influence(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What each client gives; nothing where the run did not ask, and a file is of another one."""
    asked = config.get("influence", False)
    return _json_or_nothing(folder / "influence" / "clients.json") if asked else {}


def _rounds(folder: Path) -> dict[str, Any]:
    """The record of the last round; of a method without rounds, what stands for it."""
    done = folder / "rounds" / "done.json"
    if done.is_file():
        return _json(done)
    return {"round": int(any((folder / "payloads").glob("*.pb"))), "costs": {}}


def _seconds_of_rounds(times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How long each round took.

    Args:
        times: the number of every round, and the seconds from the first one's begin to its end.
            The first entry may be of a later round, where an older version did those before it.
    """
    found = []
    number = 0
    seconds = 0.0
    for one in times:
        each = (one["seconds"] - seconds) / max(1, one["round"] - number)
        found.append({"round": one["round"], "seconds": max(0.0, each)})
        number = one["round"]
        seconds = one["seconds"]
    return found


def _seconds_of_phases(phases: Sequence[Mapping[str, Any]], end: float) -> list[dict[str, Any]]:
    """How long each phase took.

    Args:
        phases: name and begin of each, in seconds since 1970.
        end: of the last one.
    """
    begins = [*(phase["began"] for phase in phases), end]
    return [
        # A clock may be set back
        {"phase": phase["phase"], "seconds": max(0.0, after - phase["began"])}
        for phase, after in zip(phases, begins[1:], strict=True)
    ]


def _server(folder: Path) -> dict[str, Any]:
    """What the server's half took."""
    timings = [t for line in _lines(folder / "timings.jsonl") if (t := _timing(line))]
    images = sum(t["images"] for t in timings)
    seconds = sum(t["seconds"] for t in timings)
    trained = {f.stem: _json(f) for f in sorted((folder / "models").glob("*.json"))}
    return {
        "synthetic_images": len(_lines(folder / "manifest.jsonl")),
        "seconds_per_image": seconds / images if images else None,
        "synthesis_seconds": seconds,
        "training_seconds": {name: about["seconds"] for name, about in trained.items()},
        # Nobody counts them over rounds
        "trained_images": {n: about["images"] for n, about in trained.items() if "images" in about},
    }


def _versions() -> dict[str, str]:
    found = {package: _version(package) for package in PACKAGES}
    known = {package: number for package, number in found.items() if number}
    return {"python": platform.python_version(), **known}


def _kits(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kits whose files the run used, and the SHA-256 over the list of these files."""
    file = folder / "kit.json"
    used = _json_or_nothing(file)
    kit = config.get("kit")
    sampling = config.get("feddisc.kit") if config["method"] == "feddisc" else kit
    kits = {"payloads": sampling, "images": sampling, "models": kit}
    names = list(dict.fromkeys(name for step, name in kits.items() if name and used.get(step)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if names else ""
    return {"kits": names, "kit_sha256": digest}


def read_metrics(folder: Path) -> dict[str, Any]:
    """`metrics.json` of a run that has finished.

    Raises:
        DamageError: it is missing, or not as `write_report` wrote it.
    """
    metrics = read_json(folder / "metrics.json", cure=MADE_ANEW)
    if not _are_metrics(metrics):
        raise DamageError(f"{folder / 'metrics.json'} is not as it was written; {MADE_ANEW}")
    return metrics


def _are_metrics(metrics: dict[str, Any]) -> bool:
    """Check the types of all that `osfl show` prints and `osfl compare` adds up."""
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
    """A line of `timings.jsonl`; None for one that a crash cut short."""
    try:
        timing = json.loads(line)
        return {key: float(timing[key]) for key in ("images", "seconds")}
    except (KeyError, RecursionError, TypeError, ValueError):
        return None


def _accuracy(matrix: list[list[int]] | np.ndarray) -> float:
    """Top-1 accuracy in percent."""
    cells = np.array(matrix)
    return float(100 * np.trace(cells) / max(cells.sum(), 1))


def over_images(matrices: Matrices) -> float:
    """Top-1 accuracy in percent over all clients' test images, as OSCAR's tables have it."""
    return _accuracy(_together(matrices)) if matrices else float("nan")


def _scores(matrices: Matrices) -> dict[str, float | None]:
    """Balanced accuracy and macro-F1 over all clients' test images; None where no client told."""
    if not matrices:
        return {"balanced_accuracy": None, "macro_f1": None}
    return {**scores(_together(matrices))}


def _together(matrices: Matrices) -> np.ndarray:
    """The confusion matrix of all clients' test images; of no client, without a class."""
    if not matrices:
        return np.zeros((0, 0), dtype=int)
    return np.sum([np.array(matrix) for matrix in matrices.values()], axis=0)


def _mean(by_client: dict[str, float]) -> float:
    return float(np.mean(list(by_client.values()))) if by_client else float("nan")


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, cure="remove it, and the same `osfl run` again makes what it was for")


def _json_or_nothing(file: Path) -> dict[str, Any]:
    return _json(file) if file.is_file() else {}


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
