"""Training curves as lines in a square of 100 units, whose corner is above on the left."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

SIDE = 100.0


@dataclass(frozen=True)
class Curve:
    """A training's loss by step.

    Attributes:
        model: the model that was trained.
        first, last: the first and the last (step, loss).
        lowest, highest: the losses at the lower and the upper edge.
        line: the points for an SVG polyline.
    """

    model: str
    first: tuple[float, float]
    last: tuple[float, float]
    lowest: float
    highest: float
    line: Markup


def draw_curve(model: str, points: Sequence[tuple[float, float]]) -> Curve:
    """Draw a curve from step 0 to the last, and from a loss of 0, or less if it is less.

    Args:
        points: at least one (step, loss).
    """
    lowest = min(0.0, *(loss for _, loss in points))
    highest = max(loss for _, loss in points)
    height = (highest - lowest) or 1.0
    width = max(step for step, _ in points) or 1.0
    corners = [(SIDE * step / width, SIDE * (highest - loss) / height) for step, loss in points]
    # Only numbers, in a text that may be long
    line = Markup(" ".join(f"{x:.2f},{y:.2f}" for x, y in corners))
    return Curve(model, points[0], points[-1], lowest, highest, line)
