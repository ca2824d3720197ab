"""FedDF (Lin et al., arXiv 2006.07242): FedAvg followed by ensemble distillation.

The ensemble of all clients' models teaches their mean on a public proxy set without labels. Clients
may have several architectures (algorithm 3). Each architecture has its own mean, which learns from
all clients' models and is sent to the clients of this architecture.

Differences from the paper:

1. Theirs: CIFAR-100 or generated images as the proxy set; ImageNet in FedDEO's and FedLMG's
   comparisons. Ours: a seeded sample of `rounds.proxy-images` images from a folder (`rounds.proxy`)
   or from the digits' public split, which is mostly photographs.
2. Theirs: Adam with lr 1e-3, batches of 128, up to 10,000 steps with early stopping. Ours:
   `rounds.distillation-steps` steps of Adam with lr 1e-4 after every round, because there is no
   labeled set for early stopping, and few steps with lr 1e-3 leave a model at chance.
3. Theirs (code) and ours: the student's BatchNorm layers are in training mode. At their momentum of
   0.1, 30 steps replace 96 % of the averaged statistics by the proxy set's, with which the model is
   tested.
4. Theirs: one final model per client architecture. Ours: the global model is that of
   `global-model.architecture`. If no client has this architecture (FedCADO's table 4 has a
   ResNet-50), it is an additional student without a mean to start from, and continues from the
   previous round's model, initially from its own initial weights. So does an architecture of which
   no client replied in a round.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from osfl.kit.used_parts import final_model, initial_models
from osfl.models.classifiers import compute_logits, normalize, rebuild_classifier
from osfl.util.pixels import to_float
from osfl.util.seeds import generator_of, seed_of
from server_app.baselines.fedavg import all_clients
from server_app.baselines.models import initial_state
from server_app.baselines.proxy import Proxy, check_proxy, load_proxy, pixels
from server_app.baselines.run import CheckedGrid
from server_app.context import ServerJob

CHUNK = 256  # images per batch of the teachers


class FedDF(FedAvg):
    """FedAvg with ensemble distillation after every round.

    Attributes:
        memory: the models of all architectures except the global model's, which Flower holds; the
            keys are `<architecture>/<array name>`.
        first: rounds finished before this strategy was started.
    """

    def __init__(self, job: ServerJob, proxy: Proxy):
        super().__init__(fraction_evaluate=0.0, **all_clients(job))
        self.job = job
        self.proxy = proxy
        self.first = 0
        self.final = final_model(job.config).architecture
        self.settings = {model.architecture: model for _, model in initial_models(job.config)}
        self.memory: dict[str, np.ndarray] = {}
        for architecture, settings in self.settings.items():
            if architecture != self.final:
                self._remember(architecture, initial_state(job, settings))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send every client, including a later standby, the model of its architecture."""
        federation = cast(CheckedGrid, grid)
        config["server-round"] = server_round
        self._previous = self._models(arrays)
        federation.standby_messages = {
            architecture: RecordDict({"arrays": model, "config": config})
            for architecture, model in self._previous.items()
        }
        self._architectures = {
            node: self.job.architectures[client]
            for client, node in federation.members.nodes.items()
        }
        return [
            Message(
                federation.standby_messages[architecture], dst_node_id=node, message_type="train"
            )
            for node, architecture in self._architectures.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Distill all clients' models into one student per architecture (FedDF, algorithm 3).

        A student starts from the weighted mean of the models of its architecture.
        """
        replies = list(replies)
        if not replies:
            return None, None
        students = {}
        architectures = {
            self.final,
            *self._architectures.values(),
            *map(_architecture_of, replies),
        }
        for architecture in sorted(architectures):
            group = [reply for reply in replies if _architecture_of(reply) == architecture]
            mean, _ = super().aggregate_train(server_round, group) if group else (None, None)
            arrays = mean or self._previous[architecture]
            students[architecture] = self._model(architecture, arrays)
        teachers = [
            self._model(_architecture_of(reply), reply.content.array_records["arrays"])
            for reply in replies
        ]
        distill(list(students.values()), teachers, self.proxy, self.job, self.first + server_round)
        for architecture, student in students.items():
            if architecture != self.final:
                self._remember(architecture, student.cpu().state_dict())
        state = students[self.final].cpu().state_dict()
        return ArrayRecord({name: Array(value.numpy()) for name, value in state.items()}), None

    def _remember(self, architecture: str, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.memory[f"{architecture}/{name}"] = value.numpy()

    def _models(self, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """Return the last model of every architecture."""
        models = {architecture: ArrayRecord() for architecture in self.settings}
        for key, value in self.memory.items():
            architecture, _, name = key.partition("/")
            models[architecture][name] = Array(value)
        models[self.final] = arrays
        return models

    def _model(self, architecture: str, arrays: ArrayRecord) -> nn.Module:
        small_stem = self.settings[architecture].small_stem
        state = arrays.to_torch_state_dict()
        return rebuild_classifier(state, architecture, len(self.job.classes), small_stem)


def _architecture_of(reply: Message) -> str:
    return str(reply.content.config_records["model"]["architecture"])


def distill(
    students: Sequence[nn.Module],
    teachers: Sequence[nn.Module],
    proxy: Proxy,
    job: ServerJob,
    number: int,
) -> None:
    """Minimize KL(softmax(mean of the teachers' logits) || student) on the proxy set.

    Students are trained in place and on the same batches (FedDF, eq. 2).

    Args:
        students: one per architecture.
        teachers: all clients' models.
        proxy: the public images.
        number: the round's number, which seeds the batches.
    """
    settings = job.config.rounds
    generator = generator_of(job.config.seed, "feddf", number)
    batches = [
        torch.randperm(len(proxy), generator=generator)[: settings.distillation_batch_size]
        for _ in range(settings.distillation_steps)
    ]
    # A round uses only a part of a large proxy set
    rows = torch.cat(batches).unique()
    target = ensemble(teachers, proxy, rows, job.device)
    optimizers = []
    for student in students:
        student.to(job.device).train()
        optimizers.append(torch.optim.Adam(student.parameters(), lr=settings.distillation_lr))
    with torch.random.fork_rng(devices=[job.device] if job.device.type == "cuda" else []):
        torch.manual_seed(seed_of(job.config.seed, "feddf", "dropout", number))
        for batch in batches:
            images = to_float(pixels(proxy, batch).to(job.device))
            probabilities = target[torch.searchsorted(rows, batch)].to(job.device)
            for student, optimizer in zip(students, optimizers, strict=True):
                # FedDF, eq. 2: KL(softmax(mean of the teachers' logits) || student)
                loss = F.kl_div(
                    F.log_softmax(student(normalize(images, student)), dim=1),
                    probabilities,
                    reduction="batchmean",
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for student in students:
        student.eval()


def ensemble(
    teachers: Sequence[nn.Module], proxy: Proxy, rows: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the softmax of the teachers' mean logits (AVGLOGITS) on proxy images, [N, C]."""
    means = []
    for chunk in rows.split(CHUNK):
        images = pixels(proxy, chunk)
        logits = [compute_logits(teacher, images, device) for teacher in teachers]
        means.append(torch.stack(logits).mean(dim=0))
    return F.softmax(torch.cat(means), dim=1)


def strategy(job: ServerJob) -> FedAvg:
    """Return FedDF with the proxy set of `rounds.proxy`."""
    proxy = load_proxy(job)
    check_proxy(job, proxy)
    return FedDF(job, proxy)
