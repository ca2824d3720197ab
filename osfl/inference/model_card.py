"""The model card of an export: README.md with front matter that the Hugging Face Hub reads."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from osfl.config import ConfigError
from osfl.inference.description import ModelDescription
from osfl.inference.prediction import accuracy_of
from osfl.methods import METHODS
from osfl.metrics import SCORE_FIGURES
from osfl.metrics.text import figure_texts
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.metrics import read_metrics
from osfl.run_folder.report.page import human_bytes, scores
from osfl.run_folder.report.senders import partial_senders, senders_text
from osfl.util.files import CorruptFileError, read_json
from osfl.util.text import sanitize

# Classes that the card lists; config.json lists all
MAX_CLASSES = 200
_TIMM_USE = """\
```python
import timm
from PIL import Image

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
logits = model(transform(Image.open("image.png").convert("RGB"))[None])
print(model.pretrained_cfg["label_names"][logits.argmax()])
```

transformers' `AutoImageProcessor` and `AutoModelForImageClassification` load the same folder. \
Images of another size are resized by Pillow, whose rounding differs by up to 1 of 255 levels from \
that of the clients' images."""
_TRANSFORMERS_USE = """\
```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

processor = AutoImageProcessor.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForImageClassification.from_pretrained("FOLDER", trust_remote_code=True)
logits = model(**processor(Image.open("image.png").convert("RGB"), return_tensors="pt")).logits
print(model.config.id2label[int(logits.argmax())])
```

`trust_remote_code=True` runs `modeling_osfl.py` of this folder (transformers 5), which builds \
the architecture: timm has none with these weights."""


@dataclass(frozen=True)
class RunRecord:
    """A finished run's record of one of its models.

    Attributes:
        name: the model's name in the run.
        metrics: the run's metrics.
    """

    name: str
    metrics: Mapping[str, Any]

    @property
    def tests(self) -> dict[str, np.ndarray]:
        """The model's confusion matrix on each client's own test images: [true, predicted]."""
        by_client = self.metrics["confusion"].get(self.name, {})
        return {client: np.array(matrix) for client, matrix in by_client.items()}

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures from score histograms: of all clients `together`, and by `clients`."""
        # Runs of older versions have none
        figures: Mapping[str, Any] = self.metrics.get("figures", {}).get(self.name, {})
        return figures


def read_run_record(file: Path, run: Path | None, num_classes: int) -> RunRecord | None:
    """Read what the run of a model recorded about it.

    Args:
        file: the model.
        run: the run's folder; None for the one that the model lies in.

    Returns:
        None if `run` is None, and the model lies in no finished run.

    Raises:
        ConfigError: the run has not finished, or has no such model.
        CorruptFileError: the run's metrics are corrupt.
    """
    folder = RunFolder(run or file.resolve().parent.parent)
    is_inside = file.resolve() in folder.model_files()
    if not folder.metrics_file.is_file():
        if run is None:
            return None
        raise ConfigError(
            f"--run = {sanitize(run, 1000)}: must be the folder of a finished run; "
            f"{folder.metrics_file.name} is missing"
        )
    if run is None and not is_inside:
        return None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    names = [
        record.stem
        for record in folder.model_records()
        if read_json(record).get("sha256") == digest
    ]
    if not names:
        raise ConfigError(
            f"{'MODEL' if run is None else '--run'}: the run {sanitize(folder.path, 1000)} has "
            "recorded no model with this file's SHA-256; set MODEL to a model of that run, or "
            "--run to the run of this model"
        )
    record = RunRecord(names[0], read_metrics(folder.path))
    if any(cells.shape != (num_classes, num_classes) for cells in record.tests.values()):
        raise CorruptFileError(
            f"{sanitize(folder.metrics_file, 1000)} is corrupt: a confusion matrix of "
            f"{names[0]} does not have {num_classes} classes; repeat the same `osfl run`"
        )
    return record


def card_text(
    description: ModelDescription, library: str, run: RunRecord | None, client_names: bool
) -> str:
    """Write the model card.

    Args:
        library: timm or transformers.
        run: None if nothing is known about the run.
        client_names: whether the card names the clients.
    """
    sections = (
        f"# {_escape(description.run)} {_escape(description.name)}",
        _summary(description),
        f"## Use\n\n{_usage(description, library)}",
        f"## Classes\n\n{_classes(description.classes)}",
        f"## How it was made\n\n{_origin(description, run)}",
        f"## Figures\n\n{_figures(run, client_names)}",
        f"## What left the clients\n\n{_payload(description, run)}",
        f"## Privacy\n\n{_privacy(description)}",
        f"## Intended use and limits\n\n{_limits(description)}",
        f"## License\n\n{_license(description)}",
    )
    return f"---\n{_front_matter(library)}---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(library: str) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name=library,
        pipeline_tag="image-classification",
        tags=["image-classification", "federated-learning", "one-shot-federated-learning", "osfl"],
    )
    return str(data.to_yaml()) + "\n"


def _escape(text: object) -> str:
    """Sanitize a text and escape Markdown: cells, code, emphasis, links, images and HTML."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", sanitize(text, 1000))


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _summary(description: ModelDescription) -> str:
    return (
        f"A classifier of {len(description.classes)} classes "
        f"({_escape(description.architecture)}), made with the method "
        f"{_escape(description.method)} of OSFL, for one-shot federated learning. It was trained "
        f"on {_escape(description.trained_on)}."
    )


def _usage(description: ModelDescription, library: str) -> str:
    use = _TIMM_USE if library == "timm" else _TRANSFORMERS_USE
    side = description.image_size
    return (
        f"{use}\n\nImages must be upright RGB, transparent ones on white. The short side is "
        f"resized to {side} px (bilinear, antialiased) and the center {side} x {side} px cut out; "
        f"values in [0, 1] are normalized with mean {list(description.mean)} and deviation "
        f"{list(description.std)}. The outputs are logits."
    )


def _classes(classes: Sequence[str]) -> str:
    rows = [(number, _escape(name)) for number, name in enumerate(classes[:MAX_CLASSES])]
    hidden = len(classes) - len(rows)
    remark = f"\n\nand {hidden:,} more, in `config.json`" if hidden else ""
    return _table(("output", "class"), rows) + remark


def _origin(description: ModelDescription, run: RunRecord | None) -> str:
    rows = [
        ("method", _escape(description.method)),
        ("job", _escape(description.run)),
        ("trained on", _escape(description.trained_on)),
        ("architecture", _architecture(description)),
    ]
    if run is not None:
        rows += _recorded_origin(run.metrics)
    return _table(("", ""), rows)


def _architecture(description: ModelDescription) -> str:
    stem = ", small stem" if description.small_stem else ""
    return f"{_escape(description.architecture)}{stem}"


def _recorded_origin(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows that only the run's record has: diffusion model, images, training."""
    images = metrics["server"]["synthetic_images"]
    kits = [_last_part(kit) for kit in metrics.get("kits", [])]
    rows = [("clients", str(len(metrics["clients"])))]
    if images:
        rows.append(("diffusion model (kit)", _escape(", ".join(kits) or "unknown")))
        rows.append(("synthetic images", f"{images:,}"))
    rows.append(("training", _escape(_training(metrics["method"], metrics["config"]))))
    versions = metrics["versions"]
    made_with = [f"{package} {versions[package]}" for package in _PACKAGES if package in versions]
    rows.append(("made with", _escape(", ".join(made_with))))
    return rows


_PACKAGES = ("osfl", "torch", "torchvision", "diffusers", "flwr")


def _last_part(setting: object) -> str:
    """Return a path's last part; the full path would reveal the layout of the server's disk."""
    return str(setting).rstrip("/").rpartition("/")[2]


def _training(method: str, config: Mapping[str, Any]) -> str:
    """Describe the training recipe, from a flat run-config."""
    declaration = METHODS.get(method)
    is_iterative = declaration is not None and declaration.rounds
    if declaration is not None and declaration.zero_shot:
        return "none: the head is the encodings of the classes' names"
    if declaration is not None and declaration.features:
        return f"a linear head on frozen features; seed {config.get('seed')}"
    section = "classifier" if is_iterative else "global-model"
    settings = {key: config.get(f"{section}.{key}") for key in _TRAINING_KEYS}
    if is_iterative:
        settings["rounds"] = config.get("rounds.count")
        settings["local epochs"] = config.get("rounds.local-epochs")
    settings["seed"] = config.get("seed")
    recorded = {key: value for key, value in settings.items() if value is not None}
    # With steps = 0 the number of epochs counts, otherwise the number of steps
    if not recorded.get("steps"):
        recorded.pop("steps", None)
    else:
        recorded.pop("epochs", None)
    return ", ".join(f"{key} {_last_part(value)}" for key, value in recorded.items())


_TRAINING_KEYS = (
    "init",
    "trained",
    "epochs",
    "steps",
    "batch-size",
    "lr",
    "momentum",
    "weight-decay",
    "schedule",
    "augmentation",
)


def _figures(run: RunRecord | None, client_names: bool) -> str:
    if run is None:
        return "Not known: this card was written without the run's folder."
    tests = run.tests
    if not tests:
        return "Not known: no client reported a test of this model."
    order = sorted(run.metrics["clients"])
    if not client_names:
        # By accuracy, so that the order does not identify clients
        order = sorted(
            tests, key=lambda client: (-_accuracy(tests[client]), tests[client].tolist())
        )
        order += [client for client in sorted(run.metrics["clients"]) if client not in tests]
    names = {
        client: _escape(client) if client_names else f"client {number}"
        for number, client in enumerate(order, 1)
    }
    rows = [(name, *_cells(tests.get(client))) for client, name in names.items()]
    rows.append(("**all images**", *_cells(np.sum(list(tests.values()), axis=0))))
    header = ("", "test images", "accuracy (95 % interval)", "balanced accuracy")
    return (
        "Measured by each client on its own test images, in percent; the interval (Wilson) covers "
        "the choice of test images, not that of the run.\n\n"
        + _table(header, rows)
        + _score_figures(run, names)
    )


def _score_figures(run: RunRecord, names: Mapping[str, str]) -> str:
    """Write the table of discrimination and calibration; "" without any histogram.

    Args:
        names: the card's name of each client.
    """
    if not run.figures:
        return ""
    together = run.figures["together"]
    by_client = run.figures["clients"]
    rows = [
        (name, *_score_cells(by_client[key])) for key, name in names.items() if key in by_client
    ]
    senders = senders_text(partial_senders(run.metrics, run.name))
    rows.append((f"**{senders} together**", *_score_cells(together)))
    specificity = 100 * together["specificity"]
    header = ("", "AUROC", f"sensitivity at {specificity:g} % specificity", "ECE", "Brier score")
    return (
        "\n\nFrom histograms of each client's scores, with 95 % intervals: AUROC of each class "
        "against the others and the sensitivity are means over the classes; ECE is the expected "
        f"calibration error.\n\n{_table(header, rows)}"
    )


def _score_cells(figures: Mapping[str, Any]) -> list[str]:
    texts = figure_texts(figures)
    return [str(texts.get(key, "-")) for key in SCORE_FIGURES]


def _accuracy(cells: np.ndarray) -> float:
    return float(np.trace(cells) / max(cells.sum(), 1))


def _cells(cells: np.ndarray | None) -> tuple[str, str, str]:
    """Format test images, accuracy and balanced accuracy of a confusion matrix."""
    if cells is None or not cells.sum():
        return ("not reported", "-", "-")
    accuracy = accuracy_of(cells)
    interval = f"{accuracy.value:.1f} ({accuracy.low:.1f} to {accuracy.high:.1f})"
    return (f"{int(cells.sum()):,}", interval, f"{scores(cells)['balanced_accuracy']:.1f}")


def _payload(description: ModelDescription, run: RunRecord | None) -> str:
    method = METHODS.get(description.method)
    if method is None:
        return f"Not known: the method {_escape(description.method)} is not installed here."
    if method.payload is None and not method.rounds:
        text = f"Each client sent {_escape(method.sends)}."
    else:
        kind = f" (`{method.payload}`)" if method.payload else ""
        sent = _escape(method.sends)
        if run is not None and run.metrics.get("config", {}).get("secure-sum"):
            sent = _escape(run.metrics["sends"])
        text = f"Each client sent {sent}{kind}. {_sent_bytes(run)}"
        if run is not None and (source := run.metrics.get("payloads_from")):
            text += f" That was in job {_escape(source)}: in this run no client sent a payload."
    if method.reveals:
        text += f" An adversary could learn from it {_escape(method.reveals)}."
    return f"{text} Clients that tested the model also sent its confusion matrix."


def _sent_bytes(run: RunRecord | None) -> str:
    if run is None:
        return "How many bytes is not known."
    sizes = [float(costs.get("upload_bytes", 0)) for costs in run.metrics["clients"].values()]
    senders = [size for size in sizes if size]
    if not senders:
        return "No bytes were recorded."
    span = human_bytes(min(senders))
    if min(senders) != max(senders):
        span += f" to {human_bytes(max(senders))}"
    return f"{len(senders)} clients sent {span} each, {human_bytes(sum(senders))} in all."


def _privacy(description: ModelDescription) -> str:
    if description.epsilon is None:
        return "Epsilon: none. This model has no differential privacy guarantee."
    return (
        f"Epsilon {description.epsilon:g}, delta {description.delta:g}: what each client sent, or "
        "in a secure sum the sum of it, is differentially private for each of its training images. "
        "The guarantee does not cover test results."
    )


def _limits(description: ModelDescription) -> str:
    method = METHODS.get(description.method)
    limits = [
        "For images like those of the clients, in research, and after a test on images of your "
        "own (`osfl evaluate`). It is not validated for decisions about people, such as "
        "diagnoses.",
        "It answers with one of its classes for any image, even for an image of none of them.",
        "The softmax of its outputs is not calibrated.",
        "The figures are of the clients' test images. Other sites, devices and groups of people "
        "may differ.",
    ]
    if method is not None and method.samples:
        limits.append(
            "It was trained on synthetic images, and may share the biases of the diffusion model "
            "that made them."
        )
    return "\n".join(f"- {limit}" for limit in limits)


def _license(description: ModelDescription) -> str:
    return (
        f"License of the base weights, from which training started: "
        f"{_escape(description.base_license)}.\n\n"
        "The publisher of this model chooses its license, within that of these weights, of the "
        "diffusion model and of the clients' agreements; add it to the front matter as `license`."
    )
