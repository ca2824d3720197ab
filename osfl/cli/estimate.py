"""Check a run on this machine, and estimate its uploads, synthetic images and costs."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import mean
from typing import Any

import torch

from client_app.privacy.mechanisms import noise_deviation
from osfl.cli.run_clients import Client, placeholder_clients, simulated_clients
from osfl.config import (
    ConfigError,
    RunConfig,
    Scalar,
    flatten,
    installed_defaults,
    is_mixed,
    resolve_auto,
)
from osfl.data.parts import class_names
from osfl.defenses import DEFENSES, LABEL_CONSISTENCY
from osfl.kit.kits import find_kit, kit_image_size
from osfl.kit.run_check import check_run_models
from osfl.kit.used_parts import sampling_parts
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.fields import Form, fields_of
from osfl.payload.kinds import Masked, Payload, kind_of
from osfl.payload.masking import SHARE_BYTES
from osfl.run_folder.report.page import human_bytes
from osfl.settings import default_config
from osfl.util.costs import Cost, peak_memory_mb
from osfl.util.devices import pick_device
from server_app.app import check_server, estimate_disk_bytes
from server_app.costs import branches, guidance_cost, noisy_mean, rows_per_image
from server_app.expected import expected_payload
from server_app.federation.secure_members import sum_layout
from server_app.kit import check_subject

# A placeholder: FGL's captions have about 50 characters
CAPTION = "x" * 50
DOMAIN = "a name of a domain"
# A PNG file's share of its pixels' bytes: 0.68 for the digits kit's images, 0.5 for photographs and
# drawings at 64 px, more for noise
PNG_SHARE = 0.7
# Of an image, in manifest.jsonl and in its unit
MANIFEST_BYTES = 400


@dataclass(frozen=True)
class Noise:
    """The noisy mean with the lowest signal-to-noise ratio.

    Attributes:
        client: the client that sends the mean.
        images: number of images in the mean.
        needed: number of images at which the norm of the noise equals the clipping bound
            (`clip-norm`), which bounds the norm of the mean.
    """

    client: str
    images: int
    break_even_images: int


@dataclass(frozen=True)
class Estimate:
    """The estimated costs of a run.

    Attributes:
        changed: settings that differ from the defaults.
        uploads: bytes per client over all rounds, before compression.
        images: number of synthetic images.
        disk_bytes: upper bound of the run folder's size, at any time.
        folder_bytes: the run folder's size when the run has finished; None for a method without
            synthesis.
        client_flops: FLOPs per client of a simulation over all rounds; None where they are unknown.
        sampling: costs of the diffusion model, which synthesizes and scores all images; None for a
            method without synthesis.
        training: costs of training the global models on the images; None likewise.
        memory_mb: peak memory of the server's process and its GPU, in MB (1e6 bytes); None
            likewise.
        noise: None if no client sends a noisy mean, or if the number of images is unknown.
        kinds: the kind of payload that each client of a mixed run sends.
    """

    changed: Mapping[str, Scalar]
    uploads: Mapping[str, int]
    images: int
    disk_bytes: int
    folder_bytes: int | None
    client_flops: Mapping[str, float | None]
    sampling: Cost | None
    training: Cost | None
    memory_mb: float | None
    noise: Noise | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)


def estimate_run(config: RunConfig, simulated: bool = True) -> Estimate:
    """Check a run on this machine, and estimate its costs.

    Args:
        simulated: whether the clients are on this machine, too. Otherwise each is assumed to have
            one image of every class.

    Raises:
        ClassifierError, ConfigError, DataError, FileNotFoundError, KitError: the run cannot work.
    """
    # Their imports take seconds, and the check of a run does not need them
    from osfl.cli.client_costs import client_flops
    from osfl.cli.training_costs import model_bytes, training_cost

    check_subject(config)
    if simulated:
        check_run_models(config)
    clients = check_run_clients(config, simulated)
    rounds = config.rounds.count if METHODS[config.method].rounds else 1
    uploads = {name: rounds * upload_bytes(name, client) for name, client in clients.items()}
    images = planned_images(config, clients.values())
    sampling = training = memory_mb = folder_bytes = None
    if METHODS[config.method].samples:
        sampling = sampling_cost(config, images, clients.values())
        training = training_cost(config, images)
        sent = sum(uploads.values())
        # Sampling and training did in this process what the server does. It holds every payload
        # twice: as it was received, and as the networks or conditions that it contains
        held = 2 * sent + images_in_memory(config, images)
        memory_mb = peak_memory_mb() + held / 1e6
        folder_bytes = sent + model_bytes(config) + images * image_bytes(config)
    is_known = simulated and is_mixed(config)
    return Estimate(
        changed=changed_keys(config),
        uploads=uploads,
        images=images,
        disk_bytes=estimate_disk_bytes(config),
        folder_bytes=folder_bytes,
        client_flops={name: client_flops(client) for name, client in clients.items() if simulated},
        sampling=sampling,
        training=training,
        memory_mb=memory_mb,
        noise=worst_noise(clients) if simulated else None,
        kinds={name: client.kind for name, client in clients.items() if is_known},
    )


def check_run_clients(config: RunConfig, simulated: bool) -> dict[str, Client]:
    """Check a run on this machine, and return the clients that send a payload, by id.

    Args:
        simulated: whether the clients are on this machine, too.

    Raises:
        ClassifierError, ConfigError, DataError, FileNotFoundError, KitError: the run cannot work.
    """
    check_server(config)
    all_clients = simulated_clients(config) if simulated else placeholder_clients(config)
    clients = {
        name: all_clients[name] for name in all_clients if name not in config.held_out_clients
    }
    for name, client in clients.items():
        size = upload_bytes(name, client)
        if size > config.max_payload_mb * 1e6:
            raise ConfigError(
                f"max-payload-mb = {config.max_payload_mb:g}: {name} would send "
                f"{human_bytes(size)}; raise it"
            )
    return clients


def changed_keys(config: RunConfig) -> dict[str, Scalar]:
    """Return the settings that differ from the defaults."""
    settings = {**default_config(), **installed_defaults(config.method)}
    defaults = resolve_auto({**settings, "data.name": config.data.name})
    return {key: value for key, value in flatten(config).items() if value != defaults[key]}


# ---- Uploads ----


def upload_bytes(name: str, client: Client) -> int:
    """Return an upper bound of the bytes that a client sends per round, from tensor shapes."""
    additions = [replace(client, config=part, additions=()) for part in client.additions]
    return _part_bytes(name, client) + sum(_part_bytes(name, part) for part in additions)


def _part_bytes(name: str, client: Client) -> int:
    """Return `upload_bytes` of the payload of `client.config`."""
    method = METHODS[client.config.method]
    if method.rounds:
        return _model_bytes(client)
    if method.payload is None:
        return 0
    job_id = client.config.job_id or f"{client.config.method}-s{client.config.seed}"
    if client.config.secure_sum:
        return _summand_bytes(client.config, job_id, name)
    expected = expected_payload(client.config, job_id)(name)
    sizes = {"classes": len(client.held), "images": len(client.labels)}
    tensors = expected.tensors
    if method.sends_classifier:
        tensors = expected.architectures[client.config.classifier.architecture]
    blank = _placeholder(method.payload, client, expected.classes, tensors)
    message = wire.encode(blank, client.config.method, job_id, name)
    return len(message) + wire.number_bytes(tensors, sizes, expected)


def _summand_bytes(config: RunConfig, job_id: str, name: str) -> int:
    """Return the bytes of a client's masked payload in a secure sum."""
    members = config.training_clients
    count = sum_layout(config, members).size + 1
    empty = torch.empty(0, dtype=torch.uint8)
    blank = Masked(class_names(config.data), "0" * 64, empty, empty)
    message = wire.encode(blank, config.method, job_id, name)
    return len(message) + 4 * count + SHARE_BYTES * members


def _placeholder(
    kind: str, client: Client, all_classes: Sequence[str], tensors: wire.Tensors
) -> Payload:
    """Return a client's payload with texts of the usual length and empty tensors.

    Args:
        kind: the payload's class.
        all_classes: the run's classes.
        tensors: the payload's.
    """
    empty = {name: torch.empty(0, dtype=dtype) for name, (_, dtype) in tensors.items()}
    values: dict[str, Any] = {}
    for name, declared in fields_of(kind_of(kind)).items():
        match declared.form:
            case Form.TEXTS:
                counts = map(client.labels.count, client.held)
                values[name] = tuple((CAPTION,) * count for count in counts)
            case Form.STATE:
                values[name] = empty
                values["architecture"] = client.config.classifier.architecture
            case Form.TEXT:
                values.setdefault(name, client.domain or DOMAIN)
            case Form.TENSOR:
                values[name] = empty.get(name)
    classes = tuple(all_classes[label] for label in client.held)
    payload: Payload = kind_of(kind)(classes, **values)
    return payload


def _model_bytes(client: Client) -> int:
    as_payload = replace(client.config, method="local")
    expected = expected_payload(as_payload, "rounds")("client")
    tensors = expected.architectures[client.config.classifier.architecture]
    return wire.number_bytes(tensors, {}, expected)


# ---- Noise of a guarantee ----


def worst_noise(clients: Mapping[str, Client]) -> Noise | None:
    """Return the noisy mean with the lowest signal-to-noise ratio, or None."""
    noisy_means = []
    for name, client in clients.items():
        # In a secure sum the noise is added once for all clients
        if client.config.secure_sum:
            continue
        mean = noisy_mean(client.config) if client.config.epsilon else None
        if mean is None:
            continue
        # As in private_mean: for one image, in units of the clipping bound
        deviation = noise_deviation(1.0, 1, client.config.epsilon, client.config.delta)
        needed = math.ceil(deviation * math.sqrt(mean.dimensions))
        labels = client.labels
        images = min(map(labels.count, client.held)) if mean.over_classes else len(labels)
        noisy_means.append(Noise(name, images, needed))
    return max(noisy_means, key=lambda noise: noise.break_even_images / noise.images, default=None)


# ---- Synthesis ----


def planned_images(config: RunConfig, clients: Iterable[Client]) -> int:
    """Return the number of synthetic images, including those of public domains."""
    if not METHODS[config.method].samples:
        return 0
    labels_by_client = [synthesized_labels(client) for client in clients]
    images = sum(map(len, labels_by_client))
    if config.class_balance:
        # Every class gets as many images as the class of the most clients
        clients_by_label = Counter(chain.from_iterable(labels_by_client))
        images = len(clients_by_label) * max(clients_by_label.values(), default=0)
    public = len(config.public_domain_names) * len(class_names(config.data))
    return (images + public) * config.synthesis.images_per_class


def image_bytes(config: RunConfig) -> int:
    """Return the bytes of an image's file and of its lines in the manifest, on average."""
    side = kit_image_size(find_kit(config.sampling_kit))
    return round(PNG_SHARE * 3 * side**2) + MANIFEST_BYTES


def images_in_memory(config: RunConfig, images: int) -> int:
    """Return the bytes of the synthetic images that the server holds; 0 if they are in a file."""
    # Imports torch and diffusers, which takes seconds
    from server_app.synthesis.images import memory_for_pixels

    size = 3 * images * config.data.image_size**2
    return size if size <= memory_for_pixels() else 0


def synthesized_labels(client: Client) -> list[int]:
    """Return the labels that the server synthesizes for a client.

    These are the client's own labels, or all labels if the method does not send them, or if it
    synthesizes all classes in the client's domain.
    """
    config = client.config
    if METHODS[config.method].synthesizes_all_classes(config):
        return list(range(len(class_names(config.data))))
    return client.held


def scores_images(config: RunConfig) -> bool:
    """Return whether the run's defense scores the label consistency of images."""
    return DEFENSES.get(config.defense) == LABEL_CONSISTENCY


def scoring_rows(config: RunConfig, clients: Iterable[Client]) -> int:
    """Return the number of UNet rows that score label consistency; 0 without this defense."""
    if not scores_images(config):
        return 0
    # Imports diffusers, which takes seconds
    from server_app.defenses.label_consistency import unet_rows

    num_classes = len(class_names(config.data))
    rows_per_class = unet_rows(config.synthesis.images_per_class, num_classes)
    return rows_per_class * sum(len(synthesized_labels(client)) for client in clients)


def sampling_cost(config: RunConfig, images: int, clients: Collection[Client]) -> Cost:
    """Estimate the costs of UNet passes, guidance and decoding by a short benchmark.

    Args:
        images: number of synthetic images.
        clients: their methods determine the rows of an image; a mixed run's share the images.
    """
    # These take seconds to import, and the check of a run does not need them
    from osfl.models.diffusion import timesteps
    from server_app.synthesis.engine import decoding_cost, load_engine, unet_cost

    unoptimized = replace(
        config.synthesis,
        dtype="float32" if config.synthesis.dtype == "auto" else config.synthesis.dtype,
        attention="default",
        memory_format="contiguous",
        compile="off",
        cache_interval=1,
        tiny_decoder="",
        lora="",
        base_steps=0,
    )
    folder = find_kit(config.sampling_kit, sampling_parts(config))
    kit = load_engine(folder, pick_device(config.device), unoptimized)
    unit_size = unoptimized.unit_size
    batch = min(unoptimized.batch_size or unit_size, unit_size, max(1, images))
    methods = [client.config for client in clients if is_mixed(config)] or [config]
    per_row = unet_cost(kit, max(map(branches, methods)) * batch)
    steps = timesteps(kit.scheduler, unoptimized.steps)
    rows = images * mean(rows_per_image(method, steps) for method in methods)
    rows += scoring_rows(config, clients)
    guidance = {method.method: guidance_cost(method, kit, batch) for method in methods}
    per_image = [decoding_cost(kit, batch)]
    # A mixed run's methods share the images
    per_image += [guidance[method.method].times(1 / len(methods)) for method in methods]
    parts = [per_row.times(rows), *(cost.times(images) for cost in per_image)]
    return Cost(sum(part.flops for part in parts), sum(part.seconds for part in parts))
