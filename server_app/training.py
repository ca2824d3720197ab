"""Training of the global model on synthetic images, with or without the clients as teachers."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import osfl
from osfl.models import classifiers
from osfl.models.classifiers import compute_logits
from osfl.models.training import Checkpoints, Distillation, ExtraLoss, fit
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import RunFolder
from osfl.util.costs import Stopwatch
from osfl.util.log import log
from osfl.util.pixels import Pixels
from server_app.context import GlobalModel, ServerJob

# Time between two stores of a training's curve
CURVE_SECONDS = 5.0


def train_global(
    job: ServerJob,
    name: str,
    pixels: Pixels,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
    distillations: tuple[Distillation, ...] = (),
    continues: bool = True,
) -> GlobalModel:
    """Train a global model, or load the stored one if it was trained on the same images.

    Args:
        name: the training strategy; the model is stored as `models/<name>.safetensors`.
        pixels: [N, 3, S, S] uint8.
        labels: [N].
        teacher: soft targets of `fit`, [N, C] probabilities.
        distillation_weight: weight of the soft targets in `fit`.
        distillations: further soft targets.
        continues: whether the training starts from an earlier version's model, where the run does.
    """
    settings = job.config.global_model
    start = job.folder.previous_model(name) if continues else None
    soft_labels = [term.teacher for term in distillations]
    inputs = digest_of(pixels, labels, teacher, *soft_labels)
    inputs += f" from {start[1]}" if start else ""
    job.status.phase(f"training {name}")
    if state := job.folder.stored_model(name, inputs):
        model = _initial_model(job)
        model.load_state_dict(state)
    else:
        checkpoint = TrainingCheckpoint(job.folder, name, inputs)
        curve = LossCurve(job.folder, name)
        model = train_model(
            job,
            pixels,
            labels,
            teacher,
            distillation_weight,
            distillations,
            start=start[0] if start else None,
            progress=job.status.advance,
            record=curve.add,
            checkpoints=Checkpoints(checkpoint.load, checkpoint.store),
        )
        curve.store()
        record = {"seconds": checkpoint.seconds, "images": len(labels), "inputs": inputs}
        metadata = job.metadata(name, model)
        job.folder.store_model(name, model.cpu().state_dict(), record, metadata)
    return GlobalModel(model.eval(), settings.architecture, settings.small_stem)


class TrainingCheckpoint:
    """The state of a training in the run's folder, from which a killed server continues it.

    Args:
        name: the training strategy.
        inputs: a text that determines the model.
    """

    def __init__(self, folder: RunFolder, name: str, inputs: str):
        self._folder = folder
        self._name = name
        # Other releases may draw or round otherwise
        self._inputs = f"{inputs}, osfl {osfl.__version__}, torch {torch.__version__}"
        self._watch = Stopwatch()
        self._earlier_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the steps so far, also of those before an interruption."""
        return self._earlier_seconds + self._watch.seconds

    def load(self) -> dict[str, Any] | None:
        """Return the stored state of the same training, or None."""
        state = self._folder.stored_checkpoint(self._name, self._inputs)
        if state is not None:
            self._earlier_seconds = state["seconds"]
            log.info("training %s continues at step %d", self._name, len(state["losses"]))
        return state

    def store(self, state: dict[str, Any]) -> None:
        """Store a state; a failure, such as a full disk, is logged and does not end the run."""
        content = {**state, "seconds": self.seconds}
        try:
            self._folder.store_checkpoint(self._name, self._inputs, content)
        except OSError as error:
            log.warning("the state of training %s is not stored: %s", self._name, error)


class LossCurve:
    """The loss of each step of a training, stored in the run's folder while it goes on."""

    def __init__(self, folder: RunFolder, name: str):
        self._folder = folder
        self._name = name
        self._losses: list[float] = []
        self._stored = time.monotonic()

    def add(self, loss: float) -> None:
        """Add the next step's loss."""
        self._losses.append(loss)
        if time.monotonic() - self._stored > CURVE_SECONDS:
            self.store()

    def store(self) -> None:
        """Store the curve."""
        self._stored = time.monotonic()
        self._folder.store_curve(self._name, self._losses)


def train_model(
    job: ServerJob,
    pixels: Pixels,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
    distillations: tuple[Distillation, ...] = (),
    *,
    start: Mapping[str, torch.Tensor] | None = None,
    progress: Callable[[int, int], None],
    record: Callable[[float], None] = lambda loss: None,
    checkpoints: Checkpoints | None = None,
) -> nn.Module:
    """Train a model as the global model is trained, without storing it. See `train_global`.

    Args:
        start: the weights of an earlier model that the training starts from; None: the initial
            weights.
    """
    model = _initial_model(job)
    if start is not None:
        model.load_state_dict(start)
    fit(
        model,
        pixels,
        labels,
        job.config.global_model,
        job.config.seed,
        job.device,
        extra=ExtraLoss(teacher, distillation_weight, distillations=distillations),
        progress=progress,
        record=record,
        checkpoints=checkpoints,
    )
    return model


def _initial_model(job: ServerJob) -> nn.Module:
    return classifiers.new_classifier(
        job.config.global_model,
        len(job.classes),
        job.init_kit,
        job.config.seed,
        "global-model.init",
    )


def digest_of(*inputs: Pixels | None) -> str:
    """Return the SHA-256 of the tensors that a model is trained on."""
    digest = hashlib.sha256()
    for rows in inputs:
        for part in () if rows is None else rows.split(1000):
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def mean_teacher(
    teachers: Mapping[str, nn.Module],
    labels_of: Mapping[str, list[int]],
    pixels: torch.Tensor,
    device: torch.device,
    plain: bool,
) -> torch.Tensor:
    """Return the mean of the clients' softmax outputs for every image, [N, C].

    These are the targets of multi-teacher distillation (FedLMG, eq. 12). Under label skew a teacher
    was not trained on the classes that its client lacks. So the default is a per-class mean, over
    the teachers that hold the class, with rows normalized to sum 1.

    Args:
        labels_of: the labels that each client holds.
        plain: use the uniform mean over all teachers for every class.
    """
    probabilities = {
        client: _softmax(client, model, pixels, device) for client, model in teachers.items()
    }
    if plain:
        # FedLMG, eq. 12: the mean over k of softmax(F_k(x))
        return torch.stack(list(probabilities.values())).mean(dim=0)
    total = torch.zeros_like(next(iter(probabilities.values())))
    count = torch.zeros(next(iter(probabilities.values())).shape[1])
    for client, p in probabilities.items():
        total[:, labels_of[client]] += p[:, labels_of[client]]
        count[labels_of[client]] += 1
    mean = total / count.clamp_min(1)
    return mean / mean.sum(dim=1, keepdim=True)


def _softmax(
    client: str, model: nn.Module, pixels: torch.Tensor, device: torch.device
) -> torch.Tensor:
    p = F.softmax(compute_logits(model, pixels, device), dim=1)
    if not torch.isfinite(p).all():
        raise PayloadError(client, "state", "its outputs on the synthetic images are not finite")
    return p


def specific_teacher(
    teachers: Mapping[str, nn.Module],
    clients: tuple[str, ...],
    pixels: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Return for every image the softmax output of its own client's classifier, [N, C].

    These are the targets of specific-teacher distillation (FedLMG, eq. 13).
    """
    targets = None
    for client, model in teachers.items():
        rows = torch.tensor(
            [index for index, owner in enumerate(clients) if owner == client], dtype=torch.long
        )
        if len(rows):
            p = _softmax(client, model, pixels[rows], device)
            targets = torch.zeros(len(pixels), p.shape[1]) if targets is None else targets
            # FedLMG, eq. 13: softmax(F_k(x)) of the image's client k
            targets[rows] = p
    assert targets is not None, "no image belongs to a teacher"
    return targets
