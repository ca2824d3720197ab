"""The figures of a finished run that pages show, from its metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from osfl.metrics.text import FigureText, figure_texts
from osfl.run_folder.report.senders import partial_senders, senders_text

# Models with a column of their own
MAX_MODELS = 6
AVERAGE = "average"


@dataclass(frozen=True)
class Figures:
    """The figures of a finished run; all empty before its end.

    Attributes:
        models: the names of its global models.
        accuracy: by model, the accuracy in percent by client, and that of the `average`.
        model: the model whose figures stand for the run; "" without one.
        images: the number of synthetic images.
        upload: the mean size of the clients' payloads in bytes.
        payloads_from: the job whose payloads these are, if not this run's.
        balanced_accuracy, macro_f1: of the shown model, in percent over all test images.
        scores: of the shown model, from histograms of its scores, by key; {} without any.
        senders: the clients whose histograms these are.
    """

    models: tuple[str, ...] = ()
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    model: str = ""
    images: int | None = None
    upload: float | None = None
    payloads_from: str = ""
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    scores: Mapping[str, FigureText] = field(default_factory=dict)
    senders: str = ""

    def of_client(self, client: str) -> float | None:
        """Return the shown model's accuracy on a client's test images, or its `average`."""
        return self.accuracy.get(self.model, {}).get(client)


def figures_of(metrics: Mapping[str, Any]) -> Figures:
    """Select the figures from metrics that `are_metrics` accepts, or {}."""
    if not metrics:
        return Figures()
    accuracy = {model: _numbers(by_client) for model, by_client in metrics["accuracy"].items()}
    shown = metrics.get("shown")
    model = shown if isinstance(shown, str) and shown in accuracy else next(iter(accuracy), "")
    costs = metrics["clients"].values()
    uploads = [_number(cost, "upload_bytes") or 0.0 for cost in costs]
    scores = metrics.get("scores")
    by_model = scores.get(model) if isinstance(scores, dict) else {}
    texts = _score_texts(metrics, model)
    return Figures(
        models=tuple(accuracy)[:MAX_MODELS],
        accuracy=accuracy,
        model=model,
        images=metrics["server"]["synthetic_images"],
        upload=sum(uploads) / len(uploads) if uploads else None,
        payloads_from=source if isinstance(source := metrics.get("payloads_from"), str) else "",
        balanced_accuracy=_number(by_model, "balanced_accuracy"),
        macro_f1=_number(by_model, "macro_f1"),
        scores=texts,
        senders=senders_text(partial_senders(metrics, model)) if texts else "",
    )


def _score_texts(metrics: Mapping[str, Any], model: str) -> dict[str, FigureText]:
    """Return the texts of a model's figures of discrimination and calibration, if it has any."""
    figures = metrics.get("figures", {})
    # Without a global model there is one model for each client
    if not metrics.get("shown") or model not in figures:
        return {}
    try:
        return figure_texts(figures[model]["together"])
    # An integer of hundreds of digits
    except OverflowError:
        return {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an object."""
    numbers = {key: _number(values, key) for key in values}
    return {key: number for key, number in numbers.items() if number is not None}


def _number(values: object, key: str) -> float | None:
    value = values.get(key) if isinstance(values, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    # An integer of hundreds of digits
    except OverflowError:
        return None
