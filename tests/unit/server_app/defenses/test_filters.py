"""A defense of another package drops payloads and images of a run."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from osfl.config import OneOf, parse_run_config, schema
from osfl.defenses import DEFENSES
from osfl.payload.kinds import Classifier
from osfl.payload.messages import unpack_state
from osfl.util.markers import markers_of
from server_app.context import ServerJob
from server_app.defenses.filters import filter_images, filter_payloads
from server_app.federation.exchange import RoundError
from server_app.synthesis.images import SyntheticSet
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start, swap_payload

Defense = Callable[..., Any]


@pytest.fixture
def add_defense(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add a module and its name, `tiny`, as another package would."""

    def add(**functions: Defense) -> None:
        module = ModuleType("tiny_defense")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, "tiny_defense", module)
        monkeypatch.setitem(DEFENSES, "tiny", "tiny_defense")
        (values,) = markers_of(schema()["defense"], OneOf)
        monkeypatch.setattr(values, "choices", ("off", *DEFENSES))

    return add


def without_client_1(job: ServerJob, payloads: Mapping[str, Any]) -> dict[str, Any]:
    assert job.config.defense == "tiny"
    return {client: payload for client, payload in payloads.items() if client != "client-1"}


def model(home: Path, job: str, name: str) -> dict[str, torch.Tensor]:
    return load_file(home / "runs" / job / "models" / f"{name}.safetensors")


@pytest.mark.slow
def test_a_one_shot_method_gets_no_dropped_payload(
    home: Path, tiny_kit: Path, add_defense: Callable[..., None]
) -> None:
    """The model is that of a run that refuses the payload."""
    add_defense(filter_payloads=without_client_1)
    config = quick(method="fedcgs", kit=str(tiny_kit), num_clients=3)
    start({**config, "defense": "tiny"}, "defended")
    corrupt = swap_payload(lambda payload: payload[:-1])
    start({**config, "min-clients": 2}, "absent", tamper=corrupt)
    defended, absent = (model(home, job, "FedCGS") for job in ("defended", "absent"))
    assert torch.equal(defended["fc.weight"], absent["fc.weight"])
    warning = "client-1: its payload is dropped (defense = 'tiny')"
    assert warning in metrics(home, "defended")["warnings"]
    assert metrics(home, "defended")["dropped"] == ["client-1"]
    assert ", of which the defense dropped one; the" in metrics(home, "defended")["summary"]
    # The client is tested all the same
    assert "client-1" in metrics(home, "defended")["accuracy"]["FedCGS"]


@pytest.mark.slow
def test_a_client_with_a_dropped_payload_gets_no_images(
    home: Path, tiny_kit: Path, add_defense: Callable[..., None]
) -> None:
    """The defense also drops one class of the others' images."""

    def without_class_0(job: ServerJob, images: SyntheticSet) -> SyntheticSet:
        assert job.clients == ("client-0",)
        assert set(images.clients) == {"client-0"}
        return images.select((images.labels != 0).nonzero().flatten().tolist())

    add_defense(filter_payloads=without_client_1, filter_images=without_class_0)
    start(quick(method="prompts-domain", kit=str(tiny_kit), defense="tiny"))
    folder = home / "runs" / "job"
    manifest = (folder / "manifest.jsonl").read_text().splitlines()
    assert len(manifest) == 10
    assert json.loads((folder / "models" / "FT.json").read_text())["images"] == 9


@pytest.mark.slow
def test_rounds_aggregate_no_dropped_model(
    home: Path, tiny_kit: Path, add_defense: Callable[..., None]
) -> None:
    """The mean of two models without the second is the first. The warning comes once."""
    client_sets: list[set[str]] = []
    replies: list[dict[str, torch.Tensor]] = []

    def drop(job: ServerJob, models: Mapping[str, Classifier]) -> dict[str, Classifier]:
        client_sets.append(set(models))
        assert all(torch.is_tensor(sent.state["fc.weight"]) for sent in models.values())
        return without_client_1(job, models)

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if (index, kind) == (0, "train"):
            replies.append(unpack_state(reply.content.array_records["model"]))
        return reply

    add_defense(filter_payloads=drop)
    start(quick(method="fedavg", kit=str(tiny_kit), defense="tiny"), tamper=tamper)
    assert client_sets == [{"client-0", "client-1"}] * 2
    state = model(home, "job", "fedavg")
    for name in ("fc.weight", "conv1.1.running_mean"):
        assert torch.equal(state[name], replies[1][name])
    warnings = metrics(home)["warnings"]
    assert warnings.count("round 1: client-1: its payload is dropped (defense = 'tiny')") == 1
    assert sum("its payload is dropped" in warning for warning in warnings) == 1


def job_of(defense: str) -> Any:
    config = replace(parse_run_config(quick(method="fedcgs")), defense=defense)
    return ServerJob(config, None, None, ("a", "b"))  # type: ignore[arg-type]


def test_a_defense_that_drops_every_payload_ends_the_run(add_defense: Callable[..., None]) -> None:
    add_defense(filter_payloads=lambda job, payloads: {})
    with pytest.raises(RoundError, match="defense = 'tiny' drops the payloads of all 2 clients"):
        filter_payloads(job_of("tiny"), dict.fromkeys("ab"))  # type: ignore[type-var]


@pytest.mark.parametrize("defense", ["off", "tiny", "label-consistency"])
def test_what_no_defense_filters_stays(defense: str, add_defense: Callable[..., None]) -> None:
    """Without a defense, or with one that lacks the function."""
    add_defense()
    payloads = dict.fromkeys("ba")
    result = filter_payloads(job_of(defense), payloads)  # type: ignore[type-var]
    assert list(result) == ["b", "a"]
    if defense != "label-consistency":
        images = SyntheticSet(torch.zeros(1, 3, 2, 2), torch.zeros(1), ("a",))
        assert filter_images(job_of(defense), images) is images
