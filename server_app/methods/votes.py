"""votes' server half: images of a class in the domain that its client's images voted for.

Prompts and guidance are as in prompts-domain; the domain's name is the winner among the run's
`votes.candidates`, by its number.

Differences: those of the client half.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.payloads import Votes
from osfl.prompts import fill
from server_app.driver import Models, synthesise_and_train
from server_app.job import ServerJob, by_class
from server_app.methods.prompts_only import sample
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Votes]) -> Models:
    """R images for every class of every client from prompts that name the winner.

    One global model, FT.
    """
    return synthesise_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Votes]) -> Sample:
    """Each image by a prompt that names its class and the winner of its client's class."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    settings = job.config.votes
    steps = job.config.synthesis.steps
    word = job.config.data.word
    winners = by_class(job, payloads, lambda payload: payload.winners.tolist())

    def prompt(image: ImageJob) -> str:
        domain = settings.words[winners[image.client, image.label]]
        return fill(settings.prompt, {"domain": domain, "class": word(job.classes[image.label])})

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        c = kit.text([prompt(image) for image in jobs])
        return sample(kit, jobs, c, settings.guidance, steps)

    return draw
