"""benchmarks/robustness: attacks, federations with malicious clients, and what tables count."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import recipe
from benchmarks.federation import CLIENTS, cell_name, config_of, images_of, sampler_of
from benchmarks.robustness import attacks, client_contributions, false_positives, poisoning
from osfl.config import NodeConfig
from osfl.data.load import Images, image_labels
from osfl.methods import server_module
from osfl.payload.kinds import Classifier, Descriptions, DomainVector, Encodings, FeatureStatistics
from osfl.payload.wire import PayloadError
from osfl.util.prompts import DIGITS
from osfl.util.seeds import generator_of
from server_app.defenses import contribution
from server_app.defenses.contribution import ClientContribution, Gain
from server_app.methods import fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import SyntheticSet

SYSTEM = "FedDEO description alone"
CLASSES = ("zero", "one", "two", "three", "four")
ROWS = torch.arange(5.0).view(5, 1, 1) + torch.zeros(5, 2, 3)
PAYLOAD = Descriptions(CLASSES, ROWS)


def chance() -> torch.Generator:
    return generator_of(0)


# ---- What liars send ----


def test_attacks_by_hand() -> None:
    """Row k has k; classes keep their names."""

    def rows(attack: str, payload: Any = PAYLOAD) -> list[float]:
        made = attacks.ATTACKS[attack](payload, chance())
        assert type(made) is type(payload)
        assert made.classes == CLASSES
        return made.vectors[:, 0, 0].tolist()

    assert rows("shifted classes") == [4, 0, 1, 2, 3]
    assert rows("half of the classes shifted") == [1, 0, 2, 3, 4]
    assert rows("all classes as the first") == [0, 0, 0, 0, 0]
    assert rows("a thousand times as large") == [0, 1000, 2000, 3000, 4000]
    assert rows("shifted classes", Encodings(CLASSES, ROWS)) == [4, 0, 1, 2, 3]


def test_noise_has_the_payloads_spread_and_is_the_clients_own() -> None:
    vectors = 3 + 2 * torch.randn(5, 100, 10, generator=chance())
    noised = attacks.noise(Descriptions(CLASSES, vectors), generator_of(1))
    assert isinstance(noised, Descriptions)
    assert noised.vectors.shape == vectors.shape
    assert noised.vectors.std().item() == pytest.approx(vectors.std().item(), rel=0.05)
    assert abs(noised.vectors.mean().item()) < 0.1
    correlation = torch.corrcoef(torch.stack([noised.vectors.flatten(), vectors.flatten()]))[0, 1]
    assert abs(correlation) < 0.05


def test_a_vector_that_holds_no_class_has_none_to_swap() -> None:
    """All its attacks change it; those on classes would not."""
    vector = DomainVector(CLASSES, torch.ones(16, 64))
    for attack in set(attacks.attacks_of("domain-vector")) & set(attacks.ATTACKS):
        assert not torch.equal(attacks.ATTACKS[attack](vector, chance()).domain, vector.domain)
    swapped = attacks.shifted(vector, chance())
    assert torch.equal(swapped.domain, vector.domain)
    assert attacks.BACKDOOR not in attacks.attacks_of("domain-vector")
    assert set(attacks.attacks_of(SYSTEM)) == {*attacks.ATTACKS, attacks.COPY, *attacks.LEARNED}


def test_a_classifiers_head_is_what_says_the_classes() -> None:
    """Row k of its weights has k, and so has its bias; nothing else changes, nor what was given."""
    head = torch.arange(5.0)
    state = {
        "conv1.weight": torch.arange(10.0),
        "fc.weight": head[:, None] + torch.zeros(5, 8),
        "fc.bias": head.clone(),
    }
    given = {name: value.clone() for name, value in state.items()}
    honest = Classifier(CLASSES, "resnet18", state)
    shifted = attacks.shifted(honest, chance())
    assert isinstance(shifted, Classifier)
    assert shifted.state["fc.weight"][:, 3].tolist() == [4, 0, 1, 2, 3]
    assert shifted.state["fc.bias"].tolist() == [4, 0, 1, 2, 3]
    one = attacks.one_class(honest, chance())
    assert isinstance(one, Classifier)
    assert one.state["fc.weight"].unique().tolist() == [0]
    # Sure of the first class, whatever the image
    assert one.state["fc.bias"].tolist() == [attacks.SURE, 0, 0, 0, 0]
    for made in (shifted, one):
        assert torch.equal(made.state["conv1.weight"], given["conv1.weight"])
        assert (made.classes, made.architecture) == (CLASSES, "resnet18")
    assert all(torch.equal(state[name], value) for name, value in given.items())


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FeatureStatistics]:
    """FedCGS' of six clients, in folders of the test's own: each has four images of every class."""
    width = 512
    found = {}
    for number, client in enumerate(CLIENTS):
        draws = torch.randn(40, width, generator=generator_of(number))
        rows = draws + 3 * torch.eye(width)[torch.arange(40) % 10]
        sums = rows.view(4, 10, width).sum(dim=0)
        counts = torch.full((10,), 4)
        found[client] = FeatureStatistics(DIGITS, counts, sums, rows.T @ rows)
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: found)
    return found


@pytest.mark.parametrize(
    "attack", ["all classes as the first", "noise", "a thousand times as large"]
)
def test_statistics_of_no_images_are_refused_and_no_attack(
    statistics: dict[str, FeatureStatistics], attack: str
) -> None:
    assert attack not in attacks.attacks_of(attacks.STATISTICS)
    with pytest.raises(PayloadError, match="client-0: moments"):
        attacks.attacked(attacks.STATISTICS, attack, 0)


def test_a_method_without_images_has_models_of_payloads(
    statistics: dict[str, FeatureStatistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the liars' swapped sums, and without them; nobody is left out, for nothing is judged."""
    solved: list[dict[str, float]] = []

    def run(job: Any, payloads: Any) -> dict[str, Any]:
        assert job.config.robust == "off"
        sums = {client: one.sums[0, 0].item() for client, one in payloads.items()}
        solved.append(sums)
        return {"FedCGS": SimpleNamespace(model=None)}

    monkeypatch.setattr(poisoning, "server_module", lambda method: SimpleNamespace(run=run))
    monkeypatch.setattr(
        poisoning, "scores_of", lambda job, model: {"accuracy": 10.0 * len(solved), "fooled": 1.0}
    )
    line = poisoning.line(attacks.STATISTICS, "shifted classes", 2, (0,))
    first = {client: one.sums[0, 0].item() for client, one in statistics.items()}
    last = {client: statistics[client].sums[9, 0].item() for client in CLIENTS[:2]}
    quiet, used, without = solved
    assert quiet == first
    assert used == first | last
    assert without == {client: first[client] for client in CLIENTS[2:]}
    assert [line[what] for what in ("nobody lies", "with the liars", "without the liars")] == [
        "10.0",
        "20.0",
        "30.0",
    ]
    empty = ("exclude", "liars left out", "honest clients left out", "their single classes")
    assert {line[what] for what in empty} == {""}
    assert line["liars that stand out"] == "0 of 2"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Descriptions]:
    """Payloads that are their client's number, in folders of the test's own."""
    rows = torch.arange(10.0).view(10, 1, 1) + torch.zeros(10, 16, 64)
    found = {
        client: Descriptions(DIGITS, rows + 10 * number) for number, client in enumerate(CLIENTS)
    }
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: found)
    return found


def test_who_copies_sends_the_next_ones(own: dict[str, Descriptions]) -> None:
    made = attacks.attacked(SYSTEM, attacks.COPY, 0)
    assert {client: one.vectors[0, 0, 0].item() for client, one in made.items()} == {
        "client-0": 10,
        "client-1": 20,
        "client-2": 30,
    }
    assert attacks.attacked(SYSTEM, attacks.HONEST, 0) == own
    lied = attacks.attacked(SYSTEM, "shifted classes", 0)
    # No more than lie at most
    assert {client: one.vectors[0, 0, 0].item() for client, one in lied.items()} == {
        "client-0": 9,
        "client-1": 19,
        "client-2": 29,
    }


def test_the_patch_is_a_white_corner() -> None:
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    marked = attacks.patched(pixels)
    assert marked.sum().item() == 2 * 3 * 36 * 255
    assert (marked[:, :, 26:, 26:] == 255).all()
    assert pixels.sum() == 0


def test_a_backdoors_target_is_learned_from_other_classes_with_the_patch(
    own: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of nine images are of the target; the others stay as they are. It is made once."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    pixels = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 32, 32).clone()
    learned: list[Images] = []

    def make_payload(job: Any) -> Descriptions:
        learned.append(job.load(32))
        return PAYLOAD

    @dataclass(frozen=True)
    class Job:
        load: Any

    images = Images(pixels, labels)
    monkeypatch.setattr(attacks, "client_job", lambda *_: Job(lambda fit: images))
    half = SimpleNamespace(make_payload=make_payload)
    monkeypatch.setattr(attacks, "client_module", lambda method: half)
    for _ in range(2):
        made = attacks.learned(SYSTEM, attacks.BACKDOOR, "client-1", 0)
        assert made.classes == CLASSES
        assert torch.equal(made.vectors, ROWS)
    (seen,) = learned
    assert torch.equal(seen.labels, labels)
    others = labels != 0
    assert torch.equal(seen.pixels[others], pixels[others])
    sources = seen.pixels[~others][:, 0, 0, 0].tolist()
    assert len(set(sources)) == 3
    assert all(labels[source] != 0 for source in sources)
    assert (seen.pixels[~others][:, :, 26:, 26:] == 255).all()
    assert pixels[0].sum() == 0


def test_negatives_are_of_the_same_classes() -> None:
    pixels = torch.tensor([0, 10, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    images = Images(pixels, torch.tensor([4, 5, 6]))
    made = attacks.negatives(images, chance())
    assert made.pixels[:, 0, 0, 0].tolist() == [255, 245, 0]
    assert torch.equal(made.labels, images.labels)
    assert images.pixels[0].sum() == 0


# ---- Whose images a federation has ----


def drawn(system: str, attack: str, seed: int) -> SyntheticSet:
    """Two images of each client, of its number, 100 more where it lies."""
    first = 100 * (attack != attacks.HONEST)
    values = torch.tensor([first + number for number in range(6) for _ in range(2)])
    pixels = values.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
    owners = tuple(client for client in CLIENTS for _ in range(2))
    return SyntheticSet(pixels, torch.tensor([0, 1] * 6), owners)


def test_of_thirty_clients_ten_lie_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an image of its number, of 100 more where it lies; the first ones do."""

    def of_thirty(system: str, attack: str, seed: int) -> SyntheticSet:
        first = 100 * (attack != attacks.HONEST)
        values = torch.arange(first, first + 30).to(torch.uint8)
        pixels = values.view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
        return SyntheticSet(pixels, torch.zeros(30, dtype=torch.long), clients)

    clients = attacks.clients_of(attacks.CROWD)
    assert clients[::29] == ("client-0", "client-29")
    assert attacks.malicious_counts(attacks.CROWD) == (1, 3, 5, 10)
    assert max(attacks.malicious_counts(attacks.CROWD)) == 10
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", of_thirty)
    images = attacks.federation(attacks.CROWD, "noise", clients[:10], 0)
    found = dict(zip(images.clients, images.pixels[:, 0, 0, 0].tolist(), strict=True))
    assert found == {f"client-{k}": k + 100 * (k < 10) for k in range(30)}


def test_thirty_clients_share_what_six_have(own: dict[str, Descriptions]) -> None:
    """Twenty of the 600 images each, in OSCAR's recipe; a run of theirs has thirty clients."""
    settings = attacks.settings_of(attacks.CROWD, 0)
    oscar = attacks.settings_of("OSCAR", 0)
    assert {key for key in settings if settings[key] != oscar.get(key)} == set(attacks.OF_CROWD)
    config = config_of(settings)
    taken = [
        image_labels(config.data, NodeConfig(partition_id=k, num_partitions=30), "train", 0)
        for k in range(30)
    ]
    assert [len(labels) for labels in taken] == [20] * 30
    # By chance a client lacks a class or two of ten
    assert 7 * 30 < sum(len(set(labels)) for labels in taken) < 10 * 30
    # As many as the judge looks at
    assert config.synthesis.images_per_class == 6
    job = attacks.job_of(settings, "crowd")
    assert job.clients == tuple(sorted(attacks.clients_of(attacks.CROWD)))


def test_classifiers_draw_as_in_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FedCADO's settings, and the same images of each client."""
    seen: dict[str, Any] = {}

    def taken(job: Any, payloads: Any, sampler: Any, **more: Any) -> None:
        seen.update(more, sampler=sampler)

    monkeypatch.setattr(fedlmg, "synthesize_and_train", taken)
    config = config_of(attacks.settings_of(attacks.CLASSIFIERS, 0))
    server_module("fedcado").run(SimpleNamespace(config=config), {})
    made = sampler_of(config)
    assert isinstance(made, partial)
    assert (made.func, made.keywords) == (seen["sampler"].func, seen["sampler"].keywords)
    assert made.keywords["settings"].guidance == 7.5
    assert seen["plan"] is plan_held_classes


def test_liars_images_are_beside_the_others_honest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", drawn)
    images = attacks.federation(SYSTEM, "noise", CLIENTS[:2], 0)
    values = images.pixels[:, 0, 0, 0].tolist()
    assert values == [100, 100, 101, 101, 2, 2, 3, 3, 4, 4, 5, 5]
    assert images.labels.tolist() == [0, 1] * 6
    assert images.clients == drawn(SYSTEM, "noise", 0).clients
    alone = images_of(images, CLIENTS[4:])
    assert alone.pixels[:, 0, 0, 0].tolist() == [4, 4, 5, 5]
    assert alone.clients == ("client-4",) * 2 + ("client-5",) * 2


def test_a_cell_counts_who_was_doubted(
    own: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two liars one is found, and a class of the other; an honest client is doubted, and one
    class of another.
    """
    trained: list[int] = []

    def left(job: Any, payloads: Any, images: SyntheticSet) -> Any:
        assert job.config.robust == "exclude"
        # The liars', then the others'
        given = [payloads[client].vectors[0, 0, 0].item() for client in CLIENTS]
        assert given[2:] == [20, 30, 40, 50]
        assert set(given[:2]).isdisjoint({0, 10})
        kept = {client: payloads[client] for client in payloads if client not in LEFT_OUT}
        believed = images_of(images, tuple(kept))
        pairs = list(zip(believed.clients, believed.labels.tolist(), strict=True))
        rows = [row for row, pair in enumerate(pairs) if pair not in CLASSES_OUT]
        owners = tuple(believed.clients[row] for row in rows)
        return kept, SyntheticSet(believed.pixels[rows], believed.labels[rows], owners)

    def scored(system: str, images: SyntheticSet, seed: int) -> dict[str, float]:
        trained.append(len(images.labels))
        lying = images.pixels.max().item() >= 100
        return {"accuracy": float(len(images.labels)) - 0.5 * lying, "fooled": 1.0}

    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", drawn)
    monkeypatch.setattr(poisoning, "drop_flagged", left)
    monkeypatch.setattr(poisoning, "scored", scored)
    for _ in range(2):
        found = poisoning.cell(SYSTEM, "noise", 2, 0)
    assert trained == [12, 12, 6, 8]
    assert (found["liars"], found["liars' classes"]) == (1, 1)
    assert (found["honest"], found["honest classes"]) == (1, 1)
    line = poisoning.line(SYSTEM, "noise", 2, (0,))
    assert line[""] == f"{SYSTEM}: noise, 2 of 6"
    assert (line["nobody lies"], line["with the liars"]) == ("12.0", "11.5")
    assert (line["exclude"], line["without the liars"]) == ("5.5", "8.0")
    assert (line["liars left out"], line["single classes of liars left out"]) == ("1 of 2", "1")
    assert (line["honest clients left out"], line["their single classes"]) == ("1", "1")
    assert line["fooled by the patch (%)"] == ""
    # With other code that judges, it is played again
    monkeypatch.setattr(poisoning, "defense_digest", lambda: "other")
    poisoning.cell(SYSTEM, "noise", 2, 0)
    assert len(trained) == 8


def test_a_backdoors_row_says_how_many_are_fooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody lies, with the liar, with those left out that are doubted, and without the liar."""
    fooled = {"quiet": 0.8, "used": 2.8, "excluded": 2.7, "without": 0.9}
    found = {kind: {"accuracy": 90.0, "fooled": value} for kind, value in fooled.items()}
    counts = dict.fromkeys(("liars", "liars' classes", "honest", "honest classes"), 0)
    monkeypatch.setattr(poisoning, "cell", lambda *_: {**found, **counts})
    monkeypatch.setattr(poisoning, "outlier_count", lambda *_: 0)
    line = poisoning.line(SYSTEM, attacks.BACKDOOR, 1, (0,))
    assert line["fooled by the patch (%)"] == "0.8, 2.8, 2.7, 0.9"


LEFT_OUT = ("client-0", "client-5")
CLASSES_OUT = [("client-1", 0), ("client-2", 1)]


def test_who_stands_out_is_counted(
    own: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By norms or spreads; every run reports it, with `robust` or without."""
    scores = {"accuracy": 1.0, "fooled": 1.0}
    alike = dict.fromkeys(CLIENTS, own["client-1"])
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "payloads_of", lambda settings: alike)
    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", drawn)
    monkeypatch.setattr(poisoning, "drop_flagged", lambda job, payloads, images: (payloads, images))
    monkeypatch.setattr(poisoning, "scored", lambda *_: scores)
    line = poisoning.line(SYSTEM, "a thousand times as large", 2, (0,))
    assert line["liars that stand out"] == "2 of 2"
    line = poisoning.line(SYSTEM, "all classes as the first", 2, (0,))
    assert line["liars that stand out"] == "2 of 2"
    line = poisoning.line(SYSTEM, "shifted classes", 2, (0,))
    assert line["liars that stand out"] == "0 of 2"


def test_models_of_the_same_images_are_trained_once(
    own: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def train_one(job: Any, payloads: Any, images: SyntheticSet) -> dict[str, Any]:
        trained.append(len(images.labels))
        return {"FT": SimpleNamespace(model="a model")}

    monkeypatch.setattr(poisoning, "train_global_model", train_one)
    monkeypatch.setattr(poisoning, "accuracy_on_test", lambda config, model, number: 10.0 * number)
    monkeypatch.setattr(poisoning, "share_fooled", lambda model, images: 4.0)
    monkeypatch.setattr(poisoning, "client_images", lambda split: [split] * 6)
    images = drawn(SYSTEM, attacks.HONEST, 0)
    for _ in range(2):
        assert poisoning.scored(SYSTEM, images, 0) == {"accuracy": 25.0, "fooled": 4.0}
    poisoning.scored(SYSTEM, images_of(images, CLIENTS[1:]), 0)
    poisoning.scored(SYSTEM, drawn(SYSTEM, "noise", 0), 0)
    assert trained == [12, 10, 12]


def test_fooled_is_of_other_classes_with_the_patch() -> None:
    """A model that says the target where it sees white in the corner, else class 1."""

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
    share = poisoning.share_fooled(model, Images(pixels, torch.tensor([0, 1, 1, 0, 1])))
    assert share == pytest.approx(100 * 2 / 3)
    assert sum(model.seen) == 3


def test_a_judge_is_its_code_without_what_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(code: str) -> str:
        monkeypatch.setattr(poisoning.inspect, "getsource", lambda module: code)
        return poisoning.defense_digest()

    code = '"""A page."""\n\ndef rule():\n    """Says."""\n    return {}\n'
    assert digest(code.format(1)) == digest(code.format(1).replace("Says", "Tells") + "# end\n")
    assert digest(code.format(1)) != digest(code.format(2))


# ---- What each client gives ----


def test_honest_clients_are_not_flagged_in_the_contributions_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients with negatives are in another table."""
    monkeypatch.setattr(client_contributions, "line", lambda system, attack: attack)
    lines: Any = client_contributions.lines_of(SYSTEM)
    assert list(lines) == [attacks.HONEST, *attacks.EVERY_ATTACK]


def test_the_contributions_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds; the first client lies. In the second one it harms, and so does an honest one."""

    def one(seen: float, points: float) -> ClientContribution:
        return ClientContribution(seen, Gain(0.0, 1.0), Gain(points, 2.0), 300)

    honest = {client: one(90.0, 1.0) for client in CLIENTS[1:]}
    found = {
        0: {"client-0": one(10.0, -1.0), **honest},
        1: {"client-0": one(20.0, -4.0), **honest, "client-3": one(50.0, -2.5)},
    }
    monkeypatch.setattr(
        client_contributions, "contributions_of", lambda system, attack, seed: found[seed]
    )
    assert client_contributions.line(SYSTEM, "noise", (0, 1)) == {
        "": f"{SYSTEM}: noise",
        "the liar seen by the others (%)": "15.0",
        "least of an honest client seen by the others (%)": "50.0",
        "the liar gives the others": "-2.5",
        "least of an honest client gives the others": "-2.5",
        "liars who harm": "1 of 2",
        "honest clients who harm": "1 of 10",
    }
    nobody = client_contributions.line(SYSTEM, attacks.HONEST, (0,))
    assert (nobody["the liar gives the others"], nobody["liars who harm"]) == ("", "")
    assert nobody["least of an honest client seen by the others (%)"] == "10.0"
    assert nobody["honest clients who harm"] == "0 of 6"


@pytest.mark.parametrize(("attack", "value"), [("noise", 100), (attacks.HONEST, 0)])
def test_the_first_of_six_lies(
    attack: str, value: int, own: dict[str, Descriptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twenty images of a class four test; without the first all of the others' are seen."""

    def of_twenty(system: str, attack: str, seed: int) -> SyntheticSet:
        first = 100 * (attack != attacks.HONEST)
        values = torch.arange(6).repeat_interleave(20) + first
        pixels = values.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
        owners = tuple(client for client in CLIENTS for _ in range(20))
        return SyntheticSet(pixels, torch.zeros(120, dtype=torch.long), owners)

    def hits(
        job: Any, clients: Any, images: SyntheticSet, tested: list[int]
    ) -> dict[str, torch.Tensor]:
        assert (job.clients, clients) == (tuple(CLIENTS), CLIENTS)
        assert images.pixels[:, 0, 0, 0].tolist() == [value] * 20 + [
            number for number in range(1, 6) for _ in range(20)
        ]
        assert tested == [row for row in range(120) if row % 20 > 15]
        seen = torch.ones(24, dtype=torch.bool)
        return {"": ~seen, "client-0": seen, **dict.fromkeys(CLIENTS[1:], ~seen)}

    for module in (attacks, poisoning):
        monkeypatch.setattr(module, "synthetic_set", of_twenty)
    monkeypatch.setattr(contribution, "leave_one_out_hits", hits)
    found = client_contributions.contributions_of(SYSTEM, attack, 0)
    assert list(found) == list(CLIENTS)
    assert (found["client-0"].others.points, found["client-1"].others.points) == (-100.0, 0.0)
    assert [one.harms for one in found.values()] == [True] + [False] * 5


# ---- Where nobody lies ----


def test_what_the_honest_table_says(own: dict[str, Descriptions]) -> None:
    """Two federations: a class below chance in one, a client near it in the other."""
    good = {client: {"0": 0.9, "1": 1.0, "2": 1.0} for client in CLIENTS}
    first = {**good, "client-0": {"0": 0.4, "1": 1.0, "2": 1.0}}
    second = {**good, "client-3": {"0": 0.5, "1": 0.6, "2": 0.7, "3": 1.0}, "client-4": {"3": 0.6}}
    for seed, found in ((0, first), (1, second)):
        settings = {
            **recipe.settings_of(SYSTEM, seed),
            "synthesis.images-per-class": attacks.NUM_PROBE_IMAGES,
        }
        name = f"honest-{poisoning.defense_digest()}-{cell_name(settings)}"
        false_positives.EXPERIMENT.cell(name, lambda found=found: found)
    line = false_positives.line(SYSTEM, seeds=(0, 1))
    assert line["clients"] == "12"
    assert (line["clients doubted"], line["classes doubted"]) == ("2", "1 of 35")
    assert line["not judged"] == "0"
    assert (line["least of a client"], line["least of a class"]) == ("0.60", "0.40")


@pytest.mark.parametrize("system", attacks.SYSTEMS)
def test_every_system_can_be_run(system: str) -> None:
    config = config_of(poisoning.defended(system, 0))
    # There is nothing to judge where no image is drawn
    assert config.robust == ("off" if system == attacks.STATISTICS else "exclude")
    assert len(attacks.clients_of(system)) == config.num_clients
    assert max(attacks.malicious_counts(system)) < config.num_clients / 2 + 1


@pytest.mark.parametrize("row", false_positives.ROWS)
def test_every_honest_row_can_be_run(row: str) -> None:
    system, partition = false_positives.ROWS[row]
    config = config_of({**recipe.settings_of(system, 0, partition), "robust": "report"})
    assert config.robust == "report"
    assert config.data.partition == partition
