"""`osfl run --dry-run`: check a run, and print its estimated costs."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from osfl.cli import display
from osfl.cli.estimate import Estimate, Noise, estimate_run, scores_images
from osfl.cli.preflight import check_data
from osfl.config import ConfigError, RunConfig, all_parts, flatten, resolve_auto
from osfl.data.partition import DataError
from osfl.kit.folder import KitError
from osfl.launch import flower
from osfl.launch.jobs import runs_folder, with_source_path
from osfl.methods import METHODS
from osfl.models.classifiers import ClassifierError
from osfl.payload.codecs import MAX_LEVEL
from osfl.run_folder.continuation import continued_folder, find_continuation
from osfl.run_folder.continuation_store import Continuation
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.payload_source import check_source_name, find_source, source_folder
from osfl.run_folder.payload_store import PayloadSource
from osfl.run_folder.report.page import human_bytes, human_flops
from osfl.settings import Setting, default_config, resolve_config
from osfl.util.costs import Cost
from osfl.util.markers import AUTO
from server_app.app import estimate_disk_bytes

SHOWN_CLIENTS = 10


def show_estimate(settings: Iterable[Setting], runs: Path | None, connection: str) -> None:
    """Check a run, and print its estimated costs.

    Raises:
        typer.Exit: the run cannot work; the reason was printed.
    """
    with display.expected_errors():
        try:
            config, _ = resolve_config(settings)
            root = runs_folder(config, runs, connection)
            flower.check_disk(root, estimate_disk_bytes(config))
            if connection:
                check_source_name(config)
            source = None if connection else _find_source(config, root)
            continuation = None if connection else _find_continuation(config, root)
            notes = [] if connection else check_data(config)
            estimate = estimate_run(config, simulated=not connection)
        except (ClassifierError, DataError, KitError, flower.LaunchError) as error:
            raise ConfigError(str(error)) from error
        if continuation is not None:
            notes = [*notes, _continuation_note(continuation)]
        for note in notes:
            display.console.print(note, markup=False, soft_wrap=True)
        _show(config, estimate, not connection, source)


def _find_source(config: RunConfig, root: Path) -> PayloadSource | None:
    """Return the payloads that a simulation reuses; None if its clients make them.

    Raises:
        ConfigError: as `find_source`.
        CorruptFileError: the record of a resumed run is corrupt.
    """
    if not config.payloads_from:
        return None
    # A resumed run has the payloads already
    if config.job_id and (source := RunFolder(root / config.job_id).payload_source()):
        return source
    absolute = with_source_path(config, root)
    return find_source(absolute, source_folder(absolute, root))


def _find_continuation(config: RunConfig, root: Path) -> Continuation | None:
    """Return what a simulation has from the run that it continues; None if it continues none.

    Raises:
        ConfigError: as `find_continuation`.
        CorruptFileError: the record of a resumed run is corrupt.
    """
    if not config.continue_from:
        return None
    # A resumed run has the payloads already
    if config.job_id and (record := RunFolder(root / config.job_id).continuation()):
        return record
    absolute = with_source_path(config, root)
    return find_continuation(absolute, continued_folder(absolute, root))


def _continuation_note(continuation: Continuation) -> str:
    """Say what a run has from the one that it continues, which the estimate leaves out."""
    return (
        f"version {continuation.version}, which continues job {continuation.job}: the payloads "
        f"and images of {len(continuation.payloads)} clients are kept, and these clients are not "
        "asked. The figures below are those of a run of all clients"
    )


def _show(
    config: RunConfig, estimate: Estimate, simulated: bool, source: PayloadSource | None
) -> None:
    settings = Table("key", "value", title=f"{config.method}: settings other than the defaults")
    for key, value in estimate.changed.items():
        settings.add_row(key, display.escape_text(value))
    if estimate.changed:
        display.console.print(settings)
    lines = [*_kind_lines(estimate), *_upload_lines(config, estimate, simulated)]
    if config.payloads_from:
        lines = [_reuse_line(config, source)]
    else:
        lines += _client_lines(estimate)
    lines.append(f"the server synthesizes {estimate.images} images")
    lines.append(f"for data.name = {config.data.name}: {format_data_defaults(config)}")
    if estimate.sampling is not None:
        lines.append(_sampling_line(config, estimate.sampling))
    if (training := estimate.training) is not None:
        lines.append(
            f"the training of the global model on them: {human_flops(training.flops)}, about "
            f"{_duration(training.seconds)} on this machine"
        )
    if estimate.memory_mb is not None:
        memory = human_bytes(1e6 * estimate.memory_mb)
        lines.append(f"the server's process needs about {memory} of memory")
    lines += _privacy_lines(config, estimate.noise)
    if config.client_contribution:
        times = config.training_clients + 1
        lines.append(f"the server trains the global model {times} more times (client-contribution)")
    lines.append(_disk_line(estimate))
    for line in lines:
        display.console.print(display.escape_text(line), highlight=False, soft_wrap=True)


def _disk_line(estimate: Estimate) -> str:
    """Say how large the run's folder becomes."""
    limit = human_bytes(estimate.disk_bytes)
    if estimate.folder_bytes is None:
        return f"the run's folder needs at most {limit}"
    return f"the run's folder has about {human_bytes(estimate.folder_bytes)}, at most {limit}"


def _sampling_line(config: RunConfig, sampling: Cost) -> str:
    """Say what the images cost, and how long they take on this machine or on workers like it."""
    scoring = " and scores" if scores_images(config) else ""
    text = (
        f"the diffusion model, which synthesizes{scoring} them: {human_flops(sampling.flops)}, "
        f"about {_duration(sampling.seconds)} on this machine"
    )
    if (workers := config.synthesis.workers) > 1:
        text += f"; on {workers} workers like it {_duration(sampling.seconds / workers)}"
    return text


def _reuse_line(config: RunConfig, source: PayloadSource | None) -> str:
    """Say whose payloads the run reuses.

    Args:
        source: the payloads, if they are on this machine.
    """
    payloads = f"the payloads of {config.payloads_from}"
    if source is not None:
        payloads = f"{len(source.payloads)} payloads of {source.run}"
    return f"no client makes or sends a payload: the run uses {payloads}; clients only test"


def _kind_lines(estimate: Estimate) -> list[str]:
    """Say how many clients of a mixed run send each kind of payload."""
    counts = Counter(estimate.kinds.values())
    return [f"clients that choose {kind}: {count}" for kind, count in counts.items()]


def _upload_lines(config: RunConfig, estimate: Estimate, simulated: bool) -> list[str]:
    """Describe the uploads: one line if all are equal, else one per client."""
    verb = "sends at most" if config.payload_codec in MAX_LEVEL else "sends"
    sizes = sorted(estimate.uploads.items())
    if not simulated or len(set(estimate.uploads.values())) == 1:
        sender = "a client" if simulated else "a client with images of every class"
        lines = [f"{sender} {verb} {human_bytes(sizes[0][1])}"]
    else:
        lines = [f"{client} {verb} {human_bytes(size)}" for client, size in sizes[:SHOWN_CLIENTS]]
        if len(sizes) > SHOWN_CLIENTS:
            lines.append(f"and {len(sizes) - SHOWN_CLIENTS} more clients")
    total = human_bytes(sum(estimate.uploads.values()))
    return [*lines, f"all {len(sizes)} clients together: {total}"]


def _client_lines(estimate: Estimate) -> list[str]:
    """Say how much the client with the most images computes, if that is known."""
    flops = [value for value in estimate.client_flops.values() if value is not None]
    if len(flops) < len(estimate.client_flops) or not any(flops):
        return []
    return [f"a client computes at most {human_flops(max(flops))} for its payload"]


def _privacy_lines(config: RunConfig, noise: Noise | None) -> list[str]:
    """Describe the guarantee: its noise, its scope, and its training."""
    lines = []
    if noise is not None:
        lines.append(
            "the noise is as large as the clipping bound (clip-norm) in a mean of "
            f"{noise.break_even_images:,} images; {noise.client} has a mean of {noise.images:,}"
        )
        if noise.break_even_images > noise.images:
            lines.append("so that mean is mostly noise: set a larger epsilon, or method=votes")
    if config.epsilon:
        lines.append(
            "epsilon covers the payload's numbers, but not its list of classes, the number of "
            "images, or test results (node-config test-results)"
        )
    if config.epsilon:
        parts = all_parts(config).items()
        lines += filter(None, (METHODS[method].guarantee_note(part) for method, part in parts))
    return lines


def _duration(seconds: float) -> str:
    """Format a duration, such as '1.5 min' for 90."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def format_data_defaults(config: RunConfig) -> str:
    """Format the settings whose default depends on the data."""
    flat = flatten(config)
    defaults = resolve_auto({**default_config(), "data.name": config.data.name})
    keys = [key for key, value in default_config().items() if value == AUTO != defaults[key]]
    settings = [
        f"{key} = {json.dumps(flat[key])}" + (" (default)" if flat[key] == defaults[key] else "")
        for key in keys
    ]
    return ", ".join(settings)
