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


def _complete_settings(
    settings: list[str] | None,
    continued: str,
    replaced: list[str],
    runs: Path | None,
    connection: str,
) -> list[Any]:
    """Add the settings of the run to continue, or else the recommended ones.

    Raises:
        typer.Exit: a settings file is invalid, or there is no such run.
    """
    from osfl.cli import display
    from osfl.config import ConfigError

    if not continued:
        with display.expected_errors():
            if replaced:
                raise ConfigError("--replace requires --continue, the run to continue")
        return _with_method(settings)
    from osfl.launch.continued import continued_settings

    with display.expected_errors():
        return continued_settings(continued, replaced, settings or [], runs, connection)


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
    continued: Annotated[
        str,
        typer.Option(
            "--continue",
            help="A run to continue as a new version: sets continue-from. Simulation: with its "
            "settings.",
        ),
    ] = "",
    replace: Annotated[
        list[str] | None,
        typer.Option(help="With --continue: a client that sends a new payload; may be repeated."),
    ] = None,
    signed: Annotated[
        Path | None, typer.Option(help="File of `osfl sign`, whose signatures the run shows.")
    ] = None,
) -> None:
    """Run a federation; exit with 0 only if it finishes.

    If neither a file nor method=NAME sets a method, configs/recommended.toml is used.

    Example: osfl run configs/demo.toml method=fedlmg seed=1
    """
    complete = _complete_settings(settings, continued, replace or [], runs, connection)
    if dry_run:
        _dry_run(complete, runs, connection)
        return
    from osfl.cli.run import run as run_federation
    from osfl.launch.jobs import Resources

    run_federation(complete, runs, connection, Resources(client_cpus, client_gpus), signed)


def _dry_run(settings: list[str], runs: Path | None, connection: str) -> None:
    from osfl.cli import display
    from osfl.settings import resolve_config

    # Before the slow imports of torch and the models' libraries
    with display.expected_errors():
        resolve_config(settings)
    from osfl.cli.dry_run import show_estimate

    show_estimate(settings, runs, connection)


@app.command()
def sign(
    settings: Settings = None,
    key: Annotated[Path, typer.Option(help="The signer's private key.")] = ...,  # type: ignore[assignment]
    name: Annotated[str, typer.Option(help="The signer; the key's file name by default.")] = "",
    out: Annotated[Path, typer.Option(help="File of the signatures.")] = Path("run.signed"),
) -> None:
    """Sign a run's settings, code and kit, offline; further signers add to the same file.

    Sites that run `osfl supernode` demand it. Start it with `osfl run ... --signed run.signed`.

    Example: osfl sign study.toml job-id=study1 --key keys/alice
    """
    from osfl.cli import display, signing
    from osfl.settings import resolve_config

    with display.expected_errors():
        _, overrides = resolve_config(_with_method(settings))
        loaded = signing.load_signing_key(key)
        count = signing.sign_run(overrides, name or key.name, loaded, out)
    display.console.print(f"{out}: signatures: {count}", highlight=False, soft_wrap=True)


@app.command(
    "supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def supernode(
    arguments: typer.Context,
    signers: Annotated[Path, typer.Option(help="File with the public keys of trusted signers.")],
    required: Annotated[int, typer.Option(help="How many of them must have signed a run.")] = 1,
) -> None:
    """At a site: start flower-supernode, which runs code only if it is signed.

    Every other argument is Flower's. A run that is not signed is refused before its code is
    imported, and the refusal names what differs.

    Example: osfl supernode --signers signers.pub --required 2 --superlink server.example:9092 ...
    """
    from osfl.cli import display, signing

    with display.expected_errors():
        signing.start_supernode(signers, required, arguments.args)


@app.command()
def advise(
    settings: Settings = None,
    runs: RunsFolder = None,
    connection: Connection = "",
    client_cpus: Annotated[int, typer.Option(help="Simulation: CPU cores per client.")] = 1,
    client_gpus: Annotated[
        float, typer.Option(help="Simulation: fraction of a GPU per client.")
    ] = 0.0,
    overrides: Annotated[
        list[str] | None, typer.Option("-o", help="key=value, after all settings.")
    ] = None,
) -> None:
    """Ask the clients which methods are worth it, before anything else is sent.

    Every client measures three shares of its own training images: those that a CLIP, a linear head
    on frozen features, and the kit's diffusion model classify correctly. It sends these alone.

    Example: osfl advise configs/worlds/pacs.toml data.root=/data/pacs kit=/models/my-kit
    """
    from osfl.cli.advise import show_advice
    from osfl.launch.jobs import Resources

    complete = [*(settings or []), *(overrides or [])]
    show_advice(complete, runs, connection, Resources(client_cpus, client_gpus))


@app.command()
def serve(
    connection: Annotated[
        str, typer.Option(help="SuperLink connection in your Flower configuration.")
    ],
    settings: Settings = None,
    name: Annotated[str, typer.Option(help="Job ids are NAME-v1, NAME-v2, ...")] = "standing",
    new_clients: Annotated[
        int, typer.Option(min=1, help="New clients with which a version starts at once.")
    ] = 1,
    every: Annotated[
        float, typer.Option(min=1, help="Seconds after which one new client is enough.")
    ] = 86_400.0,
    versions: Annotated[int, typer.Option(min=0, help="Versions to make; 0: no limit.")] = 0,
    runs: Annotated[Path, typer.Option(help="Folder for NAME.json, which keeps the state.")] = Path(
        "runs"
    ),
) -> None:
    """Keep a federation standing: make a new version of the model as clients come, until Ctrl-C.

    Each version continues the last one (continue-from). A run that fails is tried again.

    Example: osfl serve study.toml --connection hospitals --new-clients 3
    """
    from osfl.cli.serve import serve_versions
    from osfl.launch.serve import StandingMode

    standing = StandingMode(name, new_clients, every, versions)
    serve_versions(_with_method(settings), standing, connection, runs)


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
    from osfl.api import open_run
    from osfl.cli import display

    with display.expected_errors():
        display.print_metrics(open_run(folder).metrics)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="The folder of the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead.")] = False,
) -> None:
    """List the runs in a folder, newest first: state, accuracy, epsilon, duration.

    Example: osfl runs runs/tables --json
    """
    from osfl.cli import display
    from osfl.cli.runs import show_runs

    with display.expected_errors():
        show_runs(folder, as_json)


@app.command()
def track(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
    tracking: Annotated[
        str, typer.Option(help="tensorboard, mlflow, or both; empty: as the run's tracking.")
    ] = "",
    mlflow_uri: Annotated[
        str,
        typer.Option(help="MLflow server; empty: $MLFLOW_TRACKING_URI."),
    ] = "",
) -> None:
    """Log a run to TensorBoard or MLflow; again, to update what is logged.

    Exit with 1 if a tracker does not accept it.

    Example: osfl track runs/JOB --tracking mlflow --mlflow-uri http://localhost:5000
    """
    from osfl.cli import display
    from osfl.cli.track import show_tracking

    with display.expected_errors():
        show_tracking(folder, tracking, mlflow_uri)


@app.command()
def ui(
    runs_dir: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; any other address exposes them to the network."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8765,
) -> None:
    """Show the runs in a browser: a list, each run live, two runs side by side.

    The page only reads. Ctrl-C ends it.
    """
    from osfl.cli import display
    from osfl.cli.ui import serve

    with display.expected_errors():
        serve(runs_dir, host, port)


@app.command()
def forget(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
    client: Annotated[str, typer.Option(help="The client's name.")],
    name: Annotated[
        bool, typer.Option("--name", help="Record the client's name, not only its SHA-256.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(help="A private key of `osfl certs signer` that signs the record."),
    ] = None,
) -> None:
    """Remove a client and everything derived from it, then train again without asking any client.

    The run's images and models are then those of a run in which the client never took part. The
    record in forgotten/ lists what was removed and what could not be reached. Every file of the
    folder that may depend on the client is removed, also exports and notes. If it is interrupted,
    the same command continues.

    Example: osfl forget runs/JOB --client site-b --key keys/officer
    """
    from osfl.cli import display
    from osfl.cli.forget import forget_client

    with display.expected_errors():
        forget_client(folder, client, name, key)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
) -> None:
    """Verify the SHA-256 checksum of every payload, image, model and record of a run."""
    from osfl.cli import display
    from osfl.config import ConfigError
    from osfl.run_folder.verify import contains_run, signature_lines, verify_run
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
        for line in signature_lines(folder):
            print(line)
        if wrong:
            raise ConfigError(
                "this run has corrupt files. The same `osfl run` command recreates all of them "
                "except payloads, which their clients must send again, and config.json, without "
                "which a run cannot resume"
            )


@app.command()
def shards(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/<job id>.")],
    out: Annotated[str, typer.Argument(help="Folder for the tar files, or s3://BUCKET/FOLDER.")],
    size: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 10_000,
) -> None:
    """Export a run's synthetic images as shuffled WebDataset shards (image, label, metadata).

    Repeat the command to write the shards that an interrupted one has not written.

    Example: osfl shards runs/JOB s3://bucket/JOB
    """
    from osfl.cli import display
    from osfl.run_folder.shards import write_shards

    with display.expected_errors():
        with display.counting_progress() as bar:
            files = write_shards(
                folder, out, size, display.progress_callback(bar, "writing images")
            )
        print(f"{len(files)} shards in {out}")


ModelFile = Annotated[
    Path, typer.Argument(help="A model of a run, such as runs/<job id>/models/FT.safetensors.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]


@app.command()
def predict(
    model: ModelFile,
    paths: Annotated[
        list[str], typer.Argument(help="Images, folders of images, or patterns such as 'a/*.png'.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File for the predictions.", show_default="standard output")
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="csv, or jsonl for JSON lines.")
    ] = "csv",
    device: Device = "auto",
    batch_size: BatchSize = 64,
) -> None:
    """Predict images' classes: path, class, and the probability of every class.

    Exit with 1 if a file is not a readable image; the others are still predicted.

    Example: osfl predict runs/JOB/models/FT.safetensors scans/ --out predictions.csv
    """
    from osfl.cli import display
    from osfl.cli.predict import show_predictions

    with display.expected_errors(display.error_console):
        is_complete = show_predictions(model, paths, out, output_format, device, batch_size)
    if not is_complete:
        raise typer.Exit(1)


@app.command()
def evaluate(
    model: ModelFile,
    folder: Annotated[Path, typer.Argument(help="A folder with a folder of images per class.")],
    device: Device = "auto",
    batch_size: BatchSize = 64,
    specificity: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="At which the sensitivity is printed.")
    ] = 0.95,
) -> None:
    """Evaluate a model on labeled images: accuracy, AUROC, calibration, confusion matrix.

    Exit with 1 if a file is not a readable image; the figures are then of the others.

    Example: osfl evaluate runs/JOB/models/FT.safetensors labeled-scans/
    """
    from osfl.cli import display
    from osfl.cli.predict import show_evaluation

    with display.expected_errors(display.error_console):
        is_complete = show_evaluation(model, folder, device, batch_size, specificity)
    if not is_complete:
        raise typer.Exit(1)


@app.command()
def export(
    model: ModelFile,
    to: Annotated[
        str,
        typer.Option(help="onnx (opset 18), or huggingface: a folder for timm or transformers."),
    ],
    out: Annotated[Path, typer.Option(help="onnx: a file; huggingface: a folder.")],
    preprocessing: Annotated[
        bool,
        typer.Option(
            "--preprocessing",
            help="onnx: take uint8 RGB images of the model's image size, and normalize them in the "
            "graph.",
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            help="huggingface: the model's run, for the figures of its card.",
            show_default="the run that MODEL lies in",
        ),
    ] = None,
    client_names: Annotated[
        bool, typer.Option("--client-names", help="huggingface: name the clients in the card.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export.")
    ] = False,
) -> None:
    """Export a model for programs without OSFL: its outputs are the same logits.

    The ONNX file takes batches of any size, and has classes and description as metadata. The
    folder has the weights, the preprocessing and a model card; where timm lacks the architecture,
    it has the code that transformers runs with trust_remote_code=True.

    Example: osfl export runs/JOB/models/FT.safetensors --to onnx --out model.onnx
    """
    from osfl.cli import display
    from osfl.cli.export import show_export

    with display.expected_errors(display.error_console):
        show_export(model, to, out, preprocessing, run, client_names, overwrite)


def _refuse_old_name(value: int) -> int:
    if value:
        raise typer.BadParameter("renamed to --parallel")
    return value


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
    parallel: Annotated[
        int, typer.Option(help="Parallel runs, among which the CPU cores are divided.")
    ] = 2,
    at_once: Annotated[
        int, typer.Option(hidden=True, callback=_refuse_old_name, help="Renamed to --parallel.")
    ] = 0,
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
    side = Resources(parallel, client_cpus or min(parallel, os.cpu_count() or 1), client_gpus)
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


@certs_app.command("signer")
def certs_signer(
    name: Annotated[str, typer.Argument(help="The signer's name.")],
    folder: Annotated[Path, typer.Option(help="Folder for the key pair.")] = Path(),
) -> None:
    """Create the key pair of a person who signs runs.

    Sites add the line of NAME.pub to their file of trusted signers.
    """
    from osfl.cli import display, signing

    with display.expected_errors():
        file = signing.make_signer(folder, name)
    display.console.print(f"only for {name}: {file}", highlight=False, soft_wrap=True)
    display.console.print(f"for every site: {file}.pub", highlight=False, soft_wrap=True)


@certs_app.command("request")
def certs_request(
    name: Annotated[str, typer.Argument(help="The site's name, such as its client id.")],
    folder: Annotated[Path, typer.Option(help="Folder for the key and the request.")] = Path(),
) -> None:
    """At a site: create its node key, and a request with the public part for the operator.

    The key stays at the site. Send NAME.request, and read the fingerprint out when the operator
    asks for it.
    """
    from osfl.cli import display, node_keys

    with display.expected_errors():
        key, file = node_keys.request_key(folder, name)
    display.console.print(f"stays here: {key.file}", highlight=False, soft_wrap=True)
    display.console.print(f"for the operator: {file}", highlight=False, soft_wrap=True)
    display.console.print(f"fingerprint: {key.fingerprint}", highlight=False, soft_wrap=True)


@certs_app.command("register")
def certs_register(
    folder: CertsFolder,
    request: Annotated[Path, typer.Argument(help="The site's NAME.request.")],
    fingerprint: Annotated[
        str, typer.Option(help="Fingerprint that the site read out; empty: the command asks.")
    ] = "",
) -> None:
    """At the operator: accept a site's request, and add its public key to nodes/.

    Compare the fingerprint with the site's over the telephone.
    """
    from osfl.cli import display, node_keys

    with display.expected_errors():
        name, public = node_keys.read_request(request)
        digest = node_keys.key_fingerprint(public)
        if fingerprint:
            node_keys.check_fingerprint(public, fingerprint)
        elif not typer.confirm(f"Does {name} read out {digest}?"):
            raise typer.Exit(1)
        key = node_keys.register_key(folder, name, public)
    display.console.print(
        f"register it: flwr supernode register {key.file} CONNECTION --name {name}",
        highlight=False,
        soft_wrap=True,
    )


@certs_app.command("node")
def certs_node(
    folder: CertsFolder,
    names: Annotated[list[str], typer.Argument(help="The nodes' names, such as their client ids.")],
) -> None:
    """Create a key pair for each node of a demonstration: these private keys travel.

    Copy NAME to that node only, and register NAME.pub with the SuperLink. In a federation, each
    site runs `osfl certs request`, and its key never leaves it.
    """
    from osfl.cli import display, node_keys

    with display.expected_errors():
        for name in names:
            file = node_keys.make_node(folder, name)
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
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe file such as configs/kits/photographs.toml, then key=value settings of "
            "it. Without one, the digits kits."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the finished kit; runs/kit/NAME by default.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints, from which interrupted training resumes; "
            "runs/kit/checkpoints, or runs/kit/NAME-checkpoints for a recipe file, by default."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    base: Annotated[
        Path | None,
        typer.Option(
            help="For the digits: a finished kit to start from; only parts it lacks are trained."
        ),
    ] = None,
    export: Annotated[
        bool,
        typer.Option(help="For a recipe: write the kit from the present checkpoints and stop."),
    ] = False,
) -> None:
    """Train the digits kits, or the kit of a recipe file; takes hours on two cores."""
    from rich.progress import Progress, TimeElapsedColumn

    from osfl.cli import display
    from osfl.cli.kit_training import train

    try:
        with (
            display.expected_errors(),
            Progress(
                *Progress.get_default_columns(),
                TimeElapsedColumn(),
                console=display.error_console,
            ) as progress,
        ):
            finished = train(recipe or [], out, work, device, progress, base, export)
    except KeyboardInterrupt:
        display.console.print("interrupted; the same command resumes from the last checkpoint")
        raise typer.Exit(130) from None
    display.console.print(f"kit: {finished}")
