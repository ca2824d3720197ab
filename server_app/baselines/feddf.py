"""FedDF (Lin et al., arXiv 2006.07242): FedAvg, and then all clients' models teach their mean.

They teach on a public proxy set without labels.
Clients may have models of several architectures (algorithm 3). Each architecture has its own mean,
every mean learns from all clients' models, and goes back to the clients of its architecture.

Differences from the paper:

1. Theirs: CIFAR-100 or generated images as proxy; in FedDEO's and FedLMG's comparison, ImageNet.
   Ours: the digits' public split, mostly photographs, or a folder (`rounds.proxy`); of either a
   seeded sample of `rounds.proxy-images`.
2. Theirs: Adam, lr 1e-3, batches of 128, up to 10,000 steps with early stopping. Ours: after every
   round `rounds.distillation-steps` steps of Adam at lr 1e-4; there is no labelled set to stop by,
   and so few steps of 1e-3 leave a model at chance.
3. As in the authors' code, the student trains with its BatchNorm layers in training mode: at their
   momentum of 0.1, 30 steps replace 96 % of the averaged statistics with the proxy's, and FedDF's
   model is tested with those.
4. Theirs: the result is a model of each of the clients' architectures. Ours: one of them is the
   global model, that of `global-model.architecture`. Where no client has that one (FedCADO's table
   4 has a ResNet-50), it is one more student: it has no mean to begin at and goes on from where the
   last round left it, in the first round from its own initial weights. So does an architecture
   whose clients sent nothing in a round.
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
from osfl.models.classifiers import logits_of, normalise, rebuild
from osfl.util.pixels import to_float
from osfl.util.seeds import generator_of, seed_of
from server_app.baselines.fedavg import everyone
from server_app.baselines.models import initial_state
from server_app.baselines.proxy import Proxy, check_proxy, load_proxy, pixels
from server_app.baselines.run import RoundsGrid
from server_app.context import ServerJob

CHUNK = 256  # images that the teachers see at a time


class FedDF(FedAvg):
    """FedAvg with ensemble distillation after every round.

    Attributes:
        memory: the models of all architectures but the global model's, which is Flower's own;
            every array as `<architecture>/<its name>`.
        first: rounds that were done before this strategy was started.
    """

    def __init__(self, job: ServerJob, proxy: Proxy):
        super().__init__(fraction_evaluate=0.0, **everyone(job))
        self.job = job
        self.proxy = proxy
        self.first = 0
        self.final = final_model(job.config).architecture
        self.settings = {each.architecture: each for _, each in initial_models(job.config)}
        self.memory: dict[str, np.ndarray] = {}
        for architecture, settings in self.settings.items():
            if architecture != self.final:
                self._remember(architecture, initial_state(job, settings))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Give every client the model of its own architecture, and a spare that comes, too."""
        between = cast(RoundsGrid, grid)
        config["server-round"] = server_round
        self._before = self._models(arrays)
        between.contents = {
            architecture: RecordDict({"arrays": model, "config": config})
            for architecture, model in self._before.items()
        }
        self._asked = {
            node: self.job.architectures[client] for client, node in between.members.nodes.items()
        }
        return [
            Message(between.contents[architecture], dst_node_id=node, message_type="train")
            for node, architecture in self._asked.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """FedDF, algorithm 3: a student for each architecture, taught by all clients' models.

        A student starts from the weighted mean of the models of its architecture.
        """
        replies = list(replies)
        if not replies:
            return None, None
        students = {}
        known = {self.final, *self._asked.values(), *map(_architecture_of, replies)}
        for architecture in sorted(known):
            group = [each for each in replies if _architecture_of(each) == architecture]
            mean, _ = super().aggregate_train(server_round, group) if group else (None, None)
            students[architecture] = self._model(architecture, mean or self._before[architecture])
        teachers = [
            self._model(_architecture_of(each), each.content.array_records["arrays"])
            for each in replies
        ]
        distil(list(students.values()), teachers, self.proxy, self.job, self.first + server_round)
        for architecture, student in students.items():
            if architecture != self.final:
                self._remember(architecture, student.cpu().state_dict())
        state = students[self.final].cpu().state_dict()
        return ArrayRecord({name: Array(value.numpy()) for name, value in state.items()}), None

    def _remember(self, architecture: str, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.memory[f"{architecture}/{name}"] = value.numpy()

    def _models(self, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """The last model of every architecture."""
        models = {architecture: ArrayRecord() for architecture in self.settings}
        for place, value in self.memory.items():
            architecture, _, name = place.partition("/")
            models[architecture][name] = Array(value)
        models[self.final] = arrays
        return models

    def _model(self, architecture: str, arrays: ArrayRecord) -> nn.Module:
        small_stem = self.settings[architecture].small_stem
        state = arrays.to_torch_state_dict()
        return rebuild(state, architecture, len(self.job.classes), small_stem)


def _architecture_of(reply: Message) -> str:
    return str(reply.content.config_records["model"]["architecture"])


def distil(
    students: Sequence[nn.Module],
    teachers: Sequence[nn.Module],
    proxy: Proxy,
    job: ServerJob,
    number: int,
) -> None:
    """Minimise KL(softmax(mean of the teachers' logits) || student) on the proxy (FedDF, eq. 2).

    Every student is trained in place, on the same batches.

    Args:
        number: of the round; it seeds the batches.
    """
    settings = job.config.rounds
    generator = generator_of(job.config.seed, "feddf", number)
    batches = [
        torch.randperm(len(proxy), generator=generator)[: settings.distillation_batch_size]
        for _ in range(settings.distillation_steps)
    ]
    # Of a large proxy set one round sees but a part
    rows = torch.cat(batches).unique()
    target = ensemble(teachers, proxy, rows, job.device)
    optimisers = []
    for student in students:
        student.to(job.device).train()
        optimisers.append(torch.optim.Adam(student.parameters(), lr=settings.distillation_lr))
    with torch.random.fork_rng(devices=[job.device] if job.device.type == "cuda" else []):
        torch.manual_seed(seed_of(job.config.seed, "feddf", "dropout", number))
        for batch in batches:
            images = to_float(pixels(proxy, batch).to(job.device))
            taught = target[torch.searchsorted(rows, batch)].to(job.device)
            for student, optimiser in zip(students, optimisers, strict=True):
                loss = F.kl_div(
                    F.log_softmax(student(normalise(images, student)), dim=1),
                    taught,
                    reduction="batchmean",
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    for student in students:
        student.eval()


def ensemble(
    teachers: Sequence[nn.Module], proxy: Proxy, rows: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """softmax of the mean of the teachers' logits (AVGLOGITS) on some proxy images [N, C]."""
    means = []
    for part in rows.split(CHUNK):
        images = pixels(proxy, part)
        logits = [logits_of(teacher, images, device) for teacher in teachers]
        means.append(torch.stack(logits).mean(dim=0))
    return F.softmax(torch.cat(means), dim=1)


def strategy(job: ServerJob) -> FedAvg:
    """FedDF with the proxy set of `rounds.proxy`."""
    proxy = load_proxy(job)
    check_proxy(job, proxy)
    return FedDF(job, proxy)
