"""Bytes and accuracy of payloads as float32, int8 and int4 (`payload-codec`); to
benchmarks/tables/codecs.{md,json,png}.

python -m benchmarks.codecs                    # every system
python -m benchmarks.codecs domain-vector      # some; the table keeps its other rows
python -m benchmarks.codecs --without-training # bytes, errors, and the accuracy of classifiers; to
                                               # codecs-bytes.{md,json}, or with --seeds 0 to
                                               # codecs-bytes-seeds-0

The cells are benchmarks.main_table's. The payloads of a system and seed are the same ones, coded
in three ways; noise and training have their seed. Interrupted, the same command goes on.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean

import torch
from scipy import stats

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_figure, write_table
from benchmarks.clients import sent
from benchmarks.left_out import against
from benchmarks.main_table import CODED, SEEDS, WORK, averages, cells, config_of, settings_of
from benchmarks.teachers import on_own
from osfl.models.classifiers import rebuild
from osfl.payload.kinds import Classifier, Payload
from osfl.payload.wire import encode
from osfl.util.files import make_private_folder

CODECS = ("raw", "int8", "int4")
PACKED = ("raw", "float16", "int8", "int4")
# A client's ResNet-18; no global model is trained by such classifiers here
UNTRAINED = ("FedLMG",)
LIKE_OWN = "classifiers, on images like their own (%)"


def row_of(system: str, codec: str) -> str:
    """In the main table."""
    return system if codec == "raw" else f"{system}, {codec}"


def tensors_of(payload: Payload) -> dict[str, torch.Tensor]:
    """By name, a classifier's too."""
    found = {}
    for name, value in vars(payload).items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            found |= value
    return found


def bytes_and_error(system: str, codec: str, seeds: Sequence[int]) -> tuple[float, float]:
    """Bytes of a client's message, the mean over clients and seeds; and how far the square of all
    numbers is above that of their errors, in dB.
    """
    sizes = []
    signal = 0.0
    error = 0.0
    for seed in seeds:
        settings = {**settings_of(system, seed), "payload-codec": codec}
        config = config_of(settings)
        exact = sent(settings_of(system, seed))
        for client, payload in sent(settings).items():
            message = encode(exact[client], config.method, "job", client, codec)
            sizes.append(len(message))
            found = tensors_of(payload)
            for name, numbers in tensors_of(exact[client]).items():
                signal += numbers.double().square().sum().item()
                error += (numbers.double() - found[name].double()).square().sum().item()
    return mean(sizes), 10 * math.log10(signal / error) if error else math.inf


@cache
def accuracy_of_classifiers(system: str, codec: str, seed: int) -> float:
    """Of what clients send, decoded, each on the validation images that are like its own (%)."""
    settings = {**settings_of(system, seed), "payload-codec": codec}
    config = config_of(settings).classifier
    models = {}
    for client, payload in sent(settings).items():
        assert isinstance(payload, Classifier)
        models[client] = rebuild(
            payload.state, payload.architecture, len(payload.classes), config.small_stem
        )
    return on_own(settings, models)


def line_of_bytes(system: str, codec: str, seeds: Sequence[int]) -> dict[str, str]:
    """What needs no training of a global model."""
    size, decibels = bytes_and_error(system, codec, seeds)
    made = {
        "": row_of(system, codec),
        "bytes a client": f"{size:.0f}",
        "signal to error (dB)": "" if codec == "raw" else f"{decibels:.1f}",
    }
    if system in UNTRAINED:
        found = {seed: accuracy_of_classifiers(system, codec, seed) for seed in seeds}
        exact = {seed: accuracy_of_classifiers(system, "raw", seed) for seed in seeds}
        made[LIKE_OWN] = f"{mean(found.values()):.1f}"
        made[f"{LIKE_OWN}, to raw"] = "" if codec == "raw" else against(found, exact)
    return made


def line(system: str, codec: str, seeds: Sequence[int]) -> dict[str, str]:
    """A row of the table."""
    row = row_of(system, codec)
    accuracies = averages(row, seeds, "domain")
    raw = averages(system, seeds, "domain")
    return {
        **line_of_bytes(system, codec, seeds),
        "system": system,
        "codec": codec,
        "average": f"{mean(accuracies.values()):.1f}",
        "standard error": f"{stats.sem(list(accuracies.values())):.2f}",
        "to raw": "" if codec == "raw" else against(accuracies, raw),
    }


def plot(lines: Sequence[Mapping[str, str]], file: Path) -> None:
    """Accuracy against bytes, a curve for each system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    panel = figure.subplots()
    for system in dict.fromkeys(one["system"] for one in lines):
        own = [one for one in lines if one["system"] == system]
        panel.errorbar(
            [float(one["bytes a client"]) for one in own],
            [float(one["average"]) for one in own],
            [float(one["standard error"]) for one in own],
            marker="o",
            capsize=3,
            label=system,
        )
        for one in own:
            at = (float(one["bytes a client"]), float(one["average"]))
            panel.annotate(one["codec"], at, (4, 6), textcoords="offset points", fontsize=8)
    panel.set(xlabel="bytes a client", ylabel="top-1 accuracy (%)", xscale="log")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    write_figure(file, figure)


def main() -> None:
    """Make the table and the plot, and keep them."""
    parser = command_line(__doc__)
    parser.add_argument(
        "systems", nargs="*", help=f"some of {listed((*CODED, *UNTRAINED))}; none: all"
    )
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--at-once", type=int, default=1, help="cells side by side (default 1)")
    parser.add_argument("--without-training", action="store_true")
    given = parser.parse_args()
    known = (*CODED, *UNTRAINED) if given.without_training else CODED
    systems = some_of(given.systems, known, parser)
    make_private_folder(WORK)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    if given.without_training:
        cut = "" if tuple(seeds) == SEEDS else f"-seeds-{'-'.join(map(str, seeds))}"
        table = TABLES / f"codecs-bytes{cut}"
        about = (
            "What a client sends by every payload-codec, for the digits' ten classes, and how far "
            "its numbers are above their errors; the payloads of benchmarks.main_table, mean of "
            f"the seeds {given.seeds}. A classifier is tested on the validation images of its "
            "client's domain. Command: `python -m benchmarks.codecs --without-training "
            f"--seeds {given.seeds}`."
        )
        lines = [line_of_bytes(system, codec, seeds) for system in systems for codec in PACKED]
        order = [row_of(system, codec) for system in known for codec in PACKED]
        write_table(table, with_others(lines, table.with_suffix(".json"), about, order), about)
        return
    pairs = [(system, codec) for system in systems for codec in CODECS]
    cells([row_of(*pair) for pair in pairs], seeds, "domain", given.at_once)
    about = (
        "What six clients send by three payload-codecs, for ten classes, and the top-1 accuracy "
        f"(%) on their test images, mean of the seeds {given.seeds}; the recipe of "
        "benchmarks.main_table. To raw: paired by seed, with a 95 % interval by Student's t, and "
        "a star where that excludes 0. "
        f"Command: `python -m benchmarks.codecs --seeds {given.seeds}`."
    )
    order = [row_of(system, codec) for system in CODED for codec in CODECS]
    lines = [line(*pair, seeds) for pair in pairs]
    lines = with_others(lines, TABLES / "codecs.json", about, order)
    write_table(TABLES / "codecs", lines, about)
    plot(lines, TABLES / "codecs.png")


if __name__ == "__main__":
    main()
