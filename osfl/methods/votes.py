"""votes: each image votes for the prompt that fits it best."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from osfl.methods.declaration import DIFFUSION_PARTS, Method
from osfl.methods.shared_sections import Scale
from osfl.util.markers import Doc, ManyNames, OneOf, Range
from osfl.util.names import split_names
from osfl.util.text import name_problem, quote, sanitize


@dataclass(frozen=True)
class VotesConfig:
    """votes: each image votes for the prompt that fits it best."""

    candidates: Annotated[
        str,
        ManyNames(),
        Doc("The names of the candidate domains, comma-separated, at most 256."),
    ]
    granularity: Annotated[
        str,
        OneOf("class", "client"),
        Doc(
            "The aggregation granularity of the votes: per class, or over all classes of a client."
        ),
    ]
    draws: Annotated[
        int, Range(1, 1000), Doc("Timesteps at which an image is compared with a prompt.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per batch.")]
    prompt: Annotated[str, Doc("The prompt; `{domain}` and `{class}` stand for the names.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]

    @property
    def words(self) -> tuple[str, ...]:
        """The candidate domains, in order."""
        return split_names(self.candidates)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        names = self.words
        setting = f"votes.candidates = {sanitize(self.candidates, 200)!r}"
        if not 2 <= len(names) <= 256:
            yield f"{setting}: {len(names)} names; must be 2 to 256, comma-separated"
        if len(set(names)) < len(names):
            yield f"{setting}: a name is listed twice; list each domain once"
        for name in names:
            if problem := name_problem(name):
                yield (
                    f"{setting}: {sanitize(name, 80)!r} {problem}; a domain's name is part of "
                    "a prompt"
                )
        if "{class}" not in self.prompt or "{domain}" not in self.prompt:
            yield f"votes.prompt = {quote(self.prompt)}: must contain {{class}} and {{domain}}"


METHOD = Method(
    client="votes",
    server="votes",
    payload="Votes",
    sends="for every class, which of the run's candidate domains its images resemble most",
    reveals="which of these domain names fits a class best",
    client_parts=DIFFUSION_PARTS,
    privacy="pure",
    section="votes",
    numbers="none",
    summand_bound=1.0,
)
