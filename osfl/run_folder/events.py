"""Events: a run's status and results as lines of its log, which a remote command can follow."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from osfl.metrics import SCORE_FIGURES
from osfl.run_folder.report.senders import partial_senders
from osfl.util.log import log
from osfl.util.text import sanitize

# Flower's client truncates long lines
CLIENTS_PER_LINE = 50
# Characters
MAX_WARNING = 1000
# Flower's log puts the level first, so a client's text cannot imitate the start of a line
_EVENT = re.compile(r"INFO\s*:\s+status (\{.*\})\s*")


def log_event(event: Mapping[str, Any]) -> None:
    """Log a change of the run's status."""
    log.info("status %s", json.dumps(event))


def log_results(metrics: Mapping[str, Any], report: str) -> None:
    """Log the contents of the table at the end of a run, and the report's path on the server."""
    for event in _results(metrics, report):
        log_event(event)


def log_advice(figures: Mapping[str, Mapping[str, float | None]], withheld: list[str]) -> None:
    """Log the figures of `osfl advise` by client, and the clients that withhold them."""
    log_event({"advice": {}, "withheld": withheld[:CLIENTS_PER_LINE]})
    for part in _parts(figures):
        log_event({"advice": part})


def _results(metrics: Mapping[str, Any], report: str) -> Iterator[dict[str, Any]]:
    server = {key: metrics["server"][key] for key in ("synthetic_images", "seconds_per_image")}
    shown = metrics.get("shown", "")
    results = {"method": metrics["method"], "shown": shown, "server": server, "report": report}
    if source := metrics.get("payloads_from"):
        results["payloads_from"] = source
    yield {"results": results}
    uploads = {name: costs.get("upload_bytes", 0) for name, costs in metrics["clients"].items()}
    for part in _parts(uploads):
        yield {"uploads": part}
    for model, by_client in metrics["accuracy"].items():
        for part in _parts(by_client):
            yield {"model": model, "accuracy": part}
    for model, figures in metrics.get("figures", {}).items():
        senders = partial_senders(metrics, model)
        yield {"figures": _estimates(figures["together"]), "model": model, "senders": senders}
    if gain := metrics.get("gain"):
        rows = {client: _rounded(row) for client, row in gain["clients"].items()}
        for part in _parts(rows):
            yield {"gain": part, "average": _rounded(gain["average"]), "model": gain["model"]}
    for client, row in metrics.get("test_only", {}).items():
        for part in _parts(row["accuracy"]):
            yield {"test_only": part, "of": client}
    for part in _parts(dict.fromkeys(metrics["not_tested"], True)):
        yield {"not_tested": part}
    for warning in metrics["warnings"]:
        yield {"warning": sanitize(warning, MAX_WARNING)}


def _estimates(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a test that the terminal shows, in few characters."""
    estimates: dict[str, Any] = {"specificity": round(figures["specificity"], 4)}
    for key in SCORE_FIGURES:
        estimates[key] = None if figures[key] is None else _interval(figures[key])
    return estimates


def _interval(estimate: Mapping[str, Any]) -> dict[str, float]:
    return {key: round(estimate[key], 5) for key in ("value", "low", "high")}


def _rounded(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a gain that the terminal shows, in few characters."""
    return {key: round(row[key], 2) for key in ("local", "points", "low", "high")}


def _parts(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    items = list(values.items())
    for begin in range(0, len(items), CLIENTS_PER_LINE):
        yield dict(items[begin : begin + CLIENTS_PER_LINE])


class FollowedRun:
    """The state of a run, rebuilt from the events in its log.

    Attributes:
        state: the keys of `status.json`.
        metrics: the contents of the table at the end; empty until the run has finished. Of
            `osfl advise`, the figures by client, and the clients that withhold them.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"phase": "", "clients": {}, "done": 0, "total": 0}
        self.state["phases"] = []
        self.metrics: dict[str, Any] = {}

    def read(self, line: str) -> bool:
        """Process a line of the log; return whether it was an event."""
        match = _EVENT.fullmatch(line)
        if match is None:
            return False
        try:
            self._apply(json.loads(match[1]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        return True

    def _apply(self, event: dict[str, Any]) -> None:
        if "phase" in event:
            phase = str(event["phase"])
            self.state.update(phase=phase, done=0, total=int(event["total"]))
            self.state["phases"].append({"phase": phase})
        elif "done" in event:
            self.state.update(done=int(event["done"]), total=int(event["total"]))
        elif "client" in event:
            self.state["clients"][str(event["client"])] = str(event["state"])
        elif "results" in event:
            self.metrics = {**event["results"], "clients": {}, "accuracy": {}}
            self.metrics |= {"not_tested": [], "warnings": [], "test_only": {}}
        elif "advice" in event:
            advice = self.metrics.setdefault("advice", {"clients": {}, "withheld": []})
            advice["clients"].update(event["advice"])
            advice["withheld"] += map(str, event.get("withheld", ()))
        elif "uploads" in event:
            for client, size in event["uploads"].items():
                self.metrics["clients"][client] = {"upload_bytes": int(size)}
        elif "gain" in event:
            model = str(event["model"])
            average = _rounded(event["average"])
            gain = {"model": model, "clients": {}, "average": average}
            rows = {client: _rounded(row) for client, row in event["gain"].items()}
            self.metrics.setdefault("gain", gain)["clients"].update(rows)
        elif "test_only" in event:
            figures = {model: float(value) for model, value in event["test_only"].items()}
            tests = self.metrics["test_only"].setdefault(str(event["of"]), {"accuracy": {}})
            tests["accuracy"].update(figures)
        elif "figures" in event:
            estimates: dict[str, Any] = {"together": _estimates(event["figures"])}
            estimates["senders"] = int(event.get("senders", 0))
            self.metrics.setdefault("figures", {})[str(event["model"])] = estimates
        elif "accuracy" in event:
            figures = {client: float(value) for client, value in event["accuracy"].items()}
            self.metrics["accuracy"].setdefault(str(event["model"]), {}).update(figures)
        elif "not_tested" in event:
            self.metrics["not_tested"] += map(str, event["not_tested"])
        elif "warning" in event:
            self.metrics["warnings"].append(sanitize(event["warning"], MAX_WARNING))
