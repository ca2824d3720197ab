"""Measure poisoning by malicious clients, and the defense `defense`.

python -m benchmarks.robustness.poisoning        # every system and attack
python -m benchmarks.robustness.poisoning OSCAR  # some systems; the table keeps its other rows

The attacks are in benchmarks/robustness/attacks.py. Every client's images are drawn from its honest
payload and from its attacked one, and a federation is merged from them. Models that train on the
same images are trained once.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch

from benchmarks.federation import (
    Settings,
    accuracy_on_test,
    cell_name,
    client_images,
    images_of,
    payloads_of,
    predictions,
)
from benchmarks.harness import Experiment, Line
from benchmarks.robustness.attacks import (
    BACKDOOR,
    HONEST,
    SYSTEMS,
    TARGET,
    attacked,
    attacks_of,
    clients_of,
    federation,
    job_of,
    malicious_counts,
    patched,
    settings_of,
    synthetic_set,
)
from osfl.data.load import Images
from osfl.methods import METHODS, server_module
from osfl.payload.kinds import Payload
from server_app.context import ServerJob
from server_app.defenses import label_consistency
from server_app.defenses.filters import drop_clients_without_images, filter_images
from server_app.defenses.outliers import find_outliers
from server_app.pipeline import train_global_model
from server_app.synthesis.images import SyntheticSet

SEEDS = (0,)
Cell = dict[str, Any]
EXPERIMENT = Experiment(
    __file__,
    SYSTEMS,
    "Top-1 accuracy (%) on all clients' test images, mean of the clients, where the first of six "
    "or thirty clients are malicious. Undefended: `defense = off`; without the malicious clients: "
    "a federation of the others alone. Every run reports outliers by norms or spreads. In rows of "
    "honest negatives all clients are honest: these columns are of clients whose images are "
    "negatives. Backdoor success: of test images of another class with a white patch, those "
    f"predicted as class {TARGET}, in the same four federations. FedCADO draws ten "
    "images of a class, the others of six thirty. "
    f"Seeds {SEEDS}; recipe and payloads are benchmarks.accuracy.method_comparison's.",
)


def defended(system: str, seed: int) -> Settings:
    """Return a system's settings with `defense`, where its method synthesizes images."""
    settings = settings_of(system, seed)
    samples = METHODS[str(settings["method"])].samples
    return {**settings, "defense": "label-consistency"} if samples else settings


def scored(system: str, images: SyntheticSet, seed: int) -> dict[str, float]:
    """Return the scores of a model trained on images, as `scores_of` does."""
    settings = settings_of(system, seed)
    content = images.pixels.numpy().tobytes() + images.labels.numpy().tobytes()
    name = f"model-{hashlib.sha256(content).hexdigest()[:8]}"

    def compute() -> dict[str, float]:
        job = job_of(settings, name)
        (result,) = train_global_model(job, {}, images).values()
        return scores_of(job, result.model)

    scores: dict[str, float] = EXPERIMENT.cell(f"{name}-{cell_name(settings)}", compute)
    return scores


def scores_of(job: ServerJob, model: torch.nn.Module) -> dict[str, float]:
    """Return the "accuracy" (%) on all clients' test images, and the share (%) "backdoor": images
    of other classes with the patch that are predicted as the target.
    """
    numbers = range(job.config.num_clients)
    accuracies = [accuracy_on_test(job.config, model, number) for number in numbers]
    fooled = [backdoor_success(model, images) for images in client_images("test")]
    return {"accuracy": mean(accuracies), "backdoor": mean(fooled)}


def backdoor_success(model: torch.nn.Module, images: Images) -> float:
    """Return the share (%) of other classes' images with the patch predicted as the target."""
    sources = images.labels != TARGET
    pixels = patched(images.pixels[sources.nonzero().flatten()])
    return 100 * (predictions(model, pixels) == TARGET).double().mean().item()


def defense_digest() -> str:
    """Return a digest of the defense's code without its docstrings."""
    code = ast.parse(inspect.getsource(label_consistency))
    for node in ast.walk(code):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return hashlib.sha256(ast.dump(code).encode()).hexdigest()[:8]


def cell(system: str, attack: str, count: int, seed: int) -> Cell:
    """Return the scores with `count` malicious clients: if they were honest ("no attack"), with
    them ("used"), without flagged clients ("excluded") and without the malicious ones; and counts
    of flagged clients. It is kept as long as the defense's code is the same.
    """
    settings = defended(system, seed)
    words = attack.replace(" ", "-").replace("'", "")
    name = f"defended-{words}-{count}-{defense_digest()}"

    def compute() -> Cell:
        return run_federation(system, attack, count, seed, job_of(settings, name))

    result: Cell = EXPERIMENT.cell(f"{name}-{cell_name(settings)}", compute)
    return result


def run_federation(system: str, attack: str, count: int, seed: int, job: ServerJob) -> Cell:
    """Compute a cell."""
    clients = clients_of(system)
    malicious, benign = clients[:count], clients[count:]
    honest = payloads_of(settings_of(system, seed))
    payloads = payloads_with(system, attack, count, seed)
    if not METHODS[job.config.method].samples:
        return {
            "no attack": solved(job, honest),
            "used": solved(job, payloads),
            "without": solved(job, {client: honest[client] for client in benign}),
        }
    images = federation(system, attack, malicious, seed)
    remaining = filter_images(job, images)
    trusted = drop_clients_without_images(payloads, images, remaining)
    dropped = pairs_of(images_of(images, tuple(trusted))) - pairs_of(remaining)
    return {
        "no attack": scored(system, synthetic_set(system, HONEST, seed), seed),
        "used": scored(system, images, seed),
        "excluded": scored(system, remaining, seed),
        "without": scored(system, images_of(images, benign), seed),
        "malicious": len(set(malicious) - set(trusted)),
        "malicious classes": sum(client in malicious for client, _ in dropped),
        "honest": len(set(benign) - set(trusted)),
        "honest classes": sum(client in benign for client, _ in dropped),
    }


def payloads_with(system: str, attack: str, count: int, seed: int) -> dict[str, Payload]:
    """Return the payloads that the server receives from a federation with malicious clients."""
    attacking = attacked(system, attack, seed)
    malicious = {client: attacking[client] for client in clients_of(system)[:count]}
    return {**payloads_of(settings_of(system, seed)), **malicious}


def outlier_count(system: str, attack: str, count: int, seed: int) -> int:
    """Count the malicious clients that every run reports for their norms or spreads."""
    outliers = find_outliers(payloads_with(system, attack, count, seed))
    return len(set(clients_of(system)[:count]) & {outlier.client for outlier in outliers})


def solved(job: ServerJob, payloads: dict[str, Payload]) -> dict[str, float]:
    """Return the scores of a method that synthesizes no image."""
    (result,) = server_module(job.config.method).run(job, payloads).values()
    return scores_of(job, result.model)


def pairs_of(images: SyntheticSet) -> set[tuple[str, int]]:
    """Return the pairs of client and class that have an image."""
    return set(zip(images.clients, images.labels.tolist(), strict=True))


def line(system: str, attack: str, count: int, seeds: Sequence[int] = SEEDS) -> Line:
    """Return a row of the table."""
    cells = [cell(system, attack, count, seed) for seed in seeds]

    def average(kind: str, score: str = "accuracy") -> str:
        return f"{mean(cell[kind][score] for cell in cells):.1f}"

    def total(kind: str) -> str:
        return str(sum(cell[kind] for cell in cells)) if defends else ""

    # `defense` scores images, where there are any
    defends = "excluded" in cells[0]
    of_all = f" of {count * len(cells)}"
    outliers = sum(outlier_count(system, attack, count, seed) for seed in seeds)
    fooled = ""
    if attack == BACKDOOR:
        kinds = ("no attack", "used", "excluded", "without")
        fooled = ", ".join(average(kind, "backdoor") for kind in kinds)
    return {
        "": f"{system}: {attack}, {count} of {len(clients_of(system))}",
        "no attack": average("no attack"),
        "undefended": average("used"),
        "exclude": average("excluded") if defends else "",
        "without the malicious clients": average("without"),
        "malicious clients excluded": f"{total('malicious')}{of_all}" if defends else "",
        "single classes of malicious clients excluded": total("malicious classes"),
        "honest clients excluded": total("honest"),
        "single classes of honest clients excluded": total("honest classes"),
        "malicious clients reported as outliers": f"{outliers}{of_all}",
        "backdoor success (%)": fooled,
    }


def lines_of(system: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line for each attack and number of malicious clients."""
    for attack in attacks_of(system):
        for count in malicious_counts(system):
            yield line(system, attack, count)


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
