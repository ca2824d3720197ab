"""Measure bytes and accuracy of payloads as float32, int8 and int4 (`payload-codec`).

python -m benchmarks.privacy.payload_codecs                     # every system
python -m benchmarks.privacy.payload_codecs domain-vector       # some; the others stay
python -m benchmarks.privacy.payload_codecs --without-training  # bytes, errors, and the accuracy of
                                                                # classifiers; payload-codecs-bytes

The cells are benchmarks.accuracy.method_comparison's. A system and seed have the same payloads with
every codec, and the same noise and training.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

import torch
from torch import nn

from benchmarks.accuracy.method_comparison import SEEDS, averages, cells
from benchmarks.federation import CLIENTS, Settings, config_of, node_of, payloads_of, predictions
from benchmarks.harness import (
    Experiment,
    Line,
    average,
    difference,
    new_panel,
    parsed_seeds,
    some_of,
    standard_error,
    write_figure,
)
from benchmarks.recipe import CODED, settings_of
from osfl.data.load import load_images
from osfl.models.classifiers import rebuild_classifier
from osfl.payload.kinds import Classifier, Payload
from osfl.payload.wire import encode

CODECS = ("raw", "int8", "int4")
ALL_CODECS = ("raw", "float16", "int8", "int4")
# A client's ResNet-18; such classifiers train no global model here
UNTRAINED = ("FedLMG",)
LIKE_OWN = "classifiers, on images like their own (%)"
EXPERIMENT = Experiment(
    __file__,
    tuple(CODED),
    "What six clients send with three payload-codecs, for ten classes, and the top-1 accuracy (%) "
    "on their test images, mean of the seeds {seeds}; the recipe of "
    "benchmarks.accuracy.method_comparison. To raw: paired by seed, with a 95 % interval by "
    "Student's t, and a star where that excludes 0.",
    SEEDS,
)
BYTES = replace(
    EXPERIMENT,
    rows=(*CODED, *UNTRAINED),
    caption="What a client sends with every payload-codec, for the digits' ten classes, and how "
    "far its numbers are above their errors; the payloads of "
    "benchmarks.accuracy.method_comparison, mean of the seeds {seeds}. A classifier is tested on "
    "the validation images of its client's domain.",
    options="--without-training",
    table="payload-codecs-bytes",
)


def row_of(system: str, codec: str) -> str:
    """Return the row of benchmarks.accuracy.method_comparison."""
    return system if codec == "raw" else f"{system}, {codec}"


def system_of(line: Line) -> str:
    """Return the system of a line."""
    name = line[""]
    for codec in ALL_CODECS:
        name = name.removesuffix(f", {codec}")
    return name


def tensors_of(payload: Payload) -> dict[str, torch.Tensor]:
    """Return a payload's tensors by name, with those of a classifier."""
    tensors = {}
    for name, value in vars(payload).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict):
            tensors |= value
    return tensors


def bytes_and_error(system: str, codec: str, seeds: Sequence[int]) -> tuple[float, float]:
    """Return the bytes of a client's message, averaged over clients and seeds, and the
    signal-to-noise ratio of all numbers in dB.
    """
    sizes = []
    signal = 0.0
    error = 0.0
    for seed in seeds:
        settings = {**settings_of(system, seed), "payload-codec": codec}
        method = config_of(settings).method
        exact = payloads_of(settings_of(system, seed))
        for client, payload in payloads_of(settings).items():
            sizes.append(len(encode(exact[client], method, "job", client, codec)))
            received = tensors_of(payload)
            for name, numbers in tensors_of(exact[client]).items():
                signal += numbers.double().square().sum().item()
                error += (numbers.double() - received[name].double()).square().sum().item()
    return mean(sizes), 10 * math.log10(signal / error) if error else math.inf


def accuracy_on_own(settings: Settings, models: Mapping[str, nn.Module]) -> float:
    """Return the mean accuracy (%) of each client's model on validation images of the client's
    classes and, where it has one, of its domain.
    """
    config = config_of(settings)
    accuracies = []
    for number, client in enumerate(CLIENTS):
        node = node_of(number, config)
        classes = set(load_images(config.data, node, "train", config.seed).labels.tolist())
        images = load_images(config.data, node, "validation", config.seed)
        rows = [row for row, label in enumerate(images.labels.tolist()) if label in classes]
        pixels = images.pixels[torch.tensor(rows)]
        predicted = predictions(models[client], pixels)
        accuracies.append(100 * (predicted == images.labels[rows]).double().mean().item())
    return mean(accuracies)


@cache
def accuracy_of_classifiers(system: str, codec: str, seed: int) -> float:
    """Return the accuracy (%) of received classifiers on validation images like their own."""
    settings = {**settings_of(system, seed), "payload-codec": codec}
    config = config_of(settings).classifier
    models = {}
    for client, payload in payloads_of(settings).items():
        assert isinstance(payload, Classifier)
        models[client] = rebuild_classifier(
            payload.state, payload.architecture, len(payload.classes), config.small_stem
        )
    return accuracy_on_own(settings, models)


def line_of_bytes(system: str, codec: str, seeds: Sequence[int]) -> Line:
    """Return the columns that need no training of a global model."""
    size, decibels = bytes_and_error(system, codec, seeds)
    columns = {
        "": row_of(system, codec),
        "bytes a client": f"{size:.0f}",
        "signal to error (dB)": "" if codec == "raw" else f"{decibels:.1f}",
    }
    if system in UNTRAINED:
        values = {seed: accuracy_of_classifiers(system, codec, seed) for seed in seeds}
        exact = {seed: accuracy_of_classifiers(system, "raw", seed) for seed in seeds}
        columns[LIKE_OWN] = average(values.values())
        columns[f"{LIKE_OWN}, to raw"] = "" if codec == "raw" else difference(values, exact)
    return columns


def line(system: str, codec: str, seeds: Sequence[int]) -> Line:
    """Return a row of the table."""
    accuracies = averages(row_of(system, codec), seeds)
    raw = averages(system, seeds)
    return {
        **line_of_bytes(system, codec, seeds),
        "system": system,
        "codec": codec,
        "average": average(accuracies.values()),
        "standard error": standard_error(accuracies.values()),
        "to raw": "" if codec == "raw" else difference(accuracies, raw),
    }


def lines_of(system: str, seeds: Sequence[int]) -> Iterator[Line]:
    """Yield a line per codec."""
    return (line(system, codec, seeds) for codec in CODECS)


def lines_of_bytes(system: str, seeds: Sequence[int]) -> Iterator[Line]:
    """Yield a line per codec, without training."""
    return (line_of_bytes(system, codec, seeds) for codec in ALL_CODECS)


def plot(lines: Sequence[Line]) -> None:
    """Plot accuracy against bytes, a curve for each system."""
    figure, panel = new_panel()
    for system in dict.fromkeys(line["system"] for line in lines):
        curve = [line for line in lines if line["system"] == system]
        sizes = [float(line["bytes a client"]) for line in curve]
        accuracies = [float(line["average"]) for line in curve]
        errors = [float(line["standard error"]) for line in curve]
        panel.errorbar(sizes, accuracies, errors, marker="o", capsize=3, label=system)
        for line, size, accuracy in zip(curve, sizes, accuracies, strict=True):
            place = (size, accuracy)
            panel.annotate(line["codec"], place, (4, 6), textcoords="offset points", fontsize=8)
    panel.set(xlabel="bytes a client", ylabel="top-1 accuracy (%)", xscale="log")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    write_figure(EXPERIMENT.table_file(), figure)


def main() -> None:
    """Make either table, and the plot."""
    parser = BYTES.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="cells in parallel (default 1)")
    parser.add_argument("--without-training", action="store_true")
    arguments = parser.parse_args()
    seeds = parsed_seeds(arguments.seeds)
    if arguments.without_training:
        systems = some_of(arguments.rows, BYTES.rows, parser)
        BYTES.write(systems, lines_of_bytes, seeds, system_of)
        return
    systems = some_of(arguments.rows, EXPERIMENT.rows, parser)
    rows = [row_of(system, codec) for system in systems for codec in CODECS]
    cells(rows, seeds, "domain", arguments.jobs)
    plot(EXPERIMENT.write(systems, lines_of, seeds, system_of))


if __name__ == "__main__":
    main()
