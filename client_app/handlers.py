"""What a client spends its time on: its payload or its round, and the test of a global model.

With torch, which joining does without.
"""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import MetricRecord, RecordDict

from client_app import payload_cache
from client_app.context import ClientJob
from client_app.errors import PublicConfigError
from client_app.image_cache import files_key, load_once
from client_app.keys import sealing_key
from client_app.privacy.ledger import BookedDraw, Ledger, ledger_folder
from osfl.config import ConfigError, NodeConfig, RunConfig
from osfl.data.load import (
    Fit,
    Images,
    count_images,
    domain_name,
    load_images,
    small_classes,
)
from osfl.data.overlap import check_apart
from osfl.data.parts import class_names, folder_notes, left_out_words
from osfl.methods import METHODS, client_half
from osfl.payload import wire
from osfl.payload.encryption import seal
from osfl.payload.messages import WITHHELD, SentModel, pack_payload, sent_costs, unpack_model
from osfl.util.costs import Stopwatch, peak_memory_mb, release_memory
from osfl.util.devices import pick_device, saves_memory
from osfl.util.files import DamageError, open_private, write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("flwr")


def train(
    content: RecordDict,
    config: RunConfig,
    node: NodeConfig,
    client: str,
    job_id: str,
    kit: str,
    folder: Path,
) -> RecordDict:
    """The reply to `train`.

    `folder` is the client's own for this job, and the same for the same settings.
    """
    if left_out := small_classes(config.data, node, config.seed):
        names = class_names(config.data)
        log.warning(
            "%s: min-class-images = %d leaves out classes with fewer images here: %s",
            client,
            node.min_class_images,
            ", ".join(names[label] for label in left_out),
        )
    for words in left_out_words(config.data, node):
        log.warning("%s: %s", client, words)
    for words in folder_notes(config.data, {client: node}):
        log.warning("%s", words)
    seal_to = sealing_key(content, node, config.sealing_key)
    if METHODS[config.method].rounds:
        from client_app.learning.local_training import train_round

        return train_round(content, client_job(config, node, client, kit, folder), folder)
    blob, costs = _payload(config, node, client, job_id, kit, folder)
    if seal_to is not None:
        # What the disk has is open: it is this client's own
        blob = seal(blob, seal_to, job_id, client)
    return pack_payload(blob, sent_costs(costs))


def evaluate(content: RecordDict, config: RunConfig, node: NodeConfig, client: str) -> RecordDict:
    """The reply to `evaluate`: the confusion matrix of a global model on this node's test images.

    Asked to adapt it, of what this client makes of it with its own training images first. What a
    site does not tell (`test-results`, and with an epsilon all that comes of adapting) ends in its
    own log and its `models-dir`, and cannot make the reply another one. A node with a `models-dir`
    keeps the model.

    Raises:
        ClassifierError: the model is not of its architecture, or cannot be adapted.
        DataError: there are no test images, or they are not told apart from training images.
    """
    watch = Stopwatch()
    from osfl.models import classifiers

    guaranteed = bool(config.epsilon or node.demands_guarantee)
    sent = unpack_model(content)
    names = class_names(config.data)
    model = classifiers.rebuild(sent.state, sent.architecture, len(names), sent.small_stem)
    if not node.tells_tests or (sent.adapts and guaranteed):
        _test_unheard(model, sent, config, node, client)
        return _withheld()
    if node.demands_guarantee:
        check_apart(config.data, node)
    matrix = _test(model, sent, config, node, client)
    # With a guarantee the time it took is not told, either
    seconds = 0.0 if guaranteed else watch.seconds
    cells = [cell for row in matrix for cell in row]
    return RecordDict({"metrics": MetricRecord({"seconds": seconds, "confusion": cells})})


def _withheld() -> RecordDict:
    """The reply of a site that keeps a test to itself: it depends on no image."""
    return RecordDict({"metrics": MetricRecord({"seconds": 0.0, WITHHELD: 1})})


def _test_unheard(
    model: "nn.Module", sent: SentModel, config: RunConfig, node: NodeConfig, client: str
) -> None:
    """Test a model for this site alone. Whether that works is for its own log."""
    # An adapted model that is neither kept nor tested for the server has no use
    if sent.adapts and not node.models_dir:
        return
    try:
        _test(model, sent, config, node, client)
    except Exception:
        log.exception("%s: the test that this site keeps to itself failed", client)


def _test(
    model: "nn.Module", sent: SentModel, config: RunConfig, node: NodeConfig, client: str
) -> list[list[int]]:
    """Adapt the model if asked to, test it, keep it where the site keeps models."""
    from osfl.models import classifiers

    names = class_names(config.data)
    device = pick_device(node.device)
    if sent.adapts:
        _adapt(model, config, node, client, device)
    images = load_images(config.data, node, "test", config.seed)
    matrix = classifiers.confusion(model, images.pixels, images.labels, len(names), device)
    if sent.adapts or not node.tells_tests:
        right = sum(row[label] for label, row in enumerate(matrix))
        what = "adapted" if sent.adapts else sent.name
        log.info("%s: %s, it says %d of %d test images right", client, what, right, len(images))
    # Local's are other clients' classifiers
    if node.models_dir and config.method != "local":
        _keep_model(sent, model, names, client, Path(node.models_dir).expanduser())
    return matrix


def _adapt(
    model: "nn.Module", config: RunConfig, node: NodeConfig, client: str, device: "torch.device"
) -> None:
    """Adapt a model in place."""
    from client_app.learning.personalization import adapt
    from osfl.models.classifiers import ClassifierError

    log.info("%s: adapting the global model, %d steps", client, config.adaptation.steps)
    try:
        adapt(model, load_images(config.data, node, "train", config.seed), config, client, device)
    except ClassifierError as error:
        raise ClassifierError(f"adaptation: {error}") from None


def _keep_model(
    sent: SentModel, model: "nn.Module", classes: Sequence[str], client: str, folder: Path
) -> None:
    """Keep a model for this site, as a file that says what it is of."""
    from safetensors.torch import save

    about = {
        "architecture": sent.architecture,
        "small-stem": json.dumps(sent.small_stem),
        "classes": json.dumps(classes),
        "adapted": json.dumps(sent.adapts),
    }
    state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    adapted = "-adapted" if sent.adapts else ""
    file = folder / f"{sent.job}-{sent.name}-{client}{adapted}.safetensors"
    try:
        write_atomically(file, save(state, about))
    except OSError as error:
        # The test is not lost for it
        log.error("models-dir = %s: the model cannot be kept: %s", folder, error)
    else:
        log.info("the model is in %s", file)


def _payload(
    config: RunConfig, node: NodeConfig, client: str, job_id: str, kit: str, folder: Path
) -> tuple[bytes, dict[str, float]]:
    """(serialised payload, what it cost), made here unless it is in `folder`."""
    draw = _booked_draw(config, node, client, job_id, folder)
    if (cached := _cached_payload(draw, config, folder)) is not None:
        if draw is not None:
            draw.finish()
        return _within_limit(cached.blob, config), {**cached.costs, "resent": 1.0}
    watch = Stopwatch()
    if draw is not None:
        spent = draw.book(config.epsilon, config.guaranteed_delta, node.epsilon_total)
        log.info(
            "%s: epsilon = %g and delta = %g; in all jobs so far %g and %g",
            *(client, config.epsilon, config.guaranteed_delta, *spent),
        )
    job = client_job(config, node, client, kit, folder)
    payload = client_half(config.method).make_payload(job)
    blob = wire.encode(payload, config.method, job_id, client, config.payload_codec)
    costs = {
        "seconds": watch.seconds,
        "flops": float(job.meter.total),
        "peak_memory_mb": peak_memory_mb(),
        "images": float(count_images(config.data, node, "train", config.seed)),
        "resent": 0.0,
        "epsilon": config.epsilon,
        "delta": config.guaranteed_delta,
    }
    payload_cache.store(folder, blob, costs)
    if draw is not None:
        draw.finish()
    del payload, job
    release_memory()  # sending takes the payload's size twice
    return _within_limit(blob, config), costs


def _booked_draw(
    config: RunConfig, node: NodeConfig, client: str, job_id: str, folder: Path
) -> BookedDraw | None:
    """The ledger's entry of this payload; None: it has no guarantee."""
    if not (config.epsilon and METHODS[config.method].private):
        return None
    ledger = Ledger(ledger_folder(node), client, older=folder.parent.parent)
    return BookedDraw(ledger, job_id, folder.name.removeprefix(f"{client}-"))


def _cached_payload(
    draw: BookedDraw | None, config: RunConfig, folder: Path
) -> payload_cache.CachedPayload | None:
    """The payload in `folder`; None: there is none that can be sent, and it is to be made.

    Raises:
        PublicConfigError: it is damaged, and another noisy one would cost epsilon again.
    """
    try:
        return payload_cache.load(folder)
    except DamageError as error:
        log.error("the cached payload: %s", error)
        if draw is None or draw.is_pending():
            log.warning("it was not sent, and is made anew")
            return None
    raise PublicConfigError(
        "the cached payload is damaged, and was not sent. Another one is another noisy message, "
        f"and would spend epsilon = {config.epsilon:g} again. To spend it, this site must remove "
        "the folder that its log names, and the job be started again"
    )


def client_job(
    config: RunConfig, node: NodeConfig, client: str, kit: str, folder: Path
) -> ClientJob:
    """What a client half works with; how far it is stands in `folder`."""

    def decode(fit: Fit) -> Images:
        return load_images(config.data, node, "train", config.seed, fit)

    def load(fit: Fit) -> Images:
        if not isinstance(fit, int) or not METHODS[config.method].rounds:
            return decode(fit)
        key = files_key(config.data, node, "train", fit)
        return load_once(folder, key, partial(decode, fit))

    def domain() -> str:
        return node.domain or domain_name(config.data, node, config.seed)

    names = class_names(config.data)
    device = pick_device(node.device)
    frugal = saves_memory(node.checkpointing or config.checkpointing, device)
    return ClientJob(
        config,
        client,
        names,
        load,
        kit,
        device,
        domain,
        progress=_Progress(folder),
        saves_memory=frugal,
    )


def _within_limit(blob: bytes, config: RunConfig) -> bytes:
    if len(blob) > config.max_payload_mb * 1e6:
        raise ConfigError(
            f"this node's payload has {len(blob):,} bytes, more than max-payload-mb = "
            f"{config.max_payload_mb:g} allows; it was not sent. It "
            "is kept: raise the limit and start the job again"
        )
    return blob


class _Progress:
    """Writes how far a client is beside its cached payload, at most about once a second."""

    def __init__(self, folder: Path):
        self._file = folder / "progress"
        self._watch = Stopwatch()
        self._last = -1.0

    def __call__(self, done: int, total: int, what: str = "step") -> None:
        if self._watch.seconds - self._last >= 1 or done in (0, total):
            self._last = self._watch.seconds
            with open_private(self._file, "w") as file:
                file.write(f"{done} {total} {what}")
