"""benchmarks/robustness: attacks, federations with malicious clients, and what tables count."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import recipe
from benchmarks.federation import CLIENTS, cell_name, config_of, images_of, sampler_of
from benchmarks.robustness import attacks, false_positives, poisoning
from osfl.data.load import Images
from osfl.methods import server_module
from osfl.payload.kinds import Classifier, Descriptions, DomainVector, Encodings, FeatureStatistics
from osfl.payload.wire import PayloadError
from osfl.util.prompts import DIGITS
from osfl.util.seeds import generator_of
from server_app.methods import fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import SyntheticSet
from tests.helpers.class_statistics import triangle_of

SYSTEM = "FedDEO description alone"
CLASSES = ("zero", "one", "two", "three", "four")
ROWS = torch.arange(5.0).view(5, 1, 1) + torch.zeros(5, 2, 3)
PAYLOAD = Descriptions(CLASSES, ROWS)


def rng() -> torch.Generator:
    return generator_of(0)


# ---- Attacks ----


@pytest.mark.parametrize("payload", [PAYLOAD, Encodings(CLASSES, ROWS)])
@pytest.mark.parametrize(
    ("attack", "rows"),
    [
        ("all labels permuted", [4, 0, 1, 2, 3]),
        ("half of the labels permuted", [1, 0, 2, 3, 4]),
        ("first class for all labels", [0, 0, 0, 0, 0]),
        ("scaled by a thousand", [0, 1000, 2000, 3000, 4000]),
    ],
)
def test_attacks_change_rows_and_keep_class_names(
    attack: str, rows: list[float], payload: Any
) -> None:
    """Row k has the value k."""
    attacked: Any = attacks.ATTACKS[attack](payload, rng())
    assert type(attacked) is type(payload)
    assert attacked.classes == CLASSES
    assert attacked.vectors[:, 0, 0].tolist() == rows


def test_noise_has_the_payloads_deviation_and_nothing_else_of_it() -> None:
    vectors = 3 + 2 * torch.randn(5, 100, 10, generator=rng())
    noisy = attacks.noise(Descriptions(CLASSES, vectors), generator_of(1))
    assert isinstance(noisy, Descriptions)
    assert noisy.vectors.std().item() == pytest.approx(vectors.std().item(), rel=0.05)
    assert abs(noisy.vectors.mean().item()) < 0.1
    correlation = torch.corrcoef(torch.stack([noisy.vectors.flatten(), vectors.flatten()]))[0, 1]
    assert abs(correlation) < 0.05


def test_every_attack_on_a_vector_without_classes_changes_it() -> None:
    vector = DomainVector(CLASSES, torch.ones(16, 64))
    for attack in set(attacks.attacks_of("domain-vector")) & set(attacks.ATTACKS):
        assert not torch.equal(attacks.ATTACKS[attack](vector, rng()).domain, vector.domain)
    assert attacks.BACKDOOR not in attacks.attacks_of("domain-vector")
    assert set(attacks.attacks_of(SYSTEM)) == {*attacks.ATTACKS, attacks.COPY, *attacks.LEARNED}


@pytest.mark.parametrize(
    ("attack", "weights", "bias"),
    [
        (attacks.permuted, [4, 0, 1, 2, 3], [4, 0, 1, 2, 3]),
        # Sure of the first class, whatever the image
        (attacks.first_class, [0] * 5, [attacks.SURE, 0, 0, 0, 0]),
    ],
)
def test_attacks_change_a_classifiers_head_alone(
    attack: attacks.Attack, weights: list[float], bias: list[float]
) -> None:
    """Row k of its weights has the value k, and so has its bias."""
    head = torch.arange(5.0)
    state = {"conv1.weight": torch.arange(10.0), "fc.bias": head.clone()}
    state["fc.weight"] = head[:, None] + torch.zeros(5, 8)
    before = {name: value.clone() for name, value in state.items()}
    attacked = attack(Classifier(CLASSES, "resnet18", state), rng())
    assert isinstance(attacked, Classifier)
    assert attacked.state["fc.weight"][:, 3].tolist() == weights
    assert attacked.state["fc.bias"].tolist() == bias
    assert torch.equal(attacked.state["conv1.weight"], before["conv1.weight"])
    assert (attacked.classes, attacked.architecture) == (CLASSES, "resnet18")
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_the_patch_is_a_white_corner() -> None:
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    marked = attacks.patched(pixels)
    assert marked.sum().item() == 2 * 3 * 36 * 255
    assert (marked[:, :, 26:, 26:] == 255).all()
    assert pixels.sum() == 0


def test_negatives_keep_their_classes() -> None:
    pixels = torch.tensor([0, 10, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    images = Images(pixels, torch.tensor([4, 5, 6]))
    inverted = attacks.negatives(images, rng())
    assert inverted.pixels[:, 0, 0, 0].tolist() == [255, 245, 0]
    assert torch.equal(inverted.labels, images.labels)
    assert images.pixels[0].sum() == 0


def test_a_backdoors_target_is_learned_from_other_classes_with_the_patch(
    monkeypatch: pytest.MonkeyPatch, numbered: dict[str, Descriptions]
) -> None:
    """Three of nine images are of the target; the others stay as they are."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    pixels = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 32, 32).clone()
    loaded: list[Images] = []

    def make_payload(job: Any) -> Descriptions:
        loaded.append(job.load(32))
        return PAYLOAD

    @dataclass(frozen=True)
    class Job:
        load: Any

    images = Images(pixels, labels)
    monkeypatch.setattr(attacks, "client_job", lambda *_: Job(lambda fit: images))
    client = SimpleNamespace(make_payload=make_payload)
    monkeypatch.setattr(attacks, "client_module", lambda method: client)
    for _ in range(2):
        payload: Any = attacks.learned(SYSTEM, attacks.BACKDOOR, "client-1", 0)
        assert payload.classes == CLASSES
        assert torch.equal(payload.vectors, ROWS)
    (trained,) = loaded
    assert torch.equal(trained.labels, labels)
    mask = labels != 0
    assert torch.equal(trained.pixels[mask], pixels[mask])
    sources = trained.pixels[~mask][:, 0, 0, 0].tolist()
    assert len(set(sources)) == 3
    assert all(labels[source] != 0 for source in sources)
    assert (trained.pixels[~mask][:, :, 26:, 26:] == 255).all()
    assert pixels[0].sum() == 0


# ---- Federations ----


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Descriptions]:
    """Payloads whose tens are their client's number, and whose ones are the class."""
    rows = torch.arange(10.0).view(10, 1, 1) + torch.zeros(10, 16, 64)
    payloads = {
        client: Descriptions(DIGITS, rows + 10 * number) for number, client in enumerate(CLIENTS)
    }
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: payloads)
    return payloads


def drawn(system: str, attack: str, seed: int) -> SyntheticSet:
    """Two images of each client, of its number, and of 100 more where it attacks."""
    clients = attacks.clients_of(system)
    first = 100 * (attack != attacks.HONEST)
    values = (torch.arange(len(clients)) + first).repeat_interleave(2).to(torch.uint8)
    pixels = values.view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
    owners = tuple(client for client in clients for _ in range(2))
    return SyntheticSet(pixels, torch.tensor([0, 1] * len(clients)), owners)


@pytest.fixture
def drawn_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", drawn)


@pytest.mark.parametrize(
    ("attack", "values"), [(attacks.COPY, [10, 20, 30]), ("all labels permuted", [9, 19, 29])]
)
def test_at_most_three_of_six_clients_attack(
    attack: str, values: list[int], numbered: dict[str, Descriptions]
) -> None:
    assert attacks.attacked(SYSTEM, attacks.HONEST, 0) == numbered
    payloads: Any = attacks.attacked(SYSTEM, attack, 0)
    assert list(payloads) == list(CLIENTS[:3])
    assert [payload.vectors[0, 0, 0].item() for payload in payloads.values()] == values


@pytest.mark.parametrize(("system", "count"), [(SYSTEM, 2), (attacks.CROWD, 10)])
def test_a_federation_has_attacked_images_beside_honest_ones(
    system: str, count: int, drawn_by_number: None
) -> None:
    clients = attacks.clients_of(system)
    images = attacks.federation(system, "noise", clients[:count], 0)
    values = dict(zip(images.clients, images.pixels[:, 0, 0, 0].tolist(), strict=True))
    assert values == {f"client-{k}": k + 100 * (k < count) for k in range(len(clients))}
    assert len(images.labels) == 2 * len(clients)
    last = images_of(images, clients[-1:])
    assert last.clients == clients[-1:] * 2
    assert last.labels.tolist() == [0, 1]


def test_thirty_clients_differ_from_six_in_their_number_and_images() -> None:
    settings = attacks.settings_of(attacks.CROWD, 0)
    oscar = attacks.settings_of("OSCAR", 0)
    assert {key for key in settings if settings[key] != oscar.get(key)} == set(attacks.OF_CROWD)
    job = attacks.job_of(settings, "crowd")
    assert job.clients == tuple(sorted(attacks.clients_of(attacks.CROWD)))


def test_classifiers_sample_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedCADO's sampler and settings, and the same images of each client."""
    arguments: dict[str, Any] = {}

    def synthesize_and_train(job: Any, payloads: Any, sampler: Any, **more: Any) -> None:
        arguments.update(more, sampler=sampler)

    monkeypatch.setattr(fedlmg, "synthesize_and_train", synthesize_and_train)
    config = config_of(attacks.settings_of(attacks.CLASSIFIERS, 0))
    server_module("fedcado").run(SimpleNamespace(config=config), {})
    sampler = sampler_of(config)
    assert isinstance(sampler, partial)
    assert (sampler.func, sampler.keywords) == (
        arguments["sampler"].func,
        arguments["sampler"].keywords,
    )
    assert sampler.keywords["settings"].guidance == 7.5
    assert arguments["plan"] is plan_held_classes


@pytest.mark.parametrize("system", attacks.SYSTEMS)
def test_every_system_has_a_configuration(system: str) -> None:
    config = config_of(poisoning.defended(system, 0))
    # The defense scores synthetic images
    assert config.defense == ("off" if system == attacks.STATISTICS else "label-consistency")
    assert len(attacks.clients_of(system)) == config.num_clients
    assert max(attacks.malicious_counts(system)) < config.num_clients / 2 + 1


# ---- The table of attacks ----


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> dict[str, FeatureStatistics]:
    """FedCGS' payloads of six clients with four images of every class."""
    width = 512
    payloads = {}
    for number, client in enumerate(CLIENTS):
        draws = torch.randn(40, width, generator=generator_of(number))
        rows = draws + 3 * torch.eye(width)[torch.arange(40) % 10]
        sums = rows.view(4, 10, width).sum(dim=0)
        counts = torch.full((10,), 4)
        payloads[client] = FeatureStatistics(DIGITS, counts, sums, triangle_of(rows.T @ rows))
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: payloads)
    return payloads


@pytest.mark.parametrize("attack", ["first class for all labels", "noise", "scaled by a thousand"])
def test_a_payload_that_the_server_refuses_is_no_attack(
    statistics: dict[str, FeatureStatistics], attack: str
) -> None:
    assert attack not in attacks.attacks_of(attacks.STATISTICS)
    with pytest.raises(PayloadError, match="client-0: triangle"):
        attacks.attacked(attacks.STATISTICS, attack, 0)


def test_a_method_without_images_is_solved_from_payloads(
    statistics: dict[str, FeatureStatistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the permuted sums, and without them; the defense scores nothing."""
    solved: list[dict[str, float]] = []

    def run(job: Any, payloads: Any) -> dict[str, Any]:
        assert job.config.defense == "off"
        solved.append({client: payload.sums[0, 0].item() for client, payload in payloads.items()})
        return {"FedCGS": SimpleNamespace(model=None)}

    monkeypatch.setattr(poisoning, "server_module", lambda method: SimpleNamespace(run=run))
    monkeypatch.setattr(
        poisoning, "scores_of", lambda job, model: {"accuracy": 10.0 * len(solved), "backdoor": 1.0}
    )
    line = poisoning.line(attacks.STATISTICS, "all labels permuted", 2, (0,))
    first = {client: payload.sums[0, 0].item() for client, payload in statistics.items()}
    last = {client: statistics[client].sums[9, 0].item() for client in CLIENTS[:2]}
    assert solved == [first, first | last, {client: first[client] for client in CLIENTS[2:]}]
    assert line == {
        "": "FedCGS: all labels permuted, 2 of 6",
        "no attack": "10.0",
        "undefended": "20.0",
        "exclude": "",
        "without the malicious clients": "30.0",
        "malicious clients excluded": "",
        "single classes of malicious clients excluded": "",
        "honest clients excluded": "",
        "single classes of honest clients excluded": "",
        "malicious clients reported as outliers": "0 of 2",
        "backdoor success (%)": "",
    }


EXCLUDED_CLIENTS = ("client-0", "client-5")
EXCLUDED_CLASSES = [("client-1", 0), ("client-2", 1)]


def test_a_cell_counts_flagged_clients_and_classes(
    numbered: dict[str, Descriptions], drawn_by_number: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two malicious clients is flagged, and a class of the other; so is an honest client,
    and one class of another.
    """
    trained: list[int] = []

    def filter_images(job: Any, images: SyntheticSet) -> SyntheticSet:
        assert job.config.defense == "label-consistency"
        remaining = images_of(images, tuple(c for c in CLIENTS if c not in EXCLUDED_CLIENTS))
        pairs = list(zip(remaining.clients, remaining.labels.tolist(), strict=True))
        rows = [row for row, pair in enumerate(pairs) if pair not in EXCLUDED_CLASSES]
        return remaining.select(rows)

    def scored(system: str, images: SyntheticSet, seed: int) -> dict[str, float]:
        trained.append(len(images.labels))
        attacked = images.pixels.max().item() >= 100
        return {"accuracy": float(len(images.labels)) - 0.5 * attacked, "backdoor": 1.0}

    monkeypatch.setattr(poisoning, "filter_images", filter_images)
    monkeypatch.setattr(poisoning, "scored", scored)
    for _ in range(2):
        cell = poisoning.cell(SYSTEM, "noise", 2, 0)
    assert trained == [12, 12, 6, 8]
    assert (cell["malicious"], cell["malicious classes"]) == (1, 1)
    assert (cell["honest"], cell["honest classes"]) == (1, 1)
    line = poisoning.line(SYSTEM, "noise", 2, (0,))
    assert (line["no attack"], line["undefended"]) == ("12.0", "11.5")
    assert (line["exclude"], line["without the malicious clients"]) == ("5.5", "8.0")
    assert line["malicious clients excluded"] == "1 of 2"
    assert line["single classes of honest clients excluded"] == "1"
    # Other code of the defense: the cell is computed again
    monkeypatch.setattr(poisoning, "defense_digest", lambda: "other")
    poisoning.cell(SYSTEM, "noise", 2, 0)
    assert len(trained) == 8


def test_a_backdoors_row_has_its_success_in_four_federations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    success = {"no attack": 0.8, "used": 2.8, "excluded": 2.7, "without": 0.9}
    cell = {kind: {"accuracy": 90.0, "backdoor": value} for kind, value in success.items()}
    counts = dict.fromkeys(("malicious", "malicious classes", "honest", "honest classes"), 0)
    monkeypatch.setattr(poisoning, "cell", lambda *_: {**cell, **counts})
    monkeypatch.setattr(poisoning, "outlier_count", lambda *_: 0)
    line = poisoning.line(SYSTEM, attacks.BACKDOOR, 1, (0,))
    assert line["backdoor success (%)"] == "0.8, 2.8, 2.7, 0.9"


@pytest.mark.parametrize(
    ("attack", "count"),
    [("scaled by a thousand", 2), ("first class for all labels", 2), ("all labels permuted", 0)],
)
def test_outliers_among_malicious_clients_are_counted(
    attack: str, count: int, numbered: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = dict.fromkeys(CLIENTS, numbered["client-1"])
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: alike)
    assert poisoning.outlier_count(SYSTEM, attack, 2, 0) == count


def test_equal_images_train_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def train(job: Any, payloads: Any, images: SyntheticSet) -> dict[str, Any]:
        trained.append(len(images.labels))
        return {"FT": SimpleNamespace(model="a model")}

    monkeypatch.setattr(poisoning, "train_global_model", train)
    monkeypatch.setattr(poisoning, "accuracy_on_test", lambda config, model, number: 10.0 * number)
    monkeypatch.setattr(poisoning, "backdoor_success", lambda model, images: 4.0)
    monkeypatch.setattr(poisoning, "client_images", lambda split: [split] * 6)
    images = drawn(SYSTEM, attacks.HONEST, 0)
    for _ in range(2):
        assert poisoning.scored(SYSTEM, images, 0) == {"accuracy": 25.0, "backdoor": 4.0}
    poisoning.scored(SYSTEM, images_of(images, CLIENTS[1:]), 0)
    poisoning.scored(SYSTEM, drawn(SYSTEM, "noise", 0), 0)
    assert trained == [12, 10, 12]


def test_backdoor_success_is_of_other_classes_with_the_patch() -> None:
    """The model predicts the target where the corner is lighter than the image, else class 1."""

    class Corner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(images))
            white = images[:, 0, -1, -1] > images[:, 0, 0, 0]
            return torch.stack([white.float(), torch.full((len(images),), 0.5)], dim=1)

    pixels = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
    pixels[4] = 255
    model = Corner()
    share = poisoning.backdoor_success(model, Images(pixels, torch.tensor([0, 1, 1, 0, 1])))
    assert share == pytest.approx(100 * 2 / 3)
    assert sum(model.seen) == 3


def test_the_defenses_digest_ignores_docstrings_and_comments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest(code: str) -> str:
        monkeypatch.setattr(poisoning.inspect, "getsource", lambda module: code)
        return poisoning.defense_digest()

    code = '"""A page."""\n\ndef rule():\n    """Says."""\n    return {}\n'
    assert digest(code.format(1)) == digest(code.format(1).replace("Says", "Tells") + "# end\n")
    assert digest(code.format(1)) != digest(code.format(2))


# ---- The table of false positives ----


def test_false_positives_are_counted_over_seeds() -> None:
    """A class below chance in one federation, a client near it in the other."""
    good = {client: {"0": 0.9, "1": 1.0, "2": 1.0} for client in CLIENTS}
    first = {**good, "client-0": {"0": 0.4, "1": 1.0, "2": 1.0}}
    second = {**good, "client-3": {"0": 0.5, "1": 0.6, "2": 0.7, "3": 1.0}, "client-4": {"3": 0.6}}
    for seed, scores in ((0, first), (1, second)):
        settings = {
            **recipe.settings_of(SYSTEM, seed),
            "synthesis.images-per-class": attacks.NUM_PROBE_IMAGES,
        }
        name = f"honest-{poisoning.defense_digest()}-{cell_name(settings)}"
        false_positives.EXPERIMENT.cell(name, lambda scores=scores: scores)
    line = false_positives.line(SYSTEM, seeds=(0, 1))
    assert line["clients"] == "12"
    assert (line["clients flagged"], line["classes flagged"]) == ("2", "1 of 35")
    assert line["not scored"] == "0"
    assert (line["lowest client"], line["lowest class"]) == ("0.60", "0.40")


@pytest.mark.parametrize("row", false_positives.ROWS)
def test_every_row_of_false_positives_has_a_configuration(row: str) -> None:
    system, partition = false_positives.ROWS[row]
    config = config_of(
        {**recipe.settings_of(system, 0, partition), "defense": "label-consistency-report"}
    )
    assert config.defense == "label-consistency-report"
    assert config.data.partition == partition
