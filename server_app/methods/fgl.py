"""FGL's server half: images from the clients' captions.

FGL (Zhang et al., arXiv 2306.16064): the class's name and a caption are the prompt, and a negative prompt is the guidance's other end.

Differences from the paper:

1. Theirs: a negative prompt in words. Ours: `fgl.negative-prompt`, empty unless it is set: the digits' kit knows no such words.
2. Ours: R images a class and client, as for the other methods; image i has the client's i-th caption of the class, and begins again when they
   are used up.
"""

from collections.abc import Mapping
from typing import cast

import torch

from osfl.payloads import Captions, Payload
from osfl.prompts import fill
from server_app.job import GlobalModel, ServerJob
from server_app.methods.prompts_only import sample
from server_app.synthesis.engine import load_engine
from server_app.synthesis.images import render
from server_app.synthesis.plan import ImageJob, plan_images
from server_app.synthesis.workers import Sample
from server_app.training import train_global


def run(job: ServerJob, payloads: Mapping[str, Payload]) -> dict[str, GlobalModel]:
    """R images for every class of every client; one global model, FT."""
    settings = job.config.fgl
    captions = {
        (client, job.classes.index(name)): texts
        for client, payload in cast(Mapping[str, Captions], payloads).items()
        for name, texts in zip(payload.classes, payload.texts, strict=True)
    }
    plan = plan_images(
        "fgl", job.config.seed, job.held(payloads), job.config.synthesis.images_per_class
    )
    sampling = {
        "guidance": settings.guidance,
        "prompt": settings.prompt,
        "negative": settings.negative_prompt,
    }
    images = render(job, plan, lambda device: _sampler(job, device, captions), sampling)
    return {"FT": train_global(job, "FT", images.pixels, images.labels)}


def prompt_of(
    job: ServerJob, captions: Mapping[tuple[str, int], tuple[str, ...]], image: ImageJob
) -> str:
    """The prompt of one image."""
    texts = captions[image.client, image.label]
    caption = texts[image.index % len(texts)]
    return fill(job.config.fgl.prompt, {"class": job.classes[image.label]}, caption)


def _sampler(
    job: ServerJob, device: torch.device, captions: Mapping[tuple[str, int], tuple[str, ...]]
) -> Sample:
    kit, settings = load_engine(job.kit, device, job.config.synthesis), job.config.fgl
    nothing = kit.text([settings.negative_prompt])
    return lambda jobs: sample(
        kit,
        jobs,
        kit.text([prompt_of(job, captions, image) for image in jobs]),
        settings.guidance,
        job.config.synthesis.steps,
        nothing,
    )
