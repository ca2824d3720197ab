"""The Flower ClientApp: join, make a payload, forget it once it is stored, test the global model.

Flower starts a process for every message. Joining and acknowledging must not import torch, which
takes seconds, so such modules are imported inside the handlers that need them.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import osfl
from client_app import payload_cache, secure_sum
from client_app.declared import declared_images
from client_app.errors import (
    PublicConfigError,
    encode_private_errors,
    public_messages,
    sanitize_errors,
)
from client_app.keys import select_sealing_key
from client_app.kinds import check_kind, choose_kind
from client_app.paths import check_architecture, check_paths
from client_app.privacy.ledger import Ledger, ledger_folder
from osfl.config import (
    COMPARISON,
    LOCAL_BASELINE,
    NODE_NOT_IDENTITY,
    NOT_IDENTITY,
    TEST_ONLY,
    TRAIN_AND_TEST,
    ConfigError,
    NodeConfig,
    RunConfig,
    flatten,
    guarantee_problem,
    is_identifier,
    is_mixed,
    parse_node_config,
    parse_run_config,
    parts_of,
    split_names,
)
from osfl.data.overlap import check_disjoint
from osfl.data.parts import check_images, client_name
from osfl.data.pins import check_pins
from osfl.kit.check import check_kit
from osfl.kit.kits import find_kit, kit_digest, weights_digests
from osfl.kit.run_check import check_initial_weights, check_models_outside_kit
from osfl.kit.used_parts import kit_parts
from osfl.methods import METHODS
from osfl.payload.sum_messages import unpack_job
from osfl.util.files import OWNER_ONLY, ensure_own_folder, make_private_folder

KEY_LENGTH = 12

# The first mod is the outermost
app = ClientApp(mods=[sanitize_errors, encode_private_errors])


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Return who this node is, or raise before any work is done if it cannot take part."""
    config, node, client = _settings(context)
    kind = kind_of_site(config, node, client)
    parts = part_settings(config, node, kind)
    kits = []
    for part in parts:
        has_payload = METHODS[part.method].client or METHODS[part.method].rounds
        if has_payload and not (node.tests_only or config.advise):
            with public_messages():
                select_sealing_key(message.content, node, part.sealing_key)
        kit = check_node(part, node)
        _same_kit(message, part, kit)
        kits.append(kit)
    _check_budget(parts, node, client, kits)
    sends = METHODS[config.method].client and client not in config.held_out_clients
    sum_keys: dict[str, bytes] = {}
    if config.secure_sum and sends and not (node.tests_only or config.advise):
        job = check_job_id(unpack_job(message.content))
        folder = _payload_folder(parts, node, client, job, kits)
        sum_keys = secure_sum.announce(folder, node, job, client)
    declared = filter(None, (declared_images(part, node) for part in parts))
    record = ConfigRecord(
        {
            "client": client,
            "version": _installed_version(),
            "architecture": parts[0].classifier.architecture,
            "images": next(declared, []),
            **({"role": TEST_ONLY} if node.tests_only else {}),
            **({COMPARISON: True} if _compares(node) else {}),
            **({"kind": kind} if is_mixed(config) else {}),
            **sum_keys,
        }
    )
    return Message(RecordDict({"join": record}), reply_to=message)


def _compares(node: NodeConfig) -> bool:
    """Return whether this site asks for images that were synthesized for it."""
    return bool(node.comparison_dir) and not node.tests_only


def kind_of_site(config: RunConfig, node: NodeConfig, client: str) -> str:
    """Return the kind of payload that this node sends: the method, unless the run is mixed.

    A client of a mixed run that only tests has the kind `mixed`, for which it needs nothing.

    Raises:
        PublicConfigError: the run welcomes no kind that this node names or can make.
    """
    if not is_mixed(config) or node.tests_only or client in config.held_out_clients:
        return config.method

    def kit_of(kind: str) -> str:
        parts = part_settings(config, node, kind)
        kits = [_check_payload_parts(part, node) for part in parts]
        return next(filter(None, kits), "")

    def is_cached(kind: str) -> bool:
        parts = part_settings(config, node, kind)
        key = joint_cache_key(parts, node, [_kit(part, node) for part in parts])
        return bool(config.job_id) and payload_cache.has_payload(
            _cache(node, config.job_id) / f"{client}-{key}"
        )

    return choose_kind(config, node, kit_of, is_cached)


def part_settings(config: RunConfig, node: NodeConfig, kind: str) -> list[RunConfig]:
    """Return this node's settings of each method of a kind, as in a pure run of the method.

    The parts of one message share its epsilon and delta equally, because guarantees add up.

    Raises:
        ConfigError, DataError: as `check_paths` and `client_settings`.
    """
    if kind == config.method:
        return [config]
    parts = []
    runs = parts_of(config, kind).values()
    for run in runs:
        check_paths(run, node)
        settings, _, _ = client_settings(run, node)
        share = 1 / len(runs)
        parts.append(
            replace(settings, epsilon=share * settings.epsilon, delta=share * settings.delta)
        )
    return parts


def check_node(config: RunConfig, node: NodeConfig) -> str:
    """Check that a node has everything it needs to take part, and return its kit.

    Runs before any work is done.

    Args:
        config: with the node's own classifier (`client_settings`).

    Raises:
        ConfigError, DataError, KitError, FileNotFoundError: the images, a part of the kit, the
            initial weights or the device are missing.
    """
    check_images(config.data, node, config.seed)
    if node.requires_guarantee and node.sends_test_results:
        check_disjoint(config.data, node)
    makes_payload = not (node.tests_only or config.advise)
    kit = _check_payload_parts(config, node) if makes_payload else ""
    for key in ("models_dir", "predictions_dir", "comparison_dir"):
        if folder := getattr(node, key):
            _check_site_folder(key.replace("_", "-"), folder)
    if node.device not in ("auto", "cpu"):
        from osfl.util.devices import pick_device

        pick_device(node.device)
    return kit


def _check_payload_parts(config: RunConfig, node: NodeConfig) -> str:
    """Check what a payload is made with, beside the images; return the kit."""
    if config.guaranteed_delta and find_spec("dp_accounting") is None:
        raise PublicConfigError(
            f"epsilon = {config.epsilon:g}: with method {config.method!r} this node requires the "
            "package dp-accounting: pip install 'osfl[privacy]'"
        )
    kit = _kit(config, node)
    check_models_outside_kit(config, "clients")
    if METHODS[config.method].loads_initial_weights:
        check_initial_weights(config.classifier, kit, "classifier.init")
    return kit


def _check_budget(parts: list[RunConfig], node: NodeConfig, client: str, kits: list[str]) -> None:
    """Check, before any work, that `epsilon-total` leaves enough for this job's payload.

    Raises:
        PublicConfigError: the budget is exhausted. The message depends on earlier jobs, not on
            images.
    """
    config = parts[0]
    trains = client not in config.held_out_clients and not (node.tests_only or config.advise)
    sends = METHODS[config.method].client and trains
    # A reused payload is no new draw. A run that continues another one may have this client's; if
    # not, the draw itself checks the budget
    reuses = config.payloads_from or config.continue_from
    if not (node.epsilon_total and sends) or reuses:
        return
    key = joint_cache_key(parts, node, kits)
    # Resending a cached payload spends no epsilon
    if config.job_id and payload_cache.has_payload(_cache(node, config.job_id) / f"{client}-{key}"):
        return
    ledger = Ledger(ledger_folder(node), client, older=_cache(node, ""))
    with public_messages():
        epsilon = sum(part.epsilon for part in parts)
        ledger.check(config.job_id, key, epsilon, node.epsilon_total)


def _check_site_folder(name: str, folder: str) -> None:
    """Check that a folder of the site can be written to before the work, not after it.

    Args:
        name: the node-config key.
        folder: its value.

    Raises:
        ConfigError: the path is not absolute, the folder cannot be created, or it is not writable.
    """
    path = Path(folder).expanduser()
    key = f"node-config {name} = {folder!r}"
    # Flower starts clients in its own folder, so a relative path would be ambiguous
    if not path.is_absolute():
        raise ConfigError(f"{key}: must be an absolute path")
    try:
        make_private_folder(path)
    except OSError as error:
        raise ConfigError(f"{key}: {error}; set it to a folder that can be created") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: must be writable; set it to another folder")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Make this client's payload, or resend the one it already made for this job.

    With an iterative method, train for one round.

    Raises:
        PublicConfigError: this site's role is to test only.
    """
    from client_app import handlers

    config, node, client = _settings(context)
    _refuse_with_advice(config)
    if node.tests_only:
        raise PublicConfigError(
            f"node-config role = {node.role!r}: this site sends no payload; set it to "
            f"{TRAIN_AND_TEST!r} to take part in training"
        )
    job_id = _job_id(message)
    parts = part_settings(config, node, _requested_kind(message, config, node))
    kits = [_kit(part, node) for part in parts]
    folder = _payload_folder(parts, node, client, job_id, kits, _rounds_identity(message))
    ensure_own_folder(folder.parent)
    ensure_own_folder(folder)
    # A server that lost the connection sends a second request. It waits, then finds the payload
    with FileLock(folder / "lock", mode=OWNER_ONLY):
        reply = handlers.train(message.content, parts, node, client, job_id, kits, folder)
    return Message(reply, reply_to=message)


@app.query("reveal")
def reveal(message: Message, context: Context) -> Message:
    """Reveal what opens the secure sum that this client has delivered to."""
    config, node, client = _settings(context)
    parts = part_settings(config, node, config.method)
    kits = [_kit(part, node) for part in parts]
    job_id = _job_id(message)
    folder = _payload_folder(parts, node, client, job_id, kits)
    reply = secure_sum.reveal(message.content, config, node, client, job_id, folder)
    return Message(reply, reply_to=message)


@app.query("acknowledge")
def acknowledge(message: Message, context: Context) -> Message:
    """Delete the payload that the server has stored, or the state of an iterative method.

    A payload of another run with the same job id stays. So does a payload with a DP guarantee: a
    second noisy draw would spend epsilon again.
    """
    config, node, client = _settings(context)
    job_id = _job_id(message)
    job = _cache(node, job_id)
    for folder in _forgettable(message, config, node, job, client):
        shutil.rmtree(folder, ignore_errors=True)
    # With a DP guarantee a folder stays
    for folder in job.glob(f"{client}-{'?' * KEY_LENGTH}"):
        if secure_sum.has_sent(folder, _stored_digest(message)):
            secure_sum.forget_secrets(folder)
    return Message(RecordDict(), reply_to=message)


def _forgettable(
    message: Message, config: RunConfig, node: NodeConfig, job: Path, client: str
) -> list[Path]:
    """Return the folders of a job that its acknowledgement allows to delete."""
    if METHODS[config.method].rounds:
        key = cache_key(config, node, _kit(config, node), _rounds_identity(message))
        state = job / f"{client}-{key}"
        return [] if payload_cache.has_payload(state) else [state]
    stored = _stored_digest(message)
    folders = job.glob(f"{client}-{'?' * KEY_LENGTH}")
    return [
        folder
        for folder in folders
        if payload_cache.may_delete(folder, stored, secure_sum.has_sent(folder, stored))
    ]


def _stored_digest(message: Message) -> str:
    """Return the SHA-256 that an acknowledgement names.

    Unpacks `osfl.payload.messages.pack_acknowledgement` here, because that module imports torch.
    """
    return str(message.content.config_records["job"].get("sha256", ""))


@app.query("advise")
def advise(message: Message, context: Context) -> Message:
    """Measure this client's images for `osfl advise`."""
    from client_app import advice

    config, node, client = _settings(context)
    return Message(advice.advise(config, node, client), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test a global model on this client's test images; personalize it first if requested.

    A request with a local-only baseline tests a model that the client trains alone, instead.
    """
    from client_app import handlers

    config, node, client = _settings(context)
    _refuse_with_advice(config)
    check_architecture(str(message.content.config_records["header"]["architecture"]), node)
    if LOCAL_BASELINE in message.content.config_records:
        from client_app.learning.local_baseline import evaluate_alone

        reply = evaluate_alone(message.content, config, node, client, _cache(node, ""))
        return Message(reply, reply_to=message)
    reply = handlers.evaluate(message.content, config, node, client)
    if _compares(node):
        from client_app.comparison import write_comparison

        write_comparison(message.content, config, node, client)
    return Message(reply, reply_to=message)


def _refuse_with_advice(config: RunConfig) -> None:
    """Refuse every other work in a run that only asks for advice.

    Its settings were not checked for a payload, nor for a guarantee.

    Raises:
        PublicConfigError: the run asks for advice.
    """
    if config.advise:
        raise PublicConfigError("advise = true: clients only measure; set it to false for a run")


def _settings(context: Context) -> tuple[RunConfig, NodeConfig, str]:
    """Return the checked run-config, node-config and client id."""
    with public_messages():
        config = parse_run_config(context.run_config)
        node = parse_node_config(context.node_config)
    # Before any file that the run-config names is read
    check_paths(config, node)
    return client_settings(config, node, context.node_id)


def client_settings(
    config: RunConfig, node: NodeConfig, node_id: int = 0
) -> tuple[RunConfig, NodeConfig, str]:
    """Return the run-config for this client, the node-config and the client id.

    The returned run-config has this client's own classifier, epsilon and delta.

    Raises:
        ConfigError: the client id is not a valid file name, or as `_own_config`.
        DataError: there is no folder, domain or data set for the node.
    """
    with public_messages():
        client_config = _own_config(config, node)
    client = node.client_id or client_name(config.data, node, config.seed) or f"node-{node_id}"
    if not is_identifier(client):
        raise ConfigError(
            f"client-id = {client!r}: must be 1 to 64 letters, digits, '-' or '_', and must not be "
            "'average'"
        )
    return client_config, node, client


def _own_config(config: RunConfig, node: NodeConfig) -> RunConfig:
    """Return the run-config with this client's own classifier, epsilon and delta. Reads no data.

    Raises:
        ConfigError: the node's classifier is not one of the run's, the run lacks the DP guarantee
            that this site requires, or its columns, splits or classes differ from those that this
            site pins.
    """
    check_pins(config.data, node)
    sends_nothing = node.tests_only or config.advise
    method = METHODS[config.method]
    sends = bool(method.payload or method.rounds) and not sends_nothing
    secure_sum.check_demand(config, node, sends)
    classifier = replace(config.classifier, architecture=_architecture(config, node))
    if node.seal_to and not re.fullmatch("[0-9a-fA-F]{64}", node.seal_to):
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: must be the 64 hex digits that `osfl certs "
            "sealing` prints"
        )
    if node.seal_to and config.secure_sum and sends:
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: this site sends no unencrypted payload, and "
            "a secure sum's are masked, but not encrypted; use an open run with a sealing-key"
        )
    if node.seal_to and METHODS[config.method].shares_models and not sends_nothing:
        raise ConfigError(
            f"node-config seal-to = {node.seal_to!r}: this site sends no unencrypted payload, but "
            f"method {config.method!r} exchanges unencrypted models"
        )
    # The lower of the two that are set
    epsilon = min(filter(None, (config.epsilon, node.epsilon)), default=0.0)
    _check_guarantee(config, node, epsilon)
    delta = min(config.delta, node.delta)
    if not sends_nothing:
        secure_sum.check_guarantee(config, node, epsilon, delta)
    return replace(config, classifier=classifier, epsilon=epsilon, delta=delta)


def _check_guarantee(config: RunConfig, node: NodeConfig, epsilon: float) -> None:
    """Check that a site that requires a DP guarantee sends no payload without one.

    Args:
        epsilon: this client's own.

    Raises:
        ConfigError: the payload would have no DP guarantee, or its epsilon could not be booked.
    """
    method = METHODS[config.method]
    sends = bool(method.payload or method.rounds) and not (node.tests_only or config.advise)
    key = "epsilon" if node.epsilon else "epsilon-total"
    demand = f"node-config {key} = {node.epsilon or node.epsilon_total:g}: this site sends no"
    if node.requires_guarantee and sends and not method.privacy:
        raise ConfigError(
            f"{demand} payload without a DP guarantee, and method {config.method!r} provides none"
        )
    if node.epsilon_total and sends and not epsilon:
        raise ConfigError(
            f"{demand} payload without an epsilon to book; set epsilon in the run-config or in "
            "this node-config"
        )
    if node.epsilon_total and not node.client_id and not node.tests_only:
        raise ConfigError(
            f"node-config epsilon-total = {node.epsilon_total:g}: requires a client-id, under "
            "which the spent epsilon is booked"
        )
    sends_payload = not (node.tests_only or config.advise)
    if epsilon and sends_payload and (problem := guarantee_problem(config)):
        raise ConfigError(
            f"node-config epsilon = {epsilon:g}: this site sends no payload without a DP "
            f"guarantee. The run has {problem}"
        )


def _architecture(config: RunConfig, node: NodeConfig) -> str:
    """Return this client's architecture: the node's own, else one of the run's in turn."""
    allowed = split_names(config.classifier.architecture)
    if not METHODS[config.method].trains_classifier:
        return config.classifier.architecture
    if node.architecture and node.architecture not in allowed:
        raise ConfigError(
            f"node-config architecture = {node.architecture!r}: this run allows "
            f"{', '.join(allowed)}"
        )
    return node.architecture or allowed[max(node.partition_id, 0) % len(allowed)]


def _job_id(message: Message) -> str:
    records = message.content.config_records
    return check_job_id(str(records["job" if "job" in records else "config"]["job"]))


def check_job_id(job_id: str) -> str:
    """Return a job id from a message.

    Raises:
        ConfigError: it is not safe as a folder's name.
    """
    # It becomes the name of a folder
    if not is_identifier(job_id):
        raise ConfigError(f"job id {job_id[:80]!r}: must be 1 to 64 letters, digits, '-' or '_'")
    return job_id


def _requested_kind(message: Message, config: RunConfig, node: NodeConfig) -> str:
    """Return the kind of payload that the server asks for: in a mixed run, that of the join.

    Raises:
        PublicConfigError: the run or the site does not welcome it.
    """
    if not is_mixed(config):
        return config.method
    return check_kind(str(message.content.config_records["job"].get("kind", "")), config, node)


def _rounds_identity(message: Message) -> str:
    """Return what tells a run's rounds from another server's with the same job id.

    "" of a method without rounds, and of a server of an older version.
    """
    records = message.content.config_records
    return str(records["job" if "job" in records else "config"].get("rounds", ""))


def _kit(config: RunConfig, node: NodeConfig) -> str:
    if not kit_parts(config):
        return ""
    # The node's kit replaces the run's, but not a method's own
    local_kit = node.kit if config.sampling_kit == config.kit else ""
    name = local_kit or config.sampling_kit
    parts = kit_parts(config, find_kit(name))
    kit = find_kit(name, parts)
    check_kit(kit, parts)
    return kit


def _same_kit(message: Message, config: RunConfig, kit: str) -> None:
    """Check that the weights that this node and the server share are identical.

    A condition learned with other weights would generate different images.
    """
    local = weights_digests(kit, kit_parts(config, kit)) if kit else {}
    remote = message.content.config_records["kit"]
    source = "the server's"
    if config.signatures:
        # A site that demands signatures checked them before it imported this code
        remote = json.loads(config.signatures)["statement"]["kit"]
        source = "the signed one"
    for file, digest in local.items():
        if remote.get(file, digest) != digest:
            raise ConfigError(
                f"kit = {kit!r}: its {file} ({digest[:8]}) is not {source} "
                f"({str(remote[file])[:8]}); use the kit from the same source"
            )


def _installed_version() -> str:
    """Return the version of the package installed on this node.

    Its kits and dependencies are used; the code itself came with the run.
    """
    try:
        return version("osfl")
    except PackageNotFoundError:
        return osfl.__version__


def _cache(node: NodeConfig, job_id: str) -> Path:
    """Return the folder where this machine keeps a job's finished payloads."""
    return (
        Path(node.cache_dir or os.environ.get("OSFL_CACHE", "~/.osfl/cache")).expanduser() / job_id
    )


def _payload_folder(
    parts: list[RunConfig],
    node: NodeConfig,
    client: str,
    job_id: str,
    kits: list[str],
    rounds: str = "",
) -> Path:
    """Return the folder of a client's payload of a job."""
    return _cache(node, job_id) / f"{client}-{joint_cache_key(parts, node, kits, rounds)}"


def joint_cache_key(
    parts: list[RunConfig], node: NodeConfig, kits: list[str], rounds: str = ""
) -> str:
    """Return the `cache_key` of a message's only part, or a digest of those of all parts."""
    keys = [cache_key(part, node, kit, rounds) for part, kit in zip(parts, kits, strict=True)]
    if len(keys) == 1:
        return keys[0]
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:KEY_LENGTH]


def cache_key(config: RunConfig, node: NodeConfig, kit: str, rounds: str = "") -> str:
    """Return a digest of everything that could shape a payload.

    Excludes node-config keys marked `NotIdentity` and the kit's path; the kit's files count
    instead.

    Args:
        rounds: the identity of a run's rounds, which keep state between them.
    """
    run_settings = {k: v for k, v in flatten(config).items() if k not in NOT_IDENTITY}
    node_settings = {k: v for k, v in flatten(node).items() if k not in NODE_NOT_IDENTITY}
    inputs = [run_settings, node_settings, kit_digest(kit, kit_parts(config, kit)) if kit else ""]
    inputs += [rounds] if rounds else []
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
