"""Whether what a kit draws for a client shows its class, style by style; to
benchmarks/tables/styles.{md,json} and styles-painting.png.

python -m benchmarks.styles             # the table, and paintings to look at
python -m benchmarks.styles neon        # of another style the picture alone

The table: of images drawn under the clients' vectors (domain-vector) and under the styles' names
(prompts-domain), the share that a classifier takes for their class, by guidance. The classifier has
learned all clients' real images by the recipe of benchmarks.main_table. The picture: a column for
each class, and in pairs of rows a client's training images, the same as the kit's autoencoder gives
them back, and what is drawn under its vector and under its style's name.
"""

import io
from collections.abc import Sequence
from statistics import mean

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from benchmarks import TABLES, command_line, write_table
from benchmarks.clients import CLIENTS, DOMAINS, Settings, folder_name, sent
from benchmarks.lacks import real
from benchmarks.main_table import WORK, config_of, settings_of
from benchmarks.poison import of
from benchmarks.server import drawn_by, job_in
from benchmarks.switches import of_clients, reconstructed
from osfl.data.load import Images
from osfl.files import private_folder, write_atomically
from osfl.models.classifiers import logits_of
from server_app.driver import train_one
from server_app.synthesis.images import SyntheticSet

SEED = 0
ROWS = 2
# Of a digit's side
SCALE = 3
# Images of each class and client that are looked at by the classifier
LOOKED_AT = 10
GUIDANCE = {"domain-vector": (1.0, 1.5, 2.0, 3.0, 4.0), "prompts-domain": (2.0, 3.0, 5.0)}
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
    (model,) = train_one(job, {}, of_clients()).values()
    return model.model


def share_seen(model: nn.Module, images: SyntheticSet | Images) -> float:
    """Of images, those that a classifier takes for their class (%)."""
    said = logits_of(model, images.pixels, CPU).argmax(dim=1)
    return 100 * (said == images.labels).double().mean().item()


def line(name: str, model: nn.Module, parts: Sequence[SyntheticSet]) -> dict[str, str]:
    """A row of the table: each client's images, and all."""
    shares = [share_seen(model, part) for part in parts]
    made = {"": name}
    made |= {style: f"{share:.1f}" for style, share in zip(DOMAINS, shares, strict=True)}
    return {**made, "average": f"{mean(shares):.1f}"}


def lines() -> list[dict[str, str]]:
    """The table, with the validation split's real images first."""
    model = classifier()
    real_ones = [
        SyntheticSet(part.pixels, part.labels, (client,) * len(part))
        for client, part in zip(CLIENTS, real("validation"), strict=True)
    ]
    made = [line("real images", model, real_ones)]
    for row, figures in GUIDANCE.items():
        for guidance in figures:
            images = drawn(row, CLIENTS, LOOKED_AT, {f"{row}.guidance": guidance})
            parts = [of(images, (client,)) for client in CLIENTS]
            made.append(line(f"{row}, guidance {guidance:g}", model, parts))
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
    sets += [drawn(row, (client,), ROWS, {}) for row in GUIDANCE]
    return torch.cat([in_columns(one) for one in sets], dim=1)


def main() -> None:
    """Draw, and keep the picture and the table."""
    parser = command_line(__doc__)
    parser.add_argument("style", nargs="?", choices=DOMAINS, help="none: the table, and paintings")
    given = parser.parse_args()
    private_folder(WORK)
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
        f"for their class: the validation split's, and {LOOKED_AT} of each class that are drawn "
        "under the clients' vectors or the styles' names, by guidance. One seed; the recipe is "
        "benchmarks.main_table's. Command: `python -m benchmarks.styles`."
    )
    write_table(TABLES / "styles", lines(), about)


if __name__ == "__main__":
    main()
