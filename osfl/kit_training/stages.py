"""The corpus, and the resumable training loop that all stages share."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import nn

from osfl.config import ConfigError
from osfl.data import digits
from osfl.data.render import STYLES
from osfl.util.files import write_atomically
from osfl.util.pixels import to_float
from osfl.util.seeds import seed_of

# Time between two checkpoints of a training of hours on a machine that others use
CHECKPOINT_SECONDS = 300.0


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
    public = digits.load_split("public")
    pixels = torch.from_numpy(public.images).permute(0, 3, 1, 2).to(device)
    style = torch.tensor([STYLES.index(s) for s in public.domains], device=device)
    return Corpus(pixels, style, tuple(public.captions))


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
    # Without decay, more steps can be added after the last one
    decay: bool = True
    # Steps between two checkpoints, or fewer if they take longer than these seconds
    interval: int = 100
    patience: float = math.inf


def run_stage(
    stage: Stage, folder: Path, seed: int, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Train a stage to its end, from its checkpoint if there is one.

    Leaves `stage.modules` at the (averaged) final weights. Every step's randomness is seeded by
    (seed, stage, step), so that an interrupted training ends with the same weights.

    Returns:
        The steps taken, the seconds spent, and the mean loss between two checkpoints.
    """
    modules = stage.modules.to(device).train()
    optimizer = torch.optim.AdamW(
        modules.parameters(), lr=stage.lr, weight_decay=1e-2, betas=(0.9, 0.99)
    )
    average = {k: v.clone() for k, v in modules.state_dict().items()}
    file = folder / f"{stage.name}.pt"
    step = 0
    log: dict[str, Any] = {"seconds": 0.0, "losses": []}
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
        is_late = time.perf_counter() - start > stage.patience
        if step % stage.interval == 0 or step == stage.steps or is_late:
            log["steps"] = step
            log["seconds"] += time.perf_counter() - start
            log["losses"].append(round(float(np.mean(losses)), 5))
            start = time.perf_counter()
            losses = []
            state = {"modules": modules.state_dict(), "optimiser": optimizer.state_dict()}
            _save(file, {**state, "average": average, "step": step, "log": log})
            _print_progress(stage, log, progress)
    modules.load_state_dict(average)
    modules.eval().requires_grad_(False)
    return log


def _save(file: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the earlier one, as a whole."""
    temporary = file.with_suffix(".tmp")
    torch.save(checkpoint, temporary)
    temporary.replace(file)


def _print_progress(stage: Stage, log: Mapping[str, Any], progress: Progress) -> None:
    """Print a line for a checkpoint where no bar is shown, as in a file."""
    if not progress.console.is_terminal:
        progress.console.print(
            f"{stage.name}: step {log['steps']:,} of {stage.steps:,}, "
            f"loss {log['losses'][-1]:.4f}, {log['seconds']:,.0f} s"
        )


def _train_step(
    stage: Stage,
    step: int,
    modules: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> float:
    """Take one step and return its loss; the learning rate has 100 warm-up steps, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps)) if stage.decay else 1
    for group in optimizer.param_groups:
        group["lr"] = stage.lr * min(1, (step + 1) / 100) * cosine
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


def claim_checkpoints(work: Path, description: Mapping[str, Any]) -> None:
    """Create the folder of checkpoints, or check that an existing one has the same recipe.

    Args:
        description: everything that the checkpoints depend on.

    Raises:
        ConfigError: the folder's checkpoints are of another recipe.
    """
    work.mkdir(parents=True, exist_ok=True)
    text = json.dumps(description, indent=1)
    file = work / "recipe.json"
    if file.is_file() and file.read_text() != text:
        stored = json.loads(file.read_text())
        current = json.loads(text)
        keys = [key for key in {**stored, **current} if stored.get(key) != current.get(key)]
        raise ConfigError(
            f"--work {work}: its checkpoints are of another recipe (another "
            f"{', '.join(keys).replace('_', '-')}); remove them, or set --work to another folder"
        )
    write_atomically(file, text.encode())
