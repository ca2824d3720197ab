"""What every stage of the recipe is made of: the corpus, and one resumable training loop."""

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
        """[B, 3, 32, 32] in [-1, 1]."""
        return to_float(self.pixels[rows])

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Rows as the corpus has them, long tail and all."""
        return torch.randint(
            len(self.pixels), (batch,), generator=generator, device=self.pixels.device
        )

    def draw_balanced(
        self, batch: int, generator: torch.Generator, among: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of every style equally often; `among`, a mask [N], leaves the others out."""
        weights = self._rarity if among is None else self._rarity * among
        return torch.multinomial(weights, batch, replacement=True, generator=generator)

    @cached_property
    def _rarity(self) -> torch.Tensor:
        return (1 / torch.bincount(self.style))[self.style]


def load_corpus(device: torch.device) -> Corpus:
    """The public split, drawn again on every call: the same drawings."""
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
    # Of one step; all its randomness comes from the generator
    loss: Callable[[torch.Generator], torch.Tensor]
    ema_decay: float = 0.0


def run_stage(
    stage: Stage, folder: Path, seed: int, device: torch.device, progress: Progress
) -> dict:
    """Train a stage to its end, from its checkpoint if there is one.

    Leaves `stage.modules` at the (averaged) final weights.

    Every step's randomness is seeded by (seed, stage, step), so an interrupted training continues
    as if it had not been.

    Returns:
        seconds spent and the mean loss of every 100 steps.
    """
    modules = stage.modules.to(device).train()
    optimiser = torch.optim.AdamW(
        modules.parameters(), lr=stage.lr, weight_decay=1e-2, betas=(0.9, 0.99)
    )
    average = {k: v.clone() for k, v in modules.state_dict().items()}
    file = folder / f"{stage.name}.pt"
    step = 0
    log: dict = {"seconds": 0.0, "losses": []}
    if file.exists():
        saved = torch.load(file, map_location=device, weights_only=True)
        modules.load_state_dict(saved["modules"])
        optimiser.load_state_dict(saved["optimiser"])
        average = saved["average"]
        step = saved["step"]
        log = saved["log"]
    bar = progress.add_task(stage.name, total=stage.steps, completed=step)
    started = time.perf_counter()
    recent = []
    while step < stage.steps:
        for group in optimiser.param_groups:  # 100 steps of warm-up, then a cosine to zero
            group["lr"] = (
                stage.lr
                * min(1, (step + 1) / 100)
                * 0.5
                * (1 + math.cos(math.pi * step / stage.steps))
            )
        generator = torch.Generator(device).manual_seed(seed_of(seed, step, stage.name))
        loss = stage.loss(generator)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimiser.step()
        decay = min(stage.ema_decay, (1 + step) / (10 + step))
        for name, value in modules.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 1 - decay)
            else:
                average[name].copy_(value)
        recent.append(loss.item())
        step += 1
        progress.update(
            bar, completed=step, description=f"{stage.name} loss {np.mean(recent[-50:]):.4f}"
        )
        if step % 100 == 0 or step == stage.steps:
            log["seconds"] += time.perf_counter() - started
            log["losses"].append(round(float(np.mean(recent)), 5))
            started = time.perf_counter()
            recent = []
            state = {"modules": modules.state_dict(), "optimiser": optimiser.state_dict()}
            temporary = file.with_suffix(".tmp")
            torch.save({**state, "average": average, "step": step, "log": log}, temporary)
            temporary.replace(file)
    modules.load_state_dict(average)
    modules.eval().requires_grad_(False)
    return log
