"""One example of each payload kind."""

from dataclasses import replace

import torch

from osfl.payload import wire
from osfl.payload.kinds import (
    Captions,
    Classifier,
    Concepts,
    Descriptions,
    Domain,
    DomainVector,
    Embeddings,
    Encodings,
    LatentMixture,
    LatentStatistics,
    Mixtures,
    Payload,
    Votes,
)

CLASSES = ("cat", "dog", "emu")
DESCRIPTIONS = wire.Expected(
    "feddeo",
    "job-1",
    "client-0",
    CLASSES,
    max_bytes=10_000,
    tensors={"vectors": (("classes", 2, 3), torch.float32)},
)
STATE = {
    "conv.weight": torch.arange(4.0).view(2, 2),
    "bn.running_mean": torch.tensor([0.5, -0.5]),
    "bn.running_var": torch.tensor([1.0, 2.0]),
    "bn.num_batches_tracked": torch.tensor(7),
}
CLASSIFIER = wire.Expected(
    "fedlmg",
    "job-1",
    "client-0",
    CLASSES,
    max_bytes=10_000,
    architectures={"resnet18": {name: (tuple(t.shape), t.dtype) for name, t in STATE.items()}},
)


def descriptions(classes: tuple[str, ...] = ("cat", "emu")) -> Descriptions:
    return Descriptions(classes, torch.arange(len(classes) * 6.0).view(-1, 2, 3))


def blob(
    payload: Descriptions | Classifier | None = None, expected: wire.Expected = DESCRIPTIONS
) -> bytes:
    return wire.encode(payload or descriptions(), expected.method, expected.job, expected.client)


REAL = torch.float32
WHOLE = torch.int64
KINDS: dict[str, tuple[Payload, dict]] = {
    "oscar": (
        Encodings(("cat", "emu"), torch.arange(12.0).view(2, 2, 3)),
        {"vectors": (("classes", 2, 3), REAL)},
    ),
    "oscar-pooled": (Encodings(("dog",), torch.ones(1, 3)), {"vectors": (("classes", 3), REAL)}),
    "feddisc": (
        Embeddings(("cat", "dog"), torch.ones(2, 6, 4)),
        {"vectors": (("classes", 6, 4), REAL)},
    ),
    "fgl": (Captions(("cat", "emu"), (("a cat", "a black cat"), ("",))), {}),
    "prompts-domain": (Domain(CLASSES, "sketch"), {}),
    "espresso": (
        Mixtures(
            ("emu",),
            torch.ones(1, 2, 2, 3),
            torch.tensor([[0.25, 0.75]]),
            torch.tensor([[1.0, 0.0]]),
            torch.ones(1, 2, 1, 2, 2),
            torch.ones(1, 2, 1, 2, 2),
        ),
        {
            "conditions": (("classes", 2, 2, 3), REAL),
            "weights": (("classes", 2), REAL),
            "component_weights": (("classes", 2), REAL),
            "component_means": (("classes", 2, 1, 2, 2), REAL),
            "component_variances": (("classes", 2, 1, 2, 2), REAL),
        },
    ),
    "fedld": (
        LatentMixture(("cat", "emu"), torch.tensor([0.25, 0.75]), *torch.ones(2, 2, 1, 2, 2)),
        {
            "weights": ((2,), REAL),
            "means": ((2, 1, 2, 2), REAL),
            "variances": ((2, 1, 2, 2), REAL),
        },
    ),
    "latent-gaussian": (
        LatentStatistics(("cat", "emu"), torch.tensor([2, 3]), *torch.full((2, 2, 1, 2, 2), 4.0)),
        {
            "counts": (("classes",), WHOLE),
            "sums": (("classes", 1, 2, 2), REAL),
            "squares": (("classes", 1, 2, 2), REAL),
        },
    ),
    "fedbip": (
        Concepts(
            ("cat", "emu"),
            torch.ones(3),
            torch.ones(2, 3),
            torch.tensor([0, 2, 2]),
            *torch.ones(2, 3, 1, 2, 2),
        ),
        {
            "domain": ((3,), REAL),
            "vectors": (("classes", 3), REAL),
            "labels": (("images",), WHOLE),
            "means": (("images", 1, 2, 2), REAL),
            "deviations": (("images", 1, 2, 2), REAL),
        },
    ),
    "domain-vector": (
        DomainVector(("cat", "emu"), torch.ones(2, 3), torch.ones(2, 1, 2, 3)),
        {"domain": ((2, 3), REAL), "offsets": (("classes", 1, 2, 3), REAL)},
    ),
    "votes": (
        Votes(("cat", "emu"), torch.tensor([5, 0], dtype=torch.uint8)),
        {"winners": (("classes",), torch.uint8)},
    ),
}


def expected_of(method: str, **changes) -> wire.Expected:  # type: ignore[no-untyped-def]
    return replace(
        wire.Expected(method, "job-1", "client-0", CLASSES, 10_000, KINDS[method][1], max_images=5),
        **changes,
    )
