"""The guidance of every method that samples, scored on held-out public images.

To benchmarks/tables/guidance.{md,json}.

python -m benchmarks.guidance                    # every method
python -m benchmarks.guidance feddeo oscar       # some; the table keeps its other rows
python -m benchmarks.guidance --quick feddeo     # a look at whether it works: a minute a method

A run of `osfl run` collects each method's payloads once. The server's half then draws and trains
with them again for every guidance and seed (of noise and training). The model is scored on the
digits'
validation split: no client's image, neither of training nor of the test, chooses a guidance.
Interrupted, the same command goes on.

The grid is of the sum of a method's scales: with two branches each has half. Where both predict the
same, e = e0 + sum_i g_i (e_i - e0) is then the same for all methods.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from osfl.config import NodeConfig, RunConfig, Scalar, parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.methods import METHODS, server_module
from osfl.models.classifiers import confusion
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.report.metrics import accuracy_over_images
from osfl.run_folder.status import Status
from osfl.settings import default_config
from osfl.util.costs import Stopwatch
from server_app.context import ServerJob
from server_app.expected import expected_payload

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "guidance"
CLIENTS = 6
GRID = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
# Of the payloads; no table of results has it.
SEED = 100
COMMON: dict[str, Scalar] = {
    "num-clients": CLIENTS,
    "global-model.batch-size": 8,
    "synthesis.images-per-class": 5,
    "feddeo.steps": 150,
    "espresso.steps": 150,
    "fedbip.steps": 150,
    "fedlmg.strategies": "ft",
    "fedcado.strategies": "ft",
}
QUICK: dict[str, Scalar] = {
    "synthesis.images-per-class": 1,
    "synthesis.steps": 4,
    "global-model.epochs": 1,
    "classifier.epochs": 1,
    "feddeo.steps": 2,
    "espresso.steps": 2,
    "fedbip.steps": 2,
    "domain-vector.steps": 2,
    "fedcado.noise-edits": 1,
}
QUICK_GRID = (1.0, 3.0)


@dataclass(frozen=True)
class Row:
    """A method, and the keys among which a guidance is shared."""

    method: str
    scales: tuple[str, ...]


ROWS = {
    "prompts-only": Row("prompts-only", ("prompts-only.guidance",)),
    "prompts-domain": Row("prompts-domain", ("prompts-domain.guidance",)),
    "FGL": Row("fgl", ("fgl.guidance",)),
    "FedDISC": Row("feddisc", ("feddisc.guidance-cluster", "feddisc.guidance-domain")),
    "FedBiP": Row("fedbip", ("fedbip.guidance",)),
    "domain-vector": Row("domain-vector", ("domain-vector.guidance",)),
    "votes": Row("votes", ("votes.guidance",)),
    "FedCADO": Row("fedcado", ("fedcado.guidance",)),
    "FedLMG": Row("fedlmg", ("fedlmg.guidance",)),
    "FedDEO": Row("feddeo", ("feddeo.guidance-text", "feddeo.guidance-description")),
    "FedDEO description alone": Row("feddeo", ("feddeo.guidance-description",)),
    "OSCAR": Row("oscar", ("oscar.guidance",)),
    "OSCAR-pooled": Row("oscar-pooled", ("oscar.guidance",)),
    "Espresso": Row("espresso", ("espresso.guidance",)),
}
METHODS_OF = tuple(dict.fromkeys(row.method for row in ROWS.values()))
Settings = Mapping[str, Scalar]


def config_of(row: Row, guidance: float | None, seed: int, base: Settings) -> RunConfig:
    """The server's; without a guidance, that under which payloads are collected."""
    values = {**default_config(), **base, "method": row.method, "seed": seed}
    if guidance is not None:
        values |= dict.fromkeys(row.scales, guidance / len(row.scales))
    return parse_run_config({**values, "runs-dir": str(WORK)})


def collected(row: Row, base: Settings) -> tuple[dict[str, Payload], str]:
    """What the clients of a run have sent, and a digest of it.

    Nothing for a method that sends nothing.
    """
    if METHODS[row.method].client is None:
        return {}, ""
    settings = {**base, "method": row.method, "seed": SEED}
    folder = WORK / f"{row.method}-payloads-{digest_of(settings)}"
    send(settings, folder)
    expected = expected_payload(config_of(row, None, SEED, base), folder.name)
    files = sorted((folder / "payloads").glob("*.pb"))
    blobs = {file.stem: file.read_bytes() for file in files}
    taken = {client: decode(blob, expected(client)) for client, blob in blobs.items()}
    return taken, hashlib.sha256(b"".join(blobs.values())).hexdigest()


def send(settings: Settings, folder: Path) -> None:
    """Have the clients of a run send their payloads, unless it is there.

    The run's own images are not looked at.
    """
    if (folder / "metrics.json").is_file():
        return
    command = [str(Path(sys.executable).parent / "osfl"), "run", f"job-id={folder.name}"]
    few: Settings = {"synthesis.images-per-class": 1, "global-model.epochs": 1}
    given = [f"{key}={_text(value)}" for key, value in {**settings, **few}.items()]
    subprocess.run([*command, *given, "--runs", folder.parent], cwd=ROOT, check=True)


def cell(
    name: str, guidance: float, seed: int, base: Settings, taken: Mapping[str, Payload], sent: str
) -> dict[str, Any]:
    """The server's half with one guidance and seed.

    Accuracy (%) in each domain, their average, seconds.
    """
    row = ROWS[name]
    config = config_of(row, guidance, seed, base)
    slug = name.replace(" ", "-")
    digest = digest_of({**base, "guidance": guidance, "payloads": sent})
    folder = open_run_folder(config, f"{slug}-g{guidance * 10:.0f}-s{seed}-{digest}", 0)
    if not (folder.path / "result.json").is_file():
        watch = Stopwatch()
        clients = tuple(taken) or tuple(f"client-{number}" for number in range(CLIENTS))
        job = ServerJob(config, folder, Status(folder.path), clients)
        model = server_module(row.method).run(job, taken)["FT"].model
        domains = score(config, model)
        folder.write_json(
            "result.json",
            {"domains": domains, "average": mean(domains), "seconds": round(watch.seconds, 1)},
        )
    return json.loads((folder.path / "result.json").read_text())


def score(config: RunConfig, model: torch.nn.Module) -> list[float]:
    """Top-1 accuracy (%) on the validation images of every client's domain."""
    found = []
    for number in range(config.num_clients):
        node = NodeConfig(partition_id=number, num_partitions=config.num_clients)
        images = load_images(config.data, node, "validation", 0)
        classes = len(class_names(config.data))
        matrix = confusion(model, images.pixels, images.labels, classes, torch.device("cpu"))
        found.append(accuracy_over_images({"": matrix}))
    return found


def table(
    names: Sequence[str], seeds: Sequence[int], grid: Sequence[float], base: Settings
) -> list[dict[str, str]]:
    """A row for every method."""
    rows = []
    for name in names:
        taken, sent = collected(ROWS[name], base)
        averages: dict[float, list[float]] = {}
        for guidance in grid:
            made = [cell(name, guidance, seed, base, taken, sent) for seed in seeds]
            averages[guidance] = [one["average"] for one in made]
            seconds = sum(one["seconds"] for one in made)
            print(name, guidance, averages[guidance], f"{seconds:.0f} s", flush=True)
        best = max(averages, key=lambda guidance: mean(averages[guidance]))
        cells = {f"{guidance:g}": _figure(figures) for guidance, figures in averages.items()}
        rows.append({"": name, **cells, "best": f"{best:g}", "default": f"{_default(name):g}"})
    return rows


def _default(name: str) -> float:
    """The sum of the scales in pyproject.toml."""
    values = default_config()
    return sum(float(values[key]) for key in ROWS[name].scales)


def _figure(averages: Sequence[float]) -> str:
    spread = f" ± {stdev(averages):.1f}" if len(averages) > 1 else ""
    return f"{mean(averages):.1f}{spread}"


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def digest_of(settings: Mapping[str, object]) -> str:
    """Eight letters that stand for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def main() -> None:
    """Make the table and keep it; a quick one is printed alone."""
    parser = command_line(__doc__)
    parser.add_argument("methods", nargs="*", help=f"some of {listed(METHODS_OF)}; none: all")
    parser.add_argument("--seeds", default="0,1,2", help="of noise and training")
    parser.add_argument("--quick", action="store_true", help="two guidances, hardly any training")
    given = parser.parse_args()
    methods = some_of(given.methods, METHODS_OF, parser)
    names = [name for name, row in ROWS.items() if row.method in methods]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    base, grid = ({**COMMON, **QUICK}, QUICK_GRID) if given.quick else (COMMON, GRID)
    rows = table(names, seeds, grid, base)
    settings = " ".join(f"{key}={_text(value)}" for key, value in base.items())
    about = (
        "Top-1 accuracy (%) on the digits' validation split (public scans drawn anew in the "
        "clients' "
        "domains), average of the domains, for each sum of guidance scales; two branches share it "
        f"equally. Mean of seeds {given.seeds} of noise and training on the same payloads (seed "
        f"{SEED}), ± the standard deviation; {settings}. Default: the sum in pyproject.toml. "
        f"Command: `python -m benchmarks.guidance --seeds {given.seeds}`."
    )
    if given.quick:
        print(json.dumps(rows, indent=1))
    else:
        write_table(
            TABLES / "guidance", with_others(rows, TABLES / "guidance.json", about, ROWS), about
        )


if __name__ == "__main__":
    main()
