"""The report's timeline: the phases of a run, and its clients, over wall time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from osfl.run_folder.status import ASKED_STATE, SYNTHESIZED, TEST_ONLY_STATE

# The phases in which clients test, by how they begin
TEST_PHASES = ("testing on clients", "training alone on clients")
# The states that are marked, and their texts
MARKS = {
    "joined": "joined",
    TEST_ONLY_STATE.partition(" ")[0]: "joined",
    "delivered": "payload arrived",
    SYNTHESIZED: "images synthesized",
}
# Seconds; the least total that a bar is a share of
SHORTEST = 1e-3


def timeline_of(status: Mapping[str, Any], end: float) -> dict[str, Any]:
    """Return the times of a run in seconds since its first phase; {} without phases.

    Args:
        status: the content of `status.json`. One of an older version has no times of clients.
        end: seconds since 1970 at the end of the last phase.

    Returns:
        `seconds` of all phases; `phases`, each with `phase`, `begin` and `end`; `clients`, the time
        of each state by client.
    """
    phases = status.get("phases", [])
    if not phases:
        return {}
    start = phases[0]["began"]
    begins = [max(0.0, phase["began"] - start) for phase in phases]
    # A clock may be set back
    total = max(SHORTEST, end - start, *begins)
    ends = [*begins[1:], total]
    return {
        "seconds": total,
        "phases": [
            {"phase": phase["phase"], "begin": begin, "end": max(begin, stop)}
            for phase, begin, stop in zip(phases, begins, ends, strict=True)
        ],
        "clients": {
            client: {state: min(max(0.0, at - start), total) for state, at in times.items()}
            for client, times in sorted(status.get("times", {}).items())
        },
    }


def lanes_of(timeline: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the template's lanes of phases and of clients, with bars in percent of the time."""
    if not timeline:
        return {"phases": [], "clients": []}
    total = timeline["seconds"]
    phases = []
    for phase in timeline["phases"]:
        bar = _bar("phase", phase["begin"], phase["end"], total, phase["phase"])
        seconds = phase["end"] - phase["begin"]
        phases.append({"name": phase["phase"], "seconds": seconds, "bars": [bar]})
    clients = []
    for client, times in timeline["clients"].items():
        bars = list(_client_bars(times, timeline["phases"], total))
        has_worked = {ASKED_STATE, "delivered"} <= times.keys()
        seconds = times["delivered"] - times[ASKED_STATE] if has_worked else None
        clients.append({"name": client, "seconds": seconds, "bars": bars})
    return {"phases": phases, "clients": clients}


def _client_bars(
    times: Mapping[str, float], phases: Sequence[Mapping[str, Any]], total: float
) -> Iterator[dict[str, Any]]:
    """Yield a client's bars: its work on a payload, and its tests; and marks of other states."""
    arrival = min(
        (times[s] for s in ("delivered", "failed", "refused") if s in times), default=None
    )
    if ASKED_STATE in times and arrival is not None:
        yield _bar("work", times[ASKED_STATE], arrival, total, "payload")
    tests = [phase["begin"] for phase in phases if phase["phase"] in TEST_PHASES]
    if "tested" in times and tests and tests[0] <= times["tested"]:
        yield _bar("test", tests[0], times["tested"], total, "tests")
    for state, text in MARKS.items():
        if state in times:
            yield _bar("mark", times[state], times[state], total, text)
    for state in ("failed", "refused"):
        if state in times:
            yield _bar("bad", times[state], times[state], total, state)


def _bar(kind: str, begin: float, end: float, total: float, text: str) -> dict[str, Any]:
    offset = min(100 * begin / total, 99.5)
    width = min(100 * (end - begin) / total, 100 - offset)
    span = f"{begin:.1f} s" if begin == end else f"{begin:.1f} to {end:.1f} s"
    return {"kind": kind, "left": offset, "width": width, "text": f"{text}: {span}"}


def section_values(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `template_parts.TIMELINE`."""
    lanes = lanes_of(timeline)
    bars = [bar for row in lanes["clients"] for bar in row["bars"]]
    return {"lanes": lanes, "lane_kinds": {bar["kind"] for bar in bars}}
