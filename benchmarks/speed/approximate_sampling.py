"""Measure what each approximate mode of sampling gains in time and loses in accuracy.

python -m benchmarks.speed.approximate_sampling feddeo            # solvers, guidance, caching
python -m benchmarks.speed.approximate_sampling fedlmg            # gradient at x0, tiny decoder
python -m benchmarks.speed.approximate_sampling feddeo-few-steps  # the kit's few-step weights

`osfl run` collects the payloads once. The server's half then synthesizes and trains with them for
every mode and seed (of noise and training), and every client's test images test the model.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.federation import accuracy_on_test, run_once
from benchmarks.harness import Experiment, Line, command_line, parsed_seeds
from osfl.config import RunConfig, Scalar, parse_run_config
from osfl.methods import server_module
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode
from osfl.run_folder.layout import RunFolder, open_run_folder, read_image
from osfl.run_folder.status import Status
from osfl.settings import default_config
from server_app.context import ServerJob
from server_app.expected import expected_payload

PAIRS = 3
# Images per class that are timed, some seconds each
TIMED = {"feddeo": 5, "fedlmg": 1, "feddeo-few-steps": 5}
COMMON: dict[str, Scalar] = {"num-clients": 6, "global-model.batch-size": 8}
BASES: dict[str, dict[str, Scalar]] = {
    "feddeo": {**COMMON, "feddeo.epochs": 15, "synthesis.images-per-class": 10},
    "fedlmg": {**COMMON, "fedlmg.strategies": "ft", "synthesis.images-per-class": 5},
}
BASES["feddeo-few-steps"] = BASES["feddeo"]
# The weights were distilled with the default's guidance
FEW: dict[str, Scalar] = {"synthesis.lora": "kit", "feddeo.guidance-description": 1.0}
MODES: dict[str, dict[str, dict[str, Scalar]]] = {
    "feddeo": {
        "exact": {},
        "DDIM, 10 steps": {"synthesis.steps": 10},
        "UniPC, 10 steps": {"synthesis.solver": "unipc", "synthesis.steps": 10},
        "DPM-Solver++, 10 steps": {"synthesis.solver": "dpm-solver++", "synthesis.steps": 10},
        "UniPC, 6 steps": {"synthesis.solver": "unipc", "synthesis.steps": 6},
        "guided at 200 to 800": {"synthesis.guided-from": 200, "synthesis.guided-to": 800},
        "features cached, 1 of 2": {"synthesis.cache-interval": 2},
        "features cached, 1 of 3": {"synthesis.cache-interval": 3},
    },
    "fedlmg": {
        "exact": {},
        "gradient at x0": {"fedlmg.gradient": "x0"},
        "small decoder": {"synthesis.small-decoder": "kit"},
        "gradient at x0, small decoder": {
            "fedlmg.gradient": "x0",
            "synthesis.small-decoder": "kit",
        },
        "UniPC, 10 steps": {"synthesis.solver": "unipc", "synthesis.steps": 10},
    },
    "feddeo-few-steps": {
        "exact": {},
        "DDIM, 4 steps, no weights": {"synthesis.steps": 4},
        "UniPC, 4 steps, no weights": {"synthesis.solver": "unipc", "synthesis.steps": 4},
        "LCM, 2 steps": {**FEW, "synthesis.solver": "lcm", "synthesis.steps": 2},
        "LCM, 4 steps": {**FEW, "synthesis.solver": "lcm", "synthesis.steps": 4},
        "LCM, 8 steps": {**FEW, "synthesis.solver": "lcm", "synthesis.steps": 8},
        "TCD, 4 steps": {**FEW, "synthesis.solver": "tcd", "synthesis.steps": 4},
    },
}
Payloads = Mapping[str, Payload]


def experiment(name: str) -> Experiment:
    """Return a table."""
    settings = " ".join(f"{key}={value}" for key, value in BASES[name].items())
    return Experiment(
        __file__,
        tuple(MODES[name]),
        f"Top-1 accuracy (%), {method_of(name)} with {settings}, mean of seeds {{seeds}} of noise "
        "and training on the same payloads; ± the standard deviation of the difference to exact; "
        "shades: mean absolute difference of the images of the same noise. Times as fast: the "
        f"median of {PAIRS} pairs in turns, {TIMED[name]} images of each class, and the least and "
        "the largest.",
        (0, 1, 2),
        name,
        f"approximate-sampling-{name}",
    )


def method_of(name: str) -> str:
    """Return the method of a table."""
    return name.partition("-")[0]


WORK = experiment("feddeo").work


def collect(name: str) -> dict[str, Payload]:
    """Return the payloads of a run's clients."""
    method = method_of(name)
    folder = run_once(WORK / f"{method}-payloads", {"method": method, **BASES[method]})
    expected = expected_payload(config_of(name, "exact", 0), folder.name)
    files = sorted((folder / "payloads").glob("*.pb"))
    return {file.stem: decode(file.read_bytes(), expected(file.stem)) for file in files}


def config_of(name: str, mode: str, seed: int, **more: Scalar) -> RunConfig:
    """Return the server's configuration with a mode."""
    settings = {**BASES[name], "method": method_of(name), "seed": seed, **MODES[name][mode]}
    return parse_run_config({**default_config(), **settings, "runs-dir": str(WORK), **more})


def run_server(config: RunConfig, folder: RunFolder, payloads: Payloads) -> Any:
    """Run the server's half, and return its model."""
    job = ServerJob(config, folder, Status(folder.path), tuple(payloads))
    return server_module(config.method).run(job, payloads)["FT"].model


def cell(name: str, mode: str, seed: int, payloads: Payloads) -> tuple[list[float], Path]:
    """Return every client's accuracy (%), and the folder of the images."""
    config = config_of(name, mode, seed)
    words = "".join(c if c.isalnum() else "-" for c in mode)
    folder = open_run_folder(config, f"{name}-{words}-s{seed}", 0)

    def compute() -> list[float]:
        model = run_server(config, folder, payloads)
        return [accuracy_on_test(config, model, k) for k in range(len(payloads))]

    return experiment(name).cell(folder.path.name, compute), folder.path


def speed_of(name: str, mode: str, payloads: Payloads) -> Line:
    """Time the images of one client, the mode in turns with exact: seconds an image of the mode,
    and the ratios of the pairs.
    """
    one = dict([next(iter(payloads.items()))])

    def seconds(mode: str, turn: int) -> float:
        shutil.rmtree(WORK / "timed", ignore_errors=True)
        config = config_of(name, mode, turn, **{"synthesis.images-per-class": TIMED[name]})
        folder = open_run_folder(config, "timed", 0)
        run_server(config, folder, one)
        rows = list(map(json.loads, folder.timings_file.read_text().splitlines()))
        return sum(row["seconds"] for row in rows) / sum(row["images"] for row in rows)

    pairs = [(seconds("exact", turn), seconds(mode, turn)) for turn in range(PAIRS)]
    ratios = sorted(exact / approximate for exact, approximate in pairs)
    return {
        "s/image": f"{median(approximate for _, approximate in pairs):.3f}",
        "times as fast": f"{median(ratios):.2f}",
        "from": f"{ratios[0]:.2f}",
        "to": f"{ratios[-1]:.2f}",
    }


def shades_apart(folder: Path, other: Path) -> float:
    """Return the mean absolute difference of two runs' images, in shades of 255."""
    differences = []
    for line in (folder / "manifest.jsonl").read_text().splitlines():
        file = json.loads(line)["file"]
        pictures = [read_image(one / file).float() for one in (folder, other)]  # type: ignore[union-attr]
        differences.append((pictures[0] - pictures[1]).abs().mean().item())
    return mean(differences)


def line(name: str, mode: str, seeds: Sequence[int], payloads: Payloads) -> Line:
    """Return a row of the table."""
    cells = [cell(name, mode, seed, payloads) for seed in seeds]
    exact = [cell(name, "exact", seed, payloads) for seed in seeds]
    averages = [mean(accuracies) for accuracies, _ in cells]
    columns = {"": mode, "average": f"{mean(averages):.1f}", "to exact": "", "shades of 255": ""}
    if mode != "exact":
        apart = [one - mean(other) for one, (other, _) in zip(averages, exact, strict=True)]
        spread = f" ± {stdev(apart):.1f}" if len(apart) > 1 else ""
        folders = zip(cells, exact, strict=True)
        shades = mean(shades_apart(one, other) for (_, one), (_, other) in folders)
        columns["to exact"] = f"{mean(apart):+.1f}{spread}"
        columns["shades of 255"] = f"{shades:.1f}"
    return columns | speed_of(name, mode, payloads)


def main() -> None:
    """Make a table."""
    parser = command_line(__doc__)
    parser.add_argument("name", choices=MODES)
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    name = arguments.name
    payloads = collect(name)
    experiment(name).write(
        list(MODES[name]),
        lambda mode, seeds: line(name, mode, seeds, payloads),
        parsed_seeds(arguments.seeds),
    )


if __name__ == "__main__":
    main()
