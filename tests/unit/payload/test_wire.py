"""The wire format: what goes in comes out, and nothing else comes out."""

import math
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from osfl.payload import wire
from osfl.payload.kinds import (
    Captions,
    Classifier,
    Descriptions,
    FeatureStatistics,
    Payload,
)
from osfl.payload.messages import COST_KEYS, pack_payload, unpack_payload
from osfl.payload.v1 import payload_pb2 as pb
from tests.helpers.payload_examples import (
    CLASSES,
    CLASSIFIER,
    DESCRIPTIONS,
    KINDS,
    STATE,
    blob,
    descriptions,
    expected_of,
)
from tests.helpers.peak_memory import peak_of
from tests.helpers.settings import ROOT

finite = st.floats(-(2.0**19), 2.0**19, width=32, allow_subnormal=False)


@given(
    held=st.sets(st.sampled_from(CLASSES), min_size=1),
    data=st.data(),
)
def test_descriptions_round_trip(held: set[str], data: st.DataObject) -> None:
    classes = tuple(c for c in CLASSES if c in held)
    vectors = torch.from_numpy(
        data.draw(npst.arrays("float32", (len(classes), 2, 3), elements=finite))
    )
    encoded = wire.encode(Descriptions(classes, vectors), "feddeo", "job-1", "client-0")
    back = wire.decode(encoded, DESCRIPTIONS, wire.digest(encoded))
    assert isinstance(back, Descriptions)
    assert back.classes == classes
    assert torch.equal(back.vectors, vectors)
    assert wire.encode(back, "feddeo", "job-1", "client-0") == encoded


@given(npst.arrays("float32", (2, 2), elements=finite), st.integers(0, 2**62))
def test_classifier_round_trip(weight, batches: int) -> None:  # type: ignore[no-untyped-def]
    state = {
        **STATE,
        "conv.weight": torch.from_numpy(weight),
        "bn.num_batches_tracked": torch.tensor(batches),
    }
    back = wire.decode(blob(Classifier(("dog",), "resnet18", state), CLASSIFIER), CLASSIFIER)
    assert isinstance(back, Classifier)
    assert list(back.state) == list(STATE)
    assert all(torch.equal(back.state[name], state[name]) for name in STATE)


@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes_are_refused_or_still_valid(data: st.DataObject) -> None:
    """Whatever happens to the bytes, decoding gives a checked payload or a PayloadError, and never
    anything else.
    """
    original = blob(Classifier(("dog",), "resnet18", STATE), CLASSIFIER)
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        at = data.draw(st.integers(0, max(len(mutated) - 1, 0)))
        if kind == "flip" and mutated:
            mutated[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del mutated[at : at + data.draw(st.integers(1, 20))]
        else:
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        payload = wire.decode(bytes(mutated), CLASSIFIER)
    except wire.PayloadError as error:
        assert error.client == "client-0"
    else:
        assert isinstance(payload, Classifier)
        assert list(payload.state) == list(STATE)
        assert all(torch.isfinite(t).all() for t in payload.state.values())
        assert (payload.state["bn.running_var"] >= 0).all()
    if bytes(mutated) != original:
        with pytest.raises(wire.PayloadError, match="client-0"):
            wire.decode(bytes(mutated), CLASSIFIER, wire.digest(original))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(wire.PayloadError):
        wire.decode(noise, DESCRIPTIONS)


def message(**changes) -> pb.Payload:  # type: ignore[no-untyped-def]
    payload = pb.Payload.FromString(blob())
    for name, value in changes.items():
        if name == "classes":
            del payload.classes[:]
            payload.classes.extend(value)
        else:
            setattr(payload, name, value)
    return payload


def refused(
    made: pb.Payload | bytes, expected: wire.Expected = DESCRIPTIONS, **kwargs
) -> wire.PayloadError:  # type: ignore[no-untyped-def]
    data = made if isinstance(made, bytes) else made.SerializeToString()
    with pytest.raises(wire.PayloadError) as caught:
        wire.decode(data, expected, **kwargs)
    assert "client-0" in str(caught.value)
    assert caught.value.field in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"method": "magic"}, "method"),
        ({"job": "job-2"}, "job"),
        ({"client": "client-1"}, "client"),
        ({"classes": []}, "classes"),
        ({"classes": ["emu", "cat"]}, "classes"),
        ({"classes": ["cat", "cat"]}, "classes"),
        ({"classes": ["cat", "yak"]}, "classes"),
        ({"classes": ["cat"]}, "vectors"),
    ],
)
def test_wrong_header_fields_are_named(changes: dict, field: str) -> None:
    assert refused(message(**changes)).field == field


def test_wrong_size_digest_and_truncation_are_named() -> None:
    assert refused(blob(), replace(DESCRIPTIONS, max_bytes=10)).field == "size"
    assert refused(blob(), sha256="0" * 64).field == "sha256"
    assert refused(blob()[:-3]).field == "message"
    assert refused(blob() + b"\xf8\x07\x01").field == "message"  # field 127 is unknown


def test_wrong_body_is_named() -> None:
    payload = pb.Payload.FromString(
        blob(Classifier(("cat",), "resnet18", STATE), replace(CLASSIFIER, method="feddeo"))
    )
    assert refused(payload).field == "body"


def tensor_of(made: pb.Payload) -> pb.Tensor:
    return made.descriptions.vectors


def test_wrong_tensors_are_named() -> None:
    payload = message()
    tensor_of(payload).shape[1] = 5
    assert refused(payload).field == "vectors"
    payload = message()
    tensor_of(payload).dtype = pb.DTYPE_INT64
    assert "dtype" in str(refused(payload))
    payload = message()
    tensor_of(payload).codec = pb.CODEC_UNSPECIFIED
    assert "codec" in str(refused(payload))
    payload = message()
    tensor_of(payload).data = tensor_of(payload).data[:-4]
    assert "bytes" in str(refused(payload))
    payload = message()
    tensor_of(payload).shape[0] = 2**60
    assert refused(payload).field == "vectors"


def test_unknown_fields_inside_a_tensor_are_refused() -> None:
    payload = message()
    hidden = tensor_of(payload).SerializeToString() + b"\xf8\x07\x01"
    payload.descriptions.vectors.ParseFromString(hidden)
    assert "does not know" in str(refused(payload))


def test_a_payload_beyond_what_the_run_can_have_is_refused_before_it_is_parsed() -> None:
    payload = message()
    tensor_of(payload).shape.extend([1] * 200_000)
    assert refused(payload, replace(DESCRIPTIONS, max_bytes=10**9)).field == "size"


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_absurd_numbers_are_refused(value: float) -> None:
    bad = descriptions()
    bad.vectors[0, 0, 0] = value
    assert "beyond" in str(refused(blob(bad)))


@pytest.mark.parametrize("size", [0, 1, 10, 11, 30])
def test_a_reply_is_read_part_by_part_and_has_no_other_owner(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of ten bytes.

    What was read is gone from the message: a payload of 500 MB would stay as long as its reply.
    """
    monkeypatch.setattr("osfl.payload.messages.PART_BYTES", 10)
    payload = bytes(range(size))
    content = pack_payload(payload, dict.fromkeys(COST_KEYS, 1.0))
    assert len(content["payload"]) == max(1, math.ceil(size / 10))
    record = weakref.ref(content["payload"])
    assert unpack_payload(content, DESCRIPTIONS)[0] == payload
    assert record() is None


def test_a_payload_that_is_too_large_is_not_even_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "osfl.payload.messages.unpack_bytes", lambda record: pytest.fail("it was copied")
    )
    content = pack_payload(bytes(10**6), dict.fromkeys(COST_KEYS, 1.0))
    with pytest.raises(wire.PayloadError, match="client-0: size: 1,000,000 bytes"):
        unpack_payload(content, DESCRIPTIONS)


def test_a_reply_in_other_parts_is_refused() -> None:
    content = pack_payload(b"x", dict.fromkeys(COST_KEYS, 1.0))
    content["payload"] = ArrayRecord({"0001": content["payload"]["0000"]})
    with pytest.raises(wire.PayloadError, match="client-0: reply: '0000' is missing"):
        unpack_payload(content, DESCRIPTIONS)


@pytest.mark.parametrize("key", COST_KEYS)
@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0, 1e308, 2.0**100])
def test_costs_that_cannot_be_true_are_named(key: str, cost: float) -> None:
    costs = dict.fromkeys(COST_KEYS, 1.0)
    with pytest.raises(wire.PayloadError, match=f"client-0: costs: {key} = .* cannot be true"):
        unpack_payload(pack_payload(b"x", {**costs, key: cost}), DESCRIPTIONS)


def test_the_costs_of_real_work_are_taken() -> None:
    """Stable Diffusion's training by a node of many GPUs, for a year; and nothing at all."""
    large = {"seconds": 3e7, "flops": 1e23, "peak_memory_mb": 1e7, "images": 1e8, "resent": 1.0}
    large |= {"epsilon": 20.0, "delta": 0.01}
    for costs in (large, dict.fromkeys(COST_KEYS, 0.0)):
        assert unpack_payload(pack_payload(b"x", costs), DESCRIPTIONS)[2] == costs
    with pytest.raises(wire.PayloadError, match="images = 0.5: must be a whole number"):
        unpack_payload(pack_payload(b"x", {**large, "images": 0.5}), DESCRIPTIONS)


def test_costs_may_be_missing_with_a_guarantee_alone() -> None:
    private = {"resent": 0.0, "epsilon": 1.0, "delta": 1e-5}
    assert unpack_payload(pack_payload(b"x", private), DESCRIPTIONS)[2] == private
    with pytest.raises(wire.PayloadError, match="'seconds' is missing"):
        unpack_payload(pack_payload(b"x", {**private, "epsilon": 0.0}), DESCRIPTIONS)
    with pytest.raises(wire.PayloadError, match="'delta' is missing"):
        unpack_payload(pack_payload(b"x", {"resent": 0.0, "epsilon": 1.0}), DESCRIPTIONS)


@pytest.mark.parametrize(
    ("name", "row", "most"),
    [
        # Two images of the first class, three of the second
        ("sums", 0, 2e6),
        ("squares", 1, 3e6),
    ],
)
def test_a_sum_may_be_as_large_as_its_images_allow(name: str, row: int, most: float) -> None:
    statistics, tensors = KINDS["latent-gaussian"]
    expected = wire.Expected("latent-gaussian", "job-1", "client-0", CLASSES, 10_000, tensors)

    def with_largest(value: float) -> bytes:
        changed = getattr(statistics, name).clone()
        changed[row, 0, 1, 0] = -value if name == "sums" else value
        return blob(replace(statistics, **{name: changed}), expected)

    wire.decode(with_largest(most), expected)
    with pytest.raises(wire.PayloadError, match=f"{name}: .*whose mean, .* is beyond 1e6"):
        wire.decode(with_largest(1.001 * most), expected)


def test_moments_may_be_as_large_as_all_images_allow() -> None:
    """One triangle for all classes, of five images."""
    tensors = {
        "counts": (("classes",), torch.int64),
        "sums": (("classes", 2), torch.float32),
        "triangle": ((3,), torch.float32),
    }
    expected = wire.Expected("fedcgs", "job-1", "client-0", CLASSES, 10_000, tensors)

    def with_largest(value: float) -> bytes:
        triangle = torch.tensor([value, 0.0, 1.0])
        counts = torch.tensor([2, 3])
        statistics = FeatureStatistics(("cat", "emu"), counts, torch.ones(2, 2), triangle)
        return blob(statistics, expected)

    wire.decode(with_largest(5e6), expected)
    with pytest.raises(wire.PayloadError, match="triangle: .*whose mean, .* is beyond 1e6"):
        wire.decode(with_largest(5.001e6), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_named(value: float) -> None:
    bad = descriptions()
    bad.vectors[1, 0, 2] = value
    assert "NaN" in str(refused(blob(bad)))


def test_a_state_dict_must_be_exactly_the_architectures() -> None:
    def encoded(state: dict[str, torch.Tensor], architecture: str = "resnet18") -> bytes:
        return blob(Classifier(("cat",), architecture, state), CLASSIFIER)

    assert refused(encoded(STATE, "vit_h_14"), CLASSIFIER).field == "architecture"
    assert "missing" in str(
        refused(encoded({k: v for k, v in STATE.items() if k != "conv.weight"}), CLASSIFIER)
    )
    assert "not expected" in str(refused(encoded({**STATE, "extra": torch.zeros(1)}), CLASSIFIER))
    assert (
        refused(encoded({**STATE, "bn.running_var": torch.tensor([-1.0, 1.0])}), CLASSIFIER).field
        == "bn.running_var"
    )
    payload = pb.Payload.FromString(encoded(STATE))
    payload.classifier.state.append(payload.classifier.state[0])
    assert "twice" in str(refused(payload, CLASSIFIER))


def test_sizes_on_the_wire() -> None:
    """All but the numbers and the class names is below 256 bytes.

    FedDEO at Stable Diffusion's shapes is 3.548 M numbers for 60 classes.
    """
    classes = tuple(f"class-{i:02d}" for i in range(60))
    payload = Descriptions(classes, torch.randn(60, 77, 768))
    assert payload.vectors.numel() == 3_548_160
    size = len(wire.encode(payload, "feddeo", "job-1", "client-0"))
    assert size - 4 * 3_548_160 - sum(len(c) + 2 for c in classes) < 256


def test_generated_code_is_up_to_date(tmp_path) -> None:  # type: ignore[no-untyped-def]
    protoc = pytest.importorskip(
        "grpc_tools", reason="grpcio-tools is not installed (pip install -e '.[dev]')"
    )
    assert protoc
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'proto'}",
        f"--python_out={tmp_path}",
        "osfl/payload/v1/payload.proto",
    ]
    subprocess.run(command, check=True)
    assert (tmp_path / "osfl/payload/v1/payload_pb2.py").read_text() == (
        ROOT / "osfl/payload/v1/payload_pb2.py"
    ).read_text(), "run `make proto`"


# ---- Every other kind of payload ----


def same(one: Payload, other: Payload) -> bool:
    return type(one) is type(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@pytest.mark.parametrize("method", KINDS)
# As protobuf itself would write it
def test_every_kind_round_trips(method: str) -> None:
    payload = KINDS[method][0]
    encoded = blob(payload, expected_of(method))
    back = wire.decode(encoded, expected_of(method), wire.digest(encoded))
    assert same(back, payload)
    assert blob(back, expected_of(method)) == encoded
    assert pb.Payload.FromString(encoded).SerializeToString(deterministic=True) == encoded


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_a_large_payload_is_held_no_more_than_three_times(tmp_path: Path) -> None:
    """One tensor is three quarters of it, like in a VGG-16. On a client the payload itself is one
    copy, on the server the serialized bytes.
    """
    state = {
        "fc.weight": torch.ones(150 * 250_000),
        **{f"conv{k}.weight": torch.ones(10 * 250_000) for k in range(5)},
    }
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    expected = replace(CLASSIFIER, architectures={"resnet18": shapes}, max_bytes=300_000_000)
    payload = Classifier(("dog",), "resnet18", state)
    file = tmp_path / "payload.pb"
    size = sum(value.nbytes for value in state.values())
    assert peak_of(lambda: file.write_bytes(blob(payload, expected))) < 1.2 * size
    assert (
        peak_of(lambda: wire.decode(file.read_bytes(), expected, wire.digest(file.read_bytes())))
        < 3 * size
    )


def test_a_classifier_of_many_tensors_with_long_names_fits_its_bound() -> None:
    """The names are longer than all that the bound leaves for lengths and tags (64 KiB)."""
    state = {f"{number:03}{'x' * 97}": torch.tensor(1.0) for number in range(800)}
    shapes = dict.fromkeys(state, ((), torch.float32))
    expected = replace(CLASSIFIER, architectures={"resnet18": shapes}, max_bytes=10**9)
    back = wire.decode(blob(Classifier(("dog",), "resnet18", state), expected), expected)
    assert isinstance(back, Classifier)
    assert list(back.state) == list(state)


def test_as_many_and_as_long_captions_as_may_be_fit_their_bound() -> None:
    """Three bytes a character, and what a text's tag and length need, beyond 64 KiB together."""
    expected = replace(expected_of("fgl"), max_bytes=10**9, max_images=7_000)
    texts = ("\uac00" * wire.MAX_TEXT,) * 7_000
    encoding = blob(Captions(("cat",), (texts,)), expected)
    assert 7_000 * (3 * wire.MAX_TEXT + 3) < len(encoding) < 7_000 * (3 * wire.MAX_TEXT + 8)
    assert wire.decode(encoding, expected) == Captions(("cat",), (texts,))


@pytest.mark.parametrize("method", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_mutations_of_every_kind_are_refused_or_still_valid(
    method: str, data: st.DataObject
) -> None:
    mutated = bytearray(blob(KINDS[method][0], expected_of(method)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] ^= data.draw(st.integers(1, 255))
    try:
        payload = wire.decode(bytes(mutated), expected_of(method))
    except wire.PayloadError as error:
        assert error.client == "client-0"
    else:
        assert type(payload) is type(KINDS[method][0])
        assert all(
            torch.isfinite(v).all() for v in vars(payload).values() if isinstance(v, torch.Tensor)
        )


def with_field(method: str, **changes) -> bytes:  # type: ignore[no-untyped-def]
    return blob(replace(KINDS[method][0], **changes), expected_of(method))


@pytest.mark.parametrize(
    ("method", "changes", "field"),
    [
        ("espresso", {"weights": torch.tensor([[0.5, 0.6]])}, "weights"),
        ("espresso", {"weights": torch.tensor([[-0.5, 1.5]])}, "weights"),
        ("espresso", {"component_weights": torch.tensor([[0.0, 0.0]])}, "component_weights"),
        ("espresso", {"component_variances": -torch.ones(1, 2, 1, 2, 2)}, "component_variances"),
        (
            "espresso",
            {"component_means": torch.full((1, 2, 1, 2, 2), float("nan"))},
            "component_means",
        ),
        ("espresso", {"component_means": None}, "component_means"),
        ("espresso", {"conditions": torch.ones(1, 3, 2, 3)}, "conditions"),
        ("fedld", {"weights": torch.tensor([0.5, 0.6])}, "weights"),
        ("fedld", {"weights": torch.tensor([-0.5, 1.5])}, "weights"),
        ("fedld", {"weights": torch.tensor([[0.5, 0.5]])}, "weights"),
        ("fedld", {"variances": -torch.ones(2, 1, 2, 2)}, "variances"),
        ("latent-gaussian", {"counts": torch.tensor([0, 1])}, "counts"),
        ("latent-gaussian", {"squares": torch.ones(2, 1, 2, 3)}, "squares"),
        ("fedbip", {"labels": torch.tensor([0, 1, 2])}, "labels"),
        ("fedbip", {"labels": torch.tensor([0, 0, 0])}, "labels"),
        ("fedbip", {"labels": torch.tensor([0, 2])}, "means"),
        ("fedbip", {"labels": torch.tensor([0, 2, 2, 2, 2, 2])}, "labels"),
        ("fedbip", {"labels": torch.zeros(0, dtype=torch.int64)}, "means"),
        ("fedbip", {"deviations": -torch.ones(3, 1, 2, 2)}, "deviations"),
        ("fgl", {"texts": (("a cat",),)}, "texts"),
        ("fgl", {"texts": (("a cat",), ())}, "texts"),
        ("fgl", {"texts": (("a cat",), ("x" * 301,))}, "texts"),
        ("fgl", {"texts": (("a cat",), ("an\nemu",))}, "texts"),
        ("fgl", {"texts": (("a cat",) * 5, ("an emu",))}, "text"),
        ("fgl", {"texts": (("a cat",), ("an emu \U0001f426",))}, "texts"),
        ("prompts-domain", {"name": "a\x1b[31m"}, "name"),
        ("prompts-domain", {"name": ""}, "name"),
        ("prompts-domain", {"name": "  "}, "name"),
        ("feddisc", {"vectors": torch.ones(2, 5, 4)}, "vectors"),
        ("oscar-pooled", {"vectors": torch.ones(1, 2, 3)}, "vectors"),
    ],
)
def test_an_impossible_value_of_a_kind_is_named(method: str, changes: dict, field: str) -> None:
    assert refused(with_field(method, **changes), expected_of(method)).field == field


def test_a_mixture_that_was_not_asked_for_is_refused() -> None:
    only = {
        name: want
        for name, want in KINDS["espresso"][1].items()
        if not name.startswith("component")
    }
    data = blob(KINDS["espresso"][0], expected_of("espresso"))
    assert refused(data, expected_of("espresso", tensors=only)).field == "component_weights"
    without = replace(
        KINDS["espresso"][0], component_weights=None, component_means=None, component_variances=None
    )
    assert same(
        wire.decode(blob(without, expected_of("espresso")), expected_of("espresso", tensors=only)),
        without,
    )


def test_a_body_of_another_kind_is_refused() -> None:
    data = wire.encode(KINDS["oscar"][0], "feddeo", "job-1", "client-0")  # the tensors would fit
    assert refused(data, DESCRIPTIONS).field == "body"
