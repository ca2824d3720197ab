"""Shared by the methods whose clients send a classifier: fedlmg, fedcado and local."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig

SENDS = "its classifier, trained on its own images"
REVEALS = (
    "what the images of a class have in common, their BatchNorm statistics, and for many images "
    "whether they are in the training set"
)


def guarantee_problem(run: "RunConfig") -> str:
    """Return the setting that rules out DP-SGD, with a hint; "" if there is none."""
    if run.classifier.mixing == "none":
        return ""
    return (
        f"classifier.mixing = {run.classifier.mixing!r}: must be none with epsilon, because "
        "DP-SGD clips the gradient of each image"
    )
