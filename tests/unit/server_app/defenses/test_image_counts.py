"""Image counts that clients state: bounds, caps, warnings; the numbers are derived by hand."""

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.torch import load_file

from client_app.declared import declared_images
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data.load import image_labels
from osfl.methods.fedcgs import FedCGSConfig
from osfl.payload import wire
from osfl.payload.kinds import FeatureMixtures, FeatureStatistics, Joint, LatentStatistics
from osfl.payload.messages import pack_payload, unpack_bytes, unpack_state
from osfl.payload.wire import PayloadError
from osfl.settings import default_config
from server_app.app import payload_warnings
from server_app.defenses.image_counts import (
    ALL,
    check_counts,
    class_weights,
    find_caps,
    medians_of_others,
)
from server_app.defenses.outliers import find_outliers
from server_app.expected import check_plausible, check_stated_counts, expected_payload
from server_app.federation.exchange import RoundError
from server_app.methods.fedcgs import check_statistics, closed_form_head, weight_statistics
from server_app.methods.fedpft import sample_features
from tests.helpers.class_statistics import CLASSES, drawn, triangle_of
from tests.helpers.class_statistics import statistics as statistics_of
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

SETTINGS = FedCGSConfig("total", 0.1, 0)

BILLION = 10**9


def mixtures(*counts: int) -> FeatureMixtures:
    """FedPFT's payload of as many classes, of one feature each."""
    names = tuple(f"class-{number}" for number in range(len(counts)))
    ones = torch.ones(len(counts), 1)
    return FeatureMixtures(names, torch.tensor(counts), ones, ones[:, None], ones[:, None])


# ---- Bounds ----


def test_a_count_at_the_bound_is_taken_and_one_more_is_refused() -> None:
    check_counts({"a": 60, "b": 40}, 100)
    with pytest.raises(ValueError, match=r"101 images are more than max-images = 100; set max-im"):
        check_counts({"a": 60, "b": 41}, 100)


def test_no_count_is_above_what_the_client_declared() -> None:
    declared = {"a": 60, "b": 40, "c": 0}
    check_counts({"a": 60, "b": 40}, 1000, declared)
    check_counts({"b": 1}, 1000, declared)
    check_counts({ALL: 100}, 1000, {ALL: 100})
    with pytest.raises(ValueError, match="101 images are more than the 100 that the client decl"):
        check_counts({"a": 61, "b": 40}, 1000, declared)
    with pytest.raises(ValueError, match="61 images of class 'a' are more than the 60"):
        check_counts({"a": 61, "b": 39}, 1000, declared)
    with pytest.raises(ValueError, match="1 images of class 'd' are more than the 0"):
        check_counts({"d": 1}, 1000, declared)
    with pytest.raises(ValueError, match="101 images are more than the 100"):
        check_counts({ALL: 101}, 1000, {ALL: 100})


def test_a_payload_above_the_bound_is_refused_with_client_and_field() -> None:
    config = parse_run_config(quick(method="fedpft", max_images=100))
    check_plausible(mixtures(99, 1), "a", config)
    with pytest.raises(PayloadError, match="payload of a: counts: 101 images .* max-images = 100"):
        check_plausible(mixtures(99, 2), "a", config)
    with pytest.raises(PayloadError, match="payload of a: counts: 100 images .* the 99 that"):
        check_stated_counts(mixtures(99, 1), "a", config, {"class-0": 99, "class-1": 0})


# ---- The cap ----


def test_the_median_of_the_others_leaves_out_the_clients_own() -> None:
    draw = np.random.default_rng(0)
    for count in (2, 3, 4, 5, 9):
        values = {f"c{k}": float(value) for k, value in enumerate(draw.integers(1, 9, count))}
        for client, median in medians_of_others(values).items():
            peer_values = [value for name, value in values.items() if name != client]
            assert median == statistics.median(peer_values)


def test_the_larger_of_two_clients_counts_ten_times_the_smaller() -> None:
    assert find_caps({"a": {ALL: 30}, "b": {ALL: 300}}, 10) == {}
    caps = find_caps({"a": {ALL: 30}, "b": {ALL: 301}}, 10)
    assert list(caps) == ["b"]
    assert caps["b"].weights == {ALL: pytest.approx(300 / 301)}
    assert find_caps({"a": {ALL: 30}, "b": {ALL: BILLION}}, 0) == {}
    assert find_caps({"a": {ALL: BILLION}}, 10) == {}
    assert find_caps({}, 10) == {}


def test_the_median_of_three_clients_is_that_of_the_two_others() -> None:
    """c: others 20 and 40, median 30, at most 300; a mean with its own count would not cap it."""
    (cap,) = find_caps({"a": {ALL: 20}, "b": {ALL: 40}, "c": {ALL: 900}}, 10).values()
    assert (cap.client, cap.stated, cap.median) == ("c", 900, 30)
    assert cap.weights == {ALL: pytest.approx(1 / 3)}
    # Of four, two malicious ones do not lift each other's cap; a mean would be 333 million
    caps = find_caps({"a": {ALL: 20}, "b": {ALL: 40}, "c": {ALL: BILLION}, "d": {ALL: BILLION}}, 10)
    assert {client: cap.counted for client, cap in caps.items()} == {"c": 400, "d": 400}


def test_one_class_is_capped_by_its_holders_or_the_largest_classes() -> None:
    """Class x: the others that hold it have 2 and 4; the others' largest classes have 50."""
    honest = {"a": {"x": 2, "y": 50}, "b": {"x": 4, "z": 50}, "c": {"y": 50}}
    many = honest | {"d": {"x": 500, "y": 1}}
    assert find_caps(many, 10) == {}
    above = honest | {"d": {"x": 501, "y": 1}}
    (cap,) = find_caps(above, 10).values()
    assert (cap.client, cap.label, cap.stated, cap.median) == ("d", "x", 501, 50)
    # Its other class counts in full
    assert cap.weights == {"x": pytest.approx(500 / 501), "y": 1.0}
    # A class that no other client holds
    (cap,) = find_caps(honest | {"d": {"w": 1000}}, 10).values()
    assert (cap.label, cap.weights) == ("w", {"w": 0.5})
    # Holders with more of the class than the others' largest classes: their median counts
    wide = {f"class-{number}": 5 for number in range(20)}
    large = {"a": {"x": 90}, "b": {"x": 90}, "c": wide, "d": wide, "e": wide}
    assert find_caps(large | {"f": {"x": 900}}, 10) == {}
    (cap,) = find_caps(large | {"f": {"x": 901}}, 10).values()
    assert (cap.label, cap.median) == ("x", 90)
    assert cap.weights == {"x": pytest.approx(900 / 901)}


def test_many_classes_are_capped_by_all_images() -> None:
    """Ten in each of 100 classes is 1,000 images, where the others have 20 of one class."""
    peers = {client: {"x": 20} for client in "abc"}
    wide = {f"class-{number}": 10 for number in range(100)}
    (cap,) = find_caps(peers | {"d": wide}, 10).values()
    assert (cap.label, cap.stated, cap.counted) == (ALL, 1000, pytest.approx(200))
    assert set(cap.weights.values()) == {0.2}


PARTITIONS = [
    ("domain", 6, 0.1),
    ("label", 6, 0.1),
    ("iid", 30, 0.1),
    *(("dirichlet", clients, 0.1) for clients in (2, 3, 6, 10, 30)),
    ("dirichlet", 6, 0.5),
    ("dirichlet", 6, 10.0),
]


@pytest.mark.parametrize(("partition", "clients", "alpha"), PARTITIONS)
def test_no_honest_partition_of_the_tables_is_capped(
    partition: str, clients: int, alpha: float
) -> None:
    """Per class the counts differ by up to 60 times from the median of the class's holders."""
    settings = {"data.partition": partition, "num-clients": clients, "data.alpha": alpha}
    for seed in range(5):
        config = parse_run_config(
            {**default_config(), **settings, "seed": seed, "method": "fedcgs"}
        )
        stated = {}
        for number in range(clients):
            node = NodeConfig(partition_id=number, num_partitions=clients)
            labels = image_labels(config.data, node, "train", seed)
            stated[f"c{number}"] = {str(label): labels.count(label) for label in set(labels)}
        assert find_caps(stated, config.max_weight_ratio) == {}


# ---- What a capped client does to the head ----


def test_fedcgs_of_a_capped_client_is_that_of_fewer_images() -> None:
    """Features that are there 1,000 times, capped, are there as often as the cap allows."""
    features, labels = drawn()
    rows = [np.arange(start, 400, 2) for start in (0, 1)]
    small, classes = statistics_of(features[rows[0]], labels[rows[0]])
    peer, _ = statistics_of(features[rows[1]], labels[rows[1]])
    both = {"a": small, "b": repeated(peer, 1000)}
    weights = class_weights(both, 10)
    # By hand: of each class ten times the larger of a's count and of a's largest; then ten of all
    mine = small.counts.tolist()
    capped_counts = [min(1000 * n, 10 * max(mine)) for n in peer.counts.tolist()]
    of_all = min(1, 10 * sum(mine) / sum(capped_counts))
    expected = [
        of_all * count / (1000 * n)
        for count, n in zip(capped_counts, peer.counts.tolist(), strict=True)
    ]
    assert weights["a"] == [1.0, 1.0, 1.0]
    assert weights["b"] == pytest.approx(expected)
    counts, sums, moments = (part.numpy() for part in weight_statistics(both["b"], weights["b"]))
    np.testing.assert_allclose(counts, of_all * np.array(capped_counts), rtol=1e-6)
    means = peer.sums.double().numpy() / peer.counts.numpy()[:, None]
    np.testing.assert_allclose(sums / counts[:, None], means, rtol=1e-5)
    # The features' own covariance within the classes, by NumPy
    peer_labels = labels[rows[1]]
    apart = features[rows[1]] - means[np.searchsorted(classes, peer_labels)]
    within = (moments - (counts[:, None] * means).T @ means) / counts.sum()
    np.testing.assert_allclose(within, apart.T @ apart / len(peer_labels), rtol=1e-3, atol=1e-4)
    # All classes alike by half are all numbers by half
    halves = weight_statistics(peer, [0.5] * 3)
    for half, total in zip(halves, (peer.counts, peer.sums, peer.moments), strict=True):
        torch.testing.assert_close(half, total.double() / 2)
    held_of = {"a": classes, "b": classes}
    capped = closed_form_head(both, held_of, CLASSES, SETTINGS, weights)
    assert not torch.allclose(capped[0], closed_form_head(both, held_of, CLASSES, SETTINGS)[0])


def repeated(payload: FeatureStatistics, times: int) -> FeatureStatistics:
    """Return the statistics of every image, repeated."""
    return replace(
        payload,
        counts=times * payload.counts,
        sums=times * payload.sums,
        triangle=times * payload.triangle,
    )


def test_without_a_capped_client_nothing_changes_to_the_bit() -> None:
    features, labels = drawn()
    payloads = {}
    classes = {}
    for client, first in (("a", 0), ("b", 1)):
        indices = np.arange(first, 400, 2)
        payloads[client], classes[client] = statistics_of(features[indices], labels[indices])
    ones = class_weights(payloads, 10)
    assert ones == {"a": [1.0] * 3, "b": [1.0] * 3}
    for result, expected in zip(
        closed_form_head(payloads, classes, CLASSES, SETTINGS, ones),
        closed_form_head(payloads, classes, CLASSES, SETTINGS),
        strict=True,
    ):
        assert torch.equal(result, expected)
    both = {"a": mixtures(5, 7), "b": mixtures(3, 2)}
    rows = {"a": [0, 1], "b": [0, 1]}
    for result, expected in zip(
        sample_features(both, rows, 4, 0, class_weights(both, 10)),
        sample_features(both, rows, 4, 0),
        strict=True,
    ):
        assert torch.equal(result, expected)


def test_fedpft_counts_a_capped_client_for_as_many_images_as_the_cap() -> None:
    """b states 9,000 images of class 0; ten times a's 20 are taken, and all of its class 1."""
    both = {"a": mixtures(20, 20), "b": mixtures(9000, 90)}
    weights = class_weights(both, 10)
    assert weights["b"] == [pytest.approx(200 / 9000), 1.0]
    _, labels, shares = sample_features(both, {"a": [0, 1], "b": [0, 1]}, 50, 0, weights)
    of_b = shares[40:]
    assert of_b[labels[40:] == 0].sum().item() == pytest.approx(200)
    assert of_b[labels[40:] == 1].sum().item() == pytest.approx(90)
    assert shares[:40].tolist() == [1.0] * 40


# ---- Counts that no images have ----


def test_counts_and_sums_must_be_possible_class_by_class() -> None:
    """Cauchy and Schwarz's inequality. All classes together could be possible: the classes' sums
    cancel.
    """
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]])
    sums = torch.stack([rows[:2].sum(dim=0), rows[2:].sum(dim=0)])
    sound = FeatureStatistics(("a", "b"), torch.tensor([2, 2]), sums, triangle_of(rows.T @ rows))
    check_statistics(sound, "c")
    # n sum f^2 >= (sum f)^2: of one image each, 16 + 16 is more than the 20 of B
    few = replace(sound, counts=torch.tensor([1, 1]))
    with pytest.raises(PayloadError, match="payload of c: triangle: .* counts and sums"):
        check_statistics(few, "c")
    check_statistics(replace(sound, counts=torch.tensor([20, 20])), "c")


# ---- Who is named ----


def statistics_with(seed: int, times: int = 1, counts: int = 1) -> FeatureStatistics:
    """Return the payload of 30 images, with its counts multiplied."""
    rows = 2 + torch.randn(30, 4, generator=torch.Generator().manual_seed(seed))
    sums = torch.stack([rows[:10].sum(dim=0), rows[10:].sum(dim=0)])
    triangle = triangle_of(times * rows.T @ rows)
    return FeatureStatistics(
        ("cat", "dog"), torch.tensor([10, 20]) * times * counts, times * sums, triangle
    )


def test_a_count_far_above_the_others_is_named() -> None:
    honest = {f"c{k}": statistics_with(k) for k in range(6)}
    assert payload_warnings(honest, 10) == []
    payloads = honest | {"c2": statistics_with(2, times=8)}
    (outlier,) = find_outliers(payloads)
    assert str(outlier).startswith("c2: it states 8 times as many images as the others' median")
    # Eight times as many are within the cap; fewer images than the others' are no outlier
    assert payload_warnings(payloads, 10) == [str(outlier)]
    assert find_outliers({**honest, **{f"c{k}": statistics_with(k, 8) for k in range(1, 6)}}) == []


def test_a_capped_client_is_named_once_with_what_became_of_it() -> None:
    honest = {f"c{k}": statistics_with(k) for k in range(6)}
    (warning,) = payload_warnings(honest | {"c2": statistics_with(2, times=1000)}, 10)
    assert warning == (
        "c2: weight capped, because it states 20,000 images of class 'dog', 1e+03 times the other "
        "clients' median of 20; it counts as 300 of the 30,000 images that it states "
        "(max-weight-ratio = 10)"
    )
    (warning,) = payload_warnings(honest | {"c2": statistics_with(2, times=1000)}, 0)
    assert warning.startswith("c2: it states 1e+03 times as many images as the others' median")


def test_sums_are_compared_as_means() -> None:
    """A site with four times as many images is none with norms four times as large."""
    honest = {f"c{k}": statistics_with(k) for k in range(5)}
    assert find_outliers(honest | {"c5": statistics_with(5, times=4)}) == []
    # Counts alone make the means small
    names = {
        outlier.tensor
        for outlier in find_outliers(honest | {"c5": statistics_with(5, counts=1000)})
    }
    assert names == {"counts"}


# ---- A run ----

FEDPFT = {"method": "fedpft", "num_clients": 3, "data__partition": "iid"}


def claims(total: int) -> Callable[[int, str, Message], Message | None]:
    """Client 1 states `total` images, of every class as many."""

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        if index == 1 and kind == "query.join":
            reply.content["join"] = ConfigRecord(
                {k: v for k, v in reply.content.config_records["join"].items() if k != "images"}
            )
        if index == 1 and kind == "train":
            config = parse_run_config(quick(**FEDPFT))
            expected = expected_payload(config, "job")("client-1")
            blob = unpack_bytes(reply.content.array_records["payload"])
            payload = wire.decode(blob, expected)
            assert isinstance(payload, FeatureMixtures)
            counts = torch.full_like(payload.counts, total // len(payload.counts))
            encoding = wire.encode(replace(payload, counts=counts), "fedpft", "job", "client-1")
            costs = dict(reply.content.metric_records["costs"])
            for name, record in pack_payload(encoding, costs).items():  # type: ignore[arg-type]
                reply.content[name] = record
        return reply

    return tamper


@pytest.mark.slow
def test_a_run_caps_a_client_and_says_so_in_status_and_report(home: Path, tiny_kit: Path) -> None:
    config = quick(**FEDPFT, kit=str(tiny_kit))
    start(config, tamper=claims(100_000))
    (warning,) = metrics(home)["warnings"]
    assert warning.startswith("client-1: weight capped, because it states ")
    folder = home / "runs" / "job"
    assert json.loads((folder / "status.json").read_text())["warnings"] == [warning]
    page = (folder / "report.html").read_text()
    assert "client-1: weight capped, because it states " in page
    assert "max-weight-ratio = 10" in page


@pytest.mark.slow
def test_a_run_refuses_a_count_above_its_bound(home: Path, tiny_kit: Path) -> None:
    config = quick(**FEDPFT, kit=str(tiny_kit))
    with pytest.raises(
        RoundError, match=r"client-1: .*counts: .* are more than max-images = 1,000,"
    ):
        start(config, tamper=claims(10**7))
    start({**config, "min-clients": 2}, "job", tamper=claims(10**7))


@pytest.mark.slow
def test_a_payload_states_no_more_than_its_client_declared(home: Path, tiny_kit: Path) -> None:
    inflate = claims(100_000)

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        return reply if kind == "query.join" else inflate(index, kind, reply)

    with pytest.raises(RoundError, match="client-1: .* that the client declared when it joined"):
        start(quick(**FEDPFT, kit=str(tiny_kit)), tamper=tamper)


def test_the_parts_of_a_joint_payload_state_the_same_counts() -> None:
    """The first part alone is held against what the client declared."""
    latents = LatentStatistics(("a", "b"), torch.tensor([3, 2]), *torch.ones(2, 2, 1, 2, 2))
    features = FeatureStatistics(("a", "b"), torch.tensor([3, 2]), torch.ones(2, 2), torch.ones(3))
    larger = replace(features, counts=torch.tensor([3, 400]))
    run = parse_run_config(quick(method="fedcgs"))
    declared = {"a": 3, "b": 2}
    for second in (features, larger):
        joint = Joint(("a", "b"), {"latent-gaussian": latents, "fedcgs": second})
        if second is features:
            check_stated_counts(joint, "client-0", run, declared)
            continue
        with pytest.raises(PayloadError, match="counts: its parts state different numbers"):
            check_stated_counts(joint, "client-0", run, declared)


# ---- What a site declares ----


def test_a_site_declares_its_classes_or_only_how_many_images_it_has() -> None:
    """Rounds tell no class's number, so the join tells none. The digits' domains have 100 each."""
    node = NodeConfig(partition_id=0, num_partitions=6)
    configs = {method: parse_run_config(quick(method=method)) for method in ("fedcgs", "fedavg")}
    labels = image_labels(configs["fedcgs"].data, node, "train", 0)
    by_class = declared_images(configs["fedcgs"], node)
    assert by_class == [labels.count(label) for label in range(10)]
    assert declared_images(configs["fedavg"], node) == [len(labels)]
    # A class that the site leaves out is none
    data = quick(method="fedcgs", data__partition="dirichlet", data__alpha=0.1)
    config = parse_run_config(data)
    strict = replace(node, min_class_images=20)
    assert 0 < sum(declared_images(config, strict)) < sum(declared_images(config, node))


def test_with_a_guarantee_a_site_declares_nothing() -> None:
    node = NodeConfig(partition_id=0, num_partitions=6)
    plain = parse_run_config(quick(method="fedpft"))
    assert declared_images(plain, node)
    assert declared_images(parse_run_config(quick(method="fedpft", epsilon=1.0)), node) == []
    assert declared_images(plain, replace(node, epsilon=1.0)) == []
    assert declared_images(plain, replace(node, epsilon_total=1.0)) == []
    # Nothing is weighted by these
    assert declared_images(parse_run_config(quick(method="feddeo")), node) == []


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            [10**6, 1] + [0] * 8,
            "client-1, image counts at join: 1,000,001 images .* max-images = 1,0",
        ),
        ([3, 4], r"client-1 declares \[3, 4\] as its image counts; they must be 10 whole numbers"),
        ([-1] + [5] * 9, "client-1 declares .* as its image counts; they must be 10 whole numbers"),
        ([0] * 10, "client-1 declares .* as its image counts; they must be 10 whole numbers"),
        ([0.5] * 10, "client-1 declares .* as its image counts; they must be 10 whole numbers"),
        ("many", "client-1 declares many as its image counts; they must be 10 whole numbers"),
    ],
)
def test_a_declaration_that_cannot_be_true_is_refused_at_the_join(
    home: Path, tiny_kit: Path, images: object, message: str
) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if index == 1 and kind == "query.join":
            reply.content.config_records["join"]["images"] = images  # type: ignore[assignment]
        return reply

    with pytest.raises(RoundError, match=message):
        start(quick(method="fedcgs", kit=str(tiny_kit)), tamper=tamper)


# ---- Rounds ----

ROUNDS = {"method": "fedavg", "num_clients": 3, "rounds__count": 1}
Sent = dict[int, dict[str, torch.Tensor]]


def states(
    images: dict[int, list[int]], sent: Sent, declared: bool = False
) -> Callable[[int, str, Message], Message | None]:
    """Let clients state these image counts in each round, and keep what they send."""
    turns = {
        index: itertools.chain(counts, itertools.repeat(counts[-1]))
        for index, counts in images.items()
    }

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        if kind == "query.join" and not declared:
            reply.content.config_records["join"]["images"] = []
        if kind == "train":
            sent[index] = unpack_state(reply.content.array_records["model"])
            figures = dict(reply.content.metric_records["metrics"])
            reply.content["metrics"] = MetricRecord({**figures, "num-examples": next(turns[index])})
        return reply

    return tamper


@pytest.mark.slow
def test_fedavg_caps_a_model_at_ten_times_the_others_median(home: Path, tiny_kit: Path) -> None:
    """A million images beside 20 and 40 count for 300: 20, 40, 300 of 360."""
    sent: Sent = {}
    config = quick(**ROUNDS, kit=str(tiny_kit))
    start(config, tamper=states({0: [20], 1: [40], 2: [10**6]}, sent))
    expected = sum(
        share * sent[index]["fc.weight"] for index, share in ((0, 20), (1, 40), (2, 300))
    )
    weights = load_file(home / "runs" / "job" / "models" / "fedavg.safetensors")["fc.weight"]
    torch.testing.assert_close(weights, expected / 360, rtol=0, atol=1e-6)
    (warning,) = metrics(home)["warnings"]
    assert warning.startswith(
        "round 1: client-2: weight capped, because it states 1,000,000 images, "
    )
    start(
        {**config, "max-weight-ratio": 0.0},
        "off",
        tamper=states({0: [20], 1: [40], 2: [10**6]}, sent),
    )
    weights = load_file(home / "runs" / "off" / "models" / "fedavg.safetensors")["fc.weight"]
    torch.testing.assert_close(weights, sent[2]["fc.weight"], rtol=0, atol=1e-4)
    (warning,) = metrics(home, "off")["warnings"]
    assert warning.startswith("round 1: client-2: it states ")


@pytest.mark.slow
def test_honest_rounds_are_the_same_with_and_without_the_cap(home: Path, tiny_kit: Path) -> None:
    config = quick(**ROUNDS, kit=str(tiny_kit))
    for job, ratio in (("on", 10.0), ("off", 0.0)):
        start({**config, "max-weight-ratio": ratio}, job)
    state_on, state_off = (
        load_file(home / "runs" / job / "models" / "fedavg.safetensors") for job in ("on", "off")
    )
    assert all(torch.equal(state_on[name], state_off[name]) for name in state_on)
    assert metrics(home, "on")["warnings"] == []


@pytest.mark.slow
def test_a_mean_that_no_images_weigh_has_no_cap(home: Path, tiny_kit: Path) -> None:
    """FedDyn's: the count is named all the same."""
    sent: Sent = {}
    config = quick(**{**ROUNDS, "method": "feddyn"}, kit=str(tiny_kit))
    start(config, tamper=states({0: [20], 1: [40], 2: [10**6]}, sent))
    (warning,) = metrics(home)["warnings"]
    assert "capped" not in warning
    assert warning.startswith("round 1: client-2: it states ")


@pytest.mark.slow
def test_a_round_states_no_more_than_the_bound_or_the_join(home: Path, tiny_kit: Path) -> None:
    config = quick(**ROUNDS, kit=str(tiny_kit))
    many = states({0: [20], 1: [40], 2: [10**6 + 1]}, {})
    with pytest.raises(RoundError, match="client-2: 1,000,001 images are more than max-images"):
        start(config, "bound", tamper=many)
    excess = states({0: [20], 1: [40], 2: [5000]}, {}, declared=True)
    with pytest.raises(RoundError, match="client-2: 5,000 images .* declared when it joined"):
        start(config, "join", tamper=excess)


@pytest.mark.slow
def test_a_count_that_changes_between_rounds_is_named(home: Path, tiny_kit: Path) -> None:
    config = quick(**{**ROUNDS, "rounds__count": 3}, kit=str(tiny_kit))
    start(config, tamper=states({0: [20], 1: [40], 2: [30, 60]}, {}))
    (warning,) = metrics(home)["warnings"]
    assert warning == "round 2: client-2: states 60 images, but stated 30 before"


# ---- The test ----


@pytest.mark.slow
def test_test_images_are_bounded_and_a_client_that_dominates_is_named(
    home: Path, tiny_kit: Path
) -> None:
    def tests_on(images: int) -> Callable[[int, str, Message], Message | None]:
        def tamper(index: int, kind: str, reply: Message) -> Message | None:
            if index == 1 and kind == "evaluate":
                figures = dict(reply.content.metric_records["metrics"])
                figures["confusion"] = [images] + [0] * 99
                reply.content = RecordDict({"metrics": MetricRecord(figures)})
            return reply

        return tamper

    config = quick(method="prompts-only", kit=str(tiny_kit), num_clients=3)
    start(config, tamper=tests_on(10**6))
    (warning,) = metrics(home)["warnings"]
    assert warning.startswith("client-1: states 1,000,000 test images, ")
    start(config, "beyond", tamper=tests_on(10**6 + 1))
    assert sorted(metrics(home, "beyond")["accuracy"]["FT"]) == ["average", "client-0", "client-2"]


def test_a_ratio_below_one_is_refused() -> None:
    for ratio in (0.0, 1.0, 10.0):
        parse_run_config(quick(max_weight_ratio=ratio))
    with pytest.raises(ConfigError, match=r"max-weight-ratio = 0.5: must be at least 1, or 0"):
        parse_run_config(quick(max_weight_ratio=0.5))
