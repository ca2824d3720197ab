"""The client's part of FedAvg and its kin.

Train the global model on the local images for some epochs, and send it back.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from flwr.app import MetricRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import nn

from client_app.context import ClientJob
from osfl.config import ConfigError
from osfl.models import classifiers
from osfl.models.training import fit
from osfl.payload.messages import pack_state, unpack_state
from osfl.util.costs import Stopwatch, peak_memory_mb
from osfl.util.files import DamageError, write_atomically
from osfl.util.seeds import seed_of

Penalty = Callable[[nn.Module], None]  # adds its gradient to the parameters'


def train_round(content: RecordDict, job: ClientJob, folder: Path) -> RecordDict:
    """One round of `fedavg`, `fedprox`, `feddyn` or `feddf`, which differ in the penalty on the
    local objective.

    Args:
        content: `model`, the global one; `config`, with the round's number and FedProx's or
            FedDyn's constant.
        folder: where this client keeps FedDyn's state between the rounds of the job.

    Raises:
        ClassifierError: too few images, or the training diverged.
        ConfigError: the model is not of this client's architecture.
        DamageError: FedDyn's state is not as it was written.
    """
    settings = job.config.classifier
    request = content.config_records["config"]
    if (sent := request["architecture"]) != settings.architecture:
        raise ConfigError(
            f"node-config architecture: this node has {settings.architecture!r} now, and joined "
            "the "
            f"run with {str(sent)[:80]!r}. Start the job again, or give it back"
        )
    watch = Stopwatch()
    number = int(cast(int, request["server-round"]))
    images = job.load(job.config.data.image_size)
    state = unpack_state(content.array_records["model"])
    model = classifiers.rebuild(state, settings.architecture, len(job.classes), settings.small_stem)
    start = {name: p.detach().clone().to(job.device) for name, p in model.named_parameters()}
    penalty: Penalty | None = None
    correction: dict[str, torch.Tensor] = {}
    if "proximal-mu" in request:
        penalty = proximal(start, float(cast(float, request["proximal-mu"])))
    elif "dyn-alpha" in request:
        alpha = float(cast(float, request["dyn-alpha"]))
        # Of this round, asked for again, or of an earlier run of the job
        for stale in folder.glob("feddyn-*.safetensors"):
            if int(stale.stem.removeprefix("feddyn-")) >= number:
                stale.unlink()
        correction = _load_correction(folder, start)
        penalty = dynamic(start, correction, alpha)
    fit(
        model,
        images.pixels,
        images.labels,
        settings,
        seed_of(job.config.seed, job.config.method, job.client, number),
        job.device,
        epochs=job.config.rounds.local_epochs,
        penalty=penalty,
        meter=job.meter,
        progress=job.progress,
    )
    # Grad L_k(theta_k) <- grad L_k(theta_k) - alpha (theta_k - theta) (FedDyn, algorithm 1)
    if correction:
        after = {
            n: correction[n] - alpha * (p.detach() - start[n]) for n, p in model.named_parameters()
        }
        _save_correction(folder, number, after)
    costs = {
        "seconds": watch.seconds,
        "flops": float(job.meter.total),
        "peak_memory_mb": peak_memory_mb(),
    }
    metrics = MetricRecord({"num-examples": len(images), **costs})
    return RecordDict({"model": pack_state(model.state_dict()), "metrics": metrics})


def proximal(start: dict[str, torch.Tensor], mu: float) -> Penalty:
    """FedProx's penalty mu/2 ||theta - theta_global||^2 (Li et al., arXiv 1812.06127, eq. 2).

    Its gradient mu (theta - theta_global) is added to the gradients.

    As gradients, because through autograd the penalty of a ResNet-18 takes half as long again as a
    step on eight small images.
    """

    def add_gradient(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=mu).sub_(start[name], alpha=mu)

    return add_gradient


def dynamic(
    start: dict[str, torch.Tensor], gradient: dict[str, torch.Tensor], alpha: float
) -> Penalty:
    """-<grad L_k(theta_k), theta> + alpha/2 ||theta - theta_global||^2 (FedDyn, Acar et al., arXiv
    2111.04263, algorithm 1).
    """
    add_quadratic = proximal(start, alpha)

    def add_gradient(model: nn.Module) -> None:
        add_quadratic(model)
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad.sub_(gradient[name])

    return add_gradient


def _load_correction(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FedDyn's gradient after the last round that this client took part in.

    Zeros before the first.
    """
    kept = sorted(folder.glob("feddyn-*.safetensors"))
    if not kept:
        return {name: torch.zeros_like(p) for name, p in like.items()}
    state = _undamaged(kept[-1])
    return {name: state[name].to(p.device) for name, p in like.items()}


def _undamaged(file: Path) -> dict[str, torch.Tensor]:
    """The state in a file whose metadata has its SHA-256.

    Raises:
        DamageError: it is another.
    """
    try:
        with safe_open(file, "pt") as opened:
            written = (opened.metadata() or {}).get("sha256")
        state = load(file.read_bytes())
    except (SafetensorError, OSError):
        written = None
    if written is None or written != _digest_of(state):
        raise DamageError(
            f"{file.name}: what FedDyn keeps between rounds is damaged, and cannot be made anew; "
            "start the run again under another job-id"
        )
    return state


def _digest_of(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(save(state)).hexdigest()


def _save_correction(folder: Path, number: int, state: dict[str, torch.Tensor]) -> None:
    """Keep the last two rounds': a server that was killed may ask for a round again."""
    own = {n: t.cpu().contiguous() for n, t in state.items()}
    file = folder / f"feddyn-{number:06d}.safetensors"
    write_atomically(file, save(own, {"sha256": _digest_of(own)}))
    for old in sorted(folder.glob("feddyn-*.safetensors"))[:-2]:
        old.unlink()
