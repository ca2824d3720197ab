"""Numbers in fewer bytes: what each codec gives back, and what is refused."""

import tracemalloc
import zlib
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.payload import wire
from osfl.payload.codecs import BLOCK, MAX_LEVEL, NUMBERS_PER_PART, pack, packed_size, unpack
from osfl.payload.fields import fields_of
from osfl.payload.kinds import (
    Classifier,
    Descriptions,
    DomainVector,
    FeatureMixtures,
    FeatureStatistics,
    Payload,
    Votes,
)
from osfl.payload.v1 import payload_pb2 as pb
from osfl.util.markers import OneOf, markers_of
from tests.helpers.payload_examples import CLASSES, CLASSIFIER, KINDS, STATE, expected_of
from tests.helpers.settings import quick

CODECS = ("raw", "float16", "int8", "int4")
EXPECTED = wire.Expected(
    "feddeo", "job", "a", CLASSES, 10_000, {"vectors": (("classes", 1, 100), torch.float32)}
)


def there_and_back(numbers: list[float], codec: str) -> list[float]:
    data = pack(np.array(numbers, "<f4"), codec)
    values: list[float] = unpack(data.tobytes(), len(numbers), codec).tolist()
    return values


def test_eight_bits_are_steps_of_the_largest_over_127() -> None:
    """63.5 / 127 = 0.5: -10.2 is 20.4 steps, 0.3 is 0.6 of one, 0.2 is 0.4 of one."""
    assert there_and_back([63.5, -10.2, 0.3, 0.2], "int8") == [63.5, -10.0, 0.5, 0.0]
    data = pack(np.array([63.5, -10.2, 0.3], "<f4"), "int8")
    # 0.5 in float16, then 127, -20 and 1
    assert data.tobytes() == bytes.fromhex("0038 7f ec 01")


def test_four_bits_are_steps_of_the_largest_over_7_two_in_a_byte() -> None:
    """-7 / 7 = 1 in size; -3.4 is -3 steps, 2.6 is 3, 0.4 is none. The fifth number is alone."""
    numbers = [-7.0, -3.4, 2.6, 0.4, 5.0]
    assert there_and_back(numbers, "int4") == [-7.0, -3.0, 3.0, 0.0, 5.0]
    data = pack(np.array(numbers, "<f4"), "int4")
    # 1 in float16; -7 is 9 and -3 is 13 in four bits; the first of two is in the lower half
    assert data.tobytes() == bytes.fromhex("003c d9 03 05")


def test_numbers_are_steps_of_the_scale_as_it_is_sent() -> None:
    """100 / 127 is 0.78740, and 1613 / 2048 = 0.78760 in float16: 99.6142 is 126.51 of the first
    and 126.48 of the second.
    """
    step = 1613 / 2048
    assert there_and_back([100.0, 99.6142], "int8") == pytest.approx([127 * step, 126 * step])


def test_a_number_too_small_for_a_scale_keeps_its_sign() -> None:
    """1.4 times float16's smallest number is sent as that number: 178 steps, of 127."""
    smallest = 2.0**-24
    largest = 127 * 1.4 * smallest
    values = there_and_back([largest, -largest], "int8")
    assert values == pytest.approx([127 * smallest, -127 * smallest])
    assert there_and_back([smallest, 0.0], "int8") == [0.0, 0.0]


def test_a_block_has_a_scale_of_its_own() -> None:
    """A large number spoils its own 64 numbers, and no others."""
    numbers = [0.7] * 63 + [7.0] + [0.7] * 64
    values = there_and_back(numbers, "int4")
    assert values[:64] == [1.0] * 63 + [7.0]
    assert values[64:] == pytest.approx([0.7] * 64, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "name", "codec"),
    [
        (Descriptions, "vectors", "int8"),
        (FeatureStatistics, "sums", "int8"),
        # Steps of int8 would round small variances to 0
        (FeatureMixtures, "variances", "float16"),
        (FeatureMixtures, "weights", "raw"),
    ],
)
def test_a_tensors_values_decide_its_codec(kind: type, name: str, codec: str) -> None:
    declared = fields_of(kind)[name]
    assert wire.codec_of("int8", ("classes", 8), torch.float32, declared) == codec
    assert wire.codec_of("raw", ("classes", 8), torch.float32, declared) == "raw"


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_sizes_are_the_documented_ones(codec: str) -> None:
    """Evenly spread numbers, each value as often as any other: deflating saves next to nothing."""
    numbers = np.random.default_rng(0).uniform(-1, 1, 3 * NUMBERS_PER_PART).astype("<f4")
    bits = {"raw": 32, "float16": 16, "int8": 8, "int4": 4}[codec]
    for count in (
        0,
        1,
        2,
        63,
        64,
        65,
        127,
        128,
        129,
        NUMBERS_PER_PART - 1,
        NUMBERS_PER_PART,
        NUMBERS_PER_PART + 1,
        2 * NUMBERS_PER_PART + 67,
    ):
        scales = 0 if codec in ("raw", "float16") else 2 * -(-count // 64)
        data = pack(numbers[:count], codec)
        assert packed_size(count, codec) == scales + -(-count * bits // 8)
        # Nothing, or a hundredth of many
        assert 0 <= packed_size(count, codec) - len(data) <= count // 50
        values = unpack(data.tobytes(), count, codec)
        assert values == pytest.approx(numbers[:count], abs=0.08)


@given(
    npst.arrays("float32", st.integers(1, 200), elements=st.floats(-1e5, 1e5, width=32)),
    st.sampled_from(sorted(MAX_LEVEL)),
)
def test_a_number_is_off_by_half_a_step_at_most(numbers: np.ndarray, codec: str) -> None:
    """And by a thousandth of the largest, for the scale is rounded itself, and for the smallest."""
    back = unpack(pack(numbers, codec).tobytes(), len(numbers), codec)
    for first in range(0, len(numbers), BLOCK):
        block = numbers[first : first + BLOCK]
        largest = float(np.abs(block).max())
        bound = largest * (0.5 / MAX_LEVEL[codec] + 1e-3) + 1e-6 * MAX_LEVEL[codec]
        assert np.abs(back[first : first + BLOCK] - block).max() <= bound


@pytest.mark.parametrize("codec", sorted(MAX_LEVEL))
def test_repetitions_are_deflated(codec: str) -> None:
    """1,024 equal numbers: 16 scales and 1,024 equal values are 18 to 24 bytes."""
    numbers = np.full(1024, 7.0, "<f4")
    data = pack(numbers, codec)
    assert len(data) < 30
    assert zlib.decompress(data) == (
        np.full(16, 7 / MAX_LEVEL[codec], "<f2").tobytes()
        + (b"\x7f" * 1024 if codec == "int8" else b"\x77" * 512)
    )
    assert unpack(data.tobytes(), 1024, codec) == pytest.approx(numbers, rel=1e-3)


@pytest.mark.slow
def test_a_bomb_is_not_inflated() -> None:
    """A gigabyte of zeros in a megabyte of bytes, where 2 MB of numbers are asked for."""
    bomb = zlib.compress(bytes(10**9), level=1)
    assert len(bomb) > 10**6
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"do not inflate to 8,250,000, which its shape needs"):
        unpack(bomb, 8 * 10**6, "int8")
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()


@given(npst.arrays("float32", 70, elements=st.floats(-1e5, 1e5, width=32)))
def test_raw_is_exact(numbers: np.ndarray) -> None:
    assert unpack(pack(numbers, "raw").tobytes(), 70, "raw").tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("number", "codec"),
    [(70_000.0, "float16"), (9e6, "int8"), (5e5, "int4"), (float("nan"), "int8")],
)
def test_a_number_that_a_codec_cannot_hold_is_refused_by_name(number: float, codec: str) -> None:
    with pytest.raises(
        ValueError, match=rf"payload-codec = '{codec}': .* set payload-codec = 'raw'"
    ):
        pack(np.array([1.0, number], "<f4"), codec)


def test_the_key_names_every_codec() -> None:
    hints = get_type_hints(RunConfig, include_extras=True)
    (choice,) = markers_of(hints["payload_codec"], OneOf)
    assert choice.choices == CODECS == tuple(wire._CODECS)


# ---- In a payload ----


def coded(payload: Payload, expected: wire.Expected) -> bytes:
    return wire.encode(payload, expected.method, expected.job, expected.client, expected.codec)


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("method", KINDS)
def test_every_kind_goes_there_and_back(method: str, codec: str) -> None:
    """The wire test's payloads have ones and small whole numbers."""
    payload = KINDS[method][0]
    expected = replace(expected_of(method), codec=codec)
    back = wire.decode(coded(payload, expected), expected)
    for name, value in vars(payload).items():
        decoded_value = getattr(back, name)
        if isinstance(value, torch.Tensor):
            assert (decoded_value.dtype, decoded_value.shape) == (value.dtype, value.shape)
            # Half a step of 11 / 7, in int4
            assert torch.allclose(decoded_value.double(), value.double(), atol=0.8)
        else:
            assert decoded_value == value


def tensors_in(blob: bytes, field: str) -> dict[str, pb.Tensor]:
    body = getattr(pb.Payload.FromString(blob), field)
    return {value.name: value for _, values in body.ListFields() for value in _many(values)}


def _many(values: Any) -> list[pb.Tensor]:
    if isinstance(values, str):
        return []
    return [values] if isinstance(values, pb.Tensor) else list(values)


def test_exact_numbers_are_not_coded() -> None:
    """Shares, labels, whole numbers, and what has one dimension: biases and BatchNorm's numbers.
    Variances and deviations go in float16.
    """
    mixtures = replace(expected_of("espresso"), codec="int4")
    sent = tensors_in(coded(KINDS["espresso"][0], mixtures), "mixtures")
    raw = {name for name, tensor in sent.items() if tensor.codec == pb.CODEC_RAW}
    assert raw == {"weights", "component_weights"}
    assert sent["component_variances"].codec == pb.CODEC_FLOAT16
    assert sent["component_means"].codec == pb.CODEC_INT4
    latents = replace(expected_of("fedbip"), codec="int8")
    sent = tensors_in(coded(KINDS["fedbip"][0], latents), "concepts")
    raw = {name for name, tensor in sent.items() if tensor.codec == pb.CODEC_RAW}
    assert raw == {"domain", "labels"}
    assert sent["deviations"].codec == pb.CODEC_FLOAT16
    assert sent["means"].codec == pb.CODEC_INT8
    network = replace(CLASSIFIER, codec="int8")
    sent = tensors_in(coded(Classifier(("dog",), "resnet18", STATE), network), "classifier")
    assert sent["conv.weight"].codec == pb.CODEC_INT8
    assert {t.codec for name, t in sent.items() if name != "conv.weight"} == {pb.CODEC_RAW}


def test_a_payload_is_as_small_as_its_codec_says() -> None:
    """3 classes of 100 numbers: 1,200 bytes; 5 blocks of 64: 150 bytes and 10 of scales."""
    payload = Descriptions(CLASSES, torch.randn(3, 1, 100))
    sizes = {}
    for codec in CODECS:
        expected = replace(EXPECTED, codec=codec)
        (tensor,) = tensors_in(coded(payload, expected), "descriptions").values()
        sizes[codec] = len(tensor.data)
        numbers = wire.number_bytes(EXPECTED.tensors, {"classes": 3, "images": 0}, expected)
        assert numbers == sizes[codec]
    assert sizes == {"raw": 1200, "float16": 600, "int8": 310, "int4": 160}


def with_tensor(codec: str, changes: dict[str, Any]) -> tuple[bytes, wire.Expected]:
    """A payload of one class whose only tensor's message is changed."""
    expected = replace(EXPECTED, codec=codec)
    message = pb.Payload.FromString(coded(Descriptions(("cat",), torch.ones(1, 1, 100)), expected))
    for name, value in changes.items():
        setattr(message.descriptions.vectors, name, value)
    return message.SerializeToString(), expected


@pytest.mark.parametrize(
    ("codec", "changes", "problem"),
    [
        ("int8", {"codec": pb.CODEC_RAW}, "codec 1; expected CODEC_INT8"),
        ("raw", {"codec": pb.CODEC_INT8}, "codec 3; expected CODEC_RAW"),
        ("int4", {"codec": 77}, "codec 77; expected CODEC_INT4"),
        ("int4", {"data": bytes(53)}, "53 bytes do not inflate to 54, which its shape needs"),
        ("float16", {"data": bytes(199)}, "199 bytes; its shape needs 200"),
        ("int8", {"data": zlib.compress(bytes(105))}, "do not inflate to 104, which its shape"),
        ("int8", {"data": zlib.compress(bytes(10**7))[:90]}, "do not inflate to 104, which its"),
        ("int8", {"data": zlib.compress(bytes(103))}, "do not inflate to 104, which its shape"),
        ("int8", {"data": zlib.compress(bytes(104))[:-1]}, "do not inflate to 104, which its"),
        ("int8", {"data": zlib.compress(bytes(104)) + b"!"}, "do not inflate to 104, which its"),
        ("int8", {"data": bytes(400)}, "400 bytes; its shape needs 104"),
        ("float16", {"data": b"\x00\x7e" * 100}, "contains NaN or infinity"),
        ("int8", {"data": b"\x00\x7c" * 2 + b"\x01" * 100}, "contains NaN or infinity"),
        ("int4", {"data": b"\x00\x7c" * 2 + b"\x00" * 50}, "contains NaN or infinity"),
        ("int8", {"data": b"\xff\x7b" * 2 + b"\x7f" * 100}, "a number beyond 1e+06"),
    ],
)
def test_a_hostile_tensor_is_refused(codec: str, changes: dict[str, Any], problem: str) -> None:
    """65,504 is float16's largest; times 127 it is beyond what a trained number can be. Deflated
    bytes are of exactly the size that the shape has, whole, and nothing comes after them.
    """
    blob, expected = with_tensor(codec, changes)
    with pytest.raises(wire.PayloadError, match=problem.replace("+", r"\+")):
        wire.decode(blob, expected)


@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes_are_refused_or_still_valid(data: st.DataObject) -> None:
    """A byte of another value anywhere, or a few that are lost: sound numbers, or none."""
    method = data.draw(st.sampled_from(sorted(KINDS)))
    expected = replace(expected_of(method), codec=data.draw(st.sampled_from(CODECS)))
    mutated = bytearray(coded(KINDS[method][0], expected))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        if data.draw(st.booleans()):
            mutated[at] ^= data.draw(st.integers(1, 255))
        elif len(mutated) > 20:
            del mutated[at : at + data.draw(st.integers(1, 9))]
    try:
        payload = wire.decode(bytes(mutated), expected)
    except wire.PayloadError:
        return
    images = int(vars(payload).get("counts", torch.ones(1)).sum())
    for value in vars(payload).values():
        if isinstance(value, torch.Tensor):
            assert torch.isfinite(value.double()).all()
            largest = wire.MAX_MAGNITUDE * images
            assert value.double().abs().max() <= largest or value.dtype == torch.int64


def test_a_payload_larger_than_its_codecs_is_refused_before_it_is_parsed() -> None:
    """100,000 bytes would fit float32's 120,000, and not int4's 15,938 with names and lengths."""
    tensors = {"vectors": (("classes", 100, 100), torch.float32)}
    expected = replace(EXPECTED, tensors=tensors, max_bytes=10**6)
    wire.check_size(100_000, expected)
    with pytest.raises(wire.PayloadError, match="a payload of this run has at most 8"):
        wire.check_size(100_000, replace(expected, codec="int4"))


def test_methods_whose_numbers_must_be_exact_or_that_send_none_refuse_a_codec() -> None:
    for method in ("latent-gaussian", "fedavg", "prompts-domain", "fgl", "ceiling"):
        with pytest.raises(
            ConfigError, match=r"payload-codec = 'int8': .* set payload-codec = 'raw'"
        ):
            parse_run_config(quick(method=method, payload_codec="int8"))
    for method in ("feddeo", "fedlmg", "espresso", "fedcgs", "fedpft"):
        parse_run_config(quick(method=method, payload_codec="int8"))


def test_messages_are_as_small_as_promised() -> None:
    """With Stable Diffusion's widths: a class of FedDEO with one vector for all tokens, and 345
    classes with names of ten letters, as many as DomainNet has.
    """
    vector = Descriptions(("cat",), torch.randn(1, 1, 768))
    assert len(wire.encode(vector, "feddeo", "job-1", "client-0", "int8")) < 1000
    names = tuple(f"class-{number:04d}" for number in range(345))
    votes = Votes(names, torch.zeros(345, dtype=torch.uint8))
    # A byte a class, each name with two bytes before it, and less than a hundred around
    assert 345 < len(wire.encode(votes, "votes", "job-1", "client-0")) - 345 * 12 < 445
    domain = DomainVector(names, torch.randn(1, 768))
    assert len(wire.encode(domain, "domain-vector", "job-1", "client-0", "int4")) < 6000
