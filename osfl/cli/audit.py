"""`osfl audit`: what a payload gives away of whose images made it, measured on the client."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import typer
from flwr.common.config import parse_config_args
from rich.progress import Progress, TaskID

from client_app.app import cache_key, check_node, client_settings
from client_app.audit import statistics
from client_app.audit.attacks import RECONSTRUCTIONS
from client_app.audit.game import Scores, draw_pairs, run_trial
from client_app.context import ClientJob
from client_app.context import Progress as JobProgress
from client_app.handlers import client_job
from client_app.image_cache import files_key
from osfl.cli import display, launch
from osfl.cli.display import Table
from osfl.config import ConfigError, NodeConfig, RunConfig, parse_node_config
from osfl.data.load import Fit, Images, image_labels, load_images
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.kinds import Payload
from osfl.util.files import make_private_folder, read_json, write_atomically
from osfl.util.seeds import generator_of
from server_app.expected import expected_payload

ALL = "all"  # the row of all clients together
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
# Of the attacks: scores in `work` that another version found are not used
VERSION = 2
AGAIN = "remove it, and the game is played anew"


@dataclass(frozen=True)
class Player:
    """A client that is audited."""

    config: RunConfig  # with its own classifier and epsilon
    node: NodeConfig
    name: str
    kit: str  # its folder


@dataclass(frozen=True)
class Guarantee:
    """What a payload promises; an epsilon of 0: nothing."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Finding:
    """What one attack found out about one client, or about all of them.

    Attributes:
        client: "all" for all together.
        attacked: what in the payload.
        pairs: of a training image and another one.
        right: pairs of which the right image was guessed.
        auc: with its 95 % interval.
        true_positives: members found with one false positive in a thousand, of how many; None for
            fewer than a thousand pairs.
        measured: the least epsilon that the guesses are compatible with, at 99 % for all findings
            together.
        promised: the guarantee; 0: none.
        likeness: where pictures were decoded, how like a member the most like of them is, and how
            like a stranger: the medians of PSNR in dB.
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
        """Whether more was found out than the guarantee allows."""
        return 0 < self.promised < self.measured


def show_audit(
    settings: list[str], node_config: str, repeats: int, work: Path, out: Path | None
) -> None:
    """Audit this node's payload, or those of a simulation's clients; print what was found.

    Args:
        settings: TOML files and key=value.
        node_config: a SuperNode's, as it takes it; empty: the clients of a simulation.
        repeats: payloads that are made of each client's images, each by coins of its own.
        work: where scores are kept, so that an interrupted audit goes on.
        out: a JSON file for the findings.

    Raises:
        ConfigError, DataError, KitError: the settings, or what they ask for.
        typer.Exit: a guarantee was broken.
    """
    config, _ = launch.resolve_config(settings)
    players = list(find_players(config, node_config))
    make_private_folder(work)
    found = audited(config, players, repeats, work)
    _show(found)
    if out is not None:
        write_atomically(out, json.dumps([_as_numbers(one) for one in found], indent=1).encode())
    if any(one.broken for one in found):
        raise typer.Exit(1)


def audited(
    config: RunConfig, players: Sequence[Player], repeats: int, work: Path
) -> list[Finding]:
    """Make the payloads, attack them, and say what was found; what is in `work` is there already.

    Raises:
        ConfigError, DataError, KitError: a client lacks something.
    """
    games: dict[str, dict[str, list[Scores]]] = {}
    with display.counting_bar() as bar:
        for player in players:
            for repeat in range(repeats):
                what = f"{player.name}, payload {repeat + 1} of {repeats}"
                for attacked, scores in played(player, repeat, work, bar, what).items():
                    games.setdefault(attacked, {}).setdefault(player.name, []).append(scores)
    guarantees = {
        player.name: Guarantee(player.config.epsilon, player.config.guaranteed_delta)
        for player in players
    }
    return findings(games, guarantees, config.seed)


def find_players(config: RunConfig, node_config: str) -> Iterator[Player]:
    """This node, or every client of a simulation.

    Raises:
        ConfigError: the method sends no payload, or a setting is wrong.
    """
    if METHODS[config.method].payload is None:
        raise ConfigError(
            f"method = {config.method!r}: its clients send no payload, so there is none to audit"
        )
    for node in find_nodes(config, node_config):
        own, node, name = client_settings(config, node)
        yield Player(own, node, name, check_node(own, node))


def find_nodes(config: RunConfig, node_config: str) -> list[NodeConfig]:
    """The one that `node_config` describes, or those of a simulation where it is empty.

    Raises:
        ConfigError: a key or value that no node has.
    """
    if node_config:
        return [parse_node_config(parse_config_args([node_config]))]
    return [
        NodeConfig(partition_id=part, num_partitions=config.num_clients)
        for part in range(config.num_clients)
    ]


def played(player: Player, repeat: int, work: Path, bar: Progress, what: str) -> dict[str, Scores]:
    """One payload's scores, which are on disk if they were found before."""
    config, node = player.config, player.node
    files = [files_key(config.data, node, split, 0) for split in ("train", "test")]
    key = [cache_key(config, node, player.kit), *files, str(repeat), str(VERSION)]
    about = hashlib.sha256(" ".join(key).encode()).hexdigest()[:12]
    file = work / f"{player.name}-{about}.json"
    if not file.is_file():
        task = bar.add_task(what, total=None)
        found = _play(player, repeat, work, partial(_advance, bar, task, what))
        bar.remove_task(task)
        kept = {
            attacked: {"members": scores.members.tolist(), "others": scores.others.tolist()}
            for attacked, scores in found.items()
        }
        write_atomically(file, json.dumps(kept).encode())
    return {
        attacked: Scores(
            torch.tensor(numbers["members"], dtype=torch.float64),
            torch.tensor(numbers["others"], dtype=torch.float64),
        )
        for attacked, numbers in read_json(file, cure=AGAIN).items()
    }


def _advance(
    bar: Progress, task: TaskID, name: str, done: int, total: int, what: str = "step"
) -> None:
    bar.update(task, completed=done, total=total, description=f"{name}, {what}")


def _play(player: Player, repeat: int, work: Path, progress: JobProgress) -> dict[str, Scores]:
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
            f"{player.name} has no test image of a class that it trains on; an audit holds test "
            "images against training images"
        )
    job = client_job(config, node, player.name, player.kit, work)
    return run_trial(replace(job, progress=progress), test, pairs, partial(_received, job))


def _received(job: ClientJob, payload: Payload) -> Payload:
    """What the server has of it: after the run's codec."""
    config = job.config
    blob = wire.encode(payload, config.method, "audit", job.client, config.payload_codec)
    return wire.decode(blob, expected_payload(config, "audit")(job.client))


def findings(
    games: dict[str, dict[str, list[Scores]]], guarantees: dict[str, Guarantee], seed: int
) -> list[Finding]:
    """Of each attack on each client, and on all together.

    Args:
        games: by what is attacked, and client.
        seed: of the coins that say where scores are equal.
    """
    looks = sum(len(by_client) + (len(by_client) > 1) for by_client in games.values())
    found = []
    for attacked, by_client in games.items():
        every: list[Scores] = []
        for client, scores in by_client.items():
            every += scores
            found.append(_finding(client, attacked, scores, guarantees[client], seed, looks))
        if len(by_client) > 1:
            weakest = _weakest(guarantees.values())
            found.append(_finding(ALL, attacked, every, weakest, seed, looks))
    return found


def _weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """What holds for every client."""
    every = list(guarantees)
    if any(one.epsilon == 0 for one in every):
        return Guarantee(0.0, 0.0)
    return Guarantee(max(one.epsilon for one in every), max(one.delta for one in every))


def _finding(
    client: str, attacked: str, scores: list[Scores], guarantee: Guarantee, seed: int, looks: int
) -> Finding:
    pictures = attacked == RECONSTRUCTIONS
    members = torch.cat([one.members for one in scores])
    together = Scores(members, torch.cat([one.others for one in scores]))

    def coins() -> torch.Generator:
        return generator_of(seed, "audit", "ties", client)

    return Finding(
        client,
        attacked,
        len(members),
        int(statistics.correct_guesses(together, coins()).sum()),
        statistics.auc(together),
        statistics.true_positives(together),
        statistics.empirical_epsilon(together, guarantee.delta, coins(), looks),
        guarantee.epsilon,
        (float(members.median()), float(together.others.median())) if pictures else None,
    )


ABOUT = (
    "The 95 % intervals hold for these images and payloads; another payload may lie outside. The "
    "threshold of TPR rests on one false alarm in a thousand pairs. ε at least holds with 99 % for "
    "all {} statistics together: of each row, all guesses and the surest fifth."
)


def _show(found: list[Finding]) -> None:
    rows = [words_of(one) for one in found]
    # A column that says nothing of anybody takes others' place
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    display.console.print(table)
    display.console.print(ABOUT.format(2 * len(found)), highlight=False)
    if broken := [one.client for one in found if one.broken]:
        display.console.print(
            f"[bold red]the guarantee is broken[/]: {', '.join(broken)}", highlight=False
        )


def words_of(one: Finding) -> dict[str, str]:
    """Return a finding by `COLUMNS`; shares and areas have 95 % intervals."""
    area, area_low, area_high = one.auc
    rate = ""
    if one.true_positives is not None:
        count, total = one.true_positives
        rate = share(count, total, digits=1)
    cells = (
        one.client,
        one.attacked,
        f"{one.pairs:,}",
        share(one.right, one.pairs),
        f"{area:.2f} [{area_low:.2f}, {area_high:.2f}]",
        rate,
        f"{one.measured:.2f}",
        f"{one.promised:g}" if one.promised else "",
        "{:.1f} dB, others {:.1f}".format(*one.likeness) if one.likeness else "",
    )
    return dict(zip(COLUMNS, cells, strict=True))


def share(count: int, total: int, digits: int = 0) -> str:
    """Return a share in percent, with its 95 % interval (Clopper & Pearson)."""
    low, high = statistics.share_interval(count, total)
    return f"{count / total:.{digits}%} [{low:.{digits}%}, {high:.{digits}%}]"


def _as_numbers(one: Finding) -> dict[str, object]:
    return {**vars(one), "broken": one.broken}
