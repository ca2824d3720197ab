"""Flower ServerApp: collect payloads, synthesize images, train, evaluate, report."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.data.parts import class_names
from osfl.kit.kits import KitError, find_kit, kit_image_size
from osfl.kit.run_check import check_initial_weights, check_noise_schedule
from osfl.kit.used_parts import initial_models
from osfl.methods import METHODS, server_module
from osfl.models.classifiers import meta_classifier
from osfl.payload.encryption import fingerprint, load_key, public_bytes
from osfl.payload.kinds import Payload
from osfl.payload.wire import PayloadError
from osfl.run_folder.events import log_results
from osfl.run_folder.layout import RunFolder, open_run_folder
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status
from osfl.run_folder.verify import write_checksums as seal_folder
from osfl.util.devices import pick_device
from osfl.util.log import log
from server_app.baselines.run import run_rounds
from server_app.context import GlobalModel, ServerJob
from server_app.defenses.image_counts import find_caps, stated_counts
from server_app.defenses.outliers import find_outliers
from server_app.expected import expected_payload, expected_tensors
from server_app.federation.collect import collect, drop_payload
from server_app.federation.evaluate import evaluate_on_clients
from server_app.federation.join import Members, join
from server_app.kit import (
    bind_job_to_kit,
    check_sampling_kit,
    check_subject,
    client_download_bytes,
    client_kit_digests,
    fetch_kits,
)
from server_app.synthesis.workers import check_workers

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
    folder = open_run_folder(config, job_id, estimate_disk_bytes(config))
    with folder.lock():
        status = Status(folder.path)
        try:
            _run(grid, config, job_id, folder, status)
        except BaseException as error:
            # If the disk is full, the original error is the one to raise
            with suppress(OSError):
                status.fail(error)
            raise


def _run(grid: Grid, config: RunConfig, job_id: str, folder: RunFolder, status: Status) -> None:
    method = METHODS[config.method]
    key = load_key(config.sealing_key) if config.sealing_key else None
    if key is not None:
        log.info("payloads are sealed to %s", fingerprint(public_bytes(key)))
    fetch_kits(config, status)
    check_subject(config)
    check_sampling_kit(config)
    bind_job_to_kit(config, folder, status)
    stored = folder.stored_clients() if method.client else []
    _check_seals(folder, stored, config, key)
    members = join(
        grid,
        config,
        status,
        stored,
        meanwhile=lambda: check_server(config),
        kit=client_kit_digests(config),
        sealing=None if key is None else public_bytes(key),
    )
    payloads: dict[str, Payload] = {}
    if method.client:
        expected = expected_payload(config, job_id)
        payloads = collect(grid, config, job_id, members, folder, status, expected, key)
    if not method.rounds:
        members.end()
    if method.samples:
        config = resolve_synthesis(config, folder, status)
    models, payloads = _train_models(grid, config, job_id, members, folder, status, payloads)
    test_nodes = members.left_out_clients or members.nodes
    evaluate_on_clients(grid, config, test_nodes, models, folder, status)
    _report(config, folder, list(test_nodes), payloads)
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
    payloads: dict[str, Payload],
) -> tuple[dict[str, GlobalModel], dict[str, Payload]]:
    """Return the global models and the payloads they were made from.

    A payload that passed every check but makes sampling or a teacher diverge is dropped, and the
    training starts again without it.

    Raises:
        RoundError: fewer than `min-clients` payloads are left.
    """
    method = METHODS[config.method]
    while True:
        # Replaces the warnings of the previous attempt, which may name dropped clients
        status.warn(payload_warnings(payloads, config.max_weight_ratio))
        clients = tuple(payloads) if method.client else tuple(members.nodes)
        job = ServerJob(config, folder, status, clients, members.architectures)
        half = server_module(config.method)
        try:
            if method.rounds:
                models = run_rounds(job, grid, members, half.strategy(job), job_id)
            else:
                models = half.run(job, payloads)
        except PayloadError as error:
            payloads = drop_payload(error, payloads, config, folder, status)
        else:
            return models, payloads


def _report(
    config: RunConfig,
    folder: RunFolder,
    test_clients: Sequence[str],
    payloads: Mapping[str, Payload],
) -> None:
    """Write the report, and log each client's accuracy for those who only see the log."""
    downloads = {
        client: client_download_bytes(config, payloads.get(client))
        for client in (*test_clients, *payloads)
    }
    metrics = write_report(folder.path, class_names(config.data), downloads)
    log_results(metrics, str(folder.report_file))
    for name, accuracy in metrics["accuracy"].items():
        log.info(
            "accuracy (%%) of %s: %s",
            name,
            ", ".join(f"{client} {value:.1f}" for client, value in accuracy.items()),
        )


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
        raise ConfigError(
            f"sealing-key = {config.sealing_key!r}: payloads in {folder.path} are sealed to the "
            f"key with the fingerprint {wrong_keys[0]}. Set sealing-key to that key, or move the "
            "payloads away: the clients are then asked again"
        )
    unsealed = [client for client in stored if not folder.sealing_fingerprint(client)]
    if config.sealed_store and unsealed:
        log.warning(
            "sealed-store: payloads stored earlier remain unsealed: %s", ", ".join(unsealed)
        )


def resolve_synthesis(config: RunConfig, folder: RunFolder, status: Status) -> RunConfig:
    """Return the configuration with every automatic sampling setting fixed.

    A new run measures and stores its choices; a resumed run keeps the stored ones.

    Raises:
        KitError: the kit cannot be loaded.
        CorruptFileError: `synthesis.json` is corrupt.
    """
    # The import takes seconds, and only methods that sample need it
    from server_app.synthesis import engine

    kinds = dict.fromkeys(engine.NETWORK_SETTINGS, str) | {"batch_size": int, "units_at_once": int}
    choice = folder.sampling_choice(kinds)
    if choice is None:
        status.phase("choosing how to sample")
        kit = find_kit(config.sampling_kit)
        device = pick_device(config.device)
        settings = engine.resolve_auto(kit, device, config.synthesis)
        choice = {name: getattr(settings, name) for name in engine.AUTO_SETTINGS}
        folder.store_sampling_choice(choice)
    values = {name: choice[name] for name in engine.AUTO_SETTINGS}
    return replace(config, synthesis=replace(config.synthesis, **values))


def check_server(config: RunConfig) -> None:
    """Check, before the clients work, everything the server needs afterwards.

    Raises:
        ConfigError, ClassifierError, KitError, FileNotFoundError: the device, kit, architecture or
            initialization does not exist.
    """
    device = pick_device(config.device)
    method = METHODS[config.method]
    classes = len(class_names(config.data))
    check_subject(config)
    if method.samples:
        check_workers(config.synthesis, device)
        check_sampling_kit(config)
        check_noise_schedule(find_kit(config.sampling_kit), config.synthesis.steps)
    for key, settings in initial_models(config):
        kit = find_kit(config.kit) if settings.init == "kit" else ""
        check_initial_weights(settings, kit, key)
        if settings.init == "none":
            meta_classifier(settings.architecture, classes, settings.small_stem)
    expected_tensors(config)


def estimate_disk_bytes(config: RunConfig) -> int:
    """Estimate an upper bound of a run's disk use: uncompressed images, payloads and models."""
    classes = len(class_names(config.data))
    domains = config.num_clients + len(config.public_domain_names)
    images = domains * classes * config.synthesis.images_per_class
    # One ResNet-18 per client and three global models
    weights = 50_000_000 * (config.num_clients + 3)
    try:
        size = kit_image_size(find_kit(config.sampling_kit))
    # check_server raises this error if the method needs the kit
    except (FileNotFoundError, KitError):
        size = config.data.image_size
    return images * 3 * size**2 + weights
