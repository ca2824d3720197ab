"""Leave one domain out: five clients train, and the sixth's domain tests; to
benchmarks/tables/left-out.{md,json}.

python -m benchmarks.left_out                          # every row
python -m benchmarks.left_out ceiling domain-vector    # some; the table keeps its other rows
python -m benchmarks.left_out --quick domain-vector    # a look at whether it works

Each client makes its payload once: what it sends does not depend on the others. The server's half
then draws and trains without each client in turn, as `osfl run left-out=client-0` does, and that
client's test images test the model. Interrupted, the same command goes on.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.approximations import accuracy
from benchmarks.clients import CLIENTS, DOMAINS, Settings, folder_name, sent
from osfl.config import RunConfig, Scalar, parse_run_config
from osfl.methods import server_module
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.tables.paired import paired_difference
from osfl.tables.table_file import as_arguments
from server_app.context import ServerJob

WORK = Path(__file__).resolve().parent.parent / "runs" / "left-out"
# In the place of public domains' names: all but the one that is tested
OTHERS = "others"
# The recipe of configs/recipes/digits.toml; 1,500 images in batches of 32 make 47 steps an
# epoch, the ceiling's 500 make 16
COMMON: Settings = {
    "num-clients": 6,
    "synthesis.images-per-class": 30,
    "global-model.epochs": 13,
    "global-model.lr": 0.05,
    "global-model.batch-size": 32,
    "global-model.schedule": "one-cycle",
    "global-model.warm-up": 0.3,
    "global-model.label-smoothing": 0.1,
    "global-model.augmentation": "affine-color",
}
# Guidance is as in configs/tables/digits.toml: each method's best on the validation split, and
# votes' that of prompts-domain. Learned conditions have 600 steps.
SYSTEMS: dict[str, Settings] = {
    "prompts-only": {"method": "prompts-only", "prompts-only.guidance": 3.0},
    "prompts-domain": {"method": "prompts-domain", "prompts-domain.guidance": 2.0},
    "FGL": {"method": "fgl", "fgl.guidance": 5.0},
    "FedDISC": {
        "method": "feddisc",
        "feddisc.guidance-cluster": 1.0,
        "feddisc.guidance-domain": 1.0,
    },
    "FedBiP": {"method": "fedbip", "fedbip.steps": 600, "fedbip.guidance": 3.0},
    "FedCADO": {"method": "fedcado", "fedcado.strategies": "ft", "fedcado.guidance": 7.5},
    "FedLMG": {"method": "fedlmg", "fedlmg.strategies": "ft", "fedlmg.guidance": 2.0},
    "FedDEO": {
        "method": "feddeo",
        "feddeo.steps": 600,
        "feddeo.guidance-text": 3.75,
        "feddeo.guidance-description": 3.75,
    },
    "FedDEO description alone": {
        "method": "feddeo",
        "feddeo.steps": 600,
        "feddeo.guidance-description": 2.0,
    },
    "OSCAR": {"method": "oscar", "oscar.guidance": 5.0},
    "OSCAR-pooled": {"method": "oscar-pooled", "oscar.guidance": 1.5},
    "Espresso": {"method": "espresso", "espresso.steps": 600, "espresso.guidance": 1.5},
    "domain-vector": {"method": "domain-vector", "domain-vector.steps": 600},
    "votes": {"method": "votes", "votes.guidance": 2.0},
}
ROWS: dict[str, Settings] = {
    "ceiling": {"method": "ceiling", "global-model.epochs": 38},
    **SYSTEMS,
    # With public domains' images there are twice as many, so half the epochs are as many steps
    "domain-vector, all public domains": {
        **SYSTEMS["domain-vector"],
        "public-domains": ", ".join(DOMAINS),
        "global-model.epochs": 6,
    },
    "domain-vector, public domains but the tested": {
        **SYSTEMS["domain-vector"],
        "public-domains": OTHERS,
        "global-model.epochs": 6,
    },
}
QUICK: Settings = {
    "synthesis.images-per-class": 1,
    "synthesis.steps": 2,
    "global-model.epochs": 1,
    **dict.fromkeys(("fedbip.steps", "espresso.steps", "feddeo.steps", "domain-vector.steps"), 2),
}


def settings_of(row: str, seed: int, quick: bool) -> dict[str, Scalar]:
    """A row's own, over what all have."""
    return {**COMMON, **ROWS[row], **(QUICK if quick else {}), "seed": seed}


def config_of(settings: Settings) -> RunConfig:
    """The server's."""
    return parse_run_config({**default_config(), **settings, "runs-dir": str(WORK)})


def with_names(settings: Settings, tested: int | None) -> Settings:
    """With the names of the public domains where the settings say `OTHERS`."""
    if settings.get("public-domains") != OTHERS:
        return settings
    names = [name for number, name in enumerate(DOMAINS) if number != tested]
    return {**settings, "public-domains": ", ".join(names)}


def tested(number: int, settings: Settings) -> float:
    """Accuracy (%) in the domain of a client of a model that its images have not taught."""
    config = config_of({**with_names(settings, number), "left-out": CLIENTS[number]})
    name = folder_name(with_names(settings, number))
    result = WORK / f"{name}-without-{number}.json"
    if not result.is_file():
        # One folder for all: images of the other clients are there already
        everybody = config_of(with_names(settings, None))
        folder = open_run_folder(everybody, folder_name(settings), 0)
        taken = sent(settings)
        others = {client: payload for client, payload in taken.items() if client != CLIENTS[number]}
        training = tuple(client for client in CLIENTS if client != CLIENTS[number])
        job = ServerJob(config, folder, Status(folder.path), training)
        (model,) = server_module(config.method).run(job, others).values()
        result.write_text(json.dumps(accuracy(config, model.model, number)))
    return float(json.loads(result.read_text()))


def against(found: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """The difference with its interval, and a star where that excludes 0."""
    apart = paired_difference(found, reference)
    star = " *" if apart.decided else ""
    return f"{apart.mean:+.1f} [{apart.low:+.1f}, {apart.high:+.1f}]{star}"


def table(rows: Sequence[str], seed: int, quick: bool) -> list[dict[str, str]]:
    """A row for each, with its difference to the ceiling paired by domain."""
    found: dict[str, list[float]] = {}
    for row in dict.fromkeys(("ceiling", *rows)):
        settings = settings_of(row, seed, quick)
        found[row] = []
        for number in range(len(CLIENTS)):
            found[row].append(tested(number, settings))
            print(row, DOMAINS[number], found[row][-1], flush=True)
    ceiling = dict(enumerate(found["ceiling"]))
    made = []
    for row, figures in found.items():
        cells = {name: f"{figure:.1f}" for name, figure in zip(DOMAINS, figures, strict=True)}
        line = {"": row, **cells, "average": f"{mean(figures):.1f}", "to the ceiling": ""}
        if row != "ceiling":
            line["to the ceiling"] = against(dict(enumerate(figures)), ceiling)
        made.append(line)
    return made


def main() -> None:
    """Make the table and keep it; a quick one is printed alone."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one image a class, hardly trained")
    given = parser.parse_args()
    names = some_of(given.rows, ROWS, parser)
    WORK.mkdir(parents=True, exist_ok=True)
    rows = table(names, given.seed, given.quick)
    if given.quick:
        print(json.dumps(rows, indent=1))
        return
    common = " ".join(as_arguments(COMMON))
    about = (
        "Top-1 accuracy (%) on the test images of a domain that trained nothing; the other five "
        f"clients did. Seed {given.seed}; {common}; a row's own settings are in the file. To the "
        "ceiling: the mean of the six domains' differences, with its 95 % interval by Student's "
        "t, and a star where that excludes 0. "
        f"Command: `python -m benchmarks.left_out --seed {given.seed}`."
    )
    write_table(
        TABLES / "left-out", with_others(rows, TABLES / "left-out.json", about, ROWS), about
    )


if __name__ == "__main__":
    main()
