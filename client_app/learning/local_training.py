"""Client half of the iterative baselines, such as FedAvg.

Train the global model on the local images for some epochs, and send it back.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import nn

from client_app.context import ClientJob
from osfl.config import ConfigError
from osfl.models import classifiers
from osfl.models.training import ExtraLoss, fit, local_recipe
from osfl.payload.messages import pack_state, unpack_state
from osfl.util.costs import Stopwatch, peak_memory_mb
from osfl.util.files import CorruptFileError, write_atomically
from osfl.util.seeds import seed_of

# Adds the penalty's gradient to the gradients of the parameters
Penalty = Callable[[nn.Module], None]


def train_round(content: RecordDict, job: ClientJob, folder: Path) -> RecordDict:
    """Train for one round of `fedavg`, `fedprox`, `feddyn` or `feddf`.

    The methods differ in the penalty on the local objective.

    Args:
        content: `model`, the global one; `config`, with the round's number and FedProx's or
            FedDyn's constant.
        folder: where this client keeps FedDyn's state between the rounds of the job.

    Raises:
        ClassifierError: there are too few images, or the training diverged.
        ConfigError: the model is not of this client's architecture.
        CorruptFileError: FedDyn's state is corrupt.
    """
    settings = job.config.classifier
    request = content.config_records["config"]
    _check_architecture(request, settings.architecture)
    watch = Stopwatch()
    number = int(cast(int, request["server-round"]))
    images = job.load(job.config.data.image_size)
    state = unpack_state(content.array_records["model"])
    model = classifiers.rebuild_classifier(
        state, settings.architecture, len(job.classes), settings.small_stem
    )
    start = {name: p.detach().clone().to(job.device) for name, p in model.named_parameters()}
    penalty: Penalty | None = None
    correction: dict[str, torch.Tensor] = {}
    if "proximal-mu" in request:
        penalty = fedprox_penalty(start, float(cast(float, request["proximal-mu"])))
    elif "dyn-alpha" in request:
        _delete_stale_corrections(folder, number)
        correction = _load_correction(folder, start)
        penalty = feddyn_penalty(start, correction, float(cast(float, request["dyn-alpha"])))
    fit(
        model,
        images.pixels,
        images.labels,
        local_recipe(settings, job.config.rounds.local_epochs),
        seed_of(job.config.seed, job.config.method, job.client, number),
        job.device,
        extra=ExtraLoss(penalty=penalty),
        meter=job.meter,
        progress=job.progress,
    )
    if correction:
        alpha = float(cast(float, request["dyn-alpha"]))
        _save_correction(folder, number, _updated(correction, model, start, alpha))
    return _reply(model, len(images), watch, job)


def _reply(model: nn.Module, count: int, watch: Stopwatch, job: ClientJob) -> RecordDict:
    costs = {
        "seconds": watch.seconds,
        "flops": float(job.meter.total),
        "peak_memory_mb": peak_memory_mb(),
    }
    metrics = MetricRecord({"num-examples": count, **costs})
    return RecordDict({"model": pack_state(model.state_dict()), "metrics": metrics})


def _check_architecture(request: ConfigRecord, architecture: str) -> None:
    if (sent := request["architecture"]) != architecture:
        raise ConfigError(
            f"node-config architecture: this node now has {architecture!r}, but joined the run "
            f"with {str(sent)[:80]!r}. Restore the setting, or start the job again"
        )


def fedprox_penalty(start: dict[str, torch.Tensor], mu: float) -> Penalty:
    """Return FedProx's penalty (Li et al., arXiv 1812.06127, eq. 2).

    mu/2 ||theta - theta_global||^2

    Adds mu (theta - theta_global) to the gradients directly. Through autograd, the penalty of a
    ResNet-18 would take half as long again as a step on eight small images.
    """

    def add_gradient(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=mu).sub_(start[name], alpha=mu)

    return add_gradient


def feddyn_penalty(
    start: dict[str, torch.Tensor], gradient: dict[str, torch.Tensor], alpha: float
) -> Penalty:
    """Return FedDyn's penalty (Acar et al., arXiv 2111.04263, algorithm 1).

    -<grad L_k(theta_k), theta> + alpha/2 ||theta - theta_global||^2

    Args:
        start: theta_global.
        gradient: grad L_k(theta_k).
    """
    add_quadratic = fedprox_penalty(start, alpha)

    def add_gradient(model: nn.Module) -> None:
        add_quadratic(model)
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad.sub_(gradient[name])

    return add_gradient


def _updated(
    correction: dict[str, torch.Tensor],
    model: nn.Module,
    start: dict[str, torch.Tensor],
    alpha: float,
) -> dict[str, torch.Tensor]:
    # Grad L_k(theta_k) <- grad L_k(theta_k) - alpha (theta_k - theta) (FedDyn, algorithm 1)
    return {n: correction[n] - alpha * (p.detach() - start[n]) for n, p in model.named_parameters()}


def _delete_stale_corrections(folder: Path, number: int) -> None:
    """Delete the states of a repeated request for this round, or of an earlier run of the job."""
    for stale in folder.glob("feddyn-*.safetensors"):
        if int(stale.stem.removeprefix("feddyn-")) >= number:
            stale.unlink()


def _load_correction(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load FedDyn's gradient after this client's last round, zeros before its first."""
    files = sorted(folder.glob("feddyn-*.safetensors"))
    if not files:
        return {name: torch.zeros_like(p) for name, p in like.items()}
    state = _load_verified(files[-1])
    return {name: state[name].to(p.device) for name, p in like.items()}


def _load_verified(file: Path) -> dict[str, torch.Tensor]:
    """Load a state and verify it against the SHA-256 in the file's metadata.

    Raises:
        CorruptFileError: the checksum differs, or the file cannot be read.
    """
    try:
        with safe_open(file, "pt") as reader:
            expected = (reader.metadata() or {}).get("sha256")
        state = load(file.read_bytes())
    except (SafetensorError, OSError):
        expected = None
    if expected is None or expected != _digest(state):
        raise CorruptFileError(
            f"{file.name}: FedDyn's state between rounds is corrupt and cannot be recomputed; "
            "start the run again under another job-id"
        )
    return state


def _digest(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(save(state)).hexdigest()


def _save_correction(folder: Path, number: int, state: dict[str, torch.Tensor]) -> None:
    """Save FedDyn's gradient, and keep the last two rounds' files.

    A server that was killed may request the previous round again.
    """
    tensors = {n: t.cpu().contiguous() for n, t in state.items()}
    file = folder / f"feddyn-{number:06d}.safetensors"
    write_atomically(file, save(tensors, {"sha256": _digest(tensors)}))
    for old in sorted(folder.glob("feddyn-*.safetensors"))[:-2]:
        old.unlink()
