"""Distances from the other clients' median, against the rule written out."""

import math

import numpy as np
import pytest

from server_app.defenses.outliers import DEVIATIONS, FACTOR, _far


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 7, 30, 31])
@pytest.mark.parametrize("seed", range(3))
def test_outliers_are_those_of_the_rule(clients: int, seed: int) -> None:
    """The median and the deviation are of the other clients, one client at a time."""
    draw = np.random.default_rng(seed)
    # Rounded, so that some are equal
    norms = np.exp(np.round(draw.normal(scale=0.3, size=clients), 1))
    norms[draw.random(clients) < 0.2] *= 100
    by_client = {f"client-{number}": float(norm) for number, norm in enumerate(norms)}
    expected = {}
    for client, norm in by_client.items():
        log_norms = np.log([value for name, value in by_client.items() if name != client])
        if not len(log_norms):
            continue
        median = np.median(log_norms)
        deviation = 1.4826 * np.median(np.abs(log_norms - median))
        if abs(math.log(norm) - median) > max(math.log(FACTOR), DEVIATIONS * deviation):
            expected[client] = norm / math.exp(median)
    assert _far(by_client) == pytest.approx(expected)
    if clients == 30:
        assert expected
