"""Measure false positives of the label-consistency defense: all clients are honest.

python -m benchmarks.robustness.false_positives        # every row
python -m benchmarks.robustness.false_positives OSCAR  # some; the table keeps its other rows

Systems and payloads are those of benchmarks.accuracy.method_comparison; as few images are drawn as
the defense scores.
"""

from collections.abc import Sequence
from statistics import mean

from benchmarks import recipe
from benchmarks.federation import cell_name, payloads_of, synthesize
from benchmarks.harness import Experiment, Line
from benchmarks.robustness.attacks import DESCRIPTIONS, OF_SIX, job_of
from benchmarks.robustness.poisoning import defense_digest
from server_app.defenses.label_consistency import (
    NUM_PROBE_IMAGES,
    flag_clients,
    score_label_consistency,
)

# The system of a row, and how the images are partitioned
ROWS = {
    **{name: (name, "domain") for name in (*OF_SIX, "FedBiP", "FGL", "OSCAR-pooled", "votes")},
    f"{DESCRIPTIONS}, by label": (DESCRIPTIONS, "label"),
    f"{DESCRIPTIONS}, by Dirichlet's distribution": (DESCRIPTIONS, "dirichlet"),
}
SEEDS = (0, 1, 2, 3, 4)
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "How often the kit denoises an image better under the prompt of its class than of another "
    "class, where all clients are honest; 0.5 by chance. Six clients, a domain each, or two to "
    "four classes, or label skew by a Dirichlet distribution with alpha 0.1; payloads of "
    f"benchmarks.accuracy.method_comparison, seeds {SEEDS}. The rule is in "
    "server_app/defenses/label_consistency.py.",
)


def line(row: str, _: Sequence[int] = (), seeds: Sequence[int] = SEEDS) -> Line:
    """Return a row of the table."""
    by_seed = [scores_of(row, seed) for seed in seeds]
    verdicts = [flag_clients(scores) for scores in by_seed]
    of_clients = []
    of_classes: list[float] = []
    for by_client in by_seed:
        for by_label in by_client.values():
            of_clients.append(mean(by_label.values()))
            of_classes += by_label.values()
    flags = [flag for verdict in verdicts for flag in verdict.flags]
    return {
        "": row,
        "clients": str(len(of_clients)),
        "mean score": f"{mean(of_clients):.2f}",
        "lowest client": f"{min(of_clients):.2f}",
        "clients flagged": str(sum(flag.label is None for flag in flags)),
        "not scored": str(sum(len(verdict.unscored) for verdict in verdicts)),
        "lowest class": f"{min(of_classes):.2f}",
        "classes flagged": f"{sum(flag.label is not None for flag in flags)} of {len(of_classes)}",
    }


def scores_of(row: str, seed: int) -> dict[str, dict[int, float]]:
    """Return the label consistency of each client and class."""
    system, partition = ROWS[row]
    settings = recipe.settings_of(system, seed, partition)
    settings["synthesis.images-per-class"] = NUM_PROBE_IMAGES

    def compute() -> dict[str, dict[int, float]]:
        payloads = payloads_of(settings)
        job = job_of(settings, "honest")
        return score_label_consistency(job, synthesize(job, payloads))

    name = f"honest-{defense_digest()}-{cell_name(settings)}"
    return {
        client: {int(label): score for label, score in by_label.items()}
        for client, by_label in EXPERIMENT.cell(name, compute).items()
    }


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, line)
