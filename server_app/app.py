"""Flower ServerApp: collect payloads, synthesize images, train, evaluate, report."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from osfl.config import (
    ConfigError,
    RunConfig,
    all_parts,
    parse_run_config,
    sends_payloads,
    split_names,
)
from osfl.data.parts import class_names
from osfl.kit.folder import KitError
from osfl.kit.kits import find_kit, kit_image_size
from osfl.kit.run_check import check_initial_weights, check_noise_schedule
from osfl.kit.used_parts import initial_models
from osfl.methods import METHODS, server_module
from osfl.models.classifiers import meta_classifier
from osfl.payload.encryption import fingerprint, load_key, public_bytes
from osfl.payload.kinds import Payload, Sent, by_method
from osfl.payload.wire import PayloadError
from osfl.run_folder.continuation import continue_run, drop_departed, with_new_clients
from osfl.run_folder.events import log_results
from osfl.run_folder.layout import RunFolder, open_run_folder
from osfl.run_folder.payload_source import reuse_payloads
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import DROPPED, Status
from osfl.run_folder.verify import write_checksums as seal_folder
from osfl.tracking.live import LiveTracking
from osfl.tracking.track import check_trackers
from osfl.util.devices import pick_device
from osfl.util.imports import without_collection
from osfl.util.log import log
from server_app.baselines.run import run_rounds
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.filters import dropped_warning, filter_payloads
from server_app.defenses.image_counts import find_caps, stated_counts
from server_app.defenses.outliers import find_outliers
from server_app.expected import expected_payloads, expected_tensors
from server_app.federation.advice import advise
from server_app.federation.collect import collect, drop_payload, read_reused
from server_app.federation.evaluate import EvaluationNodes, evaluate_on_clients
from server_app.federation.exchange import RoundError
from server_app.federation.join import Members, join
from server_app.federation.local_baseline import compare_with_local_models
from server_app.federation.secure_sum import collect_sum, sum_warnings
from server_app.kit import (
    bind_job_to_kit,
    check_sampling_kit,
    check_subject,
    client_download_bytes,
    client_kit_digests,
    fetch_kits,
)
from server_app.overlap import Overlap, weights_bytes
from server_app.synthesis.choice import resolve_synthesis
from server_app.synthesis.workers import check_workers

NOT_TESTED = (
    "no client is online, so none tested the global model; to test it, repeat `osfl run` with this "
    "job-id"
)
ONLY_TESTERS = (
    "no client that takes part is online, so only test-only clients tested the global model; to "
    "test it on the others, repeat the command"
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one job. Restarted with the same job id, it resumes where it stopped."""
    config = parse_run_config(context.run_config)
    run_job(grid, config, config.job_id or f"{config.method}-{context.run_id}")


def run_job(grid: Grid, config: RunConfig, job_id: str) -> None:
    """Run the whole job on the server.

    Raises:
        ConfigError, RoundError, and the errors of the kit, the data and the method; `status.json`
        then has the phase `failed` and the reason.
    """
    run_in_folder(grid, config, open_run_folder(config, job_id, estimate_disk_bytes(config)))


def run_in_folder(grid: Grid, config: RunConfig, folder: RunFolder) -> None:
    """Run the whole job in its open folder; see `run_job`."""
    with folder.lock():
        status = Status(folder.path)
        tracking = LiveTracking(folder.path, split_names(config.tracking), config.mlflow_uri)
        tracking.begin()
        try:
            _run(grid, config, folder.path.name, folder, status, tracking)
        except BaseException as error:
            # If the disk is full, the original error is the one to raise
            with suppress(OSError):
                status.fail(error)
            if isinstance(error, Exception):
                for warning in tracking.finish():
                    log.warning("%s", warning)
            raise
        finally:
            tracking.stop()


def _run(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    folder: RunFolder,
    status: Status,
    tracking: LiveTracking,
) -> None:
    if config.advise:
        advise(grid, config, folder, status)
        status.phase("finished")
        return
    method = METHODS[config.method]
    key = load_key(config.sealing_key) if config.sealing_key else None
    if key is not None:
        log.info("payloads are sealed to %s", fingerprint(public_bytes(key)))
    fetch_kits(config, status)
    check_subject(config)
    check_sampling_kit(config)
    source = reuse_payloads(config, folder)
    continue_run(config, folder)
    config = with_new_clients(without_forgotten(config, folder), folder)
    bind_job_to_kit(config, folder, status)
    stored = folder.stored_clients() if sends_payloads(config) else []
    _check_seals(folder, stored, config, key)
    members = join(
        grid,
        config,
        status,
        stored,
        prepare=lambda: check_server(config),
        kit=client_kit_digests(config),
        public_key=None if key is None else public_bytes(key),
    )
    if source is not None:
        # A payload states the job that it was made for
        payloads = read_reused(grid, config, source.job, members, folder, status, key)
    else:
        with Overlap(grid, config, folder, status) as overlap:
            payloads = _collect(grid, config, job_id, members, folder, status, key, overlap.draw)
    payloads = _without_departed(payloads, members, folder, status)
    # A standby client or a tester may have come online since
    members.poll(time.monotonic() + 1)
    if method.samples:
        config = resolve_synthesis(config, folder, status)
    models, payloads = _train_models(grid, config, job_id, members, folder, status, payloads)
    members.await_testers()
    members.end()
    _test_models(grid, config, members, models, folder, status)
    _finish(config, folder, list(members.test_nodes()), payloads, status, tracking)


def _collect(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    members: Members,
    folder: RunFolder,
    status: Status,
    key: X25519PrivateKey | None,
    use_early: Callable[[Mapping[str, Sent]], None],
) -> dict[str, Sent]:
    """Return the payload of every client; {} if they send none.

    Args:
        use_early: as `collect`.
    """
    if not sends_payloads(config):
        return {}

    if config.secure_sum:
        return collect_sum(grid, config, job_id, members, folder, status)

    def kind_of(client: str) -> str:
        return folder.payload_kind(client) or members.kinds.get(client, "")

    expected = expected_payloads(config, job_id, kind_of)
    return collect(grid, config, job_id, members, folder, status, expected, key, None, use_early)


def _without_departed(
    payloads: dict[str, Sent], members: Members, folder: RunFolder, status: Status
) -> dict[str, Sent]:
    """Return the payloads without those of clients that have left the continued run meanwhile.

    Raises:
        RoundError: none is left.
    """
    departed = drop_departed(folder)
    for client in departed:
        log.warning("a client has left the continued run; this run is made without it")
        members.leave(client)
        status.remove(client)
    remaining = {client: sent for client, sent in payloads.items() if client not in departed}
    if departed and not remaining:
        raise RoundError("all clients have left the continued run; wait for others")
    return remaining


def _finish(
    config: RunConfig,
    folder: RunFolder,
    test_clients: Sequence[str],
    payloads: Mapping[str, Sent],
    status: Status,
    tracking: LiveTracking,
) -> None:
    """Write the report, end the tracking, and seal the folder."""
    _report(config, folder, test_clients, payloads)
    if warnings := _finish_tracking(config, tracking, status):
        for warning in warnings:
            status.add_warning(warning)
        # Again, with the warnings
        _report(config, folder, test_clients, payloads)
    if folder.continuation() is not None:
        folder.remove_unplanned_images()
    seal_folder(folder.path)
    status.phase("finished")
    log.info("report: %s", folder.report_file)


def _train_models(
    grid: Grid,
    config: RunConfig,
    job_id: str,
    members: Members,
    folder: RunFolder,
    status: Status,
    payloads: dict[str, Sent],
) -> tuple[dict[str, GlobalModel], dict[str, Sent]]:
    """Return the global models and the payloads they were made from.

    A payload that passed every check but makes sampling or a teacher diverge is dropped, and the
    training starts again without it.

    Raises:
        RoundError: fewer than `min-clients` payloads are left, or the defense drops all.
    """
    method = METHODS[config.method]
    while True:
        # Replaces the warnings of the previous attempt, which may name dropped clients
        kinds = {
            client: folder.payload_kind(client) or members.kinds.get(client, config.method)
            for client in payloads
        }
        status.warn(
            [
                warning
                for sent in by_method(payloads, kinds).values()
                for warning in payload_warnings(sent, config.max_weight_ratio)
            ]
            + sum_warnings(config, folder)
        )
        status.forget(DROPPED)
        clients = tuple(payloads) if sends_payloads(config) else tuple(members.nodes)
        job = ServerJob(config, folder, status, clients, members.architectures, kinds)
        with without_collection():
            half = server_module(config.method)
        try:
            if method.rounds:
                models = run_rounds(job, grid, members, half.strategy(job), job_id)
            else:
                job, trusted = _pass_defense(job, payloads)
                models = half.run(job, trusted)
        except PayloadError as error:
            payloads = drop_payload(error, payloads, config, folder, status)
        else:
            return models, payloads


def _test_models(
    grid: Grid,
    config: RunConfig,
    members: Members,
    models: dict[str, GlobalModel],
    folder: RunFolder,
    status: Status,
) -> None:
    """Let the clients test the global models; a run with another run's payloads needs none of them.

    Raises:
        RoundError: as `evaluate_on_clients`.
    """
    nodes = members.test_nodes()
    if folder.has_payloads_of_another and not nodes:
        status.add_warning(ONLY_TESTERS if members.testers else NOT_TESTED)
        if not members.testers:
            return
    test_nodes = EvaluationNodes(nodes, members.testers, members.comparing)
    evaluate_on_clients(grid, config, test_nodes, models, folder, status)
    if nodes:
        compare_with_local_models(grid, config, nodes, models, folder, status)


def _pass_defense(
    job: ServerJob, payloads: Mapping[str, Sent]
) -> tuple[ServerJob, dict[str, Sent]]:
    """Return the job and payloads without the clients whose payloads the defense drops.

    Raises:
        RoundError: it drops all payloads.
    """
    trusted = filter_payloads(job, payloads)
    if len(trusted) == len(payloads):
        return job, trusted
    for client in payloads:
        if client not in trusted:
            job.status.stamp(client, DROPPED)
            job.status.add_warning(dropped_warning(job.config, client))
    return replace(job, clients=tuple(trusted)), trusted


def _report(
    config: RunConfig,
    folder: RunFolder,
    test_clients: Sequence[str],
    payloads: Mapping[str, Sent],
) -> None:
    """Write the report, and log each client's accuracy for those who only see the log."""
    downloads = {
        client: client_download_bytes(config, payloads.get(client), folder.payload_kind(client))
        # The sum of all payloads is none of a client
        for client in (*test_clients, *(() if config.secure_sum else payloads))
    }
    metrics = write_report(folder.path, class_names(config.data), downloads)
    log_results(metrics, str(folder.report_file))
    for name, accuracy in metrics["accuracy"].items():
        log.info(
            "accuracy (%%) of %s: %s",
            name,
            ", ".join(f"{client} {value:.1f}" for client, value in accuracy.items()),
        )


def _finish_tracking(config: RunConfig, tracking: LiveTracking, status: Status) -> list[str]:
    """Log the rest to the run's trackers, and return a warning for each that did not accept it."""
    if not config.tracking:
        return []
    status.phase("tracking")
    return tracking.finish()


def payload_warnings(payloads: Mapping[str, Payload], ratio: float) -> list[str]:
    """Return warnings about outlier payloads and clients whose weight is capped.

    Args:
        ratio: `max-weight-ratio`.
    """
    caps = find_caps(
        {client: stated_counts(payload) for client, payload in payloads.items()}, ratio
    )
    # A cap's warning already states the count
    outliers = [
        outlier
        for outlier in find_outliers(payloads)
        if outlier.tensor != "counts" or outlier.client not in caps
    ]
    return [*map(str, outliers), *map(str, caps.values())]


def _check_seals(
    folder: RunFolder, stored: Sequence[str], config: RunConfig, key: X25519PrivateKey | None
) -> None:
    """Check that this run's key opens the stored payloads, before any client is asked.

    Raises:
        ConfigError: payloads are stored sealed to a key that is not this run's.
    """
    run_key = "" if key is None else fingerprint(public_bytes(key))
    wrong_keys = sorted({folder.sealing_fingerprint(client) for client in stored} - {"", run_key})
    if wrong_keys:
        hint = ", or move the payloads away: the clients are then asked again"
        # Another run's payloads would come back
        if folder.payload_source() or folder.continuation():
            hint = ", or start a run without payloads-from and continue-from"
        raise ConfigError(
            f"sealing-key = {config.sealing_key!r}: payloads in {folder.path} are sealed to the "
            f"key with the fingerprint {wrong_keys[0]}. Set sealing-key to that key{hint}"
        )
    unsealed = [client for client in stored if not folder.sealing_fingerprint(client)]
    if config.sealed_store and unsealed:
        log.warning(
            "sealed-store: payloads stored earlier remain unsealed: %s", ", ".join(unsealed)
        )


def without_forgotten(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the configuration in which the places of forgotten clients may stay empty."""
    vacant = folder.vacant_places()
    needed = max(1, min(config.needed_clients, config.training_clients - vacant))
    return replace(config, min_clients=needed) if vacant else config


def check_server(config: RunConfig) -> None:
    """Check, before the clients work, everything the server needs afterwards.

    Raises:
        ConfigError, ClassifierError, KitError, FileNotFoundError: the device, kit, architecture or
            initialization does not exist.
    """
    device = pick_device(config.device)
    method = METHODS[config.method]
    classes = len(class_names(config.data))
    check_trackers(split_names(config.tracking), config.mlflow_uri)
    check_subject(config)
    check_sampling_kit(config)
    if method.samples:
        check_workers(config.synthesis, device)
        check_noise_schedule(find_kit(config.sampling_kit), config.synthesis.steps)
    for key, settings in initial_models(config):
        kit = find_kit(config.kit) if settings.init == "kit" else ""
        check_initial_weights(settings, kit, key)
        if settings.init == "none":
            meta_classifier(settings.architecture, classes, settings.small_stem)
    for part in all_parts(config).values():
        expected_tensors(part)


def estimate_disk_bytes(config: RunConfig) -> int:
    """Estimate an upper bound of a run's disk use.

    Uncompressed images, their pixels at the classifiers' size (`allocate_pixels`), payloads and
    models.
    """
    classes = len(class_names(config.data))
    domains = config.num_clients + len(config.public_domain_names)
    images = domains * classes * config.synthesis.images_per_class
    try:
        size = kit_image_size(find_kit(config.sampling_kit))
    # check_server raises this error if the method needs the kit
    except (FileNotFoundError, KitError):
        size = config.data.image_size
    return images * 3 * (size**2 + config.data.image_size**2) + weights_bytes(config)
