"""The corpus, and the resumable training loop that all stages share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import nn

from osfl.data import digits
from osfl.data.render import STYLES
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of


@dataclass(frozen=True)
class Corpus:
    """The public split on a device."""

    pixels: torch.Tensor  # [N, 3, 32, 32] uint8
    style: torch.Tensor  # [N]
    captions: tuple[str, ...]  # "" for none

    def images(self, rows: torch.Tensor) -> torch.Tensor:
        """Return images [B, 3, 32, 32] in [-1, 1]."""
        return to_float(self.pixels[rows])

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows with the corpus's long-tailed distribution of styles."""
        return torch.randint(
            len(self.pixels), (batch,), generator=generator, device=self.pixels.device
        )

    def draw_balanced(
        self, batch: int, generator: torch.Generator, among: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw rows of every style equally often, only those in the mask `among` [N] if given."""
        weights = self._rarity if among is None else self._rarity * among
        return torch.multinomial(weights, batch, replacement=True, generator=generator)

    @cached_property
    def _rarity(self) -> torch.Tensor:
        return (1 / torch.bincount(self.style))[self.style]


def load_corpus(device: torch.device) -> Corpus:
    """Load the public split; its images are rendered deterministically."""
    rows = digits.load_split("public").with_format("numpy")
    pixels = torch.from_numpy(np.stack(rows["image"])).permute(0, 3, 1, 2).to(device)
    style = torch.tensor([STYLES.index(s) for s in rows["domain"]], device=device)
    return Corpus(pixels, style, tuple(str(caption) for caption in rows["caption"]))


@dataclass
class Stage:
    """One resumable training loop."""

    name: str
    modules: nn.ModuleDict
    steps: int
    lr: float
    # The loss of one step; all its randomness comes from the generator
    loss: Callable[[torch.Generator], torch.Tensor]
    ema_decay: float = 0.0


def run_stage(
    stage: Stage, folder: Path, seed: int, device: torch.device, progress: Progress
) -> dict:
    """Train a stage to its end, from its checkpoint if there is one.

    Leaves `stage.modules` at the (averaged) final weights. Every step's randomness is seeded by
    (seed, stage, step), so that an interrupted training ends with the same weights.

    Returns:
        The seconds spent, and the mean loss of every 100 steps.
    """
    modules = stage.modules.to(device).train()
    optimizer = torch.optim.AdamW(
        modules.parameters(), lr=stage.lr, weight_decay=1e-2, betas=(0.9, 0.99)
    )
    average = {k: v.clone() for k, v in modules.state_dict().items()}
    file = folder / f"{stage.name}.pt"
    step = 0
    log: dict = {"seconds": 0.0, "losses": []}
    if file.exists():
        checkpoint = torch.load(file, map_location=device, weights_only=True)
        modules.load_state_dict(checkpoint["modules"])
        optimizer.load_state_dict(checkpoint["optimiser"])
        average = checkpoint["average"]
        step = checkpoint["step"]
        log = checkpoint["log"]
    bar = progress.add_task(stage.name, total=stage.steps, completed=step)
    start = time.perf_counter()
    losses = []
    while step < stage.steps:
        generator = torch.Generator(device).manual_seed(seed_of(seed, step, stage.name))
        losses.append(_train_step(stage, step, modules, optimizer, generator))
        _update_average(average, modules, min(stage.ema_decay, (1 + step) / (10 + step)))
        step += 1
        progress.update(
            bar, completed=step, description=f"{stage.name} loss {np.mean(losses[-50:]):.4f}"
        )
        if step % 100 == 0 or step == stage.steps:
            log["seconds"] += time.perf_counter() - start
            log["losses"].append(round(float(np.mean(losses)), 5))
            start = time.perf_counter()
            losses = []
            state = {"modules": modules.state_dict(), "optimiser": optimizer.state_dict()}
            temporary = file.with_suffix(".tmp")
            torch.save({**state, "average": average, "step": step, "log": log}, temporary)
            temporary.replace(file)
    modules.load_state_dict(average)
    modules.eval().requires_grad_(False)
    return log


def _train_step(
    stage: Stage,
    step: int,
    modules: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> float:
    """Take one step and return its loss; the learning rate has 100 warm-up steps, then a cosine."""
    for group in optimizer.param_groups:
        group["lr"] = (
            stage.lr * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / stage.steps))
        )
    loss = stage.loss(generator)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _update_average(average: dict[str, torch.Tensor], modules: nn.ModuleDict, decay: float) -> None:
    for name, value in modules.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)
