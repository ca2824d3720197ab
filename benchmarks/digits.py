"""The README's table: every method on the six handwritten domains, three seeds, through real Flower runs.

    python -m benchmarks.digits [--seeds 0,1,2] [--methods feddeo,fedlmg] [--at-once 2]

Runs that are done are reused; an interrupted one is resumed.
"""

import argparse
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.runs import machine, run_all, write
from osfl.report import human_bytes, human_flops

METHODS = ("ceiling", "local", "prompts-only", "feddeo", "fedlmg")
DOMAINS = ("clipart", "infograph", "neon", "painting", "photo", "sketch")  # of client-0 to client-5


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side, each on its share of the cores")
    arguments = parser.parse_args()
    seeds, methods = arguments.seeds.split(","), arguments.methods.split(",")
    wanted = [
        (f"digits-{method}-s{seed}", "configs/digits.toml", f"method={method}", f"seed={seed}")
        for method in methods
        for seed in seeds
    ]
    done = run_all(wanted[::-1], arguments.at_once)[::-1]  # the longest first, so that no core idles at the end
    records = [row for metrics in done for row in rows_of(metrics)]
    command = f"python -m benchmarks.digits --seeds {arguments.seeds}" + (
        "" if methods == list(METHODS) else f" --methods {arguments.methods}"
    )
    write("digits", records, table(records, command, arguments.at_once))


def rows_of(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """One record a global model; Local's six models become their mean."""
    clients, server = metrics["clients"].values(), metrics["server"]
    costs = {
        "upload_bytes": max(c.get("upload_bytes", 0) for c in clients),
        "client_flops": max(c.get("flops", 0) for c in clients),
        "client_seconds": max(c.get("seconds", 0) for c in clients),
        "seconds_per_image": server["seconds_per_image"],
    }
    accuracy = metrics["accuracy"]
    if metrics["method"] == "local":
        accuracy = {"": {key: float(np.mean([row[key] for row in accuracy.values()])) for key in next(iter(accuracy.values()))}}
    return [
        {
            "method": metrics["method"],
            "model": name,
            "seed": metrics["seed"],
            "accuracy": row,
            **costs,
            "versions": metrics["versions"],
        }
        for name, row in accuracy.items()
    ]


def table(records: list[dict[str, Any]], command: str, at_once: int) -> str:
    """Mean over the seeds, and the standard deviation of the average."""
    groups = defaultdict(list)
    for record in records:
        name = record["method"] + (f" {record['model']}" if record["method"] == "fedlmg" else "")
        groups[name].append(record)
    lines = [
        "| method | " + " | ".join(DOMAINS) + " | average | upload a client | client compute | server s/image |",
        "|---|" + "---:|" * (len(DOMAINS) + 4),
    ]
    for name, group in groups.items():
        cells = [f"{np.mean([r['accuracy'][f'client-{k}'] for r in group]):.1f}" for k in range(len(DOMAINS))]
        averages = [r["accuracy"]["average"] for r in group]
        spread = f" ± {np.std(averages, ddof=1):.1f}" if len(averages) > 1 else ""
        seconds = [r["seconds_per_image"] for r in group if r["seconds_per_image"]]
        cells += [
            f"**{np.mean(averages):.1f}**{spread}",
            human_bytes(np.mean([r["upload_bytes"] for r in group])),
            human_flops(np.mean([r["client_flops"] for r in group])),
            f"{np.mean(seconds):.3f}" if seconds else "",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    versions = records[0]["versions"]
    seeds = sorted({r["seed"] for r in records})
    note = (
        f"\nTop-1 accuracy (%), each client testing the global model on its own 300 images; mean of seeds {', '.join(map(str, seeds))}, ± the "
        f"standard deviation of the average. Command: `{command}`, {at_once} runs at a time. {machine()}, flwr {versions['flwr']}, diffusers "
        f"{versions.get('diffusers', '-')}.\n"
    )
    return "\n".join(lines) + "\n" + note


if __name__ == "__main__":
    main()
