"""FGL's server half: images from the clients' captions.

FGL (Zhang et al., arXiv 2306.16064): the prompt consists of the class's name and a caption, and is
guided away from a negative prompt.

Differences from the paper:

1. Theirs: a negative prompt in words. Ours: `fgl.negative-prompt`, empty by default, because the
   digits' kit does not know such words.
2. Ours: R images per client and class, as for the other methods. Image i has the client's i-th
   caption of the class, and captions repeat when they run out.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.payload.kinds import Captions
from osfl.util.prompts import fill_prompt
from server_app.context import ServerJob, rows_by_class
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, Captions]) -> Models:
    """Sample R images per client and class, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, Captions]) -> Sample:
    """Return a function that samples each image from its own prompt."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    guidance = job.config.fgl.guidance
    steps = job.config.synthesis.steps
    captions = rows_by_class(job, payloads, lambda payload: payload.texts)
    negative = kit.text([job.config.fgl.negative_prompt])

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        prompts = [prompt_of(job, captions[image.client, image.label], image) for image in jobs]
        return sample(kit, jobs, kit.text(prompts), guidance, steps, negative)

    return draw


def prompt_of(job: ServerJob, captions: Sequence[str], image: ImageJob) -> str:
    """Return an image's prompt, with one of its client's captions of its class."""
    caption = captions[image.index % len(captions)]
    return fill_prompt(
        job.config.fgl.prompt,
        {"class": job.config.data.prompt_name(job.classes[image.label])},
        caption,
    )
