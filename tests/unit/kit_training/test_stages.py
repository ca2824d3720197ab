"""The training loop that all stages of a kit share."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from osfl.kit_training.stages import Stage, run_stage


def one_weight() -> Stage:
    """A stage whose loss is twice its only weight, which is 3 at first."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    return Stage(
        "toy",
        nn.ModuleDict({"model": model}),
        steps=3,
        lr=1e-9,
        loss=lambda generator: model(torch.tensor([2.0])).sum(),
        interval=2,
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_checkpoint_has_a_line_where_no_bar_is_shown(
    tmp_path: Path, is_terminal: bool
) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=200)
    with Progress(console=console) as progress:
        run_stage(one_weight(), tmp_path, 0, torch.device("cpu"), progress)
    for step in (2, 3):
        line = f"toy: step {step} of 3, loss 6.0000, "
        assert (line in text.getvalue()) is not is_terminal
