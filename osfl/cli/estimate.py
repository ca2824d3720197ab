"""`osfl run --dry-run`: check a run, and estimate its uploads, synthetic images and costs."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

import torch
from rich.table import Table

from client_app.app import check_node, client_settings
from client_app.privacy.mechanisms import noise_deviation
from osfl.cli import display, launch
from osfl.cli.preflight import check_data
from osfl.cli.run import runs_folder
from osfl.config import (
    ConfigError,
    NodeConfig,
    RunConfig,
    Scalar,
    flatten,
    resolve_auto,
    split_names,
)
from osfl.config.markers import AUTO
from osfl.data.load import domain_name, image_labels
from osfl.data.parts import DataError, class_names
from osfl.kit.kits import KitError, find_kit
from osfl.kit.run_check import check_run_models
from osfl.kit.used_parts import sampling_parts
from osfl.methods import METHODS
from osfl.models.classifiers import ClassifierError
from osfl.payload import kinds, wire
from osfl.payload.codecs import MAX_LEVEL
from osfl.payload.kinds import Captions, Domain, Payload
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.settings import default_config, resolve_config
from osfl.util.devices import pick_device
from server_app.app import check_server, estimate_disk_bytes
from server_app.expected import expected_payload, run_dimensions
from server_app.kit import check_subject

# A placeholder: FGL's captions have about 50 characters
CAPTION = "x" * 50
DOMAIN = "a name of a domain"
SHOWN_CLIENTS = 10


@dataclass(frozen=True)
class Client:
    """A client, described by its settings and its labels.

    Attributes:
        config: with the client's own classifier.
        labels: of the training images, one per image.
        domain: name of the domain; "" if it is unknown here.
    """

    config: RunConfig
    labels: tuple[int, ...]
    domain: str = ""

    @property
    def held(self) -> list[int]:
        """The client's distinct labels, ascending."""
        return sorted(set(self.labels))


@dataclass(frozen=True)
class Sampling:
    """The costs of the UNet passes that synthesize and score all images.

    Attributes:
        seconds: on this machine.
    """

    flops: float
    seconds: float


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
        disk_bytes: upper bound of the run folder's size.
        sampling: costs of synthesis; None for a method without it.
        noise: None if no client sends a noisy mean, or if the number of images is unknown.
    """

    changed: Mapping[str, Scalar]
    uploads: Mapping[str, int]
    images: int
    disk_bytes: int
    sampling: Sampling | None
    noise: Noise | None = None


def show_estimate(settings: Iterable[str], runs: Path | None, connection: str) -> None:
    """Check a run, and print its estimated costs.

    Raises:
        typer.Exit: the run cannot work; the reason was printed.
    """
    with display.expected_errors():
        try:
            config, _ = resolve_config(settings)
            launch.check_disk(runs_folder(config, runs, connection), estimate_disk_bytes(config))
            notes = [] if connection else check_data(config)
            estimate = estimate_run(config, simulated=not connection)
        except (ClassifierError, DataError, KitError, launch.LaunchError) as error:
            raise ConfigError(str(error)) from error
        for note in notes:
            display.console.print(note, markup=False, soft_wrap=True)
        _show(config, estimate, simulated=not connection)


def _show(config: RunConfig, estimate: Estimate, simulated: bool) -> None:
    changed = Table("key", "value", title=f"{config.method}: settings other than the defaults")
    for key, value in estimate.changed.items():
        changed.add_row(key, display.escape_text(value))
    if estimate.changed:
        display.console.print(changed)
    lines = _upload_lines(config, estimate, simulated)
    lines.append(f"the server synthesizes {estimate.images} images")
    lines.append(f"for data.name = {config.data.name}: {format_data_defaults(config)}")
    if estimate.sampling is not None:
        scoring = "" if config.robust == "off" else " and scores"
        lines.append(
            f"the UNet, which synthesizes{scoring} them: {human_flops(estimate.sampling.flops)}, "
            f"about {_duration(estimate.sampling.seconds)} on this machine"
        )
    lines += _privacy_lines(config, estimate.noise)
    if config.influence:
        times = config.training_clients + 1
        lines.append(f"the server trains the global model {times} more times (influence)")
    lines.append(f"the run's folder needs at most {human_bytes(estimate.disk_bytes)}")
    for line in lines:
        display.console.print(display.escape_text(line), highlight=False, soft_wrap=True)


def _upload_lines(config: RunConfig, estimate: Estimate, simulated: bool) -> list[str]:
    """Describe the uploads: one line if all are equal, else one per client."""
    verb = "sends at most" if config.payload_codec in MAX_LEVEL else "sends"
    sizes = sorted(estimate.uploads.items())
    if not simulated or len(set(estimate.uploads.values())) == 1:
        sender = "a client" if simulated else "a client with images of every class"
        lines = [f"{sender} {verb} {human_bytes(sizes[0][1])}"]
    else:
        lines = [f"{client} {verb} {human_bytes(size)}" for client, size in sizes[:SHOWN_CLIENTS]]
        if len(sizes) > SHOWN_CLIENTS:
            lines.append(f"and {len(sizes) - SHOWN_CLIENTS} more clients")
    total = human_bytes(sum(estimate.uploads.values()))
    return [*lines, f"all {len(sizes)} clients together: {total}"]


def _privacy_lines(config: RunConfig, noise: Noise | None) -> list[str]:
    """Describe the guarantee: its noise, its scope, and its training."""
    lines = []
    if noise is not None:
        lines.append(
            "the noise is as large as the clipping bound (clip-norm) in a mean of "
            f"{noise.break_even_images:,} images; {noise.client} has a mean of {noise.images:,}"
        )
        if noise.break_even_images > noise.images:
            lines.append("so that mean is mostly noise: set a larger epsilon, or method=votes")
    if config.epsilon:
        lines.append(
            "epsilon covers the payload's numbers, but not its list of classes, the number of "
            "images, or test results (node-config test-results)"
        )
    if config.epsilon and config.method in ("feddeo", "domain-vector"):
        passes = config.feddeo.epochs if config.method == "feddeo" else config.domain_vector.epochs
        lines.append(
            f"with epsilon, each image is trained on separately, in {passes} passes "
            f"({config.method}.epochs); steps and batch-size have no effect"
        )
    return lines


def _duration(seconds: float) -> str:
    """Format a duration, such as '1.5 min' for 90."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def estimate_run(config: RunConfig, simulated: bool = True) -> Estimate:
    """Check a run on this machine, and estimate its costs.

    Args:
        simulated: whether the clients are on this machine, too. Otherwise each is assumed to have
            one image of every class.

    Raises:
        ClassifierError, ConfigError, DataError, FileNotFoundError, KitError: the run cannot work.
    """
    check_subject(config)
    if simulated:
        check_run_models(config)
    clients = check_run_clients(config, simulated)
    rounds = config.rounds.count if METHODS[config.method].rounds else 1
    uploads = {name: rounds * upload_bytes(name, client) for name, client in clients.items()}
    images = planned_images(config, clients.values())
    sampling = None
    if METHODS[config.method].samples:
        sampling = sampling_cost(config, images, scoring_rows(config, clients.values()))
    noise = worst_noise(clients) if simulated else None
    return Estimate(
        changed_keys(config), uploads, images, estimate_disk_bytes(config), sampling, noise
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
        name: all_clients[name] for name in all_clients if name not in config.left_out_clients
    }
    for name, client in clients.items():
        size = upload_bytes(name, client)
        if size > config.max_payload_mb * 1e6:
            raise ConfigError(
                f"max-payload-mb = {config.max_payload_mb:g}: {name} would send "
                f"{human_bytes(size)}; raise it"
            )
    return clients


def format_data_defaults(config: RunConfig) -> str:
    """Format the settings whose default depends on the data."""
    flat = flatten(config)
    defaults = resolve_auto({**default_config(), "data.name": config.data.name})
    keys = [key for key, value in default_config().items() if value == AUTO != defaults[key]]
    settings = [
        f"{key} = {json.dumps(flat[key])}" + (" (default)" if flat[key] == defaults[key] else "")
        for key in keys
    ]
    return ", ".join(settings)


def changed_keys(config: RunConfig) -> dict[str, Scalar]:
    """Return the settings that differ from the defaults."""
    defaults = resolve_auto({**default_config(), "data.name": config.data.name})
    return {key: value for key, value in flatten(config).items() if value != defaults[key]}


def simulated_clients(config: RunConfig) -> dict[str, Client]:
    """Check the clients of a simulation, and return them by id.

    Raises:
        ConfigError, DataError, FileNotFoundError, KitError: a client cannot take part.
    """
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        node = NodeConfig(partition_id=number, num_partitions=config.num_clients)
        node_settings, _, name = client_settings(config, node)
        check_node(node_settings, node)
        labels = tuple(image_labels(config.data, node, "train", config.seed))
        clients[name] = Client(node_settings, labels, domain_name(config.data, node, config.seed))
    return clients


def placeholder_clients(config: RunConfig) -> dict[str, Client]:
    """Return placeholders for remote clients, each with one image of every class."""
    labels = tuple(range(len(class_names(config.data))))
    architectures = split_names(config.classifier.architecture)
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        architecture = architectures[number % len(architectures)]
        classifier = replace(config.classifier, architecture=architecture)
        clients[f"client-{number}"] = Client(replace(config, classifier=classifier), labels)
    return clients


# ---- Uploads ----


def upload_bytes(name: str, client: Client) -> int:
    """Return an upper bound of the bytes that a client sends per round, from tensor shapes."""
    method = METHODS[client.config.method]
    if method.rounds:
        return _model_bytes(client)
    if method.payload is None:
        return 0
    job_id = client.config.job_id or f"{client.config.method}-s{client.config.seed}"
    expected = expected_payload(client.config, job_id)(name)
    classes = tuple(expected.classes[label] for label in client.held)
    sizes = {"classes": len(classes), "images": len(client.labels)}
    tensors: wire.Tensors = {}
    match method.payload:
        case "Captions":
            counts = [client.labels.count(label) for label in client.held]
            blank: Payload = Captions(classes, tuple((CAPTION,) * count for count in counts))
        case "Domain":
            blank = Domain(classes, client.domain or DOMAIN)
        case "Classifier":
            architecture = client.config.classifier.architecture
            tensors = expected.architectures[architecture]
            blank = kinds.Classifier(classes, architecture, _empty_tensors(tensors))
        case kind:
            tensors = expected.tensors
            payload_class = getattr(kinds, kind)
            texts = {item.name: "" for item in fields(payload_class) if item.type in (str, "str")}
            blank = payload_class(classes, **_empty_tensors(tensors), **texts)
    message = wire.encode(blank, client.config.method, job_id, name)
    return len(message) + wire.number_bytes(tensors, sizes, expected)


def _empty_tensors(tensors: wire.Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.empty(0, dtype=dtype) for name, (_, dtype) in tensors.items()}


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
        dimensions = noise_dimensions(client.config) if client.config.epsilon else 0
        if dimensions == 0:
            continue
        # As in private_mean: for one image, in units of the clipping bound
        deviation = noise_deviation(1.0, 1, client.config.epsilon, client.config.delta)
        needed = math.ceil(deviation * math.sqrt(dimensions))
        labels = client.labels
        is_over_all_images = client.config.method == "domain-vector"
        images = len(labels) if is_over_all_images else min(map(labels.count, client.held))
        noisy_means.append(Noise(name, images, needed))
    return max(noisy_means, key=lambda noise: noise.break_even_images / noise.images, default=None)


def noise_dimensions(config: RunConfig) -> int:
    """Return the dimensions of a mean that determine the noise's norm; 0 without noisy means."""
    match METHODS[config.method].payload:
        case "Descriptions" | "DomainVector":
            sizes = run_dimensions(config)
            return sizes["p"] * sizes["d"]
        case "Encodings":
            sizes = run_dimensions(config)
            # A pooled encoding has no tokens
            return sizes.get("L", 1) * sizes["d"]
        case "Embeddings":
            # The other half of unCLIP's condition is the noise level
            return run_dimensions(config)["2e"] // 2
        case "FeatureMixtures":
            # Means and mean squares share the guarantee, which doubles the noise's variance
            return 2 * run_dimensions(config)["f"]
    return 0


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


def synthesized_labels(client: Client) -> list[int]:
    """Return the labels that the server synthesizes for a client.

    These are the client's own labels, or all labels if the method does not send them, or if it
    synthesizes all classes in the client's domain.
    """
    config = client.config
    has_all_classes = METHODS[config.method].payload is None or (
        config.method == "domain-vector" and config.domain_vector.classes == "all"
    )
    return list(range(len(class_names(config.data)))) if has_all_classes else client.held


def scoring_rows(config: RunConfig, clients: Iterable[Client]) -> int:
    """Return the number of UNet rows that score label consistency, if `robust` is on."""
    if config.robust == "off":
        return 0
    # Imports diffusers, which takes seconds
    from server_app.defenses.label_consistency import unet_rows

    num_classes = len(class_names(config.data))
    rows_per_class = unet_rows(config.synthesis.images_per_class, num_classes)
    return rows_per_class * sum(len(synthesized_labels(client)) for client in clients)


def sampling_cost(config: RunConfig, images: int, more_rows: int = 0) -> Sampling:
    """Estimate the costs of the UNet passes by a short benchmark.

    Args:
        images: number of synthetic images.
        more_rows: number of UNet rows for other purposes.
    """
    # These take seconds to import, and the check of a run does not need them
    from osfl.models.diffusion import timesteps
    from server_app.synthesis.engine import load_engine, seconds_and_flops

    unoptimized = replace(
        config.synthesis,
        dtype="float32" if config.synthesis.dtype == "auto" else config.synthesis.dtype,
        attention="default",
        memory_format="contiguous",
        compile="off",
        cache_interval=1,
        small_decoder="",
        lora="",
        base_steps=0,
    )
    folder = find_kit(config.sampling_kit, sampling_parts(config))
    kit = load_engine(folder, pick_device(config.device), unoptimized)
    unit_size = unoptimized.unit_size
    batch = min(unoptimized.batch_size or unit_size, unit_size)
    seconds, flops = seconds_and_flops(kit, branches(config) * batch)
    rows = images * rows_per_image(config, timesteps(kit.scheduler, unoptimized.steps)) + more_rows
    return Sampling(rows * flops, rows * seconds)


def branches(config: RunConfig) -> int:
    """Return the rows per image of a guided UNet pass: unconditional, and one per condition."""
    if config.method == "feddisc":
        return 3
    if config.method == "feddeo":
        scales = (config.feddeo.guidance_text, config.feddeo.guidance_description)
        # A single condition of scale 1 needs no unconditional branch
        return 1 if sorted(scales) == [0.0, 1.0] else 1 + sum(scale != 0 for scale in scales)
    # A method may have no section of its own
    section = getattr(config, METHODS[config.method].server, None)
    guidance = getattr(section, "guidance", 0.0)
    return 1 if guidance == 1 else 2


def rows_per_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """Return the number of UNet rows per image.

    A gradient through the UNet counts as one more pass, and guidance is assumed at every step.

    Args:
        timesteps: of the kit's scheduler.
    """
    steps = config.synthesis.steps
    passes = steps * branches(config)
    match config.method:
        case "espresso" if config.espresso.z_sampling:
            above = [t for t in timesteps if t > config.espresso.z_threshold]
            # A zigzag is a denoising step with strong guidance, and an inversion with weak guidance
            inversion = 1 if config.espresso.inversion_guidance in (0, 1) else 2
            return passes + len(above) * (branches(config) + inversion)
        case "fedlmg":
            return passes * _gradient_passes(config.fedlmg.gradient)
        case "fedcado":
            edits = config.fedcado.noise_edits * branches(config)
            return (passes + edits) * _gradient_passes(config.fedcado.gradient)
    return passes


def _gradient_passes(gradient: str) -> int:
    """Return the cost of a guidance gradient's forward and backward passes, in forward passes."""
    return 2 if gradient == "full" else 1
