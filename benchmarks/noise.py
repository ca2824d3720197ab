"""What a guarantee's noise leaves of a domain's vector; to benchmarks/tables/noise.{md,json,png}.

python -m benchmarks.noise

Of each style's validation images some learn a vector each, as domain-vector's clients do with
`epsilon`; however many they are, they see 6,000 images in their training together. How much better
does the diffusion model denoise other validation images of the style under their noised mean than
under the class's prompt? 100 % is what the mean without noise and without clipping gives; below 0 %
the prompt is better. Nobody's training or test images are looked at. Interrupted, the same command
goes on.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

import torch

from benchmarks import TABLES, command_line, write_figure, write_table
from benchmarks.clients import CLIENTS, DOMAINS
from benchmarks.main_table import config_of, settings_of
from client_app.audit.attacks import denoising_errors
from client_app.context import ClientJob
from client_app.learning.conditions import load_kit_for_training, posteriors
from client_app.methods.domain_vector import noisy_mean, vector_per_image
from osfl.config import NodeConfig, RunConfig
from osfl.data.load import Images, load_images
from osfl.kit.kits import find_kit
from osfl.models.diffusion import Kit
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.prompts import DIGITS
from osfl.util.seeds import generator_of

WORK = Path(__file__).resolve().parent.parent / "runs" / "noise"
ROW = "domain-vector, one for all tokens, epsilon 1"
CPU = torch.device("cpu")
# Of 300 validation images of a style, so many are left to look at
LOOKED_AT = 100
DRAWS = 3
# In the training of all together
SEEN = 6000
COUNTS = (30, 100, 200)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CLIPS = (0.5, 1.0, 1.5, 2.0, 3.0)
CLIP = 1.5


@dataclass(frozen=True)
class Point:
    """Under which settings a mean is noised."""

    tokens: str
    count: int
    epsilon: float
    clip: float

    @property
    def name(self) -> str:
        """Its file's."""
        return f"{self.tokens}-{self.count}-{self.epsilon:g}-{self.clip:g}"


POINTS = (
    *(Point("all", 100, 1.0, clip) for clip in CLIPS),
    *(Point("all", count, epsilon, CLIP) for count in COUNTS for epsilon in EPSILONS),
    *(Point("each", 200, epsilon, CLIP) for epsilon in EPSILONS),
)


@dataclass(frozen=True, eq=False)
class Style:
    """One style's validation images, and what they learn from."""

    number: int
    kit: Kit
    job: ClientJob
    # In a random order
    images: Images

    @property
    def prompts(self) -> torch.Tensor:
        """Encodings of all classes' prompts [C, L, d]."""
        return self.kit.text(self.job.config.prompts(self.job.classes))


def style_of(number: int) -> Style:
    """A style, by its client's number."""
    config = config_of(settings_of(ROW, 0))
    node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
    job = ClientJob(
        config, CLIENTS[number], DIGITS, lambda fit: images, find_kit(config.sampling_kit), CPU
    )
    kit = load_kit_for_training(job)
    found = load_images(config.data, node, "validation", config.seed, kit.image_size)
    order = torch.randperm(len(found), generator=generator_of(config.seed, "noise", number))
    images = Images(found.pixels[order], found.labels[order])
    return Style(number, kit, job, images)


def learned(style: Style, count: int) -> torch.Tensor:
    """What each of the first images learns by itself [count, L, d]; kept on disk."""
    file = WORK / f"vectors-{style.number}-{count}.pt"
    if not file.is_file():
        own = Images(style.images.pixels[:count], style.images.labels[:count])
        latents, logvar = posteriors(style.kit, own, style.job)
        settings = replace(style.job.config.domain_vector, epochs=-(-SEEN // count))
        job = replace(style.job, config=replace(style.job.config, domain_vector=settings))
        whole = io.BytesIO()
        torch.save(vector_per_image(style.kit, own, latents, logvar, job), whole)
        write_atomically(file, whole.getvalue())
    return torch.load(file, weights_only=True)


def error_under(style: Style, moved: torch.Tensor) -> float:
    """The denoising error of the last images under prompts that a vector moves."""
    own = Images(style.images.pixels[-LOOKED_AT:], style.images.labels[-LOOKED_AT:])
    latents, _ = posteriors(style.kit, own, style.job)
    conditions = style.prompts[own.labels] + moved
    return float(denoising_errors(style.kit, latents, conditions, style.job).mean())


@cache
def ends(style: Style, tokens: str, count: int) -> tuple[float, float]:
    """The errors under the prompts alone, and with the mean as it is."""
    clean = learned(style, count).mean(dim=0)
    if tokens == "all":
        clean = clean.mean(dim=0, keepdim=True)
    return error_under(style, torch.zeros_like(clean)), error_under(style, clean)


def kept(style: Style, point: Point) -> list[float]:
    """Shares of the gain that the draws of the noise leave (%)."""
    vectors = learned(style, point.count)
    config = at(style.job.config, point)
    prompt, best = ends(style, point.tokens, point.count)
    gain = prompt - best
    prompts = style.prompts.cpu()
    noised = [noisy_mean(vectors, prompts, config) for _ in range(DRAWS)]
    return [100 * (prompt - error_under(style, vector)) / gain for vector in noised]


def at(config: RunConfig, point: Point) -> RunConfig:
    """The settings of a point."""
    settings = replace(config.domain_vector, tokens=point.tokens)
    return replace(config, domain_vector=settings, epsilon=point.epsilon, clip_norm=point.clip)


def measured(points: Sequence[Point]) -> dict[Point, list[list[float]]]:
    """Of every point, for each style the shares; what is in `WORK` is there already."""
    found: dict[Point, list[list[float]]] = {point: [] for point in points}
    for number, domain in enumerate(DOMAINS):
        style = style_of(number)
        for point in points:
            file = WORK / f"{number}-{point.name}.json"
            if not file.is_file():
                write_atomically(file, json.dumps(kept(style, point)).encode())
                print(domain, point.name, file.read_text(), flush=True)
            found[point].append(json.loads(file.read_text()))
    return found


def line(point: Point, shares: Sequence[Sequence[float]]) -> dict[str, str]:
    """A row of the table."""
    by_style = [mean(draws) for draws in shares]
    every = [share for draws in shares for share in draws]
    return {
        "vectors": "one for all tokens" if point.tokens == "all" else "one for each token",
        "images": str(point.count),
        "epsilon": f"{point.epsilon:g}",
        "clip-norm": f"{point.clip:g}",
        "gain kept (%)": f"{mean(every):.0f}",
        "worst style": f"{min(by_style):.0f}",
        "worst draw": f"{min(every):.0f}",
    }


def plot(found: dict[Point, list[list[float]]], file: Path) -> None:
    """The share that is kept against epsilon, a curve for each number of images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    panel = figure.subplots()
    curves = dict.fromkeys((point.tokens, point.count) for point in found if point.clip == CLIP)
    for tokens, count in curves:
        own = [p for p in found if (p.tokens, p.count, p.clip) == (tokens, count, CLIP)]
        own = sorted(set(own), key=lambda point: point.epsilon)
        shares = [mean(map(mean, found[point])) for point in own]
        name = "one vector for all tokens" if tokens == "all" else "one for each token"
        epsilons = [point.epsilon for point in own]
        panel.plot(epsilons, shares, marker="o", label=f"{count} images, {name}")
    panel.axhline(0, color="0.6", linewidth=1)
    panel.set(xlabel="epsilon", ylabel="gain kept (%)", xscale="log", ylim=(-100, 110))
    panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    write_figure(file, figure)


def main() -> None:
    """Make the table and the plot, and keep them."""
    command_line(__doc__).parse_args()
    make_private_folder(WORK)
    found = measured(POINTS)
    about = (
        "How much of what a clean mean of learned vectors gains in denoising error over the "
        f"class's prompt a noised one keeps: {LOOKED_AT} other validation images of each of the "
        f"digits' six styles, {DRAWS} draws of the noise; delta = 1e-5. "
        "Command: `python -m benchmarks.noise`."
    )
    write_table(TABLES / "noise", [line(*one) for one in found.items()], about)
    plot(found, TABLES / "noise.png")


if __name__ == "__main__":
    main()
