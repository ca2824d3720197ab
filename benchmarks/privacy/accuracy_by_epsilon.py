"""Measure the privacy-utility trade-off: accuracy by epsilon, for ten to a hundred images per
class.

python -m benchmarks.privacy.accuracy_by_epsilon              # every mechanism
python -m benchmarks.privacy.accuracy_by_epsilon votes OSCAR  # some; the table keeps its other rows

Clients have up to a hundred images per class, drawn for this table from the class's sixty training
scans: with ten, each client has scans of its own; with more, clients share them. Ten of them are a
part of thirty, and thirty of a hundred.

To compute so many cells in hours, a global model trains on ten synthetic images per class and
client, drawn in six UniPC steps, for a third of the common recipe's steps. Its accuracy is
therefore lower, and not paired with other tables.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.federation import (
    CLIENTS,
    CPU,
    DOMAINS,
    Settings,
    accuracy_on_test,
    digest_of,
    server_job,
)
from benchmarks.harness import Experiment, Line, average, write_figure
from benchmarks.recipe import COMMON, SYSTEMS
from client_app.context import ClientJob
from osfl.config import RunConfig, parse_run_config
from osfl.data.digits import split_sources
from osfl.data.load import Fit, Images, to_pixels
from osfl.data.render import DOMAIN_SLICES, render
from osfl.kit.kits import find_kit
from osfl.methods import client_module, server_module
from osfl.payload.wire import decode, encode
from osfl.settings import default_config
from osfl.tables.table_file import as_arguments
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.prompts import DIGITS
from server_app.expected import expected_payload

COUNTS = (10, 30, 100)
# 0: without a guarantee
EPSILONS = (0.5, 1.0, 4.0, 16.0, 0.0)
SHORT: Settings = {
    "synthesis.images-per-class": 10,
    "synthesis.solver": "unipc",
    "synthesis.steps": 6,
    # Eleven epochs of 600 images
    "global-model.steps": 209,
    "global-model.precision": "bfloat16",
}
# Of each image that learns alone: a third of domain-vector's default, half of FedDEO's
PASSES = 20
SEED = 0
# The job that every payload names
JOB = "epsilons"
NOTHING = "prompts-only, which sends nothing"


# Of methods that keep a guarantee
MECHANISMS: dict[str, Settings] = {
    "votes": SYSTEMS["votes"],
    "domain-vector, one for all tokens": {
        **SYSTEMS["domain-vector"],
        "domain-vector.tokens": "all",
        "domain-vector.epochs": PASSES,
    },
    "FedDEO, one for all tokens": {
        **SYSTEMS["FedDEO description alone"],
        "feddeo.tokens": "all",
        "feddeo.epochs": PASSES,
    },
    "OSCAR": SYSTEMS["OSCAR"],
    "FedDISC": SYSTEMS["FedDISC"],
    "FedPFT": {"method": "fedpft"},
    "local, the last layer alone": {
        "method": "local",
        "classifier.trained": "head",
        # DP-SGD needs large batches; the same for ten images and a hundred. Not tuned
        "classifier.steps": 60,
        "classifier.batch-size": 100,
        "classifier.lr": 0.1,
    },
}
EXPERIMENT = Experiment(
    __file__,
    (NOTHING, *MECHANISMS),
    "Top-1 accuracy (%) on the digits' test images, mean of the six domains; one seed, and one "
    "draw of the noise. Six clients with so many images of each class. No guarantee: the method "
    "without epsilon, for which domain-vector and FedDEO learn from all images together, FedDISC "
    f"has clusters and FedPFT mixtures. With one each image learns alone, in {PASSES} steps. A "
    "global model trains by benchmarks.accuracy.method_comparison's recipe with "
    f"{' '.join(as_arguments(SHORT))}; FedPFT's trains on features, and local is the mean of the "
    "clients' own models. delta, clip-norm and clip-gradient are the defaults.",
)


def config_of(mechanism: Settings, epsilon: float) -> RunConfig:
    """Return the configuration of the server and the clients."""
    values = {**COMMON, **SHORT, **mechanism, "seed": SEED}
    folder = EXPERIMENT.work / f"{values['method']}-{digest_of(values)}"
    return parse_run_config(
        {**default_config(), **values, "epsilon": epsilon, "runs-dir": str(folder)}
    )


def drawings(number: int, count: int) -> list[tuple[Image.Image, int]]:
    """Draw `count` training images of each class in a client's domain, and return their labels.

    The first ten scans are the client's alone. Then come the other clients' scans, and from the
    sixty-first on all scans again in another drawing.
    """
    scans = load_digits()
    private = split_sources()["private"]
    style = DOMAINS[number]
    pictures = []
    for label in range(len(DIGITS)):
        of_class = private[scans.target[private] == label]
        for place in range(count):
            rng = np.random.default_rng([SEED, number, label, place])
            scan = of_class[(10 * number + place) % len(of_class)]
            pixels = render(scans.images[scan] / 16, style, DOMAIN_SLICES[style], rng)
            pictures.append((Image.fromarray(pixels), label))
    return pictures


def job_of(mechanism: Settings, number: int, count: int, epsilon: float) -> ClientJob:
    """Return a client's job."""
    config = config_of(mechanism, epsilon)
    pictures = drawings(number, count)
    labels = torch.tensor([label for _, label in pictures])

    def load(fit: Fit) -> Images:
        return Images(torch.stack([to_pixels(picture, fit) for picture, _ in pictures]), labels)

    return ClientJob(config, CLIENTS[number], DIGITS, load, find_kit(config.sampling_kit), CPU)


def payload(mechanism: Settings, number: int, count: int, epsilon: float) -> bytes:
    """Return a client's encoded payload; it is kept, so that its noise is drawn once."""
    config = config_of(mechanism, epsilon)
    client = CLIENTS[number]
    file = Path(config.runs_dir) / f"{count}-{epsilon:g}-{client}.pb"
    if not file.is_file():
        make_private_folder(file.parent)
        job = job_of(mechanism, number, count, epsilon)
        client_payload = client_module(config.method).make_payload(job)
        write_atomically(file, encode(client_payload, config.method, JOB, client))
    return file.read_bytes()


def accuracies_of(mechanism: Settings, count: int, epsilon: float) -> list[float]:
    """Return the accuracy (%) in each domain."""
    numbers = range(len(CLIENTS))
    blobs = [payload(mechanism, number, count, epsilon) for number in numbers]
    return trained(mechanism, dict(zip(CLIENTS, blobs, strict=True)))


def trained(mechanism: Settings, blobs: Mapping[str, bytes]) -> list[float]:
    """Return the accuracy (%) in each domain of the model trained from payloads, or the mean of the
    clients' own models.
    """
    config = config_of(mechanism, 0.0)
    # Votes often have the same winners for another epsilon, and then the same images
    run = hashlib.sha256(b"".join(blobs.values())).hexdigest()[:12]

    def compute() -> list[float]:
        expected = expected_payload(config, JOB)
        payloads = {client: decode(blob, expected(client)) for client, blob in blobs.items()}
        results = server_module(config.method).run(server_job(config, run), payloads).values()
        accuracies = []
        for number in range(len(CLIENTS)):
            accuracies.append(
                mean(accuracy_on_test(config, result.model, number) for result in results)
            )
        return accuracies

    cell = f"{Path(config.runs_dir).name}/{run}"
    result: list[float] = EXPERIMENT.cell(cell, compute)
    return result


def name_of(name: str, count: int) -> str:
    """Return the name of a row."""
    return f"{name}: {count} images"


def column(epsilon: float) -> str:
    """Return the name of a column."""
    return f"ε = {epsilon:g}" if epsilon else "no guarantee"


def line(name: str, count: int) -> Line:
    """Return a row of the table."""
    row = {"": name_of(name, count)}
    for epsilon in EPSILONS:
        row[column(epsilon)] = average(accuracies_of(MECHANISMS[name], count, epsilon))
    return row


def lines_of(name: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a mechanism's rows; prompts-only has one."""
    if name == NOTHING:
        yield {"": NOTHING, column(0.0): average(trained(SYSTEMS["prompts-only"], {}))}
        return
    for count in COUNTS:
        yield line(name, count)


def plot(lines: Sequence[Line]) -> None:
    """Plot accuracy against epsilon, a panel for each number of images."""
    from matplotlib.figure import Figure

    rows = {row[""]: row for row in lines}
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(1, len(COUNTS), sharey=True)
    places = list(range(len(EPSILONS)))
    for panel, count in zip(panels, COUNTS, strict=True):
        for number, name in enumerate(MECHANISMS):
            if row := rows.get(name_of(name, count)):
                accuracies = [float(row[column(epsilon)]) for epsilon in EPSILONS]
                color = f"C{number}"
                panel.plot(places[:-1], accuracies[:-1], "o-", color=color, label=name)
                # Some mechanisms train otherwise without a guarantee: no point of the curve
                panel.plot(places[-1:], accuracies[-1:], "o", color=color)
        if NOTHING in rows:
            panel.axhline(float(rows[NOTHING][column(0.0)]), color="0.6", linewidth=1)
        panel.set_xticks(places, [f"{epsilon:g}" if epsilon else "none" for epsilon in EPSILONS])
        panel.set(title=f"{count} images a class", xlabel="epsilon")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("top-1 accuracy (%)")
    curves = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        curves |= dict(zip(labels, handles, strict=True))
    figure.legend(curves.values(), curves, loc="outside lower center", ncols=4)
    write_figure(EXPERIMENT.table_file(), figure)


if __name__ == "__main__":
    plot(EXPERIMENT.main(__doc__, lines_of))
