"""Secure sums with real messages and apps in one process: results, drop-outs, attacks."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from client_app import masked_payload, secure_sum
from client_app.app import app
from client_app.privacy import sum_noise
from client_app.privacy.sum_noise import SumNoise
from osfl.config import ConfigError, RunConfig, parse_run_config
from osfl.payload import wire
from osfl.payload.masking import Numbers, from_bytes
from osfl.payload.messages import pack_bytes, unpack_bytes
from osfl.payload.sum_messages import PAIRS, SHARES
from osfl.payload.summands import Layout
from osfl.run_folder.forget import remove_client
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from osfl.util.files import CorruptFileError
from server_app.app import run_job
from server_app.federation import secure_members
from server_app.federation import secure_sum as server_half
from server_app.federation.exchange import RoundError
from server_app.federation.secure_members import sum_layout
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import ROOT, quick
from tests.helpers.whole_runs import Killed, metrics, nodes, start

pytestmark = pytest.mark.slow
Tamper = Callable[[int, str, Message], Message | None]
CLIENTS = 5
# Of each client in `quick`
IMAGES = 30
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def config(**settings: Any) -> dict[str, Any]:
    """FedCGS of five clients, of which two may drop out."""
    options = {
        "method": "fedcgs",
        "fedcgs__projection": 12,
        "num_clients": CLIENTS,
        "min_clients": 4,
        "max_weight_ratio": 0.0,
        "secure_sum": True,
        "secure_sum_images": 200,
        "deadline": 3.0,
        "join_timeout": 3.0,
    }
    return quick(**{**options, **settings})


def head(home: Path, job: str) -> torch.Tensor:
    state = load_file(home / "runs" / job / "models" / "FedCGS.safetensors")
    return state["fc.weight"]


def test_a_client_without_a_public_key_is_left_out_before_the_work(home: Path) -> None:
    """With a point of low order no other client could mask, each after its work."""

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        if kind == "query.join" and index == 1:
            for record in reply.content.config_records.values():
                if "sum-key" in record:
                    record["sum-key"] = bytes(32)
        return reply

    start(config(), "honest", tamper=drop((1, "query.join")))
    start(config(), "job", tamper=tamper)
    assert set(metrics(home)["clients"]) == {f"client-{k}" for k in (0, 2, 3, 4)}
    assert torch.equal(head(home, "job"), head(home, "honest"))


def drop(*lost: tuple[int, str]) -> Tamper:
    """Lose replies of a kind from clients; that of `query.reveal` has its stage behind it."""

    def tamper(index: int, kind: str, reply: Message) -> Message | None:
        if kind == "query.reveal" and not reply.has_error():
            sizes = {len(secret) for secret in reply.content.config_records["reveal"]["secrets"]}
            kind = PAIRS if sizes == {32} else SHARES
        return None if (index, kind) in lost else reply

    return tamper


def test_the_model_is_that_of_the_open_payloads(home: Path) -> None:
    start(config(secure_sum=False, min_clients=0), "open")
    grid = start(config(), "sum")
    torch.testing.assert_close(head(home, "sum"), head(home, "open"), atol=2e-3, rtol=0)
    figures, expected = metrics(home, "sum"), metrics(home, "open")
    assert figures["accuracy"]["FedCGS"] == expected["accuracy"]["FedCGS"]
    assert not [problem for each in verify_run(home / "runs" / "sum") for problem in each.problems]
    # One message asks for the payload, and one opens the sum
    for client in range(CLIENTS):
        kinds = [kind for index, kind in grid.sent if index == client]
        one_shot = ["query.join", "train", "query.reveal", "query.acknowledge", "evaluate"]
        assert [kind for kind in one_shot if kind in kinds] == one_shot
        assert kinds.count("train") == kinds.count("query.reveal") == 1
    # Counts of images do not leave a client beside the sum
    costs = RunFolder(home / "runs" / "sum").payload_records()
    assert all("images" not in file.read_text() for file in costs)
    page = (home / "runs" / "sum" / "report.html").read_text()
    assert "which add up to the number of images of every class" in page
    assert "its costs, and" not in page
    assert page.count("not sent") == 4 * CLIENTS
    # Nothing is left at the clients
    assert not list(home.rglob("secure-sum.json"))[1:]
    assert not list((home / "cache").rglob("*.pb"))


def test_the_servers_disk_holds_no_clients_numbers(home: Path) -> None:
    blobs: dict[str, bytes] = {}

    def keep(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            for file in (home / "cache").rglob(f"client-{index}-*/payload.pb"):
                blobs[f"client-{index}"] = file.read_bytes()
        return reply

    start(config(), "sum", tamper=keep)
    assert len(blobs) == CLIENTS
    written = [file.read_bytes() for file in (home / "runs").rglob("*") if file.is_file()]
    for blob in blobs.values():
        payload = wire.decode_trusted(blob, "fedcgs", DIGITS)
        for tensor in (payload.sums, payload.triangle):  # type: ignore[union-attr]
            # Any four numbers in a row would be a trace
            trace = tensor.reshape(-1)[:4].numpy().tobytes()
            assert not any(trace in content for content in written)


@pytest.mark.parametrize(
    ("lost", "in_the_sum"),
    [
        ([(1, "train")], {0, 2, 3, 4}),
        # Absent after it delivered, while the pairs' keys of another are asked for: both are out
        ([(1, "train"), (2, PAIRS)], None),
        # Of those that reveal shares, enough must answer
        ([(3, SHARES)], {0, 1, 2, 3, 4}),
    ],
)
def test_drop_outs(home: Path, lost: list[tuple[int, str]], in_the_sum: set[int] | None) -> None:
    if in_the_sum is None:
        with pytest.raises(RoundError, match="3 of 5 members .* at least 4 are required"):
            start(config(), "sum", tamper=drop(*lost))
        assert RunFolder(home / "runs" / "sum").secure_sum() is None
        return
    start(config(), "sum", tamper=drop(*lost))
    start(config(), "whole")
    sizes = {
        job: from_bytes(RunFolder(home / "runs" / job).secure_sum() or b"")[:10]
        for job in ("sum", "whole")
    }
    images = {job: int(counts.sum()) for job, counts in sizes.items()}
    assert images == {"sum": IMAGES * len(in_the_sum), "whole": IMAGES * CLIENTS}
    warnings = [line for line in metrics(home, "sum")["warnings"] if "secure sum" in line]
    absent = sorted(set(range(CLIENTS)) - in_the_sum)
    names = ", ".join(f"client-{index}" for index in absent)
    size = len(in_the_sum)
    assert warnings == (
        [f"the secure sum is of {size} of {CLIENTS} clients, without {names}"] if absent else []
    )


def test_a_member_that_vanishes_after_delivery_is_left_out(home: Path) -> None:
    """Sum four of six: one never delivered, one delivered and then vanished."""
    settings = config(num_clients=6, min_clients=4)
    start(settings, "sum", tamper=drop((1, "train"), (2, PAIRS)))
    numbers = from_bytes(RunFolder(home / "runs" / "sum").secure_sum() or b"")
    assert int(numbers[:10].sum()) == 4 * IMAGES
    record = RunFolder(home / "runs" / "sum").secure_members() or {}
    assert record["absent"] == ["client-1", "client-2"]


def test_masks_that_do_not_fit_stop_the_run(home: Path) -> None:
    def corrupt(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 2:
            blob = bytearray(unpack_bytes(reply.content.array_records["payload"]))
            # In the middle are the masked numbers
            blob[len(blob) // 3] ^= 1
            reply.content["payload"] = pack_bytes(bytes(blob), "osfl.payload.v1")
            reply.content.config_records["header"]["sha256"] = wire.digest(bytes(blob))
        return reply

    with pytest.raises(RoundError, match="does not have its checksum"):
        start(config(), "sum", tamper=corrupt)
    assert RunFolder(home / "runs" / "sum").secure_sum() is None


def test_a_masked_payload_of_another_job_is_refused(home: Path) -> None:
    replayed: list[bytes] = []

    def keep(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 0:
            replayed.append(unpack_bytes(reply.content.array_records["payload"]))
        return reply

    start(config(), "first", tamper=keep)

    def replay(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 0:
            reply.content["payload"] = pack_bytes(replayed[0], "osfl.payload.v1")
            reply.content.config_records["header"]["sha256"] = wire.digest(replayed[0])
        return reply

    start(config(), "second", tamper=replay)
    record = RunFolder(home / "runs" / "second").secure_members() or {}
    assert record["absent"] == ["client-0"]


@pytest.mark.parametrize("moment", ["train", PAIRS, SHARES])
def test_a_killed_server_goes_on(home: Path, moment: str) -> None:
    """No client is asked twice for a payload, and no other client is named as absent."""
    asked: list[int] = []

    def lose_one(index: int, kind: str, reply: Message) -> Message | None:
        return drop((1, "train"))(index, kind, reply)

    def kill(index: int, kind: str, reply: Message) -> Message | None:
        answer = lose_one(index, kind, reply)
        if index == 3 and drop((3, moment))(index, kind, reply) is None:
            raise Killed
        return answer

    with pytest.raises(Killed):
        start(config(), "sum", tamper=kill)

    def count(index: int, kind: str, reply: Message) -> Message | None:
        if kind == "train":
            asked.append(index)
        return lose_one(index, kind, reply)

    start(config(), "sum", tamper=count)
    # Until a message is pulled, all are on their way
    assert asked == (list(range(CLIENTS)) if moment == "train" else [])
    numbers = from_bytes(RunFolder(home / "runs" / "sum").secure_sum() or b"")
    assert int(numbers[:10].sum()) == 4 * IMAGES
    # Once open, the sum needs no client: it is the same
    content = RunFolder(home / "runs" / "sum").secure_sum()
    again = start(config(), "sum")
    assert RunFolder(home / "runs" / "sum").secure_sum() == content
    assert "query.reveal" not in {kind for _, kind in again.sent}


@pytest.mark.parametrize(
    "method", ["oscar", "oscar-pooled", "latent-gaussian", "votes", "domain-vector", "feddisc"]
)
def test_every_method_that_adds_up(
    home: Path, tiny_kit: Path, tiny_unclip: Path, method: str
) -> None:
    settings = config(
        method=method,
        kit=str(tiny_kit),
        feddisc__kit=str(tiny_unclip),
        num_clients=3,
        min_clients=3,
        domain_vector__class_lr=0.0,
    )
    start(settings, "sum")
    folders = sorted(path.name for path in (home / "runs" / "sum" / "images").iterdir())
    senders = ["all-clients"]
    if method == "votes":
        senders = [f"all-clients-{number}" for number in (1, 2, 3)]
    assert folders == senders
    assert metrics(home, "sum")["accuracy"]["FT"].keys() == {
        *(f"client-{index}" for index in range(3)),
        "average",
    }


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"method": "fedlmg"}, "secure-sum = true: method 'fedlmg' requires each client's own"),
        ({"method": "feddeo"}, "epsilon = 0: with secure-sum = true method 'feddeo' requires"),
        ({"payload_codec": "int8"}, "payload-codec = 'int8': not with secure-sum = true"),
        ({"min_clients": 3}, "min-clients = 3: must be at least 4 of 5 clients with secure-sum"),
        ({"defense": "label-consistency", "method": "oscar"}, "defense = .* not with secure-sum"),
        ({"method": "domain-vector", "domain_vector__class_lr": 0.1}, "class-lr = 0.1: must be 0"),
    ],
)
def test_what_contradicts_a_secure_sum(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        start(config(**settings), "sum")


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        ("oscar-pooled", "each"),
        ("domain-vector", "each"),
        ("feddeo", "each"),
        ("feddeo", "all"),
        ("feddisc", "each"),
    ],
)
def test_the_sum_has_the_noise_of_one_guarantee(
    home: Path,
    tiny_kit: Path,
    tiny_unclip: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    tokens: str,
) -> None:
    """The difference to the sum without noise has the deviation of all clients' shares."""
    settings = config(
        method=method,
        kit=str(tiny_kit),
        num_clients=4,
        min_clients=3,
        epsilon=8.0,
        secure_sum_bound=8.0,
        domain_vector__class_lr=0.0,
        domain_vector__steps=1,
        feddeo__tokens=tokens,
        feddisc__kit=str(tiny_unclip),
    )
    deviations: list[int] = []
    shares: set[int] = set()
    real = sum_noise.discrete_gaussians
    draw_of = sum_noise.SumNoise.draw

    def observed(noise: SumNoise, layout: Layout, run: RunConfig, contributors: int) -> Numbers:
        shares.add(contributors)
        return draw_of(noise, layout, run, contributors)

    monkeypatch.setattr(sum_noise.SumNoise, "draw", observed)

    def silent(deviation: int, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint32)

    def counted(deviation: int, count: int) -> np.ndarray:
        deviations.append(deviation)
        return real(deviation, count)

    sums = {}
    for job, draw in (("silent", silent), ("noisy", counted)):
        monkeypatch.setattr(sum_noise, "discrete_gaussians", draw)
        start(settings, job)
        sums[job] = from_bytes(RunFolder(home / "runs" / job).secure_sum() or b"")
    difference = (sums["noisy"] - sums["silent"]).astype(np.int32)
    assert not difference[:10].any()
    noise = difference[10:]
    # Independent shares of four clients
    expected = math.sqrt(sum(deviation**2 for deviation in deviations))
    assert len(deviations) == 4
    assert len(set(deviations)) == 1
    # Of four members three must deliver. A server that tells each of two pairs that one of the
    # other pair is absent opens the sum of each pair, whose noise must make the guarantee
    assert shares == {2}
    assert noise.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(noise)))
    assert metrics(home, "noisy")["epsilons"] == [8.0]


def test_photographs_of_four_sites_give_the_same_figures(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACS, a site for each domain: the printed figures are those of open payloads."""
    pacs = ROOT.parent / "shared" / "data" / "pacs"
    if not pacs.is_dir():
        pytest.skip("needs the image folders of PACS in shared/data/pacs")
    monkeypatch.setenv("OSFL_ALLOWED_DIRS", str(pacs))
    settings = {
        "method": "fedcgs",
        "classifier__architecture": "resnet18",
        "classifier__init": "none",
        "fedcgs__projection": 0,
        "data__name": "folder",
        "data__root": str(pacs),
        "data__classes": "dog,elephant,giraffe,guitar,horse,house,person",
        "data__image_size": 32,
        "num_clients": 4,
        "min_clients": 4,
        "secure_sum_images": 3000,
        # Random weights have small features
        "secure_sum_bound": 4.0,
        "deadline": 300.0,
    }
    figures = {}
    for is_secure in (False, True):
        job = f"secure-{is_secure}".lower()
        start(config(**{**settings, "secure_sum": is_secure}), job)
        result = metrics(home, job)
        accuracy = result["accuracy"]["FedCGS"]
        figures[is_secure] = {name: f"{value:.1f}" for name, value in accuracy.items()}
        figures[is_secure]["auroc"] = f"{result['scores']['FedCGS']['balanced_accuracy']:.1f}"
    assert figures[True] == figures[False]


def kill_at(index: int, kind: str, kept: list[bytes]) -> Tamper:
    """Keep a client's masked payload, and end the server."""

    def tamper(number: int, message: str, reply: Message) -> Message:
        if (number, message) == (index, kind):
            kept.append(unpack_bytes(reply.content.array_records["payload"]))
            raise Killed
        return reply

    return tamper


@pytest.mark.parametrize("epsilon", [0.0, 8.0])
def test_a_client_masks_once_per_job(home: Path, tiny_kit: Path, epsilon: float) -> None:
    """Other numbers under the same masks, such as other noise, would show their difference."""
    settings = config(method="oscar-pooled", kit=str(tiny_kit), epsilon=epsilon)
    blobs: list[bytes] = []
    for _ in range(2):
        with pytest.raises(Killed):
            start(settings, "sum", tamper=kill_at(1, "train", blobs))
    first, second = blobs
    assert first == second
    (folder,) = (home / "cache" / "sum").glob("client-1-*")
    # The mean without noise does not stay
    assert (folder / "payload.pb").exists() == (not epsilon)
    start(settings, "sum")
    if epsilon:
        secrets = secure_sum.load(folder)
        assert secrets is not None
        assert (secrets.private, secrets.seed) == ("", "")
    else:
        assert not folder.exists()


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_masked_payload_is_not_made_again(home: Path, damage: str) -> None:
    with pytest.raises(Killed):
        start(config(), "sum", tamper=kill_at(1, "train", []))
    (file,) = (home / "cache" / "sum").glob("client-1-*/masked.pb")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if damage == "flip":
        file.write_bytes(content)
    start(config(), "sum")
    record = RunFolder(home / "runs" / "sum").secure_members() or {}
    assert record["absent"] == ["client-1"]


@pytest.mark.parametrize("place", ["record_masked", "write_atomically"])
def test_a_client_killed_while_it_masks_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(masked_payload, place, kill)
        with pytest.raises(Killed):
            start(config(), "sum")
    start(config(), "sum")
    start(config(), "whole")
    sums = [RunFolder(home / "runs" / job).secure_sum() for job in ("sum", "whole")]
    assert sums[0] == sums[1]


def test_an_epsilon_without_its_bound_sends_nothing(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_noise.SumNoise, "store", lambda *_: None)
    settings = config(method="oscar-pooled", kit=str(tiny_kit), epsilon=8.0)
    with pytest.raises(RoundError, match="the clipping bound of this job's payload is missing"):
        start(settings, "sum")


def test_no_count_of_images_leaves_a_client(home: Path) -> None:
    declared: list[object] = []

    def read(_: int, kind: str, reply: Message) -> Message:
        if kind == "query.join":
            declared.append(reply.content.config_records["join"]["images"])
        return reply

    start(config(), "sum", tamper=read)
    assert declared == CLIENTS * [[]]
    start(config(secure_sum=False, min_clients=0), "open", tamper=read)
    assert declared[CLIENTS:] == CLIENTS * [[3] * 10]


def test_the_threshold_of_a_job_stays(home: Path) -> None:
    with pytest.raises(Killed):
        start(config(), "sum", tamper=kill_at(1, "train", []))
    with pytest.raises(ConfigError, match="min-clients = 5: stays 4 in this job's secure sum"):
        start(config(min_clients=5), "sum")


def test_a_corrupt_sum_is_not_used(home: Path) -> None:
    start(config(), "sum")
    file = home / "runs" / "sum" / "secure-sum.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match="secure-sum.bin is corrupt"):
        start(config(), "sum")


def test_a_server_killed_after_the_sum_acknowledges_later(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(server_half, "acknowledge", kill)
        with pytest.raises(Killed):
            start(config(), "sum")
    assert list((home / "cache").rglob("masked.pb"))
    start(config(), "sum")
    assert not list((home / "cache").rglob("masked.pb"))


def test_a_site_that_demands_a_secure_sum_joins_no_other_run(home: Path) -> None:
    settings = config(secure_sum=False, min_clients=4)
    demanding = [{**node, "secure-sum": node["partition-id"] == 2} for node in nodes(CLIENTS)]
    grid = LoopGrid(app, settings, demanding)
    run_job(grid, parse_run_config(settings), "open")
    assert not (home / "runs" / "open" / "payloads" / "client-2.pb").exists()
    assert (home / "runs" / "open" / "payloads" / "client-3.pb").exists()


def test_no_client_can_be_taken_out_of_the_sum(home: Path) -> None:
    start(config(), "sum")
    with pytest.raises(ConfigError, match="secure-sum = true: .* no client's can be subtracted"):
        remove_client(RunFolder(home / "runs" / "sum"), "client-1")


def test_other_numbers_than_the_servers_are_not_sent(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarser(run: RunConfig, members: int) -> Layout:
        layout = sum_layout(run, members)
        return replace(layout, bound=2 * layout.bound)

    monkeypatch.setattr(secure_members, "sum_layout", coarser)
    with pytest.raises(RoundError, match="the server expects other numbers than this client's"):
        start(config(), "sum")


def test_no_standby_takes_the_place_of_a_member(home: Path) -> None:
    """All members have masked for each other, so that another client's numbers cannot be added."""

    def spoil(index: int, kind: str, reply: Message) -> Message:
        if (index, kind) == (1, "train"):
            reply.content.config_records["header"]["sha256"] = "0" * 64
        return reply

    grid = start(config(), "sum", count=CLIENTS + 1, tamper=spoil)
    assert (CLIENTS, "train") not in grid.sent
    record = RunFolder(home / "runs" / "sum").secure_members() or {}
    assert record["absent"] == ["client-1"]
