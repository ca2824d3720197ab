"""FedDEO: one learned condition per class, a description (arXiv 2407.19953)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from osfl.methods.declaration import DIFFUSION_PARTS, Method
from osfl.methods.shared_sections import ConditionTraining, Scale, passes_per_image
from osfl.util.markers import Doc, OneOf, Range

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedDEOConfig(ConditionTraining):
    """FedDEO: descriptions, one learned condition per class."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "S: passes over a class's images. With epsilon each image trains by itself, and "
            "`steps` and `batch-size` have no effect."
        ),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc(
            "`each`: every token of a description is learned. `all`: one learned vector is added "
            "to every token of the prompt's encoding."
        ),
    ]
    guidance_text: Annotated[Scale, Doc("Guidance scale of the prompt. 0: none.")]
    guidance_description: Annotated[Scale, Doc("Guidance scale of the description.")]


def dimensions(run: "RunConfig", sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sizes of a run's descriptions."""
    return {**sizes, "p": 1} if run.feddeo.tokens == "all" else sizes


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps FedDEO from working."""
    if not (run.feddeo.guidance_text or run.feddeo.guidance_description):
        yield (
            "feddeo.guidance-text and feddeo.guidance-description are both 0: set one of them, or "
            "images would have no class"
        )


def sum_problem(run: "RunConfig") -> str:
    """Return the setting that rules out a secure sum, with a hint; "" if there is none."""
    if run.epsilon:
        return ""
    return (
        "epsilon = 0: with secure-sum = true method 'feddeo' requires an epsilon, because only "
        "then a description is a mean over images; set epsilon, or method to 'domain-vector'"
    )


def guarantee_note(run: "RunConfig") -> str:
    """Describe the training of a guaranteed payload."""
    return passes_per_image("feddeo", run.feddeo.epochs)


def table_note(config: Mapping[str, Any]) -> str:
    """Describe a run's guidance if it has fewer branches than the published method."""
    if config["feddeo.guidance-text"] == 0:
        return "the description alone (FedDEO's eq. 5 without its text branch)"
    if config["feddeo.guidance-description"] == 0:
        return "the text alone (FedDEO's eq. 5 without its description)"
    return ""


METHOD = Method(
    client="feddeo",
    server="feddeo",
    payload="Descriptions",
    sends="a learned description of every class",
    reveals="what the images of a class look like, as far as the diffusion model can draw it; "
    "with few images, also whether a given image is among them",
    client_parts=DIFFUSION_PARTS,
    privacy="approximate",
    section="feddeo",
    dimensions=dimensions,
    problems=problems,
    sum_problem=sum_problem,
    guarantee_note=guarantee_note,
    table_note=table_note,
    summand_bound=64.0,
)
