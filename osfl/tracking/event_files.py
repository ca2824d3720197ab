"""A run as TensorBoard's event files, in its folder: `tensorboard --logdir runs`."""

import sys
from types import ModuleType
from typing import Any

import numpy as np

from osfl.run_folder.layout import RunFolder
from osfl.tracking.contents import TrackedRun
from osfl.util.files import OWNER_ONLY, ensure_own_folder

EVENT_FILES = "events.out.tfevents.*"


class EventFiles:
    """A run's event files, in place of earlier ones; each call of `log` adds what is new."""

    def __init__(self) -> None:
        self._writer: Any = None
        # The last value by name, the last step of each curve, and the phases so far
        self._figures: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._phases: list[str] = []

    def log(self, run: TrackedRun) -> None:
        """Write the configuration at the first call, and whatever is new.

        Raises:
            OSError: the folder cannot be written, or another user could have prepared it.
        """
        if self._writer is None:
            self._writer = _open_writer(run)
            self._writer.add_text("configuration", _table(run), walltime=run.started)
        if run.phase not in self._phases[-1:]:
            self._phases.append(run.phase)
            self._writer.add_text("phase", run.phase, len(self._phases), run.ended)
        for name, figure in run.figures.items():
            if self._figures.get(name) != figure:
                self._writer.add_scalar(name, figure, 0, run.ended)
                self._figures[name] = figure
        for name, curve in run.curves.items():
            last = self._steps.get(name, -1)
            for step, loss in curve:
                if step > last:
                    self._writer.add_scalar(f"loss/{name}", loss, step, run.ended)
                    self._steps[name] = step
        self._log_files(run)
        self._writer.flush()
        # The library opens it for everyone whom the umask lets in
        for file in RunFolder(run.folder).tensorboard_folder.glob(EVENT_FILES):
            file.chmod(OWNER_ONLY)

    def _log_files(self, run: TrackedRun) -> None:
        for client, grid in run.grids.items():
            pixels = np.asarray(grid)
            self._writer.add_image(f"pictures/{client}", pixels, 0, run.ended, dataformats="HWC")
        if files := [*run.models, *run.pages]:
            lines = "\n".join(f"- `{file}`" for file in files)
            self._writer.add_text("files", lines, walltime=run.ended)

    def close(self) -> None:
        """End the files."""
        if self._writer is not None:
            self._writer.close()


def _open_writer(run: TrackedRun) -> Any:
    # TensorBoard's own switch against the import of TensorFlow, which takes a gigabyte
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    from torch.utils.tensorboard import SummaryWriter

    folder = RunFolder(run.folder).tensorboard_folder
    ensure_own_folder(folder)
    for file in folder.glob(EVENT_FILES):
        file.unlink()
    return SummaryWriter(str(folder))


def _table(run: TrackedRun) -> str:
    """Return the configuration as a Markdown table."""
    rows = [f"| {key} | `{value}` |" for key, value in sorted(run.config.items())]
    return "\n".join(["| key | value |", "|---|---|", *rows])
