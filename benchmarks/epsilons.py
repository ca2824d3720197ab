"""Accuracy along epsilon, for ten to a hundred images a class and client; to
benchmarks/tables/epsilons.{md,json,png}.

python -m benchmarks.epsilons               # every mechanism
python -m benchmarks.epsilons votes OSCAR   # some; the table keeps its other rows

Clients have up to a hundred images of a class, drawn for this table from the sixty training scans
of the class; of ten each client has scans of its own, of more the clients share them. Ten of them
are a part of thirty, and thirty of a hundred. Where an image says something by itself, that is
found once and noised anew for every epsilon.

To have so many cells in hours, a global model learns ten synthetic images a class and client, drawn
in six UniPC steps, for a third of benchmarks.main_table's steps. So its figures are lower than that
table's, and no pairs of them. Interrupted, the same command goes on.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_figure, write_table
from benchmarks.approximations import accuracy
from benchmarks.clients import CLIENTS, DOMAINS, Settings
from benchmarks.guidance import digest_of
from benchmarks.left_out import SYSTEMS
from benchmarks.main_table import COMMON
from benchmarks.server import job_in
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

WORK = Path(__file__).resolve().parent.parent / "runs" / "epsilons"
COUNTS = (10, 30, 100)
# 0: no guarantee
EPSILONS = (0.5, 1.0, 4.0, 16.0, 0.0)
SHORT: Settings = {
    "synthesis.images-per-class": 10,
    "synthesis.solver": "unipc",
    "synthesis.steps": 6,
    # Of 600 images, eleven epochs
    "global-model.steps": 209,
    "global-model.precision": "bfloat16",
}
# Of every image that learns by itself: a third of domain-vector's default, half of FedDEO's
PASSES = 20
SEED = 0
# In every payload
JOB = "epsilons"
NOTHING = "prompts-only, which sends nothing"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mechanism:
    """How a method keeps a guarantee.

    Attributes:
        settings: the method's.
        each: what each image says by itself, [N, ...]; None: the client's half does the whole.
        together: what is sent of it.
        always: whether that is sent without a guarantee, too; else the client's half does it then.
    """

    settings: Settings
    each: Callable[[ClientJob, Images], torch.Tensor] | None = None
    together: Callable[[ClientJob, Images, torch.Tensor], Payload] | None = None
    always: bool = False


# ---- What each image says ----


def ballots(job: ClientJob, images: Images) -> torch.Tensor:
    """The candidate that each image votes for [N]."""
    kit = load_kit(job.kit, job.device)
    latents, _ = posteriors(kit, images, job)
    return votes.candidate_errors(kit, latents, images.labels, job).argmin(dim=1)


def vectors(job: ClientJob, images: Images) -> torch.Tensor:
    """domain-vector's of each image [N, L, d]."""
    kit = load_kit_for_training(job)
    latents, logvar = posteriors(kit, images, job)
    return domain_vector.vector_per_image(kit, images, latents, logvar, job)


def descriptions(job: ClientJob, images: Images) -> torch.Tensor:
    """FedDEO's of each image [N, L, d]: class by class, as its clients do."""
    kit = load_kit_for_training(job)
    latents, logvar = posteriors(kit, images, job)
    rows_of = [(images.labels == label).nonzero().flatten() for label in images.held()]
    starts = kit.text(job.config.prompts(job.classes))
    learned = feddeo.descriptions_per_image(kit, starts, images, rows_of, latents, logvar, job)
    found = torch.cat(list(learned))
    return found[torch.cat(rows_of).argsort()]


def encodings(job: ClientJob, images: Images) -> torch.Tensor:
    """OSCAR's of each image's caption [N, L, d]."""
    captioner = load_captioner(job.config.captioner or job.kit, job.device)
    pixels = job.load(captioner.fit).pixels
    captions: list[str] = []
    for rows in torch.arange(len(images)).split(oscar.BATCH):
        captions += captioner(pixels[rows], job.meter)
    text = load_text_encoder(job.kit, job.device, torch.float32)
    return torch.cat(list(oscar.encode_captions(text, captions, job.meter)))


# ---- What is sent of it ----


def held(job: ClientJob, images: Images) -> tuple[str, ...]:
    """Names of the classes that a client has."""
    return tuple(job.classes[label] for label in images.held())


def prompts(job: ClientJob) -> torch.Tensor:
    """Encodings of all classes' prompts [C, L, d]."""
    return load_kit(job.kit, job.device).text(job.config.prompts(job.classes)).cpu()


def winners(job: ClientJob, images: Images, found: torch.Tensor) -> Payload:
    """Each class's elected candidate."""
    own = [votes.select_winner(found[images.labels == label], job) for label in images.held()]
    return Votes(held(job, images), torch.tensor(own, dtype=torch.uint8))


def noised_vector(job: ClientJob, images: Images, found: torch.Tensor) -> Payload:
    """The noised mean of all images' vectors."""
    return DomainVector(
        held(job, images), domain_vector.noisy_mean(found, prompts(job), job.config)
    )


def noised_means(
    job: ClientJob, images: Images, found: torch.Tensor, alike: bool = False
) -> torch.Tensor:
    """Of each class [C, L, d] or, of what its tokens have in common, [C, 1, d]."""
    every_prompt = prompts(job)
    means = []
    for label in images.held():
        rows = found[images.labels == label]
        means.append(private_mean_of_class(rows, every_prompt, label, job.config, alike))
    return torch.stack(means)


def noised_descriptions(job: ClientJob, images: Images, found: torch.Tensor) -> Payload:
    """FedDEO's, one vector for all tokens of each class."""
    return Descriptions(held(job, images), noised_means(job, images, found, alike=True))


def noised_encodings(job: ClientJob, images: Images, found: torch.Tensor) -> Payload:
    """OSCAR's means."""
    return Encodings(held(job, images), noised_means(job, images, found))


MECHANISMS = {
    "votes": Mechanism(SYSTEMS["votes"], ballots, winners, always=True),
    "domain-vector, one for all tokens": Mechanism(
        {
            **SYSTEMS["domain-vector"],
            "domain-vector.tokens": "all",
            "domain-vector.epochs": PASSES,
        },
        vectors,
        noised_vector,
    ),
    "FedDEO, one for all tokens": Mechanism(
        {**SYSTEMS["FedDEO description alone"], "feddeo.tokens": "all", "feddeo.epochs": PASSES},
        descriptions,
        noised_descriptions,
    ),
    "OSCAR": Mechanism(SYSTEMS["OSCAR"], encodings, noised_encodings),
    "FedDISC": Mechanism(SYSTEMS["FedDISC"]),
    "FedPFT": Mechanism({"method": "fedpft"}),
    "local, the last layer alone": Mechanism(
        {
            "method": "local",
            "classifier.trained": "head",
            # Noise wants large batches; as many for ten images as for a hundred. Not tuned
            "classifier.steps": 60,
            "classifier.batch-size": 100,
            "classifier.lr": 0.1,
        }
    ),
}
FLOOR = Mechanism(SYSTEMS["prompts-only"])


def settings_of(mechanism: Mechanism) -> Settings:
    """A mechanism's own, over what all have."""
    return {**COMMON, **SHORT, **mechanism.settings, "seed": SEED}


def folder_of(mechanism: Mechanism) -> Path:
    """Where its files are; with other settings, in another one."""
    settings = settings_of(mechanism)
    folder = WORK / f"{settings['method']}-{digest_of(settings)}"
    make_private_folder(folder)
    return folder


def config_of(mechanism: Mechanism, epsilon: float) -> RunConfig:
    """The server's, and the clients'."""
    values = {**default_config(), **settings_of(mechanism), "epsilon": epsilon}
    return parse_run_config({**values, "runs-dir": str(folder_of(mechanism))})


def drawings(number: int, count: int) -> list[tuple[Image.Image, int]]:
    """So many training images of each class in a client's domain, and their labels.

    Of ten each client has scans that no other one has. Then come the others', and from the
    sixty-first on all once more, drawn anew.
    """
    scans = load_digits()
    private = split_sources()["private"]
    style = DOMAINS[number]
    found = []
    for label in range(len(DIGITS)):
        own = private[scans.target[private] == label]
        for place in range(count):
            rng = np.random.default_rng([SEED, number, label, place])
            scan = own[(10 * number + place) % len(own)]
            drawn = render(scans.images[scan] / 16, style, DOMAIN_SLICES[style], rng)
            found.append((Image.fromarray(drawn), label))
    return found


def job_of(mechanism: Mechanism, number: int, count: int, epsilon: float) -> ClientJob:
    """A client's."""
    config = config_of(mechanism, epsilon)
    pictures = drawings(number, count)
    labels = torch.tensor([label for _, label in pictures])

    def load(fit: Fit) -> Images:
        return Images(torch.stack([to_pixels(picture, fit) for picture, _ in pictures]), labels)

    return ClientJob(config, CLIENTS[number], DIGITS, load, find_kit(config.sampling_kit), CPU)


def said(mechanism: Mechanism, job: ClientJob, images: Images) -> torch.Tensor:
    """What each of a client's images says; kept on disk."""
    file = folder_of(mechanism) / f"said-{len(images)}-{job.client}.pt"
    if not file.is_file():
        assert mechanism.each is not None
        whole = io.BytesIO()
        torch.save(mechanism.each(job, images), whole)
        write_atomically(file, whole.getvalue())
    found: torch.Tensor = torch.load(file, weights_only=True)
    return found


def payload(mechanism: Mechanism, number: int, count: int, epsilon: float) -> bytes:
    """A client's, as it is sent; kept on disk, so that its noise is drawn once."""
    client = CLIENTS[number]
    file = folder_of(mechanism) / f"{count}-{epsilon:g}-{client}.pb"
    if not file.is_file():
        job = job_of(mechanism, number, count, epsilon)
        made = new_payload(mechanism, job)
        write_atomically(file, encode(made, job.config.method, JOB, client))
    return file.read_bytes()


def new_payload(mechanism: Mechanism, job: ClientJob) -> Payload:
    """With the job's epsilon, or as it is without a guarantee."""
    if mechanism.together is None or not (job.config.epsilon or mechanism.always):
        made: Payload = client_module(job.config.method).make_payload(job)
        return made
    images = job.load(load_kit(job.kit, job.device).image_size)
    return mechanism.together(job, images, said(mechanism, job, images))


def measured(mechanism: Mechanism, count: int, epsilon: float) -> list[float]:
    """Accuracy (%) in each domain."""
    blobs = {}
    for number, client in enumerate(CLIENTS):
        blobs[client] = payload(mechanism, number, count, epsilon)
    return taught(mechanism, blobs)


def taught(mechanism: Mechanism, blobs: Mapping[str, bytes]) -> list[float]:
    """Accuracy (%) in each domain of what the server makes of payloads: of one model, or the mean
    of the clients' own.
    """
    # Votes have often the same winners for another epsilon, and then the same images
    run = hashlib.sha256(b"".join(blobs.values())).hexdigest()[:12]
    file = folder_of(mechanism) / f"{run}.json"
    if not file.is_file():
        config = config_of(mechanism, 0.0)
        expected = expected_payload(config, JOB)
        sent = {client: decode(blob, expected(client)) for client, blob in blobs.items()}
        models = server_module(config.method).run(job_in(config, run), sent).values()
        found = []
        for number in range(len(CLIENTS)):
            found.append(mean(accuracy(config, made.model, number) for made in models))
        write_atomically(file, json.dumps(found).encode())
    accuracies: list[float] = json.loads(file.read_text())
    return accuracies


def name_of(name: str, count: int) -> str:
    """Of a row."""
    return f"{name}: {count} images"


def column(epsilon: float) -> str:
    """Its name."""
    return f"ε = {epsilon:g}" if epsilon else "no guarantee"


def line(name: str, count: int) -> dict[str, str]:
    """A row of the table."""
    row = {"": name_of(name, count)}
    for epsilon in EPSILONS:
        row[column(epsilon)] = f"{mean(measured(MECHANISMS[name], count, epsilon)):.1f}"
        print(row, flush=True)
    return row


def line_of_floor() -> dict[str, str]:
    """Of what sends nothing."""
    return {"": NOTHING, column(0.0): f"{mean(taught(FLOOR, {})):.1f}"}


def plot(lines: Sequence[Mapping[str, str]], file: Path) -> None:
    """Accuracy against epsilon, a panel for each number of images."""
    from matplotlib.figure import Figure

    rows = {row[""]: row for row in lines}
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(1, len(COUNTS), sharey=True)
    places = list(range(len(EPSILONS)))
    for panel, count in zip(panels, COUNTS, strict=True):
        for number, name in enumerate(MECHANISMS):
            if row := rows.get(name_of(name, count)):
                accuracies = [float(row[column(epsilon)]) for epsilon in EPSILONS]
                colour = f"C{number}"
                panel.plot(places[:-1], accuracies[:-1], "o-", color=colour, label=name)
                # Another training for some, so no point of the curve
                panel.plot(places[-1:], accuracies[-1:], "o", color=colour)
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
    write_figure(file, figure)


def main() -> None:
    """Make the table and the plot, and keep them."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(MECHANISMS)}; none: all")
    given = parser.parse_args()
    rows = some_of(given.rows, MECHANISMS, parser)
    make_private_folder(WORK)
    about = (
        "Top-1 accuracy (%) on the digits' test images, mean of the six domains; one seed, and one "
        "draw of the noise. Six clients with so many images of each class. No guarantee: the "
        "method as it is without epsilon, for which domain-vector and FedDEO learn from all images "
        "together, FedDISC has clusters and FedPFT mixtures. With it each image learns by itself, "
        f"in {PASSES} steps. A global model learns by "
        f"benchmarks.main_table's recipe with {' '.join(as_arguments(SHORT))}; FedPFT's learns "
        "features, and local is the mean of the clients' own. delta, clip-norm and clip-gradient "
        "are the defaults. Command: `python -m benchmarks.epsilons`."
    )
    order = [NOTHING, *(name_of(name, count) for name in MECHANISMS for count in COUNTS)]
    lines = [line_of_floor()]
    for count in COUNTS:
        for name in rows:
            lines.append(line(name, count))
            made = with_others(lines, TABLES / "epsilons.json", about, order)
            write_table(TABLES / "epsilons", made, about)
            plot(made, TABLES / "epsilons.png")


if __name__ == "__main__":
    main()
