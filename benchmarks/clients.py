"""The clients of the tables: their names, their domains, their images, and what they send.

Payloads are made here by the clients' half, without the network between, and kept in
`runs/payloads`: a client sends the same whatever its server does, so that tables share them.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from flwr.app import RecordDict

from benchmarks.guidance import digest_of
from client_app.handlers import train
from osfl.config import NodeConfig, RunConfig, Scalar, parse_run_config
from osfl.data.load import Images, load_images
from osfl.kit.kits import find_kit
from osfl.methods import METHODS
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode, encode
from osfl.settings import default_config
from osfl.util.files import make_private_folder
from server_app.expected import expected_payload

PAYLOADS = Path(__file__).resolve().parent.parent / "runs" / "payloads"


def names(count: int) -> tuple[str, ...]:
    """Of so many clients, in their order."""
    return tuple(f"client-{number}" for number in range(count))


CLIENTS = names(6)
# Of the clients, in their order
DOMAINS = ("clipart", "infograph", "neon", "painting", "photo", "sketch")
Settings = Mapping[str, Scalar]


@cache
def real(split: str) -> list[Images]:
    """Every client's own images of a split."""
    own = {"method": "ceiling", "num-clients": len(CLIENTS)}
    config = parse_run_config({**default_config(), **own})
    found = []
    for number in range(len(CLIENTS)):
        node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
        found.append(load_images(config.data, node, split, config.seed))
    return found


def sent(settings: Settings) -> dict[str, Payload]:
    """Every client's payload, made here unless it is there; none for a method that sends none."""
    if METHODS[str(settings["method"])].client is None:
        return {}
    own = for_clients(settings)
    config = parse_run_config({**default_config(), **own})
    folder = PAYLOADS / f"payloads-{folder_name(own)}"
    expected = expected_payload(config, folder.name)
    found = {}
    for number, client in enumerate(names(config.num_clients)):
        file = folder / client / "payload.pb"
        if not file.is_file():
            make_private_folder(file.parent)
            node = NodeConfig(partition_id=number, num_partitions=config.num_clients)
            kit = find_kit(config.sampling_kit)
            train(RecordDict(), config, node, client, folder.name, kit, file.parent)
        found[client] = decode(file.read_bytes(), expected(client))
    return coded(parse_run_config({**default_config(), **settings}), folder.name, found)


def coded(config: RunConfig, job_id: str, payloads: Mapping[str, Payload]) -> dict[str, Payload]:
    """As the server takes them when they come by the run's `payload-codec`."""
    expected = expected_payload(config, job_id)
    return {
        client: decode(
            encode(payload, config.method, job_id, client, config.payload_codec), expected(client)
        )
        for client, payload in payloads.items()
    }


def for_clients(settings: Settings) -> Settings:
    """Without what only the server reads, and how payloads are coded: rows that differ in these
    share payloads.
    """
    servers = (
        "synthesis.",
        "global-model.",
        "public-domains",
        "payload-codec",
        "max-images",
        "max-weight-ratio",
        "label-check",
        "domain-vector.classes",
    )
    # Its clients noise their latents to the first timestep
    read = {"synthesis.steps"} if settings["method"] == "espresso" else set()
    return {
        key: value
        for key, value in settings.items()
        if key in read or (not key.startswith(servers) and "guidance" not in key)
    }


def folder_name(settings: Settings) -> str:
    """Of a row's folders: with other settings it is another row."""
    return f"{settings['method']}-s{settings['seed']}-{digest_of(settings)}"
