"""The sweeps behind the digits' settings, shown openly.

Three clients (clipart, infograph, neon), six images a class and client, and a seed that the README's table does not have.

python -m benchmarks.sweep feddeo     lr of Adam against epochs S
python -m benchmarks.sweep guidance   FedDEO's two guidance scales
python -m benchmarks.sweep fedlmg     lambda and the gradient scale
python -m benchmarks.sweep batch      images in a step of the global model, on real images
"""

import argparse
from itertools import product

from benchmarks.runs import machine, run_all, write

COMMON = ("num-clients=3", "synthesis.images-per-class=6", "seed=100", "fedlmg.strategies=ft")
SWEEPS: dict[str, tuple[str, dict[str, tuple[float, ...]]]] = {
    "feddeo": ("feddeo", {"feddeo.lr": (0.03, 0.1, 0.3), "feddeo.epochs": (20, 40)}),
    "guidance": ("feddeo", {"feddeo.guidance-text": (0.0, 1.0), "feddeo.guidance-description": (2.0, 3.0)}),
    "fedlmg": ("fedlmg", {"fedlmg.bn-weight": (0.0, 0.1), "fedlmg.gradient-scale": (1.0, 2.0)}),
    "batch": ("ceiling", {"global-model.batch-size": (8, 16, 32)}),
}


def main() -> None:
    """Run the grid and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side, each on its share of the cores")
    arguments = parser.parse_args()
    name = arguments.sweep
    method, axes = SWEEPS[name]
    grid, wanted = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())], []
    for settings in grid:
        job = f"sweep-{name}-" + "-".join(f"{v:g}".replace(".", "_") for v in settings.values())
        typed = [f"{key}={v}" for key, v in settings.items()]
        wanted.append((job, "configs/digits.toml", *COMMON, f"method={method}", *typed))
    records = []
    for settings, metrics in zip(grid, run_all(wanted, arguments.at_once), strict=True):
        models = {model: row["average"] for model, row in metrics["accuracy"].items()}
        records.append(
            {"settings": settings, "average": models, "client_seconds": metrics["clients"]["client-0"].get("seconds")}
        )
    models = list(records[0]["average"])
    lines = ["| " + " | ".join([*axes, *models]) + " |", "|" + "---:|" * (len(axes) + len(models))]
    lines += [
        "| " + " | ".join([f"{v:g}" for v in r["settings"].values()] + [f"{r['average'][m]:.1f}" for m in models]) + " |"
        for r in records
    ]
    settings_of_all = " ".join(COMMON)
    note = f"\nAverage top-1 accuracy (%), `{settings_of_all}`. Command: `python -m benchmarks.sweep {name}`. {machine()}.\n"
    write(f"sweep-{name}", records, "\n".join(lines) + "\n" + note)


if __name__ == "__main__":
    main()
