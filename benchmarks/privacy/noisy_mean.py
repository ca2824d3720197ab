"""Measure how much of a learned vector's benefit survives the noise of a DP guarantee.

python -m benchmarks.privacy.noisy_mean

In each style some validation images learn a vector each, as domain-vector's clients do with
`epsilon`; however many they are, training sees 6,000 images in all. How much better does the
diffusion model denoise other validation images of the style under their noisy mean than under the
class's prompt? 100 % is the benefit of the mean without noise and clipping; below 0 % the prompt is
better. No client's training or test image is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean

import torch

from benchmarks.federation import CLIENTS, CPU, DOMAINS, config_of, node_of
from benchmarks.harness import Experiment, Line, command_line, new_panel, write_figure
from benchmarks.recipe import settings_of
from client_app.audit.attacks import denoising_errors
from client_app.context import ClientJob
from client_app.learning.conditions import load_kit_for_training, posteriors
from client_app.methods.domain_vector import noisy_mean, vector_per_image
from osfl.config import RunConfig
from osfl.data.load import Images, load_images
from osfl.kit.kits import find_kit
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit
from osfl.util.prompts import DIGITS
from osfl.util.seeds import generator_of

ROW = "domain-vector, one for all tokens, epsilon 1"
# Of a style's 300 validation images, those that test
HELD_OUT = 100
DRAWS = 3
# Images that the training of all vectors together sees
SEEN = 6000
COUNTS = (30, 100, 200)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CLIPS = (0.5, 1.0, 1.5, 2.0, 3.0)
CLIP = 1.5
EXPERIMENT = Experiment(
    __file__,
    caption="How much of a clean mean vector's benefit in denoising error over the class's prompt "
    f"a noisy mean keeps: {HELD_OUT} other validation images of each of the digits' six styles, "
    f"{DRAWS} draws of the noise; delta = 1e-5.",
)


@dataclass(frozen=True)
class Point:
    """The settings of a noisy mean."""

    tokens: str
    count: int
    epsilon: float
    clip: float

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.tokens}-{self.count}-{self.epsilon:g}-{self.clip:g}"


POINTS = (
    *(Point("all", 100, 1.0, clip) for clip in CLIPS),
    *(Point("all", count, epsilon, CLIP) for count in COUNTS for epsilon in EPSILONS),
    *(Point("each", 200, epsilon, CLIP) for epsilon in EPSILONS),
)


@dataclass(frozen=True, eq=False)
class Style:
    """A style's validation images, and the job that learns from them."""

    number: int
    kit: Kit
    job: ClientJob
    # In random order
    images: Images

    @property
    def prompts(self) -> Conditioning:
        """Return the conditions of all classes' prompts."""
        return self.kit.text(self.job.config.prompts(self.job.classes))


def style_of(number: int) -> Style:
    """Return the style of a client."""
    config = config_of(settings_of(ROW, 0))
    job = ClientJob(
        config, CLIENTS[number], DIGITS, lambda fit: images, find_kit(config.sampling_kit), CPU
    )
    kit = load_kit_for_training(job)
    every = load_images(
        config.data, node_of(number, config), "validation", config.seed, kit.image_size
    )
    order = torch.randperm(len(every), generator=generator_of(config.seed, "noise", number))
    images = Images(every.pixels[order], every.labels[order])
    return Style(number, kit, job, images)


def learned(style: Style, count: int) -> torch.Tensor:
    """Return the vectors [count, L, d] that the first images learn one by one."""

    def compute() -> torch.Tensor:
        images = Images(style.images.pixels[:count], style.images.labels[:count])
        latents, logvar = posteriors(style.kit, images, style.job)
        settings = replace(style.job.config.domain_vector, epochs=-(-SEEN // count))
        job = replace(style.job, config=replace(style.job.config, domain_vector=settings))
        return vector_per_image(style.kit, images, latents, logvar, job)

    vectors: torch.Tensor = EXPERIMENT.tensors(f"vectors-{style.number}-{count}", compute)
    return vectors


def error_under(style: Style, vector: torch.Tensor) -> float:
    """Return the denoising error of the held-out images under prompts plus a vector."""
    images = Images(style.images.pixels[-HELD_OUT:], style.images.labels[-HELD_OUT:])
    latents, _ = posteriors(style.kit, images, style.job)
    prompts = style.prompts[images.labels]
    conditions = prompts.with_states(prompts.states + vector)
    return float(denoising_errors(style.kit, latents, conditions, style.job).mean())


@cache
def bounds(style: Style, tokens: str, count: int) -> tuple[float, float]:
    """Return the errors under the prompts alone, and with the clean mean."""
    clean = learned(style, count).mean(dim=0)
    if tokens == "all":
        clean = clean.mean(dim=0, keepdim=True)
    return error_under(style, torch.zeros_like(clean)), error_under(style, clean)


def benefits(style: Style, point: Point) -> list[float]:
    """Return the share (%) of the benefit that each draw of the noise leaves."""
    vectors = learned(style, point.count)
    config = with_point(style.job.config, point)
    prompt, best = bounds(style, point.tokens, point.count)
    prompts = style.prompts.states.cpu()
    noisy = [noisy_mean(vectors, prompts, config) for _ in range(DRAWS)]
    return [100 * (prompt - error_under(style, vector)) / (prompt - best) for vector in noisy]


def with_point(config: RunConfig, point: Point) -> RunConfig:
    """Return a configuration with the settings of a point."""
    settings = replace(config.domain_vector, tokens=point.tokens)
    return replace(config, domain_vector=settings, epsilon=point.epsilon, clip_norm=point.clip)


def measure(points: Sequence[Point]) -> dict[Point, list[list[float]]]:
    """Return the shares of every style at every point."""
    shares: dict[Point, list[list[float]]] = {point: [] for point in points}
    for number in range(len(DOMAINS)):
        style = style_of(number)
        for point in points:
            name = f"{number}-{point.name}"
            shares[point].append(EXPERIMENT.cell(name, partial(benefits, style, point)))
    return shares


def line(point: Point, shares: Sequence[Sequence[float]]) -> Line:
    """Return a row of the table."""
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


def plot(shares: dict[Point, list[list[float]]]) -> None:
    """Plot the share against epsilon, a curve for each number of images."""
    figure, panel = new_panel()
    curves = dict.fromkeys((point.tokens, point.count) for point in shares if point.clip == CLIP)
    for tokens, count in curves:
        of_curve = [p for p in shares if (p.tokens, p.count, p.clip) == (tokens, count, CLIP)]
        of_curve = sorted(set(of_curve), key=lambda point: point.epsilon)
        values = [mean(map(mean, shares[point])) for point in of_curve]
        name = "one vector for all tokens" if tokens == "all" else "one for each token"
        epsilons = [point.epsilon for point in of_curve]
        panel.plot(epsilons, values, marker="o", label=f"{count} images, {name}")
    panel.axhline(0, color="0.6", linewidth=1)
    panel.set(xlabel="epsilon", ylabel="gain kept (%)", xscale="log", ylim=(-100, 110))
    panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    write_figure(EXPERIMENT.table_file(), figure)


def main() -> None:
    """Make the table and the plot."""
    command_line(__doc__).parse_args()
    shares = measure(POINTS)
    EXPERIMENT.write_all(line(*entry) for entry in shares.items())
    plot(shares)


if __name__ == "__main__":
    main()
