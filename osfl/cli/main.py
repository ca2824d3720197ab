"""The `osfl` command."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from osfl.config import ConfigError, RunConfig, Scalar, is_identifier
from osfl.files import open_private, private_folder
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import read_status
from osfl.words import plain, plain_lines

app = typer.Typer(
    help="One-shot federated learning with diffusion models, on Flower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
kit_app = typer.Typer(help="Miniature foundation kits.", no_args_is_help=True)
app.add_typer(kit_app, name="kit")
certs_app = typer.Typer(help="Keys and certificates of a federation.", no_args_is_help=True)
app.add_typer(certs_app, name="certs")
console = Console(emoji=False)
SHOWN = 20  # of a run's damaged files


@app.command()
def run(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="TOML files and key=value, merged from left to right."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Simulation: where runs are kept (runs-dir goes first).", show_default="runs"
        ),
    ] = None,
    connection: Annotated[
        str, typer.Option(help="A SuperLink of your Flower configuration; empty: simulate here.")
    ] = "",
    client_cpus: Annotated[int, typer.Option(help="Simulation: cores of each client.")] = 1,
    client_gpus: Annotated[
        float, typer.Option(help="Simulation: share of a GPU of each client.")
    ] = 0.0,
) -> None:
    """Run a federation; exits with 0 only if it finished.

    Example: osfl run configs/demo.toml method=fedlmg seed=1
    """
    from osfl.cli import launch

    for ending in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: end the SuperLink and its clients too
        if hasattr(signal, ending):  # Windows has no SIGHUP
            signal.signal(getattr(signal, ending), signal.default_int_handler)
    job_id = ""
    try:
        config, overrides = launch.resolve_config(settings or [])
        if not config.job_id:
            overrides["job-id"] = f"{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        job_id = str(overrides.get("job-id", config.job_id))
        if not is_identifier(job_id):
            raise ConfigError(f"job-id = {job_id!r}: must be 1 to 64 letters, digits, '-' or '_'")
        root = (
            Path(config.runs_dir).expanduser()
            if config.runs_dir
            else (runs or Path("runs")).resolve()
        )
        if connection and runs:
            raise ConfigError(
                "--runs is for simulations; where a server keeps its runs is the key runs-dir, or $OSFL_RUNS there"
            )
        if connection:
            _run_on(connection, overrides, job_id)
        else:
            private_folder(root)
            federation: dict[str, Scalar] = {
                "num-supernodes": config.num_clients,
                "client-resources-num-cpus": client_cpus,
                "client-resources-num-gpus": client_gpus,
            }
            _simulate(config, overrides, job_id, root, federation)
    except (ConfigError, launch.LaunchError, OSError) as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if connection:
            console.print(
                "interrupted; the run goes on at the server: see `flwr list`, `flwr log`, `flwr stop`"
            )
        else:
            console.print(
                "interrupted; the same command with this job id goes on where it was:",
                escape(f"job-id={job_id}"),
            )
        raise typer.Exit(130) from None


def _simulate(
    config: RunConfig,
    overrides: dict[str, Scalar],
    job_id: str,
    root: Path,
    federation: dict[str, Scalar],
) -> None:
    from osfl.cli import launch
    from osfl.run_folder.report import read_metrics

    folder, cache = RunFolder(root / job_id), root / ".client-cache"
    folder.forget_status()
    with launch.local_superlink(root, cache) as environment:
        run_id = launch.submit(overrides, "osfl", environment, federation)
        console.print(
            f"[bold]{config.method}[/], {config.num_clients} clients, job [bold]{job_id}[/]",
            highlight=False,
        )
        logs = root / f"{job_id}.log"
        with (
            open_private(logs, "w") as sink,
            subprocess.Popen(
                ["flwr", "log", str(run_id), "osfl", "--stream"],
                cwd=launch.HERE,
                env=environment,
                stdout=sink,
                stderr=sink,
            ) as streaming,
        ):
            try:
                _watch(streaming, folder.path, cache / job_id)
            finally:
                streaming.terminate()
        status, details = launch.outcome(run_id, "osfl", environment)
    if folder.path.is_dir():
        logs = folder.take_log(logs)
    state = read_status(folder.path)
    if not status.startswith("finished:completed") or state.get("phase") != "finished":
        reason = state.get("error") or details or f"Flower says: {status}"
        raise launch.LaunchError(f"the run failed: {reason}\nlog: {logs}")
    print_metrics(read_metrics(folder.path))
    console.print(f"report: [bold]{folder.report_file}[/]", highlight=False, soft_wrap=True)


def _run_on(connection: str, overrides: dict[str, Scalar], job_id: str) -> None:
    """Submit to a real federation and follow its log; results are on the server's machine."""
    from osfl.cli import launch

    environment = launch.flower_environment()
    run_id = launch.submit(overrides, connection, environment)
    console.print(
        f"job [bold]{job_id}[/], Flower's run {run_id}; the server keeps it in its runs-dir",
        highlight=False,
    )
    status, details = "", ""
    while not status.startswith("finished"):  # the log may break off before the run does
        launch.follow_log(run_id, connection, environment, print)
        status, details = launch.outcome(run_id, connection, environment)
        if status == "unknown":
            raise launch.LaunchError(
                f"lost sight of run {run_id}, which may go on: {details}\nsee `flwr list {connection}`"
            )
    if not status.startswith("finished:completed"):
        raise launch.LaunchError(f"the run failed: {details or status}")


def _watch(streaming: subprocess.Popen, folder: Path, cache: Path) -> None:
    """Show the clients, and the phase the server is in, until the log ends."""
    phases = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    rows: dict[str, TaskID] = {}
    display = Live(console=console, refresh_per_second=4, transient=False)
    with _whole_lines(), display as live:
        while streaming.poll() is None:
            state = read_status(folder)
            phase = state.get("phase", "")
            over = phase in ("finished", "failed")
            if phase not in rows and phase != "failed":
                for task in phases.tasks:  # what is done ends full, and its clock stands still
                    phases.update(task.id, completed=task.total or 1, total=task.total or 1)
            if phase and not over:
                if phase not in rows:
                    rows[phase] = phases.add_task(_words(phase), total=None)
                within = "step {} of {}".format(*state["step"]) if state.get("step") else ""
                phases.update(
                    rows[phase],
                    completed=state["done"],
                    total=state["total"] or None,
                    description=_words(f"{phase} {within}"),
                )
            live.update(Group(_clients(state.get("clients", {}), cache), phases))
            if over:
                try:
                    streaming.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    return
            time.sleep(0.3)


@contextmanager
def _whole_lines() -> Iterator[None]:
    """What is printed next begins a line: rich ends a display's last one on a terminal alone."""
    try:
        yield
    finally:
        if not console.is_terminal:
            console.line()


def _clients(states: dict[str, str], cache: Path) -> Table:
    """One row a client; while it works, how far it is (its own progress file, when it runs on this machine)."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for client, state in sorted(states.items()):
        for file in cache.glob(f"{client}-{'?' * 12}/progress") if state == "asked" else ():
            with suppress(OSError, ValueError):  # the client may be writing or removing it
                done, total, what = file.read_text().split(maxsplit=2)
                state = f"{what} {int(done)} of {int(total)}"
        table.add_row(_words(client), _words(state))
    return table


def _words(text: object) -> str:
    """Words from outside, as rich's markup has them."""
    return escape(plain(text))


def _print_error(error: Exception) -> None:
    text = escape(plain_lines(error))
    console.print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True)


def print_metrics(metrics: dict[str, Any]) -> None:
    """The table at the end of a run."""
    from osfl.run_folder.report_page import human_bytes

    names = list(metrics["clients"])
    console.print(
        f"[bold]{_words(metrics['method'])}[/]: accuracy on each client's own test images (%)",
        highlight=False,
    )
    table = Table()
    table.add_column("client")
    for model in metrics["accuracy"]:
        table.add_column(_words(model), justify="right")
    for name in (*names, "average"):
        cells = [f"{row[name]:.1f}" if name in row else "-" for row in metrics["accuracy"].values()]
        table.add_row(
            _words(name),
            *cells,
            style="bold" if name == "average" else "",
            end_section=name == names[-1],
        )
    console.print(table)
    if metrics["not_tested"]:
        console.print(
            f"[bold yellow]not tested everywhere[/]: {', '.join(map(_words, metrics['not_tested']))}; averages are over the others"
        )
    upload = sum(about.get("upload_bytes", 0) for about in metrics["clients"].values()) / max(
        1, len(metrics["clients"])
    )
    for warning in metrics.get("warnings", []):
        console.print(f"worth a look: {warning}", highlight=False, markup=False)
    server = metrics["server"]
    each = f", {server['seconds_per_image']:.2g} s each" if server["seconds_per_image"] else ""
    console.print(
        f"upload {human_bytes(upload)} a client; {server['synthetic_images']} synthetic images{each}",
        highlight=False,
    )


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Print the results of a run that has finished."""
    from osfl.run_folder.report import read_metrics

    with _named_errors():
        if not os.path.lexists(metrics := RunFolder(folder).metrics_file):
            phase = read_status(folder).get("phase", "no run at all")
            raise ConfigError(f"{metrics} does not exist; this run has not finished ({phase})")
        print_metrics(read_metrics(folder))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Read every payload, image, model and record of a run, and compare it with its SHA-256."""
    from osfl.run_folder.verify import is_run, verify_run

    with _named_errors():
        if not is_run(folder):
            raise ConfigError(f"{folder} is no run's folder")
        with Progress(
            TextColumn("reading images"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task("")
            findings = verify_run(
                folder, lambda done, total: bar.update(task, completed=done, total=total)
            )
        wrong = [problem for finding in findings for problem in finding.wrong]
        for problem in wrong[:SHOWN]:
            print(plain(problem, 1000))
        if len(wrong) > SHOWN:
            print(f"and {len(wrong) - SHOWN} more")
        print(", ".join(f"{finding.good} {finding.kind} as written" for finding in findings))
        if wrong:
            raise ConfigError(
                "this run is damaged; the same `osfl run` again makes all anew but payloads, which "
                "their clients must make again, and config.json, without which no run goes on"
            )


@app.command()
def shards(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
    out: Annotated[Path, typer.Argument(help="Folder for the tar files.")],
    size: Annotated[int, typer.Option(min=1, help="Images in a shard.")] = 10_000,
) -> None:
    """Write a run's synthetic images as WebDataset shards (image, label, about), shuffled."""
    from osfl.run_folder.shards import write_shards

    with _named_errors():
        with Progress(
            TextColumn("writing images"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task("")
            files = write_shards(
                folder, out, size, lambda done, total: bar.update(task, completed=done, total=total)
            )
        print(f"{len(files)} shards in {out}")


@app.command()
def compare(
    table: Annotated[
        Path, typer.Argument(help="A table file, such as configs/tables/digits.toml.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value for every run.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated; empty: the file's.")] = "",
    rows: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    at_once: Annotated[
        int, typer.Option(help="Runs side by side, each on its share of the cores.")
    ] = 2,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept and looked for.")] = Path(
        "runs/tables"
    ),
    client_cpus: Annotated[
        int,
        typer.Option(
            help="Cores of each client; 0: as many as runs go side by side, so that no core has two."
        ),
    ] = 0,
    client_gpus: Annotated[float, typer.Option(help="Share of a GPU of each client.")] = 0.0,
    out: Annotated[
        Path, typer.Option(help="Where the table is written: Markdown, CSV and a plot.")
    ] = Path("runs/tables"),
) -> None:
    """Run methods side by side and write their table; runs that are done are used again, interrupted ones go on.

    Example: osfl compare configs/tables/digits.toml --seeds 0
    """
    from osfl.cli import compare as tables
    from osfl.run_folder.report_page import human_bytes

    for ending in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, ending):
            signal.signal(getattr(signal, ending), signal.default_int_handler)
    try:
        content = tables.read_table(table, settings or [], seeds, rows)
        cells, runs = content.cells(), runs.resolve()
        private_folder(runs)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(_words(content.name), total=len(cells))

            def note(cell: tables.Cell, state: str) -> None:
                if state != "running":
                    progress.advance(bar)
                progress.console.print(
                    f"{time.strftime('%H:%M:%S')} {_words(cell.row)}, seed {cell.seed}: {state}",
                    highlight=False,
                )

            resources = [
                "--client-cpus",
                str(client_cpus or min(at_once, os.cpu_count() or 1)),
                "--client-gpus",
                str(client_gpus),
            ]
            runner, interrupted = tables.Runner(runs, at_once, note, resources), False
            try:
                outcomes = runner.run_all(cells)
            except KeyboardInterrupt:
                interrupted = True
                outcomes = [
                    runner.outcomes.get(cell, tables.Outcome(cell, error="not run yet"))
                    for cell in cells
                ]
        options = [f"--seeds {seeds}"] if seeds else []
        options += [f"--rows '{rows}'"] if rows else []
        command = " ".join(["osfl compare", str(table), *(settings or []), *options])
        done = any(not outcome.error for outcome in outcomes)
        if done or not interrupted:  # a table without a figure would replace a better one
            records = tables.write_table(content, outcomes, out, command, at_once)
            shown = Table("", "average", "upload", "rounds")
            for name, group in tables.by_row(records).items():
                mean = sum(r["average"] for r in group) / len(group)
                shown.add_row(
                    _words(name),
                    f"{mean:.1f}",
                    human_bytes(group[0]["upload_bytes"]),
                    str(group[0]["rounds"]),
                )
            console.print(shown)
            console.print(
                f"table: [bold]{out / content.name}.md[/], .csv, .png",
                highlight=False,
                soft_wrap=True,
            )
    except (ConfigError, OSError) as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        interrupted, outcomes = True, []
    for outcome in outcomes:
        if outcome.error:
            row = _words(outcome.cell.row)
            reason = escape(plain(outcome.error, tables.MOST_ERROR))
            text = f"[bold red]missing[/] {row}, seed {outcome.cell.seed}: {reason}"
            console.print(text, soft_wrap=True)
    if interrupted:
        console.print("interrupted; the same command goes on where it was")
        raise typer.Exit(130)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


CertsFolder = Annotated[
    Path, typer.Argument(help="Where keys and certificates are kept; private, and backed up.")
]


@certs_app.command("ca")
def certs_ca(
    folder: CertsFolder,
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 3650,
    rotate: Annotated[
        bool, typer.Option(help="A new one beside the old: ca.crt then holds both.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option(help="End a rotation: ca.crt keeps the newest alone.")
    ] = False,
) -> None:
    """Make a certificate authority: ca.key signs server certificates, ca.crt goes to every node.

    To rotate it: `ca --rotate`; give ca.crt to all nodes and restart them; `server` again, and restart the SuperLink; `ca --drop-old`, and ca.crt to all once more.
    """
    from osfl.cli import certs

    with _named_errors():
        if rotate and drop_old:
            raise ConfigError(
                "--rotate begins a rotation and --drop-old ends it, when the server has its new certificate"
            )
        file = certs.drop_old_ca(folder) if drop_old else certs.make_ca(folder, days, rotate)
    console.print(f"for every node: {file}", highlight=False, soft_wrap=True)


@certs_app.command("server")
def certs_server(
    folder: CertsFolder,
    host: Annotated[
        list[str],
        typer.Option(help="A name or address by which nodes dial the server; may be repeated."),
    ],
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 397,
) -> None:
    """Make the SuperLink's key and certificate, in place of the former; restart the SuperLink after it."""
    from osfl.cli import certs

    with _named_errors():
        file = certs.make_server(folder, host, days)
    console.print(
        f"for the server: {file.with_suffix('.key')}, {file}", highlight=False, soft_wrap=True
    )


@certs_app.command("node")
def certs_node(
    folder: CertsFolder,
    names: Annotated[list[str], typer.Argument(help="The nodes' names, such as their client ids.")],
) -> None:
    """Make a key pair for every node: NAME goes to that node alone, NAME.pub is registered with the SuperLink."""
    from osfl.cli import certs

    with _named_errors():
        for name in names:
            file = certs.make_node(folder, name)
            console.print(f"for {name} alone: {file}", highlight=False, soft_wrap=True)


@certs_app.command("show")
def certs_show(folder: CertsFolder) -> None:
    """List the certificates, whom they are for, and until when they are valid; exits with 1 if one has expired."""
    from osfl.cli import certs

    with _named_errors():
        rows = certs.describe(folder)
    now, shown = datetime.now(UTC), Table("file", "for", "valid until")
    for file, names, until in rows:
        shown.add_row(
            file,
            _words(names),
            f"{until:%Y-%m-%d %H:%M} UTC" + (" [bold red]expired[/]" if until < now else ""),
        )
    console.print(shown)
    if any(until < now for _, _, until in rows):
        raise typer.Exit(1)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, OSError) as error:
        _print_error(error)
        raise typer.Exit(1) from None


@kit_app.command("train")
def kit_train(
    out: Annotated[Path, typer.Option(help="Folder of the finished kit.")] = Path(
        "runs/kit/digits"
    ),
    work: Annotated[
        Path, typer.Option(help="Folder of the checkpoints; an interrupted training resumes there.")
    ] = Path("runs/kit/checkpoints"),
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    base: Annotated[
        Path | None,
        typer.Option(help="A finished kit to go on from: only what it lacks is trained."),
    ] = None,
) -> None:
    """Train the digits kits from the public split: hours on two cores."""
    from osfl.devices import pick_device
    from osfl.kit_recipe import Recipe, train_kit

    try:
        with Progress(
            *Progress.get_default_columns(), TimeElapsedColumn(), console=console
        ) as progress:
            train_kit(out, work, Recipe(), str(pick_device(device)), progress, base)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    console.print(f"kit: {out}")
