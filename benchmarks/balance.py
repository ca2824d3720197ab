"""What `class-balance` gives where clients hold different classes; to
benchmarks/tables/balance.{md,json}.

python -m benchmarks.balance

FedDEO's descriptions of clients by Dirichlet's distribution with alpha 0.1, where a class is held
by two to five of six, with the recipe of benchmarks.main_table and ten sampling steps. Three rows
of the same payloads: thirty images for every class of every client; as many of every class in all
(`class-balance`), which is more images; and about as many images as that, but unbalanced. All are
trained for about 627 steps of 32 images. Interrupted, the same command goes on.
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

from scipy import stats

from benchmarks import TABLES, command_line, write_table
from benchmarks.approximations import accuracy
from benchmarks.clients import CLIENTS, Settings, folder_name, sent
from benchmarks.left_out import against
from benchmarks.main_table import COMMON, config_of
from benchmarks.server import job_in
from osfl.config import RunConfig
from osfl.methods import server_module
from osfl.util.files import make_private_folder, write_atomically
from server_app.context import ServerJob
from server_app.pipeline import plan_held_classes

WORK = Path(__file__).resolve().parent.parent / "runs" / "balance"
STEPS = 627
SKEWED: Settings = {
    **COMMON,
    "method": "feddeo",
    "feddeo.steps": 600,
    "feddeo.guidance-description": 2.0,
    "data.partition": "dirichlet",
    "data.alpha": 0.1,
    "synthesis.steps": 10,
    # Epochs are chosen for each row
    "global-model.steps": 0,
}
ROWS = ("plain", "class-balance", "plain, as many images")


def job_of(config: RunConfig) -> ServerJob:
    """The server's."""
    several = (config.class_balance, config.synthesis.images_per_class, config.global_model.epochs)
    return job_in(config, "-".join(map(str, ("balance", config.seed, *several))))


def cell(row: str, seed: int) -> tuple[float, int]:
    """Accuracy (%) over the clients' test images, and how many images taught."""
    settings = {**SKEWED, "seed": seed}
    result = WORK / f"{row.replace(' ', '-')}-{folder_name(settings)}.json"
    if not result.is_file():
        taken = sent(settings)
        config = replace(config_of(settings), runs_dir=str(WORK))
        balanced = replace(config, class_balance=True)
        many = len(plan_held_classes(job_of(balanced), taken))
        pairs = sum(len(payload.classes) for payload in taken.values())
        if row == "class-balance":
            config = balanced
        elif row == "plain, as many images":
            each = round(many / pairs)
            config = replace(config, synthesis=replace(config.synthesis, images_per_class=each))
        images = len(plan_held_classes(job_of(config), taken))
        epochs = round(STEPS / -(-images // config.global_model.batch_size))
        config = replace(config, global_model=replace(config.global_model, epochs=epochs))
        job = job_of(config)
        (model,) = server_module(config.method).run(job, taken).values()
        scores = [accuracy(config, model.model, number) for number in range(len(CLIENTS))]
        write_atomically(result, json.dumps([mean(scores), images]).encode())
        print(row, seed, mean(scores), images, flush=True)
    found, images = json.loads(result.read_text())
    return float(found), int(images)


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    make_private_folder(WORK)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    # Seed by seed, so that what is there is paired
    found = {(row, seed): cell(row, seed) for seed in seeds for row in ROWS}
    of_row = {row: {seed: found[row, seed][0] for seed in seeds} for row in ROWS}
    lines = []
    for row, averages in of_row.items():
        line = {"": row, "average": f"{mean(averages.values()):.1f}"}
        line["standard error"] = f"{stats.sem(list(averages.values())):.2f}"
        line["images"] = f"{mean(found[row, seed][1] for seed in seeds):.0f}"
        for other in ROWS[::2]:
            line[f"to {other}"] = "" if other == row else against(averages, of_row[other])
        lines.append(line)
    write_table(
        TABLES / "balance",
        lines,
        "Top-1 accuracy (%) of FedDEO's descriptions alone, clients by Dirichlet's distribution "
        f"with alpha 0.1, mean of the seeds {given.seeds}; thirty images a class and client where "
        f"nothing else is said, {STEPS} training steps. Differences are paired by seed, with a 95 "
        "% interval by Student's t, and a star where that excludes 0. "
        f"Command: `python -m benchmarks.balance --seeds {given.seeds}`.",
    )


if __name__ == "__main__":
    main()
