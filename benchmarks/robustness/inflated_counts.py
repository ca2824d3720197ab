"""Measure malicious clients that inflate their image counts, and the bound and cap on them.

python -m benchmarks.robustness.inflated_counts         # every system
python -m benchmarks.robustness.inflated_counts FedPFT  # some; the table keeps its other rows
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import torch

from benchmarks import recipe
from benchmarks.federation import (
    CLIENTS,
    CPU,
    Settings,
    cell_name,
    client_images,
    config_of,
    payloads_of,
)
from benchmarks.harness import Experiment, Line, average
from benchmarks.robustness import inflated_rounds
from benchmarks.robustness.attacks import (
    COUNTED,
    MALICIOUS,
    MIXTURES,
    STATISTICS,
    job_of,
    settings_of,
)
from osfl.kit.kits import find_kit
from osfl.methods import server_module
from osfl.models.classifiers import compute_logits, linear_head, new_classifier, remove_head
from osfl.payload.kinds import FeatureMixtures, FeatureStatistics, Payload
from osfl.util.prompts import DIGITS
from server_app.context import ServerJob
from server_app.defenses.image_counts import check_counts, find_caps, stated_counts
from server_app.expected import check_plausible

SEEDS = (0,)
Cell = dict[str, Any]
ALL_CLASSES = "all counts"
ONE_CLASS = "one class's count"
WITH_SUMS = "counts, sums and moments"
COUNT_ALONE = "count"
WITH_LABELS = "count and permuted labels"
FEDAVG = "FedAvg"
COUNT_KINDS = {
    STATISTICS: (ALL_CLASSES, ONE_CLASS, WITH_SUMS),
    MIXTURES: (ALL_CLASSES, ONE_CLASS),
    FEDAVG: (COUNT_ALONE, WITH_LABELS),
}
# Within max-images, and above it
TOTALS = (10**6, 10**9)
EXPERIMENT = Experiment(
    __file__,
    (*COUNTED, FEDAVG),
    "Top-1 accuracy (%) on all clients' test images, mean of the clients, where the first of six "
    "clients state more images than they have: a stated total, by raising all counts, or the first "
    "class's alone, or counts, sums and moments alike. FedAvg: ten rounds; a client's model is "
    "honest, or has all classes of its last layer permuted. Bound: max-images = 1,000,000, above "
    "which a client is refused; cap: max-weight-ratio = 10. "
    f"Seeds {SEEDS}.",
)


def inflated(payload: Payload, total: int, kind: str) -> Payload:
    """Return a payload that states `total` images, by a kind of `COUNT_KINDS`."""
    assert isinstance(payload, FeatureStatistics | FeatureMixtures)
    counts = payload.counts.clone()
    if kind == ONE_CLASS:
        counts[0] += total - counts.sum()
        return replace(payload, counts=counts)
    factor = total // int(counts.sum())
    if kind == WITH_SUMS:
        assert isinstance(payload, FeatureStatistics)
        assert payload.triangle is not None
        sums, triangle = factor * payload.sums, factor * payload.triangle
        return replace(payload, counts=factor * counts, sums=sums, triangle=triangle)
    return replace(payload, counts=factor * counts)


def unbounded(settings: Settings) -> Settings:
    """Return settings under which all stated counts are accepted."""
    return {**settings, "max-images": 10**9, "max-weight-ratio": 0.0}


def counts_cell(system: str, kind: str, total: int, attackers: int, seed: int) -> Cell:
    """Return the accuracy without attack, with bound and cap, without both, and without the
    malicious clients.
    """
    settings = settings_of(system, seed)
    name = f"counts-{cell_name(settings)}-{kind.replace(' ', '-')}-{total}-{attackers}"

    def compute() -> Cell:
        honest = payloads_of(settings)
        malicious = CLIENTS[:attackers]
        attacked = {
            **honest,
            **{client: inflated(honest[client], total, kind) for client in malicious},
        }
        benign_payloads = {
            client: payload for client, payload in honest.items() if client not in malicious
        }
        job = job_of(settings, name)
        accepted = {
            client: payload
            for client, payload in attacked.items()
            if is_accepted(job, client, payload)
        }
        counts = {client: stated_counts(payload) for client, payload in accepted.items()}
        return {
            "quiet": accuracy_of(job, honest),
            "bounded": accuracy_of(job, accepted),
            "unbounded": accuracy_of(job_of(unbounded(settings), f"{name}-unbounded"), attacked),
            "without": accuracy_of(job, benign_payloads),
            "refused": len(attacked) - len(accepted),
            "capped": len(find_caps(counts, job.config.max_weight_ratio)),
        }

    result: Cell = EXPERIMENT.cell(name, compute)
    return result


def rounds_cell(kind: str, total: int, attackers: int, seed: int) -> Cell:
    """Return the same of FedAvg, where the clients attack in every round."""
    settings = {**inflated_rounds.SETTINGS, "seed": seed}
    clients = range(len(CLIENTS))
    tamper = inflated_rounds.inflating(clients[:attackers], total, kind == WITH_LABELS)
    name = f"fedavg-{kind.replace(' ', '-')}-{total}-{attackers}"

    def run(name: str, settings: Settings, *arguments: Any) -> Cell:
        result: Cell = EXPERIMENT.cell(
            f"{name}-{cell_name(settings)}",
            lambda: inflated_rounds.run_fedavg(settings, name, *arguments),
        )
        return result

    bounded = run(name, settings, clients, tamper)
    return {
        "quiet": run("fedavg-honest", settings, clients)["accuracy"],
        "bounded": bounded["accuracy"],
        "unbounded": run(f"{name}-unbounded", unbounded(settings), clients, tamper)["accuracy"],
        "without": run(f"fedavg-without-{attackers}", settings, clients[attackers:])["accuracy"],
        "refused": bounded["refused"],
        "capped": bounded["capped"],
    }


def is_accepted(job: ServerJob, client: str, payload: Payload) -> bool:
    """Return whether the server accepts a payload."""
    try:
        check_counts(stated_counts(payload), job.config.max_images)
        check_plausible(payload, client, job.config)
    except ValueError:
        return False
    return True


def accuracy_of(job: ServerJob, payloads: Mapping[str, Payload]) -> float:
    """Return the accuracy (%) of the global model made from payloads."""
    (result,) = server_module(job.config.method).run(job, payloads).values()
    head = linear_head(result.model)
    accuracies = []
    for features, labels in test_features(job.config.method, job.config.seed):
        with torch.no_grad():
            accuracies.append(100 * (head(features).argmax(dim=1) == labels).double().mean().item())
    return mean(accuracies)


@cache
def test_features(method: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the features of every client's test images before the frozen network's last layer,
    and their labels.
    """
    config = config_of({**recipe.COMMON, "method": method, "seed": seed})
    model = new_classifier(config.classifier, len(DIGITS), find_kit(config.kit), seed)
    backbone, _ = remove_head(model.eval())
    tests = client_images("test")
    return [(compute_logits(backbone, images.pixels, CPU), images.labels) for images in tests]


def line(system: str, kind: str, total: int, attackers: int) -> Line:
    """Return a row of the table."""
    if system == FEDAVG:
        cells = [rounds_cell(kind, total, attackers, seed) for seed in SEEDS]
    else:
        cells = [counts_cell(system, kind, total, attackers, seed) for seed in SEEDS]
    columns = {"": f"{system}: {kind}, {total:,}, {attackers} of {len(CLIENTS)}"}
    for head, key in (
        ("no attack", "quiet"),
        ("neither bound nor cap", "unbounded"),
        ("bound and cap", "bounded"),
        ("without the malicious clients", "without"),
    ):
        columns[head] = average(cell[key] for cell in cells)
    columns["refused"] = str(sum(cell["refused"] for cell in cells))
    columns["capped"] = str(sum(cell["capped"] for cell in cells))
    return columns


def lines_of(system: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line for each kind of inflation, total and number of malicious clients."""
    for kind in COUNT_KINDS[system]:
        for total in TOTALS:
            for attackers in MALICIOUS if total == TOTALS[0] else (1,):
                yield line(system, kind, total, attackers)


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
