"""Measure client contributions by leave-one-out trainings, with one malicious client of six.

python -m benchmarks.robustness.client_contributions        # every system
python -m benchmarks.robustness.client_contributions OSCAR  # some; the table keeps its other rows
"""

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.harness import Experiment, Line
from benchmarks.robustness.attacks import (
    HONEST,
    NEGATIVES,
    OF_SIX,
    attacks_of,
    clients_of,
    federation,
    job_of,
    settings_of,
)
from server_app.defenses.contribution import ClientContribution, estimate_contributions

SEEDS = (0,)
EXPERIMENT = Experiment(
    __file__,
    OF_SIX,
    "The contribution of each of six clients, by trainings without it "
    "(server_app/defenses/contribution.py); the first one is malicious (the liar). Seen by the "
    "others: the share of a client's images that the model of all others predicts as their class. "
    "Gives the others: points that it adds on images like the other clients'. Harms: by more than "
    f"the interval. Synthetic images that no model trains on test. Seeds {SEEDS}; recipe and "
    "payloads are benchmarks.accuracy.method_comparison's.",
)


def contributions_of(system: str, attack: str, seed: int) -> dict[str, ClientContribution]:
    """Return the contribution of each of six clients, the first of which attacks."""
    malicious = () if attack == HONEST else clients_of(system)[:1]
    images = federation(system, attack, malicious, seed)
    words = attack.replace(" ", "-").replace("'", "")
    return estimate_contributions(
        job_of(settings_of(system, seed), f"influence-{words}"), clients_of(system), images
    )


def line(system: str, attack: str, seeds: Sequence[int] = SEEDS) -> Line:
    """Return a row: the malicious client beside the lowest honest one."""
    malicious: list[ClientContribution] = []
    honest: list[ClientContribution] = []
    for seed in seeds:
        for client, one in contributions_of(system, attack, seed).items():
            attacks = attack != HONEST and client == clients_of(system)[0]
            (malicious if attacks else honest).append(one)
    columns = {"": f"{system}: {attack}"}
    for words, sign, values_of in (
        ("seen by the others (%)", "", shares_of),
        ("gives the others", "+", points_of),
    ):
        values = values_of(malicious)
        columns[f"the liar {words}"] = f"{mean(values):{sign}.1f}" if values else ""
        least = min(values_of(honest))
        columns[f"least of an honest client {words}"] = f"{least:{sign}.1f}"
    columns["liars who harm"] = harming(malicious) if malicious else ""
    columns["honest clients who harm"] = harming(honest)
    return columns


def shares_of(influences: Sequence[ClientContribution]) -> list[float]:
    """Return the shares of images that the others' model predicts as their class."""
    # Each client holds every class
    return [one.seen for one in influences if one.seen is not None]


def points_of(influences: Sequence[ClientContribution]) -> list[float]:
    """Return the points that clients add for the others."""
    return [one.others.points for one in influences]


def harming(influences: Sequence[ClientContribution]) -> str:
    """Count the clients that harm."""
    return f"{sum(one.harms for one in influences)} of {len(influences)}"


def lines_of(system: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line without an attack, and one for each attack."""
    for attack in (HONEST, *attacks_of(system)):
        # Clients with negatives are honest
        if attack != NEGATIVES:
            yield line(system, attack)


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
