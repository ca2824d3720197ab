"""The sentence that opens a report: every part of it, for every kind of run."""

from typing import Any

import pytest

from osfl.methods import METHODS
from osfl.run_folder.report.sentence import opening_sentence


def run_metrics(method: str, clients: int = 6, upload: int = 3100, **changes: Any) -> dict:
    """The metrics of a run whose clients a, b, ... all have 80 % right."""
    names = [chr(ord("a") + number) for number in range(clients)]
    sends = bool(METHODS[method].payload or METHODS[method].rounds)
    return {
        "method": method,
        "rounds": 1,
        "clients": {name: {"upload_bytes": upload * sends} for name in names},
        "accuracy": {"FT": {**dict.fromkeys(names, 80.0), "average": 80.0}},
        "average": 80.0,
        "shown": "FT" if METHODS[method].global_model else "",
        "withheld": [],
        "not_tested": [],
        "delta": 0.0,
        "config": {"num-clients": clients, "held-out": ""},
        **changes,
    }


def gain(points: float, low: float, high: float, clients: int = 6) -> dict:
    average = {"points": points, "low": low, "high": high}
    names = [chr(ord("a") + number) for number in range(clients)]
    return {"gain": {"model": "FT", "clients": {name: {} for name in names}, "average": average}}


MODEL = "the global model classifies on average 80.0 % of a client's test images correctly"
NO_GUARANTEE = "without a differential-privacy guarantee."


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            run_metrics("feddeo", **gain(12.3, 8, 16)),
            "Six clients each sent one message of 3.1 kB (a learned description of every class; "
            f"no images); {MODEL}, 12.3 points more than training alone, {NO_GUARANTEE}",
        ),
        (
            run_metrics("fedbip", 1, 4200),
            "One client sent one message of 4.2 kB (learned words for domain and classes, and the "
            f"latent of every image); {MODEL}, {NO_GUARANTEE}",
        ),
        (
            run_metrics("fedavg", 13, 90_000_000, rounds=10),
            "13 clients each sent ten messages, 90 MB together (its model, in every round; no "
            f"images); {MODEL}, {NO_GUARANTEE}",
        ),
        (
            run_metrics("feddeo", 2, payloads_from="base"),
            "No client sent a payload: two clients had each sent one message of 3.1 kB (a learned "
            f"description of every class; no images) for job base; {MODEL}, {NO_GUARANTEE}",
        ),
        (run_metrics("prompts-only"), f"Six clients sent nothing; {MODEL}."),
        (
            run_metrics("ceiling", 2),
            "Two clients sent nothing: the server holds all images itself, which no real server "
            f"would; {MODEL}.",
        ),
        (
            run_metrics("local", 2),
            "Two clients each sent one message of 3.1 kB (its classifier, trained on its own "
            "images); their own models classify on average 80.0 % of a client's test images "
            f"correctly, {NO_GUARANTEE}",
        ),
    ],
)
def test_every_kind_of_method_has_its_sentence(metrics: dict, sentence: str) -> None:
    assert opening_sentence(metrics) == sentence


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_one_sentence(method: str) -> None:
    text = opening_sentence(run_metrics(method))
    assert text[0].isupper()
    assert text.endswith(".")
    assert ".." not in text
    assert ("guarantee" in text) == bool(METHODS[method].payload or METHODS[method].rounds)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (gain(-2.0, -4, -1), "2.0 points less than training alone, without"),
        (gain(0.4, -1, 2), "0.4 points more than training alone (within the margin of error), w"),
        (gain(5, 1, 9, 4), "5.0 points more than training alone at the four clients that compared"),
        ({"config": {"num-clients": 7}}, "Six of seven clients each sent one"),
        ({"config": {"num-clients": 7, "held-out": "x"}}, "Six clients each sent one"),
        ({"config": {"num-clients": 7, "held-out": "x"}}, "% of a held-out client's test images"),
        ({"dropped": ["a"]}, "no images), of which the defense dropped one; the global"),
        ({"withheld": ["x"]}, "correctly (six of seven reported it), without"),
        ({"withheld": ["r"], "test_only": {"r": {"accuracy": {}}}}, "correctly, without"),
        ({"not_tested": ["x", "y"]}, "correctly (six of eight reported it), without"),
        (
            {"accuracy": {"FT": {"average": float("nan")}}, "average": float("nan")},
            "no client reported a test result, without a differential",
        ),
        (
            {"test_only": {"r": {"accuracy": {"FT": 70.0}}}},
            "correctly, and 70.0 % of a test-only client's, without",
        ),
        ({"test_only": {"r": {"accuracy": {}}}}, "correctly, without"),
    ],
)
def test_what_is_unusual_is_said(changes: dict, part: str) -> None:
    assert part in opening_sentence(run_metrics("feddeo", **changes))


def test_sizes_and_guarantees_of_several_clients() -> None:
    metrics = run_metrics("fedpft", 3, delta=1e-5)
    sizes = (3000, 3100, 5000)
    for row, size, epsilon in zip(metrics["clients"].values(), sizes, (1.0, 2.5, 0.0), strict=True):
        row.update(upload_bytes=size, epsilon=epsilon)
    text = opening_sentence(metrics)
    assert "one message of 3 kB to 5 kB" in text
    assert text.endswith(
        "with a differential-privacy guarantee of epsilon 1 to 2.5 and delta 1e-05 for two of "
        "them only."
    )
    metrics["clients"]["c"].update(upload_bytes=3000, epsilon=1.0)
    text = opening_sentence(metrics)
    assert "one message of 3.05 kB" in text
    assert text.endswith("of epsilon 1 to 2.5 and delta 1e-05.")
