"""Measure malicious clients that inflate their image counts, and the bound and cap on them.

python -m benchmarks.robustness.inflated_counts         # every system
python -m benchmarks.robustness.inflated_counts FedAvg  # some; the table keeps its other rows
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file, save

from benchmarks import recipe
from benchmarks.federation import (
    CLIENTS,
    CPU,
    Settings,
    accuracy_on_test,
    cell_name,
    config_of,
    node_of,
    payloads_of,
)
from benchmarks.harness import Experiment, Line, average
from benchmarks.robustness.attacks import (
    AVERAGED,
    COUNTED,
    MALICIOUS,
    MIXTURES,
    STATISTICS,
    job_of,
    settings_of,
)
from client_app.handlers import client_job
from client_app.learning.local_training import train_round
from osfl.data.load import count_images, load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.kit.used_parts import final_model
from osfl.methods import server_module
from osfl.models.classifiers import (
    compute_logits,
    linear_head,
    new_classifier,
    rebuild_classifier,
    remove_head,
)
from osfl.payload.kinds import FeatureMixtures, FeatureStatistics, Payload
from osfl.payload.messages import pack_state, unpack_state
from osfl.util.files import make_private_folder, write_atomically
from server_app.baselines.models import initial_state
from server_app.context import ServerJob
from server_app.defenses.image_counts import ALL, Cap, check_counts, find_caps, stated_counts
from server_app.expected import check_plausible

SEEDS = (0,)
Cell = dict[str, Any]
State = dict[str, torch.Tensor]
ALL_CLASSES = "all counts"
ONE_CLASS = "one class's count"
WITH_SUMS = "counts, sums and moments"
COUNT_KINDS = {
    STATISTICS: (ALL_CLASSES, ONE_CLASS, WITH_SUMS),
    MIXTURES: (ALL_CLASSES, ONE_CLASS),
    AVERAGED: (ALL_CLASSES,),
}
# Within max-images, and above it
TOTALS = (10**6, 10**9)
EXPERIMENT = Experiment(
    __file__,
    COUNTED,
    "Top-1 accuracy (%) on all clients' test images, mean of the clients, where the first of six "
    "clients state more images than they have: a stated total, by raising all counts, or the first "
    "class's alone, or counts, sums and moments alike. Bound: max-images = 1,000,000, above which "
    "a client is refused; cap: max-weight-ratio = 10. FedAvg: one round of twenty local epochs. "
    f"Seeds {SEEDS}.",
)


@dataclass(frozen=True)
class Trained:
    """A client's model after a round, and the number of images that it states."""

    state: State
    images: int


Contribution = Payload | Trained


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
        sums, moments = factor * payload.sums, factor * payload.moments
        return replace(payload, counts=factor * counts, sums=sums, moments=moments)
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
        honest = contributions(system, seed)
        malicious = CLIENTS[:attackers]
        attacking = {client: claiming(honest[client], total, kind) for client in malicious}
        attacked = {**honest, **attacking}
        others = {client: one for client, one in honest.items() if client not in malicious}
        job = job_of(settings, name)
        accepted = {
            client: one for client, one in attacked.items() if is_accepted(job, client, one)
        }
        return {
            "quiet": accuracy_of(job, honest),
            "bounded": accuracy_of(job, accepted),
            "unbounded": accuracy_of(job_of(unbounded(settings), f"{name}-unbounded"), attacked),
            "without": accuracy_of(job, others),
            "refused": len(attacked) - len(accepted),
            "capped": len(caps_of(job, accepted)),
        }

    result: Cell = EXPERIMENT.cell(name, compute)
    return result


def contributions(system: str, seed: int) -> Mapping[str, Contribution]:
    """Return honest clients' payloads, or their models of one round with image counts."""
    settings = settings_of(system, seed)
    if system == AVERAGED:
        return {client: one_round(settings, client) for client in CLIENTS}
    return payloads_of(settings)


def one_round(settings: Settings, client: str) -> Trained:
    """Return a client's model after the first round, trained unless it is kept."""
    config = config_of(settings)
    folder = EXPERIMENT.work / f"round-{cell_name(settings)}-{client}"
    file = folder / "model.safetensors"
    number = CLIENTS.index(client)
    node = node_of(number, config)
    if not file.is_file():
        make_private_folder(folder)
        start = initial_state(job_of(settings, "round"), final_model(config))
        record = {"architecture": config.classifier.architecture, "server-round": 1}
        request = RecordDict({"model": pack_state(start), "config": ConfigRecord(record)})
        job = client_job(config, node, client, find_kit(config.kit), folder)
        reply = train_round(request, job, folder)
        write_atomically(file, save(unpack_state(reply.array_records["model"])))
    return Trained(load_file(file), count_images(config.data, node, "train", config.seed))


def claiming(one: Contribution, total: int, kind: str) -> Contribution:
    """Return a contribution that states `total` images."""
    return replace(one, images=total) if isinstance(one, Trained) else inflated(one, total, kind)


def counts_of(one: Contribution) -> dict[str, int]:
    """Return the image counts that a contribution states, by class."""
    return {ALL: one.images} if isinstance(one, Trained) else stated_counts(one)


def is_accepted(job: ServerJob, client: str, one: Contribution) -> bool:
    """Return whether the server accepts a contribution."""
    try:
        check_counts(counts_of(one), job.config.max_images)
        if not isinstance(one, Trained):
            check_plausible(one, client, job.config)
    except ValueError:
        return False
    return True


def caps_of(job: ServerJob, accepted: Mapping[str, Contribution]) -> dict[str, Cap]:
    """Return the clients that the server caps."""
    stated = {client: counts_of(one) for client, one in accepted.items()}
    return find_caps(stated, job.config.max_weight_ratio)


def accuracy_of(job: ServerJob, accepted: Mapping[str, Contribution]) -> float:
    """Return the accuracy (%) of the global model made from contributions."""
    trained = {client: one for client, one in accepted.items() if isinstance(one, Trained)}
    if trained:
        return averaged(job, trained)
    payloads = {client: one for client, one in accepted.items() if not isinstance(one, Trained)}
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
    classes = len(class_names(config.data))
    model = new_classifier(config.classifier, classes, find_kit(config.kit), seed)
    backbone, _ = remove_head(model.eval())
    features = []
    for number in range(len(CLIENTS)):
        images = load_images(config.data, node_of(number, config), "test", 0)
        features.append((compute_logits(backbone, images.pixels, CPU), images.labels))
    return features


def averaged(job: ServerJob, trained: Mapping[str, Trained]) -> float:
    """Return the accuracy (%) of FedAvg's mean of models; equal weights are tested once."""
    caps = caps_of(job, trained)
    weights = {
        client: (caps[client].weights[ALL] if client in caps else 1.0) * one.images
        for client, one in trained.items()
    }
    total = sum(weights.values())
    shares = {client: round(weight / total, 6) for client, weight in weights.items()}
    digest = hashlib.sha256(json.dumps([job.config.seed, shares]).encode()).hexdigest()[:8]

    def compute() -> float:
        settings = job.config.classifier
        state = weighted_mean({client: one.state for client, one in trained.items()}, weights)
        model = rebuild_classifier(
            state, settings.architecture, len(job.classes), settings.small_stem
        )
        return mean(accuracy_on_test(job.config, model, number) for number in range(len(CLIENTS)))

    return float(EXPERIMENT.cell(f"averaged-{digest}", compute))


def weighted_mean(states: Mapping[str, State], weights: Mapping[str, float]) -> State:
    """Return FedAvg's mean of the clients' models, in their own dtypes."""
    total = sum(weights.values())
    first = next(iter(states.values()))
    averages = {}
    for name, like in first.items():
        parts = [weights[client] / total * states[client][name].double() for client in states]
        averages[name] = torch.stack(parts).sum(dim=0).to(like.dtype)
    return averages


def line(system: str, kind: str, total: int, attackers: int) -> Line:
    """Return a row of the table."""
    cells = [counts_cell(system, kind, total, attackers, seed) for seed in SEEDS]
    columns = {"": f"{system}: {kind}, {total:,}, {attackers} of {len(CLIENTS)}"}
    for head, key in (
        ("no attack", "quiet"),
        ("neither bound nor cap", "unbounded"),
        ("bound and cap", "bounded"),
        ("without the malicious clients", "without"),
    ):
        columns[head] = average(one[key] for one in cells)
    columns["refused"] = str(sum(one["refused"] for one in cells))
    columns["capped"] = str(sum(one["capped"] for one in cells))
    return columns


def lines_of(system: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line for each kind of inflation, total and number of malicious clients."""
    for kind in COUNT_KINDS[system]:
        for total in TOTALS:
            several = total == TOTALS[0] and system != AVERAGED
            for attackers in MALICIOUS if several else (1,):
                yield line(system, kind, total, attackers)


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
