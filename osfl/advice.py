"""The rule of `osfl advise`: which methods are worth it, from three shares of each client's images.

The rule is ours. Its thresholds are in accuracy, and it is checked against the measured tables in
benchmarks/accuracy/tables.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean

from osfl.methods.declaration import Method

# Zero-shot is preferred to a head that is better by at most this
MARGIN = 0.02
# An accuracy below this multiple of chance is near chance
NEAR_CHANCE = 2
# Smallest chance-corrected accuracy, (accuracy - chance) / (1 - chance), of a kit that knows the
# classes
KNOWS = 0.15

FIRST = "first choice"
WORTH = "worth a try"
NOT_WORTH = "not worth it"
UNKNOWN = "unknown"

# Kinds of methods, by what their result depends on
ZERO_SHOT = "zero-shot"
FEATURES = "features"
PROMPTS = "prompts"
DESCRIPTIONS = "descriptions"
CLASSIFIERS = "classifiers"
ROUNDS = "rounds"
REFERENCE = "reference"
KINDS = (ZERO_SHOT, PROMPTS, FEATURES, DESCRIPTIONS, CLASSIFIERS, ROUNDS, REFERENCE)


@dataclass(frozen=True)
class Figures:
    """Shares of a client's training images, or of all clients', that are classified correctly.

    Attributes:
        zero_shot: by a CLIP with the classes' prompts.
        head: by a linear head on frozen features, cross-validated within the client.
        diffusion: by the kit's diffusion model with the classes' prompts.
    """

    zero_shot: float | None = None
    head: float | None = None
    diffusion: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgment of a kind of method.

    Attributes:
        verdict: FIRST, WORTH, NOT_WORTH or UNKNOWN.
        reason: a sentence with the figures.
    """

    verdict: str
    reason: str


def kind_of(method: Method) -> str:
    """Return a method's kind, one of `KINDS`."""
    if method.zero_shot:
        return ZERO_SHOT
    if method.rounds:
        return ROUNDS
    if method.features:
        return FEATURES
    if method.samples and method.payload is None:
        return PROMPTS
    if method.sends_classifier and method.global_model:
        return CLASSIFIERS
    return DESCRIPTIONS if method.samples else REFERENCE


def pool(figures: Iterable[Figures]) -> Figures:
    """Return the means over the clients that have each figure."""
    clients = list(figures)
    names = ("zero_shot", "head", "diffusion")
    means: dict[str, float | None] = {}
    for name in names:
        values = [getattr(client, name) for client in clients]
        shares = [value for value in values if value is not None]
        means[name] = mean(shares) if shares else None
    return Figures(**means)


def judge(figures: Figures, classes: int) -> Mapping[str, Verdict]:
    """Judge every kind of method.

    Args:
        figures: of all clients together.
        classes: number of classes.
    """
    if figures == Figures():
        reason = "no client has sent a figure"
        return dict.fromkeys(KINDS, Verdict(UNKNOWN, reason))
    # Chance-corrected accuracy of the kit as a classifier
    knowledge = None
    if figures.diffusion is not None:
        knowledge = (figures.diffusion - 1 / classes) / (1 - 1 / classes)
    verdicts = {
        ZERO_SHOT: _judge_zero_shot(figures, classes),
        FEATURES: _judge_features(figures, classes),
        PROMPTS: _judge_prompts(figures, knowledge),
        DESCRIPTIONS: _judge_descriptions(figures, knowledge),
        CLASSIFIERS: _judge_classifiers(knowledge),
        REFERENCE: Verdict(NOT_WORTH, "a reference to compare with, not a federation"),
    }
    verdicts[ROUNDS] = _judge_rounds(verdicts)
    return _with_first_choice(verdicts, figures)


def _judge_zero_shot(figures: Figures, classes: int) -> Verdict:
    if figures.zero_shot is None:
        return Verdict(NOT_WORTH, "no client has a CLIP: set image-encoder to one, or a kit")
    share = f"a CLIP names {figures.zero_shot:.0%} of the clients' images, and nothing is sent"
    if figures.zero_shot < NEAR_CHANCE / classes:
        return Verdict(NOT_WORTH, f"{share}, but it is near chance ({1 / classes:.0%})")
    if figures.head is None:
        return Verdict(WORTH, share)
    if figures.zero_shot >= figures.head - MARGIN:
        return Verdict(WORTH, f"{share}; a local head has {figures.head:.0%}, hardly more")
    return Verdict(NOT_WORTH, f"{share}, but a local head has {figures.head:.0%}")


def _judge_features(figures: Figures, classes: int) -> Verdict:
    if figures.head is None:
        return Verdict(NOT_WORTH, "no client could train a head on frozen features")
    share = f"a head on frozen features has {figures.head:.0%} within a client"
    if figures.head < NEAR_CHANCE / classes:
        return Verdict(NOT_WORTH, f"{share}, near chance ({1 / classes:.0%})")
    if figures.zero_shot is not None and figures.zero_shot >= figures.head - MARGIN:
        return Verdict(NOT_WORTH, f"{share}, and a CLIP alone {figures.zero_shot:.0%}")
    return Verdict(WORTH, f"{share}: their statistics give such a head for all clients")


def _judge_prompts(figures: Figures, knowledge: float | None) -> Verdict:
    descriptions = _judge_descriptions(figures, knowledge)
    if descriptions.verdict == NOT_WORTH:
        return descriptions
    reason = "sends nothing, but draws the kit's public images, whatever the clients' domains are"
    return Verdict(WORTH, reason)


def _judge_descriptions(figures: Figures, knowledge: float | None) -> Verdict:
    if knowledge is None:
        return Verdict(NOT_WORTH, "no diffusion model draws these images: set a kit for them")
    share = f"the kit names {figures.diffusion:.0%} of the images by its prompts"
    if knowledge < KNOWS:
        return Verdict(NOT_WORTH, f"{share}, near chance: it does not know the classes")
    return Verdict(WORTH, f"{share}: it knows the classes, and a description adds the domain")


def _judge_classifiers(knowledge: float | None) -> Verdict:
    if knowledge is None or knowledge < KNOWS:
        return Verdict(NOT_WORTH, "its teachers need drawn images, which the kit does not know")
    return Verdict(NOT_WORTH, "sends a whole network, a thousand times a description's bytes")


def _judge_rounds(verdicts: Mapping[str, Verdict]) -> Verdict:
    if any(verdict.verdict == WORTH for verdict in verdicts.values()):
        return Verdict(NOT_WORTH, "many rounds of whole networks; a one-shot method is worth it")
    return Verdict(WORTH, "no frozen model knows these images, so one must be trained in rounds")


def _with_first_choice(verdicts: Mapping[str, Verdict], figures: Figures) -> Mapping[str, Verdict]:
    """Mark the first choice among the kinds that are worth a try.

    Synthetic images train a whole network, and come before the statistics of frozen features where
    the kit classifies about as many images correctly as a head. Prompts alone are never first: they
    know nothing of the clients' domains.
    """
    order = [ZERO_SHOT, FEATURES, DESCRIPTIONS, ROUNDS]
    kit = figures.diffusion
    if kit is not None and (figures.head is None or kit >= figures.head - MARGIN):
        order = [ZERO_SHOT, DESCRIPTIONS, FEATURES, ROUNDS]
    first = next(kind for kind in order if verdicts[kind].verdict == WORTH)
    return {**verdicts, first: Verdict(FIRST, verdicts[first].reason)}
