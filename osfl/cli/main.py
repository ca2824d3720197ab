"""The `osfl` command line: commands, arguments and help.

Each command imports its implementation when it runs, which keeps `osfl --help` fast.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from osfl.cli.output import watched_output

# Otherwise typer escapes brackets for rich, although the help is plain text: "\\[default: 1]".
typer.core.HAS_RICH = False


class Command(typer.core.TyperGroup):
    """The root command, which also exits cleanly when standard output cannot be written."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line."""
        with watched_output():
            return super().main(*args, **kwargs)


# `rich_markup_mode=None`: help without rich, whose import would triple the start-up time.
app = typer.Typer(
    cls=Command,
    help="One-shot federated learning with diffusion models, on Flower.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
kit_app = typer.Typer(help="Train the miniature kits.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kit_app, name="kit")
certs_app = typer.Typer(
    help="Manage a federation's keys and certificates.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(certs_app, name="certs")
data_app = typer.Typer(
    help="Inspect the images of a run's clients.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")
nodes_app = typer.Typer(help="List and revoke a federation's nodes.", rich_markup_mode=None)
app.add_typer(nodes_app, name="nodes")
# Maximum number of a run's corrupt files that are printed
MAX_PRINTED = 20

Settings = Annotated[
    list[str] | None,
    typer.Argument(help="TOML files and key=value settings, merged from left to right."),
]
RunsFolder = Annotated[
    Path | None,
    typer.Option(
        help="Simulation: folder for runs; the key runs-dir takes precedence.",
        show_default="runs",
    ),
]
Connection = Annotated[
    str,
    typer.Option(
        help="SuperLink connection in your Flower configuration; empty: simulate on this machine."
    ),
]

FederationConnection = Annotated[
    str,
    typer.Option(
        "--connection",
        help="SuperLink connection, as in `osfl run`; empty: your Flower configuration's default.",
    ),
]


def _with_method(settings: list[str] | None) -> list[str]:
    """Add the recommended settings if no method is set, and print the method chosen by them.

    Raises:
        typer.Exit: a settings file is invalid.
    """
    from osfl.cli import display
    from osfl.settings import RECOMMENDED, read_overrides, with_recommended

    with display.expected_errors():
        complete = with_recommended(settings)
        if len(complete) > len(settings or []):
            method = read_overrides(complete)["method"]
            display.console.print(
                f"method {method} (default, {RECOMMENDED})", highlight=False, soft_wrap=True
            )
    return complete


def _print_version(is_set: bool) -> None:
    if is_set:
        from osfl import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def osfl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """One-shot federated learning with diffusion models, on Flower."""


@app.command()
def run(
    settings: Settings = None,
    runs: RunsFolder = None,
    connection: Connection = "",
    client_cpus: Annotated[int, typer.Option(help="Simulation: CPU cores per client.")] = 1,
    client_gpus: Annotated[
        float, typer.Option(help="Simulation: fraction of a GPU per client.")
    ] = 0.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the run, and estimate its uploads, synthetic images and costs.",
        ),
    ] = False,
) -> None:
    """Run a federation; exit with 0 only if it finishes.

    If neither a file nor method=NAME sets a method, configs/recommended.toml is used.

    Example: osfl run configs/demo.toml method=fedlmg seed=1
    """
    complete = _with_method(settings)
    if dry_run:
        from osfl.cli import display
        from osfl.settings import resolve_config

        # Before the slow imports of torch and the models' libraries
        with display.expected_errors():
            resolve_config(complete)
        from osfl.cli.estimate import show_estimate

        show_estimate(complete, runs, connection)
        return
    from osfl.cli.run import run as run_federation

    run_federation(complete, runs, connection, client_cpus, client_gpus)


@app.command()
def methods(
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="Also show kit parts, synthesis and rounds, in 160 columns or more."
        ),
    ] = False,
) -> None:
    """List the methods, what their clients send, and what they need."""
    from osfl.cli.method_table import show_methods

    show_methods(wide)


@app.command()
def doctor(settings: Settings = None, runs: RunsFolder = None) -> None:
    """Check that this machine can run OSFL, with a hint for each problem; exit with 1 if not.

    Example: osfl doctor configs/demo.toml kit=/data/my-kit
    """
    from osfl.cli.doctor import show_findings

    show_findings(_with_method(settings), runs)


@app.command()
def fetch(
    settings: Settings = None,
    client: Annotated[
        bool, typer.Option("--client", help="Only fetch what clients need, not the server.")
    ] = False,
) -> None:
    """Download the models and initial weights that a run uses, and print their folders.

    Example: osfl fetch configs/methods/feddeo.toml --client
    """
    from osfl.cli import display
    from osfl.cli.fetch import show_fetch

    with display.expected_errors():
        show_fetch(_with_method(settings), client)


@data_app.command("check")
def data_check(settings: Settings = None) -> None:
    """Check every client's images: class counts, sizes, corrupt files, near-duplicate test images.

    Example: osfl data check configs/data/pacs.toml data.root=/data/pacs
    """
    from osfl.cli import display
    from osfl.cli.data_check import show_check

    with display.expected_errors():
        show_check(settings or [])


@app.command()
def audit(
    settings: Settings = None,
    node_config: Annotated[
        str,
        typer.Option(
            help="A SuperNode's node-config, as in 'data-dir=\"/data\"'; empty: audit the clients "
            "of a simulation."
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Payloads per client.")] = 1,
    work: Annotated[
        Path, typer.Option(help="Folder for scores, from which an interrupted audit resumes.")
    ] = Path("runs/audit"),
    out: Annotated[Path | None, typer.Option(help="JSON file for the findings.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="A run's folder, to test for memorization instead: are its synthetic images "
            "closer to a client's training images than to its test images? Uses the run's settings."
        ),
    ] = None,
) -> None:
    """Run membership-inference attacks on payloads: do they reveal their training images?

    The audit runs where the training and test images are; only statistics leave the machine.
    It exits with 1 if an attack refutes a privacy guarantee (epsilon).

    Example: osfl audit configs/demo.toml method=oscar-pooled --repeats 3
    """
    from osfl.cli import display
    from osfl.cli.audit import show_audit
    from osfl.cli.copies import show_memorization
    from osfl.config import ConfigError

    with display.expected_errors():
        if run is not None and settings:
            raise ConfigError(f"{settings[0]}: --run uses the run's settings; leave out others")
        if run is not None:
            show_memorization(run, node_config, out)
            return
        show_audit(_with_method(settings), node_config, repeats, work, out)


def _runs_beside(folder: Path) -> list[str]:
    """Return the names of the runs in a folder's parent."""
    from osfl.run_folder.verify import contains_run

    if not folder.parent.is_dir():
        return []
    return sorted(path.name for path in folder.parent.iterdir() if contains_run(path))


@nodes_app.callback(invoke_without_command=True)
def nodes(context: typer.Context, connection: FederationConnection = "") -> None:
    """List a federation's nodes with their ids and states."""
    from osfl.cli import display
    from osfl.cli.nodes import show_nodes

    context.obj = connection
    if context.invoked_subcommand is None:
        with display.expected_errors():
            show_nodes(connection)


@nodes_app.command("revoke")
def nodes_revoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The node's name or id.")],
    connection: FederationConnection = "",
) -> None:
    """Unregister a node, so that its key is no longer accepted.

    Example: osfl nodes revoke site-b --connection hospitals
    """
    from osfl.cli import display
    from osfl.cli.nodes import revoke

    with display.expected_errors():
        revoke(connection or context.obj, name)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Print the results of a finished run."""
    from osfl.cli import display
    from osfl.config import ConfigError
    from osfl.run_folder.layout import RunFolder
    from osfl.run_folder.report.metrics import read_metrics
    from osfl.run_folder.status import read_status

    with display.expected_errors():
        if not folder.is_dir():
            suggestion = Path("runs") / folder.name
            if suggestion.is_dir():
                raise ConfigError(f"{folder}: no such folder; did you mean {suggestion}?")
            names = ", ".join(_runs_beside(folder)) or "none"
            raise ConfigError(f"{folder}: no such folder; runs in {folder.parent}: {names}")
        if not os.path.lexists(metrics := RunFolder(folder).metrics_file):
            phase = read_status(folder).get("phase", "not started")
            raise ConfigError(f"{metrics} does not exist; this run has not finished ({phase})")
        display.print_metrics(read_metrics(folder))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Verify the SHA-256 checksum of every payload, image, model and record of a run."""
    from osfl.cli import display
    from osfl.config import ConfigError
    from osfl.run_folder.verify import contains_run, verify_run
    from osfl.util.text import sanitize

    with display.expected_errors():
        if not contains_run(folder):
            raise ConfigError(f"{folder} is not the folder of a run")
        with display.counting_progress() as bar:
            findings = verify_run(folder, display.progress_callback(bar, "reading images"))
        wrong = [problem for finding in findings for problem in finding.problems]
        for problem in wrong[:MAX_PRINTED]:
            print(sanitize(problem, 1000))
        if len(wrong) > MAX_PRINTED:
            print(f"and {len(wrong) - MAX_PRINTED} more")
        print(", ".join(f"{finding.counted} intact" for finding in findings))
        if wrong:
            raise ConfigError(
                "this run has corrupt files. The same `osfl run` command recreates all of them "
                "except payloads, which their clients must send again, and config.json, without "
                "which a run cannot resume"
            )


@app.command()
def shards(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
    out: Annotated[Path, typer.Argument(help="Folder for the tar files.")],
    size: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 10_000,
) -> None:
    """Export a run's synthetic images as shuffled WebDataset shards (image, label, metadata)."""
    from osfl.cli import display
    from osfl.run_folder.shards import write_shards

    with display.expected_errors():
        with display.counting_progress() as bar:
            files = write_shards(
                folder, out, size, display.progress_callback(bar, "writing images")
            )
        print(f"{len(files)} shards in {out}")


@app.command()
def compare(
    table: Annotated[
        Path, typer.Argument(help="A table file, such as configs/tables/digits.toml.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value settings for every run.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds; empty: the table's.")] = "",
    rows: Annotated[str, typer.Option(help="Comma-separated row names; empty: all rows.")] = "",
    at_once: Annotated[
        int, typer.Option(help="Parallel runs, among which the CPU cores are divided.")
    ] = 2,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/tables"),
    client_cpus: Annotated[
        int,
        typer.Option(
            help="CPU cores per client; 0: the number of parallel runs, so that clients do not "
            "share a core."
        ),
    ] = 0,
    client_gpus: Annotated[float, typer.Option(help="Fraction of a GPU per client.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder for the table's Markdown, CSV and plot.")] = (
        Path("runs/tables")
    ),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only estimate the runs' uploads, synthetic images and costs."
        ),
    ] = False,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="GPU throughput in TFLOP/s that --dry-run assumes.")
    ] = 200.0,
) -> None:
    """Run several methods and write their results as a table.

    Finished runs are reused; interrupted runs resume.

    Example: osfl compare configs/tables/digits.toml --seeds 0
    """
    from osfl.cli.compare import Resources, run_table, show_dry_run

    if dry_run:
        show_dry_run(table, settings or [], seeds, rows, tflops)
        return
    side = Resources(at_once, client_cpus or min(at_once, os.cpu_count() or 1), client_gpus)
    run_table(table, settings or [], seeds, rows, side, runs, out)


CertsFolder = Annotated[
    Path, typer.Argument(help="Folder of the keys and certificates; keep it private and backed up.")
]


@certs_app.command("ca")
def certs_ca(
    folder: CertsFolder,
    days: Annotated[int, typer.Option(min=1, help="Days of validity.")] = 3650,
    rotate: Annotated[
        bool, typer.Option(help="Add a new CA to the current one: ca.crt then holds both.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option(help="End a rotation: ca.crt keeps the newest CA only.")
    ] = False,
) -> None:
    """Create a certificate authority: ca.key signs server certificates, ca.crt goes to every node.

    To rotate the CA: run `ca --rotate`, copy ca.crt to all nodes and restart them; run `server` and
    restart the SuperLink; run `ca --drop-old`, and copy ca.crt to all nodes again.
    """
    from osfl.cli import certs, display
    from osfl.config import ConfigError

    with display.expected_errors():
        if rotate and drop_old:
            raise ConfigError(
                "--rotate begins a rotation, and --drop-old ends it once the server has its new "
                "certificate; use one of them"
            )
        file = certs.drop_old_ca(folder) if drop_old else certs.make_ca(folder, days, rotate)
    display.console.print(f"for every node: {file}", highlight=False, soft_wrap=True)


@certs_app.command("server")
def certs_server(
    folder: CertsFolder,
    host: Annotated[
        list[str],
        typer.Option(
            help="A host name or address at which nodes reach the server; may be repeated."
        ),
    ],
    days: Annotated[int, typer.Option(min=1, help="Days of validity.")] = 397,
) -> None:
    """Create or replace the SuperLink's key and certificate.

    Restart the SuperLink afterwards.
    """
    from osfl.cli import certs, display

    with display.expected_errors():
        file = certs.make_server(folder, host, days)
    display.console.print(
        f"for the server: {file.with_suffix('.key')}, {file}", highlight=False, soft_wrap=True
    )


@certs_app.command("node")
def certs_node(
    folder: CertsFolder,
    names: Annotated[list[str], typer.Argument(help="The nodes' names, such as their client ids.")],
) -> None:
    """Create a key pair for each node.

    Copy NAME to that node only, and register NAME.pub with the SuperLink.
    """
    from osfl.cli import certs, display

    with display.expected_errors():
        for name in names:
            file = certs.make_node(folder, name)
            display.console.print(f"only for {name}: {file}", highlight=False, soft_wrap=True)


@certs_app.command("sealing")
def certs_sealing(folder: CertsFolder) -> None:
    """Create the key that payloads are sealed to, so that the SuperLink only holds ciphertext.

    Set the run's sealing-key to its file. A node can pin the key: set its seal-to to the
    fingerprint.
    """
    from osfl.cli import certs, display

    with display.expected_errors():
        file, digest = certs.make_sealing_key(folder)
        display.console.print(f"only for the ServerApp: {file}", highlight=False, soft_wrap=True)
        display.console.print(f"seal-to: {digest}", highlight=False, soft_wrap=True)


@certs_app.command("show")
def certs_show(folder: CertsFolder) -> None:
    """List the certificates with their names and expiry dates.

    Exit with 1 if one has expired.
    """
    from rich.table import Table

    from osfl.cli import certs, display

    with display.expected_errors():
        rows = certs.describe(folder)
    now = datetime.now(UTC)
    table = Table("file", "for", "valid until")
    for file, names, until in rows:
        table.add_row(
            file,
            display.escape_text(names),
            f"{until:%Y-%m-%d %H:%M} UTC" + (" [bold red]expired[/]" if until < now else ""),
        )
    display.console.print(table)
    if any(until < now for _, _, until in rows):
        raise typer.Exit(1)


@kit_app.command("train")
def kit_train(
    out: Annotated[Path, typer.Option(help="Folder for the finished kit.")] = Path(
        "runs/kit/digits"
    ),
    work: Annotated[
        Path, typer.Option(help="Folder for checkpoints, from which interrupted training resumes.")
    ] = Path("runs/kit/checkpoints"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    base: Annotated[
        Path | None,
        typer.Option(help="A finished kit to start from: only the parts it lacks are trained."),
    ] = None,
) -> None:
    """Train the digits kits on the public split; takes hours on two cores."""
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
        display.console.print("interrupted; the same command resumes from the last checkpoint")
        raise typer.Exit(130) from None
    display.console.print(f"kit: {out}")
