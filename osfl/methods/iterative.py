"""Shared by the iterative baselines: fedavg, fedprox, feddyn and feddf."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from osfl.methods.declaration import Method
from osfl.methods.sent_classifier import REVEALS
from osfl.methods.shared_sections import Weight
from osfl.util.markers import Doc, OneOf, Range, SitePath
from osfl.util.names import is_absolute, not_absolute, split_names
from osfl.util.text import quote

if TYPE_CHECKING:
    from osfl.config.sections import RunConfig


# The aggregations that must know the number of malicious clients
COUNTING = ("krum", "multi-krum", "bulyan")


@dataclass(frozen=True)
class RoundsConfig:
    """Iterative baselines: fedavg, fedprox, feddyn and feddf. Clients train as `[classifier]` says.

    The result of FedDF is a model of `global-model.architecture`.
    """

    count: Annotated[int, Range(1, 100_000), Doc("Rounds.")]
    local_epochs: Annotated[
        int, Range(1, 10_000), Doc("A client's passes over its images per round.")
    ]
    aggregation: Annotated[
        str,
        OneOf("mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"),
        Doc(
            "FedAvg and FedProx: how the server aggregates the clients' models. mean: weighted by "
            "images. The others (docs/robustness.md) weight all clients equally: median and "
            "trimmed-mean of each coordinate, for at least 3 clients; krum (one model) and "
            "multi-krum (the mean of several), for at least 2 f + 3; bulyan, for at least 4 f + "
            "3; f is `rounds.malicious-clients`."
        ),
    ]
    malicious_clients: Annotated[
        int,
        Range(0, 100_000),
        Doc("krum, multi-krum and bulyan: f, the most malicious clients that they tolerate."),
    ]
    trim: Annotated[
        float,
        Range(0, 0.49),
        Doc("trimmed-mean: the share of the models that is dropped at each end of a coordinate."),
    ]
    proximal_mu: Annotated[Weight, Doc("FedProx: weight of the distance to the global model.")]
    dyn_alpha: Annotated[float, Range(1e-8, 1e4), Doc("FedDyn: weight of the dynamic regularizer.")]
    proxy: Annotated[
        str,
        Doc(
            "FedDF: the server's unlabeled proxy images: public (the digits' public split), or "
            "the absolute path of a folder of images."
        ),
        SitePath("server"),
    ]
    proxy_images: Annotated[
        int,
        Range(2, 10_000_000),
        Doc("FedDF: proxy images, a seeded sample; all if there are fewer."),
    ]
    distillation_steps: Annotated[
        int, Range(1, 1_000_000), Doc("FedDF: distillation steps after every round.")
    ]
    distillation_batch_size: Annotated[
        int, Range(2, 65_536), Doc("FedDF: images per distillation step.")
    ]
    distillation_lr: Annotated[float, Range(1e-8, 100), Doc("FedDF: learning rate of Adam.")]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with these settings."""
        proxy = self.proxy.removeprefix("public")
        if proxy and not is_absolute(proxy):
            yield not_absolute("rounds.proxy", proxy)
        yield from self._unused_keys()

    def _unused_keys(self) -> Iterator[str]:
        setting = f"rounds.aggregation = {self.aggregation!r}"
        if self.malicious_clients and self.aggregation not in COUNTING:
            yield (
                f"rounds.malicious-clients = {self.malicious_clients}: has no effect with "
                f"{setting}; set it to 0, or the aggregation to krum, multi-krum or bulyan"
            )
        if self.trim and self.aggregation != "trimmed-mean":
            yield (
                f"rounds.trim = {self.trim:g}: has no effect with {setting}; set it to 0, or the "
                "aggregation to trimmed-mean"
            )

    @property
    def least_models(self) -> int:
        """The fewest models that can be aggregated: 2 f + 3 for Krum, 4 f + 3 for Bulyan."""
        f = self.malicious_clients
        fixed = {"mean": 1, "median": 3, "trimmed-mean": 3, "bulyan": 4 * f + 3}
        return fixed.get(self.aggregation, 2 * f + 3)


def baseline(server: str) -> Method:
    """Return a baseline that averages models of one architecture.

    Args:
        server: module in `server_app.baselines`.
    """
    return Method(
        client=None,
        server=server,
        payload=None,
        sends="its model, in every round",
        reveals=REVEALS,
        rounds=True,
        samples=False,
        section="rounds",
        numbers="none",
        problems=problems,
    )


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield what keeps an average of models from working."""
    if len(split_names(run.classifier.architecture)) > 1:
        yield (
            f"classifier.architecture = {quote(run.classifier.architecture)}: must name one "
            f"model, because {run.method} averages models of one architecture; feddf allows "
            "several"
        )


def aggregation_problems(run: "RunConfig", methods: Mapping[str, Method]) -> Iterator[str]:
    """Refuse aggregations that the method or the number of clients does not allow."""
    settings = run.rounds
    averaging = [name for name, method in methods.items() if method.averages]
    setting = f"rounds.aggregation = {settings.aggregation!r}"
    if settings.aggregation != "mean" and not methods[run.method].averages:
        yield (
            f"{setting}: requires method {' or '.join(averaging)}, whose server averages models; "
            f"with {run.method!r} set it to 'mean'"
        )
    elif settings.aggregation in COUNTING and not settings.malicious_clients:
        yield (
            f"rounds.malicious-clients = 0: must be at least 1 with {setting}, which tolerates "
            "that many malicious clients"
        )
    elif run.needed_clients < settings.least_models:
        yield (
            f"{setting}: requires at least {settings.least_models} models in every round"
            f"{_count_hint(settings)}, but a round continues with {run.needed_clients}; set "
            "num-clients, and min-clients if it is not 0, to at least that many, or another "
            "aggregation"
        )
    elif settings.aggregation == "trimmed-mean" and int(settings.trim * run.needed_clients) < 1:
        yield (
            f"rounds.trim = {settings.trim:g}: drops none of {run.needed_clients} models; must be "
            f"at least {math.ceil(100 / run.needed_clients) / 100:g} with {setting}"
        )


def _count_hint(settings: RoundsConfig) -> str:
    """Return from which setting a minimum of models follows; "" if it is fixed."""
    f = settings.malicious_clients
    if not f:
        return ""
    rule = "4 f + 3" if settings.aggregation == "bulyan" else "2 f + 3"
    return f" ({rule}, with f = rounds.malicious-clients = {f})"
