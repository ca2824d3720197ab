"""The report's opening: one sentence that a lead can read aloud."""

from collections.abc import Mapping
from typing import Any

from osfl.config import split_names
from osfl.methods import METHODS
from osfl.methods.declaration import Method
from osfl.run_folder.report.page import human_bytes

_WORDS = (
    *("no", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
# The package that declared a run's method may be gone when its results are read
_UNKNOWN = Method(client=None, server="", payload=None, sends="nothing")
Metrics = Mapping[str, Any]


def opening_sentence(metrics: Metrics) -> str:
    """Say who took part, what was sent, how good the model is, what was gained, and which guarantee
    the payloads have.

    Args:
        metrics: the result of `gather`.
    """
    method = METHODS.get(metrics["method"], _UNKNOWN)
    senders = {
        client: row["upload_bytes"]
        for client, row in metrics["clients"].items()
        if row.get("upload_bytes")
    }
    clauses = [_accuracy(metrics, method), _gain(metrics), _test_only(metrics)]
    if senders:
        clauses.append(_guarantee(metrics, len(senders)))
    text = f"{_sent(metrics, method, senders)}; {', '.join(filter(None, clauses))}."
    return text[0].upper() + text[1:]


def _sent(metrics: Metrics, method: Method, senders: Mapping[str, int]) -> str:
    """Say who sent what."""
    if not senders:
        clients = _clients(len(metrics["clients"]))
        # Only a method without a payload says what "nothing" is
        has_payload = method.payload or method.rounds
        return f"{clients} took part" if has_payload else f"{clients} sent {method.sends}"
    held_out = split_names(metrics["config"].get("held-out", ""))
    expected = metrics["config"].get("num-clients", len(senders)) - len(held_out)
    # A version of a standing federation is made of those that have come
    if metrics["config"].get("new-clients"):
        expected = len(senders)
    who = _clients(len(senders))
    if len(senders) < expected:
        who = f"{_count(len(senders))} of {_clients(expected)}"
    each = " each" if len(senders) > 1 else ""
    source = metrics.get("payloads_from", "")
    sends = metrics["sends"] if metrics["config"].get("secure-sum") else method.sends
    if kinds := metrics.get("kinds"):
        sends = f"its kind of payload: {', '.join(row['kind'] for row in kinds)}"
    # A description that speaks of images says by itself what leaves of them
    without = "" if "image" in sends else "; no images"
    dropped = metrics.get("dropped", [])
    end = f", of which the defense dropped {_count(len(dropped))}" if dropped else ""
    content = f"{_messages(metrics, senders)} ({sends}{without})"
    if source:
        return f"no client sent a payload: {who} had{each} sent {content} for job {source}{end}"
    return f"{who}{each} sent {content}{end}"


def _messages(metrics: Metrics, senders: Mapping[str, int]) -> str:
    size = _size_text(min(senders.values()), max(senders.values()))
    rounds = metrics["rounds"]
    if METHODS.get(metrics["method"], _UNKNOWN).rounds and rounds > 1:
        return f"{_count(rounds)} messages, {size} together"
    return f"one message of {size}"


def _size_text(smallest: int, largest: int) -> str:
    """Format a span of sizes; one of less than a tenth is read as a single size."""
    if largest < 1.1 * smallest:
        return human_bytes((smallest + largest) / 2)
    return f"{human_bytes(smallest)} to {human_bytes(largest)}"


def _accuracy(metrics: Metrics, method: Method) -> str:
    """Say how good the model is, by the average that the rest of the report has."""
    testers = {client for row in metrics["accuracy"].values() for client in row} - {"average"}
    apart = metrics.get("test_only", {}).keys()
    silent = {*metrics["withheld"], *metrics["not_tested"]} - apart
    if not testers:
        return "no client reported a test result"
    model = "the global model classifies" if method.global_model else "their own models classify"
    tester = "held-out client" if metrics["config"].get("held-out") else "client"
    text = f"{model} on average {metrics['average']:.1f} % of a {tester}'s test images correctly"
    total = len(testers | silent)
    return f"{text} ({_count(len(testers))} of {_count(total)} reported it)" if silent else text


def _gain(metrics: Metrics) -> str:
    gain = metrics.get("gain")
    if not gain:
        return ""
    average = gain["average"]
    direction = "more" if average["points"] >= 0 else "less"
    text = f"{abs(average['points']):.1f} points {direction} than training alone"
    if average["low"] <= 0 <= average["high"]:
        text += " (within the margin of error)"
    compared = len(gain["clients"])
    tested = len(metrics["accuracy"][gain["model"]]) - 1
    return text if compared == tested else f"{text} at the {_clients(compared)} that compared both"


def _test_only(metrics: Metrics) -> str:
    """Say what test-only clients measured, who are not among the others' average."""
    rows = [row["accuracy"].get(metrics["shown"]) for row in metrics.get("test_only", {}).values()]
    figures = [accuracy for accuracy in rows if accuracy is not None]
    if not figures:
        return ""
    whose = "a test-only client's" if len(figures) == 1 else "a test-only client's, on average"
    return f"and {sum(figures) / len(figures):.1f} % of {whose}"


def _guarantee(metrics: Metrics, senders: int) -> str:
    epsilons = [row.get("epsilon", 0.0) for row in metrics["clients"].values()]
    private = sorted(filter(None, epsilons))
    if not private:
        return "without a differential-privacy guarantee"
    span = " to ".join(dict.fromkeys(f"{value:g}" for value in (private[0], private[-1])))
    delta = f" and delta {metrics['delta']:g}" if metrics["delta"] else ""
    text = f"with a differential-privacy guarantee of epsilon {span}{delta}"
    if len(private) < senders:
        return f"{text} for {_count(len(private))} of them only"
    return text


def _clients(count: int) -> str:
    return f"{_count(count)} client{'' if count == 1 else 's'}"


def _count(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"
