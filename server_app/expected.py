"""What a client's payload must look like in a run, and a last look at it before it is used."""

from collections.abc import Callable
from functools import cache

import torch

from osfl import wire
from osfl.config import RunConfig, split_names
from osfl.data.parts import class_names
from osfl.methods import METHODS
from osfl.models.classifiers import blank_classifier, logits_of, rebuild
from osfl.models.kits import find_kit
from osfl.payloads import Classifier, Payload
from osfl.seeds import generator_of

ExpectedOf = Callable[[str], wire.Expected]


def expected_payload(config: RunConfig, job_id: str) -> ExpectedOf:
    """What a client's payload must look like, as a function of the client."""
    classes, settings = class_names(config.data), config.classifier
    architectures = {}
    if METHODS[config.method].payload == "Classifier":
        for architecture in split_names(settings.architecture):
            state = blank_classifier(architecture, len(classes), settings.small_stem).state_dict()
            architectures[architecture] = {
                name: (tuple(t.shape), t.dtype) for name, t in state.items()
            }
    limit = int(config.max_payload_mb * 1e6)
    tensors = expected_tensors(config)
    return lambda client: wire.Expected(
        config.method, job_id, client, classes, limit, tensors, architectures
    )


def expected_tensors(config: RunConfig) -> wire.Tensors:
    """Shape and dtype of every tensor of the method's payload, by the server's own kit; {} for a payload without."""
    payload, real = METHODS[config.method].payload, torch.float32
    if payload in (None, "Classifier", "Captions", "Domain"):
        return {}
    text, latent, image = shapes_of_kit(find_kit(config.sampling_kit))
    match payload:
        case "Descriptions":
            return {"vectors": (("classes", *text), real)}
        case "Encodings":
            return {
                "vectors": (
                    ("classes", *(text[1:] if config.method == "oscar-pooled" else text)),
                    real,
                )
            }
        case "Embeddings":
            return {"vectors": (("classes", config.feddisc.clusters + 1, image), real)}
        case "Concepts":
            return {
                "domain": (text[1:], real),
                "vectors": (("classes", *text[1:]), real),
                "labels": (("images",), torch.int64),
                "means": (("images", *latent), real),
                "deviations": (("images", *latent), real),
            }
    settings = config.espresso
    tensors: dict[str, tuple[wire.Shape, torch.dtype]] = {
        "conditions": (("classes", settings.clusters, *text), real),
        "weights": (("classes", settings.clusters), real),
    }
    if settings.gmm:
        tensors["component_weights"] = (("classes", settings.components), real)
        tensors["component_means"] = (("classes", settings.components, *latent), real)
        tensors["component_variances"] = (("classes", settings.components, *latent), real)
    return tensors


@cache
def shapes_of_kit(kit: str) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """What `osfl.models.diffusion.kit_shapes` says; of a hub id it fetches the small files."""
    from osfl.models.diffusion import kit_shapes

    return kit_shapes(kit)


def probe(payload: Payload, client: str, config: RunConfig) -> None:
    """Whether a classifier's numbers, each plausible alone, give finite logits together.

    Raises:
        wire.PayloadError: they do not.
    """
    if isinstance(payload, Classifier):
        classes, small_stem = len(class_names(config.data)), config.classifier.small_stem
        model = rebuild(payload.state, payload.architecture, classes, small_stem)
        size = config.data.image_size
        noise = torch.randint(
            256, (6, 3, size, size), generator=generator_of(0, "probe"), dtype=torch.uint8
        )
        pictures = torch.cat([torch.zeros_like(noise[:1]), torch.full_like(noise[:1], 255), noise])
        if not torch.isfinite(logits_of(model, pictures, torch.device("cpu"))).all():
            raise wire.PayloadError(client, "state", "its logits are not finite")
