"""Two runs side by side: settings that differ, figures, images of the same client and class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from osfl.metrics import SCORE_FIGURES
from osfl.run_folder.observation import ObservedRun, Picture, Pictures
from osfl.ui.figures import AVERAGE, Figures, figures_of

# The run's name, by which every two runs differ
NAME_KEY = "job-id"


@dataclass(frozen=True)
class Pair:
    """The values of two runs; None where a run has none."""

    name: str
    first: Any
    second: Any

    @property
    def difference(self) -> float | None:
        """The second number minus the first."""
        if self.first is None or self.second is None:
            return None
        return float(self.second - self.first)


def compare_runs(
    first: ObservedRun, second: ObservedRun, most_clients: int, most_classes: int
) -> Mapping[str, Any]:
    """Gather the values of the page that compares two runs.

    Args:
        most_clients, most_classes: whose images are shown.
    """
    runs = (first, second)
    figures = [figures_of(run.metrics()) for run in runs]
    pictures = [run.pictures() for run in runs]
    classes = _shared_order(pictures[0].classes, pictures[1].classes)[:most_classes]
    clients = sorted(set(pictures[0].first) | set(pictures[1].first))
    return {
        "names": [run.name for run in runs],
        "summaries": [run.summary() for run in runs],
        "figures": figures,
        "score_keys": [key for key in SCORE_FIGURES if any(key in each.scores for each in figures)],
        "settings": differing_settings(first.config(), second.config()),
        "accuracies": _accuracies(*figures),
        "classes": classes,
        "clients": clients[:most_clients],
        "client_count": len(clients),
        "pictures": [_first_pictures(each) for each in pictures],
    }


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Pair]:
    """List the config keys whose values differ, without the job id, in alphabetical order."""
    keys = sorted((set(first) | set(second)) - {NAME_KEY})
    # True would equal 1
    return [
        Pair(key, first.get(key), second.get(key))
        for key in keys
        if repr(first.get(key)) != repr(second.get(key))
    ]


def _accuracies(first: Figures, second: Figures) -> list[Pair]:
    """Pair the accuracies of the runs' shown models by client, the average last."""
    clients = set(first.accuracy.get(first.model, {})) | set(second.accuracy.get(second.model, {}))
    names = [*sorted(clients - {AVERAGE}), *(clients & {AVERAGE})]
    return [Pair(name, first.of_client(name), second.of_client(name)) for name in names]


def _first_pictures(pictures: Pictures) -> dict[str, dict[str, Picture]]:
    return {
        client: {name: images[0] for name, images in by_class.items()}
        for client, by_class in pictures.first.items()
    }


def _shared_order(first: list[str], second: list[str]) -> list[str]:
    """Join two lists of classes: those of both runs come first."""
    shared = [name for name in first if name in second]
    return list(dict.fromkeys([*shared, *first, *second]))
