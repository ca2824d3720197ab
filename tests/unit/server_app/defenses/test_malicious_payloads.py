"""Payloads that end the server while it reads them, and payloads far from the others'."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pytest
import torch
from flwr.app import Message
from typer.testing import CliRunner

from osfl.cli.main import app as cli
from osfl.payload import wire
from osfl.payload.kinds import (
    Classifier,
    Descriptions,
    DomainVector,
    FeatureStatistics,
    Mixtures,
    Payload,
    Votes,
)
from osfl.payload.messages import COST_KEYS, pack_payload
from osfl.run_folder.layout import MAX_DECODING_CRASHES, RunFolder
from osfl.run_folder.status import split_details
from server_app.defenses.outliers import DEVIATIONS, FACTOR, FLOOR, Outlier, find_outliers
from server_app.federation import collect as collecting
from server_app.federation.exchange import RoundError
from tests.helpers.payload_examples import KINDS
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start

END = """
import os, sys
from pathlib import Path
from osfl.run_folder.layout import RunFolder

with RunFolder(Path(sys.argv[1])).decoding(sys.argv[2]):
    os.abort()
"""


def end_while_reading(folder: Path, client: str) -> None:
    """A process of its own, which dies as a fault in a library's C++ would let it die."""
    result = subprocess.run([sys.executable, "-c", END, folder, client], capture_output=True)
    assert result.returncode < 0, result.stderr


def asked(grid) -> list[int]:  # type: ignore[no-untyped-def]
    return [index for index, kind in grid.sent if kind == "train"]


@pytest.mark.slow
def test_a_payload_that_ended_the_server_is_not_read_again(
    home: Path, tiny_kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The payload is refused by name and its client asked once more. After a second time the run
    continues without it.
    """
    config = quick(method="prompts-domain", kit=str(tiny_kit), min_clients=1)
    start(config)
    payloads = home / "runs" / "job" / "payloads"
    assert not list(payloads.glob("*.decoding"))
    end_while_reading(payloads.parent, "client-1")
    assert (payloads / "client-1.decoding").exists()
    assert asked(start(config)) == [1]
    assert "payload of client-1: message: the server ended while it decoded this payload" in (
        caplog.text
    )
    assert (payloads / "client-1.pb").exists()
    assert not list(payloads.glob("*.decoding"))
    end_while_reading(payloads.parent, "client-1")
    assert asked(start(config)) == [1]
    assert (
        f"ended {MAX_DECODING_CRASHES} times while it decoded this client's payloads" in caplog.text
    )
    assert not (payloads / "client-1.pb").exists()
    assert (payloads / "client-1.pb.refused").exists()
    assert metrics(home)["server"]["synthetic_images"] == 10  # the run went on
    assert metrics(home)["warnings"] == []
    assert "<h2>Warnings</h2>" not in (payloads.parent / "report.html").read_text()
    with pytest.raises(RoundError, match="client-1: .*this job accepts no more of them"):
        start({**config, "min-clients": 2})


def test_a_payload_that_was_read_leaves_no_mark(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), folder.decoding("client-1"):
            raise error
        assert not list((tmp_path / "payloads").iterdir())


@pytest.mark.slow
def test_a_payload_beyond_memory_is_its_clients_failure(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a payload that is there when the server starts: it ended every start before."""
    config = quick(method="prompts-domain", kit=str(tiny_kit), min_clients=1)
    start(config)
    probe = collecting.check_plausible

    def no_memory(payload, client, config):  # type: ignore[no-untyped-def]
        if client == "client-1":
            raise MemoryError
        probe(payload, client, config)

    monkeypatch.setattr(collecting, "check_plausible", no_memory)
    assert asked(start(config)) == [1]
    status = json.loads((home / "runs" / "job" / "status.json").read_text())
    assert status["phase"] == "finished"
    assert status["clients"]["client-1"] == "refused"
    no_room = pytest.raises(
        wire.PayloadError, match="client-1: message: there is not enough memory"
    )
    with no_room, RunFolder(home / "other").decoding("client-1"):
        raise MemoryError


# ---- Payloads far from the others' ----

STATE = {
    "conv.weight": torch.ones(4, 3, 3, 3),
    "bn.running_mean": torch.zeros(4),
    "bn.num_batches_tracked": torch.tensor(10**6),
}


def scaled(payload: Payload, factor: float) -> Payload:
    """All its real numbers times a factor."""
    if isinstance(payload, Classifier):
        state = {
            name: value * factor if value.is_floating_point() else value
            for name, value in payload.state.items()
        }
        return replace(payload, state=state)
    values = {item.name: getattr(payload, item.name) for item in fields(payload)[1:]}
    real = {
        name: value * factor
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return replace(payload, **real)


def varied(payload: Payload, clients: int) -> dict[str, Payload]:
    """Equally many clients' payloads, whose norms differ by up to a third."""
    generator = torch.Generator().manual_seed(0)
    factors = 1 + torch.rand(clients, generator=generator) / 3
    return {f"client-{k}": scaled(payload, float(factor)) for k, factor in enumerate(factors)}


SENT = {name: payload for name, (payload, _) in KINDS.items()}
SENT["fedlmg"] = Classifier(("cat",), "resnet18", STATE)
SENT["feddeo"] = Descriptions(("cat",), torch.ones(1, 2, 3))


@pytest.mark.parametrize("method", sorted(SENT.keys() - {"fgl", "prompts-domain", "votes"}))
@pytest.mark.parametrize("factor", [1e6, 10.0, 0.01, 0.0])
def test_one_of_six_that_is_scaled_is_named(method: str, factor: float) -> None:
    honest = varied(SENT[method], 6)
    assert find_outliers(honest) == []
    poisoned = honest | {"client-3": scaled(SENT[method], factor)}
    (outlier,) = find_outliers(poisoned)
    assert outlier.client == "client-3"
    if factor:
        assert outlier.times == pytest.approx(factor / 1.16, rel=0.3)
    else:
        assert 0 < outlier.times <= FLOOR


def of_classes(seed: int, scale: float = 1.0) -> Descriptions:
    """Three classes, each with numbers of its own about what they share."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 + torch.randn(3, 4, 8, generator=generator)
    return Descriptions(("cat", "dog", "horse"), scale * rows)


def test_a_client_that_repeats_one_class_is_named() -> None:
    """The norm is like the others'; and a client that scales is named for its norm alone."""
    honest = {f"client-{k}": of_classes(k) for k in range(6)}
    assert find_outliers(honest) == []
    honest_payload = honest["client-2"]
    same = replace(honest_payload, vectors=honest_payload.vectors[:1].expand(3, 4, 8))
    (outlier,) = find_outliers(honest | {"client-2": same})
    assert (outlier.client, outlier.tensor, outlier.tensors) == ("client-2", "vectors", 1)
    # A spread is, by hand, the rows' distance from their mean as a share of the norm
    spreads = []
    for name, payload in honest.items():
        rows = payload.vectors
        middle = (rows[0] + rows[1] + rows[2]) / 3
        apart = sum((row - middle).square().sum() for row in rows) / rows.square().sum()
        if name != "client-2":
            spreads.append(float(apart) ** 0.5)
    assert outlier.times == pytest.approx(FLOOR / median(spreads))
    text, details = split_details(str(outlier))
    assert text.startswith("client-2: its classes are ")
    assert text.endswith("times more alike than the other clients' median")
    assert details.startswith("vectors has a spread over its classes of 0.0")
    (outlier,) = find_outliers(honest | {"client-2": of_classes(2, scale=100.0)})
    assert outlier.what == "norm"
    both = replace(same, vectors=100 * same.vectors)
    (outlier,) = find_outliers(honest | {"client-2": both})
    assert (outlier.what, outlier.tensors) == ("norm", 1)


def test_a_large_spread_is_no_outlier() -> None:
    """Rows of a client whose classes have one image each scatter more than means do."""
    honest = {f"client-{k}": of_classes(k) for k in range(6)}
    rows = honest["client-1"].vectors
    scattered = replace(honest["client-1"], vectors=rows - rows.mean())
    calm = {
        name: replace(payload, vectors=2 + 0.1 * (payload.vectors - 2))
        for name, payload in honest.items()
    }
    assert find_outliers(calm) == []
    assert find_outliers(calm | {"client-1": scattered}) == []


def test_values_near_zero_have_no_spread() -> None:
    """A head that began at zero and had few steps."""
    calm = {f"client-{k}": of_classes(k, scale=FLOOR / 4) for k in range(5)}
    flat = replace(of_classes(5), vectors=torch.full((3, 4, 8), FLOOR / 2))
    assert find_outliers(calm | {"client-5": flat}) == []
    large = {f"client-{k}": of_classes(k, scale=FLOOR) for k in range(5)}
    assert [
        outlier.client
        for outlier in find_outliers(large | {"client-5": replace(flat, vectors=flat.vectors * 4)})
    ] == ["client-5"]


def test_a_spread_is_of_classes_and_of_nothing_else() -> None:
    """A client with one class has none, nor have shares, or a vector for a whole domain."""
    honest = {f"client-{k}": of_classes(k) for k in range(6)}
    single = Descriptions(("cat",), of_classes(7).vectors[:1])
    assert find_outliers(honest | {"client-6": single}) == []
    vectors = {
        f"client-{k}": DomainVector(("cat", "dog"), of_classes(k).vectors[0]) for k in range(5)
    }
    flat = DomainVector(("cat", "dog"), vectors["client-0"].domain[:1].expand(4, 8))
    assert find_outliers(vectors | {"client-5": flat}) == []


def test_shares_may_be_equal_in_all_classes() -> None:
    """Two clusters each: one client's have a half everywhere, the others' differ by class."""
    uneven = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.3, 0.7]])
    even = torch.full((3, 2), 0.5)

    def mixtures(seed: int, weights: torch.Tensor) -> Mixtures:
        conditions = of_classes(seed).vectors[:, None].expand(3, 2, 4, 8)
        return Mixtures(("cat", "dog", "horse"), conditions, weights)

    honest = {f"client-{k}": mixtures(k, uneven) for k in range(5)}
    assert find_outliers(honest | {"client-5": mixtures(5, even)}) == []


def test_a_spread_of_sums_is_that_of_the_classes_means() -> None:
    """The same rows, of four images each and of very different counts; and one row for all."""
    even = torch.tensor([4, 4, 4])
    uneven = torch.tensor([1, 20, 400])

    def statistics(seed: int, counts: torch.Tensor, same: bool = False) -> FeatureStatistics:
        rows = of_classes(seed).vectors[:, 0]
        means = rows[:1].expand(3, 8) if same else rows
        sums = means * counts[:, None]
        # Whose norm is of no interest here
        return FeatureStatistics(("cat", "dog", "horse"), counts, sums, torch.ones(36))

    uneven_ones = {f"client-{k}": statistics(k, uneven) for k in range(5)}
    assert find_outliers(uneven_ones | {"client-5": statistics(5, uneven)}) == []
    (outlier,) = find_outliers(uneven_ones | {"client-5": statistics(5, uneven, same=True)})
    assert (outlier.client, outlier.what) == ("client-5", "spread over its classes")
    even_ones = {f"client-{k}": statistics(k, even) for k in range(5)}
    assert find_outliers(even_ones) == []


def test_a_classifiers_spread_is_its_heads() -> None:
    """One whose head has the same row for every class; another layer may have such."""

    def classifier(seed: int, head: bool = True, body: bool = True) -> Classifier:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(3, 16, generator=generator)
        layer = torch.randn(4, 9, generator=generator)
        state = {
            "layer.weight": layer if body else layer[:1].expand(4, 9).clone(),
            "fc.weight": rows if head else rows[:1].expand(3, 16).clone(),
            "fc.bias": torch.zeros(3),
        }
        return Classifier(("cat", "dog", "horse"), "resnet18", state)

    honest = {f"client-{k}": classifier(k) for k in range(5)}
    assert find_outliers(honest | {"client-5": classifier(5, body=False)}) == []
    (outlier,) = find_outliers(honest | {"client-5": classifier(5, head=False)})
    assert (outlier.client, outlier.tensor) == ("client-5", "fc.weight")
    assert outlier.what == "spread over its classes"


def test_only_two_of_six_clients_are_named() -> None:
    honest = varied(SENT["feddeo"], 6)
    bad = {name: scaled(honest[name], 1e6) for name in ("client-2", "client-4")}
    assert [outlier.client for outlier in find_outliers(honest | bad)] == ["client-2", "client-4"]


@pytest.mark.parametrize("method", ["fgl", "prompts-domain", "votes"])
def test_texts_and_votes_have_no_norm(method: str) -> None:
    assert find_outliers({f"client-{k}": SENT[method] for k in range(3)}) == []
    same = Votes(("cat", "dog"), torch.tensor([3, 3], dtype=torch.uint8))
    other_votes = Votes(("cat", "dog"), torch.tensor([0, 9], dtype=torch.uint8))
    assert find_outliers({"client-0": same, "client-1": other_votes, "client-2": other_votes}) == []


def test_one_tensor_of_many_is_named() -> None:
    honest = varied(SENT["fedlmg"], 4)
    state = {**STATE, "conv.weight": 100 * STATE["conv.weight"]}
    (outlier,) = find_outliers(honest | {"client-0": replace(SENT["fedlmg"], state=state)})
    assert (outlier.tensor, outlier.tensors) == ("conv.weight", 1)
    text, details = split_details(str(outlier))
    factor = r"\d\d(\.\d)? times"
    assert re.fullmatch(
        rf"client-0: part of its payload is {factor} larger than the other clients' median", text
    )
    assert re.fullmatch(rf"conv.weight has a norm of {factor} the median", details)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_the_farthest_tensor_is_named_and_the_others_counted(factor: float) -> None:
    honest = varied(SENT["espresso"], 6)
    base = scaled(SENT["espresso"], factor)
    far = replace(base, component_means=factor**3 * base.component_means)  # type: ignore[union-attr]
    (outlier,) = find_outliers(honest | {"client-5": far})
    assert (outlier.tensor, outlier.tensors) == ("component_means", 5)
    text, details = split_details(str(outlier))
    assert ("larger" if factor > 1 else "smaller") in text
    assert details.endswith("median, and 4 more of its tensors are outliers")


def test_classifiers_are_compared_with_those_of_their_architecture() -> None:
    payloads = varied(SENT["fedlmg"], 3)
    vgg = Classifier(("cat",), "vgg16", scaled(SENT["fedlmg"], 1e3).state)  # type: ignore[union-attr]
    assert find_outliers(payloads | {"client-3": vgg, "client-4": vgg}) == []
    assert [
        o.client for o in find_outliers(payloads | {"client-1": scaled(payloads["client-1"], 1e3)})
    ] == ["client-1"]


def test_classes_held_do_not_count() -> None:
    """Descriptions of ten classes have a norm that is three times that of one; not in the mean."""
    vectors = torch.ones(100, 2, 3)
    sent = {f"client-{k}": Descriptions(("cat",), vectors[: 1 + 99 * (k == 2)]) for k in range(5)}
    assert find_outliers(sent) == []


def test_two_clients_are_compared_with_each_other_and_a_single_one_is_not() -> None:
    pair = varied(SENT["feddeo"], 2)
    assert find_outliers(pair) == []
    far = find_outliers(pair | {"client-1": scaled(SENT["feddeo"], 1e6)})
    assert [outlier.client for outlier in far] == ["client-0", "client-1"]
    assert far[0].times * far[1].times == pytest.approx(1.0)
    assert find_outliers({"client-0": SENT["feddeo"]}) == []


def norms_of(*norms: float) -> Mapping[str, Payload]:
    return {
        f"client-{k}": Descriptions(("cat",), torch.full((1, 2, 3), norm))
        for k, norm in enumerate(norms)
    }


def test_the_rule_by_hand() -> None:
    """Beyond FACTOR times the others' median, and beyond DEVIATIONS of their MAD, in logarithms."""
    assert FACTOR == DEVIATIONS == 5
    close = (1.0, 1.0, 1.0, 1.0)
    assert find_outliers(norms_of(*close, 4.9)) == []
    (outlier,) = find_outliers(norms_of(*close, 5.1))
    assert outlier == Outlier("client-4", "vectors", pytest.approx(5.1), 1)
    assert find_outliers(norms_of(*[1e-4] * 4, 0.04)) == []  # nearly zero, all of them
    # ln of 1/2, 1/2, 2, 2: the median is 0, the MAD ln 2; 5 * 1.4826 of it is a factor of 170
    wide = (0.5, 0.5, 2.0, 2.0)
    assert find_outliers(norms_of(*wide, 160.0)) == []
    assert [o.client for o in find_outliers(norms_of(*wide, 180.0))] == ["client-4"]


@pytest.mark.slow
def test_a_run_with_a_poisoned_payload_says_so_and_goes_on(
    home: Path, tiny_kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log, status, report and `osfl show` name the client.

    Descriptions of honest ones are not named.
    """
    config = quick(method="feddeo", kit=str(tiny_kit), num_clients=3)

    def poison(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            payload = Descriptions(("zero",), torch.full((1, 8, 32), 1e5))
            blob = wire.encode(payload, "feddeo", "bad", "client-1")
            reply.content = pack_payload(blob, dict.fromkeys(COST_KEYS, 1.0))
        return reply

    start(config, "bad", tamper=poison)
    (warning,) = metrics(home, "bad")["warnings"]
    text, details = split_details(warning)
    assert text.startswith("client-1: part of its payload is ")
    assert details.startswith("vectors has a norm of ")
    status = json.loads((home / "runs" / "bad" / "status.json").read_text())
    assert status["warnings"] == [warning]
    assert warning in caplog.text
    assert status["clients"]["client-1"].startswith("delivered")
    page = (home / "runs" / "bad" / "report.html").read_text()
    assert "<h2>Warnings</h2>" in page
    folded = f"<details><summary>details</summary>{details}</details>"
    assert text.replace("'", "&#39;") + folded in page
    shown = CliRunner().invoke(cli, ["show", str(home / "runs" / "bad")]).output
    shown = " ".join(shown.split())
    assert "warning: client-1: part of its payload is" in shown
    assert "vectors" not in shown
