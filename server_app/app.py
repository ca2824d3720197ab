"""The Flower ServerApp: one round, synthesis, training, test, report."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from osfl.classifiers import new_classifier
from osfl.config import RunConfig, parse_run_config
from osfl.data.parts import class_names
from osfl.devices import pick_device
from osfl.kits import (
    DIFFUSION_PARTS,
    SMALL_DECODER,
    check_kit,
    download_bytes,
    find_kit,
    image_size,
    kits_digest,
    weights_digests,
)
from osfl.methods import METHODS, kit_parts, server_half
from osfl.payloads import Classifier, Payload
from osfl.report import write_report
from osfl.wire import PayloadError
from server_app.expected import expected_payload, expected_tensors, shapes_of_kit
from server_app.job import ServerJob
from server_app.round import collect, evaluate_on_clients, join, leave_out
from server_app.rounds.run import run_rounds
from server_app.run_folder import RunFolder, open_run_folder
from server_app.status import Status, log
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
        ConfigError, RoundError, and what the kit, the data and the method raise; `status.json` then says `failed` and why.
    """
    folder = open_run_folder(config, job_id, needed_bytes(config), kits_digest(config.kits))
    with folder.alone():
        _run(grid, config, job_id, folder)


def _run(grid: Grid, config: RunConfig, job_id: str, folder: RunFolder) -> None:
    status = Status(folder.path)
    try:
        method = METHODS[config.method]
        stored = folder.stored_clients() if method.client else []
        nodes = join(
            grid,
            config,
            status,
            stored,
            meanwhile=lambda: check_server(config),
            kit=kit_of_clients(config),
        )
        payloads: dict[str, Payload] = {}
        if method.client:
            payloads = collect(
                grid, config, job_id, nodes, folder, status, expected_payload(config, job_id)
            )
        while True:
            job = ServerJob(
                config, folder, status, tuple(payloads) if method.client else tuple(nodes)
            )
            try:
                if method.rounds:
                    models = run_rounds(
                        job, grid, nodes, server_half(config.method).strategy(job), job_id
                    )
                else:
                    models = server_half(config.method).run(job, payloads)
                break
            except (
                PayloadError
            ) as error:  # passed every check, and led the sampling or a teacher astray
                payloads = leave_out(error, payloads, config, folder, status)
        evaluate_on_clients(grid, config, nodes, models, folder, status)
        fetched = {
            client: kit_bytes(config, payloads.get(client)) for client in (*nodes, *payloads)
        }
        metrics = write_report(folder.path, class_names(config.data), fetched)
        for name, accuracy in metrics["accuracy"].items():  # for who follows the log from elsewhere
            log.info(
                "accuracy (%%) of %s: %s",
                name,
                ", ".join(f"{client} {value:.1f}" for client, value in accuracy.items()),
            )
        status.phase("finished")
        log.info("report: %s", folder.path / "report.html")
    except BaseException as error:
        status.state["error"] = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the reason may be a full disk; it is what to say
            status.phase("failed")
        raise


def check_server(config: RunConfig) -> None:
    """Look for all that the server will need after the clients have worked: better now than then.

    Raises:
        ConfigError, ClassifierError, KitError, FileNotFoundError: no such device, kit, architecture or initialisation.
    """
    device = pick_device(config.device)
    method, classes = METHODS[config.method], len(class_names(config.data))
    if method.samples:
        check_workers(config.synthesis, device)
        check_kit(kit := find_kit(config.sampling_kit), DIFFUSION_PARTS)
        if not Path(kit).is_dir():  # a hub id with a slip in it, or without a network
            shapes_of_kit(kit)
        if small := config.synthesis.small_decoder:
            check_kit(*((kit, (SMALL_DECODER,)) if small == "kit" else (small, ("config.json",))))
    trained = config.classifier if method.rounds else config.global_model
    if config.method != "local":
        new_classifier(
            trained, classes, find_kit(config.kit) if trained.init == "kit" else "", config.seed
        )
    expected_tensors(config)


def kit_of_clients(config: RunConfig) -> dict[str, str]:
    """Digests of the weights that the clients need of the kit, where it is a folder here."""
    with suppress(FileNotFoundError):  # check_server says so where it matters
        return weights_digests(find_kit(config.sampling_kit), kit_parts(config))
    return {}


def kit_bytes(config: RunConfig, payload: Payload | None) -> int | None:
    """What a client had to fetch of the kit before it could begin; None where a part is a hub id, or is named apart from the kit."""
    if isinstance(payload, Classifier):  # one architecture of those that the run allows
        config = replace(
            config, classifier=replace(config.classifier, architecture=payload.architecture)
        )
    parts = kit_parts(config)
    if set(METHODS[config.method].client_parts) - set(parts):
        return None
    if not parts:  # a kit that nobody needs may be missing
        return 0
    kit = find_kit(config.sampling_kit)
    return download_bytes(kit, parts) if Path(kit).is_dir() else None


def needed_bytes(config: RunConfig) -> int:
    """About how much disk a run takes at most: images as if uncompressed, payloads, models."""
    classes = len(class_names(config.data))
    images = config.num_clients * classes * config.synthesis.images_per_class
    weights = 50_000_000 * (config.num_clients + 3)  # a ResNet-18 of each client, three global ones
    try:
        size = image_size(find_kit(config.sampling_kit))
    except FileNotFoundError:  # check_server says so where it matters
        size = config.data.image_size
    return images * 3 * size**2 + weights
