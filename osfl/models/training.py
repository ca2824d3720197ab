"""The training of classifiers: the same for clients, references and the global model."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
from osfl.models.classifiers import ClassifierError, head_of, normalise
from osfl.util.costs import FlopMeter
from osfl.util.minibatches import minibatches
from osfl.util.pixels import LazyPixels, Pixels, to_float
from osfl.util.seeds import seed_of

# One image [3, S, S] to another
Augmentation = Callable[[torch.Tensor], torch.Tensor]
# Images [B, 3, S, S] and labels [B] to mixed images and the classes' shares [B, C]
Mixing = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fit(
    model: nn.Module,
    pixels: Pixels,
    labels: torch.Tensor,
    config: ClassifierConfig,
    seed: int,
    device: torch.device,
    *,
    epochs: int | None = None,
    teacher: torch.Tensor | None = None,
    distillation_weight: float = 1.0,
    penalty: Callable[[nn.Module], None] | None = None,
    meter: FlopMeter | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    """Train in place by SGD on cross-entropy, plus KL(teacher || student) where teachers are given.

    Args:
        pixels: [N, 3, S, S] uint8.
        labels: [N] int64.
        epochs: of a round's local training, in which the learning rate is constant and no weights
            are averaged; None: a whole training, of `config.epochs` or `config.steps`.
        teacher: [N, C] probabilities; FedLMG's eq. 12 and 13 with the mean or the image's own
            teacher. They are of the images as they are, not as they are augmented.
        penalty: adds the gradient of a further term of the loss to the parameters' in every step,
            FedProx's and FedDyn's.
        meter: counts the FLOPs of the steps.
        progress: called with (steps done, steps in all).

    Raises:
        ClassifierError: fewer than two images, or the loss is not finite.
    """
    if len(labels) < 2:
        raise ClassifierError(
            f"{len(labels)} image(s) to train a classifier on; batch normalisation needs at least 2"
        )
    meter = meter or FlopMeter()
    model = model.to(device).train()
    # An augmentation is some fifty small operations an image; a GPU would wait for each
    held = device if config.augmentation == "none" else torch.device("cpu")
    # The decoder's images come channels-last: on a CPU that takes 1.5 times as long, and the result
    # would differ from that on loaded ones.
    pixels = pixels.to(held).contiguous()
    labels = labels.to(device)
    teacher = None if teacher is None else teacher.to(device)
    learned = trained_part(model, config.trained)
    optimiser = torch.optim.SGD(
        learned, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True
    )
    order = torch.Generator().manual_seed(seed_of(seed, "order"))
    whole = epochs is None
    batches = minibatches(
        torch.arange(len(labels)),
        config.epochs if epochs is None else epochs,
        config.steps if whole else 0,
        config.batch_size,
        order,
        least=2,
    )
    scheduler = new_schedule(optimiser, config, len(batches)) if whole else None
    average = new_average(model, config) if whole else None
    augment = new_augmentation(config.augmentation, pixels[torch.tensor([0])].shape[-1])
    mix = new_mixing(config.mixing, model, pixels)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=_in_bfloat16(config, device))

    def step(rows: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with mixed:
            logits = model(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=config.label_smoothing)
        if teacher is not None:  # FedLMG eq. 12, 13
            loss = loss + distillation_weight * F.kl_div(
                F.log_softmax(logits, 1), teacher[rows], reduction="batchmean"
            )
        optimiser.zero_grad()
        loss.backward()
        if penalty is not None:
            penalty(model)
        optimiser.step()
        return loss.detach()

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(seed, "dropout"))
        progress(0, len(batches))
        for done, (rows, taken) in enumerate(_read_ahead(pixels, batches, held), start=1):
            rows = rows.to(device)
            if augment is not None:
                taken = torch.stack([augment(image) for image in taken]).to(device)
            images = normalise(to_float(taken), model)
            targets = labels[rows]
            if mix is not None:
                images, targets = mix(images, targets)
            loss = meter.run(("fit", len(rows)), partial(step, rows, images, targets))
            if not torch.isfinite(loss):
                raise ClassifierError(
                    f"training diverged at step {done} (loss {loss.item()}); lower lr = "
                    f"{config.lr:g}"
                )
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(model)
            progress(done, len(batches))
    model.requires_grad_(True)
    if average is not None:
        model.load_state_dict(average.module.state_dict())
    return model.eval()


def _read_ahead(
    pixels: Pixels, batches: list[torch.Tensor], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of every batch and their images; images that must be decoded are, a batch ahead."""
    if not isinstance(pixels, LazyPixels):
        for rows in batches:
            rows = rows.to(device)
            yield rows, pixels[rows]
        return
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(pixels.__getitem__, batches[0])
        for number, rows in enumerate(batches):
            taken = coming.result()
            if number + 1 < len(batches):
                coming = reader.submit(pixels.__getitem__, batches[number + 1])
            yield rows.to(device), taken


def trained_part(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that are trained: all, or the head's.

    Then the others get no gradient, and the model is left in eval mode: BatchNorm's statistics stay
    as they are (a linear probe).

    Raises:
        ClassifierError: the model does not end with a linear layer.
    """
    if name == "all":
        return list(model.parameters())
    head = head_of(model)
    model.eval().requires_grad_(False)
    head.requires_grad_(True)
    return list(head.parameters())


def new_schedule(
    optimiser: torch.optim.Optimizer, config: ClassifierConfig, steps: int
) -> LRScheduler | None:
    """The course of the learning rate over all steps, to be moved on after each; None: constant.

    `cosine`: linearly up to `lr` over `warm-up` of the steps, then down to 0 along half a cosine
    (Loshchilov & Hutter, arXiv 1608.03983). `one-cycle`: up from lr / 25 over `warm-up` of the
    steps and down to nearly 0, both along cosines (Smith & Topin, arXiv 1708.07120), with a
    constant momentum.
    """
    if config.schedule == "constant":
        return None
    if config.schedule == "one-cycle":
        return OneCycleLR(
            optimiser,
            config.lr,
            total_steps=steps,
            pct_start=config.warm_up,
            cycle_momentum=False,
        )
    rising = round(config.warm_up * steps)
    falling = CosineAnnealingLR(optimiser, max(1, steps - rising))
    if not rising:
        return falling
    up = LinearLR(optimiser, start_factor=1 / (rising + 1), total_iters=rising)
    return SequentialLR(optimiser, [up, falling], [rising])


def new_average(model: nn.Module, config: ClassifierConfig) -> AveragedModel | None:
    """The moving average of the weights and of BatchNorm's statistics; None: the last ones are
    taken.
    """
    if not config.ema:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema), use_buffers=True)


def new_augmentation(name: str, size: int) -> Augmentation | None:
    """What a training image of `size` pixels goes through each time that it is taken."""
    if name == "none":
        return None
    # Seconds to import, and not every training augments
    from torchvision.transforms import v2

    flips = [
        v2.RandomCrop(size, padding=max(1, size // 8), padding_mode="reflect"),
        v2.RandomHorizontalFlip(),
    ]
    # Digits and letters bear no flip
    upright = [
        v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)),
        v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
    ]
    chosen = {
        "flip-crop": flips,
        "affine-color": upright,
        "randaugment": [*flips, v2.RandAugment()],
        "trivialaugment": [*flips, v2.TrivialAugmentWide()],
    }
    return v2.Compose(chosen[name])


def new_mixing(name: str, model: nn.Module, pixels: Pixels) -> Mixing | None:
    """How the images of a batch are mixed with each other: mixup (Zhang et al., arXiv 1710.09412)
    or CutMix (Yun et al., arXiv 1905.04899), both with alpha = 1.
    """
    if name == "none":
        return None
    from torchvision.transforms import v2

    training = model.training
    with torch.no_grad():
        two = pixels[torch.tensor([0, 1])].to(next(model.parameters()).device)
        classes = model.eval()(normalise(to_float(two), model)).shape[1]
    model.train(training)
    return {"mixup": v2.MixUp, "cutmix": v2.CutMix}[name](alpha=1.0, num_classes=classes)


def _in_bfloat16(config: ClassifierConfig, device: torch.device) -> bool:
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return config.precision == "bfloat16"
