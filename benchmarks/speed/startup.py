"""Measure the time from `osfl run` to the first working client, with a kit of Stable Diffusion
v1.5's full size.

python -m benchmarks.speed.startup build                            # random weights, in runs/
python -m benchmarks.speed.startup time --code PATH --label before  # the code of another checkout
python -m benchmarks.speed.startup table                            # all timed starts
python -m benchmarks.speed.startup remove

The folder has float32 weights in safetensors, 4.3 GB, which are loaded, and the variants in
float16, which are not, as a clone of the hub's repository has them. *Cold*: no digest is
remembered; *known*: a second start of another job. In both the files are in the page cache. A
client works when it has what it needs to begin its payload, before it loads the kit.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import ROOT, Experiment, command_line
from benchmarks.tools import hub_layouts
from osfl.cli.guard import end_process_tree

EXPERIMENT = Experiment(__file__, options="table")
WORK = EXPERIMENT.work
KIT = WORK / "sd15"
SETTINGS = ("method=feddeo", "num-clients=1", "global-model.init=none", "deadline=600.0")
LIMIT_SECONDS = 900.0


def build() -> None:
    """Write the kit, and each of its weights in half precision too."""
    torch.manual_seed(0)
    hub_layouts.sd15(KIT, full=True)
    for file in sorted(KIT.rglob("*.safetensors")):
        weights = load_file(file).items()
        half = {name: v.half() if v.is_floating_point() else v for name, v in weights}
        save_file(half, file.with_name(f"{file.stem}.fp16.safetensors"), {"format": "pt"})


def first_client_at_work(code: Path, job: str, runs: Path) -> dict[str, float]:
    """Return the seconds from the command to each phase of the server, and to the client's work."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "2"}
    command = [Path(sys.executable).parent / "osfl", "run", *SETTINGS, f"kit={KIT}"]
    start = time.monotonic()
    seconds = dict[str, float]()
    with open(runs / f"{job}.out", "w") as log:
        run = subprocess.Popen(
            [*command, f"job-id={job}", "--runs", str(runs)],
            cwd=code,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while run.poll() is None and time.monotonic() - start < LIMIT_SECONDS:
            phase = _phase(runs / job / "status.json")
            if phase:
                seconds.setdefault(phase, time.monotonic() - start)
            if any((runs / ".client-cache" / job).glob("client-*/lock")):
                seconds["client at work"] = time.monotonic() - start
                return seconds
            time.sleep(0.05)
        raise SystemExit(f"no client started to work:\n{(runs / f'{job}.out').read_text()[-3000:]}")
    finally:
        run.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            run.wait(timeout=30)
        end_process_tree(run.pid)


def _phase(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["phase"])
    except (OSError, ValueError, KeyError):
        return ""


def measure(code: Path, label: str) -> None:
    """Time a cold start and one with a known kit, and append them to earlier ones."""
    runs = WORK / f"runs-{label}"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    for file in KIT.rglob("*"):  # into the page cache
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(2**24):
                    pass
    starts = [
        {"label": label, "kit": kit, "seconds": first_client_at_work(code, kit, runs)}
        for kit in ("cold", "known")
    ]
    timed = WORK / "timed.json"
    earlier = json.loads(timed.read_text()) if timed.is_file() else []
    timed.write_text(json.dumps([*earlier, *starts], indent=1))
    print(json.dumps(starts, indent=1))


def table() -> None:
    """Make the table, a row per start."""
    timed: list[Mapping[str, Any]] = json.loads((WORK / "timed.json").read_text())
    longest = max(timed, key=lambda entry: len(entry["seconds"]))  # every phase, in its order
    phases = list(longest["seconds"])
    rows = [
        {
            "code": entry["label"],
            "kit": entry["kit"],
            **{f"{p} s": f"{entry['seconds'].get(p, 0):.1f}".replace("0.0", "") for p in phases},
        }
        for entry in timed
    ]
    loaded = sum(f.stat().st_size for f in KIT.rglob("*.safetensors") if ".fp16." not in f.name)
    total = sum(f.stat().st_size for f in KIT.rglob("*.safetensors"))
    caption = (
        "Seconds from the start of `osfl run` (feddeo, one simulated client) to each phase, and to "
        "the client at work, with random weights of Stable Diffusion v1.5's shapes: "
        f"{loaded / 1e9:.1f} GB that are loaded, {total / 1e9:.1f} GB in the folder. Cold: no "
        "digest is remembered. One start each, on a machine that others used as well (load 4 to 5)."
    )
    replace(EXPERIMENT, caption=caption).write_all(rows)


def main() -> None:
    """Run one step."""
    parser = command_line(__doc__)
    parser.add_argument("step", choices=("build", "time", "table", "remove"))
    parser.add_argument("--code", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--label", default="now")
    arguments = parser.parse_args()
    if arguments.step == "time":
        measure(arguments.code.resolve(), arguments.label)
    else:
        steps = {"build": build, "table": table, "remove": lambda: shutil.rmtree(WORK)}
        steps[arguments.step]()


if __name__ == "__main__":
    main()
