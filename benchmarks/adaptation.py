"""What a client gains that trains the global model on its own images; to
benchmarks/tables/adaptation.{md,json}, and adaptation-tuning.{md,json}.

python -m benchmarks.adaptation             # every row
python -m benchmarks.adaptation ceiling     # some; the table keeps its other rows
python -m benchmarks.adaptation --tuning    # steps and learning rates, on the validation split

Global models learn by the recipe of benchmarks.main_table, in bfloat16, from its rows' payloads;
images are drawn in six UniPC steps. Then each client adapts its copy on its hundred training images
(`adaptation`, client_app/learning/personalization.py), and tests it on its own domain. Nothing of
it is sent. Beside them, what a client has that takes no part: the kit's first weights, trained on
its own images for as long as a global model. Interrupted, the same command goes on.
"""

import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scipy import stats
from torch import nn

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import CLIENTS, DOMAINS, Settings, folder_name, real, sent
from benchmarks.left_out import against
from benchmarks.main_table import COMMON, LONG, ROWS, config_of
from benchmarks.server import job_in
from benchmarks.styles import share_seen
from client_app.learning.personalization import personalize
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.methods import server_module
from osfl.models.classifiers import new_classifier
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.prompts import DIGITS

WORK = Path(__file__).resolve().parent.parent / "runs" / "adaptation"
SEEDS = (0, 1, 2)
# Of the rows that are trained for longest, which come nearest to the ceiling
SEEDS_OF_LONG = (0, 1, 2, 3, 4)
SHORT: Settings = {
    **COMMON,
    "synthesis.solver": "unipc",
    "synthesis.steps": 6,
    "global-model.precision": "bfloat16",
}
# Chosen on the validation split: --tuning
CHOSEN: Settings = {"adaptation.steps": 200, "adaptation.lr": 0.01}
ALONE = "nobody's: the kit's first weights"
STARTS: dict[str, Settings] = {
    "ceiling": {"method": "ceiling"},
    "domain-vector": ROWS["domain-vector"],
    "votes, epsilon 1": ROWS["votes, epsilon 1"],
    "domain-vector, 300 images": ROWS["domain-vector, 300 images, UniPC, 6 steps"],
    "ceiling, as long": {"method": "ceiling", **LONG},
    ALONE: {
        "method": "ceiling",
        "adaptation.steps": SHORT["global-model.steps"],
        "adaptation.lr": SHORT["global-model.lr"],
    },
}
TUNED = ("ceiling", "domain-vector")
TUNING: tuple[Settings, ...] = (
    {"adaptation.steps": 60, "adaptation.lr": 0.01},
    {"adaptation.steps": 200, "adaptation.lr": 0.003},
    {"adaptation.steps": 200, "adaptation.lr": 0.01},
    {"adaptation.steps": 200, "adaptation.lr": 0.03},
)
CPU = torch.device("cpu")
Cell = dict[str, list[float]]


def settings_of(start: str, seed: int, own: Settings = CHOSEN) -> Settings:
    """A row's, over what all have."""
    return {**SHORT, **own, **STARTS[start], "seed": seed}


def model_of(start: str, seed: int) -> nn.Module:
    """The global model that clients get; kept on disk."""
    settings = {
        key: value
        for key, value in settings_of(start, seed).items()
        if not key.startswith("adaptation.")
    }
    config = config_of(settings)
    kit = find_kit("digits")
    model = new_classifier(config.global_model, len(DIGITS), kit, seed, "global-model.init")
    if start == ALONE:
        return model
    name = folder_name(settings)
    file = WORK / f"{name}.pt"
    if not file.is_file():
        job = job_in(config, f"adaptation-{name}")
        (made,) = server_module(config.method).run(job, sent(settings)).values()
        whole = io.BytesIO()
        torch.save(made.model.state_dict(), whole)
        write_atomically(file, whole.getvalue())
    model.load_state_dict(torch.load(file, weights_only=True))
    return model


def cell(start: str, seed: int, split: str, own: Settings = CHOSEN) -> Cell:
    """Of each domain, its client's accuracy (%) "before" it adapts the model, and "after"."""
    settings = settings_of(start, seed, own)
    result = WORK / f"{split}-{'alone-' if start == ALONE else ''}{folder_name(settings)}.json"
    if not result.is_file():
        model = model_of(start, seed)
        made = measured(model, config_of(settings), split)
        write_atomically(result, json.dumps(made).encode())
        averages = " ".join(f"{mean(made[part]):.1f}" for part in ("before", "after"))
        print(start, seed, split, dict(own), averages, flush=True)
    found: Cell = json.loads(result.read_text())
    return found


def measured(model: nn.Module, config: RunConfig, split: str) -> Cell:
    """What a cell has, of a global model."""
    made: Cell = {"before": [], "after": []}
    for client, owned, tested in zip(CLIENTS, real("train"), real(split), strict=True):
        made["before"].append(share_seen(model, tested))
        own = personalize(copy.deepcopy(model), owned, config, client, CPU)
        made["after"].append(share_seen(own, tested))
    return made


def averages(start: str, seeds: Sequence[int], part: str) -> dict[int, float]:
    """Of the clients, by seed."""
    return {seed: mean(cell(start, seed, "test")[part]) for seed in seeds}


def seeds_of(start: str) -> Sequence[int]:
    """Of a row. Who takes no part begins with the same weights whatever the seed: one is enough."""
    if start == ALONE:
        return SEEDS[:1]
    return SEEDS if reference_of(start) == "ceiling" else SEEDS_OF_LONG


def reference_of(start: str) -> str:
    """The ceiling that was trained for as many steps."""
    return "ceiling, as long" if "global-model.steps" in STARTS[start] else "ceiling"


def line(start: str) -> dict[str, str]:
    """A row of the table."""
    seeds = seeds_of(start)
    cells = [cell(start, seed, "test") for seed in seeds]
    before = averages(start, seeds, "before")
    after = averages(start, seeds, "after")
    made = {"": start, "seeds": str(len(seeds)), "as it came": f"{mean(before.values()):.1f}"}
    made["adapted"] = f"{mean(after.values()):.1f}"
    if start != ALONE:
        made["standard error"] = f"{stats.sem(list(after.values())):.2f}"
        made["gain"] = against(after, before)
        reference = reference_of(start)
        for part, word in (("after", "adapted"), ("before", "as it came")):
            same = start == reference and part == "after"
            theirs = averages(reference, seeds, part)
            made[f"adapted, to the ceiling {word}"] = "" if same else against(after, theirs)
    for number, domain in enumerate(DOMAINS):
        made[domain] = f"{mean(one['after'][number] for one in cells):.1f}"
    for word, figures in (("as it came", before), ("adapted", after)):
        made[f"{word}, by seed"] = ", ".join(f"{figure:.2f}" for figure in figures.values())
    return made


def tuning() -> list[dict[str, str]]:
    """The table of the tuning: seed 0, on the validation split."""
    found = []
    for own in TUNING:
        made: dict[str, Any] = {key.removeprefix("adaptation."): f"{v}" for key, v in own.items()}
        for start in TUNED:
            one = cell(start, 0, "validation", own)
            made[f"{start}, as it came"] = f"{mean(one['before']):.1f}"
            made[f"{start}, adapted"] = f"{mean(one['after']):.1f}"
        found.append(made)
    return found


def main() -> None:
    """Make the table, and keep it; it grows row by row."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(STARTS)}; none: all")
    parser.add_argument("--tuning", action="store_true")
    given = parser.parse_args()
    rows = some_of(given.rows, STARTS, parser)
    make_private_folder(WORK)
    if given.tuning:
        about = (
            "Top-1 accuracy (%) on the digits' validation split, average of the domains, before "
            "and after each client adapts the global model; seed 0. "
            "Command: `python -m benchmarks.adaptation --tuning`."
        )
        write_table(TABLES / "adaptation-tuning", tuning(), about)
        return
    about = (
        "Top-1 accuracy (%) on the clients' test images, average of the clients, mean of the first "
        "seeds from 0 on: of the global model as it came, and after each client "
        f"adapted it on its own hundred images ({CHOSEN['adaptation.steps']} steps of 32, one-"
        f"cycle learning rate up to {CHOSEN['adaptation.lr']}); by domain, adapted. Who takes no "
        "part trains the kit's first weights alone, as long and by the rate of a global model. "
        "Differences are paired by seed, with a 95 % interval by Student's t, and a star where "
        "that excludes 0. "
        "Command: `python -m benchmarks.adaptation`."
    )
    for start in rows:
        lines = with_others([line(start)], TABLES / "adaptation.json", about, STARTS)
        write_table(TABLES / "adaptation", lines, about)


if __name__ == "__main__":
    main()
