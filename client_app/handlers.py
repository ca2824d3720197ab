"""Handlers of a client's long work: its payload or training round, and the global model's test.

Imports torch, which joining does without.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import MetricRecord, RecordDict

from client_app import payload_cache
from client_app.context import ClientJob
from client_app.errors import PublicConfigError
from client_app.evaluation import ModelTest, histogram_records, write_predictions
from client_app.image_cache import files_key, load_cached
from client_app.keys import select_sealing_key
from client_app.privacy.ledger import BookedDraw, Ledger, ledger_folder
from client_app.secure_sum import accept_roster
from osfl.config import ConfigError, NodeConfig, RunConfig
from osfl.data.load import (
    Images,
    count_images,
    domain_name,
    load_images,
    small_classes,
)
from osfl.data.overlap import check_disjoint
from osfl.data.parts import class_names, folder_notes, left_out_notes
from osfl.data.pictures import Fit
from osfl.inference.description import ModelDescription, describe
from osfl.kit.used_parts import global_settings
from osfl.methods import METHODS, client_module
from osfl.payload import wire
from osfl.payload.encryption import seal
from osfl.payload.messages import (
    SentModel,
    pack_payload,
    pack_withheld,
    select_costs,
    unpack_model,
)
from osfl.util.costs import Stopwatch, peak_memory_mb, release_memory
from osfl.util.devices import pick_device, uses_checkpointing
from osfl.util.files import CorruptFileError, open_private, write_atomically
from osfl.util.imports import without_collection

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("flwr")


def train(
    content: RecordDict,
    parts: Sequence[RunConfig],
    node: NodeConfig,
    client: str,
    job_id: str,
    kits: Sequence[str],
    folder: Path,
) -> RecordDict:
    """Make the reply to `train`: a payload, or the result of a training round.

    Args:
        parts: the settings of each method whose payload the message contains; usually one.
        kits: the kit of each.
        folder: the client's own for this job; the same settings give the same folder.
    """
    config = parts[0]
    if small := small_classes(config.data, node, config.seed):
        names = class_names(config.data)
        log.warning(
            "%s: min-class-images = %d excludes classes with fewer images here: %s",
            client,
            node.min_class_images,
            ", ".join(names[label] for label in small),
        )
    for warning in left_out_notes(config.data, node):
        log.warning("%s: %s", client, warning)
    for warning in folder_notes(config.data, {client: node}):
        log.warning("%s", warning)
    seal_to = select_sealing_key(content, node, config.sealing_key)
    if METHODS[config.method].rounds:
        from client_app.learning.local_training import train_round

        return train_round(content, client_job(config, node, client, kits[0], folder), folder)
    if config.secure_sum:
        return _masked_reply(content, config, node, client, job_id, kits[0], folder)
    blob, costs = _payload(parts, node, client, job_id, kits, folder)
    if seal_to is not None:
        # The cached copy stays unencrypted: it never leaves this machine
        blob = seal(blob, seal_to, job_id, client)
    return pack_payload(blob, select_costs(costs))


def _masked_reply(
    content: RecordDict,
    config: RunConfig,
    node: NodeConfig,
    client: str,
    job_id: str,
    kit: str,
    folder: Path,
) -> RecordDict:
    """Make the reply to `train` in a secure sum: the masked payload, the same for each request."""
    from client_app.masked_payload import make_masked_payload, stored_masked_payload

    # Before the work: a roster that this site refuses costs none
    roster, secrets = accept_roster(content, config, node, client, job_id, folder)
    blob = stored_masked_payload(secrets, folder)
    if blob is not None:
        costs = {**payload_cache.costs_of(folder), "resent": 1.0}
        return pack_payload(blob, select_costs(costs, is_masked=True))
    payload, costs = _payload([config], node, client, job_id, [kit], folder)
    blob = make_masked_payload(payload, roster, secrets, config, node, client, folder)
    if config.epsilon:
        # Its means have no noise, which only the masked numbers have
        payload_cache.delete_content(folder)
    return pack_payload(blob, select_costs(costs, is_masked=True))


def evaluate(content: RecordDict, config: RunConfig, node: NodeConfig, client: str) -> RecordDict:
    """Make the reply to `evaluate`: the global model's confusion matrix on this node's test images.

    Without a DP guarantee it has histograms of the scores, too (`histogram_records`).

    If requested, the model is first personalized on this client's own training images. Results that
    a site withholds (`test-results`; with an epsilon, every result of personalization) go to its
    own log, `models-dir` and `predictions-dir` and do not change the reply. A node with a
    `models-dir` keeps the model.

    Raises:
        ClassifierError: the model does not match its architecture, or cannot be personalized.
        DataError: there are no test images, or they overlap the training images.
    """
    watch = Stopwatch()
    from osfl.models import classifiers

    guaranteed = bool(config.epsilon or node.requires_guarantee)
    sent = unpack_model(content)
    names = class_names(config.data)
    model = classifiers.rebuild_classifier(
        sent.state, sent.architecture, len(names), sent.small_stem
    )
    if sent.personalizes and node.tests_only:
        return pack_withheld()
    if not node.sends_test_results or (sent.personalizes and guaranteed):
        _test_for_site(model, sent, config, node, client)
        return pack_withheld()
    if node.requires_guarantee:
        check_disjoint(config.data, node)
    test = _test(model, sent, config, node, client)
    # With a DP guarantee the reply omits the running time, too
    seconds = 0.0 if guaranteed else watch.seconds
    cells = [cell for row in test.matrix for cell in row]
    metrics = MetricRecord({"seconds": seconds, "confusion": cells})
    return RecordDict({"metrics": metrics, **histogram_records(test, config, node)})


def _test_for_site(
    model: "nn.Module", sent: SentModel, config: RunConfig, node: NodeConfig, client: str
) -> None:
    """Test a model for this site alone. Log a failure, and do not raise it."""
    # A personalized model that is neither kept nor reported has no use
    if sent.personalizes and not (node.models_dir or node.predictions_dir):
        return
    try:
        _test(model, sent, config, node, client)
    except Exception:
        log.exception("%s: the test for this site alone failed", client)


def _test(
    model: "nn.Module", sent: SentModel, config: RunConfig, node: NodeConfig, client: str
) -> ModelTest:
    """Test the model, personalized first if requested, and keep what the site keeps."""
    from osfl.models import classifiers

    names = class_names(config.data)
    device = pick_device(node.device)
    if sent.personalizes:
        _personalize(model, config, node, client, device)
    images = load_images(config.data, node, "test", config.seed)
    logits = classifiers.compute_logits(model, images.pixels, device)
    matrix = classifiers.confusion_of(logits, images.labels, len(names))
    test = ModelTest(logits, images.labels, matrix)
    if sent.personalizes or not node.sends_test_results:
        correct = sum(row[label] for label, row in enumerate(matrix))
        model_name = "personalized" if sent.personalizes else sent.name
        log.info(
            "%s: model %s: %d of %d test images correct",
            client,
            model_name,
            correct,
            len(images),
        )
    # Without a global model the models are other clients' classifiers
    if node.models_dir and METHODS[config.method].global_model:
        _keep_model(sent, model, config, client, Path(node.models_dir).expanduser())
    write_predictions(test, config, node, _file_name(sent, client))
    return test


def _file_name(sent: SentModel, client: str) -> str:
    """Return the name, without extension, of the files that a site keeps of a model."""
    adapted = "-adapted" if sent.personalizes else ""
    return f"{sent.job}-{sent.name}-{client}{adapted}"


def _personalize(
    model: "nn.Module", config: RunConfig, node: NodeConfig, client: str, device: "torch.device"
) -> None:
    """Personalize a model in place."""
    from client_app.learning.personalization import personalize
    from osfl.models.classifiers import ClassifierError

    log.info("%s: personalizing the global model, %d steps", client, config.personalization.steps)
    try:
        personalize(
            model, load_images(config.data, node, "train", config.seed), config, client, device
        )
    except ClassifierError as error:
        raise ClassifierError(f"personalization: {error}") from None


def _keep_model(
    sent: SentModel, model: "nn.Module", config: RunConfig, client: str, folder: Path
) -> None:
    """Write a model to the site's `models-dir`, with metadata that describes it."""
    from safetensors.torch import save

    metadata = _describe(sent, model, config).metadata()
    state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    file = folder / f"{_file_name(sent, client)}.safetensors"
    try:
        write_atomically(file, save(state, metadata))
    except OSError as error:
        # The test result must not be lost with it
        log.error("models-dir = %s: the model cannot be written: %s", folder, error)
    else:
        log.info("the model is saved in %s", file)


def _describe(sent: SentModel, model: "nn.Module", config: RunConfig) -> ModelDescription:
    settings = replace(
        global_settings(config), architecture=sent.architecture, small_stem=sent.small_stem
    )
    description = describe(config, sent.job, sent.name, settings, model)
    if not sent.personalizes:
        return description
    # The guarantee is about what leaves a client, and this model has seen its images
    trained_on = f"{description.trained_on}; then {config.personalization.steps} steps on a site's"
    return replace(description, trained_on=f"{trained_on} images", epsilon=None, delta=None)


def _payload(
    parts: Sequence[RunConfig],
    node: NodeConfig,
    client: str,
    job_id: str,
    kits: Sequence[str],
    folder: Path,
) -> tuple[bytes, dict[str, float]]:
    """Return the encoded payload and its costs; make it unless it is cached in `folder`."""
    config = parts[0]
    draw = _booked_draw(parts, node, client, job_id, folder)
    if (cached := _cached_payload(draw, config, folder)) is not None:
        if draw is not None:
            draw.finish()
        return _within_limit(cached.blob, config), {**cached.costs, "resent": 1.0}
    watch = Stopwatch()
    # Guarantees add up
    epsilon = sum(part.epsilon for part in parts)
    delta = sum(part.guaranteed_delta for part in parts)
    if draw is not None:
        spent = draw.book(epsilon, delta, node.epsilon_total)
        log.info(
            "%s: this job spends epsilon = %g and delta = %g; the total is %g and %g",
            *(client, epsilon, delta, *spent),
        )
    blob, flops = _make(parts, node, client, job_id, kits, folder)
    costs = {
        "seconds": watch.seconds,
        "flops": flops,
        "peak_memory_mb": peak_memory_mb(),
        "images": float(count_images(config.data, node, "train", config.seed)),
        "resent": 0.0,
        "epsilon": epsilon,
        "delta": delta,
    }
    payload_cache.store(folder, blob, costs)
    if draw is not None:
        draw.finish()
    # Sending needs twice the payload's size in memory
    release_memory()
    return _within_limit(blob, config), costs


def _make(
    parts: Sequence[RunConfig],
    node: NodeConfig,
    client: str,
    job_id: str,
    kits: Sequence[str],
    folder: Path,
) -> tuple[bytes, float]:
    """Make the payload of every part, and return the encoded message and its FLOPs."""
    payloads = {}
    flops = 0.0
    for part, kit in zip(parts, kits, strict=True):
        job = client_job(part, node, client, kit, folder)
        with without_collection():
            module = client_module(part.method)
        payloads[part.method] = module.make_payload(job)
        flops += float(job.meter.total)
        if part.secure_sum:
            job.sum_noise.store(folder)
    if len(parts) == 1:
        (config,) = parts
        payload = payloads[config.method]
        return wire.encode(payload, config.method, job_id, client, config.payload_codec), flops
    codecs = {part.method: part.payload_codec for part in parts}
    return wire.encode_joint(payloads, codecs, job_id, client), flops


def _booked_draw(
    parts: Sequence[RunConfig], node: NodeConfig, client: str, job_id: str, folder: Path
) -> BookedDraw | None:
    """Return the ledger entry of this message, or None if no part has a DP guarantee."""
    if not any(part.epsilon and METHODS[part.method].privacy for part in parts):
        return None
    ledger = Ledger(ledger_folder(node), client, older=folder.parent.parent)
    return BookedDraw(ledger, job_id, folder.name.removeprefix(f"{client}-"))


def _cached_payload(
    draw: BookedDraw | None, config: RunConfig, folder: Path
) -> payload_cache.CachedPayload | None:
    """Return the payload cached in `folder`, or None if it must be made.

    Raises:
        PublicConfigError: it is corrupt, and a second noisy draw would spend epsilon again.
    """
    try:
        return payload_cache.load(folder)
    except CorruptFileError as error:
        log.error("cached payload: %s", error)
        if draw is None or draw.is_pending():
            log.warning("the corrupt payload was not sent; making it again")
            return None
    raise PublicConfigError(
        "the cached payload is corrupt and was not sent. Making it again is another noisy draw, "
        f"which would spend epsilon = {config.epsilon:g} again. To allow that, remove the folder "
        "named in this site's log and start the job again"
    )


def client_job(
    config: RunConfig, node: NodeConfig, client: str, kit: str, folder: Path
) -> ClientJob:
    """Return the context of a client half, which writes its progress to `folder`."""

    def decode(fit: Fit) -> Images:
        return load_images(config.data, node, "train", config.seed, fit)

    def load(fit: Fit) -> Images:
        if not isinstance(fit, int) or not METHODS[config.method].rounds:
            return decode(fit)
        key = files_key(config.data, node, "train", fit)
        return load_cached(folder, key, partial(decode, fit))

    def domain() -> str:
        return node.domain or domain_name(config.data, node, config.seed)

    names = class_names(config.data)
    device = pick_device(node.device)
    low_memory = uses_checkpointing(node.checkpointing or config.checkpointing, device)
    return ClientJob(
        config,
        client,
        names,
        load,
        kit,
        device,
        domain,
        progress=_ProgressFile(folder),
        saves_memory=low_memory,
    )


def _within_limit(blob: bytes, config: RunConfig) -> bytes:
    if len(blob) > config.max_payload_mb * 1e6:
        raise ConfigError(
            f"this node's payload of {len(blob):,} bytes exceeds max-payload-mb = "
            f"{config.max_payload_mb:g} and was not sent. It stays cached: increase the limit and "
            "start the job again"
        )
    return blob


class _ProgressFile:
    """Write a client's progress beside its cached payload, at most about once a second."""

    def __init__(self, folder: Path):
        self._file = folder / "progress"
        self._watch = Stopwatch()
        self._last_write = -1.0

    def __call__(self, done: int, total: int, unit: str = "step") -> None:
        if self._watch.seconds - self._last_write >= 1 or done in (0, total):
            self._last_write = self._watch.seconds
            with open_private(self._file, "w") as file:
                file.write(f"{done} {total} {unit}")
