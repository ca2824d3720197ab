"""Measure what people do with a finished run: predict, export, read AUROC, draw again, compare.

python -m benchmarks.accuracy.after_the_round    # the demo's run first, then all rows

`PACS` needs the image folders of PACS in ../shared/data/pacs, or in OSFL_PACS.
"""

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

import osfl
from benchmarks.harness import ROOT, RUNS, Experiment, Line
from osfl.data.digits import Digits, load_split
from osfl.inference.loading import TrainedModel
from osfl.run_folder.report.gain import gain_rows, interval_text
from osfl.settings import Setting

JOB = "after-the-round"
PACS = Path(os.environ.get("OSFL_PACS", ROOT.parent / "shared" / "data" / "pacs"))
GUIDANCES = (1.0, 1.25, 1.5, 2.0, 3.0)
NEW_IMAGES = 1000
ROWS = ("osfl predict", "ONNX", "Hub folder", "AUROC", "guidance sweep", "PACS")
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    caption="The demo's run and what is done with it afterwards. Predict and exports: "
    f"{NEW_IMAGES} digits of the validation scans, which clients and tests do not have (the kit "
    "was trained on other renderings of these scans), and the largest difference from PyTorch. "
    "AUROC: the report's, from the clients' histograms, beside scikit-learn's from the raw scores "
    "of the same test images. Guidance sweep: five runs with payloads-from, whose clients only "
    "test; one seed, so no choice follows. PACS at 64 px: four sites with a domain each, a "
    "ResNet-18 from random weights; five rounds of FedAvg with a pass over each site's images "
    "against a site's own model after five passes (local-baseline), and the gain with its 95 % "
    "interval over the test images.",
)


def demo() -> osfl.Run:
    """Return the demo's run."""
    return finished_run("", "demo")


def finished_run(suffix: str, *settings: Setting, **keys: Any) -> osfl.Run:
    """Return a run, which is made unless it is there."""
    job = f"{JOB}{suffix}"
    if (RUNS / job / "report.html").is_file():
        return osfl.open_run(RUNS / job)
    return osfl.run(*settings, job_id=job, runs=RUNS, **keys)


def new_digits() -> Digits:
    """Return images of all domains that neither clients nor tests have."""
    digits = load_split("validation")
    rows = np.random.default_rng(0).permutation(len(digits))[:NEW_IMAGES]
    return digits.select(rows)


def saved(digits: Digits, folder: Path) -> Path:
    """Write images as PNG files by number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(digits.images):
        Image.fromarray(pixels).save(folder / f"{number:04}.png")
    return folder


def command(*arguments: str | Path) -> str:
    """Run `osfl` with arguments, and return its output."""
    words = [str(Path(sys.executable).parent / "osfl"), *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def logits(model: TrainedModel, digits: Digits) -> np.ndarray:
    """Return PyTorch's logits of images, [N, C]."""
    inputs = torch.stack([model.transform(Image.fromarray(image)) for image in digits.images])
    with torch.no_grad():
        return np.concatenate([model.module(part).numpy() for part in inputs.split(100)])


def softmax(values: np.ndarray) -> np.ndarray:
    """Return probabilities [N, C]."""
    return torch.from_numpy(values).double().softmax(dim=1).numpy()


def predicted() -> Line:
    """Predict new digits by the command, and compare with the model in Python."""
    run, digits = demo(), new_digits()
    folder = saved(digits, EXPERIMENT.work / "digits")
    out = EXPERIMENT.work / "predictions.csv"
    start = time.monotonic()
    command("predict", run.folder / "models" / "FT.safetensors", folder, "--out", out)
    seconds = time.monotonic() - start
    with out.open() as file:
        lines = sorted(csv.DictReader(file), key=lambda line: line["path"])
    model = run.model("FT")
    classes = [model.classes.index(line["class"]) for line in lines]
    written = np.array([[float(line[f"p({name})"]) for name in model.classes] for line in lines])
    error = np.abs(written - softmax(logits(model, digits))).max()
    accuracy = 100 * np.mean(np.array(classes) == digits.labels)
    figures = f"accuracy {accuracy:.1f} %, {seconds:.0f} s with the start of the program"
    return {"": "osfl predict", "figures": f"{figures}; probabilities differ by {error:.0e}"}


def exported_to_onnx() -> Line:
    """Compare an ONNX file, run by onnxruntime, with PyTorch."""
    import onnxruntime

    run, digits = demo(), new_digits()
    file = EXPERIMENT.work / "model.onnx"
    source = run.folder / "models" / "FT.safetensors"
    file.unlink(missing_ok=True)
    command("export", source, "--to", "onnx", "--out", file, "--preprocessing")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    pixels = np.ascontiguousarray(digits.images.transpose(0, 3, 1, 2))
    outputs = session.run(None, {name: pixels})[0]
    return {"": "ONNX", "figures": difference_text(outputs, logits(run.model("FT"), digits))}


def exported_to_hub() -> Line:
    """Compare a Hub folder, loaded by transformers in a process without OSFL, with PyTorch."""
    run, digits = demo(), new_digits()
    folder = EXPERIMENT.work / f"hub-{time.time_ns()}"
    source = run.folder / "models" / "FT.safetensors"
    command("export", source, "--to", "huggingface", "--out", folder)
    images, output = folder / "images.npy", folder / "logits.npy"
    np.save(images, digits.images)
    program = HUB_READER.format(folder=folder, images=images, output=output)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)
    outputs = np.load(output)
    return {"": "Hub folder", "figures": difference_text(outputs, logits(run.model("FT"), digits))}


# What the model card tells a user, who has transformers and not OSFL
HUB_READER = """
import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{folder}", trust_remote_code=True)
processor = AutoImageProcessor.from_pretrained("{folder}", trust_remote_code=True)
pictures = [Image.fromarray(image) for image in np.load("{images}")]
with torch.no_grad():
    outputs = model(**processor(pictures, return_tensors="pt")).logits
np.save("{output}", outputs.numpy())
"""


def difference_text(outputs: np.ndarray, expected: np.ndarray) -> str:
    """Describe the largest difference between logits."""
    return f"logits differ by at most {np.abs(outputs - expected).max():.1e}"


def areas() -> Line:
    """Compare the report's AUROC with scikit-learn's of the same test images."""
    run, digits = demo(), load_split("test")
    together = run.metrics["figures"]["FT"]["together"]
    scores = softmax(logits(run.model("FT"), digits))
    exact = roc_auc_score(digits.labels, scores, multi_class="ovr")
    binned = together["auroc"]["value"]
    text = f"{binned:.5f} from histograms, {exact:.5f} from {len(digits)} scores: "
    bound = together["binning_error"]
    text += f"{abs(binned - exact):.5f} apart, at most {bound:.5f} by the report"
    return {"": "AUROC", "figures": text}


def swept() -> Line:
    """Draw again with each guidance; compare the time with the demo's and its synthesis."""
    run = demo()
    seconds, accuracies, phases = [], [], []
    for guidance in GUIDANCES:
        again = finished_run(
            f"-guidance-{100 * guidance:.0f}-percent",
            "demo",
            payloads_from=str(run.folder),
            domain_vector__guidance=guidance,
        )
        seconds.append(seconds_of(again))
        phases.append(seconds_of(again, "synthesis"))
        accuracies.append(again.metrics["average"])
    first = seconds_of(run)
    text = f"the demo {first:.0f} s; a guidance more {mean(seconds):.0f} s, of which synthesis "
    text += f"{mean(phases):.0f} s (the demo's: {seconds_of(run, 'synthesis'):.0f} s); accuracies "
    text += ", ".join(
        f"{guidance:g}: {value:.1f}" for guidance, value in zip(GUIDANCES, accuracies, strict=True)
    )
    return {"": "guidance sweep", "figures": text}


def seconds_of(run: osfl.Run, name: str = "") -> float:
    """Return the seconds of the phases whose name begins with a word; of all by default."""
    phases = run.metrics["phases"]
    return sum(float(phase["seconds"]) for phase in phases if phase["phase"].startswith(name))


def photographs() -> Iterator[Line]:
    """Yield the gain of each of PACS' four sites, and of all."""
    world = ROOT / "configs" / "worlds" / "pacs.toml"
    run = finished_run("-pacs", world, PACS_RUN)
    for client, row in gain_rows(run.metrics["gain"]).items():
        yield {"": f"PACS: {client}", "figures": gain_text(row)}


def gain_text(row: dict[str, Any]) -> str:
    """Describe what a client has alone and together, and its gain with the interval."""
    return f"alone {row['local']:.1f}, together {row['global']:.1f}: {interval_text(row)}"


# Each site's images are passed over five times, together or alone
PACS_RUN = {
    "method": "fedavg",
    "data.root": str(PACS),
    "rounds.count": 5,
    "rounds.local-epochs": 1,
    "classifier.architecture": "resnet18",
    "classifier.init": "none",
    "classifier.epochs": 5,
    "local-baseline": True,
    # Sites share this machine's cores
    "test-timeout": 7200,
}


def lines_of(row: str, seeds: Sequence[int]) -> Line | Iterator[Line]:
    """Return the line of a row, or yield the lines of `PACS`."""
    rows: dict[str, Callable[[], Line | Iterator[Line]]] = {
        "osfl predict": predicted,
        "ONNX": exported_to_onnx,
        "Hub folder": exported_to_hub,
        "AUROC": areas,
        "guidance sweep": swept,
        "PACS": photographs,
    }
    return rows[row]()


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
