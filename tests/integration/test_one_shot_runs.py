"""A whole run over real Flower messages and the real apps, in this process.

And what goes wrong in one.
"""

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import client_app.app
import client_app.methods.domain as domain_client
import osfl
import server_app.methods.feddeo as feddeo_server
import server_app.synthesis.images as synthesis_images
from client_app.app import app
from client_app.context import ClientJob
from osfl.cli.main import app as cli
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.data.load import image_labels
from osfl.data.parts import class_names
from osfl.kit.kits import KitError
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.kinds import Payload
from osfl.payload.messages import COST_KEYS, pack_payload, unpack_bytes
from osfl.payload.v1 import payload_pb2 as pb
from osfl.run_folder.report.page import human_bytes
from osfl.util.prompts import DIGITS
from osfl.util.seeds import seed_of
from server_app.app import run_job
from server_app.federation.exchange import Exchange, RoundError
from server_app.kit import client_kit_digests
from server_app.synthesis.samplers import NotFiniteError
from server_app.training import mean_teacher, specific_teacher
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.system_tools import FILLER, fill_disk, mount_disk
from tests.helpers.whole_runs import (
    Killed,
    files,
    metrics,
    nodes,
    start,
    start_once,
    swap_payload,
)


def as_it_is(node: int, content: RecordDict) -> RecordDict:
    """A reply as it is."""
    return content


def failed(*it: object) -> None:
    pytest.fail(str(it))


@pytest.mark.slow
def test_a_class_that_a_site_finds_too_small_is_not_sent(
    home: Path, tiny_kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other site takes all. Who leaves a class out says so in its own log."""
    settings = {"data__partition": "dirichlet", "data__alpha": 0.5, "num_clients": 2}
    config = quick(method="prompts-domain", kit=str(tiny_kit), **settings)
    data = parse_run_config(config).data
    sites = [{**node, "domain": "sketch"} for node in nodes(2)]
    client_labels = [image_labels(data, NodeConfig(k, 2), "train", 0) for k in range(2)]
    least = 1 + min(Counter(client_labels[0]).values())
    sites[0]["min-class-images"] = least
    small = {label for label in client_labels[0] if client_labels[0].count(label) < least}
    assert 0 < len(small) < len(set(client_labels[0]))
    run_job(LoopGrid(app, config, sites), parse_run_config(config), "job")
    for number, labels in enumerate(client_labels):
        classes = set(labels) - (small if number == 0 else set())
        blob = (home / "runs" / "job" / "payloads" / f"client-{number}.pb").read_bytes()
        assert list(pb.Payload.FromString(blob).classes) == [
            DIGITS[label] for label in sorted(classes)
        ]
    names = ", ".join(DIGITS[label] for label in sorted(small))
    assert (
        f"client-0: min-class-images = {least} excludes classes with fewer images here: {names}"
        in (caplog.text)
    )
    assert "client-1: min-class-images" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prompts-only", "oscar", "feddeo"])
def test_a_kit_of_two_text_encoders_makes_the_round_trip(
    home: Path, tiny_pair: Path, method: str
) -> None:
    """A payload has the states of both encoders, 32 and 24 wide, and no pooled vector."""
    start(quick(method=method, kit=str(tiny_pair)))
    result = metrics(home)
    assert sorted(result["accuracy"]) == ["FT"]
    assert result["server"]["synthetic_images"] == 20
    blobs = [file.read_bytes() for file in (home / "runs" / "job" / "payloads").glob("*.pb")]
    assert len(blobs) == (0 if method == "prompts-only" else 2)
    for blob in blobs:
        payload = pb.Payload.FromString(blob)
        content = payload.encodings if method == "oscar" else payload.descriptions
        assert list(content.vectors.shape) == [len(payload.classes), 8, 32 + 24]
    stored = json.loads((home / "runs" / "job" / "kit.json").read_text())
    assert "text_encoder_2/model.safetensors" in stored["images"]


@pytest.mark.slow
@pytest.mark.flops
@pytest.mark.parametrize("method", [name for name in METHODS if name != "mixed"])
def test_every_method_makes_its_round_trip(
    home: Path, tiny_kit: Path, tiny_unclip: Path, method: str
) -> None:
    models = {
        "fedlmg": ["FT", "MD", "SD"],
        "local": ["client-0", "client-1"],
        "ceiling": ["real"],
        "fedcgs": ["FedCGS"],
        "fedpft": ["FedPFT"],
        "zero-shot": ["CLIP"],
        "real-and-synthetic": ["real-and-synthetic"],
    }.get(method, ["FT"])
    rounds = METHODS[method].rounds
    samples = METHODS[method].samples
    models = {"fedcado": ["FT", "MD", "SD"]}.get(method, [method] if rounds else models)
    settings = {"kit": str(tiny_kit), "feddisc__kit": str(tiny_unclip)}
    if method == "real-and-synthetic":
        start(quick(method="prompts-only", **settings), "drawn")
        settings["real_and_synthetic__images_from"] = "drawn"
    grid = start(quick(method=method, **settings))
    result = metrics(home)
    assert sorted(result["accuracy"]) == sorted(models)
    for row in result["accuracy"].values():
        assert set(row) == {"client-0", "client-1", "average"}
        assert row["average"] == pytest.approx((row["client-0"] + row["client-1"]) / 2)
    assert all(
        sum(map(sum, matrix)) == 20
        for by_client in result["confusion"].values()
        for matrix in by_client.values()
    )
    folder = home / "runs" / "job"
    for file in (folder / "models").glob("*.safetensors"):
        stated = osfl.load_model(file).description
        assert (stated.method, stated.run, stated.name) == (method, "job", file.stem)
    manifest = (
        [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
        if samples
        else []
    )
    assert len(manifest) == result["server"]["synthetic_images"] == (20 if samples else 0)
    assert all((folder / row["file"]).is_file() for row in manifest)
    config = parse_run_config(grid.run_config)
    labels = [class_names(config.data).index(row["class"]) for row in manifest]
    numbers = [int(Path(row["file"]).stem) for row in manifest]
    seeds = [
        seed_of(config.seed, method, row["client"], label, number)
        for row, label, number in zip(manifest, labels, numbers, strict=True)
    ]
    assert [row["seed"] for row in manifest] == seeds
    sends = METHODS[method].client is not None or rounds
    assert [t for _, t in grid.sent].count("train") == (2 * (2 if rounds else 1) if sends else 0)
    assert result["rounds"] == (2 if rounds else int(sends))
    for costs in result["clients"].values():
        assert (costs["upload_bytes"] > 0) == sends
        assert not sends or (costs["seconds"] > 0 and costs["images"] == 30)
        assert not sends or method == "prompts-domain" or costs["flops"] > 0
        assert costs["download_bytes"] > 0
    if len(models) == 3:  # what taught them makes them three different models
        assert (
            len({(folder / "models" / f"{name}.safetensors").read_bytes() for name in models}) == 3
        )
    page = (folder / "report.html").read_text()
    memory = result["server"]["peak_memory_mb"]
    assert (memory is None) == (method == "local")
    assert memory is None or f"{human_bytes(1e6 * memory)} of peak memory" in page
    assert "http" not in page.replace("http-equiv", "")  # opens offline
    assert json.loads((folder / "status.json").read_text())["phase"] == "finished"
    # A finished job asks no client to train again, whatever it has sent or synthesized
    if method in (
        "fedlmg",
        "fedavg",
        "ceiling",
    ):
        again = start(grid.run_config)
        assert "train" not in [t for _, t in again.sent]
        assert metrics(home)["accuracy"] == result["accuracy"]


@pytest.mark.slow
def test_a_runs_results_can_be_shown_again(home: Path, tiny_kit: Path) -> None:
    start(quick(method="local", kit=str(tiny_kit)))
    shown = CliRunner().invoke(
        cli, ["show", str(home / "runs" / "job")], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert shown.exit_code == 0
    average = metrics(home)["accuracy"]["client-1"]["average"]
    assert re.search(rf"average.* {average:.1f} ", shown.output)
    (home / "runs" / "job" / "metrics.json").unlink()
    shown = CliRunner().invoke(cli, ["show", str(home / "runs" / "job")])
    assert shown.exit_code == 1
    assert "has not finished" in shown.output.replace("\n", " ")


@pytest.mark.slow
def test_payload_sizes_are_those_on_the_wire(home: Path, tiny_kit: Path) -> None:
    start_once(home, quick(method="feddeo", kit=str(tiny_kit)))
    for client, costs in metrics(home)["clients"].items():
        stored = home / "runs" / "job" / "payloads" / f"{client}.pb"
        assert stored.stat().st_size == costs["upload_bytes"]
        # Ten descriptions [8, 32] in fp32
        assert 10 * 8 * 32 * 4 < costs["upload_bytes"] < 10 * 8 * 32 * 4 + 256 + 100
        assert (
            wire.digest(stored.read_bytes())
            == json.loads(stored.with_suffix(".json").read_text())["sha256"]
        )


@pytest.mark.slow
def test_a_finished_job_asks_no_client_and_synthesizes_nothing(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit))
    start_once(home, config)
    before = metrics(home)
    monkeypatch.setattr(
        feddeo_server,
        "load_engine",
        lambda *args: pytest.fail("the kit was loaded to render images that were there"),
    )
    grid = start(config)
    assert "train" not in [t for _, t in grid.sent]
    assert metrics(home)["accuracy"] == before["accuracy"]


@pytest.mark.slow
def test_an_interrupted_server_makes_the_same_images(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in every unit in turn, with an image half written.

    Resumed: byte for byte what the quiet run makes, one unit lost a kill.
    """
    config = quick(method="feddeo", kit=str(tiny_kit))
    quiet = start_once(home, config)
    commit = synthesis_images._commit
    rendered = []

    def commit_one_then_die(job, unit, pixels) -> None:  # type: ignore[no-untyped-def]
        rendered.append(unit.name)
        if len(rendered) % 2:
            return commit(job, unit, pixels)
        path = job.folder.path / synthesis_images.image_file(job, unit.jobs[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half an image")
        raise Killed

    monkeypatch.setattr(synthesis_images, "_commit", commit_one_then_die)
    monkeypatch.setattr(synthesis_images, "MAX_UNWRITTEN_UNITS", 0)
    for finished in (1, 2, 3):  # two clients of 10 images in units of 8: four units
        with pytest.raises(Killed):
            start(config, "rough")
        assert len(list((home / "runs" / "rough" / "units").glob("*.jsonl"))) == finished
        assert not (home / "runs" / "rough" / "manifest.jsonl").exists()
    monkeypatch.setattr(
        synthesis_images, "_commit", lambda *args: (rendered.append(args[1].name), commit(*args))
    )
    start(config, "rough")
    assert len(rendered) == 4 + 3
    assert files(quiet, "images", "manifest.jsonl") == files(
        home / "runs" / "rough", "images", "manifest.jsonl"
    )


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """Runs are on a file system of their own, of 400 MB."""
    runs = home / "runs"
    runs.mkdir()
    if not mount_disk(runs, "400m"):
        pytest.skip("needs root, to mount a small file system")
    yield runs
    subprocess.run(["umount", str(runs)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_loses_nothing(
    small_disk: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full when the second payload comes, then after the first unit of images.

    Each time the error says so, and the same command goes on.
    """
    config = quick(method="feddeo", kit=str(tiny_kit))
    commit = synthesis_images._commit

    def fill_after_the_first(index: int, kind: str, reply: Message) -> Message:
        if (index, kind) == (0, "query.acknowledge"):
            fill_disk(small_disk)
        return reply

    def commit_and_fill(job, unit, pixels) -> None:  # type: ignore[no-untyped-def]
        commit(job, unit, pixels)
        fill_disk(small_disk)

    with pytest.raises(OSError, match="No space left on device"):
        start(config, tamper=fill_after_the_first)
    assert [file.name for file in (small_disk / "job" / "payloads").glob("*.pb")] == ["client-0.pb"]
    (small_disk / FILLER).unlink()
    monkeypatch.setattr(synthesis_images, "_commit", commit_and_fill)
    monkeypatch.setattr(synthesis_images, "MAX_UNWRITTEN_UNITS", 0)
    asked: list[tuple[int, str]] = []
    with pytest.raises(OSError, match="No space left on device"):
        start(config, tamper=lambda index, kind, reply: asked.append((index, kind)) or reply)  # type: ignore[func-returns-value]
    assert [index for index, kind in asked if kind == "train"] == [1]
    assert len(list((small_disk / "job" / "units").glob("*.jsonl"))) == 1
    record = json.loads((small_disk / "job" / "payloads" / "client-1.json").read_text())
    assert record["costs"]["resent"] == 1  # its copy was kept
    (small_disk / FILLER).unlink()
    monkeypatch.setattr(synthesis_images, "_commit", commit)
    grid = start(config)
    assert "train" not in [kind for _, kind in grid.sent]
    assert len((small_disk / "job" / "manifest.jsonl").read_text().splitlines()) == 2 * 10


@pytest.mark.slow
def test_corrupt_files_are_reported_and_rebuilt(home: Path, tiny_kit: Path) -> None:
    """An image gone, one cut short, one changed by a pixel; a bit of a model and of a payload.

    The same run again mends all but the payload.
    """
    config = quick(method="feddeo", kit=str(tiny_kit))
    folder = start_once(home, config)
    good = files(folder, "images", "models", "manifest.jsonl")

    def verified() -> tuple[int, list[str]]:
        result = CliRunner().invoke(
            cli, ["verify", str(folder)], env={"COLUMNS": "300", "TERM": "dumb"}
        )
        return result.exit_code, [
            line for line in result.output.splitlines() if "reading images" not in line
        ]

    assert verified() == (
        0,
        [
            "2 payloads intact, 20 images intact, 20 manifest rows intact, "
            "1 model intact, 17 records intact"
        ],
    )
    manifest = folder / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"seed": ', '"seed": 1', 1))
    pictures = sorted((folder / "images").rglob("*.png"))
    # Of three units: a client's eight and two, the other's eight
    gone = pictures[1]
    short = pictures[9]
    changed = pictures[12]
    gone.unlink()
    short.write_bytes(short.read_bytes()[:60])
    with Image.open(changed) as picture:
        picture.putpixel((0, 0), (1, 2, 3))
        picture.save(changed)
    for name in ("models/FT.safetensors", "payloads/client-1.pb"):
        blob = bytearray((folder / name).read_bytes())
        blob[-1] ^= 1
        (folder / name).write_bytes(blob)
    code, lines = verified()
    assert code == 1
    assert lines[:-2] == [
        "payloads/client-1.pb is corrupt",
        f"{gone.relative_to(folder)} is missing",
        f"{short.relative_to(folder)} cannot be read",
        f"{changed.relative_to(folder)} is not the image that was synthesized",
        f"manifest.jsonl: the row of {json.loads(manifest.read_text().splitlines()[0])['file']} "
        "differs from that of its work unit",
        "models/FT.safetensors is corrupt",
        "manifest.jsonl is corrupt",
    ]
    assert lines[-2] == (
        "1 payload intact, 17 images intact, 19 manifest rows intact, "
        "0 models intact, 16 records intact"
    )
    blob[-1] ^= 1
    (folder / "payloads" / "client-1.pb").write_bytes(blob)
    start(config)
    assert verified()[0] == 0
    assert files(folder, "images", "models", "manifest.jsonl") == {
        **good,
        "models/FT.json": (folder / "models" / "FT.json").read_bytes(),  # other seconds
    }


@pytest.mark.slow
def test_truncated_units_and_units_of_another_payload_are_reported_and_deleted(
    home: Path, tiny_kit: Path
) -> None:
    """The first unit's list of images is cut off.

    Another, of the same image with other pixels, is as a replaced payload leaves it.
    """
    config = quick(method="feddeo", kit=str(tiny_kit))
    folder = start_once(home, config)
    good = files(folder, "images", "units", "manifest.jsonl")
    first = sorted((folder / "units").glob("*.jsonl"))[0]
    (folder / "units" / "0old.jsonl").write_text(
        first.read_text().splitlines()[0].replace('"sha256": "', '"sha256": "0') + "\n"
    )
    first.write_text(first.read_text()[:-20])
    result = CliRunner().invoke(
        cli, ["verify", str(folder)], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert result.exit_code == 1
    assert f"units/{first.name} is corrupt" in result.output
    assert "is not the image that was synthesized" in result.output
    start(config)
    assert files(folder, "images", "units", "manifest.jsonl") == good
    assert CliRunner().invoke(cli, ["verify", str(folder)]).exit_code == 0


@pytest.mark.slow
def test_a_disk_that_never_gives_back_an_image_ends_the_run(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = []
    commit = synthesis_images._commit
    monkeypatch.setattr(
        synthesis_images,
        "_commit",
        lambda job, unit, pixels: (units.append(unit.name), commit(job, unit, pixels)),
    )
    monkeypatch.setattr(synthesis_images, "read_image", lambda file: None)
    with pytest.raises(OSError, match="images that were written 3 times cannot be read"):
        start(quick(method="feddeo", kit=str(tiny_kit)))
    assert len(units) == 3 * len(set(units))


@pytest.mark.slow
def test_the_client_sends_its_payload_again_without_training(home: Path, tiny_kit: Path) -> None:
    """The server loses the reply.

    Asked again, the client answers from its cache, and forgets once it is acknowledged.
    """
    config = quick(method="feddeo", kit=str(tiny_kit))

    def lose(index: int, kind: str, reply: Message) -> Message | None:
        return (
            Message(Error(8, "lost"), reply_to=reply)
            if kind == "train" and (index, kind) not in requests and not requests.add((index, kind))
            else reply
        )

    requests: set = set()
    grid = start(config, tamper=lose)
    assert [t for _, t in grid.sent].count("train") == 4
    for file in (home / "runs" / "job" / "payloads").glob("*.json"):
        assert json.loads(file.read_text())["costs"]["resent"] == 1.0
    assert not list((home / "cache").rglob("payload.pb"))


@pytest.mark.slow
def test_a_client_that_is_asked_twice_at_once_works_once(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lost sight of a node asks again while it still works.

    The second request waits, and has the first one's payload.
    """
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    clients = []
    make_payload = domain_client.make_payload

    def slow(job: ClientJob) -> Payload:
        clients.append(job.client)
        time.sleep(1)
        return make_payload(job)

    monkeypatch.setattr(domain_client, "make_payload", slow)

    def ask(number: int) -> float:
        message = Message(
            RecordDict({"job": ConfigRecord({"job": "job"})}), dst_node_id=100, message_type="train"
        )
        message.metadata.__dict__["_message_id"] = str(number)
        reply = app(message, Context(1, 100, nodes(2)[0], RecordDict(), config))
        return float(reply.content.metric_records["costs"]["resent"])  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(ask, range(2))) == [0.0, 1.0]
    assert clients == ["client-0"]


@pytest.mark.slow
def test_a_cached_payload_of_other_settings_is_not_sent(home: Path, tiny_kit: Path) -> None:
    def refuse(index: int, kind: str, reply: Message) -> Message | None:
        return (
            Message(Error(2, "the server never saw it"), reply_to=reply)
            if kind == "train"
            else reply
        )

    with pytest.raises(RoundError):
        start(quick(method="feddeo", kit=str(tiny_kit)), "a", tamper=refuse)
    assert len(list((home / "cache").rglob("payload.pb"))) == 2
    shutil.rmtree(home / "runs" / "a")
    start(quick(method="feddeo", kit=str(tiny_kit), feddeo__lr=0.5), "a")
    for file in (home / "runs" / "a" / "payloads").glob("*.json"):
        assert json.loads(file.read_text())["costs"]["resent"] == 0.0


# No costs of what was refused
@pytest.mark.slow
def test_one_bad_payload_does_not_harm_the_others(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit), min_clients=1)
    start(config, tamper=swap_payload(lambda b: b[:-1] + bytes([b[-1] ^ 1])))
    result = metrics(home)
    assert result["server"]["synthetic_images"] == 10
    assert {
        row["client"]
        for row in map(
            json.loads, (home / "runs" / "job" / "manifest.jsonl").read_text().splitlines()
        )
    } == {"client-0"}
    # The model is still tested there
    assert set(result["accuracy"]["FT"]) == {
        "client-0",
        "client-1",
        "average",
    }
    assert not (home / "runs" / "job" / "payloads" / "client-1.pb").exists()
    assert set(result["clients"]["client-1"]) == {
        "download_bytes",
        "upload_bytes",
    }


@pytest.mark.slow
def test_a_bad_payload_that_is_needed_ends_the_run_with_its_reason(
    home: Path, tiny_kit: Path
) -> None:
    with pytest.raises(RoundError, match=r"1 of 2 clients.*\n.*payload of client-1: sha256"):
        start(quick(method="feddeo", kit=str(tiny_kit)), tamper=swap_payload(lambda b: b[:-1]))
    status = json.loads((home / "runs" / "job" / "status.json").read_text())
    assert status["phase"] == "failed"
    assert "client-1" in status["error"]
    assert not (home / "runs" / "job" / "report.html").exists()
    # The good payload was kept, the bad one is asked for again
    grid = start(quick(method="feddeo", kit=str(tiny_kit)))
    assert [index for index, kind in grid.sent if kind == "train"] == [1]


@pytest.mark.slow
def test_a_payload_that_leads_sampling_astray_is_left_out(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload passed every check; the rows that are not finite name its client."""
    sample = feddeo_server.sample

    def astray(kit, jobs, *rest):  # type: ignore[no-untyped-def]
        if rows := [row for row, job in enumerate(jobs) if job.client == "client-1"]:
            raise NotFiniteError(rows)
        return sample(kit, jobs, *rest)

    monkeypatch.setattr(feddeo_server, "sample", astray)
    with pytest.raises(
        RoundError,
        match=r"1 of 2 clients .* usable payload; at least 2 .*\n  client-1: .*NaN or infinity",
    ):
        start(quick(method="feddeo", kit=str(tiny_kit)))
    grid = start(quick(method="feddeo", kit=str(tiny_kit), min_clients=1))
    assert {
        row["client"]
        for row in map(
            json.loads, (home / "runs" / "job" / "manifest.jsonl").read_text().splitlines()
        )
    } == {"client-0"}
    assert [k for k, t in grid.sent if t == "train"] == [1]  # it may send a better one


def test_outputs_that_are_not_finite_are_their_clients_fault() -> None:
    broken = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    torch.nn.init.constant_(broken[1].bias, float("nan"))
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    cpu = torch.device("cpu")
    with pytest.raises(
        wire.PayloadError,
        match="payload of b: state: its outputs on the synthetic images are not finite",
    ):
        mean_teacher({"b": broken}, {"b": [0]}, pixels, cpu, plain=True)
    with pytest.raises(wire.PayloadError, match="payload of b"):
        specific_teacher({"b": broken}, ("a", "b"), pixels, cpu)


def test_a_node_that_the_superlink_forgot_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gets no id; when the node is back, it is asked."""
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.0)
    ids = iter(["", "m1"])
    online = []
    replies = []
    reply = SimpleNamespace(has_error=lambda: False, content="content")
    grid = SimpleNamespace(
        push_messages=lambda _: [next(ids)],
        get_nodes=lambda: online,
        pull_messages=lambda wanted: [reply] if wanted == ["m1"] else pytest.fail(str(wanted)),
    )
    exchange = Exchange(grid, 10.0)
    exchange.push(5, "train", RecordDict())
    look = lambda: exchange.pull(as_it_is, lambda *it: replies.append(it), failed)  # noqa: E731
    assert (look(), exchange.pending_nodes()) == (1, [5])
    online.append(NodeInfo(node_id=5, last_activated_at="now"))
    look()
    assert (look(), replies) == (0, [(5, "content")])


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_client_that_does_not_test_is_not_waited_for_long(home: Path, tiny_kit: Path) -> None:
    def lost(index: int, kind: str, reply: Message) -> Message | None:
        return None if (index, kind) == (1, "evaluate") else reply

    start(quick(method="prompts-only", kit=str(tiny_kit), test_timeout=1.0), tamper=lost)
    assert set(metrics(home)["accuracy"]["FT"]) == {"client-0", "average"}
    assert metrics(home)["not_tested"] == ["client-1"]
    assert (
        "Not all models were tested by client-1"
        in (home / "runs" / "job" / "report.html").read_text()
    )


# No client learned again
@pytest.mark.slow
def test_an_oversized_payload_is_not_sent_and_kept(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit), max_payload_mb=0.005)
    with pytest.raises(
        RoundError,
        match=r"payload of 1\d,\d+ bytes exceeds max-payload-mb = 0.005 and was not sent",
    ):
        start(config)
    with pytest.raises(RoundError, match="and was not sent"):  # the kept one neither
        start(config)
    start({**config, "max-payload-mb": 1.0})
    assert all(costs["resent"] for costs in metrics(home)["clients"].values())


@pytest.mark.slow
def test_an_oversized_payload_is_refused_before_it_is_stored(home: Path, tiny_kit: Path) -> None:
    """From clients that sent it all the same."""
    config = quick(method="feddeo", kit=str(tiny_kit))
    with pytest.raises(RoundError, match=r"size: 1\d,\d+ bytes; the limit is 5,000"):
        run_job(
            LoopGrid(app, config, nodes(2)),
            parse_run_config({**config, "max-payload-mb": 0.005}),
            "job",
        )
    assert not list((home / "runs" / "job").rglob("*.pb"))


@pytest.mark.slow
def test_no_clients_and_too_few_clients_end_the_run(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit), join_timeout=1.0)
    with pytest.raises(RoundError, match=r"0 of 2 clients joined within 1 s"):
        start(config, count=0)
    with pytest.raises(RoundError, match=r"1 of 2 clients joined"):
        start(config, count=1)
    start({**config, "min-clients": 1}, count=1)


def test_a_client_without_data_says_so(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(
        RoundError, match=r"6 of 7 clients joined.*\n.*partition-id = 6: the data has 6 parts"
    ):
        start(quick(method="prompts-only", kit=str(tiny_kit), num_clients=7))


@pytest.mark.slow
def test_a_job_id_stands_for_one_configuration(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-only", kit=str(tiny_kit)))
    with pytest.raises(ConfigError, match="'job' was started with seed = 0; this run has 1"):
        start(quick(method="prompts-only", kit=str(tiny_kit), seed=1))


def test_a_full_disk_is_noticed_before_anything_is_done(home: Path, tiny_kit: Path) -> None:
    config = quick(
        method="prompts-only",
        kit=str(tiny_kit),
        synthesis__images_per_class=1_000_000,
        num_clients=100_000,
    )
    with pytest.raises(ConfigError, match=r"MB free, but this run needs about [\d,]+ MB"):
        run_job(LoopGrid(app, config, []), parse_run_config(config), "job")
    assert not (home / "runs" / "job").exists()


def test_a_missing_kit_is_named(home: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"kit = 'nothing': no such kit"):
        start(quick(method="prompts-only", kit="nothing", classifier__init="none"))
    # Where nothing but the server's own sampling needs it
    for method in (
        "prompts-only",
        "fedlmg",
    ):
        config = quick(
            method=method, kit="/nowhere/kit", classifier__init="none", global_model__init="none"
        )
        grid = LoopGrid(app, config, nodes(2))
        with pytest.raises(KitError, match="'/nowhere/kit': no such folder"):
            run_job(grid, parse_run_config(config), f"absent-{method}")
        assert "train" not in {kind for _, kind in grid.sent}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "needed"), [("prompts-only", False), ("feddeo", True)])
# The global model
def test_only_a_client_that_needs_the_kit_must_have_it(
    home: Path, tiny_kit: Path, method: str, needed: bool
) -> None:
    config = quick(method=method, kit=str(tiny_kit))
    grid = LoopGrid(app, config, [{**node, "kit": "absent"} for node in nodes(2)])
    if needed:
        with pytest.raises(RoundError, match="'absent': no such kit"):
            run_job(grid, parse_run_config(config), "job")
        shutil.copytree(tiny_kit, home / "no-unet", ignore=shutil.ignore_patterns("unet"))
        grid = LoopGrid(app, config, [{**node, "kit": str(home / "no-unet")} for node in nodes(2)])
        with pytest.raises(RoundError, match="lacks unet; this run needs it"):
            run_job(grid, parse_run_config(config), "job")
        assert {kind for _, kind in grid.sent} == {"query.join"}
    else:
        run_job(grid, parse_run_config(config), "job")
        assert all(costs["download_bytes"] < 50e6 for costs in metrics(home)["clients"].values())


@pytest.mark.slow
def test_the_ceiling_needs_no_numbers_in_the_clients_names(home: Path, tiny_kit: Path) -> None:
    config = quick(method="ceiling", kit=str(tiny_kit))
    grid = LoopGrid(
        app,
        config,
        [{**node, "client-id": f"site-{name}"} for node, name in zip(nodes(2), "ab", strict=True)],
    )
    run_job(grid, parse_run_config(config), "job")
    assert json.loads((home / "runs" / "job" / "models" / "real.json").read_text())["images"] == 60


def test_global_models_are_kept_and_usable(home: Path, tiny_kit: Path) -> None:
    from osfl.models.classifiers import build_classifier

    start(quick(method="ceiling", kit=str(tiny_kit)))
    model = build_classifier("shufflenet_v2_x1_0", 10, small_stem=True)
    model.load_state_dict(load_file(home / "runs" / "job" / "models" / "real.safetensors"))
    assert torch.isfinite(model.eval()(torch.zeros(1, 3, 32, 32))).all()
    description = json.loads((home / "runs" / "job" / "models" / "real.json").read_text())
    assert description["images"] == 2 * 30  # both clients' training images, not the test's


def test_a_node_with_another_kit_is_named(home: Path, tiny_kit: Path, tmp_path: Path) -> None:
    """Before anybody works; of a copy with other weights in one file, that file is named."""
    kit_copy = shutil.copytree(tiny_kit, tmp_path / "other")
    weights = kit_copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    config = quick(method="feddeo", kit=str(tiny_kit))
    message = (
        r"other': its unet/diffusion_pytorch_model.safetensors \([0-9a-f]{8}\) is not the server's"
    )
    for kit, reason in ((kit_copy, message), (tmp_path / "none", "no such folder")):
        grid = LoopGrid(app, config, [nodes(2)[0], {**nodes(2)[1], "kit": str(kit)}])
        with pytest.raises(RoundError, match=reason):
            run_job(grid, parse_run_config(config), "job")
        assert {kind for _, kind in grid.sent} == {"query.join"}


def test_only_weights_that_both_have_and_need_are_compared(tiny_kit: Path, tmp_path: Path) -> None:
    """OSCAR needs no UNet.

    One side's extra variant, other settings and a server with a hub id do not matter.
    """
    kit_copy = shutil.copytree(tiny_kit, tmp_path / "other")
    weights = kit_copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (kit_copy / "text_encoder" / "model.fp16.safetensors").write_bytes(b"half")
    (kit_copy / "text_encoder" / "config.json").write_text(
        (kit_copy / "text_encoder" / "config.json").read_text() + "\n"
    )

    def join(method: str, there: dict[str, str]) -> None:
        message = SimpleNamespace(content=RecordDict({"kit": ConfigRecord(dict(there))}))
        client_app.app._same_kit(
            message, parse_run_config(quick(method=method, kit=str(tiny_kit))), str(kit_copy)
        )  # type: ignore[arg-type]

    server = {
        method: client_kit_digests(parse_run_config(quick(method=method, kit=str(tiny_kit))))
        for method in ("oscar", "feddeo")
    }
    assert any(name.startswith("unet/") for name in server["feddeo"])
    join("oscar", server["oscar"])
    join("feddeo", {})
    with pytest.raises(ConfigError, match="use the kit from the same source"):
        join("feddeo", server["feddeo"])


def test_a_kit_that_no_client_needs_may_be_missing() -> None:
    assert client_kit_digests(parse_run_config(quick(method="fedavg", kit="nowhere"))) == {}


def test_an_old_installation_may_not_join(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code comes with the run; an old installation has other kits and dependencies."""
    monkeypatch.setattr(client_app.app, "version", lambda name: "0.0.1")
    message = f"client-0 has osfl 0.0.1 installed, and the run requires {osfl.__version__}"
    with pytest.raises(RoundError, match=message):
        start(quick(method="feddeo", kit=str(tiny_kit)))


@pytest.mark.parametrize(
    ("client", "version", "message"),
    [
        ("../../evil", osfl.__version__, "client id '../../evil' must be 1 to 64"),
        ("average", osfl.__version__, "client id 'average' must be"),
        ("client-1", "0.0.0", "has osfl 0.0.0 installed"),
    ],
)
def test_a_node_that_may_not_join_is_named(
    home: Path, tiny_kit: Path, client: str, version: str, message: str
) -> None:
    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "query.join" and index == 1:
            reply.content = RecordDict(
                {"join": ConfigRecord({"client": client, "version": version})}
            )
        return reply

    with pytest.raises(RoundError, match=re.escape(message)):
        start(quick(method="prompts-only", kit=str(tiny_kit)), tamper=tamper)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_silent_client_is_given_up_at_the_deadline(home: Path, tiny_kit: Path) -> None:
    def lost(index: int, kind: str, reply: Message) -> Message | None:
        return None if (index, kind) == (1, "train") else reply

    with pytest.raises(RoundError, match="client-1: no payload within 1 s .deadline"):
        start(quick(method="feddeo", kit=str(tiny_kit), deadline=1.0), tamper=lost)


@pytest.mark.slow
def test_invalid_confusion_matrices_are_refused(home: Path, tiny_kit: Path) -> None:
    """Another one of each client but the first."""
    matrices = {
        "too few": [1] * 99,
        "negative": [-1] * 100,
        "no counts": [0.5] * 100,
        "2^39": [2**39] + [0] * 99,
        "too many together": [10**9] * 2 + [0] * 98,
    }

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "evaluate" and index > 0:
            cells = list(matrices.values())[index - 1]
            reply.content = RecordDict({"metrics": MetricRecord({"confusion": cells})})
        return reply

    count = 1 + len(matrices)
    start(quick(method="prompts-only", kit=str(tiny_kit), num_clients=count), tamper=tamper)
    assert set(metrics(home)["accuracy"]["FT"]) == {"client-0", "average"}


def only_client_0(index: int, kind: str, reply: Message) -> Message:
    """Client 1's app raises when it is asked to train."""
    return (
        Message(Error(2, "ValueError: no"), reply_to=reply)
        if kind == "train" and index == 1
        else reply
    )


@pytest.mark.slow
def test_a_model_of_fewer_clients_is_not_taken_for_one_of_all(home: Path, tiny_kit: Path) -> None:
    """Trained without client 1.

    Resumed with it: its images come in, so the model is trained again.
    """
    config = quick(method="feddeo", kit=str(tiny_kit), min_clients=1)
    start(config, tamper=only_client_0)
    model = home / "runs" / "job" / "models" / "FT.safetensors"
    without = model.read_bytes()
    start(config)
    assert metrics(home)["server"]["synthetic_images"] == 20
    assert model.read_bytes() != without
    trained = model.stat().st_mtime_ns
    start(config)  # nothing new: kept
    assert model.stat().st_mtime_ns == trained


@pytest.mark.slow
def test_a_resumed_run_needs_no_client_whose_payload_it_has(home: Path, tiny_kit: Path) -> None:
    """All payloads are stored and one site is gone.

    Synthesis goes on with all of them, and the report says who did not test.
    """
    config = quick(method="feddeo", kit=str(tiny_kit), join_timeout=1.0)

    def no_test(index: int, kind: str, reply: Message) -> Message:
        return Message(Error(2, "ValueError: no"), reply_to=reply) if kind == "evaluate" else reply

    with pytest.raises(RoundError, match="no client could test"):
        start(config, tamper=no_test)
    start(config, count=1)
    result = metrics(home)
    assert result["server"]["synthetic_images"] == 20
    assert set(result["accuracy"]["FT"]) == {"client-0", "average"}
    assert result["not_tested"] == ["client-1"]
    assert (
        "Not all models were tested by client-1"
        in (home / "runs" / "job" / "report.html").read_text()
    )


@pytest.mark.slow
def test_a_node_that_is_offline_is_asked_again_when_it_is_back(home: Path, tiny_kit: Path) -> None:
    """Flower answers at once for a node that is away; more often than a crash would be forgiven."""
    away = iter(range(5))

    def offline(index: int, kind: str, reply: Message) -> Message:
        return (
            Message(Error(5, "offline"), reply_to=reply)
            if kind == "train" and index == 1 and next(away, None) is not None
            else reply
        )

    grid = start(quick(method="feddeo", kit=str(tiny_kit)), tamper=offline)
    assert [index for index, kind in grid.sent if kind == "train"].count(1) == 6


class Faltering(LoopGrid):
    """A grid whose SuperLink answers with an HTTP error before, or after, it did what it was asked
    (`failing`: call number -> path, status).
    """

    failing: dict[tuple[str, int], tuple[str, int]]

    def _answer(self, call: str, act: Callable[[], list]) -> list:
        self.calls[call] += 1
        if failure := self.failing.get((call, self.calls[call])):
            path, code = failure
            if path != call:  # a later request of the same call
                act()
            request = httpx.Request("POST", f"https://superlink/v1/runtime/{path}")
            raise httpx.HTTPStatusError(
                f"{code}", request=request, response=httpx.Response(code, request=request)
            )
        return act()

    def get_nodes(self) -> list[NodeInfo]:
        return self._answer("get-nodes", lambda: list(super(Faltering, self).get_nodes()))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return self._answer(
            "push-messages", lambda: list(super(Faltering, self).push_messages(messages))
        )

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return self._answer(
            "pull-messages", lambda: list(super(Faltering, self).pull_messages(message_ids))
        )


def falter(tiny_kit: Path, failing: dict[tuple[str, int], tuple[str, int]]) -> Faltering:
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    grid = Faltering(app, config, nodes(2))
    grid.failing = failing
    grid.calls = Counter()
    run_job(grid, parse_run_config(config), "job")
    return grid


@pytest.mark.slow
def test_a_superlink_that_fails_now_and_then_ends_nothing(home: Path, tiny_kit: Path) -> None:
    """The SuperLink's database is locked for long at times.

    What may have been done is asked for again, and nothing is counted twice.
    """
    pushed = "push-messages"
    pulled = "pull-messages"
    nodes_asked = "get-nodes"
    failing = {
        (nodes_asked, 1): (nodes_asked, 500),
        (pushed, 1): (pushed, 500),
        (pulled, 1): (pulled, 502),
    }
    failing |= {(pulled, 4): ("pull-object", 500)}  # a reply that was given out, and came half
    grid = falter(tiny_kit, failing)
    assert metrics(home)["accuracy"]["FT"].keys() == {"client-0", "client-1", "average"}
    asked = Counter(grid.sent)
    # Join, train, acknowledge, evaluate of two clients; one of them again
    assert sorted(asked.values()) == [1] * 7 + [2]
    assert len(metrics(home)["clients"]) == 2


@pytest.mark.slow
def test_a_message_that_a_node_lost_is_asked_again(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of message is lost once by client-1, whose SuperLink failed while it fetched it.

    The node stays online, and no message says so.
    """
    lost: set[str] = set()

    def lose(index: int, kind: str, reply: Message) -> Message | None:
        if index == 1 and kind not in lost:
            lost.add(kind)
            return None
        return reply

    monkeypatch.setattr("server_app.federation.exchange.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("server_app.federation.exchange.WORK_PATIENCE_SECONDS", 0.1)
    grid = start(quick(method="feddeo", kit=str(tiny_kit)), tamper=lose)
    assert metrics(home)["accuracy"]["FT"].keys() == {"client-0", "client-1", "average"}
    assert lost == {"query.join", "train", "query.acknowledge", "evaluate"}
    assert {kind: grid.sent.count((0, kind)) for kind in ("train", "evaluate")} == {
        "train": 1,
        "evaluate": 1,
    }
    assert grid.sent.count((1, "train")) >= 2
    assert grid.sent.count((1, "evaluate")) >= 2


def test_looks_become_rarer_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look each second at first, then after a twentieth of the silence, and after ten seconds at
    the latest; whatever comes ends the silence.
    """
    now = [0.0]
    pauses = []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("server_app.federation.exchange.time", clock)
    monkeypatch.setattr("server_app.federation.exchange.POLL_SECONDS", 1.0)
    exchange = Exchange(None, 10.0, _last_reply=0.0)  # type: ignore[arg-type]
    for now[0] in (0.0, 20.0, 60.0, 200.0, 5000.0):
        pauses.append(exchange.poll_interval())
    exchange._forget(7)
    pauses.append(exchange.poll_interval())
    assert pauses == [1, 1, 3, 10, 10, 1]


def test_the_first_of_two_answers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again while it only was slow."""
    replies: dict[str, list[Message]] = {}

    class Slow:
        def get_nodes(self) -> list[NodeInfo]:
            return [NodeInfo(node_id=7, last_activated_at="then")]

        def push_messages(self, messages: list[Message]) -> list[str]:
            (message,) = messages
            name = str(len(replies))
            message.metadata.__dict__["_message_id"] = name
            replies[name] = [
                Message(RecordDict({"n": ConfigRecord({"n": len(replies)})}), reply_to=message)
            ]
            return [name]

        def pull_messages(self, ids: list[str]) -> list[Message]:
            return replies[ids[0]] if len(replies) == 2 else []

    # type: ignore[arg-type]
    exchange = Exchange(Slow(), 10.0, 0.01)
    answers = []
    exchange.push(7, "evaluate", RecordDict())
    for _ in range(3):
        time.sleep(0.02)
        exchange.pull(as_it_is, lambda node, content: answers.append(content["n"]["n"]), failed)
    assert answers == [0]
    assert (len(replies), exchange.pending_nodes()) == (2, [])


def test_a_question_that_could_not_be_asked_again_is_asked_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one was lost, and the SuperLink did not take the second: there must be a third."""
    monkeypatch.setattr("server_app.federation.exchange.RETRY_SECONDS", 0.0)
    ids = iter(["m1", "", "m3"])
    replies = []
    reply = SimpleNamespace(has_error=lambda: False, content="content")
    grid = SimpleNamespace(
        push_messages=lambda _: [next(ids)],
        get_nodes=lambda: [NodeInfo(node_id=5, last_activated_at="then")],
        pull_messages=lambda wanted: [reply] if wanted == ["m3"] else [],
    )
    exchange = Exchange(grid, 10.0, 0.01)
    exchange.push(5, "train", RecordDict())
    for _ in range(4):
        time.sleep(0.02)
        exchange.pull(as_it_is, lambda *it: replies.append(it), failed)
    assert (replies, exchange.pending_nodes()) == ([(5, "content")], [])


@pytest.mark.slow
def test_the_last_acknowledgement_is_sent_though_nothing_else_is_owed(
    home: Path, tiny_kit: Path
) -> None:
    """Two joined and were asked.

    The sixth push is the last client's acknowledgement, and the SuperLink does not take it.
    """
    grid = falter(tiny_kit, {("push-messages", 6): ("push-messages", 500)})
    assert (
        Counter(grid.sent)[1, "query.acknowledge"]
        == Counter(grid.sent)[0, "query.acknowledge"]
        == 1
    )


def test_a_run_that_the_superlink_no_longer_wants_ends(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(httpx.HTTPStatusError):
        falter(tiny_kit, {("pull-messages", 3): ("pull-messages", 404)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query.join", "train", "evaluate"])
def test_replies_that_make_no_sense_harm_only_their_senders(
    home: Path, tiny_kit: Path, kind: str
) -> None:
    """client-1's are empty, client-2's have numbers that are not finite."""
    record = MetricRecord({"confusion": [float("nan")] * 100, "seconds": float("inf")})
    numbers = RecordDict({"metrics": record, "costs": MetricRecord({"flops": float("nan")})})
    nonsense = {1: RecordDict(), 2: numbers}

    def tamper(index: int, message_type: str, reply: Message) -> Message:
        if index in nonsense and message_type == kind:
            reply.content = nonsense[index]
        return reply

    settings = {"num_clients": 3, "min_clients": 1, "join_timeout": 1.0}
    start(quick(method="prompts-domain", kit=str(tiny_kit), **settings), tamper=tamper)
    senders = {"client-1", "client-2"} if kind == "train" else set()
    assert set(metrics(home)["accuracy"]["FT"]) == {"client-0", "average", *senders}


@pytest.mark.parametrize(
    "read",
    [lambda: MetricRecord.inflate(b"MetricRecord  16\0" + 16 * b"\xff"), lambda: bytearray(2**62)],
    ids=["broken", "huge"],
)
def test_a_reply_that_flower_cannot_put_together_is_its_nodes_failure(
    read: Callable[[], object],
) -> None:
    """Flower reads what a node wrote into its records while the reply is pulled."""
    grid = SimpleNamespace(
        push_messages=lambda _: ["m1"], get_nodes=lambda: [], pull_messages=lambda wanted: [read()]
    )
    exchange = Exchange(grid, 10.0)
    failures = []
    exchange.push(5, "train", RecordDict())
    assert exchange.pull(as_it_is, failed, lambda *it: failures.append(it)) == 0
    ((node, reason),) = failures
    assert (node, "its reply to train cannot be read" in reason) == (5, True)


@pytest.mark.slow
def test_a_classifier_whose_logits_are_not_finite_is_refused(home: Path, tiny_kit: Path) -> None:
    """Every number is plausible alone; together they overflow."""
    from osfl.payload.kinds import Classifier
    from server_app.expected import expected_payload

    config = quick(method="fedlmg", kit=str(tiny_kit), min_clients=1, fedlmg__strategies="ft")

    def explode(blob: bytes) -> bytes:
        good = wire.decode(blob, expected_payload(parse_run_config(config), "job")("client-1"))
        assert isinstance(good, Classifier)
        state = {
            n: torch.full_like(t, 9e5) if t.is_floating_point() and "running" not in n else t
            for n, t in good.state.items()
        }
        state = {n: torch.zeros_like(t) if "running_var" in n else t for n, t in state.items()}
        return wire.encode(
            Classifier(good.classes, good.architecture, state), "fedlmg", "job", "client-1"
        )

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            blob = explode(unpack_bytes(reply.content.array_records["payload"]))
            reply.content = pack_payload(blob, dict.fromkeys(COST_KEYS, 1.0))
        return reply

    start(config, tamper=tamper)
    assert metrics(home)["server"]["synthetic_images"] == 10


def test_missing_models_of_the_server_are_reported_before_the_clients_work(
    home: Path, tiny_kit: Path
) -> None:
    for wrong, message in (
        ({"global_model__architecture": "resnet19"}, "'resnet19' is not a torchvision model"),
        ({"global_model__init": "/nowhere.pth"}, "/nowhere.pth.: no such file or folder"),
        ({"device": "cuda:99"}, "device = 'cuda:99'"),
        (
            {"synthesis__workers": 1, "synthesis__ray_address": "ray://127.0.0.1:1"},
            "synthesis.ray-address = 'ray://127.0.0.1:1'",
        ),
    ):
        grid = LoopGrid(app, quick(kit=str(tiny_kit), **wrong), nodes(2))
        with pytest.raises(ValueError, match=message):
            run_job(grid, parse_run_config(grid.run_config), "job")
        assert {kind for _, kind in grid.sent} <= {"query.join"}
        shutil.rmtree(home / "runs" / "job", ignore_errors=True)


def test_an_architecture_that_the_run_does_not_allow_is_refused_at_joining(
    home: Path, tiny_kit: Path
) -> None:
    config = quick(method="fedlmg", kit=str(tiny_kit), join_timeout=1.0)
    node_configs = nodes(2)
    node_configs[1] |= {"architecture": "resnet50"}
    grid = LoopGrid(app, config, node_configs)
    with pytest.raises(
        RoundError,
        match="node-config architecture = 'resnet50': this run allows shufflenet_v2_x1_0",
    ):
        run_job(grid, parse_run_config(config), "job")
    assert {kind for _, kind in grid.sent} == {"query.join"}


@pytest.mark.slow
def test_unnamed_domains_are_requested(home: Path, tiny_kit: Path) -> None:
    """Without a simulation that knows it, the node must say its domain.

    With it, prompts name it.
    """
    config = quick(method="prompts-domain", kit=str(tiny_kit), data__partition="iid")
    with pytest.raises(RoundError, match="prompts-domain requires node-config domain"):
        start(config)
    node_configs = [
        {**node, "domain": domain}
        for node, domain in zip(nodes(2), ("etching", "fresco"), strict=True)
    ]
    run_job(LoopGrid(app, config, node_configs), parse_run_config(config), "told")
    from osfl.payload.v1 import payload_pb2 as pb

    blobs = [
        (home / "runs" / "told" / "payloads" / f"client-{k}.pb").read_bytes() for k in range(2)
    ]
    assert [pb.Payload.FromString(blob).domain.name for blob in blobs] == ["etching", "fresco"]


@pytest.mark.slow
def test_a_lower_limit_does_not_refuse_what_was_stored(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit))
    start_once(home, config)
    grid = start({**config, "max-payload-mb": 0.001})
    assert "train" not in [kind for _, kind in grid.sent]
