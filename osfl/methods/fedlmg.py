"""FedLMG: images guided by the clients' classifiers (arXiv 2311.08870)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import Method
from osfl.methods.sent_classifier import REVEALS, SENDS, guarantee_problem
from osfl.methods.shared_sections import Scale, Weight
from osfl.util.markers import Approximate, Doc, OneOf, Range
from osfl.util.names import split_names
from osfl.util.text import quote

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


@dataclass(frozen=True)
class FedLMGConfig:
    """FedLMG: classifier guidance, and the training of the global models."""

    guidance: Annotated[Scale, Doc("Scale of classifier-free guidance.")]
    classifier_weight: Annotated[
        Weight, Doc("Weight of the classifier's cross-entropy in L. 0: without it.")
    ]
    bn_weight: Annotated[
        Weight, Doc("lambda: weight of the BatchNorm statistics' loss in L. 0: without it.")
    ]
    bn_statistics: Annotated[
        str,
        OneOf("image", "unit"),
        Doc(
            "The images whose statistics are compared: each image alone, as in the papers, or a "
            "whole work unit, which mixes the classes."
        ),
    ]
    gradient_scale: Annotated[float, Range(0, 1e6), Doc("Factor of L's gradient; 1 in the paper.")]
    gradient: Annotated[
        str,
        OneOf("full", "x0"),
        Doc(
            "The gradient's path: through the UNet (full), or only to its estimate of the image "
            "(x0), for half the cost."
        ),
        Approximate("full", "the classifier's gradient at x0"),
    ]
    strategies: Annotated[
        str,
        Doc(
            "The global models to train, comma-separated: fine-tuning (ft), multi-teacher "
            "distillation (md) and specific-teacher distillation (sd)."
        ),
    ]
    distillation_weight: Annotated[Weight, Doc("Weight of the teachers' loss in md and sd.")]
    teacher_mean: Annotated[
        str,
        OneOf("known-classes", "plain"),
        Doc(
            "The teacher of a class in md: the mean of the clients that hold the class "
            "(known-classes), or the uniform mean of all clients (plain)."
        ),
    ]

    # FedCADO's section inherits this
    section = "fedlmg"

    @property
    def differentiates_unet(self) -> bool:
        """Return whether the sampler computes a gradient through the UNet."""
        return self.gradient == "full"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        strategies = split_names(self.strategies)
        if not strategies or set(strategies) - {"ft", "md", "sd"}:
            yield (
                f"{self.section}.strategies = {quote(self.strategies)}: must name some of ft, "
                "md, sd"
            )


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps FedLMG from working."""
    yield from problems_of_guidance(run, run.fedlmg)


def problems_of_guidance(run: "RunConfig", settings: FedLMGConfig) -> Iterator[str]:
    """Yield what keeps guidance by classifiers and their teaching from working."""
    mixing = run.global_model.mixing
    if mixing != "none" and set(split_names(settings.strategies)) & {"md", "sd"}:
        yield (
            f"global-model.mixing = {mixing!r}: must be none with {settings.section}.strategies "
            f"= {quote(settings.strategies)}, whose teachers score whole images; or set "
            "strategies to ft"
        )
    interval = run.synthesis.cache_interval
    if interval != 1 and settings.differentiates_unet:
        yield (
            f"synthesis.cache-interval = {interval}: must be 1 with {settings.section}.gradient "
            "= 'full', which differentiates through the UNet; or set the gradient to 'x0', and "
            "fedcado.noise-edits to 0"
        )


METHOD = Method(
    client="classifier",
    server="fedlmg",
    payload="Classifier",
    sends=SENDS,
    reveals=REVEALS,
    privacy="approximate",
    section="fedlmg",
    teachers=True,
    problems=problems,
    guarantee_problem=guarantee_problem,
)
