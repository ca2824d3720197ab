"""`osfl run --dry-run`.

What a run would send, draw and take, and whether it can work, before anybody does.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from osfl.util.devices import pick_device
from server_app.app import check_server, estimate_disk_bytes
from server_app.expected import expected_payload, run_dimensions

CAPTION = "x" * 50  # FGL's captions have some 50 characters
DOMAIN = "a name of a domain"
SHOWN_CLIENTS = 10


@dataclass(frozen=True)
class Client:
    """A client as far as its settings and the names of its files say.

    Attributes:
        config: with its own classifier.
        labels: of its training images, one an image.
        domain: its name; "" where nobody here knows it.
    """

    config: RunConfig
    labels: tuple[int, ...]
    domain: str = ""

    @property
    def held(self) -> list[int]:
        """The labels that occur, ascending."""
        return sorted(set(self.labels))


@dataclass(frozen=True)
class Sampling:
    """What the passes of the UNet take, of all images: to draw, and to judge them."""

    flops: float
    seconds: float  # on this machine


@dataclass(frozen=True)
class Noise:
    """Of a guarantee, in the mean where it is worst.

    Attributes:
        client: whose mean that is.
        images: that the mean is of.
        needed: images of which the noise would be as long as the limit to which each is cut
            (`clip-norm`), and so as long as their mean can be.
    """

    client: str
    images: int
    needed: int


@dataclass(frozen=True)
class Estimate:
    """What a run would send, draw and take.

    Attributes:
        changed: the keys that are not at their defaults.
        uploads: bytes that each client sends, in all rounds together; what is deflated is less.
        images: that the server draws.
        disk_bytes: of the run's folder, at most.
        sampling: None for a method that draws nothing.
        noise: None where no client noises a mean, or nobody knows of how many images.
    """

    changed: Mapping[str, Scalar]
    uploads: Mapping[str, int]
    images: int
    disk_bytes: int
    sampling: Sampling | None
    noise: Noise | None = None


def show_estimate(settings: Iterable[str], runs: Path | None, connection: str) -> None:
    """Print the estimate of a run.

    Raises:
        typer.Exit: it cannot work, and why was said.
    """
    with display.named_errors():
        try:
            config, _ = launch.resolve_config(settings)
            launch.check_disk(runs_folder(config, runs, connection), estimate_disk_bytes(config))
            notes = [] if connection else check_data(config)
            estimate = estimate_run(config, simulated=not connection)
        except (ClassifierError, DataError, KitError, launch.LaunchError) as error:
            raise ConfigError(str(error)) from error
        for note in notes:
            display.console.print(note, markup=False, soft_wrap=True)
        _show(config, estimate, simulated=not connection)


def _show(config: RunConfig, estimate: Estimate, simulated: bool) -> None:
    changed = Table("key", "value", title=f"{config.method}: settings that are not the defaults")
    for key, value in estimate.changed.items():
        changed.add_row(key, display.words(value))
    if estimate.changed:
        display.console.print(changed)
    sender = "a client" if simulated else "a client that has an image of every class"
    sends = "sends at most" if config.payload_codec in MAX_LEVEL else "sends"
    sizes = sorted(estimate.uploads.items())
    lines = [f"{client} {sends} {human_bytes(size)}" for client, size in sizes[:SHOWN_CLIENTS]]
    if not simulated or len(set(estimate.uploads.values())) == 1:
        lines = [f"{sender} {sends} {human_bytes(sizes[0][1])}"]
    elif len(sizes) > SHOWN_CLIENTS:
        lines.append(f"and {len(sizes) - SHOWN_CLIENTS} more clients")
    lines.append(f"all {len(sizes)} together: {human_bytes(sum(estimate.uploads.values()))}")
    lines.append(f"the server draws {estimate.images} images")
    lines.append(f"for data.name = {config.data.name}: {chosen_by_data(config)}")
    if estimate.sampling is not None:
        judging = "" if config.robust == "off" else ", and of judging them"
        lines.append(
            f"the UNet's share of that{judging}: {human_flops(estimate.sampling.flops)}, "
            f"about {_duration(estimate.sampling.seconds)} on this machine"
        )
    if (noise := estimate.noise) is not None:
        lines.append(
            "the guarantee's noise is as long as a mean can be (clip-norm) where that is of "
            f"{noise.needed:,} images; {noise.client} has one of {noise.images:,}"
        )
        if noise.needed > noise.images:
            lines.append("so most of that is noise: take a larger epsilon, or method=votes")
    if config.epsilon:
        lines.append(
            "epsilon covers the payload's numbers; it does not cover its list of classes, the "
            "counts of images, nor test results (node-config test-results)"
        )
    if config.epsilon and config.method in ("feddeo", "domain-vector"):
        passes = config.feddeo.epochs if config.method == "feddeo" else config.domain_vector.epochs
        lines.append(
            f"with epsilon each image learns by itself, in {passes} passes "
            f"({config.method}.epochs); steps and batch-size do not count"
        )
    if config.influence:
        more = config.training_clients + 1
        lines.append(f"the server trains the global model {more} times more (influence)")
    lines.append(f"the run's folder takes at most {human_bytes(estimate.disk_bytes)}")
    for line in lines:
        display.console.print(display.words(line), highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    """90 to '1.5 min'."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def estimate_run(config: RunConfig, simulated: bool = True) -> Estimate:
    """Check a run on this machine, and estimate it.

    Args:
        simulated: whether the clients are on this machine, too. Else each is taken to have one
            image of every class.

    Raises:
        ClassifierError, ConfigError, DataError, FileNotFoundError, KitError: it cannot work; why.
    """
    if simulated:
        check_run_models(config)
    clients = checked_clients(config, simulated)
    rounds = config.rounds.count if METHODS[config.method].rounds else 1
    uploads = {name: rounds * upload_bytes(name, client) for name, client in clients.items()}
    images = planned_images(config, clients.values())
    sampling = None
    if METHODS[config.method].samples:
        sampling = sampling_cost(config, images, judged_rows(config, clients.values()))
    noise = worst_noise(clients) if simulated else None
    return Estimate(
        changed_keys(config), uploads, images, estimate_disk_bytes(config), sampling, noise
    )


def checked_clients(config: RunConfig, simulated: bool) -> dict[str, Client]:
    """Check a run on this machine; its clients that send a payload, by their ids.

    Args:
        simulated: whether the clients are on this machine, too.

    Raises:
        ClassifierError, ConfigError, DataError, FileNotFoundError, KitError: the run cannot work.
    """
    check_server(config)
    everybody = simulated_clients(config) if simulated else unseen_clients(config)
    clients = {name: one for name, one in everybody.items() if name not in config.left_out_clients}
    for name, client in clients.items():
        size = upload_bytes(name, client)
        if size > config.max_payload_mb * 1e6:
            raise ConfigError(
                f"max-payload-mb = {config.max_payload_mb:g}: {name} would send "
                f"{human_bytes(size)}; raise it"
            )
    return clients


def chosen_by_data(config: RunConfig) -> str:
    """The values of the keys whose default depends on the kind of the data, in words."""
    flat = flatten(config)
    usual = resolve_auto({**launch.default_config(), "data.name": config.data.name})
    keys = [key for key, value in launch.default_config().items() if value == AUTO != usual[key]]
    told = [
        f"{key} = {json.dumps(flat[key])}" + (" (default)" if flat[key] == usual[key] else "")
        for key in keys
    ]
    return ", ".join(told)


def changed_keys(config: RunConfig) -> dict[str, Scalar]:
    """The keys that are not at their defaults."""
    usual = resolve_auto({**launch.default_config(), "data.name": config.data.name})
    return {key: value for key, value in flatten(config).items() if value != usual[key]}


def simulated_clients(config: RunConfig) -> dict[str, Client]:
    """The clients of a simulation, by their ids; each has what it needs to take part.

    Raises:
        ConfigError, DataError, FileNotFoundError, KitError: one cannot take part; why.
    """
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        node = NodeConfig(partition_id=number, num_partitions=config.num_clients)
        node_settings, _, name = client_settings(config, node)
        check_node(node_settings, node)
        labels = tuple(image_labels(config.data, node, "train", config.seed))
        clients[name] = Client(node_settings, labels, domain_name(config.data, node, config.seed))
    return clients


def unseen_clients(config: RunConfig) -> dict[str, Client]:
    """Clients on machines of their own, each with one image of every class."""
    labels = tuple(range(len(class_names(config.data))))
    architectures = split_names(config.classifier.architecture)
    clients: dict[str, Client] = {}
    for number in range(config.num_clients):
        architecture = architectures[number % len(architectures)]
        classifier = replace(config.classifier, architecture=architecture)
        clients[f"client-{number}"] = Client(replace(config, classifier=classifier), labels)
    return clients


# ---- What is sent ----


def upload_bytes(name: str, client: Client) -> int:
    """What a client sends in a round, at most.

    Of a message, its names and numbers, by the tensors' shapes.
    """
    method = METHODS[client.config.method]
    if method.rounds:
        return _model_bytes(client)
    if method.payload is None:
        return 0
    job_id = client.config.job_id or f"{client.config.method}-s{client.config.seed}"
    expected = expected_payload(client.config, job_id)(name)
    held = tuple(expected.classes[label] for label in client.held)
    sizes = {"classes": len(held), "images": len(client.labels)}
    tensors: wire.Tensors = {}
    match method.payload:
        case "Captions":
            counts = [client.labels.count(label) for label in client.held]
            blank: Payload = Captions(held, tuple((CAPTION,) * count for count in counts))
        case "Domain":
            blank = Domain(held, client.domain or DOMAIN)
        case "Classifier":
            architecture = client.config.classifier.architecture
            tensors = expected.architectures[architecture]
            blank = kinds.Classifier(held, architecture, _without_numbers(tensors))
        case kind:
            tensors = expected.tensors
            of_kind = getattr(kinds, kind)
            texts = {item.name: "" for item in fields(of_kind) if item.type in (str, "str")}
            blank = of_kind(held, **_without_numbers(tensors), **texts)
    message = wire.encode(blank, client.config.method, job_id, name)
    return len(message) + wire.number_bytes(tensors, sizes, expected)


def _without_numbers(tensors: wire.Tensors) -> dict[str, torch.Tensor]:
    """Tensors of no numbers, in the place of large ones."""
    return {name: torch.empty(0, dtype=dtype) for name, (_, dtype) in tensors.items()}


def _model_bytes(client: Client) -> int:
    """The numbers of a client's model."""
    as_payload = replace(client.config, method="local")
    expected = expected_payload(as_payload, "rounds")("client")
    tensors = expected.architectures[client.config.classifier.architecture]
    return wire.number_bytes(tensors, {}, expected)


# ---- What a guarantee takes ----


def worst_noise(clients: Mapping[str, Client]) -> Noise | None:
    """Of all means that clients noise, the one that says least; None: nobody noises one."""
    found = []
    for name, client in clients.items():
        numbers = noised_numbers(client.config) if client.config.epsilon else 0
        if numbers == 0:
            continue
        # Of private_mean: its length for one image, in units of the limit
        each = noise_deviation(1.0, 1, client.config.epsilon, client.config.delta)
        needed = math.ceil(each * math.sqrt(numbers))
        labels = client.labels
        whole = client.config.method == "domain-vector"
        images = len(labels) if whole else min(map(labels.count, client.held))
        found.append(Noise(name, images, needed))
    return max(found, key=lambda noise: noise.needed / noise.images, default=None)


def noised_numbers(config: RunConfig) -> int:
    """As many numbers of a mean as give the noise its length; 0 where no mean gets any."""
    match METHODS[config.method].payload:
        case "Descriptions" | "DomainVector":
            sizes = run_dimensions(config)
            return sizes["p"] * sizes["d"]
        case "Encodings":
            sizes = run_dimensions(config)
            # A pooled encoding has no tokens
            return sizes.get("L", 1) * sizes["d"]
        case "Embeddings":
            # The other half of unCLIP's condition says the noise level
            return run_dimensions(config)["2e"] // 2
        case "FeatureMixtures":
            # Means and mean squares, together noised to twice the variance
            return 2 * run_dimensions(config)["f"]
    return 0


# ---- What is drawn ----


def planned_images(config: RunConfig, clients: Iterable[Client]) -> int:
    """How many images the server draws, public domains' among them."""
    if not METHODS[config.method].samples:
        return 0
    drawn = [drawn_classes(client) for client in clients]
    images = sum(map(len, drawn))
    if config.class_balance:
        # As many of every class as of the one that most clients hold
        holders = Counter(label for labels in drawn for label in labels)
        images = len(holders) * max(holders.values(), default=0)
    public = len(config.public_domain_names) * len(class_names(config.data))
    return (images + public) * config.synthesis.images_per_class


def drawn_classes(client: Client) -> list[int]:
    """The labels of which the server draws images for a client.

    Those that it holds; all where nobody says which, or where its domain's vector is to have all.
    """
    config = client.config
    every = METHODS[config.method].payload is None or (
        config.method == "domain-vector" and config.domain_vector.classes == "all"
    )
    return list(range(len(class_names(config.data)))) if every else client.held


def judged_rows(config: RunConfig, clients: Iterable[Client]) -> int:
    """How many rows go through the UNet to judge what was drawn, where `robust` asks for it."""
    if config.robust == "off":
        return 0
    # With diffusers, which takes seconds to import
    from server_app.defenses.label_consistency import unet_rows

    every = len(class_names(config.data))
    of_a_class = unet_rows(config.synthesis.images_per_class, every)
    return of_a_class * sum(len(drawn_classes(client)) for client in clients)


def sampling_cost(config: RunConfig, images: int, more_rows: int = 0) -> Sampling:
    """What the UNet's passes take for so many images, and for so many rows that draw none; by a
    short look at how fast it is here.
    """
    # Seconds to import, and a check of a run needs neither
    from osfl.models.diffusion import timesteps
    from server_app.synthesis.engine import load_engine, seconds_and_flops

    plain = replace(
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
    kit = load_engine(folder, pick_device(config.device), plain)
    batch = min(plain.batch_size or plain.unit_size, plain.unit_size)
    seconds, flops = seconds_and_flops(kit, branches(config) * batch)
    rows = images * rows_an_image(config, timesteps(kit.scheduler, plain.steps)) + more_rows
    return Sampling(rows * flops, rows * seconds)


def branches(config: RunConfig) -> int:
    """Rows of a guided UNet pass an image: nothing's, and one a condition."""
    if config.method == "feddisc":
        return 3
    if config.method == "feddeo":
        scales = (config.feddeo.guidance_text, config.feddeo.guidance_description)
        # One condition with the scale 1 is drawn without nothing's branch
        return 1 if sorted(scales) == [0.0, 1.0] else 1 + sum(scale != 0 for scale in scales)
    # A method may have no section of its own
    section = getattr(config, METHODS[config.method].server, None)
    guidance = getattr(section, "guidance", 0.0)
    return 1 if guidance == 1 else 2


def rows_an_image(config: RunConfig, timesteps: Sequence[int]) -> int:
    """How many rows go through the UNet for an image.

    A gradient through it counts as one more pass.

    Guidance is taken to be on at every step.

    Args:
        timesteps: that the kit's scheduler takes.
    """
    steps = config.synthesis.steps
    passes = steps * branches(config)
    match config.method:
        case "espresso" if config.espresso.z_sampling:
            above = [t for t in timesteps if t > config.espresso.z_threshold]
            # Of a zig-zag: a strong step down, and a weak one back
            weak = 1 if config.espresso.inversion_guidance in (0, 1) else 2
            return passes + len(above) * (branches(config) + weak)
        case "fedlmg":
            return passes * _gradient_passes(config.fedlmg.gradient)
        case "fedcado":
            edits = config.fedcado.noise_edits * branches(config)
            return (passes + edits) * _gradient_passes(config.fedcado.gradient)
    return passes


def _gradient_passes(gradient: str) -> int:
    """Forward alone, or forward and back to the latents."""
    return 2 if gradient == "full" else 1
