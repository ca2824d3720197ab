"""domain-vector: one learned vector of the client's domain for all of its classes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import DIFFUSION_PARTS, Method
from osfl.methods.shared_sections import Scale, Weight, passes_per_image
from osfl.util.markers import Doc, OneOf, Range, ServerKey

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class DomainVectorConfig:
    """domain-vector: one learned vector of the client's domain for all of its classes."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "Passes over the client's images. With epsilon each image trains by itself, and "
            "`steps` and `batch-size` have no effect."
        ),
    ]
    steps: Annotated[
        int, Range(0, 10_000_000), Doc("Training steps, in place of epochs. 0: `epochs`.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per step.")]
    lr: Annotated[
        float, Range(1e-8, 1000), Doc("Learning rate of Adam at the first step. It decays to 0.")
    ]
    class_lr: Annotated[
        Weight,
        Doc("Learning rate of a further vector per class. 0: classes have none, and send none."),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc(
            "`each`: every token of a condition has a vector of its own. `all`: all tokens "
            "share one."
        ),
    ]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    classes: Annotated[
        str,
        OneOf("held", "all"),
        Doc(
            "The classes that are synthesized in a client's domain: those that it holds (held), "
            "or all of the run's (all)."
        ),
        ServerKey(),
    ]


def all_classes(run: "RunConfig") -> bool:
    """Return whether every class is synthesized in every client's domain."""
    return run.domain_vector.classes == "all"


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's vectors; o only if classes add one to their domain's."""
    vectors = 1 if run.domain_vector.tokens == "all" else sizes["L"]
    offsets = {"o": 1} if run.domain_vector.class_lr else {}
    return {**sizes, "p": vectors, **offsets}


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps domain-vector from working."""
    if run.class_balance and all_classes(run):
        yield (
            "class-balance = true: with domain-vector.classes = 'all' the server synthesizes every "
            "class for every client, which is balanced already; set it to false"
        )


def guarantee_problem(run: "RunConfig") -> str:
    """Return the setting that rules out a guarantee, with a hint; "" if there is none."""
    reason = "epsilon, because only the domain's vector can be sent with a guarantee"
    return _class_vectors_problem(run, reason)


def sum_problem(run: "RunConfig") -> str:
    """Return the setting that rules out a secure sum, with a hint; "" if there is none."""
    reason = "secure-sum = true, which adds up the domains' vectors alone"
    return _class_vectors_problem(run, reason)


def _class_vectors_problem(run: "RunConfig", reason: str) -> str:
    class_lr = run.domain_vector.class_lr
    return f"domain-vector.class-lr = {class_lr:g}: must be 0 with {reason}" if class_lr else ""


def guarantee_note(run: "RunConfig") -> str:
    """Describe the training of a guaranteed payload."""
    return passes_per_image("domain-vector", run.domain_vector.epochs)


METHOD = Method(
    client="domain_vector",
    server="domain_vector",
    payload="DomainVector",
    sends="a learned vector of its domain",
    reveals="what a client's images have in common",
    client_parts=DIFFUSION_PARTS,
    privacy="approximate",
    section="domain-vector",
    all_classes=all_classes,
    dimensions=dimensions,
    problems=problems,
    guarantee_problem=guarantee_problem,
    sum_problem=sum_problem,
    guarantee_note=guarantee_note,
    summand_bound=64.0,
)
