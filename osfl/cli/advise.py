"""`osfl advise`: ask the clients for three figures, and print which methods are worth it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table

from osfl.advice import FIRST, WORTH, Figures, Verdict, judge, kind_of, pool
from osfl.cli import display
from osfl.cli.client_costs import client_flops
from osfl.cli.estimate import planned_images, upload_bytes
from osfl.cli.plan import synthesis_flops
from osfl.cli.run import handle_signals
from osfl.cli.run_clients import Client, placeholder_clients
from osfl.config import ConfigError, NodeConfig, RunConfig, Scalar
from osfl.data.load import domain_name, image_labels
from osfl.data.parts import class_names, client_name
from osfl.kit.folder import KitError
from osfl.launch.flower import LaunchError
from osfl.launch.jobs import Resources, new_job, run_remotely, simulate
from osfl.launch.views import ConsoleDisplay
from osfl.methods import METHODS
from osfl.methods.mixed import MixedConfig
from osfl.models.classifiers import ClassifierError
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.settings import RECOMMENDED, read_overrides, resolve_config
from osfl.util.files import CorruptFileError, write_atomically

# Keys and sections that a measurement depends on; no method can refuse any of them
KEYS = (
    "seed",
    "num-clients",
    "min-clients",
    "held-out",
    "kit",
    "image-encoder",
    "device",
    "join-timeout",
    "deadline",
    "max-images",
    "runs-dir",
    "job-id",
    "synthesis.prompt",
)
SECTIONS = ("data.", "classifier.")
# A run must have a method; the settings of this one are not used
METHOD = "local"
COLUMNS = ("method", "verdict", "a client sends", "a client computes", "synthesis", "gives away")


@dataclass(frozen=True)
class Row:
    """A method's row of the table.

    Attributes:
        upload: bytes of the client that sends most, over all rounds; None if unknown.
        compute: FLOPs of the client that computes most; None if unknown.
        synthesis: FLOPs of the server's UNet passes; None if unknown.
        gives_away: what an adversary could learn of a client's images.
        problem: why the method cannot run with these settings, or why a cost is unknown.
    """

    method: str
    kind: str
    verdict: Verdict
    upload: int | None = None
    compute: float | None = None
    synthesis: float | None = None
    gives_away: str = ""
    problem: str = ""


def show_advice(
    settings: list[str], runs: Path | None, connection: str, resources: Resources
) -> None:
    """Ask the clients, and print and save the table.

    Raises:
        typer.Exit: the settings are invalid, or the clients could not be asked.
    """
    handle_signals()
    try:
        overrides = read_overrides(settings)
        job = new_job([measurement(overrides)], runs, connection)
        progress = ConsoleDisplay(display.console)
        if connection:
            advice = run_remotely(job, connection, progress).get("advice", {})
        else:
            advice = simulate(job, resources, progress, _read)
        figures = read_figures(advice.get("clients", {}))
        rows = advise_methods(overrides, figures, simulated=not connection)
    except (ConfigError, CorruptFileError, LaunchError, OSError, ValueError) as error:
        display.print_error(error)
        raise typer.Exit(1) from None
    withheld = [str(client) for client in advice.get("withheld", ())]
    _print(figures, withheld, rows)
    if not connection:
        file = job.folder.advice_table
        write_atomically(file, markdown(figures, withheld, rows).encode())
        progress.print(f"table: {file}")


def measurement(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of the run that only measures.

    Raises:
        ConfigError: the run demands a guarantee.
    """
    if overrides.get("epsilon"):
        raise ConfigError(
            f"epsilon = {overrides['epsilon']}: the figures of osfl advise are exact, so every "
            "client would withhold them; set it to 0"
        )
    settings = {key: overrides[key] for key in overrides if key in KEYS or key.startswith(SECTIONS)}
    job_id = f"advise-s{overrides.get('seed', 0)}-{time.strftime('%Y%m%d-%H%M%S')}"
    return {"job-id": job_id, **settings, "method": METHOD, "advise": True}


def _read(folder: Path) -> dict[str, Any]:
    return RunFolder(folder).advice()


def read_figures(clients: Mapping[str, Mapping[str, float | None]]) -> dict[str, Figures]:
    """Return the figures by client, as `store_advice` and the log have them."""
    return {client: Figures(**row) for client, row in clients.items()}


# ---- The table's rows ----


def advise_methods(
    overrides: Mapping[str, Scalar], figures: Mapping[str, Figures], simulated: bool
) -> list[Row]:
    """Return a row for every method, the first choice first.

    Args:
        overrides: the user's settings.
        simulated: whether the clients' images are on this machine.

    Raises:
        ConfigError: the settings are invalid.
    """
    config, _ = resolve_config([measurement(overrides)])
    verdicts = judge(pool(figures.values()), len(class_names(config.data)))
    clients = _clients(config) if simulated else {}
    # A mixed run combines the other methods
    names = [name for name, method in METHODS.items() if method.settings is not MixedConfig]
    rows = [_row(name, overrides, clients, verdicts) for name in names]
    rows = _with_first_choice(rows)
    order = {FIRST: 0, WORTH: 1}
    return sorted(rows, key=lambda row: order.get(row.verdict.verdict, len(order)))


def _clients(config: RunConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the training labels and the domain of each simulated client that trains."""
    clients = {}
    for part in range(config.num_clients):
        node = NodeConfig(partition_id=part, num_partitions=config.num_clients)
        name = client_name(config.data, node, config.seed)
        if name not in config.held_out_clients:
            labels = tuple(image_labels(config.data, node, "train", config.seed))
            clients[name] = (labels, domain_name(config.data, node, config.seed))
    return clients


def _row(
    name: str,
    overrides: Mapping[str, Scalar],
    known: Mapping[str, tuple[tuple[int, ...], str]],
    verdicts: Mapping[str, Verdict],
) -> Row:
    method = METHODS[name]
    kind = kind_of(method)
    gives_away = method.reveals or method.sends
    if method.rounds:
        gives_away = "a model trained on its images, in every round"
    try:
        config, _ = resolve_config([RECOMMENDED, overrides, {"method": name, "job-id": ""}])
        clients = placeholder_clients(config)
        if known:
            default = next(iter(clients.values()))
            clients = {key: Client(default.config, *value) for key, value in known.items()}
        uploads = [upload_bytes(client, clients[client]) for client in clients]
        rounds = config.rounds.count if method.rounds else 1
        costs = [client_flops(client) for client in clients.values()]
        compute = max((flops for flops in costs if flops is not None), default=None)
        images = planned_images(config, clients.values())
        synthesis = synthesis_flops(config, images) if method.samples else 0.0
    except (ClassifierError, ConfigError, FileNotFoundError, KitError) as error:
        return Row(name, kind, verdicts[kind], gives_away=gives_away, problem=str(error))
    upload = rounds * max(uploads)
    return Row(name, kind, verdicts[kind], upload, compute, synthesis, gives_away)


def _with_first_choice(rows: list[Row]) -> list[Row]:
    """Leave the first choice to one method of its kind; the others become worth a try.

    The recommended method keeps it, or else the one that sends least.
    """
    candidates = [row for row in rows if row.verdict.verdict == FIRST and not row.problem]
    recommended = str(read_overrides([RECOMMENDED])["method"])
    candidates.sort(key=lambda row: (row.method != recommended, row.upload or 0))
    alternatives = {row.method for row in candidates[1:]}
    changed = []
    for row in rows:
        verdict = row.verdict
        if row.method in alternatives or (verdict.verdict == FIRST and row.problem and candidates):
            verdict = Verdict(WORTH, verdict.reason)
        changed.append(Row(**{**vars(row), "verdict": verdict}))
    return changed


# ---- Output ----


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        row.verdict.verdict,
        "?" if row.upload is None else human_bytes(row.upload),
        "?" if row.compute is None else human_flops(row.compute),
        "?" if row.synthesis is None else human_flops(row.synthesis),
        row.gives_away,
    ]


def _lines(figures: Mapping[str, Figures], withheld: Iterable[str]) -> list[str]:
    """Describe the figures of all clients together."""
    pooled = pool(figures.values())
    names = {
        "zero-shot accuracy (CLIP)": pooled.zero_shot,
        "a local head on frozen features": pooled.head,
        "the diffusion model as a classifier": pooled.diffusion,
    }
    lines = [
        f"{name}: {'none' if share is None else f'{share:.1%}'}" for name, share in names.items()
    ]
    if clients := list(withheld):
        lines.append(f"withheld by their sites: {', '.join(clients)}")
    return lines


def _reasons(rows: Iterable[Row]) -> list[str]:
    """Return each kind's reason once, and the methods that cannot run."""
    reasons: dict[str, list[str]] = {}
    problems: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.verdict.reason, []).append(row.method)
        if row.problem:
            problem = row.problem.replace("invalid run-config:\n  ", "")
            problems.setdefault(problem.splitlines()[0], []).append(row.method)
    lines = [f"{', '.join(methods)}: {reason}" for reason, methods in reasons.items()]
    return lines + [f"? {', '.join(methods)}: {problem}" for problem, methods in problems.items()]


def _print(figures: Mapping[str, Figures], withheld: list[str], rows: list[Row]) -> None:
    each = Table("client", "zero-shot", "head", "diffusion", box=box.SIMPLE_HEAD)
    for client, shares in figures.items():
        cells = ["none" if v is None else f"{v:.1%}" for v in vars(shares).values()]
        each.add_row(display.escape_text(client), *cells)
    display.console.print(each)
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(display.escape_text, _cells(row)))
    display.console.print(table)
    for line in (*_lines(figures, withheld), *_reasons(rows)):
        display.console.print(display.escape_text(line), highlight=False, soft_wrap=True)


def markdown(figures: Mapping[str, Figures], withheld: list[str], rows: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    lines += ["", *(f"- {line}" for line in (*_lines(figures, withheld), *_reasons(rows)))]
    return "\n".join(lines) + "\n"
