"""The two places at which the run's defense drops what clients sent.

A defense is a module with one or both of these functions, which `osfl.defenses` names:

    filter_payloads(job, payloads)   Return the payloads to use, by client. A one-shot method gets
                                     no others; an iterative baseline aggregates no others in a
                                     round, whose models are `Classifier` payloads.
    filter_images(job, images)       Return the synthetic images to train on. A client that loses
                                     all its images teaches nothing either.

Dropped payloads are reported by the callers. What `filter_images` drops, it reports itself by
`job.status.add_warning`. `min-clients` counts what arrived, before any defense.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from osfl.config import RunConfig
from osfl.defenses import DEFENSES
from osfl.payload.kinds import Sent
from server_app.context import ServerJob
from server_app.federation.exchange import RoundError

# Imports diffusers, which methods without images do not need
if TYPE_CHECKING:
    from server_app.synthesis.images import SyntheticSet

P = TypeVar("P", bound=Sent)


def filter_payloads(job: ServerJob, payloads: Mapping[str, P]) -> dict[str, P]:
    """Return the payloads that the run's defense keeps, in their order.

    Raises:
        RoundError: it keeps none.
    """
    keep = _function(job.config, "filter_payloads")
    if keep is None:
        return dict(payloads)
    trusted = keep(job, payloads)
    if not trusted:
        raise RoundError(
            f"defense = {job.config.defense!r} drops the payloads of all {len(payloads)} clients; "
            "set defense to 'off', or look at the payloads"
        )
    return {client: payload for client, payload in payloads.items() if client in trusted}


def filters_payloads(config: RunConfig) -> bool:
    """Return whether the run's defense may drop payloads, before images are made of them."""
    return _function(config, "filter_payloads") is not None


def filter_images(job: ServerJob, images: "SyntheticSet") -> "SyntheticSet":
    """Return the images that the run's defense keeps."""
    keep = _function(job.config, "filter_images")
    trusted: SyntheticSet = images if keep is None else keep(job, images)
    return trusted


def drop_clients_without_images(
    payloads: Mapping[str, P], before: "SyntheticSet", after: "SyntheticSet"
) -> dict[str, P]:
    """Return the payloads of all clients but those that lost their images to the defense.

    Args:
        before: all images.
        after: the images that the defense keeps.
    """
    dropped = set(before.clients) - set(after.clients)
    return {client: payload for client, payload in payloads.items() if client not in dropped}


def dropped_warning(config: RunConfig, client: str) -> str:
    """Return the warning about a client whose payload is dropped."""
    return f"{client}: its payload is dropped (defense = {config.defense!r})"


def _function(config: RunConfig, name: str) -> Callable[..., Any] | None:
    """Return a function of the run's defense; None without a defense, or if it has none."""
    if config.defense == "off":
        return None
    function: Callable[..., Any] | None
    function = getattr(importlib.import_module(DEFENSES[config.defense]), name, None)
    return function
