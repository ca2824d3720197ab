"""votes' server half: images of a class in the domain that its client's images voted for.

Prompts and guidance are those of prompts-domain. The payload has the index of the winning domain
name in the run's `votes.candidates`.

Differences from the paper: those of the client half.
"""

from collections.abc import Mapping

import torch

from osfl.payload.kinds import Votes
from server_app.context import ServerJob, rows_by_class
from server_app.methods.prompts_domain import sampler_by_name
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Votes]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Votes]) -> Sample:
    """Return a function that samples images from prompts with class and winning domain."""
    settings = job.config.votes
    winners = rows_by_class(job, payloads, lambda payload: payload.winners.tolist())
    return sampler_by_name(
        job, device, settings, lambda image: settings.words[winners[image.client, image.label]]
    )
