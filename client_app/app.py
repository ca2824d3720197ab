"""The Flower ClientApp: join, make a payload, forget it once it is stored, test the global model.

Flower starts a process for every message, so what joining and forgetting do without is imported
where it is needed: torch takes seconds.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

import osfl
from client_app.declared import declared_images
from client_app.keys import sealing_key
from osfl.config import (
    NOT_IDENTITY,
    ConfigError,
    NodeConfig,
    RunConfig,
    flatten,
    is_identifier,
    parse_node_config,
    parse_run_config,
    split_names,
    without_guarantee,
)
from osfl.data.parts import check_images, client_name
from osfl.files import OWNER_ONLY, private_folder
from osfl.methods import METHODS
from osfl.models.initialisation import initial_weights
from osfl.models.kit_check import check_captioner, check_image_encoder, check_kit
from osfl.models.kits import find_kit, kit_digest, weights_digests
from osfl.models.used_parts import kit_parts, models_apart
from osfl.words import plain_lines, plain_record

KEY_LENGTH = 12
MOST_ERROR = 4000  # characters of an error that is sent to the server
log = logging.getLogger("flwr")  # in which Flower writes what a client raises
log.addFilter(plain_record)


class ClientError(RuntimeError):
    """What a client raised, in words that can be sent: printable, and not too many."""


def plain_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: Flower sends the words of an exception to the server as they are.

    Raises:
        ClientError: in place of an exception whose words a terminal would obey, or that has too
            many of them; the traceback is the same.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if (told := _in_plain_words(error)) is error:
            raise
    raise told


def _in_plain_words(error: Exception) -> Exception:
    words = plain_lines(error, MOST_ERROR)
    try:
        if str(error) == words:
            return error
    except Exception:  # it has no words at all
        log.error("an error without words: %s", type(error).__name__)
    return ClientError(f"{type(error).__name__}: {words}").with_traceback(error.__traceback__)


app = ClientApp(mods=[plain_errors])


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Say who this node is; a node that cannot take part says why before any work is done."""
    config, node, client = _settings(context)
    if METHODS[config.method].client or METHODS[config.method].rounds:
        sealing_key(message.content, node)
    _same_kit(message, config, check_node(config, node))
    record = ConfigRecord(
        {
            "client": client,
            "version": _installed_version(),
            "architecture": config.classifier.architecture,
            "images": declared_images(config, node),
        }
    )
    return Message(RecordDict({"join": record}), reply_to=message)


def check_node(config: RunConfig, node: NodeConfig) -> str:
    """Whether a node has all that it needs to take part, before any work; returns its kit.

    Args:
        config: with the node's own classifier (`own_settings`).

    Raises:
        ConfigError, DataError, KitError, FileNotFoundError: it lacks images, a part of the kit, the
            initial weights or the device.
    """
    check_images(config.data, node, config.seed)
    if config.guaranteed_delta and find_spec("dp_accounting") is None:
        raise ConfigError(
            f"epsilon = {config.epsilon:g}: for method {config.method!r} this node needs the "
            "package dp-accounting: pip install 'osfl[privacy]'"
        )
    kit = _kit(config, node)
    _check_encoders(config)
    if METHODS[config.method].payload == "Classifier":
        initial_weights(config.classifier, kit, "classifier.init")
    if node.models_dir:
        _check_models_dir(node.models_dir)
    if node.device not in ("auto", "cpu"):
        from osfl.devices import pick_device

        pick_device(node.device)
    return kit


def _check_models_dir(folder: str) -> None:
    """A folder that cannot be written is found before the work, not after it.

    Raises:
        ConfigError: it is no absolute path, cannot be made, or nothing can be written in it.
    """
    path = Path(folder).expanduser()
    key = f"node-config models-dir = {folder!r}"
    # Flower starts clients in a folder of its own
    if not path.is_absolute():
        raise ConfigError(f"{key}: must be an absolute path")
    try:
        private_folder(path)
    except OSError as error:
        raise ConfigError(f"{key}: {error}; name a folder that can be made") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: nothing can be written in it; take another")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Make this client's payload, or send again the one it made for this job.

    A method with rounds: one round.
    """
    from client_app import work

    config, node, client = _settings(context)
    job_id = _job_id(message)
    kit = _kit(config, node)
    folder = _cache(node, job_id) / f"{client}-{cache_key(config, node, kit)}"
    private_folder(folder)
    # A server that lost sight of this node asks again: the second waits, and finds the payload
    with FileLock(folder / "lock", mode=OWNER_ONLY):
        reply = work.train(message.content, config, node, client, job_id, kit, folder)
    return Message(reply, reply_to=message)


@app.query("acknowledge")
def acknowledge(message: Message, context: Context) -> Message:
    """The server has the payload on its disk, or the rounds are over.

    Forget what was kept for the job; but not a payload with a guarantee: if the server asks again,
    a new one would give away as much again.
    """
    config, node, client = _settings(context)
    if METHODS[config.method].private and config.epsilon:
        return Message(RecordDict(), reply_to=message)
    for folder in _cache(node, _job_id(message)).glob(f"{client}-{'?' * KEY_LENGTH}"):
        shutil.rmtree(folder, ignore_errors=True)
    return Message(RecordDict(), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test a global model on this client's own test images; asked to, adapt it first."""
    from client_app import work

    config, node, client = _settings(context)
    return Message(work.evaluate(message.content, config, node, client), reply_to=message)


def _settings(context: Context) -> tuple[RunConfig, NodeConfig, str]:
    """(run-config, node-config, client id), checked."""
    config = parse_run_config(context.run_config)
    node = parse_node_config(context.node_config)
    return own_settings(config, node, context.node_id)


def own_settings(
    config: RunConfig, node: NodeConfig, node_id: int = 0
) -> tuple[RunConfig, NodeConfig, str]:
    """(run-config with this client's own classifier and epsilon, node-config, client id).

    Raises:
        ConfigError: a client id that can be no file's name, a classifier that is not the run's, or
            a method without the guarantee that this site asks for.
        DataError: there is no folder, domain or data set for the node.
    """
    client = node.client_id or client_name(config.data, node, config.seed) or f"node-{node_id}"
    if not is_identifier(client):
        raise ConfigError(
            f"client-id = {client!r}: must be 1 to 64 letters, digits, '-' or '_', and not "
            "'average'"
        )
    classifier = replace(config.classifier, architecture=_architecture(config, node))
    method = METHODS[config.method]
    if node.epsilon and not method.private and (method.payload or method.rounds):
        raise ConfigError(
            f"node-config epsilon = {node.epsilon:g}: this site sends no payload without a "
            f"guarantee, and method {config.method!r} gives none"
        )
    if node.seal_to and not re.fullmatch("[0-9a-fA-F]{64}", node.seal_to):
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: must be the 64 hex digits that `osfl certs "
            "sealing` prints"
        )
    if node.seal_to and method.open_models:
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: this site sends no open payload, and with "
            f"method {config.method!r} models go to and fro, which are not sealed"
        )
    if node.epsilon_total and not node.client_id:
        raise ConfigError(
            f"node-config epsilon-total = {node.epsilon_total:g}: needs a client-id, by which what "
            "was given away is found again"
        )
    # The lower of both, of those that there are
    epsilon = min(filter(None, (config.epsilon, node.epsilon)), default=0.0)
    if epsilon and (problem := without_guarantee(config)):
        raise ConfigError(
            f"node-config epsilon = {epsilon:g}: this site sends nothing without a guarantee. The "
            f"run has {problem}"
        )
    delta = min(config.delta, node.delta)
    own = replace(config, classifier=classifier, epsilon=epsilon, delta=delta)
    return own, node, client


def _architecture(config: RunConfig, node: NodeConfig) -> str:
    """This client's classifier: the node's own, else one of the run's in turn."""
    of_the_run = split_names(config.classifier.architecture)
    method = METHODS[config.method]
    if not (method.rounds or method.payload == "Classifier"):
        return config.classifier.architecture
    if node.architecture and node.architecture not in of_the_run:
        raise ConfigError(
            f"node-config architecture = {node.architecture!r}: this run allows "
            f"{', '.join(of_the_run)}"
        )
    return node.architecture or of_the_run[max(node.partition_id, 0) % len(of_the_run)]


def _job_id(message: Message) -> str:
    records = message.content.config_records
    job_id = str(records["job" if "job" in records else "config"]["job"])
    if not is_identifier(job_id):  # it becomes a folder's name
        raise ConfigError(f"job id {job_id[:80]!r}: must be 1 to 64 letters, digits, '-' or '_'")
    return job_id


def _kit(config: RunConfig, node: NodeConfig) -> str:
    if not kit_parts(config):
        return ""
    # Which stands in for the run's, not for FedDISC's
    own_kit = node.kit if config.sampling_kit == config.kit else ""
    name = own_kit or config.sampling_kit
    parts = kit_parts(config, find_kit(name))
    kit = find_kit(name, parts)
    check_kit(kit, parts)
    return kit


def _check_encoders(config: RunConfig) -> None:
    """What the run names apart from the kit, where this client uses it."""
    checks = {"captioner": check_captioner, "image-encoder": check_image_encoder}
    for key, source, _ in models_apart(config):
        checks[key](source)


def _same_kit(message: Message, config: RunConfig, kit: str) -> None:
    """The weights that this node and the server both have must be the same.

    A description learned with others draws something else.
    """
    here = weights_digests(kit, kit_parts(config, kit)) if kit else {}
    there = message.content.config_records["kit"]
    for file, digest in here.items():
        if there.get(file, digest) != digest:
            raise ConfigError(
                f"kit = {kit!r}: its {file} ({digest[:8]}) is not the server's "
                f"({str(there[file])[:8]}); take the kit from the same place"
            )


def _installed_version() -> str:
    """Of the package on this node, whose kits and dependencies are used.

    The code itself came with the run.
    """
    try:
        return version("osfl")
    except PackageNotFoundError:
        return osfl.__version__


def _cache(node: NodeConfig, job_id: str) -> Path:
    """Where this machine keeps a job's finished payloads."""
    return (
        Path(node.cache_dir or os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / job_id
    )


def cache_key(config: RunConfig, node: NodeConfig, kit: str) -> str:
    """Of everything that could shape a payload.

    To whom it is sealed does not, nor where global models are kept.
    """
    shaping = {k: v for k, v in flatten(config).items() if k not in NOT_IDENTITY}
    apart = ("seal_to", "models_dir")
    own = {key: value for key, value in asdict(node).items() if key not in apart}
    about = [shaping, own, kit_digest(kit, kit_parts(config, kit)) if kit else ""]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
