"""domain-vector's server half: images of every class in each client's domain.

The condition of client k's class y is tau(prompt of y) + v_k (+ w_ky), guided away from the empty
prompt. Because v_k depends on no class, the server can sample classes in k's domain of which k has
no images (`domain-vector.classes = "all"`). Under label skew, every class then appears in every
domain.

Differences from FedDEO (arXiv 2407.19953), on which it is based:

1. Theirs, eq. 5: the empty prompt, the prompt and the description. Ours: the empty prompt and the
   shifted prompt, which combines the other two.
2. Theirs: the classes that a client holds. Ours: these or all classes.
"""

from collections.abc import Mapping, Sequence

import torch

from osfl.payload.kinds import DomainVector
from server_app.context import ServerJob, rows_by_class
from server_app.costs import NoisyMean
from server_app.methods.prompts_only import sample
from server_app.pipeline import Models, plan_held_classes, synthesize_and_train
from server_app.synthesis.engine import load_engine
from server_app.synthesis.plan import ImageJob, plan_images
from server_app.synthesis.workers import Sample


def run(job: ServerJob, payloads: Mapping[str, DomainVector]) -> Models:
    """Sample R images per class in every client's domain, and train one global model, FT."""
    return synthesize_and_train(job, payloads, sampler, plan=plan)


def plan(job: ServerJob, payloads: Mapping[str, DomainVector]) -> list[ImageJob]:
    """Plan R images per client and class, for held classes or all classes."""
    if job.config.domain_vector.classes == "held":
        return plan_held_classes(job, payloads)
    labels_of = dict.fromkeys(payloads, range(len(job.classes)))
    per_class = job.config.synthesis.images_per_class
    return plan_images(job.config.method, job.config.seed, labels_of, per_class)


def sampler(job: ServerJob, device: torch.device, payloads: Mapping[str, DomainVector]) -> Sample:
    """Return a function that samples images from prompts shifted by their clients' vectors."""
    kit = load_engine(job.kit, device, job.config.synthesis)
    settings = job.config.domain_vector
    steps = job.config.synthesis.steps
    prompts = kit.text(job.config.prompts(job.classes))
    domains = {
        client: payload.domain.to(kit.device, kit.dtype) for client, payload in payloads.items()
    }
    offsets = rows_by_class(
        job, payloads, lambda payload: _offsets(payload).to(kit.device, kit.dtype)
    )

    def states(image: ImageJob) -> torch.Tensor:
        # d_y = tau(prompt of y) + v_k + w_ky
        shifted = prompts.states[image.label] + domains[image.client]
        offset = offsets.get((image.client, image.label))
        return shifted if offset is None else shifted + offset

    def draw(jobs: Sequence[ImageJob]) -> torch.Tensor:
        text = prompts[[image.label for image in jobs]]
        c = text.with_states(torch.stack([states(image) for image in jobs]))
        return sample(kit, jobs, c, settings.guidance, steps)

    return draw


def _offsets(payload: DomainVector) -> torch.Tensor:
    """Return w_y of every class that the client holds, [C, L, d]."""
    if payload.offsets is None:
        return torch.zeros(len(payload.classes), *payload.domain.shape)
    return payload.offsets[:, 0]


def noisy_mean(sizes: Mapping[str, int]) -> NoisyMean:
    """Return the domain's vector, the mean over all images."""
    return NoisyMean(sizes["p"] * sizes["d"], over_classes=False)
