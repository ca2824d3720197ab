"""The Flower ServerApp: one round, synthesis, training, test, report."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.data.parts import class_names
from osfl.kit.kits import KitError, find_kit, image_size
from osfl.kit.run_check import check_initial_weights, check_noise_schedule
from osfl.kit.used_parts import initial_models
from osfl.methods import METHODS, server_half
from osfl.models.classifiers import blank_classifier
from osfl.payload.encryption import fingerprint, load_key, public_bytes
from osfl.payload.kinds import Payload
from osfl.payload.wire import PayloadError
from osfl.run_folder.events import log_results
from osfl.run_folder.layout import RunFolder, open_run_folder
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status
from osfl.run_folder.verify import seal as seal_folder
from osfl.util.devices import pick_device
from osfl.util.log import log
from server_app.baselines.run import run_rounds
from server_app.context import ServerJob
from server_app.defenses.image_counts import find_caps, stated_counts
from server_app.defenses.outliers import find_outliers
from server_app.expected import expected_payload, expected_tensors
from server_app.federation.collect import collect, leave_out
from server_app.federation.evaluate import evaluate_on_clients
from server_app.federation.join import join
from server_app.kit import (
    bind_to_kit,
    check_sampling_kit,
    check_subject,
    fetch_kits,
    kit_bytes,
    kit_of_clients,
)
from server_app.synthesis.workers import check_workers

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one job; started again with the same job id, it goes on where it was."""
    config = parse_run_config(context.run_config)
    run_job(grid, config, config.job_id or f"{config.method}-{context.run_id}")


def run_job(grid: Grid, config: RunConfig, job_id: str) -> None:
    """All of a run on the server.

    Raises:
        ConfigError, RoundError, and what the kit, the data and the method raise; `status.json` then
        says `failed` and why.
    """
    folder = open_run_folder(config, job_id, needed_bytes(config))
    with folder.alone():
        _run(grid, config, job_id, folder)


def _run(grid: Grid, config: RunConfig, job_id: str, folder: RunFolder) -> None:
    status = Status(folder.path)
    try:
        method = METHODS[config.method]
        key = load_key(config.sealing_key) if config.sealing_key else None
        if key is not None:
            log.info("payloads are sealed to %s", fingerprint(public_bytes(key)))
        fetch_kits(config, status)
        check_subject(config)
        check_sampling_kit(config)
        bind_to_kit(config, folder, status)
        stored = folder.stored_clients() if method.client else []
        _check_seals(folder, stored, config, key)
        members = join(
            grid,
            config,
            status,
            stored,
            meanwhile=lambda: check_server(config),
            kit=kit_of_clients(config),
            sealing=None if key is None else public_bytes(key),
        )
        payloads: dict[str, Payload] = {}
        if method.client:
            payloads = collect(
                grid,
                config,
                job_id,
                members,
                folder,
                status,
                expected_payload(config, job_id),
                key,
            )
        if not method.rounds:
            members.end()
        if method.samples:
            config = settled_config(config, folder, status)
        while True:
            # Those of a client that was left out since, or of a turn before, are gone
            status.warn(warnings_of(payloads, config.max_weight_ratio))
            job = ServerJob(
                config,
                folder,
                status,
                tuple(payloads) if method.client else tuple(members.nodes),
                members.architectures,
            )
            try:
                if method.rounds:
                    models = run_rounds(
                        job, grid, members, server_half(config.method).strategy(job), job_id
                    )
                else:
                    models = server_half(config.method).run(job, payloads)
                break
            except (
                PayloadError
            ) as error:  # passed every check, and led the sampling or a teacher astray
                payloads = leave_out(error, payloads, config, folder, status)
        tested_on = members.testers or members.nodes
        evaluate_on_clients(grid, config, tested_on, models, folder, status)
        fetched = {
            client: kit_bytes(config, payloads.get(client)) for client in (*tested_on, *payloads)
        }
        metrics = write_report(folder.path, class_names(config.data), fetched)
        log_results(metrics, str(folder.report_file))
        for name, accuracy in metrics["accuracy"].items():  # for who follows the log from elsewhere
            log.info(
                "accuracy (%%) of %s: %s",
                name,
                ", ".join(f"{client} {value:.1f}" for client, value in accuracy.items()),
            )
        seal_folder(folder.path)
        status.phase("finished")
        log.info("report: %s", folder.report_file)
    except BaseException as error:
        with suppress(OSError):  # the reason may be a full disk; it is what to say
            status.failed(error)
        raise


def warnings_of(payloads: Mapping[str, Payload], ratio: float) -> list[str]:
    """The payloads that a person should look at: outliers, and clients whose weight is capped.

    Args:
        ratio: `max-weight-ratio`.
    """
    caps = find_caps({client: stated_counts(each) for client, each in payloads.items()}, ratio)
    # The cap says how large a count is, and what became of it
    outliers = [
        outlier
        for outlier in find_outliers(payloads)
        if outlier.tensor != "counts" or outlier.client not in caps
    ]
    return [*map(str, outliers), *map(str, caps.values())]


def _check_seals(
    folder: RunFolder, stored: Sequence[str], config: RunConfig, key: X25519PrivateKey | None
) -> None:
    """Another key would open none of them; and some clients may be gone that sent them.

    Raises:
        ConfigError: payloads are stored sealed to a key that is not this run's.
    """
    own = "" if key is None else fingerprint(public_bytes(key))
    wrong = sorted({folder.sealed_to(client) for client in stored} - {"", own})
    if wrong:
        raise ConfigError(
            f"sealing-key = {config.sealing_key!r}: payloads in {folder.path} are sealed to the "
            f"key with the fingerprint {wrong[0]}. Name that key; or move them away, and the "
            "clients are asked again"
        )
    opened = [client for client in stored if not folder.sealed_to(client)]
    if config.sealed_store and opened:
        log.warning("sealed-store: came before, and stay open: %s", ", ".join(opened))


def settled_config(config: RunConfig, folder: RunFolder, status: Status) -> RunConfig:
    """The configuration with what was left to a measurement; a run that goes on keeps its choices.

    Raises:
        KitError: the kit cannot be loaded.
        DamageError: `synthesis.json` is damaged.
    """
    from server_app.synthesis import engine  # seconds to import, and not every method samples

    kinds = dict.fromkeys(engine.NETWORKS, str) | {"batch_size": int, "units_at_once": int}
    choice = folder.sampling_choice(kinds)
    if choice is None:
        status.phase("choosing how to sample")
        kit = find_kit(config.sampling_kit)
        device = pick_device(config.device)
        settings = engine.settled(kit, device, config.synthesis)
        choice = {name: getattr(settings, name) for name in engine.CHOSEN}
        folder.store_sampling_choice(choice)
    chosen = {name: choice[name] for name in engine.CHOSEN}
    return replace(config, synthesis=replace(config.synthesis, **chosen))


def check_server(config: RunConfig) -> None:
    """Look for all that the server will need after the clients have worked: better now than then.

    Raises:
        ConfigError, ClassifierError, KitError, FileNotFoundError: no such device, kit, architecture
            or initialisation.
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
            blank_classifier(settings.architecture, classes, settings.small_stem)
    expected_tensors(config)


def needed_bytes(config: RunConfig) -> int:
    """About how much disk a run takes at most: images as if uncompressed, payloads, models."""
    classes = len(class_names(config.data))
    domains = config.num_clients + len(config.domains_by_name)
    images = domains * classes * config.synthesis.images_per_class
    weights = 50_000_000 * (config.num_clients + 3)  # a ResNet-18 of each client, three global ones
    try:
        size = image_size(find_kit(config.sampling_kit))
    except (FileNotFoundError, KitError):  # check_server says so where it matters
        size = config.data.image_size
    return images * 3 * size**2 + weights
