"""From `osfl run` to the first client at work with a kit of Stable Diffusion v1.5's full size.

To benchmarks/tables/kit-start.{md,json}.

python -m benchmarks.kit_start build   # random weights, 6.4 GB, in runs/
python -m benchmarks.kit_start time --code PATH --label before   # another checkout's code
python -m benchmarks.kit_start table                      # what was timed
python -m benchmarks.kit_start remove

The folder has float32 weights in safetensors, 4.3 GB, which are loaded, and beside them the
variants in float16, which are not, as a clone of the hub's
repository has them. *Cold*: no digest is remembered; *known*: a second start of another job. In
both the files are in the page cache. A client is at work when it has what it needs to begin its
payload, before it loads the kit.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks import TABLES, write_table
from osfl.cli.guard import end_process_tree
from osfl.kit.kits import find_kit
from osfl.kit_training.untrained import new_scheduler

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "kit-start"
KIT = WORK / "sd15"
SETTINGS = ("method=feddeo", "num-clients=1", "global-model.init=none", "deadline=600.0")
LIMIT_SECONDS = 900.0


def build() -> None:
    """The folder; one network at a time is in memory, in float32."""
    torch.manual_seed(0)
    with torch.device("meta"):
        text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=49408,
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=12,
                max_position_embeddings=77,
                projection_dim=768,
            )
        )
    _write("unet", "diffusion_pytorch_model", _unet())
    _write("vae", "diffusion_pytorch_model", _vae())
    _write("text_encoder", "model", text)
    shutil.copytree(Path(find_kit("digits")) / "tokenizer", KIT / "tokenizer")
    new_scheduler().save_pretrained(KIT / "scheduler")
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.6.0"}
    (KIT / "model_index.json").write_text(json.dumps(index))


def _unet() -> UNet2DConditionModel:
    with torch.device("meta"):
        return UNet2DConditionModel(
            sample_size=64, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768
        )


def _vae() -> AutoencoderKL:
    with torch.device("meta"):
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
            sample_size=512,
        )


def _write(part: str, stem: str, shapes: nn.Module) -> None:
    """Random weights of a network's shapes, and their variant in 16 bits."""
    folder = KIT / part
    folder.mkdir(parents=True)
    if hasattr(shapes, "save_config"):
        shapes.save_config(folder)
    else:
        shapes.config.save_pretrained(folder)  # type: ignore[union-attr]
    weights = {name: 0.02 * torch.randn(t.shape) for name, t in shapes.state_dict().items()}
    save_file(weights, folder / f"{stem}.safetensors", {"format": "pt"})
    half = {name: value.half() for name, value in weights.items()}
    save_file(half, folder / f"{stem}.fp16.safetensors", {"format": "pt"})


def first_client_at_work(code: Path, job: str, runs: Path) -> dict[str, float]:
    """Seconds from the command's start to every phase of the server, and to the client's work."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "2"}
    command = [Path(sys.executable).parent / "osfl", "run", *SETTINGS, f"kit={KIT}"]
    began = time.monotonic()
    seen = dict[str, float]()
    with open(runs / f"{job}.out", "w") as log:
        run = subprocess.Popen(
            [*command, f"job-id={job}", "--runs", str(runs)],
            cwd=code,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while run.poll() is None and time.monotonic() - began < LIMIT_SECONDS:
            phase = _phase(runs / job / "status.json")
            if phase:
                seen.setdefault(phase, time.monotonic() - began)
            if any((runs / ".client-cache" / job).glob("client-*/lock")):
                seen["client at work"] = time.monotonic() - began
                return seen
            time.sleep(0.05)
        raise SystemExit(f"no client began:\n{(runs / f'{job}.out').read_text()[-3000:]}")
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
    """A cold start, then a start with a kit that is known; appended to what was timed before."""
    runs = WORK / f"runs-{label}"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    for file in KIT.rglob("*"):  # all of it into the page cache
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(2**24):
                    pass
    found = [
        {"label": label, "kit": kit, "seconds": first_client_at_work(code, kit, runs)}
        for kit in ("cold", "known")
    ]
    timed = WORK / "timed.json"
    known = json.loads(timed.read_text()) if timed.is_file() else []
    timed.write_text(json.dumps([*known, *found], indent=1))
    print(json.dumps(found, indent=1))


def table() -> None:
    """Every start a row."""
    timed: list[Mapping[str, Any]] = json.loads((WORK / "timed.json").read_text())
    most = max(timed, key=lambda entry: len(entry["seconds"]))  # every phase, in its order
    phases = list(most["seconds"])
    rows = [
        {
            "code": entry["label"],
            "kit": entry["kit"],
            **{f"{p} s": f"{entry['seconds'].get(p, 0):.1f}".replace("0.0", "") for p in phases},
        }
        for entry in timed
    ]
    loaded = sum(f.stat().st_size for f in KIT.rglob("*.safetensors") if ".fp16." not in f.name)
    whole = sum(f.stat().st_size for f in KIT.rglob("*.safetensors"))
    about = (
        "Seconds from the start of `osfl run` (feddeo, one simulated client) to each phase, and to "
        "the client at work, with random weights of "
        f"Stable Diffusion v1.5's shapes: {loaded / 1e9:.1f} GB that are loaded, {whole / 1e9:.1f} "
        "GB in the folder. Cold: no digest is "
        "remembered. One start each, on a machine that others used as well (load 4 to 5). Command: "
        "`python -m benchmarks.kit_start`."
    )
    write_table(TABLES / "kit-start", rows, about)


def main() -> None:
    """One step of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "time", "table", "remove"))
    parser.add_argument("--code", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--label", default="now")
    given = parser.parse_args()
    if given.what == "time":
        measure(given.code.resolve(), given.label)
    else:
        {"build": build, "table": table, "remove": lambda: shutil.rmtree(WORK)}[given.what]()


if __name__ == "__main__":
    main()
