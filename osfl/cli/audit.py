"""`osfl audit`: run membership-inference attacks on payloads, on the client's machine."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import typer
from flwr.common.config import parse_config_args
from rich.progress import Progress, TaskID
from rich.table import Table

from client_app.app import cache_key, check_node, client_settings
from client_app.audit import statistics
from client_app.audit.attacks import RECONSTRUCTIONS
from client_app.audit.game import Scores, draw_pairs, run_trial
from client_app.context import ClientJob
from client_app.context import Progress as JobProgress
from client_app.handlers import client_job
from client_app.image_cache import files_key
from osfl.cli import display
from osfl.config import (
    ConfigError,
    NodeConfig,
    RunConfig,
    all_parts,
    is_mixed,
    parse_node_config,
)
from osfl.data.load import Images, image_labels, load_images
from osfl.data.pictures import Fit
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.kinds import Payload
from osfl.settings import resolve_config
from osfl.util.files import make_private_folder, read_json, write_atomically
from osfl.util.seeds import generator_of
from server_app.expected import expected_payload

# The name of the row over all clients
ALL = "all"
COLUMNS = (
    "client",
    "attacked",
    "pairs",
    "right",
    "AUC",
    "TPR at 0.1 % FPR",
    "ε at least",
    "promised",
    "likeness",
)
# Headings of the columns whose names, which benchmark tables store, are less clear
HEADINGS = {"right": "correct", "promised": "ε guaranteed", "likeness": "PSNR"}
# Version of the attacks: scores of other versions in `work` are not used
VERSION = 2
RETRY_HINT = "delete the file to repeat the trial"


@dataclass(frozen=True)
class AuditedClient:
    """A client under audit.

    Attributes:
        config: with the client's own classifier and epsilon.
        kit: folder of the kit.
    """

    config: RunConfig
    node: NodeConfig
    name: str
    kit: str


@dataclass(frozen=True)
class Guarantee:
    """The (epsilon, delta)-DP guarantee of a payload; epsilon 0 for none."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Finding:
    """The result of one attack on one client, or on all clients.

    Attributes:
        client: name, or "all".
        attacked: the attacked part of the payload.
        pairs: number of pairs of a member and a non-member.
        right: number of correctly guessed pairs.
        auc: with its 95 % confidence interval.
        true_positives: (detected members, members) at a false positive rate of 0.1 %; None for
            fewer than 1,000 pairs.
        measured: lower bound of epsilon, at 99 % confidence for all findings together.
        promised: the guarantee's epsilon; 0 for none.
        likeness: for reconstructed images, the median PSNR in dB of the reconstruction most
            similar to a member, and of that to a non-member.
    """

    client: str
    attacked: str
    pairs: int
    right: int
    auc: tuple[float, float, float]
    true_positives: tuple[int, int] | None
    measured: float
    promised: float
    likeness: tuple[float, float] | None = None

    @property
    def broken(self) -> bool:
        """True if the attack refutes the guarantee."""
        return 0 < self.promised < self.measured


def show_audit(
    settings: list[str], node_config: str, repeats: int, work: Path, out: Path | None
) -> None:
    """Audit the payloads of this node or of a simulation's clients, and print the findings.

    Args:
        settings: TOML files and `key=value` arguments.
        node_config: a SuperNode's node-config; "" for the clients of a simulation.
        repeats: payloads per client, each with canary bits of its own.
        work: folder for scores, from which an interrupted audit resumes.
        out: JSON file for the findings, or None.

    Raises:
        ConfigError, DataError, KitError: the settings are invalid, or data or a model are missing.
        typer.Exit: a guarantee was refuted.
    """
    config, _ = resolve_config(settings)
    players = list(find_audited_clients(config, node_config))
    make_private_folder(work)
    results = run_audit(config, players, repeats, work)
    _show(results)
    if out is not None:
        rows = [{**vars(finding), "broken": finding.broken} for finding in results]
        write_atomically(out, json.dumps(rows, indent=1).encode())
    if any(finding.broken for finding in results):
        raise typer.Exit(1)


def run_audit(
    config: RunConfig, players: Sequence[AuditedClient], repeats: int, work: Path
) -> list[Finding]:
    """Make the payloads and attack them, unless their scores are in `work` already.

    Raises:
        ConfigError, DataError, KitError: a client's settings, data or models are unusable.
    """
    if config.secure_sum:
        raise ConfigError(
            "secure-sum = true: an audit attacks a client's own payload, without the noise and the "
            "numbers of the others; set it to false"
        )
    trials: dict[str, dict[str, list[Scores]]] = {}
    with display.counting_progress() as bar:
        for player in players:
            for repeat in range(repeats):
                title = f"{player.name}, payload {repeat + 1} of {repeats}"
                for attacked, scores in load_or_run_trial(player, repeat, work, bar, title).items():
                    trials.setdefault(attacked, {}).setdefault(player.name, []).append(scores)
    guarantees = {
        player.name: Guarantee(player.config.epsilon, player.config.guaranteed_delta)
        for player in players
    }
    return evaluate_trials(trials, guarantees, config.seed)


def find_audited_clients(config: RunConfig, node_config: str) -> Iterator[AuditedClient]:
    """Yield this node, or every client of a simulation.

    Raises:
        ConfigError: the method sends no payload, or a setting is invalid.
    """
    if is_mixed(config):
        raise ConfigError(
            f"method = {config.method!r}: must be one of {', '.join(all_parts(config))}; audit "
            "each kind of payload by itself"
        )
    if METHODS[config.method].payload is None:
        raise ConfigError(
            f"method = {config.method!r}: its clients send no payload, so there is none to audit"
        )
    for node in find_nodes(config, node_config):
        client_config, node, name = client_settings(config, node)
        yield AuditedClient(client_config, node, name, check_node(client_config, node))


def find_nodes(config: RunConfig, node_config: str) -> list[NodeConfig]:
    """Return the node that `node_config` describes, or if it is "", those of a simulation.

    Raises:
        ConfigError: a key is unknown, or a value is invalid.
    """
    if node_config:
        return [parse_node_config(parse_config_args([node_config]))]
    return [
        NodeConfig(partition_id=part, num_partitions=config.num_clients)
        for part in range(config.num_clients)
    ]


def load_or_run_trial(
    player: AuditedClient, repeat: int, work: Path, bar: Progress, title: str
) -> dict[str, Scores]:
    """Return the scores of one trial by attacked part, from `work` if they are there.

    Args:
        repeat: number of the trial, from which its randomness derives.
        title: of the progress bar.
    """
    config, node = player.config, player.node
    files = [files_key(config.data, node, split, 0) for split in ("train", "test")]
    key = [cache_key(config, node, player.kit), *files, str(repeat), str(VERSION)]
    digest = hashlib.sha256(" ".join(key).encode()).hexdigest()[:12]
    file = work / f"{player.name}-{digest}.json"
    if not file.is_file():
        task = bar.add_task(title, total=None)
        scores_by_part = _run_trial(player, repeat, work, partial(_advance, bar, task, title))
        bar.remove_task(task)
        content = {
            attacked: {"members": scores.members.tolist(), "others": scores.others.tolist()}
            for attacked, scores in scores_by_part.items()
        }
        write_atomically(file, json.dumps(content).encode())
    return {
        attacked: Scores(
            torch.tensor(numbers["members"], dtype=torch.float64),
            torch.tensor(numbers["others"], dtype=torch.float64),
        )
        for attacked, numbers in read_json(file, hint=RETRY_HINT).items()
    }


def _advance(
    bar: Progress, task: TaskID, title: str, completed: int, total: int, unit: str = "step"
) -> None:
    bar.update(task, completed=completed, total=total, description=f"{title}, {unit}")


def _run_trial(
    player: AuditedClient, repeat: int, work: Path, progress: JobProgress
) -> dict[str, Scores]:
    """Make a payload from randomly chosen images, attack it, and return the scores."""
    config, node = player.config, player.node

    def test(fit: Fit) -> Images:
        return load_images(config.data, node, "test", config.seed, fit)

    labels, others = (
        torch.tensor(image_labels(config.data, node, split, config.seed))
        for split in ("train", "test")
    )
    generator = generator_of(config.seed, "audit", player.name, repeat)
    pairs = draw_pairs(labels, others, generator)
    if len(pairs.members) == 0:
        raise ConfigError(
            f"{player.name} has no test image of a class that it trains on; an audit compares "
            "test images with training images"
        )
    job = client_job(config, node, player.name, player.kit, work)
    return run_trial(replace(job, progress=progress), test, pairs, partial(_received, job))


def _received(job: ClientJob, payload: Payload) -> Payload:
    """Return the payload as the server receives it, after the run's codec."""
    config = job.config
    blob = wire.encode(payload, config.method, "audit", job.client, config.payload_codec)
    return cast(Payload, wire.decode(blob, expected_payload(config, "audit")(job.client)))


def evaluate_trials(
    games: dict[str, dict[str, list[Scores]]], guarantees: dict[str, Guarantee], seed: int
) -> list[Finding]:
    """Evaluate each attack on each client, and on all clients together.

    Args:
        games: scores by attacked part and client.
        guarantees: by client.
        seed: of the random guesses between equal scores.
    """
    tests = sum(len(by_client) + (len(by_client) > 1) for by_client in games.values())
    results = []
    for attacked, by_client in games.items():
        all_scores: list[Scores] = []
        for client, scores in by_client.items():
            all_scores += scores
            results.append(_finding(client, attacked, scores, guarantees[client], seed, tests))
        if len(by_client) > 1:
            weakest = _weakest(guarantees.values())
            results.append(_finding(ALL, attacked, all_scores, weakest, seed, tests))
    return results


def _weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """Return the guarantee that holds for all clients."""
    guarantees = list(guarantees)
    if any(guarantee.epsilon == 0 for guarantee in guarantees):
        return Guarantee(0.0, 0.0)
    return Guarantee(
        max(guarantee.epsilon for guarantee in guarantees),
        max(guarantee.delta for guarantee in guarantees),
    )


def _finding(
    client: str, attacked: str, scores: list[Scores], guarantee: Guarantee, seed: int, tests: int
) -> Finding:
    """Evaluate one attack.

    Args:
        tests: number of findings, over which the confidence of the epsilons is split.
    """
    members = torch.cat([trial.members for trial in scores])
    pooled = Scores(members, torch.cat([trial.others for trial in scores]))

    # The statistics break ties independently, each from the start of this generator
    def tie_breaker() -> torch.Generator:
        return generator_of(seed, "audit", "ties", client)

    likeness = None
    if attacked == RECONSTRUCTIONS:
        likeness = (float(members.median()), float(pooled.others.median()))
    return Finding(
        client,
        attacked,
        len(members),
        int(statistics.correct_guesses(pooled, tie_breaker()).sum()),
        statistics.auc(pooled),
        statistics.true_positives(pooled),
        statistics.empirical_epsilon(pooled, guarantee.delta, tie_breaker(), tests),
        guarantee.epsilon,
        likeness,
    )


TABLE_NOTE = (
    "The 95 % intervals are for these images and payloads; other payloads may be outside. The "
    "threshold of the TPR allows one false positive per thousand pairs. ε at least: a lower bound "
    "at 99 % confidence for all {} statistics together, which are all guesses and the surest fifth "
    "of each row."
)


def _show(results: list[Finding]) -> None:
    rows = [format_finding(finding) for finding in results]
    # Empty columns would only take space
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    headings = [HEADINGS.get(name, name) for name in columns]
    table = Table(*headings, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    display.console.print(table)
    display.console.print(TABLE_NOTE.format(2 * len(results)), highlight=False)
    if refuted := [finding.client for finding in results if finding.broken]:
        display.console.print(
            f"[bold red]the guarantee is refuted[/]: {', '.join(refuted)}", highlight=False
        )


def format_finding(finding: Finding) -> dict[str, str]:
    """Format a finding by `COLUMNS`; shares and AUCs have 95 % confidence intervals."""
    auc, auc_low, auc_high = finding.auc
    rate = ""
    if finding.true_positives is not None:
        count, total = finding.true_positives
        rate = format_share(count, total, digits=1)
    cells = (
        finding.client,
        finding.attacked,
        f"{finding.pairs:,}",
        format_share(finding.right, finding.pairs),
        f"{auc:.2f} [{auc_low:.2f}, {auc_high:.2f}]",
        rate,
        f"{finding.measured:.2f}",
        f"{finding.promised:g}" if finding.promised else "",
        "{:.1f} dB, non-members {:.1f}".format(*finding.likeness) if finding.likeness else "",
    )
    return dict(zip(COLUMNS, cells, strict=True))


def format_share(count: int, total: int, digits: int = 0) -> str:
    """Format a share in percent, with its 95 % interval (Clopper & Pearson)."""
    low, high = statistics.share_interval(count, total)
    return f"{count / total:.{digits}%} [{low:.{digits}%}, {high:.{digits}%}]"
