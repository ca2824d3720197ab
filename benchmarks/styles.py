"""What synthetic images lack that real ones have, style by style; to
benchmarks/tables/styles.{md,json} and styles-painting.png.

python -m benchmarks.styles             # the table, and paintings to look at
python -m benchmarks.styles neon        # of another style the picture alone

The table looks at images drawn under the clients' vectors, under the styles' names and under
FedDEO's descriptions, by guidance. Who looks is a classifier that has learned all clients' real
images by the recipe of benchmarks.main_table:

- each style's share that it takes for their class,
- distance: Fréchet's, of its features of a style's images and of the validation split's real ones
  (Heusel et al., arXiv 1706.08500, with this network in place of Inception), averaged over styles,
- spread: of its features of a class's images that it takes for the class, the squared distance to
  their mean, in % of the real ones'; averaged over classes and styles.

The picture: a column for each class, and in pairs of rows a client's training images, the same as
the kit's autoencoder gives them back, and what is drawn under its vector and under its style's
name.
"""

import io
from collections.abc import Sequence
from copy import deepcopy
from statistics import mean

import numpy as np
import torch
from PIL import Image
from scipy.linalg import sqrtm
from torch import nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from benchmarks import TABLES, command_line, guidance, write_table
from benchmarks.clients import CLIENTS, DOMAINS, Settings, folder_name, real, sent
from benchmarks.main_table import WORK, config_of, settings_of
from benchmarks.poison import of
from benchmarks.server import drawn_by, job_in
from benchmarks.switches import of_clients, reconstructed
from osfl.data.load import Images
from osfl.models.classifiers import headless, logits_of, normalise
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.pixels import to_float
from server_app.pipeline import train_global_model
from server_app.synthesis.images import SyntheticSet

SEED = 0
ROWS = 2
# Of a digit's side
SCALE = 3
# Images of each class and client that are looked at by the classifier
LOOKED_AT = 10
GUIDANCE = {
    "domain-vector": (1.0, 1.5, 2.0, 3.0, 4.0),
    "prompts-domain": (2.0, 3.0, 5.0),
    "FedDEO description alone": (2.0,),
}
SHOWN = ("domain-vector", "prompts-domain")
# Directions of features in which distances are taken: a style has few images
KEPT = 32
BATCH = 200
CPU = torch.device("cpu")


def drawn(row: str, clients: Sequence[str], count: int, own: Settings) -> SyntheticSet:
    """Clients' images by a row of the main table, so many of each class; `own` is changed in it."""
    settings = {**settings_of(row, SEED), "synthesis.images-per-class": count, **own}
    config = config_of(settings)
    payloads = {client: sent(settings)[client] for client in clients}
    job = job_in(config, f"styles-{folder_name(settings)}-{clients[0]}", clients)
    return drawn_by(job, payloads)


def classifier() -> nn.Module:
    """Of all clients' real images."""
    settings = settings_of("ceiling", SEED)
    config = config_of(settings)
    job = job_in(config, f"styles-classifier-{folder_name(settings)}")
    (model,) = train_global_model(job, {}, of_clients()).values()
    return model.model


def sees(model: nn.Module, images: SyntheticSet | Images) -> torch.Tensor:
    """Which images a classifier takes for their class [N]."""
    return logits_of(model, images.pixels, CPU).argmax(dim=1) == images.labels


def share_seen(model: nn.Module, images: SyntheticSet | Images) -> float:
    """Their share (%)."""
    return 100 * sees(model, images).double().mean().item()


@torch.no_grad()
def features_of(model: nn.Module, images: SyntheticSet | Images) -> np.ndarray:
    """What goes into a classifier's last layer [N, f]."""
    body, _ = headless(deepcopy(model))
    parts = torch.arange(len(images.labels)).split(BATCH)
    found = [body(normalise(to_float(images.pixels[rows]), model)) for rows in parts]
    return torch.cat(found).double().numpy()


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """|m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)), of two sets of features [N, k], along the KEPT
    principal directions of the second.
    """
    directions = np.linalg.svd(other - other.mean(axis=0), full_matrices=False)[2][:KEPT].T
    one, other = one @ directions, other @ directions
    covariances = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = sqrtm(covariances[0] @ covariances[1]).real
    apart = one.mean(axis=0) - other.mean(axis=0)
    return float(apart @ apart + np.trace(covariances[0] + covariances[1] - 2 * root))


def spread_within(features: np.ndarray, labels: torch.Tensor, seen: torch.Tensor) -> float:
    """The squared distance of features [N, f] to the mean of their class, of images that are seen
    as it [N]; without bias, averaged over the classes that have two.
    """
    found = []
    for label in labels.unique().tolist():
        own = features[((labels == label) & seen).numpy()]
        if len(own) > 1:
            found.append(own.var(axis=0, ddof=1).sum())
    return float(np.mean(found))


def line(
    name: str,
    model: nn.Module,
    parts: Sequence[SyntheticSet | Images],
    real_ones: Sequence[Images],
) -> dict[str, str]:
    """A row of the table: each style's images, and all; beside its real ones."""
    made = {"": name}
    shares, distances, spreads = [], [], []
    for style, part, known in zip(DOMAINS, parts, real_ones, strict=True):
        shares.append(share_seen(model, part))
        made[style] = f"{shares[-1]:.1f}"
        own, other = features_of(model, part), features_of(model, known)
        distances.append(frechet_distance(own, other))
        of_real = spread_within(other, known.labels, sees(model, known))
        spreads.append(100 * spread_within(own, part.labels, sees(model, part)) / of_real)
    made["average"] = f"{mean(shares):.1f}"
    made["distance"] = f"{mean(distances):.1f}"
    made["spread (%)"] = f"{mean(spreads):.0f}"
    return made


def first_of(images: Images) -> SyntheticSet:
    """As many real images of each class as are drawn."""
    columns = [(images.labels == label).nonzero().flatten() for label in images.held()]
    rows = torch.cat([column[:LOOKED_AT] for column in columns])
    return SyntheticSet(images.pixels[rows], images.labels[rows], ("",) * len(rows))


def lines() -> list[dict[str, str]]:
    """The table; first real images of the test split."""
    model = classifier()
    known = real("validation")
    made = [line("real images", model, [first_of(part) for part in real("test")], known)]
    for row, figures in GUIDANCE.items():
        (scale,) = guidance.ROWS[row].scales
        for figure in figures:
            images = drawn(row, CLIENTS, LOOKED_AT, {scale: figure})
            parts = [of(images, (client,)) for client in CLIENTS]
            made.append(line(f"{row}, guidance {figure:g}", model, parts, known))
            print(made[-1], flush=True)
    return made


def in_columns(images: SyntheticSet) -> torch.Tensor:
    """A column for each class, of its first images [3, H, W] uint8."""
    classes = images.labels.unique().tolist()
    columns = [(images.labels == label).nonzero().flatten()[:ROWS] for label in classes]
    rows = torch.stack(columns, dim=1).flatten()
    return make_grid(images.pixels[rows], nrow=len(classes), padding=1, pad_value=255)


def picture_of(client: str) -> torch.Tensor:
    """All rows of a client [3, H, W] uint8."""
    own = of(of_clients(), (client,))
    config = config_of(settings_of("ceiling", SEED))
    sets = [own, reconstructed(own, config)]
    sets += [drawn(row, (client,), ROWS, {}) for row in SHOWN]
    return torch.cat([in_columns(one) for one in sets], dim=1)


def main() -> None:
    """Draw, and keep the picture and the table."""
    parser = command_line(__doc__)
    parser.add_argument("style", nargs="?", choices=DOMAINS, help="none: the table, and paintings")
    given = parser.parse_args()
    make_private_folder(WORK)
    style = given.style or "painting"
    picture = to_pil_image(picture_of(CLIENTS[DOMAINS.index(style)]))
    file = io.BytesIO()
    size = (SCALE * picture.width, SCALE * picture.height)
    picture.resize(size, Image.Resampling.NEAREST).save(file, format="png")
    write_atomically(TABLES / f"styles-{style}.png", file.getvalue())
    if given.style:
        return
    about = (
        "The share (%) of each style's images that a classifier of all clients' real images takes "
        f"for their class, of {LOOKED_AT} of each class: of the test split, and drawn under the "
        "clients' vectors, the styles' names or FedDEO's descriptions, by guidance. Distance: "
        "Fréchet's, of the classifier's features, to the validation split's images; spread: of "
        "images that are taken for their class, the features' squared distance to the class's "
        "mean, in % of the validation split's. One seed; the recipe is benchmarks.main_table's. "
        "Command: `python -m benchmarks.styles`."
    )
    write_table(TABLES / "styles", lines(), about)


if __name__ == "__main__":
    main()
