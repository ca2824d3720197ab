"""Check that a change leaves every method's results identical to the bit.

    python -m benchmarks.tools.golden record runs/before.json   # before the change
    python -m benchmarks.tools.golden compare runs/before.json  # after it, on the same machine

Runs every method once, as a simulation with tiny settings, seed 0 and one thread, and takes the
SHA-256 of each client's payload, of the manifest of all images and of each global model, and the
accuracies. They hold for one machine: another processor rounds differently. FedDISC is excluded:
its noise comes from the operating system, so that no two payloads are equal. So are zero-shot,
whose CLIP the shipped kit lacks, and real-and-synthetic, which adds another run's images.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.harness import command_line
from osfl.methods import METHODS

LEFT_OUT = ("feddisc", "zero-shot", "real-and-synthetic")
SETTINGS = (
    "seed=0",
    "num-clients=2",
    "device=cpu",
    "classifier.architecture=shufflenet_v2_x1_0",
    "classifier.epochs=1",
    "global-model.architecture=shufflenet_v2_x1_0",
    "global-model.epochs=1",
    "global-model.precision=float32",
    "synthesis.images-per-class=2",
    "synthesis.steps=3",
    "synthesis.batch-size=20",
    "synthesis.parallel-units=1",
    "feddeo.epochs=1",
    "feddeo.guidance-text=1.0",
    "espresso.epochs=1",
    "fedbip.epochs=1",
    "fedcado.noise-edits=1",
    "rounds.count=2",
    "rounds.proxy-images=20",
    "rounds.distillation-steps=2",
)


def digest_of(method: str, runs: Path) -> dict[str, Any]:
    """Run a method, and return the digests of its results.

    Raises:
        RuntimeError: the run failed.
    """
    job = f"golden-{method}"
    command = [str(Path(sys.executable).parent / "osfl"), "run", *SETTINGS]
    command += [f"method={method}", f"job-id={job}", "--runs", str(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OSFL_CACHE": str(runs / "cache")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{method}: {process.stdout[-2000:]}{process.stderr[-2000:]}")
    folder = runs / job
    metrics = json.loads((folder / "metrics.json").read_text())
    manifest = folder / "manifest.jsonl"
    return {
        "payloads": digests(folder.glob("payloads/*.pb")),
        "models": {
            file.name: weights_digest(file) for file in sorted(folder.glob("models/*.safetensors"))
        },
        "manifest": hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else "",
        "accuracy": metrics["accuracy"],
    }


def digests(files: Any) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def weights_digest(file: Path) -> str:
    """Return the SHA-256 of a model's tensors, without the description in its metadata."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Record, or compare and exit with 1 if something differs."""
    parser = command_line(__doc__)
    parser.add_argument("step", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    methods = [name for name in METHODS if name not in LEFT_OUT]
    parser.add_argument("--methods", nargs="*", default=methods)
    arguments = parser.parse_args()
    before = json.loads(arguments.file.read_text()) if arguments.step == "compare" else {}
    results = {}
    changed = []
    with tempfile.TemporaryDirectory() as runs:
        for method in arguments.methods:
            results[method] = digest_of(method, Path(runs))
            same = not before or results[method] == before[method]
            print(
                f"{method}: {'as before' if before and same else 'recorded' if same else 'CHANGED'}"
            )
            if not same:
                changed.append(method)
                print(json.dumps({"before": before[method], "now": results[method]}, indent=1))
    if arguments.step == "record":
        arguments.file.write_text(json.dumps(results, indent=1) + "\n")
    if changed:
        sys.exit(f"changed results: {', '.join(changed)}")


if __name__ == "__main__":
    main()
