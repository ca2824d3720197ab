"""Client jobs on the tiny kit."""

import torch

from client_app.context import ClientJob
from osfl.config import parse_run_config
from osfl.data.load import Images
from tests.helpers.settings import quick

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def images(*labels: int) -> Images:
    generator = torch.Generator().manual_seed(5)
    return Images(
        torch.randint(256, (len(labels), 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.tensor(labels),
    )


def job_of(kit, data: Images, **overrides: object) -> ClientJob:  # type: ignore[no-untyped-def]
    return ClientJob(
        parse_run_config(quick(**overrides)),
        "client-0",
        CLASSES,
        lambda size: data,
        str(kit),
        torch.device("cpu"),
    )
