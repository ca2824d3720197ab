"""mixed: every client sends the kind of payload that its site allows and its machine can make."""

from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import Method
from osfl.methods.shared_sections import Weight
from osfl.util.markers import Doc, OneOf, Range, ServerKey
from osfl.util.names import split_names


@dataclass(frozen=True)
class MixedConfig:
    """mixed: clients with different kinds of payload. Other methods' runs have no such section."""

    methods: Annotated[
        str,
        Doc(
            "The kinds of payload that the run welcomes, comma-separated, the preferred one "
            "first: a method, or two joined by `+`, sent in one message."
        ),
    ] = "feddeo,oscar,fedlmg"
    assignment: Annotated[
        str,
        OneOf("auto", "cyclic"),
        Doc(
            "The kind of a client whose node-config names none: `auto`, by the site; or `cyclic`, "
            "in a simulation the i-th kind for client i, cyclically."
        ),
    ] = "auto"
    teacher: Annotated[
        str,
        Doc(
            "The teacher of the global model: a method of `methods` that sends statistics of "
            "features, such as fedcgs, by its head; or zero-shot, by a CLIP (`[zero-shot]`). "
            "Empty: none."
        ),
        ServerKey(),
    ] = ""
    teacher_temperature: Annotated[
        float,
        Range(0.01, 100),
        Doc("T: temperature of the teacher's and the student's softmax."),
        ServerKey(),
    ] = 2.0
    teacher_weight: Annotated[
        Weight,
        Doc("Weight of the divergence from the teacher."),
        ServerKey(),
    ] = 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds, in order."""
        return split_names(self.methods)


METHOD = Method(
    client=None,
    server="mixed",
    payload=None,
    sends="nothing itself, but the payload of another method",
    section="mixed",
    settings=MixedConfig,
    numbers="none",
)
