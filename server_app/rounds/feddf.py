"""FedDF (Lin et al., arXiv 2006.07242): FedAvg, and then the mean is taught by the clients' models on a public proxy set without labels.

Differences from the paper:

1. Theirs: CIFAR-100 or generated images as proxy; in FedDEO's and FedLMG's comparison, ImageNet. Ours: the digits' public split, mostly
   photographs, or a folder (`rounds.proxy`).
2. Theirs: Adam, lr 1e-3, batches of 128, up to 10,000 steps with early stopping. Ours: after every round `rounds.distillation-steps` steps of
   Adam at lr 1e-4; there is no labelled set to stop by, and so few steps of 1e-3 leave a model at chance.
3. As in the authors' code, the student trains with its BatchNorm layers in training mode: at their momentum of 0.1, 30 steps replace 96 % of the averaged
   statistics with the proxy's, and FedDF's model is tested with those.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from PIL import Image, UnidentifiedImageError
from torch import nn
from torch.nn import functional as F

from osfl.classifiers import logits_of, normalise, rebuild
from osfl.config import ConfigError
from osfl.data.load import to_pixels
from osfl.seeds import generator_of
from server_app.job import ServerJob
from server_app.rounds.fedavg import everyone


class FedDF(FedAvg):
    """FedAvg with ensemble distillation after every round."""

    def __init__(self, job: ServerJob, proxy: torch.Tensor):
        super().__init__(fraction_evaluate=0.0, **everyone(job))
        self.job, self.proxy = job, proxy
        self.first = 0  # rounds that were done before this strategy was started

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedDF, algorithm 1: the student starts from the weighted mean and learns from the mean of the teachers' logits."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return arrays, metrics
        teachers = [self._model(reply.content.array_records["arrays"]) for reply in replies]
        student = self._model(arrays)
        distil(student, teachers, self.proxy, self.job, self.first + server_round)
        return ArrayRecord(
            {n: Array(t.numpy()) for n, t in student.cpu().state_dict().items()}
        ), metrics

    def _model(self, arrays: ArrayRecord) -> nn.Module:
        settings = self.job.config.classifier
        return rebuild(
            arrays.to_torch_state_dict(),
            settings.architecture,
            len(self.job.classes),
            settings.small_stem,
        )


def distil(
    student: nn.Module, teachers: list[nn.Module], proxy: torch.Tensor, job: ServerJob, number: int
) -> None:
    """Minimise KL(softmax(mean of the teachers' logits) || student) on the proxy images, in place (FedDF, eq. 2)."""
    settings = job.config.rounds
    target = F.softmax(
        torch.stack([logits_of(teacher, proxy, job.device) for teacher in teachers]).mean(dim=0),
        dim=1,
    )
    student.to(job.device).train()
    optimiser = torch.optim.Adam(student.parameters(), lr=settings.distillation_lr)
    generator = generator_of(job.config.seed, "feddf", number)
    for _ in range(settings.distillation_steps):
        rows = torch.randperm(len(proxy), generator=generator)[: settings.distillation_batch_size]
        logits = student(normalise(proxy[rows].to(job.device).float() / 127.5 - 1))
        loss = F.kl_div(
            F.log_softmax(logits, dim=1), target[rows].to(job.device), reduction="batchmean"
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    student.eval()


def load_proxy(job: ServerJob) -> torch.Tensor:
    """The proxy images, uint8 [N, 3, S, S].

    Raises:
        ConfigError: no such folder, or no image in it.
    """
    settings, size = job.config.rounds, job.config.data.image_size
    if settings.proxy == "public":
        from osfl.data.digits import load_split

        rows = load_split("public").shuffle(seed=job.config.seed)
        rows = rows.select(range(min(settings.proxy_images, len(rows))))
        return torch.stack([to_pixels(image, size) for image in rows["image"]])
    files = sorted(
        p
        for p in Path(settings.proxy).expanduser().rglob("*")
        if p.is_file() and not p.name.startswith(".")
    )
    pixels = []
    for file in files[: settings.proxy_images]:
        try:
            with Image.open(file) as image:
                pixels.append(to_pixels(image, size))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise ConfigError(
                f"rounds.proxy: {file} is not a readable image ({error}). Remove or replace it"
            ) from error
    if len(pixels) < 2:
        raise ConfigError(
            f"rounds.proxy = {settings.proxy!r}: must be 'public' or a folder with at least two images"
        )
    return torch.stack(pixels)


def strategy(job: ServerJob) -> FedAvg:
    """FedDF with the proxy set of `rounds.proxy`."""
    return FedDF(job, load_proxy(job))
