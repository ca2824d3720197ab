"""What every approximate mode of the synthesis gives in time and takes in accuracy, on the same
payloads; to benchmarks/tables/approximations-*.{md,json}.

python -m benchmarks.approximations feddeo   # solvers, a guidance interval, feature caching
python -m benchmarks.approximations fedlmg   # the gradient at x0, a solver, the small decoder
python -m benchmarks.approximations feddeo-few-steps   # the kit's few-step weights

A run of `osfl run` collects the payloads once. The server's half then draws and trains with them
again for every mode and seed (of noise and training), and every client's test images test the
model. Interrupted, the same command goes on.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from benchmarks import TABLES, command_line, write_table
from osfl.config import NodeConfig, RunConfig, Scalar, parse_run_config
from osfl.data.load import load_images
from osfl.data.parts import class_names
from osfl.methods import server_module
from osfl.models.classifiers import confusion
from osfl.payload.kinds import Payload
from osfl.payload.wire import decode
from osfl.run_folder.layout import RunFolder, open_run_folder, read_image
from osfl.run_folder.status import Status
from osfl.settings import default_config
from server_app.context import ServerJob
from server_app.expected import expected_payload

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "approximations"
PAIRS = 3
TIMED = {"feddeo": 5, "fedlmg": 1, "feddeo-few-steps": 5}  # images a class: some seconds each
COMMON: dict[str, Scalar] = {"num-clients": 6, "global-model.batch-size": 8}
BASES: dict[str, dict[str, Scalar]] = {
    "feddeo": {**COMMON, "feddeo.epochs": 15, "synthesis.images-per-class": 10},
    "fedlmg": {**COMMON, "fedlmg.strategies": "ft", "synthesis.images-per-class": 5},
}
BASES["feddeo-few-steps"] = BASES["feddeo"]
# The weights have the guidance of the default within them
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


def method_of(name: str) -> str:
    """Of a table."""
    return name.partition("-")[0]


def collected(method: str) -> Path:
    """The folder of a run whose clients have sent their payloads."""
    folder = WORK / f"{method}-payloads"
    if not (folder / "metrics.json").is_file():
        settings = [f"{key}={value}" for key, value in BASES[method].items()]
        command = [
            Path(sys.executable).parent / "osfl",
            "run",
            f"method={method}",
            f"job-id={folder.name}",
            *settings,
        ]
        subprocess.run([*command, "--runs", WORK], cwd=ROOT, check=True)
    return folder


def taken_from(payloads: Path, config: RunConfig) -> dict[str, Payload]:
    """What its clients sent."""
    expected = expected_payload(config, payloads.name)
    return {
        file.stem: decode(file.read_bytes(), expected(file.stem))
        for file in sorted((payloads / "payloads").glob("*.pb"))
    }


def config_of(method: str, mode: str, seed: int, **more: Scalar) -> RunConfig:
    """The server's, with a mode."""
    values = {
        **default_config(),
        **BASES[method],
        "method": method_of(method),
        "seed": seed,
        **MODES[method][mode],
        "runs-dir": str(WORK),
    }
    return parse_run_config({**values, **more})


def trained(config: RunConfig, folder: RunFolder, taken: Mapping[str, Payload]) -> torch.nn.Module:
    """The server's half."""
    return (
        server_module(config.method)
        .run(ServerJob(config, folder, Status(folder.path), tuple(taken)), taken)["FT"]
        .model
    )


def again(method: str, mode: str, seed: int, taken: Mapping[str, Payload]) -> dict[str, Any]:
    """The server's half with one mode and seed.

    Every client's accuracy (%), and the folder of the images.
    """
    config = config_of(method, mode, seed)
    folder = open_run_folder(
        config, f"{method}-{''.join(c if c.isalnum() else '-' for c in mode)}-s{seed}", 0
    )
    if not (folder.path / "result.json").is_file():
        model = trained(config, folder, taken)
        folder.write_json("result.json", [accuracy(config, model, k) for k in range(len(taken))])
    return {
        "accuracy": json.loads((folder.path / "result.json").read_text()),
        "folder": folder.path,
    }


def speeds(method: str, taken: Mapping[str, Payload]) -> dict[str, dict[str, Any]]:
    """Seconds an image of one client's images, each mode in turns with exact in this process, and
    the median of the pairs' ratios.
    """
    one = dict([next(iter(taken.items()))])

    def seconds(mode: str, turn: int) -> float:
        shutil.rmtree(WORK / "timed", ignore_errors=True)
        config = config_of(method, mode, turn, **{"synthesis.images-per-class": TIMED[method]})
        folder = open_run_folder(config, "timed", 0)
        trained(config, folder, one)
        rows = [
            json.loads(line) for line in (folder.path / "timings.jsonl").read_text().splitlines()
        ]
        return sum(row["seconds"] for row in rows) / sum(row["images"] for row in rows)

    found = {}
    for mode in MODES[method]:
        pairs = [(seconds("exact", turn), seconds(mode, turn)) for turn in range(PAIRS)]
        ratios = sorted(exact / approximate for exact, approximate in pairs)
        found[mode] = {
            "s/image": f"{median(approximate for _, approximate in pairs):.3f}",
            "times as fast": f"{median(ratios):.2f}",
        }
        found[mode] |= {"from": f"{ratios[0]:.2f}", "to": f"{ratios[-1]:.2f}"}
        print(mode, found[mode], flush=True)
    return found


def accuracy(config: RunConfig, model: torch.nn.Module, client: int) -> float:
    """Top-1 (%) on a client's test images."""
    node = NodeConfig(partition_id=client, num_partitions=config.num_clients)
    images = load_images(config.data, node, "test", 0)
    matrix = torch.tensor(
        confusion(
            model, images.pixels, images.labels, len(class_names(config.data)), torch.device("cpu")
        )
    )
    return 100 * matrix.trace().item() / matrix.sum().item()


def difference(one: Path, other: Path) -> float:
    """Mean absolute difference of two runs' images, in shades of 255."""
    found = []
    for line in (one / "manifest.jsonl").read_text().splitlines():
        file = json.loads(line)["file"]
        pictures = [read_image(folder / file) for folder in (one, other)]
        found.append((pictures[0].float() - pictures[1].float()).abs().mean().item())  # type: ignore[union-attr]
    return mean(found)


def table(method: str, seeds: list[int]) -> list[dict[str, str]]:
    """A row for every mode."""
    taken = taken_from(collected(method_of(method)), config_of(method, "exact", 0))
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES[method]}
    for seed in seeds:
        for mode in runs:
            runs[mode].append(again(method, mode, seed, taken))
            print(mode, seed, runs[mode][-1]["accuracy"], flush=True)
    fast = speeds(method, taken)
    rows = []
    exact = [mean(run["accuracy"]) for run in runs["exact"]]
    for mode, made in runs.items():
        accuracies = [mean(run["accuracy"]) for run in made]
        against = [a - b for a, b in zip(accuracies, exact, strict=True)]
        spread = f" ± {stdev(against):.1f}" if len(against) > 1 else ""
        shades = mean(
            difference(run["folder"], base["folder"])
            for run, base in zip(made, runs["exact"], strict=True)
        )
        row = {
            "": mode,
            "average": f"{mean(accuracies):.1f}",
            "to exact": f"{mean(against):+.1f}{spread}",
            "shades of 255": f"{shades:.1f}",
        }
        if mode == "exact":
            row |= {"to exact": "", "shades of 255": ""}
        rows.append(row | fast[mode])
    return rows


def main() -> None:
    """Make a method's table and keep it."""
    parser = command_line(__doc__)
    parser.add_argument("method", choices=MODES)
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    rows = table(given.method, [int(seed) for seed in given.seeds.split(",")])
    settings = " ".join(f"{key}={value}" for key, value in BASES[given.method].items())
    about = (
        f"Top-1 accuracy (%), {method_of(given.method)} with {settings}, mean of seeds "
        f"{given.seeds} of noise and training on the same payloads; ± the standard "
        "deviation of the difference to exact; shades: mean absolute difference of the images of "
        "the same noise. "
        f"Times as fast: the median of {PAIRS} pairs in turns, {TIMED[given.method]} images of "
        "each class, and the least and the largest. "
        f"Command: `python -m benchmarks.approximations {given.method} --seeds {given.seeds}`."
    )
    write_table(TABLES / f"approximations-{given.method}", rows, about)


if __name__ == "__main__":
    main()
