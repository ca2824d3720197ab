"""Train classifiers: those of clients, of reference runs and the global models."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from osfl.config import ClassifierConfig
from osfl.models.classifiers import ClassifierError, linear_head, normalize
from osfl.util.costs import FlopMeter
from osfl.util.minibatches import minibatches
from osfl.util.pixels import LazyPixels, Pixels, to_float
from osfl.util.seeds import seed_of

# Images above this part of a GPU's free memory stay in the machine's
GPU_MEMORY_SHARE = 2
# Between two stores of a training's state
CHECKPOINT_SECONDS = 60.0
# One image [3, S, S] to another
Augmentation = Callable[[torch.Tensor], torch.Tensor]
# Images [B, 3, S, S] and labels [B] to mixed images and soft labels [B, C]
Mixing = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Distillation:
    """A term weight * T^2 * KL(teacher || student at temperature T) of a training's loss.

    Hinton et al., "Distilling the knowledge in a neural network" (arXiv 1503.02531), section 2: T^2
    keeps the gradient's size as T changes.

    Attributes:
        teacher: [N, C] probabilities, at temperature T. A row of zeros has no part in the loss.
    """

    teacher: torch.Tensor
    weight: float
    temperature: float = 1.0

    def loss(self, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the term for the images of these rows, a mean over them.

        Args:
            logits: the student's, [B, C].
        """
        student = F.log_softmax(logits / self.temperature, 1)
        # Hinton et al., section 2: T^2 KL(p_T || q_T)
        divergence = F.kl_div(student, self.teacher[rows], reduction="batchmean")
        return self.weight * self.temperature**2 * divergence


@dataclass(frozen=True)
class Checkpoints:
    """Functions that keep the state of a training, from which another process continues it.

    The result is that of an uninterrupted training, bit by bit: the state has the weights, the
    optimizer's momentum, the schedule, the average, the random generators and all losses so far.

    Attributes:
        load: returns the stored state, or None.
        store: called with the state every `CHECKPOINT_SECONDS`.
    """

    load: Callable[[], dict[str, Any] | None]
    store: Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ExtraLoss:
    """Terms of a training's loss beside the cross-entropy.

    Attributes:
        teacher: [N, C] probabilities for the images without augmentation: FedLMG's eq. 12 and 13,
            with the mean teacher or the image's own. None: no distillation.
        distillation_weight: weight of KL(teacher || student).
        penalty: called in every step after the backward pass; adds the gradient of another term of
            the loss (FedProx, FedDyn) to the parameters' gradients.
        distillations: further terms, of a mixed run.
    """

    teacher: torch.Tensor | None = None
    distillation_weight: float = 1.0
    penalty: Callable[[nn.Module], None] | None = None
    distillations: tuple[Distillation, ...] = ()


def fit(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    config: ClassifierConfig,
    seed: int,
    device: torch.device,
    *,
    extra: ExtraLoss | None = None,
    meter: FlopMeter | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    record: Callable[[float], None] = lambda loss: None,
    checkpoints: Checkpoints | None = None,
) -> nn.Module:
    """Train in place by SGD on cross-entropy and `extra` terms of the loss.

    Args:
        pixels: [N, 3, S, S] uint8.
        labels: [N] int64.
        config: the recipe; that of a round's local training is `local_recipe(...)`.
        meter: counts the FLOPs of the steps.
        progress: called with (finished steps, all steps).
        record: called with the loss of each step, also of those before an interruption.
        checkpoints: None: an interrupted training begins anew.

    Raises:
        ClassifierError: fewer than two images, or the loss is not finite.
    """
    meter = meter or FlopMeter()
    model = model.to(device).train()
    pixel_device = _pixel_device(pixels, config, device)
    # The decoder's images are channels-last. Contiguous ones are 1.5 times as fast on a CPU, and
    # give the same result as images loaded from disk.
    pixels = pixels.to(pixel_device).contiguous()
    labels = labels.to(device)
    batches = split_batches(len(labels), config, seed)
    trainer = _Trainer(model, config, device, len(batches), extra or ExtraLoss())
    preprocess = _new_preprocessing(model, pixels, config, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(seed, "dropout"))
        losses = trainer.restore(checkpoints.load() if checkpoints else None)
        for loss in losses:
            record(loss)
        progress(len(losses), len(batches))
        stored = time.monotonic()
        for rows, batch in _prefetch(pixels, batches[len(losses) :], pixel_device):
            rows = rows.to(device)
            images, targets = preprocess(batch, labels[rows])
            step = partial(trainer.step, rows, images, targets)
            losses.append(_finite(meter.run(("fit", len(rows)), step), len(losses) + 1, config.lr))
            record(losses[-1])
            trainer.advance()
            progress(len(losses), len(batches))
            if checkpoints and time.monotonic() - stored > CHECKPOINT_SECONDS:
                checkpoints.store(trainer.state(losses))
                stored = time.monotonic()
    model.requires_grad_(True)
    trainer.load_average()
    return model.eval()


def _pixel_device(pixels: Pixels, config: ClassifierConfig, device: torch.device) -> torch.device:
    """Return the device that the images are on during a training."""
    # An augmentation is about fifty small operations per image, too small for a GPU
    if config.augmentation != "none":
        return torch.device("cpu")
    if device.type == "cuda" and isinstance(pixels, torch.Tensor):
        free, _ = torch.cuda.mem_get_info(device)
        if pixels.nbytes > free // GPU_MEMORY_SHARE:
            return torch.device("cpu")
    return device


def _finite(loss: torch.Tensor, step: int, lr: float) -> float:
    """Return a loss as a number.

    Raises:
        ClassifierError: it is not finite.
    """
    value = loss.item()
    if not math.isfinite(value):
        raise ClassifierError(f"training diverged at step {step} (loss {value}); lower lr = {lr:g}")
    return value


def local_recipe(config: ClassifierConfig, epochs: int) -> ClassifierConfig:
    """Return the recipe of a round's local training of an iterative baseline.

    The learning rate is constant and weights are not averaged, whatever `config` says.
    """
    return replace(config, epochs=epochs, steps=0, schedule="constant", ema=0.0)


def _new_preprocessing(
    model: nn.Module, pixels: Pixels, config: ClassifierConfig, device: torch.device
) -> Mixing:
    """Return the function from a batch of pixels and labels to the model's input and targets."""
    augment = new_augmentation(config.augmentation, pixels[torch.tensor([0])].shape[-1])
    mix = new_mixing(config.mixing, model, pixels)

    def preprocess(batch: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if augment is not None:
            batch = torch.stack([augment(image) for image in batch])
        images = normalize(to_float(batch.to(device)), model)
        return (images, labels) if mix is None else mix(images, labels)

    return preprocess


class _Trainer:
    """The optimizer of a training of `steps`, with its schedule and weight averaging."""

    def __init__(
        self,
        model: nn.Module,
        config: ClassifierConfig,
        device: torch.device,
        steps: int,
        extra: ExtraLoss,
    ):
        self.model = model
        self.config = config
        self.device = device
        self.extra = extra
        self.teacher = None if extra.teacher is None else extra.teacher.to(device)
        self.distillations = [
            replace(term, teacher=term.teacher.to(device)) for term in extra.distillations
        ]
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=_in_bfloat16(config, device)
        )
        self.optimizer = torch.optim.SGD(
            trainable_parameters(model, config.trained),
            config.lr,
            config.momentum,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scheduler = new_schedule(self.optimizer, config, steps)
        self.average = new_average(model, config)

    def step(self, rows: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take one step and return its loss."""
        with self.autocast:
            logits = self.model(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=self.config.label_smoothing)
        # FedLMG eq. 12, 13
        if self.teacher is not None:
            loss = loss + self.extra.distillation_weight * F.kl_div(
                F.log_softmax(logits, 1), self.teacher[rows], reduction="batchmean"
            )
        for term in self.distillations:
            loss = loss + term.loss(rows, logits)
        self.optimizer.zero_grad()
        loss.backward()
        if self.extra.penalty is not None:
            self.extra.penalty(self.model)
        self.optimizer.step()
        return loss.detach()

    def advance(self) -> None:
        """Update the learning rate and the average after a step."""
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state(self, losses: list[float]) -> dict[str, Any]:
        """Return all that the next steps depend on, and the losses of the steps before."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        parts |= {"scheduler": self.scheduler} if self.scheduler is not None else {}
        parts |= {"average": self.average} if self.average is not None else {}
        states = {name: part.state_dict() for name, part in parts.items()}
        states["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            states["random on the GPU"] = torch.cuda.get_rng_state(self.device)
        return {**states, "losses": losses}

    def restore(self, state: dict[str, Any] | None) -> list[float]:
        """Continue from a state, and return its losses; [] without a state."""
        if state is None:
            return []
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random on the GPU"], self.device)
        losses: list[float] = state["losses"]
        return losses

    def load_average(self) -> None:
        """Replace the model's weights by their average, if there is one."""
        if self.average is not None:
            self.model.load_state_dict(self.average.module.state_dict())


def split_batches(count: int, config: ClassifierConfig, seed: int) -> list[torch.Tensor]:
    """Return the rows of every minibatch, in the order of the training.

    Raises:
        ClassifierError: there are fewer than two images.
    """
    if count < 2:
        raise ClassifierError(
            f"{count} image(s) to train a classifier on; batch normalization requires at least 2"
        )
    return minibatches(
        torch.arange(count),
        config.epochs,
        config.steps,
        config.batch_size,
        torch.Generator().manual_seed(seed_of(seed, "order")),
        least=2,
    )


def _prefetch(
    pixels: Pixels, batches: list[torch.Tensor], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rows and images of every batch; decode lazy images one batch ahead."""
    if not isinstance(pixels, LazyPixels):
        for rows in batches:
            rows = rows.to(device)
            yield rows, pixels[rows]
        return
    with ThreadPoolExecutor(1) as reader:
        future = reader.submit(pixels.__getitem__, batches[0])
        for number, rows in enumerate(batches):
            images = future.result()
            if number + 1 < len(batches):
                future = reader.submit(pixels.__getitem__, batches[number + 1])
            yield rows.to(device), images


def trainable_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters to train: `all`, or the `head`'s (a linear probe).

    For the head, all other parameters are frozen and the model is put in eval mode, so that
    BatchNorm's statistics do not change.

    Raises:
        ClassifierError: the model does not end with a linear layer.
    """
    if name == "all":
        return list(model.parameters())
    head = linear_head(model)
    model.eval().requires_grad_(False)
    head.requires_grad_(True)
    return list(head.parameters())


def new_schedule(
    optimizer: torch.optim.Optimizer, config: ClassifierConfig, steps: int
) -> LRScheduler | None:
    """Return the learning-rate schedule, stepped after every training step; None: constant.

    `cosine`: linear warm-up to `lr` over the fraction `warm-up` of the steps, then half a cosine
    down to 0 (Loshchilov & Hutter, arXiv 1608.03983). `one-cycle`: a cosine up from lr / 25 over
    `warm-up` of the steps and a cosine down to nearly 0 (Smith & Topin, arXiv 1708.07120), with
    constant momentum.
    """
    if config.schedule == "constant":
        return None
    if config.schedule == "one-cycle":
        return OneCycleLR(
            optimizer,
            config.lr,
            total_steps=steps,
            pct_start=config.warm_up,
            cycle_momentum=False,
        )
    warm_up_steps = round(config.warm_up * steps)
    decay = CosineAnnealingLR(optimizer, max(1, steps - warm_up_steps))
    if not warm_up_steps:
        return decay
    start = 1 / (warm_up_steps + 1)
    warm_up = LinearLR(optimizer, start_factor=start, total_iters=warm_up_steps)
    return SequentialLR(optimizer, [warm_up, decay], [warm_up_steps])


def new_average(model: nn.Module, config: ClassifierConfig) -> AveragedModel | None:
    """Return the moving average of weights and BatchNorm statistics; None: use the final ones."""
    if not config.ema:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)


def new_augmentation(name: str, size: int) -> Augmentation | None:
    """Return the augmentation of training images of `size` pixels; None: no augmentation."""
    if name == "none":
        return None
    # Seconds to import, and not every training uses it
    from torchvision.transforms import v2

    flips = [
        v2.RandomCrop(size, padding=max(1, size // 8), padding_mode="reflect"),
        v2.RandomHorizontalFlip(),
    ]
    # Without flips: a mirrored digit or letter is another one
    upright = [
        v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)),
        v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
    ]
    transforms = {
        "flip-crop": flips,
        "affine-color": upright,
        "randaugment": [*flips, v2.RandAugment()],
        "trivialaugment": [*flips, v2.TrivialAugmentWide()],
    }
    augmentation: Augmentation | None = v2.Compose(transforms[name])
    return augmentation


def new_mixing(name: str, model: nn.Module, pixels: Pixels) -> Mixing | None:
    """Return the mixing of a batch's images, with alpha = 1; None: no mixing.

    mixup: Zhang et al., arXiv 1710.09412. CutMix: Yun et al., arXiv 1905.04899.
    """
    if name == "none":
        return None
    from torchvision.transforms import v2

    training = model.training
    with torch.no_grad():
        images = pixels[torch.tensor([0, 1])].to(next(model.parameters()).device)
        num_classes = model.eval()(normalize(to_float(images), model)).shape[1]
    model.train(training)
    transform = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name]
    mix: Mixing = transform(alpha=1.0, num_classes=num_classes)
    return mix


def _in_bfloat16(config: ClassifierConfig, device: torch.device) -> bool:
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return config.precision == "bfloat16"
