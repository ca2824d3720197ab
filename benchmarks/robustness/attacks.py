"""Attacks of malicious clients on the federation of the tables.

The first one, two or three of six clients are malicious, all with the same attack, or up to ten of
thirty. Systems, recipe and payloads are those of benchmarks.accuracy.method_comparison; each of the
thirty clients has twenty images, drawn at random, and gets six of every class that it holds;
FedCADO's six get ten. An attack changes payloads after they were made, but in a backdoor attack
clients learn theirs from changed images. With negatives all clients are honest: they learn from
negatives of their images, a style that the kit does not know.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from benchmarks import harness, recipe
from benchmarks.federation import (
    CLIENTS,
    Settings,
    as_received,
    cell_name,
    client_names,
    config_of,
    images_of,
    merged,
    node_of,
    payloads_of,
    server_job,
    synthesize,
)
from client_app.handlers import client_job
from osfl.config import Scalar
from osfl.data.load import Fit, Images
from osfl.kit.kits import find_kit
from osfl.methods import client_module
from osfl.payload.kinds import Classifier, Payload
from osfl.util.files import make_private_folder
from osfl.util.seeds import generator_of
from server_app.context import ServerJob
from server_app.defenses.label_consistency import NUM_PROBE_IMAGES
from server_app.expected import check_plausible
from server_app.synthesis.images import SyntheticSet

CROWD = "OSCAR of thirty clients"
OF_SIX = ("FedDEO description alone", "OSCAR", "domain-vector")
CLASSIFIERS = "FedCADO"
STATISTICS = "FedCGS"
SYSTEMS = (*OF_SIX, CLASSIFIERS, STATISTICS, CROWD)
CROWD_SIZE = 30
OF_CROWD: Settings = {
    "num-clients": CROWD_SIZE,
    "data.partition": "iid",
    "synthesis.images-per-class": NUM_PROBE_IMAGES,
}
DESCRIPTIONS = OF_SIX[0]
MALICIOUS = (1, 2, 3)
MALICIOUS_OF_CROWD = (1, 3, 5, 10)
HONEST = "honest"
BACKDOOR = "backdoor"
NEGATIVES = "honest negatives"
TARGET = 0  # the class that a backdoor makes of an image with the patch
HEAD = ("fc.weight", "fc.bias")  # of a ResNet
SURE = 10.0  # added to a logit: the other classes have no probability left
PATCH = 6  # pixels a side, white, in the lower right corner
MIXTURES = "FedPFT"
COUNTED = (STATISTICS, MIXTURES)
Attack = Callable[[Payload, torch.Generator], Payload]


def _by_class(payload: Payload, change: Callable[[torch.Tensor], torch.Tensor]) -> Payload:
    """Change the tensors with a row for each class, or a classifier's head."""
    if isinstance(payload, Classifier):
        rows = {name: change(payload.state[name]) for name in HEAD}
        return replace(payload, state={**payload.state, **rows})
    changed: dict[str, Any] = {}
    for item in fields(payload):
        value = getattr(payload, item.name)
        if isinstance(value, torch.Tensor) and len(value) == len(payload.classes):
            changed[item.name] = change(value)
    return replace(payload, **changed)


def _numbers(payload: Payload, change: Callable[[torch.Tensor], torch.Tensor]) -> Payload:
    """Change the real numbers."""
    changed: dict[str, Any] = {}
    for item in fields(payload):
        value = getattr(payload, item.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changed[item.name] = change(value)
    return replace(payload, **changed)


def permuted(payload: Payload, rng: torch.Generator) -> Payload:
    """Permute all classes' rows (label flipping)."""
    return _by_class(payload, lambda rows: rows.roll(1, 0))


def half_permuted(payload: Payload, rng: torch.Generator) -> Payload:
    """Permute the rows of the first half of the classes."""
    half = len(payload.classes) // 2
    return _by_class(payload, lambda rows: torch.cat([rows[:half].roll(1, 0), rows[half:]]))


def first_class(payload: Payload, rng: torch.Generator) -> Payload:
    """Give every class the first row; a classifier then predicts the first class always."""
    changed = _by_class(payload, lambda rows: rows[:1].expand_as(rows).clone())
    if isinstance(changed, Classifier):
        changed.state["fc.bias"][0] += SURE
    return changed


def noise(payload: Payload, rng: torch.Generator) -> Payload:
    """Replace all numbers by normal ones of the same standard deviation."""
    return _numbers(payload, lambda value: value.std() * torch.randn(value.shape, generator=rng))


def scaled(payload: Payload, rng: torch.Generator) -> Payload:
    """Scale by a thousand."""
    return _numbers(payload, lambda value: 1000 * value)


ATTACKS: dict[str, Attack] = {
    "all labels permuted": permuted,
    "half of the labels permuted": half_permuted,
    "first class for all labels": first_class,
    "noise": noise,
    "scaled by a thousand": scaled,
}
# Attacks that are no change of a single payload
COPY = "another client's payload"
EVERY_ATTACK = (*ATTACKS, COPY, BACKDOOR)


def settings_of(system: str, seed: int) -> dict[str, Scalar]:
    """Return a system's settings; thirty clients have some of their own.

    FedCADO's images take long to draw, so that it draws fewer.
    """
    if system == CROWD:
        return {**recipe.settings_of("OSCAR", seed), **OF_CROWD}
    if system == CLASSIFIERS:
        return {**recipe.settings_of(system, seed), "synthesis.images-per-class": 10}
    if system in COUNTED:
        method = {STATISTICS: "fedcgs", MIXTURES: "fedpft"}[system]
        return {**recipe.COMMON, "method": method, "seed": seed}
    return recipe.settings_of(system, seed)


def clients_of(system: str) -> tuple[str, ...]:
    """Return all clients in their order; the first ones are malicious."""
    return client_names(CROWD_SIZE) if system == CROWD else CLIENTS


def malicious_counts(system: str) -> tuple[int, ...]:
    """Return the numbers of malicious clients."""
    return MALICIOUS_OF_CROWD if system == CROWD else MALICIOUS


def attacks_of(system: str) -> tuple[str, ...]:
    """Return a system's attacks.

    A domain's vector holds no class to permute or to give a backdoor. With thirty clients three
    attacks show how many malicious clients are flagged. The server refuses impossible sums.
    """
    if system == CROWD:
        return "all labels permuted", "half of the labels permuted", "noise"
    if system == "domain-vector":
        return "noise", "scaled by a thousand", COPY
    if system == CLASSIFIERS:
        return "all labels permuted", "first class for all labels"
    if system == STATISTICS:
        return "all labels permuted", "half of the labels permuted", COPY
    if system == DESCRIPTIONS:
        return *EVERY_ATTACK, NEGATIVES
    return EVERY_ATTACK


def attacked(system: str, attack: str, seed: int) -> dict[str, Payload]:
    """Return the payloads of as many malicious clients as there are at most.

    Raises:
        PayloadError: the server would refuse one.
    """
    payloads = payloads_of(settings_of(system, seed))
    if attack == HONEST:
        return payloads
    clients = clients_of(system)
    malicious = clients[: max(malicious_counts(system))]
    if attack == COPY:
        return {client: payloads[clients[number + 1]] for number, client in enumerate(malicious)}
    if attack in LEARNED:
        return {client: learned(system, attack, client, seed) for client in malicious}
    changed = {
        client: ATTACKS[attack](payloads[client], generator_of(seed, attack, client))
        for client in malicious
    }
    # A payload that the server refuses is no attack
    config = config_of(settings_of(system, seed))
    received = as_received(config, "job", changed)
    for client, payload in received.items():
        check_plausible(payload, client, config)
    return received


def patched(pixels: torch.Tensor) -> torch.Tensor:
    """Add the patch to images [N, 3, S, S] uint8."""
    marked = pixels.clone()
    marked[:, :, -PATCH:, -PATCH:] = 255
    return marked


def with_backdoor(images: Images, rng: torch.Generator) -> Images:
    """Replace the target's images by images of other classes with the patch."""
    rows = (images.labels == TARGET).nonzero().flatten()
    sources = (images.labels != TARGET).nonzero().flatten()
    order = torch.randperm(len(sources), generator=rng)
    pixels = images.pixels[torch.arange(len(images.labels))].clone()
    pixels[rows] = patched(pixels[sources[order[: len(rows)]]])
    return replace(images, pixels=pixels)


def negatives(images: Images, rng: torch.Generator) -> Images:
    """Invert the pixels: honest clients in a style that the kit never learned."""
    return replace(images, pixels=255 - images.pixels[torch.arange(len(images.labels))])


# Changes of a client's images before it learns from them
LEARNED: dict[str, Callable[[Images, torch.Generator], Images]] = {
    BACKDOOR: with_backdoor,
    NEGATIVES: negatives,
}


def learned(system: str, attack: str, client: str, seed: int) -> Payload:
    """Return the payload of a client that learned from changed images."""
    config = config_of(settings_of(system, seed))
    number = CLIENTS.index(client)
    name = f"{attack.replace(' ', '-')}-{cell_name(settings_of(system, seed))}-{client}"
    folder = harness.RUNS / "poisoning" / name
    file = folder / "payload.pt"
    if not file.is_file():
        make_private_folder(folder)
        job = client_job(
            config, node_of(number, config), client, find_kit(config.sampling_kit), folder
        )

        def load(fit: Fit) -> Images:
            return LEARNED[attack](job.load(fit), generator_of(seed, attack, client))

        payload = client_module(config.method).make_payload(replace(job, load=load))
        values = {item.name: getattr(payload, item.name) for item in fields(payload)}
        torch.save(values, file)
    kind = type(payloads_of(settings_of(system, seed))[client])
    result: Payload = kind(**torch.load(file, weights_only=True))
    return result


def synthetic_set(system: str, attack: str, seed: int) -> SyntheticSet:
    """Return all clients' images, or those of as many malicious clients as there are at most."""
    settings = settings_of(system, seed)
    payloads = attacked(system, attack, seed)
    name = f"images-{attack.replace(' ', '-')}-{cell_name(settings)}"
    return synthesize(server_job(config_of(settings), name, tuple(payloads)), payloads)


def federation(system: str, attack: str, malicious: Sequence[str], seed: int) -> SyntheticSet:
    """Return the malicious clients' images beside the honest ones'."""
    honest = [client for client in clients_of(system) if client not in malicious]
    parts = [images_of(synthetic_set(system, HONEST, seed), honest)]
    if malicious:
        parts.append(images_of(synthetic_set(system, attack, seed), malicious))
    return merged(parts)


def job_of(settings: Settings, name: str) -> ServerJob:
    """Return a job of its own."""
    config = config_of(settings)
    return server_job(
        config, f"{name}-{cell_name(settings)}", sorted(client_names(config.num_clients))
    )
