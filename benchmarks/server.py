"""The server of the tables: a job in a folder of its own, and the images that it draws."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.clients import CLIENTS
from osfl.config import RunConfig
from osfl.methods import server_module
from osfl.payload.kinds import Payload
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app.context import ServerJob
from server_app.methods import fedcado, fedlmg
from server_app.pipeline import plan_held_classes
from server_app.synthesis.images import SyntheticSet, synthesize
from server_app.synthesis.workers import Sample


def job_in(config: RunConfig, name: str, clients: Sequence[str] = CLIENTS) -> ServerJob:
    """With a folder of that name, or the one that is there: an interrupted job goes on in it."""
    folder = open_run_folder(config, name, 0)
    return ServerJob(config, folder, Status(folder.path), tuple(clients))


def sampler_of(config: RunConfig) -> Callable[..., Sample]:
    """What draws a method's images; FedCADO's has FedLMG's frame."""
    if config.method == "fedcado":
        return partial(fedlmg.sampler, settings=config.fedcado, sample=fedcado.sample)
    found: Callable[..., Sample] = server_module(config.method).sampler
    return found


def drawn_by(job: ServerJob, payloads: Mapping[str, Payload]) -> SyntheticSet:
    """A plan's images, each under what its client sent; those that are there are read."""
    sampler = sampler_of(job.config)
    planned = plan_held_classes(job, payloads)
    return synthesize(job, planned, lambda device: sampler(job, device, payloads))
