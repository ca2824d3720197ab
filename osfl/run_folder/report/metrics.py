"""A run's metrics, gathered from its folder into `metrics.json` and `report.html`."""

import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from osfl.config import approximations, split_names
from osfl.methods import METHODS
from osfl.metrics import SCORE_FIGURES
from osfl.run_folder.job_files import HINT_RECREATE
from osfl.run_folder.layout import RunFolder, read_rows
from osfl.run_folder.model_store import ADAPTED, main_model
from osfl.run_folder.report.curves import curves_of, read_figures
from osfl.run_folder.report.gain import gain_rows, gains_of
from osfl.run_folder.report.kinds import alternatives, kind_rows, with_worth
from osfl.run_folder.report.page import render, scores
from osfl.run_folder.report.sentence import opening_sentence
from osfl.run_folder.report.timeline import timeline_of
from osfl.run_folder.report.versions import earlier_versions
from osfl.run_folder.status import DROPPED, TEST_ONLY_STATE
from osfl.run_folder.version import version_of
from osfl.util.files import CorruptFileError, read_json, write_atomically

# Follows a model's name, for the results of the clients' personalized models
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
    write_atomically(run.metrics_file, _text_of(metrics).encode())
    curves = curves_of(run, metrics, classes, ADAPTED_SUFFIX)
    page = render(folder, metrics, classes, _lines(run.manifest_file), curves)
    write_atomically(run.report_file, page.encode())
    return metrics


def _text_of(metrics: Mapping[str, Any]) -> str:
    """Return metrics as JSON, indented but for the confusion matrices.

    Indented, those of a thousand classes have millions of lines, and take most of a report's time.
    """
    parts = [
        f"{json.dumps(key)}: {json.dumps(value, indent=None if key == 'confusion' else 1)}"
        for key, value in metrics.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def gather(
    folder: Path, kit_download_bytes: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """Gather the metrics of a run."""
    kit_bytes = kit_download_bytes or {}
    run = RunFolder(folder)
    config = _json(run.config_file)
    status = _json_or_empty(run.status_file)
    source = run.payload_source()
    tests = _tests(run)
    test_only = _test_only(run, status)
    rounds = _rounds(run)
    clients = _clients(run, tests, status, kit_bytes, config)
    _add_rounds(clients, rounds["costs"], test_only)
    kinds = _kinds(run, clients)
    results = _results(run, tests, config, clients)
    contributions = _contributions(run, config)
    accuracy = results["accuracy"].get(results["shown"], {})
    metrics = {
        "job_id": folder.name,
        "method": config["method"],
        "seed": config["seed"],
        **results,
        # Only of a mixed run
        **({"kinds": with_worth(kinds, accuracy, contributions)} if kinds else {}),
        "test_only": test_only,
        # The job that made the payloads, if it was not this one
        "payloads_from": "" if source is None or source.job == folder.name else source.job,
        "forgotten": len(run.forgotten_files()),
        "version": _model_version(run, clients),
        "rounds": rounds["round"],
        "round_seconds": _seconds_of_rounds(rounds.get("times", [])),
        **_times(status, time.time()),
        "clients": dict(sorted(clients.items())),
        **_payloads(config, kinds),
        "epsilons": sorted({row["epsilon"] for row in clients.values() if "epsilon" in row}),
        "delta": max((row.get("delta", 0.0) for row in clients.values()), default=0.0),
        "kit_not_counted": any(size is None for size in kit_bytes.values()),
        "warnings": status.get("warnings", []),
        "agreement": _json_or_empty(run.scores_file).get("clients", {}),
        "contributions": contributions,
        "server": _server(run),
        "versions": _versions(),
        "platform": platform.platform(),
        "approximations": approximations(config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_kits(run, config),
        "config": config,
    }
    return {**metrics, "summary": opening_sentence(metrics)}


def _model_version(run: RunFolder, clients: Collection[str]) -> dict[str, Any]:
    """Return the version of a continued run's models, and those before it; {} for other runs."""
    version = version_of(run, [file.stem for file in run.payload_files()])
    history = earlier_versions(run, clients, read_metrics) if version else []
    return {**version, "history": history} if version else {}


def _times(status: Mapping[str, Any], end: float) -> dict[str, Any]:
    """Return a run's phases and timeline until `end`, and the clients that a defense dropped."""
    times = status.get("times", {})
    return {
        "phases": _seconds_of_phases(status.get("phases", []), end),
        "timeline": timeline_of(status, end),
        "dropped": sorted(client for client, states in times.items() if DROPPED in states),
    }


def _add_rounds(
    clients: dict[str, dict[str, Any]],
    costs_of_rounds: Mapping[str, Mapping[str, Any]],
    test_only: Mapping[str, Any],
) -> None:
    """Add the costs of an iterative baseline's rounds to its clients'.

    Args:
        clients: the costs by client. Test-only clients are removed: they have no part in the run's.
        costs_of_rounds: by client.
        test_only: by client.
    """
    for client in test_only.keys() & clients.keys():
        if not clients[client].get("upload_bytes"):
            del clients[client]
    for client, costs in costs_of_rounds.items():
        download_bytes = clients[client].get("download_bytes", 0) + costs["download_bytes"]
        clients[client].update(costs, download_bytes=download_bytes)
        clients[client].setdefault("upload_bytes", 0)


def _results(
    run: RunFolder,
    tests: dict[str, Mapping[str, list[list[int]]]],
    config: dict[str, Any],
    clients: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the clients' tests say of the global models, and who did not test."""
    accuracies = _accuracies(tests, config["method"])
    withheld = _json_or_empty(run.withheld_file).get("clients", [])
    local_tests = _json_or_empty(run.local_tests_file)
    testers = set(split_names(config.get("held-out", "")) or clients)
    return {
        **accuracies,
        "figures": read_figures(run, config, ADAPTED_SUFFIX),
        "confusion": tests,
        "adapted": _count_personalized(tests),
        "gain": gains_of(local_tests, accuracies["accuracy"], ADAPTED_SUFFIX),
        "withheld": withheld,
        "not_tested": _not_tested(tests, testers - set(withheld)),
    }


def _test_only(run: RunFolder, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the test images and accuracies of test-only clients, also of those that failed."""
    states = status.get("clients", {})
    clients = [client for client, state in states.items() if state == TEST_ONLY_STATE]
    tests = _json_or_empty(run.tests_apart_file)
    clients += [client for by_client in tests.values() for client in by_client]
    rows = {}
    for client in sorted(set(clients)):
        matrices = {name: test[client] for name, test in tests.items() if client in test}
        images = max((int(np.sum(matrix)) for matrix in matrices.values()), default=0)
        accuracy = {name: _accuracy(matrix) for name, matrix in matrices.items()}
        rows[client] = {"images": images, "accuracy": accuracy}
    return rows


def _tests(run: RunFolder) -> dict[str, Matrices]:
    """Read the tests by model; a global model comes before its personalized ones."""
    return {file.stem.replace(ADAPTED, ADAPTED_SUFFIX): _json(file) for file in run.test_files()}


def _count_personalized(tests: Mapping[str, Matrices]) -> dict[str, int]:
    """Count for each global model the clients that reported a test of their personalized model."""
    return {
        name.removesuffix(ADAPTED_SUFFIX): len(by_client)
        for name, by_client in tests.items()
        if name.endswith(ADAPTED_SUFFIX)
    }


def _kinds(run: RunFolder, clients: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the figures of each kind of payload of a mixed run; [] of another run."""
    senders = [file.stem for file in run.payload_records()]
    kinds = {client: kind for client in senders if (kind := run.payload_kind(client))}
    if not kinds:
        return []
    return kind_rows(kinds, clients, [row["client"] for row in read_rows(run.manifest_file)])


def _payloads(config: Mapping[str, Any], kinds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the texts that say what left the clients, "" if nothing did, and what it reveals."""
    if kinds:
        return {field: alternatives(kinds, field) for field in ("sends", "reveals")}
    row = METHODS[config["method"]]
    if config.get("secure-sum"):
        sends = f"masked numbers, which add up to {row.sends}, of all clients together"
        return {"sends": sends, "reveals": f"of all clients together {row.reveals}"}
    return {"sends": row.sends if row.payload or row.rounds else "", "reveals": row.reveals}


def _accuracies(tests: Mapping[str, Matrices], method: str) -> dict[str, Any]:
    """Compute all metrics of the confusion matrices, by model and for all clients together."""
    accuracy = {}
    for name, by_client in tests.items():
        accuracy[name] = {client: _accuracy(matrix) for client, matrix in by_client.items()}
    averages = {name: _mean(by_client) for name, by_client in accuracy.items()}
    tested_models = [name for name, by_client in accuracy.items() if by_client]
    shown_model = ""
    if tested_models and METHODS[method].global_model:
        shown_model = main_model(tested_models)
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
    model_bytes *= 2 if config.get("personalization.steps") else 1
    testers = {client for by_client in tests.values() for client in by_client}
    for client in testers:
        clients[client]["download_bytes"] = (kit_bytes.get(client) or 0) + model_bytes
        clients[client]["upload_bytes"] = 0
    compared = _json_or_empty(run.local_tests_file)
    for client in compared.get("clients", {}):
        sent = [file.stat().st_size for file in models if file.stem == compared["model"]]
        clients[client]["download_bytes"] += sum(sent)
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
    # Clients need not report on their personalized models
    testers = [
        set(by_client) for name, by_client in tests.items() if not name.endswith(ADAPTED_SUFFIX)
    ]
    complete = set.intersection(*testers) if testers else set()
    return sorted(set(clients) - complete)


def _contributions(run: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the clients' contributions.

    Without the setting the result is {}: a file that exists anyway is an earlier run's.
    """
    if not config.get("client-contribution", False):
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
    timings = read_timings(run)
    images = sum(timing["images"] for timing in timings)
    seconds = sum(timing["seconds"] for timing in timings)
    models = {file.stem: _json(file) for file in run.model_records()}
    memory = [record["peak_memory_mb"] for record in models.values() if "peak_memory_mb" in record]
    return {
        "synthetic_images": sum(1 for _ in _lines(run.manifest_file)),
        "seconds_per_image": seconds / images if images else None,
        "synthesis_seconds": seconds,
        "training_seconds": {name: record["seconds"] for name, record in models.items()},
        # Iterative baselines do not count them
        "trained_images": {
            name: record["images"] for name, record in models.items() if "images" in record
        },
        # Of the server's process, until its last model; earlier versions did not store it
        "peak_memory_mb": max(memory, default=None),
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
    sampling = config.get(f"{METHODS[config['method']].section}.kit") or kit
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
    metrics: dict[str, Any] = read_json(file, hint=HINT_RECREATE)
    if not are_metrics(metrics):
        raise CorruptFileError(f"{file} is corrupt; {HINT_RECREATE}")
    return metrics


def are_metrics(metrics: Mapping[str, Any]) -> bool:
    """Check the types of all that `osfl show` prints and `osfl compare` aggregates."""
    if not all(isinstance(metrics.get(key), kind) for key, kind in _METRICS.items()):
        return False
    accuracy = metrics["accuracy"]
    rows = [*accuracy.values(), *metrics["clients"].values()]
    if not all(isinstance(row, dict) and all(map(_is_number, row.values())) for row in rows):
        return False
    if not _are_test_figures(metrics.get("gain", {}), metrics.get("test_only", {})):
        return False
    if not _are_score_figures(metrics.get("figures", {})):
        return False
    warnings = metrics.get("warnings", [])
    withheld = metrics.get("withheld", [])
    if not isinstance(warnings, list) or not isinstance(withheld, list):
        return False
    texts = [*metrics["not_tested"], *withheld, *warnings, *metrics["versions"].values()]
    server = metrics["server"]
    seconds = server.get("seconds_per_image", "")
    memory = server.get("peak_memory_mb")
    return (
        all(isinstance(text, str) for text in texts)
        and all("average" in row for row in accuracy.values())
        and set(accuracy) <= set(metrics["over_images"])
        and all(map(_is_number, metrics["over_images"].values()))
        and isinstance(server.get("synthetic_images"), int)
        and (seconds is None or _is_number(seconds))
        and (memory is None or _is_number(memory))
    )


def _are_test_figures(gain: object, test_only: object) -> bool:
    """Check the figures of local-only models and of test-only clients."""
    try:
        rows = list(gain_rows(gain).values())  # type: ignore[arg-type]
        shown = [[row[key] for key in ("local", "points", "low", "high")] for row in rows]
        shown += [list(row["accuracy"].values()) for row in test_only.values()]  # type: ignore[attr-defined]
        has_model = not gain or isinstance(gain["model"], str)  # type: ignore[index]
    except (AttributeError, KeyError, TypeError):
        return False
    return has_model and all(map(_is_number, (value for values in shown for value in values)))


def _are_score_figures(figures: object) -> bool:
    """Check the figures of discrimination and calibration, by model."""
    try:
        models = list(figures.values())  # type: ignore[attr-defined]
        tests = [row["together"] for row in models]
        tests += [test for row in models for test in row["clients"].values()]
        numbers = [test["specificity"] for test in tests]
        # Without any image that counts, a figure is None
        shown = [test[key] for test in tests for key in SCORE_FIGURES if test[key] is not None]
        numbers += [figure[key] for figure in shown for key in ("value", "low", "high")]
    except (AttributeError, KeyError, TypeError):
        return False
    return all(map(_is_number, numbers))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_timings(run: RunFolder) -> list[dict[str, Any]]:
    """Read the images and seconds of each work unit; a line that a crash cut is left out."""
    return [timing for line in _lines(run.timings_file) if (timing := _timing(line))]


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
    total: np.ndarray = np.sum([np.array(matrix) for matrix in matrices.values()], axis=0)
    return total


def _mean(by_client: dict[str, float]) -> float:
    return float(np.mean(list(by_client.values()))) if by_client else float("nan")


def _json(file: Path) -> dict[str, Any]:
    hint = "remove it, and repeat the same `osfl run` to recreate it"
    content: dict[str, Any] = read_json(file, hint=hint)
    return content


def _json_or_empty(file: Path) -> dict[str, Any]:
    return _json(file) if file.is_file() else {}


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file that may have a million; none if there is no file."""
    if file.is_file():
        with open(file, errors="replace") as lines:
            yield from lines


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
