"""Run every method with a kit of Stable Diffusion v1.5's shapes, and that kit at its full size.

python -m benchmarks.speed.full_size methods --photos FOLDER  # the table sd-shapes
python -m benchmarks.speed.full_size size --photos FOLDER     # the table full-size
python -m benchmarks.speed.full_size remove

FOLDER has photographs in folders of their classes; one client has the first two of two classes.
Weights are random, so accuracy has no meaning. `methods` has narrow networks with 77 x 768 texts
and 4 x 64 x 64 latents, and takes ten minutes on two cores; `size` writes 4.3 GB below runs/, and
takes 10 GB of memory and ten minutes.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Experiment, command_line, last_line_of
from benchmarks.tools import hub_layouts
from osfl.methods import METHODS
from osfl.models.diffusion import load_kit, load_pipeline
from osfl.run_folder.report.page import human_bytes, human_flops
from server_app.synthesis.guidance import Condition, compose
from server_app.synthesis.samplers import ddim

EXPERIMENT = Experiment(__file__)
WORK = EXPERIMENT.work
PARITY_STEPS = 2
# The least that a method computes: one epoch, few draws
LEAST = (
    "data.image-size=64",
    "data.name=folder",
    "num-clients=1",
    "device=cpu",
    "classifier.epochs=1",
    "classifier.init=none",
    "classifier.small-stem=false",
    "global-model.epochs=1",
    "global-model.init=none",
    "global-model.small-stem=false",
    "rounds.count=1",
    "rounds.distillation-steps=1",
    "synthesis.images-per-class=1",
    "synthesis.steps=2",
    "synthesis.parallel-units=1",
    "synthesis.unit-size=2",
    "synthesis.batch-size=1",
    "feddeo.epochs=1",
    "espresso.epochs=1",
    "espresso.conditions-per-batch=1",
    "espresso.noise-draws=1",
    "fedbip.epochs=1",
    "fedcado.noise-edits=1",
    "max-payload-mb=2000.0",
)


def methods(photos: Path) -> None:
    """Run each method."""
    torch.manual_seed(0)
    data = two_photographs(photos)
    kits = {
        "kit": hub_layouts.sd15(WORK / "sd15"),
        "feddisc.kit": hub_layouts.unclip(WORK / "unclip"),
        "captioner": hub_layouts.blip(WORK / "blip"),
        "image-encoder": hub_layouts.dinov2(WORK / "dinov2"),
    }
    rows = []
    for method in METHODS:
        settings = [f"{key}={folder}" for key, folder in kits.items()]
        metrics = run(method, f"shapes-{method}", data, settings)
        rows.append(row_of(method, metrics))
        print(rows[-1], flush=True)
    caption = (
        "One client with two photographs, two steps of sampling, one epoch; random narrow networks "
        "with Stable Diffusion v1.5's 77 x 768 texts and 4 x 64 x 64 latents (FedDISC: 2.1 "
        "unCLIP's 4 x 96 x 96), BLIP's and DINOv2's layouts. Accuracy says nothing here."
    )
    table("sd-shapes", "methods", caption).write_all(rows)


def size(photos: Path) -> None:
    """Run two methods with the full kit, and compare it with diffusers."""
    torch.manual_seed(0)
    data = two_photographs(photos)
    kit = WORK / "sd15-full"
    if not (kit / "text_encoder" / "model.safetensors").is_file():
        hub_layouts.sd15(kit, full=True)
    rows = []
    for method in ("prompts-only", "feddeo"):
        for job in ("cold", "known"):
            name = f"full-{method}-{job}"
            metrics = run(method, name, data, [f"kit={kit}"], WORK / f"cache-{method}")
            rows.append({"run": f"{method}, {job}", **row_of(method, metrics)})
            print(rows[-1], flush=True)
    module = "benchmarks.speed.full_size"
    result = json.loads(last_line_of(module, "parity", "--photos", str(kit)))
    caption = (
        f"Stable Diffusion v1.5's full size with random weights, {result['gigabytes']:.2f} GB, one "
        "client with two photographs, two images of two steps. Cold: no digest is remembered. "
        f"Against diffusers' pipeline ({PARITY_STEPS} steps, guidance 7.5, float32): relative "
        f"difference of the latents {result['difference']:.1e}, of the images "
        f"{result['images']:.1e}; core-seconds, the mean of two in turns: ours "
        f"{result['ours']:.0f}, theirs {result['theirs']:.0f}. "
    )
    table("full-size", "size", caption).write_all(rows)


def two_photographs(photos: Path) -> Path:
    """Copy a training and a test photograph of each of two classes.

    Raises:
        SystemExit: there are fewer classes.
    """
    root = WORK / "data"
    shutil.rmtree(root, ignore_errors=True)
    classes = sorted(folder for folder in photos.iterdir() if folder.is_dir())[:2]
    for folder in classes:
        files = sorted(file for file in folder.iterdir() if file.is_file())[:2]
        for split, file in zip(("train", "test"), files, strict=False):
            place = root / "clients" / "client-0" / split / folder.name
            place.mkdir(parents=True)
            shutil.copy(file, place)
        public = root / "public" / folder.name
        public.mkdir(parents=True)
        shutil.copy(files[-1], public)
    if len(classes) < 2:
        raise SystemExit(f"{photos} has fewer than two folders of photographs")
    return root


def run(
    method: str, job: str, data: Path, settings: list[str], cache: Path | None = None
) -> Mapping[str, Any]:
    """Return the metrics of a method's run."""
    runs = WORK / "runs"
    shutil.rmtree(runs / job, ignore_errors=True)
    classes = ",".join(sorted(folder.name for folder in (data / "public").iterdir()))
    words = [f"method={method}", f"job-id={job}", f"data.classes={classes}"]
    words += [f"data.root={data / 'clients'}"]
    words += [f"rounds.proxy={data / 'public'}"] if method == "feddf" else []
    command = [str(Path(sys.executable).parent / "osfl"), "run", *LEAST, *words, *settings]
    environment = {"OSFL_CACHE": str(cache)} if cache else {}
    process = subprocess.run(
        [*command, "--runs", str(runs)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(process.stdout + process.stderr)[-4000:]}")
    return json.loads((runs / job / "metrics.json").read_text())


def row_of(method: str, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return a method's costs."""
    client = metrics["clients"].get("client-0", {})
    phases = {phase["phase"]: phase["seconds"] for phase in metrics["phases"]}
    server = metrics["server"]
    seconds = server["synthesis_seconds"]
    memory = client.get("peak_memory_mb")
    return {
        "method": method,
        "joining s": f"{phases.get('joining', 0):.1f}",
        "payload": human_bytes(client["upload_bytes"]) if client.get("upload_bytes") else "",
        "client s": f"{client['seconds']:.1f}" if client.get("seconds") else "",
        "client FLOPs": human_flops(client["flops"]) if client.get("flops") else "",
        "client memory": f"{memory / 1e3:.1f} GB" if memory else "",
        "images": str(server["synthetic_images"]),
        "drawing s": f"{seconds:.1f}" if seconds else "",
    }


def table(name: str, step: str, caption: str) -> Experiment:
    """Return a step's table."""
    options = f"{step} --photos FOLDER"
    return replace(EXPERIMENT, caption=caption, options=options, table=name)


def parity(kit: Path) -> None:
    """Print how far our latents and images are from diffusers', and the core-seconds of both, in
    turns with theirs first and last.
    """
    text = "a photo of a dog"
    ours = load_kit(kit)
    theirs = load_pipeline(kit)
    theirs.scheduler = ours.scheduler
    z = torch.randn(1, *ours.latent_shape, generator=torch.Generator().manual_seed(0))

    def drawn_by_theirs() -> torch.Tensor:
        latents: torch.Tensor = theirs(
            text,
            latents=z,
            num_inference_steps=PARITY_STEPS,
            guidance_scale=7.5,
            output_type="latent",
        ).images
        return latents

    @torch.no_grad()
    def drawn_by_ours() -> torch.Tensor:
        condition = Condition(ours.text([text]), 7.5)
        nothing = ours.text([""])
        return ddim(ours, z, PARITY_STEPS, lambda z, t: compose(ours, z, t, nothing, [condition]))

    seconds = {"ours": 0.0, "theirs": 0.0}
    latents = {}
    turns = (("theirs", drawn_by_theirs), ("ours", drawn_by_ours))
    for name, draw in (*turns, *turns[::-1]):
        start = time.process_time()
        latents[name] = draw()
        seconds[name] += (time.process_time() - start) / 2
    latent, expected = latents["ours"], latents["theirs"]
    with torch.no_grad():
        image = ours.decode(latent)
        reference = theirs.vae.decode(expected / theirs.vae.config.scaling_factor).sample
    weights = sum(file.stat().st_size for file in kit.rglob("*.safetensors"))
    figures = {
        "difference": float((latent - expected).norm() / expected.norm()),
        "images": float((image - reference).norm() / reference.norm()),
        **seconds,
        "gigabytes": weights / 1e9,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print(json.dumps(figures))


def main() -> None:
    """Run one step."""
    parser = command_line(__doc__)
    parser.add_argument("step", choices=("methods", "size", "parity", "remove"))
    parser.add_argument("--photos", type=Path)
    arguments = parser.parse_args()
    if arguments.step == "remove":
        shutil.rmtree(WORK)
        return
    if arguments.photos is None or not arguments.photos.is_dir():
        parser.error(f"--photos = {arguments.photos}: set it to a folder")
    WORK.mkdir(parents=True, exist_ok=True)
    {"methods": methods, "size": size, "parity": parity}[arguments.step](arguments.photos.resolve())


if __name__ == "__main__":
    main()
