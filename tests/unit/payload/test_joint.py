"""Two payloads of one client in one message: bytes, and validation part by part."""

from dataclasses import replace

import pytest
import torch

from osfl.payload import wire
from osfl.payload.kinds import DomainVector, FeatureStatistics, Joint, Votes, by_method
from osfl.payload.v1 import payload_pb2 as pb
from osfl.payload.wire import PayloadError
from tests.helpers.payload_examples import CLASSES, KINDS, REAL, WHOLE, expected_of

KIND = "domain-vector+fedcgs"
VECTOR = KINDS["domain-vector"][0]
STATISTICS = FeatureStatistics(
    ("cat", "emu"), torch.tensor([2, 3]), torch.ones(2, 2), torch.tensor([5.0, 5.0, 5.0])
)
PARTS = {
    "domain-vector": expected_of("domain-vector"),
    "fedcgs": wire.Expected(
        "fedcgs",
        "job-1",
        "client-0",
        CLASSES,
        10_000,
        {
            "counts": (("classes",), WHOLE),
            "sums": (("classes", 2), REAL),
            "triangle": ((3,), REAL),
        },
    ),
}
EXPECTED = wire.joint_expected(KIND, PARTS)
CODECS = dict.fromkeys(PARTS, "raw")


def joint(**parts: object) -> bytes:
    """The encoded message; parts by the name of their class, in lower case."""
    payloads = {"domain-vector": VECTOR, "fedcgs": STATISTICS}
    names = {"domainvector": "domain-vector", "featurestatistics": "fedcgs"}
    payloads.update({names[name]: part for name, part in parts.items()})  # type: ignore[misc]
    return wire.encode_joint(payloads, CODECS, "job-1", "client-0")  # type: ignore[arg-type]


def raw(*parts: bytes, method: str = KIND, classes: tuple[str, ...] = ("cat", "emu")) -> bytes:
    """A message with any parts."""
    body = pb.Joint(part=parts)
    return pb.Payload(
        version=1, method=method, job="job-1", client="client-0", classes=classes, joint=body
    ).SerializeToString()


def part(payload: object, method: str) -> bytes:
    return wire.encode(payload, method, "job-1", "client-0")  # type: ignore[arg-type]


GOOD = (part(VECTOR, "domain-vector"), part(STATISTICS, "fedcgs"))


def test_parts_are_the_messages_of_pure_runs() -> None:
    blob = joint()
    assert blob == raw(*GOOD)
    payload = wire.decode(blob, EXPECTED, wire.digest(blob))
    assert isinstance(payload, Joint)
    assert payload.classes == ("cat", "emu")
    assert list(payload.parts) == ["domain-vector", "fedcgs"]
    vector, statistics = payload.parts.values()
    assert isinstance(vector, DomainVector)
    assert isinstance(VECTOR, DomainVector)
    assert torch.equal(vector.domain, VECTOR.domain)
    assert isinstance(statistics, FeatureStatistics)
    assert torch.equal(statistics.triangle, STATISTICS.triangle)
    sent = {"a": payload, "b": vector}
    groups = by_method(sent, {"a": KIND, "b": "domain-vector"})
    assert {method: list(group) for method, group in groups.items()} == {
        "domain-vector": ["a", "b"],
        "fedcgs": ["a"],
    }


SCALED = replace(STATISTICS, sums=torch.full((2, 2), float("nan")))
OTHER = replace(STATISTICS, classes=("cat", "dog"))
VOTES = Votes(("cat", "emu"), torch.tensor([1, 0], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (raw(GOOD[0], part(SCALED, "fedcgs")), "fedcgs: sums: contains NaN"),
        (raw(GOOD[0], part(OTHER, "fedcgs")), "fedcgs: classes: must be those of the whole"),
        (raw(GOOD[0]), "joint: 1 parts; expected 2"),
        (raw(*GOOD, GOOD[1]), "part: more often than expected in this run"),
        (raw(GOOD[1], GOOD[0]), "domain-vector: .*featurestatistics: not expected"),
        (raw(GOOD[0], part(VOTES, "votes")), "fedcgs: .*votes: not expected"),
        (raw(GOOD[0], GOOD[1][:-1]), "fedcgs: message: cut short"),
        (raw(GOOD[0], raw(*GOOD)), "fedcgs: .*joint: not expected"),
        (raw(*GOOD, method="domain-vector"), "method: 'domain-vector'; expected"),
        (raw(*GOOD, classes=("cat",)), "domain-vector: classes: must be those of the whole"),
        (GOOD[0], "domainvector: not expected"),
        (raw(b"\xff" * 200_000, GOOD[1]), "client-0: size: .* a payload of this run has at most"),
    ],
)
def test_each_part_is_validated_by_itself(blob: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        wire.decode(blob, replace(EXPECTED, max_bytes=10**6))


def test_a_single_payload_does_not_pass_as_a_joint_one_or_the_reverse() -> None:
    with pytest.raises(PayloadError, match="joint: not expected in this run"):
        wire.decode(joint(), PARTS["domain-vector"])


def test_the_limit_is_that_of_the_whole_message() -> None:
    blob = joint()
    wire.decode(blob, replace(EXPECTED, max_bytes=len(blob)))
    with pytest.raises(PayloadError, match="size"):
        wire.decode(blob, replace(EXPECTED, max_bytes=len(blob) - 1))


def test_parts_of_different_classes_are_not_sent() -> None:
    with pytest.raises(ValueError, match="must be of the same classes"):
        joint(featurestatistics=OTHER)


def test_every_byte_that_changes_is_refused_or_read() -> None:
    """Nothing but a PayloadError leaves the decoder."""
    blob = joint()
    for position in range(len(blob)):
        mutated = bytearray(blob)
        mutated[position] ^= 0x55
        try:
            payload = wire.decode(bytes(mutated), EXPECTED)
        except PayloadError:
            continue
        assert isinstance(payload, Joint)
