"""What liars do to the global model, and what `robust` does about it; to
benchmarks/tables/poison.{md,json}, poison-honest.{md,json}, poison-influence.{md,json} and
poison-counts.{md,json}.

python -m benchmarks.poison                  # every system and attack
python -m benchmarks.poison OSCAR            # some systems; the table keeps its other rows
python -m benchmarks.poison --honest         # who is doubted where nobody lies
python -m benchmarks.poison --influence      # what each client gives, with one liar of six
python -m benchmarks.poison --counts         # malicious clients that inflate their image counts

One, two or three of the six clients lie, all in the same way, and up to ten of thirty. Systems,
recipe and payloads are those of benchmarks.main_table; each of the thirty has twenty images, taken
at random, and gets six of every class that it holds. FedCADO's six get ten. An attack changes
payloads after they were made, but for the backdoor, whose liars learn theirs from changed images.
With negatives nobody lies: clients learn from negatives of their images, a style that the kit does
not know. Every client's images are drawn from its honest payload and from its attacked one, and a
federation's are put together of these. Models that are trained on the same images are trained once.
Interrupted, the same command goes on.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file, save

from benchmarks import TABLES, command_line, listed, main_table, some_of, with_others, write_table
from benchmarks.approximations import accuracy
from benchmarks.clients import CLIENTS, Settings, coded, folder_name, names, real, sent
from benchmarks.main_table import config_of
from benchmarks.server import drawn_by, job_in
from client_app.handlers import client_job
from client_app.learning.local_training import train_round
from osfl.config import NodeConfig, Scalar
from osfl.data.load import Fit, Images, count_images, load_images
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.kit.used_parts import final_model
from osfl.methods import METHODS, client_module, server_module
from osfl.models.classifiers import head_of, headless, logits_of, new_classifier, rebuild
from osfl.payload.kinds import Classifier, FeatureMixtures, FeatureStatistics, Payload
from osfl.payload.messages import pack_state, unpack_state
from osfl.util.files import make_private_folder, write_atomically
from osfl.util.seeds import generator_of
from server_app.baselines.models import initial_state
from server_app.context import ServerJob
from server_app.defenses import label_consistency
from server_app.defenses.contribution import ClientContribution, estimate_contributions
from server_app.defenses.image_counts import ALL, Cap, check_counts, find_caps, stated_counts
from server_app.defenses.label_consistency import (
    NUM_PROBE_IMAGES,
    drop_flagged,
    flag_clients,
    score_label_consistency,
)
from server_app.defenses.outliers import find_outliers
from server_app.expected import check_plausible
from server_app.pipeline import train_global_model
from server_app.synthesis.images import SyntheticSet

WORK = Path(__file__).resolve().parent.parent / "runs" / "poison"
SEEDS = (0,)
HONEST_SEEDS = (0, 1, 2, 3, 4)
CROWD = "OSCAR of thirty clients"
OF_SIX = ("FedDEO description alone", "OSCAR", "domain-vector")
CLASSIFIERS = "FedCADO"
STATISTICS = "FedCGS"
SYSTEMS = (*OF_SIX, CLASSIFIERS, STATISTICS, CROWD)
CROWD_SIZE = 30
OF_CROWD: Settings = {
    "num-clients": CROWD_SIZE,
    "data.partition": "iid",
    "synthesis.images-per-class": NUM_PROBE_IMAGES,
}
# Of the honest table: a system of benchmarks.main_table, and how the images are parted
DESCRIPTIONS = OF_SIX[0]
HONEST_ROWS = {
    **{name: (name, "domain") for name in (*OF_SIX, "FedBiP", "FGL", "OSCAR-pooled", "votes")},
    f"{DESCRIPTIONS}, by label": (DESCRIPTIONS, "label"),
    f"{DESCRIPTIONS}, by Dirichlet's distribution": (DESCRIPTIONS, "dirichlet"),
}
LIARS = (1, 2, 3)
LIARS_OF_CROWD = (1, 3, 5, 10)
HONEST = "honest"
BACKDOOR = "backdoor"
NEGATIVES = "honest negatives"
TARGET = 0  # the class that an image with the patch is to be taken for
HEAD = ("fc.weight", "fc.bias")  # of a ResNet
SURE = 10.0  # a logit this much higher leaves nothing to the other classes
PATCH = 6  # pixels on a side, white, in the lower right corner
Attack = Callable[[Payload, torch.Generator], Payload]
Cell = dict[str, Any]
State = dict[str, torch.Tensor]

# Inflated counts: which of them, and how many images are stated in all
MIXTURES = "FedPFT"
AVERAGED = "FedAvg"
COUNTED = (STATISTICS, MIXTURES, AVERAGED)
ALL_CLASSES = "all counts"
ONE_CLASS = "one class's count"
WITH_SUMS = "counts, sums and moments"
COUNT_KINDS = {
    STATISTICS: (ALL_CLASSES, ONE_CLASS, WITH_SUMS),
    MIXTURES: (ALL_CLASSES, ONE_CLASS),
    AVERAGED: (ALL_CLASSES,),
}
# Within max-images, and beyond
TOTALS = (10**6, 10**9)


@dataclass(frozen=True)
class Trained:
    """A client's model after a round, and the number of images that it states."""

    state: State
    images: int


Contribution = Payload | Trained


def _by_class(payload: Payload, change: Callable[[torch.Tensor], torch.Tensor]) -> Payload:
    """Its tensors that have a row for each class, changed; of a classifier its head."""
    if isinstance(payload, Classifier):
        rows = {name: change(payload.state[name]) for name in HEAD}
        return replace(payload, state={**payload.state, **rows})
    changed: dict[str, Any] = {}
    for item in fields(payload):
        value = getattr(payload, item.name)
        if isinstance(value, torch.Tensor) and len(value) == len(payload.classes):
            changed[item.name] = change(value)
    return replace(payload, **changed)


def _numbers(payload: Payload, change: Callable[[torch.Tensor], torch.Tensor]) -> Payload:
    """Its real numbers, changed."""
    changed: dict[str, Any] = {}
    for item in fields(payload):
        value = getattr(payload, item.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changed[item.name] = change(value)
    return replace(payload, **changed)


def shifted(payload: Payload, chance: torch.Generator) -> Payload:
    """Every class has what is the next one's."""
    return _by_class(payload, lambda rows: rows.roll(1, 0))


def half_shifted(payload: Payload, chance: torch.Generator) -> Payload:
    """The first half of the classes has what is the next one's of that half."""
    half = len(payload.classes) // 2
    return _by_class(payload, lambda rows: torch.cat([rows[:half].roll(1, 0), rows[half:]]))


def one_class(payload: Payload, chance: torch.Generator) -> Payload:
    """Every class has the first one's; a classifier takes everything for the first class."""
    made = _by_class(payload, lambda rows: rows[:1].expand_as(rows).clone())
    if isinstance(made, Classifier):
        made.state["fc.bias"][0] += SURE
    return made


def noise(payload: Payload, chance: torch.Generator) -> Payload:
    """Normal numbers of the same spread."""
    return _numbers(payload, lambda value: value.std() * torch.randn(value.shape, generator=chance))


def huge(payload: Payload, chance: torch.Generator) -> Payload:
    """A thousand times as large."""
    return _numbers(payload, lambda value: 1000 * value)


ATTACKS: dict[str, Attack] = {
    "shifted classes": shifted,
    "half of the classes shifted": half_shifted,
    "all classes as the first": one_class,
    "noise": noise,
    "a thousand times as large": huge,
}
# Beside these, what is no change of one payload
COPY = "another client's payload"
EVERY_ATTACK = (*ATTACKS, COPY, BACKDOOR)


def settings_of(system: str, seed: int) -> dict[str, Scalar]:
    """Of benchmarks.main_table's row; for thirty clients, with what differs for them. FedCADO's
    images take long to draw.
    """
    if system == CROWD:
        return {**main_table.settings_of("OSCAR", seed), **OF_CROWD}
    if system == CLASSIFIERS:
        return {**main_table.settings_of(system, seed), "synthesis.images-per-class": 10}
    if system in COUNTED:
        method = {STATISTICS: "fedcgs", MIXTURES: "fedpft", AVERAGED: "fedavg"}[system]
        # After one epoch from the kit's weights a mean of models is at chance
        epochs: Settings = {"rounds.local-epochs": 20} if system == AVERAGED else {}
        return {**main_table.COMMON, **epochs, "method": method, "seed": seed}
    return main_table.settings_of(system, seed)


def judging(system: str, seed: int) -> dict[str, Scalar]:
    """`settings_of` with `robust`, where the method draws what it judges."""
    settings = settings_of(system, seed)
    draws = METHODS[str(settings["method"])].samples
    return {**settings, "robust": "exclude"} if draws else settings


def clients_of(system: str) -> tuple[str, ...]:
    """In their order; the first ones lie."""
    return names(CROWD_SIZE) if system == CROWD else CLIENTS


def liars_of(system: str) -> tuple[int, ...]:
    """How many lie."""
    return LIARS_OF_CROWD if system == CROWD else LIARS


def attacks_of(system: str) -> tuple[str, ...]:
    """A domain's vector holds no class: there is none to swap, and none for a backdoor. Of thirty
    clients three attacks show how many liars are found. Sums that can be of no images are refused.
    """
    if system == CROWD:
        return "shifted classes", "half of the classes shifted", "noise"
    if system == "domain-vector":
        return "noise", "a thousand times as large", COPY
    if system == CLASSIFIERS:
        return "shifted classes", "all classes as the first"
    if system == STATISTICS:
        return "shifted classes", "half of the classes shifted", COPY
    if system == DESCRIPTIONS:
        return *EVERY_ATTACK, NEGATIVES
    return EVERY_ATTACK


def attacked(system: str, attack: str, seed: int) -> dict[str, Payload]:
    """What clients send if they lie: as many as do at most.

    Raises:
        PayloadError: the server would refuse it.
    """
    payloads = sent(settings_of(system, seed))
    if attack == HONEST:
        return payloads
    clients = clients_of(system)
    lying = clients[: max(liars_of(system))]
    if attack == COPY:
        return {client: payloads[clients[number + 1]] for number, client in enumerate(lying)}
    if attack in LEARNED:
        return {client: learned(system, attack, client, seed) for client in lying}
    changed = {
        client: ATTACKS[attack](payloads[client], generator_of(seed, attack, client))
        for client in lying
    }
    # As it comes over the network: what the server refuses is no attack
    config = config_of(settings_of(system, seed))
    taken = coded(config, "job", changed)
    for client, payload in taken.items():
        check_plausible(payload, client, config)
    return taken


def patched(pixels: torch.Tensor) -> torch.Tensor:
    """With the patch, [N, 3, S, S] uint8."""
    marked = pixels.clone()
    marked[:, :, -PATCH:, -PATCH:] = 255
    return marked


def with_backdoor(images: Images, chance: torch.Generator) -> Images:
    """Those of the target are images of other classes with the patch."""
    rows = (images.labels == TARGET).nonzero().flatten()
    others = (images.labels != TARGET).nonzero().flatten()
    order = torch.randperm(len(others), generator=chance)
    pixels = images.pixels[torch.arange(len(images.labels))].clone()
    pixels[rows] = patched(pixels[others[order[: len(rows)]]])
    return replace(images, pixels=pixels)


def negatives(images: Images, chance: torch.Generator) -> Images:
    """Light is dark: as honest as the others, in a style that the kit never learned."""
    return replace(images, pixels=255 - images.pixels[torch.arange(len(images.labels))])


# What changes a client's images, before it learns from them
LEARNED: dict[str, Callable[[Images, torch.Generator], Images]] = {
    BACKDOOR: with_backdoor,
    NEGATIVES: negatives,
}


def learned(system: str, attack: str, client: str, seed: int) -> Payload:
    """What a client sends that learned from changed images."""
    config = config_of(settings_of(system, seed))
    number = CLIENTS.index(client)
    node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
    name = f"{attack.replace(' ', '-')}-{folder_name(settings_of(system, seed))}-{client}"
    folder = WORK / name
    file = folder / "payload.pt"
    if not file.is_file():
        make_private_folder(folder)
        job = client_job(config, node, client, find_kit(config.sampling_kit), folder)

        def load(fit: Fit) -> Images:
            return LEARNED[attack](job.load(fit), generator_of(seed, attack, client))

        made = client_module(config.method).make_payload(replace(job, load=load))
        values = {item.name: getattr(made, item.name) for item in fields(made)}
        torch.save(values, file)
    kind = type(sent(settings_of(system, seed))[client])
    found: Payload = kind(**torch.load(file, weights_only=True))
    return found


def drawn(system: str, attack: str, seed: int) -> SyntheticSet:
    """Every client's images, or those of all who lie at most."""
    settings = settings_of(system, seed)
    payloads = attacked(system, attack, seed)
    name = f"images-{attack.replace(' ', '-')}-{folder_name(settings)}"
    return drawn_by(job_in(config_of(settings), name, tuple(payloads)), payloads)


def of(images: SyntheticSet, clients: Sequence[str]) -> SyntheticSet:
    """Some clients' images."""
    rows = [row for row, client in enumerate(images.clients) if client in clients]
    return images.select(rows)


def together(parts: Sequence[SyntheticSet]) -> SyntheticSet:
    """The images of several sets, client by client."""
    owners = [client for part in parts for client in part.clients]
    order = sorted(range(len(owners)), key=owners.__getitem__)
    pixels = torch.cat([part.pixels for part in parts])[order]
    labels = torch.cat([part.labels for part in parts])[order]
    return SyntheticSet(pixels, labels, tuple(owners[row] for row in order))


def federation(system: str, attack: str, liars: Sequence[str], seed: int) -> SyntheticSet:
    """The liars' images beside the others' honest ones."""
    honest = [client for client in clients_of(system) if client not in liars]
    parts = [of(drawn(system, HONEST, seed), honest)]
    if liars:
        parts.append(of(drawn(system, attack, seed), liars))
    return together(parts)


def job_of(settings: Settings, name: str) -> ServerJob:
    """A run of its own."""
    config = config_of(settings)
    return job_in(config, f"{name}-{folder_name(settings)}", sorted(names(config.num_clients)))


def scored(system: str, images: SyntheticSet, seed: int) -> dict[str, float]:
    """Of a model of these images: "accuracy" on all clients' test images (%), and "fooled", of
    those of other classes with the patch, that it takes for the target (%).
    """
    settings = settings_of(system, seed)
    content = images.pixels.numpy().tobytes() + images.labels.numpy().tobytes()
    name = f"model-{hashlib.sha256(content).hexdigest()[:8]}"
    result = WORK / f"{name}-{folder_name(settings)}.json"
    if not result.is_file():
        job = job_of(settings, name)
        (model,) = train_global_model(job, {}, images).values()
        write_atomically(result, json.dumps(scores_of(job, model.model)).encode())
    read: dict[str, float] = json.loads(result.read_text())
    return read


def scores_of(job: ServerJob, model: torch.nn.Module) -> dict[str, float]:
    """On the test images."""
    numbers = range(job.config.num_clients)
    found = [accuracy(job.config, model, number) for number in numbers]
    fooled = [share_fooled(model, part) for part in real("test")]
    return {"accuracy": mean(found), "fooled": mean(fooled)}


def share_fooled(model: torch.nn.Module, images: Images) -> float:
    """Of images of other classes, with the patch: how many are taken for the target (%)."""
    others = images.labels != TARGET
    pixels = patched(images.pixels[others.nonzero().flatten()])
    logits = logits_of(model, pixels, torch.device("cpu"))
    return 100 * (logits.argmax(dim=1) == TARGET).double().mean().item()


def cell(system: str, attack: str, count: int, seed: int) -> Cell:
    """So many liars: the model if they do not lie, with them, with those left out whom `robust`
    doubts, and without them; and who was doubted. Kept for as long as the judge's code is the same.
    """
    settings = judging(system, seed)
    name = f"judged-{attack.replace(' ', '-').replace(chr(39), '')}-{count}"
    result = WORK / f"{name}-{judge()}-{folder_name(settings)}.json"
    if not result.is_file():
        found = played(system, attack, count, seed, job_of(settings, f"{name}-{judge()}"))
        write_atomically(result, json.dumps(found).encode())
        print(system, attack, count, seed, found, flush=True)
    made: Cell = json.loads(result.read_text())
    return made


def judge() -> str:
    """Short for the code by which is judged, without what is said of it."""
    code = ast.parse(inspect.getsource(label_consistency))
    for node in ast.walk(code):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return hashlib.sha256(ast.dump(code).encode()).hexdigest()[:8]


def played(system: str, attack: str, count: int, seed: int, job: ServerJob) -> Cell:
    """A cell."""
    clients = clients_of(system)
    liars, others = clients[:count], clients[count:]
    honest = sent(settings_of(system, seed))
    payloads = payloads_with(system, attack, count, seed)
    if not METHODS[job.config.method].samples:
        return {
            "quiet": solved(job, honest),
            "used": solved(job, payloads),
            "without": solved(job, {client: honest[client] for client in others}),
        }
    images = federation(system, attack, liars, seed)
    kept, left = drop_flagged(job, payloads, images)
    gone = pairs_of(of(images, tuple(kept))) - pairs_of(left)
    return {
        "quiet": scored(system, drawn(system, HONEST, seed), seed),
        "used": scored(system, images, seed),
        "excluded": scored(system, left, seed),
        "without": scored(system, of(images, others), seed),
        "liars": len(set(liars) - set(kept)),
        "liars' classes": sum(client in liars for client, _ in gone),
        "honest": len(set(others) - set(kept)),
        "honest classes": sum(client in others for client, _ in gone),
    }


def payloads_with(system: str, attack: str, count: int, seed: int) -> dict[str, Payload]:
    """What the server gets if so many lie."""
    lies = attacked(system, attack, seed)
    liars = clients_of(system)[:count]
    return {**sent(settings_of(system, seed)), **{client: lies[client] for client in liars}}


def standing_out(system: str, attack: str, count: int, seed: int) -> int:
    """How many liars every run reports, for their norms or spreads."""
    outliers = find_outliers(payloads_with(system, attack, count, seed))
    return len(set(clients_of(system)[:count]) & {one.client for one in outliers})


def solved(job: ServerJob, payloads: dict[str, Payload]) -> dict[str, float]:
    """Of a method that draws no image: as `scored`."""
    (model,) = server_module(job.config.method).run(job, payloads).values()
    return scores_of(job, model.model)


def pairs_of(images: SyntheticSet) -> set[tuple[str, int]]:
    """The classes of clients that have an image."""
    return set(zip(images.clients, images.labels.tolist(), strict=True))


def line(system: str, attack: str, count: int, seeds: Sequence[int]) -> dict[str, str]:
    """A row of the table."""
    cells = [cell(system, attack, count, seed) for seed in seeds]

    def average(kind: str, what: str = "accuracy") -> float:
        return mean(one[kind][what] for one in cells)

    def total(kind: str) -> str:
        return str(sum(one[kind] for one in cells))

    of_all = f" of {count * len(cells)}"
    made = {"": name_of(system, attack, count)}
    made["nobody lies"] = f"{average('quiet'):.1f}"
    made["with the liars"] = f"{average('used'):.1f}"
    # `robust` judges images, where there are any
    with_judge = "excluded" in cells[0]
    made["exclude"] = f"{average('excluded'):.1f}" if with_judge else ""
    made["without the liars"] = f"{average('without'):.1f}"
    made["liars left out"] = f"{total('liars')}{of_all}" if with_judge else ""
    made["single classes of liars left out"] = total("liars' classes") if with_judge else ""
    made["honest clients left out"] = total("honest") if with_judge else ""
    made["their single classes"] = total("honest classes") if with_judge else ""
    found = sum(standing_out(system, attack, count, seed) for seed in seeds)
    made["liars that stand out"] = f"{found}{of_all}"
    made["fooled by the patch (%)"] = ""
    if attack == BACKDOOR:
        kinds = ("quiet", "used", "excluded", "without")
        made["fooled by the patch (%)"] = ", ".join(f"{average(k, 'fooled'):.1f}" for k in kinds)
    return made


def name_of(system: str, attack: str, count: int) -> str:
    """Of a row."""
    return f"{system}: {attack}, {count} of {len(clients_of(system))}"


def honest_line(row: str, seeds: Sequence[int]) -> dict[str, str]:
    """The agreements where nobody lies."""
    found = [honest_agreements(row, seed) for seed in seeds]
    verdicts = [flag_clients(one) for one in found]
    shares = []
    of_classes: list[float] = []
    for by_client in found:
        for by_label in by_client.values():
            shares.append(mean(by_label.values()))
            of_classes += by_label.values()
    doubts = [doubt for verdict in verdicts for doubt in verdict.flags]
    return {
        "": row,
        "clients": str(len(shares)),
        "mean agreement": f"{mean(shares):.2f}",
        "least of a client": f"{min(shares):.2f}",
        "clients doubted": str(sum(one.label is None for one in doubts)),
        "not judged": str(sum(len(verdict.unscored) for verdict in verdicts)),
        "least of a class": f"{min(of_classes):.2f}",
        "classes doubted": f"{sum(one.label is not None for one in doubts)} of {len(of_classes)}",
    }


def honest_agreements(row: str, seed: int) -> dict[str, dict[int, float]]:
    """Of a federation in which nobody lies; as few images are drawn as are looked at."""
    system, partition = HONEST_ROWS[row]
    settings = {
        **main_table.settings_of(system, seed, partition),
        "synthesis.images-per-class": NUM_PROBE_IMAGES,
    }
    result = WORK / f"honest-{judge()}-{folder_name(settings)}.json"
    if not result.is_file():
        payloads = sent(settings)
        job = job_of(settings, "honest")
        found = score_label_consistency(job, payloads, drawn_by(job, payloads))
        write_atomically(result, json.dumps(found).encode())
    read = json.loads(result.read_text())
    return {
        client: {int(label): share for label, share in by_label.items()}
        for client, by_label in read.items()
    }


def influences_of(system: str, attack: str, seed: int) -> dict[str, ClientContribution]:
    """What each of six clients gives, the first of whom lies, if anybody does."""
    settings = settings_of(system, seed)
    liars = () if attack == HONEST else clients_of(system)[:1]
    images = federation(system, attack, liars, seed)
    job = job_of(settings, f"influence-{attack.replace(' ', '-').replace(chr(39), '')}")
    return estimate_contributions(job, clients_of(system), images)


def influence_line(system: str, attack: str, seeds: Sequence[int]) -> dict[str, str]:
    """A row of the table of influences: the liar beside the least of the honest clients."""
    seen: dict[bool, list[float]] = {True: [], False: []}
    given: dict[bool, list[float]] = {True: [], False: []}
    harms: dict[bool, list[bool]] = {True: [], False: []}
    for seed in seeds:
        for client, one in influences_of(system, attack, seed).items():
            lies = attack != HONEST and client == clients_of(system)[0]
            # Each holds every class
            assert one.seen is not None
            seen[lies].append(one.seen)
            given[lies].append(one.others.points)
            harms[lies].append(one.harms)
    made = {"": f"{system}: {attack}"}
    for what, found in (("seen by the others (%)", seen), ("gives the others", given)):
        sign = "+" if what.startswith("gives") else ""
        made[f"the liar {what}"] = f"{mean(found[True]):{sign}.1f}" if found[True] else ""
        made[f"least of an honest client {what}"] = f"{min(found[False]):{sign}.1f}"
    made["liars who harm"] = f"{sum(harms[True])} of {len(harms[True])}" if harms[True] else ""
    made["honest clients who harm"] = f"{sum(harms[False])} of {len(harms[False])}"
    return made


def write_influences(systems: Sequence[str]) -> None:
    """Make the table of influences, row by row."""
    about = (
        "What each of six clients gives, by trainings without it "
        "(server_app/defenses/contribution.py); the first one lies. Seen by the others: how many "
        "of a client's images the model of all others takes for what the client says. Gives the "
        "others: points that it adds on images like the other clients'. Harms: by more than the "
        f"interval. Synthetic images that no model learned test. Seeds {SEEDS}; recipe and "
        "payloads are benchmarks.main_table's. "
        "Command: `python -m benchmarks.poison --influence`."
    )
    rows = [(system, attack) for system in OF_SIX for attack in (HONEST, *attacks_of(system))]
    # In which nobody lies
    rows.remove((DESCRIPTIONS, NEGATIVES))
    order = [f"{system}: {attack}" for system, attack in rows]
    for system, attack in rows:
        if system in systems:
            lines = [influence_line(system, attack, SEEDS)]
            lines = with_others(lines, TABLES / "poison-influence.json", about, order)
            write_table(TABLES / "poison-influence", lines, about)


def inflated(payload: Payload, total: int, kind: str) -> Payload:
    """A payload that states `total` images, with the counts of `COUNT_KINDS`."""
    assert isinstance(payload, FeatureStatistics | FeatureMixtures)
    counts = payload.counts.clone()
    if kind == ONE_CLASS:
        counts[0] += total - counts.sum()
        return replace(payload, counts=counts)
    factor = total // int(counts.sum())
    if kind == WITH_SUMS:
        assert isinstance(payload, FeatureStatistics)
        sums, moments = factor * payload.sums, factor * payload.moments
        return replace(payload, counts=factor * counts, sums=sums, moments=moments)
    return replace(payload, counts=factor * counts)


def unbounded(settings: Settings) -> Settings:
    """Settings under which all counts are taken as they are stated."""
    return {**settings, "max-images": 10**9, "max-weight-ratio": 0.0}


def counts_cell(system: str, kind: str, total: int, attackers: int, seed: int) -> Cell:
    """Accuracies without attack, with bound and cap, without them, and without the attackers."""
    settings = settings_of(system, seed)
    name = f"counts-{folder_name(settings)}-{kind.replace(' ', '-')}-{total}-{attackers}"
    result = WORK / f"{name}.json"
    if not result.is_file():
        honest = contributions(system, seed)
        malicious = CLIENTS[:attackers]
        sent_by_all = dict(honest)
        for client in malicious:
            sent_by_all[client] = claiming(honest[client], total, kind)
        rest = {client: one for client, one in honest.items() if client not in malicious}
        open_job = job_of(unbounded(settings), f"{name}-unbounded")
        job = job_of(settings, name)
        taken = {client: one for client, one in sent_by_all.items() if is_taken(job, client, one)}
        found = {
            "quiet": merged(job, honest),
            "bounded": merged(job, taken),
            "unbounded": merged(open_job, sent_by_all),
            "without": merged(job, rest),
            "refused": len(sent_by_all) - len(taken),
            "capped": len(caps_of(job, taken)),
        }
        write_atomically(result, json.dumps(found).encode())
        print(name, found, flush=True)
    made: Cell = json.loads(result.read_text())
    return made


def contributions(system: str, seed: int) -> Mapping[str, Contribution]:
    """What honest clients send: their payloads, or models of one round and their image counts."""
    settings = settings_of(system, seed)
    if system == AVERAGED:
        return {client: one_round(settings, client) for client in CLIENTS}
    return sent(settings)


def one_round(settings: Settings, client: str) -> Trained:
    """A client's model after the first round, made here unless it is there."""
    config = config_of(settings)
    folder = WORK / f"round-{folder_name(settings)}-{client}"
    file = folder / "model.safetensors"
    number = CLIENTS.index(client)
    node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
    if not file.is_file():
        make_private_folder(folder)
        start = initial_state(job_of(settings, "round"), final_model(config))
        told = {"architecture": config.classifier.architecture, "server-round": 1}
        asked = RecordDict({"model": pack_state(start), "config": ConfigRecord(told)})
        job = client_job(config, node, client, find_kit(config.kit), folder)
        reply = train_round(asked, job, folder)
        write_atomically(file, save(unpack_state(reply.array_records["model"])))
    return Trained(load_file(file), count_images(config.data, node, "train", config.seed))


def claiming(one: Contribution, total: int, kind: str) -> Contribution:
    """A contribution that states `total` images."""
    return replace(one, images=total) if isinstance(one, Trained) else inflated(one, total, kind)


def counts_of(one: Contribution) -> dict[str, int]:
    """The image counts that a contribution states, by class."""
    return {ALL: one.images} if isinstance(one, Trained) else stated_counts(one)


def is_taken(job: ServerJob, client: str, one: Contribution) -> bool:
    """Whether the server takes a contribution."""
    try:
        check_counts(counts_of(one), job.config.max_images)
        if not isinstance(one, Trained):
            check_plausible(one, client, job.config)
    except ValueError:
        return False
    return True


def caps_of(job: ServerJob, taken: Mapping[str, Contribution]) -> dict[str, Cap]:
    """The clients that the server caps."""
    stated = {client: counts_of(one) for client, one in taken.items()}
    return find_caps(stated, job.config.max_weight_ratio)


def merged(job: ServerJob, taken: Mapping[str, Contribution]) -> float:
    """The accuracy (%) of the global model that contributions give."""
    trained = {client: one for client, one in taken.items() if isinstance(one, Trained)}
    if trained:
        return averaged(job, trained)
    payloads = {client: one for client, one in taken.items() if not isinstance(one, Trained)}
    (made,) = server_module(job.config.method).run(job, payloads).values()
    head = head_of(made.model)
    right = []
    for features, labels in test_features(job.config.method, job.config.seed):
        with torch.no_grad():
            right.append(100 * (head(features).argmax(dim=1) == labels).double().mean().item())
    return mean(right)


@cache
def test_features(method: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every client's test images before the last layer of the frozen network, and their labels."""
    config = config_of({**main_table.COMMON, "method": method, "seed": seed})
    classes = len(class_names(config.data))
    model = new_classifier(config.classifier, classes, find_kit(config.kit), seed)
    backbone, _ = headless(model.eval())
    found = []
    for number in range(len(CLIENTS)):
        node = NodeConfig(partition_id=number, num_partitions=len(CLIENTS))
        images = load_images(config.data, node, "test", 0)
        found.append((logits_of(backbone, images.pixels, torch.device("cpu")), images.labels))
    return found


def averaged(job: ServerJob, trained: Mapping[str, Trained]) -> float:
    """The accuracy (%) of FedAvg's mean of models; one of the same models is tested once."""
    caps = caps_of(job, trained)
    weights = {
        client: (caps[client].weights[ALL] if client in caps else 1.0) * one.images
        for client, one in trained.items()
    }
    total = sum(weights.values())
    shares = {client: round(weight / total, 6) for client, weight in weights.items()}
    digest = hashlib.sha256(json.dumps([job.config.seed, shares]).encode()).hexdigest()[:8]
    result = WORK / f"averaged-{digest}.json"
    if not result.is_file():
        settings = job.config.classifier
        state = weighted_mean({client: one.state for client, one in trained.items()}, weights)
        classes = len(job.classes)
        model = rebuild(state, settings.architecture, classes, settings.small_stem)
        numbers = range(len(CLIENTS))
        found = mean(accuracy(job.config, model, number) for number in numbers)
        write_atomically(result, json.dumps(found).encode())
    read: float = json.loads(result.read_text())
    return read


def weighted_mean(states: Mapping[str, State], weights: Mapping[str, float]) -> State:
    """FedAvg's mean of the clients' models, in their own dtypes."""
    total = sum(weights.values())
    first = next(iter(states.values()))
    found = {}
    for name, like in first.items():
        parts = [weights[client] / total * states[client][name].double() for client in states]
        found[name] = torch.stack(parts).sum(dim=0).to(like.dtype)
    return found


def counts_line(system: str, kind: str, total: int, attackers: int) -> dict[str, str]:
    """A row of the table of inflated counts."""
    cells = [counts_cell(system, kind, total, attackers, seed) for seed in SEEDS]
    made = {"": counts_name(system, kind, total, attackers)}
    for head, key in (
        ("no attack", "quiet"),
        ("neither bound nor cap", "unbounded"),
        ("bound and cap", "bounded"),
        ("without the malicious clients", "without"),
    ):
        made[head] = f"{mean(one[key] for one in cells):.1f}"
    made["refused"] = str(sum(one["refused"] for one in cells))
    made["capped"] = str(sum(one["capped"] for one in cells))
    return made


def counts_name(system: str, kind: str, total: int, attackers: int) -> str:
    """The name of a row."""
    return f"{system}: {kind}, {total:,}, {attackers} of {len(CLIENTS)}"


def write_counts(systems: Sequence[str]) -> None:
    """Make the table of inflated counts, row by row."""
    about = (
        "Top-1 accuracy (%) on all clients' test images, mean of the clients, where the first ones "
        "of six clients state more images than they have: a stated total, by raising all counts, "
        "or the first class's alone, or counts, sums and moments alike. Bound: max-images = "
        "1,000,000, above which a client is refused; cap: max-weight-ratio = 10. FedAvg: one round "
        "of twenty local epochs. "
        f"Seeds {SEEDS}. Command: `python -m benchmarks.poison --counts`."
    )
    rows = [
        (system, kind, total, attackers)
        for system in COUNTED
        for kind in COUNT_KINDS[system]
        for total in TOTALS
        for attackers in (LIARS if total == TOTALS[0] and system != AVERAGED else (1,))
    ]
    order = [counts_name(*row) for row in rows]
    for row in rows:
        if row[0] in systems:
            lines = with_others([counts_line(*row)], TABLES / "poison-counts.json", about, order)
            write_table(TABLES / "poison-counts", lines, about)


ABOUT = (
    "Top-1 accuracy (%) on all clients' test images, mean of the clients, where the first "
    "ones of six or thirty clients lie. With the liars: `robust = off`; without: a "
    "federation of the others alone. Who stands out, by norms or spreads, is reported by every "
    "run. Of honest negatives nobody lies: these columns are of clients whose images are "
    "negatives. Fooled: of test images of another class with a white patch, those taken for class "
    f"{TARGET}, in the same four. FedCADO draws ten images of a class, the others of six thirty. "
    f"Seeds {SEEDS}; recipe and payloads are benchmarks.main_table's. "
    "Command: `python -m benchmarks.poison`."
)


def main() -> None:
    """Make the tables, and keep them."""
    parser = command_line(__doc__)
    known = dict.fromkeys((*SYSTEMS, *HONEST_ROWS, *COUNTED))
    parser.add_argument("systems", nargs="*", help=f"some of {listed(known)}; none: all")
    parser.add_argument("--honest", action="store_true", help="who is doubted where nobody lies")
    parser.add_argument("--influence", action="store_true", help="what each client gives")
    parser.add_argument("--counts", action="store_true", help="clients that inflate their counts")
    given = parser.parse_args()
    every = tuple(HONEST_ROWS) if given.honest else OF_SIX if given.influence else SYSTEMS
    systems = some_of(given.systems, COUNTED if given.counts else every, parser)
    make_private_folder(WORK)
    if given.counts:
        write_counts(systems)
        return
    if given.influence:
        write_influences(systems)
        return
    if given.honest:
        about = (
            "How often the kit finds the prompt of an image's class better than another class's, "
            "where nobody lies; 0.5 by chance. Six clients, a domain each, or two to four "
            "classes, or classes by Dirichlet's distribution with alpha 0.1; payloads of "
            f"benchmarks.main_table, seeds {HONEST_SEEDS}. The rule is in "
            "server_app/defenses/label_consistency.py. "
            "Command: `python -m benchmarks.poison --honest`."
        )
        for system in systems:
            lines = [honest_line(system, HONEST_SEEDS)]
            lines = with_others(lines, TABLES / "poison-honest.json", about, every)
            write_table(TABLES / "poison-honest", lines, about)
        return
    order = [
        name_of(system, attack, count)
        for system in SYSTEMS
        for attack in attacks_of(system)
        for count in liars_of(system)
    ]
    for system in systems:
        for attack in attacks_of(system):
            lines = [line(system, attack, count, SEEDS) for count in liars_of(system)]
            lines = with_others(lines, TABLES / "poison.json", ABOUT, order)
            write_table(TABLES / "poison", lines, ABOUT)


if __name__ == "__main__":
    main()
