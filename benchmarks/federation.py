"""The federation of the tables: six clients of the digits, their payloads, and a server's job.

Payloads are made by the clients' half without a network, and kept in runs/payloads: a client sends
the same whatever its server does, so that tables share them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from flwr.app import RecordDict

from benchmarks import harness
from client_app.handlers import train
from osfl.config import NodeConfig, RunConfig, Scalar, parse_run_config
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.methods import METHODS, server_module
from osfl.models.classifiers import compute_logits, count_confusion
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode, encode
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.report.metrics import accuracy_over_images
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.util.files import make_private_folder
from osfl.util.pixels import to_float, to_uint8
from server_app.context import ServerJob
from server_app.expected import expected_payload
from server_app.methods import fedcado, fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import SyntheticSet
from server_app.synthesis.images import synthesize as synthesize_plan
from server_app.synthesis.workers import Sample

Settings = Mapping[str, Scalar]
CPU = torch.device("cpu")
# Of images in a pass of the autoencoder
BATCH = 50
# The clients' domains, in the clients' order
DOMAINS = ("clipart", "infograph", "neon", "painting", "photo", "sketch")
# Settings that only the server reads, or that say how payloads are encoded
SERVER_SETTINGS = (
    "synthesis.",
    "global-model.",
    "public-domains",
    "payload-codec",
    "max-images",
    "max-weight-ratio",
    "label-filter",
    "domain-vector.classes",
    "fedcgs.head",
    "fedcgs.shrinkage",
    "fedpft.inverse-penalty",
)


def client_names(count: int) -> tuple[str, ...]:
    """Return the names of `count` clients, in their order."""
    return tuple(f"client-{number}" for number in range(count))


CLIENTS = client_names(len(DOMAINS))


# ---- Configuration ----


def config_of(settings: Settings) -> RunConfig:
    """Return the configuration of a server and its clients, which runs below runs/jobs."""
    runs = str(harness.RUNS / "jobs")
    return parse_run_config({**default_config(), **settings, "runs-dir": runs})


def digest_of(settings: Mapping[str, object]) -> str:
    """Return eight letters that stand for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def cell_name(settings: Settings) -> str:
    """Return the name of a cell's files; other settings make another cell."""
    return f"{settings['method']}-s{settings['seed']}-{digest_of(settings)}"


def client_settings(settings: Settings) -> Settings:
    """Drop what only the server reads: rows that differ in nothing else share payloads."""
    # Clients that noise their latents to the first timestep
    read = {"synthesis.steps"} if settings["method"] in ("espresso", "fedld") else set()
    return {
        key: value
        for key, value in settings.items()
        if key in read or (not key.startswith(SERVER_SETTINGS) and "guidance" not in key)
    }


def node_of(number: int, config: RunConfig) -> NodeConfig:
    """Return the node of a client."""
    return NodeConfig(partition_id=number, num_partitions=config.num_clients)


# ---- Images and payloads ----


@cache
def client_images(split: str) -> list[Images]:
    """Return every client's own images of a split."""
    config = config_of({"method": "ceiling", "num-clients": len(CLIENTS)})
    return [
        load_images(config.data, node_of(number, config), split, config.seed)
        for number in range(len(CLIENTS))
    ]


def real_set() -> SyntheticSet:
    """Return the clients' own training images as a set with owners."""
    parts = client_images("train")
    owners = [name for name, part in zip(CLIENTS, parts, strict=True) for _ in range(len(part))]
    pixels = torch.cat([part.pixels for part in parts])
    return SyntheticSet(pixels, torch.cat([part.labels for part in parts]), tuple(owners))


def payloads_of(settings: Settings) -> dict[str, Payload]:
    """Return every client's payload as the server decodes it, made unless it is kept.

    A method without a client's half has none.
    """
    if METHODS[str(settings["method"])].client is None:
        return {}
    client_part = client_settings(settings)
    config = parse_run_config({**default_config(), **client_part})
    folder = harness.RUNS / "payloads" / f"payloads-{cell_name(client_part)}"
    expected = expected_payload(config, folder.name)
    payloads = {}
    for number, client in enumerate(client_names(config.num_clients)):
        file = folder / client / "payload.pb"
        if not file.is_file():
            make_private_folder(file.parent)
            node = node_of(number, config)
            kit = find_kit(config.sampling_kit)
            train(RecordDict(), [config], node, client, folder.name, [kit], file.parent)
        payloads[client] = decode(file.read_bytes(), expected(client))
    return as_received(parse_run_config({**default_config(), **settings}), folder.name, payloads)


def as_received(
    config: RunConfig, job_id: str, payloads: Mapping[str, Payload]
) -> dict[str, Payload]:
    """Encode payloads with the run's `payload-codec`, and decode them as the server does."""
    expected = expected_payload(config, job_id)
    return {
        client: decode(
            encode(payload, config.method, job_id, client, config.payload_codec), expected(client)
        )
        for client, payload in payloads.items()
    }


# ---- The server ----


def server_job(
    config: RunConfig,
    name: str,
    clients: Sequence[str] = CLIENTS,
    kinds: Mapping[str, str] | None = None,
) -> ServerJob:
    """Return a job in a folder of its own; an interrupted job resumes there.

    Args:
        kinds: in a mixed run, the kind of each client's payload.
    """
    folder = open_run_folder(config, name, 0)
    return ServerJob(config, folder, Status(folder.path), tuple(clients), kinds=kinds or {})


def sampler_of(config: RunConfig) -> Callable[..., Sample]:
    """Return a method's factory of samplers; FedCADO uses FedLMG's."""
    if config.method == "fedcado":
        return partial(fedlmg.sampler, settings=config.fedcado, sample=fedcado.sample)
    sampler: Callable[..., Sample] = server_module(config.method).sampler
    return sampler


def synthesize(job: ServerJob, payloads: Mapping[str, Payload]) -> SyntheticSet:
    """Return a plan's images, each drawn from its client's payload; existing ones are read."""
    sampler = sampler_of(job.config)
    plan = plan_held_classes(job, payloads)
    return synthesize_plan(job, plan, lambda device: sampler(job, device, payloads))


@torch.no_grad()
def reconstructed(images: SyntheticSet, config: RunConfig) -> SyntheticSet:
    """Encode and decode images with the run's kit; a latent is the mean of its posterior."""
    kit = load_engine(find_kit(config.sampling_kit), CPU, config.synthesis)
    parts = [
        to_uint8(kit.decode(kit.encode(to_float(part))[0])) for part in images.pixels.split(BATCH)
    ]
    return replace(images, pixels=torch.cat(parts))


def images_of(images: SyntheticSet, clients: Sequence[str]) -> SyntheticSet:
    """Return some clients' images."""
    return images.select([row for row, client in enumerate(images.clients) if client in clients])


def merged(parts: Sequence[SyntheticSet]) -> SyntheticSet:
    """Return the images of several sets, client by client."""
    owners = [client for part in parts for client in part.clients]
    order = sorted(range(len(owners)), key=owners.__getitem__)
    pixels = torch.cat([part.pixels for part in parts])[order]
    labels = torch.cat([part.labels for part in parts])[order]
    return SyntheticSet(pixels, labels, tuple(owners[row] for row in order))


# ---- Accuracy ----


def accuracy_on_test(config: RunConfig, model: torch.nn.Module, client: int) -> float:
    """Return the top-1 accuracy (%) on a client's test images."""
    return _accuracy(config, model, client, "test")


def validation_accuracies(config: RunConfig, model: torch.nn.Module) -> list[float]:
    """Return the top-1 accuracy (%) on the validation images of every client's domain."""
    clients = range(config.num_clients)
    return [_accuracy(config, model, client, "validation") for client in clients]


def _accuracy(config: RunConfig, model: torch.nn.Module, client: int, split: str) -> float:
    images = load_images(config.data, node_of(client, config), split, 0)
    classes = len(class_names(config.data))
    return accuracy_over_images(
        {"": count_confusion(model, images.pixels, images.labels, classes, CPU)}
    )


def predictions(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Return the predicted classes [N] of images [N, 3, S, S] uint8."""
    return compute_logits(model, pixels, CPU).argmax(dim=1)


def accuracy(model: torch.nn.Module, images: Images | SyntheticSet) -> float:
    """Return the top-1 accuracy (%) on images."""
    return 100 * (predictions(model, images.pixels) == images.labels).double().mean().item()
