"""Clients whose score histograms a run's figures are of: all, or those that sent any."""

from collections.abc import Mapping
from typing import Any


def partial_senders(metrics: Mapping[str, Any], model: str) -> int:
    """Return how many clients sent a model's histograms; 0 if all clients of the run did."""
    senders = len(metrics["figures"][model]["clients"])
    clients = {*metrics["accuracy"][model], *metrics["not_tested"], *metrics.get("withheld", ())}
    expected = clients - {"average", *metrics.get("test_only", ())}
    return 0 if senders >= len(expected) else senders


def senders_text(senders: int) -> str:
    """Return whose histograms figures are of, from `partial_senders`."""
    if not senders:
        return "all clients"
    return f"the {senders} client{'s' if senders > 1 else ''} that sent histograms"
