"""The `osfl` command: what can be said to it.

What does the work is imported when it is asked for.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from osfl.cli.output import watched_output

# Else typer escapes brackets for rich, although the help is plain text: "\\[default: 1]".
typer.core.HAS_RICH = False


class Command(typer.core.TyperGroup):
    """The whole command: it also ends well where its output cannot be written."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with watched_output():
            return super().main(*args, **kwargs)


# `rich_markup_mode=None`: help without rich, whose import takes twice as long as all else.
app = typer.Typer(
    cls=Command,
    help="One-shot federated learning with diffusion models, on Flower.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
kit_app = typer.Typer(
    help="Miniature foundation kits.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(kit_app, name="kit")
certs_app = typer.Typer(
    help="Keys and certificates of a federation.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(certs_app, name="certs")
data_app = typer.Typer(
    help="The images of a run's clients.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")
nodes_app = typer.Typer(help="The nodes of a federation.", rich_markup_mode=None)
app.add_typer(nodes_app, name="nodes")
SHOWN = 20  # of a run's damaged files

Settings = Annotated[
    list[str] | None,
    typer.Argument(help="TOML files and key=value, merged from left to right."),
]
RunsFolder = Annotated[
    Path | None,
    typer.Option(
        help="Simulation: where runs are kept (runs-dir goes first).", show_default="runs"
    ),
]
Connection = Annotated[
    str, typer.Option(help="A SuperLink of your Flower configuration; empty: simulate here.")
]

FederationConnection = Annotated[
    str, typer.Option("--connection", help="As of `osfl run`; empty: the configuration's default.")
]


def _with_method(settings: list[str] | None) -> list[str]:
    """The settings, over the recommended ones where they name no method; then the method is said.

    Raises:
        typer.Exit: a file of settings was refused.
    """
    from osfl.cli import display
    from osfl.cli.launch import RECOMMENDED, read_overrides, with_recommended

    with display.named_errors():
        complete = with_recommended(settings)
        if len(complete) > len(settings or []):
            method = read_overrides(complete)["method"]
            display.console.print(
                f"method {method} (default, {RECOMMENDED})", highlight=False, soft_wrap=True
            )
    return complete


def _print_version(wanted: bool) -> None:
    if wanted:
        from osfl import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def osfl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """One-shot federated learning with diffusion models, on Flower."""


@app.command()
def run(
    settings: Settings = None,
    runs: RunsFolder = None,
    connection: Connection = "",
    client_cpus: Annotated[int, typer.Option(help="Simulation: cores of each client.")] = 1,
    client_gpus: Annotated[
        float, typer.Option(help="Simulation: share of a GPU of each client.")
    ] = 0.0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check it and say what it would send, draw and take."),
    ] = False,
) -> None:
    """Run a federation; exits with 0 only if it finished.

    Without a method, in a file or as method=NAME, it is configs/recommended.toml's.

    Example: osfl run configs/demo.toml method=fedlmg seed=1
    """
    complete = _with_method(settings)
    if dry_run:
        from osfl.cli import display, launch

        # Before torch and the models' libraries are imported, which takes long
        with display.named_errors():
            launch.resolve_config(complete)
        from osfl.cli.estimate import show_estimate

        show_estimate(complete, runs, connection)
        return
    from osfl.cli.run import run as run_federation

    run_federation(complete, runs, connection, client_cpus, client_gpus)


@app.command()
def methods(
    wide: Annotated[
        bool, typer.Option("--wide", help="Also parts of the kit, synthesis and rounds; 160 wide.")
    ] = False,
) -> None:
    """List the methods: what a client sends, and what it needs."""
    from osfl.cli.method_table import show_methods

    show_methods(wide)


@app.command()
def doctor(settings: Settings = None, runs: RunsFolder = None) -> None:
    """Look whether this machine can run OSFL, and say what to do; exits with 1 if it cannot.

    Example: osfl doctor configs/demo.toml kit=/data/my-kit
    """
    from osfl.cli.doctor import show_findings

    show_findings(_with_method(settings), runs)


@app.command()
def fetch(
    settings: Settings = None,
    client: Annotated[
        bool, typer.Option("--client", help="Only what a client needs, not the server.")
    ] = False,
) -> None:
    """Fetch the models and first weights that a run names, and print where they are.

    Example: osfl fetch configs/methods/feddeo.toml --client
    """
    from osfl.cli import display
    from osfl.cli.fetch import show_fetch

    with display.named_errors():
        show_fetch(_with_method(settings), client)


@data_app.command("check")
def data_check(settings: Settings = None) -> None:
    """Open every image of every client: classes, sizes, what is broken, tests like training images.

    Example: osfl data check configs/data/pacs.toml data.root=/data/pacs
    """
    from osfl.cli import display
    from osfl.cli.data_check import show_check

    with display.named_errors():
        show_check(settings or [])


@app.command()
def audit(
    settings: Settings = None,
    node_config: Annotated[
        str,
        typer.Option(
            help="A SuperNode's, as it takes it: 'data-dir=\"/data\"'. Empty: the clients of a "
            "simulation."
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Payloads made of each client's images.")] = 1,
    work: Annotated[
        Path, typer.Option(help="Where scores are kept; an interrupted audit goes on there.")
    ] = Path("runs/audit"),
    out: Annotated[Path | None, typer.Option(help="A JSON file for what was found.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="A run's folder: are its synthetic images nearer to a client's training images "
            "than to its test images? Settings are then the run's."
        ),
    ] = None,
) -> None:
    """Attack a client's payload: can it be told which images made it?

    It runs where the images are, on training and test images; only numbers leave. Exits with 1 if
    more was found out than a guarantee (epsilon) allows.

    Example: osfl audit configs/demo.toml method=oscar-pooled --repeats 3
    """
    from osfl.cli import display
    from osfl.cli.audit import show_audit
    from osfl.cli.copies import show_copies
    from osfl.config import ConfigError

    with display.named_errors():
        if run is not None and settings:
            raise ConfigError(f"{settings[0]}: with --run the settings are the run's")
        if run is not None:
            show_copies(run, node_config, out)
            return
        show_audit(_with_method(settings), node_config, repeats, work, out)


def _runs_beside(folder: Path) -> list[str]:
    """The names of the runs in the same folder as another."""
    from osfl.run_folder.verify import contains_run

    if not folder.parent.is_dir():
        return []
    return sorted(each.name for each in folder.parent.iterdir() if contains_run(each))


@nodes_app.callback(invoke_without_command=True)
def nodes(context: typer.Context, connection: FederationConnection = "") -> None:
    """List the nodes of a federation: names, ids, states."""
    from osfl.cli import display
    from osfl.cli.nodes import show_nodes

    context.obj = connection
    if context.invoked_subcommand is None:
        with display.named_errors():
            show_nodes(connection)


@nodes_app.command("revoke")
def nodes_revoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The node's name, or its id.")],
    connection: FederationConnection = "",
) -> None:
    """Unregister a node: its key is no longer accepted.

    Example: osfl nodes revoke site-b --connection hospitals
    """
    from osfl.cli import display
    from osfl.cli.nodes import revoke

    with display.named_errors():
        revoke(connection or context.obj, name)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Print the results of a run that has finished."""
    from osfl.cli import display
    from osfl.config import ConfigError
    from osfl.run_folder.layout import RunFolder
    from osfl.run_folder.report.metrics import read_metrics
    from osfl.run_folder.status import read_status

    with display.named_errors():
        if not folder.is_dir():
            usual = Path("runs") / folder.name
            if usual.is_dir():
                raise ConfigError(f"{folder}: no such folder; did you mean {usual}?")
            there = ", ".join(_runs_beside(folder)) or "none"
            raise ConfigError(f"{folder}: no such folder; the runs in {folder.parent}: {there}")
        if not os.path.lexists(metrics := RunFolder(folder).metrics_file):
            phase = read_status(folder).get("phase", "no run at all")
            raise ConfigError(f"{metrics} does not exist; this run has not finished ({phase})")
        display.print_metrics(read_metrics(folder))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Read every payload, image, model and record of a run, and compare it with its SHA-256."""
    from osfl.cli import display
    from osfl.config import ConfigError
    from osfl.run_folder.verify import contains_run, verify_run
    from osfl.util.text import sanitize

    with display.named_errors():
        if not contains_run(folder):
            raise ConfigError(f"{folder} is no run's folder")
        with display.counting_bar() as bar:
            findings = verify_run(folder, display.counter(bar, "reading images"))
        wrong = [problem for finding in findings for problem in finding.problems]
        for problem in wrong[:SHOWN]:
            print(sanitize(problem, 1000))
        if len(wrong) > SHOWN:
            print(f"and {len(wrong) - SHOWN} more")
        print(", ".join(f"{finding.counted} as written" for finding in findings))
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
    from osfl.cli import display
    from osfl.run_folder.shards import write_shards

    with display.named_errors():
        with display.counting_bar() as bar:
            files = write_shards(folder, out, size, display.counter(bar, "writing images"))
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
            help="Cores of each client; 0: as many as runs go side by side, so that no core has "
            "two."
        ),
    ] = 0,
    client_gpus: Annotated[float, typer.Option(help="Share of a GPU of each client.")] = 0.0,
    out: Annotated[
        Path, typer.Option(help="Where the table is written: Markdown, CSV and a plot.")
    ] = Path("runs/tables"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what the runs would draw, send and take.")
    ] = False,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="What a GPU does a second, for --dry-run's hours.")
    ] = 200.0,
) -> None:
    """Run methods side by side and write their table.

    Runs that are done are used again, interrupted ones go on.

    Example: osfl compare configs/tables/digits.toml --seeds 0
    """
    from osfl.cli.side_by_side import Side, run_table, show_dry_run

    if dry_run:
        show_dry_run(table, settings or [], seeds, rows, tflops)
        return
    side = Side(at_once, client_cpus or min(at_once, os.cpu_count() or 1), client_gpus)
    run_table(table, settings or [], seeds, rows, side, runs, out)


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

    To rotate it: `ca --rotate`; give ca.crt to all nodes and restart them; `server` again, and
    restart the SuperLink; `ca --drop-old`, and ca.crt to all once more.
    """
    from osfl.cli import certs, display
    from osfl.config import ConfigError

    with display.named_errors():
        if rotate and drop_old:
            raise ConfigError(
                "--rotate begins a rotation and --drop-old ends it, when the server has its new "
                "certificate"
            )
        file = certs.drop_old_ca(folder) if drop_old else certs.make_ca(folder, days, rotate)
    display.console.print(f"for every node: {file}", highlight=False, soft_wrap=True)


@certs_app.command("server")
def certs_server(
    folder: CertsFolder,
    host: Annotated[
        list[str],
        typer.Option(help="A name or address by which nodes dial the server; may be repeated."),
    ],
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 397,
) -> None:
    """Make the SuperLink's key and certificate, in place of the former.

    Restart the SuperLink after it.
    """
    from osfl.cli import certs, display

    with display.named_errors():
        file = certs.make_server(folder, host, days)
    display.console.print(
        f"for the server: {file.with_suffix('.key')}, {file}", highlight=False, soft_wrap=True
    )


@certs_app.command("node")
def certs_node(
    folder: CertsFolder,
    names: Annotated[list[str], typer.Argument(help="The nodes' names, such as their client ids.")],
) -> None:
    """Make a key pair for every node.

    NAME goes to that node alone, NAME.pub is registered with the SuperLink.
    """
    from osfl.cli import certs, display

    with display.named_errors():
        for name in names:
            file = certs.make_node(folder, name)
            display.console.print(f"for {name} alone: {file}", highlight=False, soft_wrap=True)


@certs_app.command("sealing")
def certs_sealing(folder: CertsFolder) -> None:
    """Make the key that payloads are sealed to, so that the SuperLink holds ciphertext alone.

    Name it in the run's sealing-key; nodes that ask for it name its fingerprint in seal-to.
    """
    from osfl.cli import certs, display

    with display.named_errors():
        file, digest = certs.make_sealing_key(folder)
        display.console.print(f"for the ServerApp alone: {file}", highlight=False, soft_wrap=True)
        display.console.print(f"seal-to: {digest}", highlight=False, soft_wrap=True)


@certs_app.command("show")
def certs_show(folder: CertsFolder) -> None:
    """List the certificates, whom they are for, and until when they are valid.

    Exits with 1 if one has expired.
    """
    from rich.table import Table

    from osfl.cli import certs, display

    with display.named_errors():
        rows = certs.describe(folder)
    now = datetime.now(UTC)
    shown = Table("file", "for", "valid until")
    for file, names, until in rows:
        shown.add_row(
            file,
            display.words(names),
            f"{until:%Y-%m-%d %H:%M} UTC" + (" [bold red]expired[/]" if until < now else ""),
        )
    display.console.print(shown)
    if any(until < now for _, _, until in rows):
        raise typer.Exit(1)


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
    from rich.progress import Progress, TimeElapsedColumn

    from osfl.cli import display
    from osfl.kit_training import Recipe, train_kit
    from osfl.util.devices import pick_device

    try:
        with Progress(
            *Progress.get_default_columns(), TimeElapsedColumn(), console=display.console
        ) as progress:
            train_kit(out, work, Recipe(), str(pick_device(device)), progress, base)
    except KeyboardInterrupt:
        display.console.print("interrupted; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    display.console.print(f"kit: {out}")
