"""Payloads as whole numbers that add up, and sums of them as payloads."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from osfl.config import parse_run_config
from osfl.payload.kinds import (
    Captions,
    Descriptions,
    DomainVector,
    Embeddings,
    Encodings,
    FeatureStatistics,
    LatentStatistics,
    Payload,
    Votes,
)
from osfl.payload.masking import Numbers
from osfl.payload.summands import (
    SUM_CLIENT,
    Layout,
    SummandError,
    from_sums,
    guarantee_of,
    summand_shapes,
    to_summands,
)
from server_app.methods.fedcgs import check_statistics
from tests.helpers.settings import quick

CLASSES = ("ant", "bee", "cow", "dog")
CANDIDATES = 3
NOISE = ("oscar", 1.0, 1e-5, 1.5)
# Each client's payload, and the images of its classes
HELD = (("ant", "cow"), ("cow",), ("ant", "cow", "dog"))
IMAGES = ([4, 2], [7], [1, 3, 5])


def statistics(names: tuple[str, ...], images: list[int], seed: int) -> FeatureStatistics:
    draw = torch.Generator().manual_seed(seed)
    features = [torch.rand(count, 2, generator=draw) for count in images]
    sums = torch.stack([rows.sum(dim=0) for rows in features])
    moments = torch.cat(features).T @ torch.cat(features)
    triangle = moments[tuple(torch.triu_indices(2, 2))]
    return FeatureStatistics(names, torch.tensor(images), sums, triangle)


def latents(names: tuple[str, ...], images: list[int], seed: int) -> LatentStatistics:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, len(names), 1, 2, 2, generator=draw)
    counts = torch.tensor(images)
    # At least (sum z)^2 / n
    squares = rows[0].square() / counts.view(-1, 1, 1, 1) + rows[1]
    return LatentStatistics(names, counts, rows[0], squares)


def encodings(names: tuple[str, ...], _: list[int], seed: int) -> Encodings:
    draw = torch.Generator().manual_seed(seed)
    return Encodings(names, torch.randn(len(names), 2, 3, generator=draw))


def descriptions(names: tuple[str, ...], _: list[int], seed: int) -> Descriptions:
    draw = torch.Generator().manual_seed(seed)
    return Descriptions(names, torch.randn(len(names), 2, 3, generator=draw))


def embeddings(names: tuple[str, ...], _: list[int], seed: int) -> Embeddings:
    draw = torch.Generator().manual_seed(seed)
    return Embeddings(names, torch.randn(len(names), 2, 3, generator=draw))


def domain_vector(names: tuple[str, ...], _: list[int], seed: int) -> DomainVector:
    return DomainVector(names, torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))


def votes(names: tuple[str, ...], _: list[int], seed: int) -> Votes:
    draw = torch.Generator().manual_seed(seed)
    winners = torch.randint(CANDIDATES, (len(names),), generator=draw)
    return Votes(names, winners.to(torch.uint8))


def added(payloads: list[Payload], kind: str, **settings: float) -> dict[str, Payload]:
    """Return the payloads of the sum, through the whole numbers."""
    summands = [
        to_summands(payload, CLASSES, images, CANDIDATES)
        for payload, images in zip(payloads, IMAGES, strict=True)
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in summands[0].items()}
    options: Mapping[str, float] = {"images": 20, "bound": 8.0, **settings}
    layout = Layout(shapes, len(payloads), int(options["images"]), options["bound"])
    numbers = np.zeros(layout.size, dtype=np.uint32)
    for tensors in summands:
        numbers += layout.quantize(tensors)
    return from_sums(kind, layout.dequantize(numbers), CLASSES, len(payloads), layout)


def test_statistics_add_up() -> None:
    summands = [statistics(*both, seed) for seed, both in enumerate(zip(HELD, IMAGES, strict=True))]
    (payload,) = added(list(summands), "FeatureStatistics").values()
    assert isinstance(payload, FeatureStatistics)
    assert payload.classes == ("ant", "cow", "dog")
    assert payload.counts.tolist() == [4 + 1, 2 + 7 + 3, 5]
    first, second, third = (each.sums for each in summands)
    expected = torch.stack([first[0] + third[0], first[1] + second[0] + third[1], third[2]])
    torch.testing.assert_close(payload.sums, expected, atol=1e-6, rtol=0)
    triangle = sum(each.triangle for each in summands)  # type: ignore[misc]
    torch.testing.assert_close(payload.triangle, triangle, atol=1e-5, rtol=0)


def test_latent_statistics_add_up() -> None:
    summands = [latents(*both, seed) for seed, both in enumerate(zip(HELD, IMAGES, strict=True))]
    (payload,) = added(list(summands), "LatentStatistics").values()
    assert isinstance(payload, LatentStatistics)
    assert payload.counts.tolist() == [5, 12, 5]
    for name in ("sums", "squares"):
        first, second, third = (getattr(each, name) for each in summands)
        expected = torch.stack([first[0] + third[0], first[1] + second[0] + third[1], third[2]])
        torch.testing.assert_close(getattr(payload, name), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [encodings, descriptions, embeddings])
def test_means_are_weighted_by_images(
    make: Callable[[tuple[str, ...], list[int], int], Encodings | Descriptions | Embeddings],
) -> None:
    summands = [make(*both, seed) for seed, both in enumerate(zip(HELD, IMAGES, strict=True))]
    kind = type(summands[0])
    payloads = added(list(summands), kind.__name__)
    assert list(payloads) == [SUM_CLIENT]
    payload = payloads[SUM_CLIENT]
    assert isinstance(payload, kind)
    first, second, third = (each.vectors for each in summands)
    expected = [
        (4 * first[0] + 1 * third[0]) / 5,
        (2 * first[1] + 7 * second[0] + 3 * third[1]) / 12,
        third[2],
    ]
    torch.testing.assert_close(payload.vectors, torch.stack(expected), atol=1e-5, rtol=0)


def test_domain_vectors_are_averaged_over_images() -> None:
    summands = [
        domain_vector(*both, seed) for seed, both in enumerate(zip(HELD, IMAGES, strict=True))
    ]
    payload = added(list(summands), "DomainVector")[SUM_CLIENT]
    assert isinstance(payload, DomainVector)
    assert payload.classes == ("ant", "cow", "dog")
    first, second, third = (each.domain for each in summands)
    expected = (6 * first + 7 * second + 9 * third) / 22
    torch.testing.assert_close(payload.domain, expected, atol=1e-5, rtol=0)


def test_votes_stay_votes_without_their_clients() -> None:
    summands = [votes(*both, seed) for seed, both in enumerate(zip(HELD, IMAGES, strict=True))]
    payloads = added(list(summands), "Votes")

    def ballots(all_votes: list[Payload]) -> dict[str, list[int]]:
        by_class: dict[str, list[int]] = {}
        for each in all_votes:
            assert isinstance(each, Votes)
            for name, winner in zip(each.classes, each.winners.tolist(), strict=True):
                by_class[name] = sorted([*by_class.get(name, []), winner])
        return by_class

    assert ballots(list(payloads.values())) == ballots(list(summands))
    assert all(name.startswith(SUM_CLIENT) for name in payloads)


def test_nothing_else_adds_up() -> None:
    captions = Captions(("ant",), (("an ant",),))
    with pytest.raises(TypeError, match="kind Captions do not add up"):
        to_summands(captions, CLASSES, [1], CANDIDATES)
    # The server asks for the shapes before the round, also for an installed method's kind
    with pytest.raises(TypeError, match="kind Captions do not add up; those of FeatureStatistics"):
        summand_shapes("Captions", {}, 2, 0)
    factor = FeatureStatistics(
        ("ant",), torch.tensor([1]), torch.ones(1, 2), factor=torch.ones(1, 3)
    )
    with pytest.raises(TypeError, match="FeatureStatistics do not add up"):
        to_summands(factor, CLASSES, [1], CANDIDATES)


def test_the_servers_layout_is_the_clients() -> None:
    """The server knows shapes from its own kit, a client from its payload."""
    examples = [
        (statistics, "FeatureStatistics", {"counts": (4,), "sums": (4, 2), "triangle": (3,)}),
        (
            latents,
            "LatentStatistics",
            {"counts": (4,), "sums": (4, 1, 2, 2), "squares": (4, 1, 2, 2)},
        ),
        (encodings, "Encodings", {"vectors": (4, 2, 3)}),
        (descriptions, "Descriptions", {"vectors": (4, 2, 3)}),
        (domain_vector, "DomainVector", {"domain": (2, 3)}),
        (votes, "Votes", {"winners": (4,)}),
    ]
    for make, kind, fields in examples:
        tensors = to_summands(make(HELD[0], IMAGES[0], 0), CLASSES, IMAGES[0], CANDIDATES)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert list(summand_shapes(kind, fields, 4, CANDIDATES).items()) == list(shapes.items())


def layout_of(members: int, images: int = 10_000, bound: float = 32.0) -> Layout:
    shapes = {"counts": (1,), "sums": (2,), "triangle": (2,)}
    return Layout(shapes, members, images, bound)


def summed(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    numbers: Numbers = np.zeros(layout.size, dtype=np.uint32)
    for _ in range(layout.members):
        numbers += layout.quantize(tensors)
    return layout.dequantize(numbers)


@pytest.mark.parametrize("members", [2, 3, 50, 1000])
def test_no_sum_overflows(members: int) -> None:
    """All members may have the largest numbers that the settings allow."""
    layout = layout_of(members)
    largest = {
        "counts": torch.tensor([10_000]),
        "sums": torch.tensor([320_000.0, -320_000.0]),
        "triangle": torch.tensor([10_240_000.0, -10_240_000.0]),
    }
    sums = summed(layout, largest)
    for name, tensor in largest.items():
        error = (sums[name] - members * tensor.double()).abs().max()
        assert float(error) <= members * layout.step(name) / 2


def test_rounding_is_half_a_step_at_most() -> None:
    # By hand: 6 clients of 10,000 images up to 32: 1,920,000 of 2^31 steps of 2^-10
    layout = layout_of(6)
    assert layout.step("counts") == 1
    assert layout.step("sums") == 2.0**-10
    assert layout.step("triangle") == 2.0**-5
    values = {
        "counts": torch.tensor([3]),
        "sums": torch.tensor([0.123456, -7.77]),
        "triangle": torch.tensor([5.4321, 0.0]),
    }
    numbers = layout.dequantize(layout.quantize(values))
    assert int(numbers["counts"]) == 3
    for name in ("sums", "triangle"):
        error = (numbers[name] - values[name].double()).abs().max()
        assert 0 < float(error) <= layout.step(name) / 2


def test_numbers_beyond_the_range_are_refused() -> None:
    layout = layout_of(2, images=10)
    fine = {"counts": torch.tensor([10]), "sums": torch.zeros(2), "triangle": torch.zeros(2)}
    layout.quantize(fine)
    with pytest.raises(SummandError, match="secure-sum-images = 10: .* increase it"):
        layout.quantize({**fine, "counts": torch.tensor([11])})
    for value in (321.0, -321.0, float("nan"), float("inf")):
        with pytest.raises(SummandError, match="secure-sum-bound = 32: .*sums .* double it"):
            layout.quantize({**fine, "sums": torch.tensor([0.0, value])})
    with pytest.raises(SummandError, match="sums has shape"):
        layout.quantize({**fine, "sums": torch.zeros(3)})


def test_impossible_sums_are_refused() -> None:
    layout = layout_of(2, images=10)
    numbers = np.zeros(layout.size, dtype=np.uint32)
    numbers[0] = 2**30
    with pytest.raises(SummandError, match="the counts of the secure sum are impossible"):
        layout.dequantize(numbers)
    rows = {"sums": torch.zeros(4, 2), "triangle": torch.zeros(3)}
    for counts in ([0, 0, 0, 0], [1, -1, 0, 0]):
        with pytest.raises(SummandError, match="impossible counts"):
            from_sums(
                "FeatureStatistics", {"counts": torch.tensor(counts), **rows}, CLASSES, 2, layout
            )
    for row in ([3, 0, 0], [2, -1, 0], [0, 0, 0]):
        ballots = torch.tensor([row, [0, 0, 0], [0, 0, 0], [0, 0, 0]])
        with pytest.raises(SummandError, match="impossible votes"):
            from_sums("Votes", {"votes": ballots}, CLASSES, 2, layout)


def test_the_text_of_a_layout_names_all_that_must_agree() -> None:
    layout = layout_of(6)
    variants = [
        layout_of(7),
        layout_of(6, images=9),
        layout_of(6, bound=31.0),
        replace(layout, guarantee=NOISE),
        replace(layout, shapes={"counts": (1,), "sums": (2,), "triangle": (3,)}),
    ]
    assert layout.text not in [variant.text for variant in variants]


def test_the_guarantee_is_part_of_the_layout() -> None:
    """A server that names another epsilon to other members has another roster there."""
    base = {"method": "oscar", "epsilon": 1.0}
    texts = {
        str(guarantee_of(parse_run_config(quick(**{**base, **change}))))
        for change in ({}, {"epsilon": 2.0}, {"delta": 1e-6}, {"clip_norm": 2.0})
    }
    assert len(texts) == 4


def test_numbers_that_get_noise_are_clamped_not_refused() -> None:
    """A refusal would show, without noise, that an image's numbers are large."""
    layout = Layout({"counts": (1,), "vectors": (1, 2)}, 2, 10, 8.0, NOISE)
    tensors = {"counts": torch.tensor([3]), "vectors": torch.tensor([[1e6, -5.0]])}
    values = layout.dequantize(layout.quantize(tensors))
    assert values["vectors"].tolist() == [[80.0, -5.0]]


def test_rounding_makes_no_direction_of_the_features_negative() -> None:
    """Small features of few images, with the default precision: rounding outweighs the scatter."""
    draw = torch.Generator().manual_seed(0)
    features = 0.05 * torch.rand(20, 64, generator=draw, dtype=torch.float64)
    rows, columns = torch.triu_indices(64, 64)
    moments = features.T @ features
    client_payload = FeatureStatistics(
        ("ant",),
        torch.tensor([20]),
        features.sum(dim=0, keepdim=True).float(),
        moments[rows, columns].float(),
    )
    tensors = to_summands(client_payload, ("ant",), [20], 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = Layout(shapes, 5, 10_000, 32.0)
    rounded = layout.dequantize(layout.quantize(tensors))
    payload = from_sums("FeatureStatistics", rounded, ("ant",), 5, layout)[SUM_CLIENT]
    assert isinstance(payload, FeatureStatistics)
    check_statistics(payload, SUM_CLIENT)
    assert float((payload.moments - moments).abs().max()) < 64 * layout.step("triangle")
    rounded["triangle"][0] = -100.0
    with pytest.raises(SummandError, match="the moments of the secure sum are impossible"):
        from_sums("FeatureStatistics", rounded, ("ant",), 5, layout)


def test_rounding_makes_no_variance_negative() -> None:
    """One image a class: n Q = S^2 before rounding."""
    sums = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    names = ("ant", "bee", "cow")
    client_payload = LatentStatistics(names, torch.tensor([1, 1, 1]), sums, sums.square())
    tensors = to_summands(client_payload, CLASSES, [], CANDIDATES)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = Layout(shapes, 2, 10_000, 64.0)
    rounded = layout.dequantize(layout.quantize(tensors))
    assert bool((rounded["squares"][:3] < rounded["sums"][:3].square()).any())
    (payload,) = from_sums("LatentStatistics", rounded, CLASSES, 1, layout).values()
    assert isinstance(payload, LatentStatistics)
    assert bool((payload.squares.double() >= payload.sums.double().square() - 1e-6).all())
    rounded["squares"][0] -= 3 * layout.members * layout.step("squares")
    with pytest.raises(SummandError, match="the squares of the secure sum are impossible"):
        from_sums("LatentStatistics", rounded, CLASSES, 1, layout)
