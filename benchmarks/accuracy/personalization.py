"""Measure personalization: what a client gains by fine-tuning the global model on its own images.

python -m benchmarks.accuracy.personalization           # every row
python -m benchmarks.accuracy.personalization ceiling   # some; the table keeps its other rows
python -m benchmarks.accuracy.personalization --tuning  # steps and rates, on the validation split

Global models train by the common recipe in bfloat16, on images drawn in six UniPC steps. Then each
client fine-tunes its copy on its hundred training images (`personalization`,
client_app/learning/personalization.py) and tests it on its own domain; nothing of it is sent. A
client that takes no part instead trains the kit's initial weights on its own images, for as long as
a global model.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from torch import nn

from benchmarks.federation import (
    CLIENTS,
    CPU,
    DOMAINS,
    Settings,
    accuracy,
    cell_name,
    client_images,
    config_of,
    payloads_of,
    server_job,
)
from benchmarks.harness import PAIRED, Experiment, Line, average, difference, standard_error
from benchmarks.recipe import COMMON, LONG, ROWS
from client_app.learning.personalization import personalize
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.methods import server_module
from osfl.models.classifiers import new_classifier
from osfl.util.prompts import DIGITS

SEEDS = (0, 1, 2)
# Of the rows that train longest and come nearest to the ceiling
SEEDS_OF_LONG = (0, 1, 2, 3, 4)
SHORT: Settings = {
    **COMMON,
    "synthesis.solver": "unipc",
    "synthesis.steps": 6,
    "global-model.precision": "bfloat16",
}
# Chosen on the validation split by --tuning
CHOSEN: Settings = {"personalization.steps": 200, "personalization.lr": 0.01}
ALONE = "nobody's: the kit's first weights"
STARTS: dict[str, Settings] = {
    "ceiling": {"method": "ceiling"},
    "domain-vector": ROWS["domain-vector"],
    "votes, epsilon 1": ROWS["votes, epsilon 1"],
    "domain-vector, 300 images": ROWS["domain-vector, 300 images, UniPC, 6 steps"],
    "ceiling, as long": {"method": "ceiling", **LONG},
    ALONE: {
        "method": "ceiling",
        "personalization.steps": SHORT["global-model.steps"],
        "personalization.lr": SHORT["global-model.lr"],
    },
}
TUNED = ("ceiling", "domain-vector")
TUNING: dict[str, Settings] = {
    f"{steps} steps, rate {rate}": {"personalization.steps": steps, "personalization.lr": rate}
    for steps, rate in ((60, 0.01), (200, 0.003), (200, 0.01), (200, 0.03))
}
Cell = dict[str, list[float]]
EXPERIMENT = Experiment(
    __file__,
    STARTS,
    "Top-1 accuracy (%) on the clients' test images, average of the clients, mean of the first "
    "seeds from 0 on: of the global model as it came, and after each client fine-tuned it on its "
    f"own hundred images ({CHOSEN['personalization.steps']} steps of 32, one-cycle learning rate "
    f"up to {CHOSEN['personalization.lr']}); by domain, after fine-tuning. A client that takes no "
    "part trains "
    f"the kit's initial weights alone, as long and at the rate of a global model. {PAIRED}",
)
TUNING_EXPERIMENT = replace(
    EXPERIMENT,
    rows=TUNING,
    caption="Top-1 accuracy (%) on the digits' validation split, average of the domains, before "
    "and after each client fine-tunes the global model; seed 0.",
    options="--tuning",
    table="personalization-tuning",
)


def settings_of(start: str, seed: int, adaptation: Settings = CHOSEN) -> Settings:
    """Return a row's settings, over what all rows have."""
    return {**SHORT, **adaptation, **STARTS[start], "seed": seed}


def model_of(start: str, seed: int) -> nn.Module:
    """Return the global model that clients receive; its weights are kept."""
    settings = {
        key: value
        for key, value in settings_of(start, seed).items()
        if not key.startswith("personalization.")
    }
    config = config_of(settings)
    model = new_classifier(
        config.global_model, len(DIGITS), find_kit("digits"), seed, "global-model.init"
    )
    if start == ALONE:
        return model
    name = cell_name(settings)

    def compute() -> dict[str, object]:
        job = server_job(config, f"adaptation-{name}")
        (result,) = server_module(config.method).run(job, payloads_of(settings)).values()
        state: dict[str, object] = result.model.state_dict()
        return state

    model.load_state_dict(EXPERIMENT.tensors(name, compute))
    return model


def cell(start: str, seed: int, split: str, adaptation: Settings = CHOSEN) -> Cell:
    """Return each client's accuracy (%) "before" it fine-tunes the model, and "after"."""
    settings = settings_of(start, seed, adaptation)
    name = f"{split}-{'alone-' if start == ALONE else ''}{cell_name(settings)}"
    result: Cell = EXPERIMENT.cell(
        name, lambda: fine_tuned(model_of(start, seed), config_of(settings), split)
    )
    return result


def fine_tuned(model: nn.Module, config: RunConfig, split: str) -> Cell:
    """Fine-tune a global model on each client's images, and test it before and after."""
    result: Cell = {"before": [], "after": []}
    parts = zip(CLIENTS, client_images("train"), client_images(split), strict=True)
    for client, train_images, test_images in parts:
        result["before"].append(accuracy(model, test_images))
        personal = personalize(copy.deepcopy(model), train_images, config, client, CPU)
        result["after"].append(accuracy(personal, test_images))
    return result


def averages(start: str, seeds: Sequence[int], part: str) -> dict[int, float]:
    """Return the clients' average by seed, "before" or "after"."""
    return {seed: mean(cell(start, seed, "test")[part]) for seed in seeds}


def seeds_of(start: str) -> Sequence[int]:
    """Return a row's seeds; without a federation all seeds have the same initial weights."""
    if start == ALONE:
        return SEEDS[:1]
    return SEEDS if reference_of(start) == "ceiling" else SEEDS_OF_LONG


def reference_of(start: str) -> str:
    """Return the ceiling that trains for as many steps."""
    return "ceiling, as long" if "global-model.steps" in STARTS[start] else "ceiling"


def line(start: str, _: Sequence[int] = ()) -> Line:
    """Return a row of the table."""
    seeds = seeds_of(start)
    cells = [cell(start, seed, "test") for seed in seeds]
    before = averages(start, seeds, "before")
    after = averages(start, seeds, "after")
    columns = {"": start, "seeds": str(len(seeds)), "as it came": average(before.values())}
    columns["adapted"] = average(after.values())
    if start != ALONE:
        columns["standard error"] = standard_error(after.values())
        columns["gain"] = difference(after, before)
        reference = reference_of(start)
        for part, words in (("after", "adapted"), ("before", "as it came")):
            same = start == reference and part == "after"
            baseline = averages(reference, seeds, part)
            columns[f"adapted, to the ceiling {words}"] = (
                "" if same else difference(after, baseline)
            )
    for number, domain in enumerate(DOMAINS):
        columns[domain] = average(cell["after"][number] for cell in cells)
    for words, values in (("as it came", before), ("adapted", after)):
        columns[f"{words}, by seed"] = ", ".join(f"{value:.2f}" for value in values.values())
    return columns


def tuning_line(row: str) -> Line:
    """Return a row of the tuning: seed 0, on the validation split."""
    settings = TUNING[row]
    columns = {key.removeprefix("personalization."): str(value) for key, value in settings.items()}
    for start in TUNED:
        result = cell(start, 0, "validation", settings)
        columns[f"{start}, as it came"] = average(result["before"])
        columns[f"{start}, adapted"] = average(result["after"])
    return columns


def main() -> None:
    """Make either table."""
    parser = EXPERIMENT.parser(__doc__)
    parser.add_argument("--tuning", action="store_true", help="tune steps and rates instead")
    if parser.parse_args().tuning:
        TUNING_EXPERIMENT.write_all(map(tuning_line, TUNING))
    else:
        EXPERIMENT.main(__doc__, line)


if __name__ == "__main__":
    main()
