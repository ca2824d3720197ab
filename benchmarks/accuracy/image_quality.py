"""Measure synthetic images: class fidelity, distance to real images and diversity, by style.

python -m benchmarks.accuracy.image_quality       # the table, and a picture of paintings
python -m benchmarks.accuracy.image_quality neon  # only the picture of another style

The table has images drawn from the clients' vectors, from the styles' names and from FedDEO's
descriptions, by guidance. A classifier trained on all clients' real images by the common recipe
judges them:

- by style, the share of images that it predicts as their class,
- distance: the Fréchet distance of its features to those of the validation split's real images
  (Heusel et al., arXiv 1706.08500, with this network instead of Inception), averaged over styles,
- spread: the squared distance of its features to their class mean, of correctly predicted images,
  in % of the real images' spread; averaged over classes and styles.

The picture has a column for each class, and in pairs of rows a client's training images, their
reconstructions by the kit's autoencoder, and images drawn from its vector and from its style's
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

from benchmarks.accuracy import guidance_scale
from benchmarks.federation import (
    CLIENTS,
    DOMAINS,
    Settings,
    accuracy,
    cell_name,
    client_images,
    config_of,
    images_of,
    payloads_of,
    predictions,
    real_set,
    reconstructed,
    server_job,
    synthesize,
)
from benchmarks.harness import Experiment, Line, average, command_line
from benchmarks.recipe import settings_of
from osfl.data.load import Images
from osfl.models.classifiers import normalize, remove_head
from osfl.util.files import write_atomically
from osfl.util.pixels import to_float
from server_app.pipeline import train_global_model
from server_app.synthesis.images import SyntheticSet

SEED = 0
ROWS = 2
# Enlargement of the picture
SCALE = 3
# Images of each class and client in the table
SAMPLE = 10
GUIDANCE = {
    "domain-vector": (1.0, 1.5, 2.0, 3.0, 4.0),
    "prompts-domain": (2.0, 3.0, 5.0),
    "FedDEO description alone": (2.0,),
}
SHOWN = ("domain-vector", "prompts-domain")
# Principal directions of the distance: a style has few images
DIRECTIONS = 32
BATCH = 200
EXPERIMENT = Experiment(
    __file__,
    caption="The share (%) of each style's images that a classifier of all clients' real images "
    f"predicts as their class, of {SAMPLE} of each class: of the test split, and drawn from the "
    "clients' vectors, the styles' names or FedDEO's descriptions, by guidance. Distance: the "
    "Fréchet distance of the classifier's features to the validation split's images; spread: of "
    "correctly predicted images, the features' squared distance to the class's mean, in % of the "
    "validation split's. One seed; the recipe is benchmarks.accuracy.method_comparison's.",
)


def synthetic_set(row: str, clients: Sequence[str], count: int, changes: Settings) -> SyntheticSet:
    """Return `count` images of each class and client by a row of the recipe, with some changes."""
    settings = {**settings_of(row, SEED), "synthesis.images-per-class": count, **changes}
    every = payloads_of(settings)
    payloads = {client: every[client] for client in clients}
    name = f"styles-{cell_name(settings)}-{clients[0]}"
    return synthesize(server_job(config_of(settings), name, clients), payloads)


def classifier() -> nn.Module:
    """Train a classifier on all clients' real images."""
    settings = settings_of("ceiling", SEED)
    job = server_job(config_of(settings), f"styles-classifier-{cell_name(settings)}")
    (result,) = train_global_model(job, {}, real_set()).values()
    return result.model


def correct(model: nn.Module, images: SyntheticSet | Images) -> torch.Tensor:
    """Return which images [N] are predicted as their class."""
    return predictions(model, images.pixels) == images.labels


@torch.no_grad()
def features_of(model: nn.Module, images: SyntheticSet | Images) -> np.ndarray:
    """Return the input of a classifier's last layer [N, f]."""
    body, _ = remove_head(deepcopy(model))
    parts = torch.arange(len(images.labels)).split(BATCH)
    features = [body(normalize(to_float(images.pixels[rows]), model)) for rows in parts]
    return torch.cat(features).double().numpy()


def frechet_distance(features: np.ndarray, real: np.ndarray) -> float:
    """Return |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)) of two sets of features [N, k], along the
    first principal directions of the real one.
    """
    centered = real - real.mean(axis=0)
    directions = np.linalg.svd(centered, full_matrices=False)[2][:DIRECTIONS].T
    features, real = features @ directions, real @ directions
    covariances = np.cov(features, rowvar=False), np.cov(real, rowvar=False)
    root = sqrtm(covariances[0] @ covariances[1]).real
    apart = features.mean(axis=0) - real.mean(axis=0)
    return float(apart @ apart + np.trace(covariances[0] + covariances[1] - 2 * root))


def spread_within(features: np.ndarray, labels: torch.Tensor, chosen: torch.Tensor) -> float:
    """Return the unbiased squared distance of chosen features [N, f] to their class's mean,
    averaged over the classes that have two.
    """
    spreads = []
    for label in labels.unique().tolist():
        of_class = features[((labels == label) & chosen).numpy()]
        if len(of_class) > 1:
            spreads.append(of_class.var(axis=0, ddof=1).sum())
    return float(np.mean(spreads))


def line(
    name: str,
    model: nn.Module,
    parts: Sequence[SyntheticSet | Images],
    real_parts: Sequence[Images],
) -> Line:
    """Return a row: each style's images beside its real ones, and the averages."""
    columns = {"": name}
    shares, distances, spreads = [], [], []
    for style, images, real in zip(DOMAINS, parts, real_parts, strict=True):
        shares.append(accuracy(model, images))
        columns[style] = f"{shares[-1]:.1f}"
        features, real_features = features_of(model, images), features_of(model, real)
        distances.append(frechet_distance(features, real_features))
        real_spread = spread_within(real_features, real.labels, correct(model, real))
        spread = spread_within(features, images.labels, correct(model, images))
        spreads.append(100 * spread / real_spread)
    columns["average"] = average(shares)
    columns["distance"] = average(distances)
    columns["spread (%)"] = f"{mean(spreads):.0f}"
    return columns


def first_of(images: Images) -> SyntheticSet:
    """Return as many real images of each class as are drawn."""
    columns = [(images.labels == label).nonzero().flatten() for label in images.held()]
    rows = torch.cat([column[:SAMPLE] for column in columns])
    return SyntheticSet(images.pixels[rows], images.labels[rows], ("",) * len(rows))


def lines() -> list[Line]:
    """Return the table, which begins with real images of the test split."""
    model = classifier()
    real = client_images("validation")
    rows = [line("real images", model, [first_of(part) for part in client_images("test")], real)]
    for row, guidances in GUIDANCE.items():
        (scale,) = guidance_scale.ROWS[row].scales
        for guidance in guidances:
            images = synthetic_set(row, CLIENTS, SAMPLE, {scale: guidance})
            parts = [images_of(images, (client,)) for client in CLIENTS]
            rows.append(line(f"{row}, guidance {guidance:g}", model, parts, real))
            print(rows[-1], flush=True)
    return rows


def in_columns(images: SyntheticSet) -> torch.Tensor:
    """Lay out the first images of each class as a column [3, H, W] uint8."""
    classes = images.labels.unique().tolist()
    columns = [(images.labels == label).nonzero().flatten()[:ROWS] for label in classes]
    rows = torch.stack(columns, dim=1).flatten()
    return make_grid(images.pixels[rows], nrow=len(classes), padding=1, pad_value=255)


def picture_of(client: str) -> torch.Tensor:
    """Return all rows of a client [3, H, W] uint8."""
    real = images_of(real_set(), (client,))
    sets = [real, reconstructed(real, config_of(settings_of("ceiling", SEED)))]
    sets += [synthetic_set(row, (client,), ROWS, {}) for row in SHOWN]
    return torch.cat([in_columns(image_set) for image_set in sets], dim=1)


def main() -> None:
    """Write the picture and, unless a style is given, the table."""
    parser = command_line(__doc__)
    parser.add_argument("style", nargs="?", choices=DOMAINS, help="none: the table, and paintings")
    arguments = parser.parse_args()
    style = arguments.style or "painting"
    picture = to_pil_image(picture_of(CLIENTS[DOMAINS.index(style)]))
    size = (SCALE * picture.width, SCALE * picture.height)
    buffer = io.BytesIO()
    picture.resize(size, Image.Resampling.NEAREST).save(buffer, format="png")
    table = EXPERIMENT.table_file()
    write_atomically(table.with_name(f"{table.name}-{style}.png"), buffer.getvalue())
    if not arguments.style:
        EXPERIMENT.write_all(lines())


if __name__ == "__main__":
    main()
