"""The measurement of the server with many clients (benchmarks.speed.many_clients)."""

from benchmarks.speed.many_clients import PHASES, measure


def test_every_phase_is_measured() -> None:
    seconds = measure(12)
    assert list(seconds) == list(PHASES)
    assert all(value > 0 for value in seconds.values())
