"""Figures of discrimination and calibration as texts, with their intervals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Key, name, factor and format specification of each figure
_FIGURES = (
    ("auroc", "AUROC", 1, ".3f"),
    ("sensitivity", "sensitivity at {specificity:g} % specificity", 100, ".0f"),
    ("ece", "ECE", 100, ".1f"),
    ("brier", "Brier score", 1, ".3f"),
)


@dataclass(frozen=True)
class FigureText:
    """A figure in words and digits.

    Attributes:
        label: its name.
        value: such as `0.981`, or `12.5 %`.
        interval: the 95 % interval, such as `0.970 to 0.990`.
    """

    label: str
    value: str
    interval: str

    def __str__(self) -> str:
        return f"{self.value} ({self.interval})"


def figure_texts(figures: Mapping[str, Any]) -> dict[str, FigureText]:
    """Return the figures of a test by their keys, without those that no image counts for.

    Args:
        figures: of `osfl.metrics.figures`.
    """
    texts = {}
    for key, name, scale, digits in _FIGURES:
        if figure := figures[key]:
            label = name.format(specificity=100 * figures["specificity"])
            texts[key] = _text_of(label, figure, scale, digits)
    return texts


def figure_text(figures: Mapping[str, Any]) -> str:
    """Return the figures of a test with their 95 % intervals, as one line.

    Args:
        figures: of `osfl.metrics.figures`.
    """
    texts = []
    for key, figure in figure_texts(figures).items():
        colon = ":" if key == "sensitivity" else ""
        texts.append(f"{figure.label}{colon} {figure}")
    return ", ".join(texts)


def interval_text(figure: Mapping[str, float] | None, scale: float, digits: str) -> str:
    """Return a figure with its interval, such as `0.981 (0.970 to 0.990)`; "-" for None.

    Args:
        scale: factor of the numbers.
        digits: format specification, such as `.3f`.
    """
    return "-" if figure is None else str(_text_of("", figure, scale, digits))


def _text_of(label: str, figure: Mapping[str, float], scale: float, digits: str) -> FigureText:
    value, low, high = (format(scale * figure[key], digits) for key in ("value", "low", "high"))
    return FigureText(label, f"{value} %" if scale == 100 else value, f"{low} to {high}")
