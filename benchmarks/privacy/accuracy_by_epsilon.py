"""Measure the privacy-utility trade-off: accuracy by epsilon, for ten to a hundred images per
class.

python -m benchmarks.privacy.accuracy_by_epsilon              # every mechanism
python -m benchmarks.privacy.accuracy_by_epsilon votes OSCAR  # some; the table keeps its other rows

Clients have up to a hundred images per class, drawn for this table from the class's sixty training
scans: with ten, each client has scans of its own; with more, clients share them. Ten of them are a
part of thirty, and thirty of a hundred. What a single image contributes is computed once, and gets
new noise for every epsilon.

To compute so many cells in hours, a global model trains on ten synthetic images per class and
client, drawn in six UniPC steps, for a third of the common recipe's steps. Its accuracy is
therefore lower, and not paired with other tables.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from client_app.learning.conditions import load_kit_for_training, posteriors
from client_app.methods import domain_vector, feddeo, oscar, votes
from client_app.privacy.mechanisms import private_mean_of_class
from osfl.config import RunConfig, parse_run_config
from osfl.data.digits import split_sources
from osfl.data.load import Fit, Images, to_pixels
from osfl.data.render import DOMAIN_SLICES, render
from osfl.kit.kits import find_kit
from osfl.methods import client_module, server_module
from osfl.models.diffusion import load_kit
from osfl.models.encoders import load_captioner, load_text_encoder
from osfl.payload.kinds import Descriptions, DomainVector, Encodings, Payload, Votes
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


@dataclass(frozen=True)
class Mechanism:
    """How a method keeps a guarantee.

    Attributes:
        settings: of the method.
        each: returns each image's contribution [N, ...]; None: the client's half makes the payload.
        together: makes a payload of the contributions.
        always: also make it so without a guarantee; otherwise the client's half does that.
    """

    settings: Settings
    each: Callable[[ClientJob, Images], torch.Tensor] | None = None
    together: Callable[[ClientJob, Images, torch.Tensor], Payload] | None = None
    always: bool = False


# ---- Each image's contribution ----


def ballots(job: ClientJob, images: Images) -> torch.Tensor:
    """Return the candidate that each image votes for [N]."""
    kit = load_kit(job.kit, job.device)
    latents, _ = posteriors(kit, images, job)
    return votes.candidate_errors(kit, latents, images.labels, job).argmin(dim=1)


def vectors(job: ClientJob, images: Images) -> torch.Tensor:
    """Return domain-vector's vector of each image [N, L, d]."""
    kit = load_kit_for_training(job)
    latents, logvar = posteriors(kit, images, job)
    return domain_vector.vector_per_image(kit, images, latents, logvar, job)


def descriptions(job: ClientJob, images: Images) -> torch.Tensor:
    """Return FedDEO's description of each image [N, L, d], learned class by class."""
    kit = load_kit_for_training(job)
    latents, logvar = posteriors(kit, images, job)
    rows_of = [(images.labels == label).nonzero().flatten() for label in images.held()]
    starts = kit.text(job.config.prompts(job.classes))
    learned = feddeo.descriptions_per_image(kit, starts, images, rows_of, latents, logvar, job)
    return torch.cat(list(learned))[torch.cat(rows_of).argsort()]


def encodings(job: ClientJob, images: Images) -> torch.Tensor:
    """Return OSCAR's encoding of each image's caption [N, L, d]."""
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    pixels = job.load(captioner.fit).pixels
    captions: list[str] = []
    for rows in torch.arange(len(images)).split(oscar.BATCH):
        captions += captioner(pixels[rows], job.meter)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    return torch.cat(list(oscar.encode_captions(text, captions, job.meter)))


# ---- Payloads ----


def classes_of(job: ClientJob, images: Images) -> tuple[str, ...]:
    """Return the names of a client's classes."""
    return tuple(job.classes[label] for label in images.held())


def prompts(job: ClientJob) -> torch.Tensor:
    """Return the encodings of all classes' prompts [C, L, d]."""
    return load_kit(job.kit, job.device).text(job.config.prompts(job.classes)).cpu()


def winners(job: ClientJob, images: Images, each: torch.Tensor) -> Payload:
    """Return the noisy argmax of each class's votes."""
    winning = [votes.select_winner(each[images.labels == label], job) for label in images.held()]
    return Votes(classes_of(job, images), torch.tensor(winning, dtype=torch.uint8))


def noisy_vector(job: ClientJob, images: Images, each: torch.Tensor) -> Payload:
    """Return the noisy mean of all images' vectors."""
    vector = domain_vector.noisy_mean(each, prompts(job), job.config)
    return DomainVector(classes_of(job, images), vector)


def noisy_means(
    job: ClientJob, images: Images, each: torch.Tensor, alike: bool = False
) -> torch.Tensor:
    """Return each class's noisy mean [C, L, d], or one vector for all its tokens [C, 1, d]."""
    every_prompt = prompts(job)
    means = []
    for label in images.held():
        rows = each[images.labels == label]
        means.append(private_mean_of_class(rows, every_prompt, label, job.config, alike))
    return torch.stack(means)


def noisy_descriptions(job: ClientJob, images: Images, each: torch.Tensor) -> Payload:
    """Return FedDEO's payload, one vector for all tokens of each class."""
    return Descriptions(classes_of(job, images), noisy_means(job, images, each, alike=True))


def noisy_encodings(job: ClientJob, images: Images, each: torch.Tensor) -> Payload:
    """Return OSCAR's payload."""
    return Encodings(classes_of(job, images), noisy_means(job, images, each))


MECHANISMS = {
    "votes": Mechanism(SYSTEMS["votes"], ballots, winners, always=True),
    "domain-vector, one for all tokens": Mechanism(
        {**SYSTEMS["domain-vector"], "domain-vector.tokens": "all", "domain-vector.epochs": PASSES},
        vectors,
        noisy_vector,
    ),
    "FedDEO, one for all tokens": Mechanism(
        {**SYSTEMS["FedDEO description alone"], "feddeo.tokens": "all", "feddeo.epochs": PASSES},
        descriptions,
        noisy_descriptions,
    ),
    "OSCAR": Mechanism(SYSTEMS["OSCAR"], encodings, noisy_encodings),
    "FedDISC": Mechanism(SYSTEMS["FedDISC"]),
    "FedPFT": Mechanism({"method": "fedpft"}),
    "local, the last layer alone": Mechanism(
        {
            "method": "local",
            "classifier.trained": "head",
            # DP-SGD needs large batches; the same for ten images and a hundred. Not tuned
            "classifier.steps": 60,
            "classifier.batch-size": 100,
            "classifier.lr": 0.1,
        }
    ),
}
FLOOR = Mechanism(SYSTEMS["prompts-only"])
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


def settings_of(mechanism: Mechanism) -> Settings:
    """Return a mechanism's settings, over what all have."""
    return {**COMMON, **SHORT, **mechanism.settings, "seed": SEED}


def folder_of(mechanism: Mechanism) -> Path:
    """Return the folder of a mechanism's files; other settings have another."""
    settings = settings_of(mechanism)
    folder = EXPERIMENT.work / f"{settings['method']}-{digest_of(settings)}"
    make_private_folder(folder)
    return folder


def config_of(mechanism: Mechanism, epsilon: float) -> RunConfig:
    """Return the configuration of the server and the clients."""
    values = {**default_config(), **settings_of(mechanism), "epsilon": epsilon}
    return parse_run_config({**values, "runs-dir": str(folder_of(mechanism))})


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


def job_of(mechanism: Mechanism, number: int, count: int, epsilon: float) -> ClientJob:
    """Return a client's job."""
    config = config_of(mechanism, epsilon)
    pictures = drawings(number, count)
    labels = torch.tensor([label for _, label in pictures])

    def load(fit: Fit) -> Images:
        return Images(torch.stack([to_pixels(picture, fit) for picture, _ in pictures]), labels)

    return ClientJob(config, CLIENTS[number], DIGITS, load, find_kit(config.sampling_kit), CPU)


def contributions(mechanism: Mechanism, job: ClientJob, images: Images) -> torch.Tensor:
    """Return the contribution of each of a client's images."""
    name = f"{folder_of(mechanism).name}/said-{len(images)}-{job.client}"
    assert mechanism.each is not None
    each = mechanism.each
    result: torch.Tensor = EXPERIMENT.tensors(name, lambda: each(job, images))
    return result


def payload(mechanism: Mechanism, number: int, count: int, epsilon: float) -> bytes:
    """Return a client's encoded payload; it is kept, so that its noise is drawn once."""
    client = CLIENTS[number]
    file = folder_of(mechanism) / f"{count}-{epsilon:g}-{client}.pb"
    if not file.is_file():
        job = job_of(mechanism, number, count, epsilon)
        result = new_payload(mechanism, job)
        write_atomically(file, encode(result, job.config.method, JOB, client))
    return file.read_bytes()


def new_payload(mechanism: Mechanism, job: ClientJob) -> Payload:
    """Make a payload with the job's epsilon, or as the method does without a guarantee."""
    if mechanism.together is None or not (job.config.epsilon or mechanism.always):
        result: Payload = client_module(job.config.method).make_payload(job)
        return result
    images = job.load(load_kit(job.kit, job.device).image_size)
    return mechanism.together(job, images, contributions(mechanism, job, images))


def accuracies_of(mechanism: Mechanism, count: int, epsilon: float) -> list[float]:
    """Return the accuracy (%) in each domain."""
    blobs = {}
    for number, client in enumerate(CLIENTS):
        blobs[client] = payload(mechanism, number, count, epsilon)
    return trained(mechanism, blobs)


def trained(mechanism: Mechanism, blobs: Mapping[str, bytes]) -> list[float]:
    """Return the accuracy (%) in each domain of the model trained from payloads, or the mean of the
    clients' own models.
    """
    # Votes often have the same winners for another epsilon, and then the same images
    run = hashlib.sha256(b"".join(blobs.values())).hexdigest()[:12]

    def compute() -> list[float]:
        config = config_of(mechanism, 0.0)
        expected = expected_payload(config, JOB)
        payloads = {client: decode(blob, expected(client)) for client, blob in blobs.items()}
        results = server_module(config.method).run(server_job(config, run), payloads).values()
        accuracies = []
        for number in range(len(CLIENTS)):
            accuracies.append(mean(accuracy_on_test(config, one.model, number) for one in results))
        return accuracies

    result: list[float] = EXPERIMENT.cell(f"{folder_of(mechanism).name}/{run}", compute)
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
        yield {"": NOTHING, column(0.0): average(trained(FLOOR, {}))}
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
