"""Schema of a client's payload in a run, and its final checks before use."""

from collections.abc import Callable, Mapping
from functools import cache

import torch

from osfl.config import RunConfig, split_names
from osfl.data.parts import class_names
from osfl.kit.kits import find_kit, kit_shapes
from osfl.methods import METHODS
from osfl.models.classifiers import compute_logits, meta_classifier, rebuild_classifier, remove_head
from osfl.payload import wire
from osfl.payload.fields import field_tensors, fields_of
from osfl.payload.kinds import Classifier, FeatureStatistics, Payload, Votes, kind_of
from osfl.util.seeds import generator_of
from server_app.defenses.image_counts import check_counts, stated_counts
from server_app.methods.fedcgs import check_statistics

ExpectedOf = Callable[[str], wire.Expected]


def expected_payload(config: RunConfig, job_id: str) -> ExpectedOf:
    """Return a function from client to the schema of its payload."""
    classes = class_names(config.data)
    settings = config.classifier
    architectures = {}
    if METHODS[config.method].payload == "Classifier":
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


def run_dimensions(config: RunConfig) -> dict[str, int]:
    """Return the run's sizes of the dimensions in `osfl.payload.fields.DIMENSIONS`.

    L is absent for pooled conditions, M for Espresso without a mixture, and o if classes add no
    offset to their domain's vector.
    """
    if METHODS[config.method].features:
        settings = config.classifier
        model = meta_classifier(settings.architecture, 2, settings.small_stem)
        width = remove_head(model)[1]
        is_spherical = config.fedpft.covariance == "spherical"
        return {"f": width, "K": config.fedpft.components, "v": 1 if is_spherical else width}
    text, latent, image = shapes_of_kit(find_kit(config.sampling_kit))
    length, width = text
    channels, height, latent_width = latent
    section = config.feddeo if config.method == "feddeo" else config.domain_vector
    sizes = {
        "L": length,
        "d": width,
        "c": channels,
        "h": height,
        "w": latent_width,
        "2e": image,
        "J": config.espresso.clusters,
        "M": config.espresso.components,
        "K + 1": config.feddisc.clusters + 1,
        "p": 1 if section.tokens == "all" else length,
        "o": 1,
    }
    if config.domain_vector.class_lr == 0:
        del sizes["o"]
    if config.method == "oscar-pooled":
        del sizes["L"]
    if not config.espresso.gmm:
        del sizes["M"]
    return sizes


@cache
def shapes_of_kit(kit: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """Return `osfl.kit.kits.kit_shapes` of a kit, cached."""
    return kit_shapes(kit)


def check_stated_counts(
    payload: Payload, client: str, config: RunConfig, declared: Mapping[str, int] | None = None
) -> None:
    """Check the image counts that a payload states by `image_counts.check_counts`.

    Raises:
        wire.PayloadError: a count exceeds `max-images` or the number that the client declared.
    """
    try:
        check_counts(stated_counts(payload), config.max_images, declared)
    except ValueError as error:
        raise wire.PayloadError(client, "counts", str(error)) from None


def check_plausible(payload: Payload, client: str, config: RunConfig) -> None:
    """Check that a payload's values are plausible together, not only one by one.

    A classifier's logits are finite, feature statistics can come from images, votes name existing
    candidates, and image counts are within `max-images`.

    Raises:
        wire.PayloadError: one of these does not hold.
    """
    check_stated_counts(payload, client, config)
    if isinstance(payload, Votes):
        candidates = len(config.votes.words)
        if (highest := int(payload.winners.max())) >= candidates:
            raise wire.PayloadError(
                client, "winners", f"candidate {highest}; the run has {candidates}, from 0"
            )
    if isinstance(payload, FeatureStatistics):
        check_statistics(payload, client)
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
