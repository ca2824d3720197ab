"""Schema of a client's payload in a run, and its final checks before use."""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from osfl.config import RunConfig, is_mixed, kinds_of, parts_of, split_names
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit
from osfl.kit.shapes import kit_shapes
from osfl.methods import METHODS
from osfl.models.classifiers import compute_logits, meta_classifier, rebuild_classifier, remove_head
from osfl.payload import wire
from osfl.payload.fields import field_tensors, fields_of
from osfl.payload.kinds import (
    Classifier,
    FeatureStatistics,
    Joint,
    LatentStatistics,
    Sent,
    Votes,
    kind_of,
)
from osfl.util.seeds import generator_of
from server_app.defenses.image_counts import check_counts, stated_counts
from server_app.methods.fedcgs import check_statistics

ExpectedOf = Callable[[str], wire.Expected]
# By this share of the largest one, rounding to 32 bits may lower a sum of squared latents
ROUNDING = 1e-4


def expected_payloads(config: RunConfig, job_id: str, kind_of: Callable[[str], str]) -> ExpectedOf:
    """Return a function from client to the schema of its payload, by the client's kind.

    Args:
        kind_of: returns the kind of payload that a client has announced, in a mixed run.
    """
    by_kind = {kind: _expected_kind(config, job_id, kind) for kind in kinds_of(config)}
    if not is_mixed(config):
        return by_kind[config.method]

    def expected(client: str) -> wire.Expected:
        if (kind := kind_of(client)) not in by_kind:
            raise wire.PayloadError(client, "kind", f"{kind!r} is not one of {', '.join(by_kind)}")
        return by_kind[kind](client)

    return expected


def _expected_kind(config: RunConfig, job_id: str, kind: str) -> ExpectedOf:
    """Return a function from client to the schema of a payload of this kind."""
    by_method = {
        method: expected_payload(part, job_id) for method, part in parts_of(config, kind).items()
    }
    if len(by_method) == 1:
        return next(iter(by_method.values()))
    return lambda client: wire.joint_expected(
        kind, {method: expected(client) for method, expected in by_method.items()}
    )


def expected_payload(config: RunConfig, job_id: str) -> ExpectedOf:
    """Return a function from client to the schema of its payload, which a method's clients send."""
    classes = class_names(config.data)
    settings = config.classifier
    architectures = {}
    if METHODS[config.method].sends_classifier:
        for architecture in split_names(settings.architecture):
            state = meta_classifier(architecture, len(classes), settings.small_stem).state_dict()
            architectures[architecture] = {
                name: (tuple(t.shape), t.dtype) for name, t in state.items()
            }
    limit = int(config.max_payload_mb * 1e6)
    tensors = expected_tensors(config)
    return lambda client: wire.Expected(
        config.method,
        job_id,
        client,
        classes,
        limit,
        tensors,
        architectures,
        codec=config.payload_codec,
    )


def expected_tensors(config: RunConfig) -> wire.Tensors:
    """Return shape and dtype of every tensor in the method's payload, by the server's own kit.

    Returns {} for a payload that declares no tensor shapes.

    Raises:
        TypeError: a tensor's shape has a dimension that the run does not define.
    """
    payload = METHODS[config.method].payload
    if payload is None or not any(field.shapes for field in fields_of(kind_of(payload)).values()):
        return {}
    return field_tensors(kind_of(payload), run_dimensions(config))


def run_dimensions(config: RunConfig) -> Mapping[str, int]:
    """Return the run's sizes of the dimensions in `osfl.payload.fields.DIMENSIONS`.

    The kit, or the classifier whose features clients describe, has most of them; the method adds
    its own, and takes away those that its payload does not have.
    """
    method = METHODS[config.method]
    if method.features:
        settings = config.classifier
        model = meta_classifier(settings.architecture, 2, settings.small_stem)
        return method.dimensions(config, {"f": remove_head(model)[1]})
    (length, width), (channels, height, latent_width), image = shapes_of_kit(
        find_kit(config.sampling_kit)
    )
    # A method's vectors are one for every token, unless it declares otherwise
    sizes = {"L": length, "d": width, "p": length, "2e": image}
    return method.dimensions(config, {**sizes, "c": channels, "h": height, "w": latent_width})


@cache
def shapes_of_kit(kit: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """Return `osfl.kit.shapes.kit_shapes` of a kit, cached."""
    return kit_shapes(kit)


def check_stated_counts(
    payload: Sent, client: str, config: RunConfig, declared: Mapping[str, int] | None = None
) -> None:
    """Check the image counts that a payload states by `image_counts.check_counts`.

    Raises:
        wire.PayloadError: a count exceeds `max-images` or the number that the client declared, or
            the parts of a joint payload state different counts.
    """
    parts = payload.parts.values() if isinstance(payload, Joint) else (payload,)
    stated = [counts for part in parts if (counts := stated_counts(part))]
    if any(counts != stated[0] for counts in stated):
        raise wire.PayloadError(client, "counts", "its parts state different numbers of images")
    try:
        check_counts(stated_counts(payload), config.max_images, declared)
    except ValueError as error:
        raise wire.PayloadError(client, "counts", str(error)) from None


def check_plausible(payload: Sent, client: str, config: RunConfig) -> None:
    """Check that a payload's values are plausible together, not only one by one.

    A classifier's logits are finite, feature statistics can come from images, votes name existing
    candidates, and image counts are within `max-images`.

    Raises:
        wire.PayloadError: one of these does not hold.
    """
    if isinstance(payload, Joint):
        for part in payload.parts.values():
            check_plausible(part, client, config)
        return
    check_stated_counts(payload, client, config)
    if isinstance(payload, Votes):
        candidates = len(config.votes.words)
        if (highest := int(payload.winners.max())) >= candidates:
            raise wire.PayloadError(
                client, "winners", f"candidate {highest}; the run has {candidates}, from 0"
            )
    if isinstance(payload, FeatureStatistics):
        check_statistics(payload, client)
    if isinstance(payload, LatentStatistics):
        _check_latents(payload, client)
    if isinstance(payload, Classifier):
        classes = len(class_names(config.data))
        small_stem = config.classifier.small_stem
        model = rebuild_classifier(payload.state, payload.architecture, classes, small_stem)
        size = config.data.image_size
        noise = torch.randint(
            256, (6, 3, size, size), generator=generator_of(0, "probe"), dtype=torch.uint8
        )
        images = torch.cat([torch.zeros_like(noise[:1]), torch.full_like(noise[:1], 255), noise])
        if not torch.isfinite(compute_logits(model, images, torch.device("cpu"))).all():
            raise wire.PayloadError(client, "state", "its logits are not finite")


def _check_latents(payload: LatentStatistics, client: str) -> None:
    """Check that some latents can have a client's counts, sums and sums of squares.

    By the Cauchy-Schwarz inequality n sum z^2 is at least (sum z)^2.

    Raises:
        wire.PayloadError: some latent's variance would be negative.
    """
    counts = payload.counts.double().view(-1, 1, 1, 1)
    squared_sums = payload.sums.double().square()
    squares = counts * payload.squares.double()
    slack = ROUNDING * squares.abs().amax()
    if bool((squares - squared_sums < -slack).any()):
        raise wire.PayloadError(
            client,
            "squares",
            "cannot come from latents: with these counts and sums some variance would be negative",
        )
