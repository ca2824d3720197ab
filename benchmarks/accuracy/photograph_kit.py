"""Measure how well kits of photographs draw the classes of PACS, by training steps and guidance.

osfl kit train configs/kits/photographs.toml data-root=/data --export
python -m benchmarks.accuracy.photograph_kit --pacs /data/pacs --lite /data/lite0 KIT...

A classifier judges drawn images: FedCGS' head of all real training images of PACS on the features
of EfficientNet-Lite0, whose weights benchmarks.tools.efficientnet_lite writes. The kits were
trained on other images.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.federation import (
    Settings,
    accuracy,
    cell_name,
    config_of,
    node_of,
    payloads_of,
    server_job,
    synthesize,
)
from benchmarks.harness import ROOT, Experiment, Line, average, command_line
from osfl.config import RunConfig
from osfl.config.toml import read_toml
from osfl.data.load import Images, load_images
from osfl.data.parts import class_names
from osfl.kit.kits import kit_digest
from osfl.methods import DIFFUSION_PARTS, server_module
from osfl.payload.kinds import Domain
from osfl.settings import flatten_toml
from server_app.synthesis.images import SyntheticSet

WORLD = ROOT / "configs" / "worlds" / "pacs.toml"
# What a domain's images are called. Clients have their folders' names, in alphabetical order.
DOMAINS = {
    "art_painting": "an art painting",
    "cartoon": "a cartoon",
    "photo": "a photo",
    "sketch": "a sketch",
}
# Of the kit with the longest training, and of the others
GUIDANCE = (1.0, 2.0, 3.0, 5.0)
CURVE_GUIDANCE = (3.0,)
IMAGES = 30
SEED = 0
EXPERIMENT = Experiment(
    __file__,
    caption="The share (%) of images that a classifier of all real training images of PACS (FedCGS "
    "on EfficientNet-Lite0, 64 px) assigns to their class: real test images, and images that a "
    f"kit drew from the class's and the domain's name alone, {IMAGES} per class in 20 steps, by "
    "the samples that its UNet was trained on and guidance. Chance: 14.3.",
    options="--pacs FOLDER --lite FOLDER KIT...",
)


def common_settings(pacs: str, lite: str) -> Settings:
    """Return the settings of PACS at 64 px, and of the classifier's frozen network."""
    return {
        **flatten_toml(read_toml(WORLD)),
        "seed": SEED,
        "data.root": pacs,
        "classifier.architecture": "timm:tf_efficientnet_lite0",
        "classifier.init": lite,
        "classifier.small-stem": False,
    }


def judge(common: Settings) -> nn.Module:
    """Return FedCGS' model of all real training images."""
    settings = {**common, "method": "fedcgs"}
    payloads = payloads_of(settings)
    job = server_job(config_of(settings), f"judge-{cell_name(settings)}", tuple(payloads))
    (result,) = server_module("fedcgs").run(job, payloads).values()
    model: nn.Module = result.model
    return model


def real_images(config: RunConfig) -> list[Images]:
    """Return the real test images of every domain."""
    return [
        load_images(config.data, node_of(number, config), "test", SEED)
        for number in range(len(DOMAINS))
    ]


def drawn_images(common: Settings, kit: Path, domain: str, guidance: float) -> SyntheticSet:
    """Return the images that a kit draws of every class in a domain."""
    settings = {
        **common,
        "method": "prompts-domain",
        "kit": str(kit.resolve()),
        "prompts-domain.prompt": "{domain} of a {class}",
        "prompts-domain.guidance": guidance,
        "synthesis.images-per-class": IMAGES,
        "synthesis.unit-size": 105,
    }
    config = config_of(settings)
    name = f"kit-{cell_name(settings)}-{domain}-{kit_digest(str(kit), DIFFUSION_PARTS)[:8]}"
    payload = Domain(class_names(config.data), DOMAINS[domain])
    return synthesize(server_job(config, name, (domain,)), {domain: payload})


def line(name: str, model: nn.Module, parts: Sequence[SyntheticSet | Images]) -> Line:
    """Return a row: the accuracy of each domain's images, and the average."""
    shares = [accuracy(model, images) for images in parts]
    columns = {domain: f"{share:.1f}" for domain, share in zip(DOMAINS, shares, strict=True)}
    return {"": name, **columns, "average": average(shares)}


def trained_samples(kit: Path) -> int:
    """Return the number of latents that a kit's UNet was trained on."""
    log: dict[str, Any] = json.loads((kit / "training.json").read_text())
    return int(log["stages"]["unet"]["steps"] * log["recipe"]["unet"]["batch"])


def lines(common: Settings, kits: Sequence[Path]) -> Iterator[Line]:
    """Yield the row of real images, and one for each kit and guidance."""
    model = judge(common)
    yield line("real images", model, real_images(config_of({**common, "method": "fedcgs"})))
    *earlier, last = sorted(kits, key=trained_samples)
    for kit in (*earlier, last):
        for guidance in GUIDANCE if kit == last else CURVE_GUIDANCE:
            parts = [drawn_images(common, kit, domain, guidance) for domain in DOMAINS]
            name = f"{trained_samples(kit):,} samples, guidance {guidance:g}"
            yield line(name, model, parts)


def main() -> None:
    """Write the table of the kits that the command line names."""
    parser = command_line(__doc__)
    parser.add_argument("kits", nargs="+", type=Path)
    parser.add_argument("--pacs", required=True, help="the folder of PACS")
    parser.add_argument("--lite", required=True, help="the folder of EfficientNet-Lite0's weights")
    arguments = parser.parse_args()
    common = common_settings(arguments.pacs, arguments.lite)
    EXPERIMENT.write_all(list(lines(common, arguments.kits)))


if __name__ == "__main__":
    main()
