"""Render handwritten digits in six styles: photo, clipart, sketch, painting, neon, infograph.

A style is a function of an ink map and a `Look`: the parameters (hues, stroke, clutter, ...) that
vary within the style. The public corpus samples them from the whole style, and each client from a
narrow slice, which no caption describes. The slices make the clients' features differ, as scanners
do among hospitals.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from PIL import Image, ImageFilter

from osfl.util.prompts import DIGITS

SIZE = 32
Array = np.ndarray


@dataclass(frozen=True)
class Look:
    """The parameters that vary within a style, each in [0, 1].

    Attributes:
        hue: of the background.
        ink_hue: of the digit.
        light: brightness of the background.
        stroke: thickness of the digit.
        texture: strength of the style's texture or clutter.
        angle: direction of light, hatching or brush.
    """

    hue: float
    ink_hue: float
    light: float
    stroke: float
    texture: float
    angle: float


# (low, high) for each parameter of `Look`
Ranges = Mapping[str, tuple[float, float]]

WHOLE_STYLE: Ranges = {field.name: (0.0, 1.0) for field in fields(Look)}


def _slice(
    hue: float, ink_hue: float, light: float, stroke: float, texture: float, angle: float
) -> Ranges:
    """Return a slice of a style that is 0.1 wide in each parameter, around the given center."""
    return {
        k: (v - 0.05, v + 0.05)
        for k, v in asdict(Look(hue, ink_hue, light, stroke, texture, angle)).items()
    }


# One slice per domain, chosen once by hand; changing one would change all results in the README
DOMAIN_SLICES: dict[str, Ranges] = {
    "photo": _slice(hue=0.60, ink_hue=0.65, light=0.15, stroke=0.75, texture=0.85, angle=0.15),
    "clipart": _slice(hue=0.14, ink_hue=0.65, light=0.85, stroke=0.85, texture=0.90, angle=0.50),
    "sketch": _slice(hue=0.10, ink_hue=0.50, light=0.25, stroke=0.45, texture=0.85, angle=0.28),
    "painting": _slice(hue=0.33, ink_hue=0.80, light=0.28, stroke=0.75, texture=0.75, angle=0.68),
    "neon": _slice(hue=0.75, ink_hue=0.49, light=0.50, stroke=0.25, texture=0.80, angle=0.40),
    "infograph": _slice(hue=0.50, ink_hue=0.03, light=0.75, stroke=0.55, texture=0.75, angle=0.50),
}
STYLES: tuple[str, ...] = tuple(DOMAIN_SLICES)
CLASSES = DIGITS


def draw_look(ranges: Ranges, rng: np.random.Generator) -> Look:
    """Sample a look uniformly from `ranges`."""
    return Look(**{name: rng.uniform(low, high) for name, (low, high) in ranges.items()})


def render(source: Array, style: str, ranges: Ranges, rng: np.random.Generator) -> Array:
    """Render one digit.

    Args:
        source: [8, 8] ink in [0, 1], a scan from scikit-learn's digits.
        style: one of `STYLES`.
        ranges: of the look (`WHOLE_STYLE` or a domain's slice).
        rng: the only source of randomness.

    Returns:
        [32, 32, 3] uint8 RGB.
    """
    look = draw_look(ranges, rng)
    image = _DRAW[style](_place(source, style, rng), look, rng)
    rendered: Array = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    return rendered


def _place(source: Array, style: str, rng: np.random.Generator) -> Array:
    """Return the ink map at 32 px, with a small random rotation, scale, shear and shift."""
    scan = Image.fromarray((np.pad(source, 1) * 255).astype(np.uint8)).resize(
        (SIZE, SIZE), Image.Resampling.BICUBIC
    )
    angle = np.deg2rad(rng.uniform(-10, 10))
    shear = rng.uniform(-0.12, 0.12)
    scale = rng.uniform(0.85, 1.05) * (1.15 if style == "infograph" else 1.0)
    shift = rng.uniform(-2, 2, size=2)
    a = np.cos(angle) * scale
    b = (np.sin(angle) + shear) * scale
    c = -np.sin(angle) * scale
    d = np.cos(angle) * scale
    mid = SIZE / 2
    matrix = (a, b, mid - a * mid - b * mid + shift[0], c, d, mid - c * mid - d * mid + shift[1])
    moved = scan.transform((SIZE, SIZE), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    return np.asarray(moved, dtype=np.float64) / 255


def _hsv(hue: float | Array, saturation: float, value: float) -> Array:
    """Convert a color to RGB [3], or a plane of hues to [H, W, 3]."""
    k = (np.array([5.0, 3.0, 1.0]) + np.asarray(hue)[..., None] * 6) % 6
    color: Array = value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1)
    return color


def _blur(plane: Array, radius: float) -> Array:
    image = Image.fromarray((np.clip(plane, 0, 1) * 255).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float64) / 255


def _cloud(rng: np.random.Generator, cells: tuple[int, int]) -> Array:
    """Return smooth noise in [0, 1]: a coarse random grid, upscaled."""
    grid = Image.fromarray((rng.random(cells) * 255).astype(np.uint8))
    return np.asarray(grid.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.float64) / 255


def _edge(ink: Array, threshold: float, sharpness: float) -> Array:
    return 1 / (1 + np.exp(-(ink - threshold) * sharpness))


def _mix(mask: Array, over: Array, under: Array) -> Array:
    mixture: Array = mask[..., None] * over + (1 - mask[..., None]) * under
    return mixture


_Y, _X = np.mgrid[0:SIZE, 0:SIZE] / (SIZE - 1)


def _along(angle: float) -> Array:
    """Return a coordinate in [-1, 1] that grows in the direction `angle` (1 is a full turn)."""
    x = (_X - 0.5) * 2
    y = (_Y - 0.5) * 2
    coordinate: Array = x * np.cos(2 * np.pi * angle) + y * np.sin(2 * np.pi * angle)
    return coordinate


def _photo(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw dark ink on paper under uneven light, with camera blur and grain."""
    paper = _hsv(look.hue, 0.18, 0.60 + 0.38 * look.light)
    pen = _hsv(look.ink_hue, 0.45, 0.22)
    light = (
        1 + (0.10 + 0.18 * look.texture) * _along(look.angle) + 0.12 * (_cloud(rng, (5, 5)) - 0.5)
    )
    mask = _blur(_edge(ink, 0.50 - 0.22 * look.stroke, 9), 0.5 + 0.4 * look.texture)
    return _mix(0.92 * mask, pen, paper) * light[..., None] + rng.normal(0, 0.02, (SIZE, SIZE, 1))


def _clipart(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw a bright body with a dark outline in flat saturated colors, on a flat shape."""
    background = np.ones((SIZE, SIZE, 3)) * _hsv(look.hue, 0.55, 0.65 + 0.35 * look.light)
    # A sunburst of two tones
    if look.texture > 0.5:
        burst = np.sin(np.arctan2(_Y - 0.5, _X - 0.5) * 8 + look.angle * 6.28) > 0
        background = _mix(0.35 * burst, np.ones(3), background)
    threshold = 0.42 - 0.16 * look.stroke
    outline = _edge(ink, threshold - 0.16, 24)
    body = _edge(ink, threshold + 0.14, 24)
    return _mix(body, _hsv(look.ink_hue, 0.85, 0.95), _mix(outline, np.full(3, 0.05), background))


def _sketch(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw a pencil contour with hatching on pale paper."""
    dy, dx = np.gradient(_blur(ink, 0.6))
    contour = np.clip(np.hypot(dx, dy) * (3.0 + 3.0 * look.stroke), 0, 1) * (
        0.75 + 0.25 * _cloud(rng, (9, 9))
    )
    hatch = 0.5 + 0.5 * np.sin(_along(look.angle) * (16 + 10 * look.texture))
    graphite = np.clip(contour + 0.75 * look.texture * hatch * _edge(ink, 0.4, 12), 0, 1)
    paper = _hsv(look.hue, 0.10, 0.80 + 0.18 * look.light) * (
        1 - 0.06 * _cloud(rng, (16, 16))[..., None]
    )
    return _mix(0.9 * graphite, np.full(3, 0.25 - 0.15 * look.stroke), paper)


def _painting(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw two brushed pigments, with streaks in one direction, varying hues and a wobbly edge."""
    streak = _cloud(rng, (3, 14)) if np.cos(4 * np.pi * look.angle) > 0 else _cloud(rng, (14, 3))
    wander = 0.16 * (_cloud(rng, (4, 4)) - 0.5)
    value = 0.45 + 0.35 * look.light + 0.35 * look.texture * (streak - 0.5)
    ground = _hsv(look.hue + wander, 0.6, 1.0) * value[..., None]
    wobble = ink + 0.22 * (_cloud(rng, (8, 8)) - 0.5)
    mask = _edge(wobble, 0.46 - 0.16 * look.stroke, 10)
    # Always different from the background's hue
    ink_hue = look.hue + 0.30 + 0.40 * look.ink_hue
    pigment = _hsv(ink_hue, 0.65, 0.9) * (0.75 + 0.5 * look.texture * (streak.T[..., None] - 0.25))
    return _mix(0.95 * mask, pigment, ground)


def _neon(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw a glowing tube in the dark: halo, colored tube, white core."""
    tube = _edge(ink, 0.62 - 0.18 * look.stroke, 14)
    halo = _blur(tube, 3.0) * (0.8 + 0.6 * look.light)
    wall = _hsv(look.hue, 0.8, 0.10 + 0.14 * look.light) * (
        0.6 + 0.4 * _cloud(rng, (6, 6))[..., None]
    )
    # A brick wall in the background
    if look.texture > 0.5:
        joints = (
            ((np.arange(SIZE) % 6 == 0)[:, None])
            | ((np.arange(SIZE) % 10 == int(look.angle * 10))[None, :])
        )
        wall = wall * (1 - 0.5 * joints[..., None])
    color = _hsv(look.ink_hue, 0.9, 1.0)
    core = _edge(ink, 0.80 - 0.14 * look.stroke, 18)
    glow = halo[..., None] * color
    scene: Array = wall + glow + tube[..., None] * color * 0.5 + core[..., None] * 0.6
    return scene


def _infograph(ink: Array, look: Look, rng: np.random.Generator) -> Array:
    """Draw a light numeral on a colored card, on a bar chart with grid lines."""
    page = np.ones((SIZE, SIZE, 3)) * _hsv(look.hue, 0.12, 0.97)
    page[np.arange(SIZE) % 5 == 0] *= 0.90
    heights = rng.uniform(0.1, 0.2 + 0.7 * look.texture, size=8)
    bars = np.repeat(heights, SIZE // 8)[None, :] > (1 - _Y)
    page = _mix(bars * (np.arange(SIZE) % 4 != 3)[None, :], _hsv(look.hue + 0.08, 0.5, 0.85), page)
    half = 0.34 + 0.08 * look.light
    card = (np.abs(_X - 0.5) < half) & (np.abs(_Y - 0.5) < half)
    page = _mix(0.88 * card, _hsv(look.ink_hue, 0.70, 0.45 + 0.25 * look.light), page)
    return _mix(_edge(ink, 0.50 - 0.18 * look.stroke, 14), np.full(3, 0.97), page)


_DRAW: dict[str, Callable[[Array, Look, np.random.Generator], Array]] = {
    "photo": _photo,
    "clipart": _clipart,
    "sketch": _sketch,
    "painting": _painting,
    "neon": _neon,
    "infograph": _infograph,
}
