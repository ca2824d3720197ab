"""A whole run over real Flower messages and the real apps, in this process; and what goes wrong in one."""

import json
from pathlib import Path

import pytest
import torch
from conftest import LoopGrid, quick
from flwr.app import Array, ArrayRecord, Error, Message
from safetensors.torch import load_file

import server_app.methods.feddeo as feddeo_server
import server_app.synthesis.images as synthesis_images
from client_app.app import app
from osfl import wire
from osfl.config import ConfigError, parse_run_config
from server_app.app import run_job
from server_app.round import RoundError


def nodes(count: int) -> list[dict]:
    return [{"partition-id": k, "num-partitions": count} for k in range(count)]


def start(config: dict, job: str = "job", count: int | None = None, tamper=None) -> LoopGrid:  # type: ignore[no-untyped-def]
    grid = LoopGrid(app, config, nodes(count if count is not None else config["num-clients"]), tamper)
    run_job(grid, parse_run_config(config), job)
    return grid


def metrics(home: Path, job: str = "job") -> dict:
    return json.loads((home / "runs" / job / "metrics.json").read_text())


@pytest.mark.parametrize(
    ("method", "models", "synthetic"),
    [
        ("prompts-only", ["FT"], 20),
        ("feddeo", ["FT"], 20),
        ("fedlmg", ["FT", "MD", "SD"], 20),
        ("local", ["client-0", "client-1"], 0),
        ("ceiling", ["real"], 0),
    ],
)
def test_every_method_makes_its_round_trip(home: Path, tiny_kit: Path, method: str, models: list[str], synthetic: int) -> None:
    grid = start(quick(method=method, kit=str(tiny_kit)))
    result = metrics(home)
    assert sorted(result["accuracy"]) == sorted(models)
    for row in result["accuracy"].values():
        assert set(row) == {"client-0", "client-1", "average"}
        assert row["average"] == pytest.approx((row["client-0"] + row["client-1"]) / 2)
    assert all(sum(map(sum, matrix)) == 300 for by_client in result["confusion"].values() for matrix in by_client.values())
    folder = home / "runs" / "job"
    manifest = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()] if synthetic else []
    assert len(manifest) == synthetic == result["server"]["synthetic_images"]
    assert all((folder / row["file"]).is_file() for row in manifest)
    sends = method in ("feddeo", "fedlmg", "local")
    assert [t for _, t in grid.sent].count("train") == (2 if sends else 0)
    for about in result["clients"].values():
        assert (about["upload_bytes"] > 0) == sends
        assert not sends or (about["flops"] > 0 and about["seconds"] > 0 and about["images"] == 100)
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")  # opens offline
    assert json.loads((folder / "status.json").read_text())["phase"] == "finished"


def test_payload_sizes_are_those_on_the_wire(home: Path, tiny_kit: Path) -> None:
    start(quick(method="feddeo", kit=str(tiny_kit)))
    for client, about in metrics(home)["clients"].items():
        stored = home / "runs" / "job" / "payloads" / f"{client}.pb"
        assert stored.stat().st_size == about["upload_bytes"]
        assert 10 * 8 * 32 * 4 < about["upload_bytes"] < 10 * 8 * 32 * 4 + 256 + 100  # ten descriptions [8, 32] in fp32
        assert wire.digest(stored.read_bytes()) == json.loads(stored.with_suffix(".json").read_text())["sha256"]


def test_a_finished_job_asks_nobody_and_renders_nothing(home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit))
    start(config)
    before = metrics(home)
    monkeypatch.setattr(
        feddeo_server, "load_kit", lambda *args: pytest.fail("the kit was loaded to render images that were there")
    )
    grid = start(config)
    assert "train" not in [t for _, t in grid.sent]
    assert metrics(home)["accuracy"] == before["accuracy"]


class Killed(BaseException):
    """Stands for the process's end: no handler for exceptions sees it."""


def files(folder: Path) -> dict[str, bytes]:
    kept = [p for name in ("images", "units", "payloads") for p in (folder / name).rglob("*") if p.is_file()]
    kept += [folder / "manifest.jsonl"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept if p.suffix != ".json"}


def test_an_interrupted_server_makes_the_same_images(home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of every unit in turn, resumed: byte for byte what the quiet run makes; at most one unit is lost."""
    config = quick(method="feddeo", kit=str(tiny_kit))
    start(config, "quiet")
    commit, rendered = synthesis_images._commit, []
    for kill_at in range(4):  # two clients of 10 images in units of 8: four units

        def dying(job, unit, pixels, kill_at=kill_at):  # type: ignore[no-untyped-def]
            rendered.append(unit.name)
            if len(rendered) == 1 and kill_at >= 0:
                path = job.folder.path / synthesis_images.image_file(job, unit.jobs[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half an image")
                raise Killed
            commit(job, unit, pixels)
            raise Killed

        rendered.clear()
        monkeypatch.setattr(
            synthesis_images,
            "_commit",
            dying
            if kill_at % 2 == 0
            else lambda job, unit, pixels: (commit(job, unit, pixels), (_ for _ in ()).throw(Killed))[0],
        )
        with pytest.raises(Killed):
            start(config, "rough")
    monkeypatch.setattr(synthesis_images, "_commit", commit)
    start(config, "rough")
    quiet, rough = files(home / "runs" / "quiet"), files(home / "runs" / "rough")
    payloads = {name for name in quiet if name.startswith("payloads")}
    assert {n: v for n, v in quiet.items() if n not in payloads and not n.startswith("units")} == {
        n: v for n, v in rough.items() if n not in payloads and not n.startswith("units")
    }


def test_a_damaged_image_is_made_again(home: Path, tiny_kit: Path) -> None:
    config = quick(method="prompts-only", kit=str(tiny_kit))
    start(config)
    picture = sorted((home / "runs" / "job" / "images").rglob("*.png"))[3]
    good = picture.read_bytes()
    picture.write_bytes(good[:40])
    start(config)
    assert picture.read_bytes() == good


def test_the_client_sends_its_payload_again_without_training(home: Path, tiny_kit: Path) -> None:
    """The server loses the reply; asked again, the client answers from its cache, and forgets once it is acknowledged."""
    config = quick(method="feddeo", kit=str(tiny_kit))

    def lose(index: int, kind: str, reply: Message) -> Message | None:
        return (
            Message(Error(8, "lost"), reply_to=reply)
            if kind == "train" and (index, kind) not in seen and not seen.add((index, kind))
            else reply
        )

    seen: set = set()
    grid = start(config, tamper=lose)
    assert [t for _, t in grid.sent].count("train") == 4
    for file in (home / "runs" / "job" / "payloads").glob("*.json"):
        assert json.loads(file.read_text())["costs"]["resent"] == 1.0
    assert not list((home / "cache").rglob("payload.pb"))


def test_a_cached_payload_of_other_settings_is_not_sent(home: Path, tiny_kit: Path) -> None:
    def refuse(index: int, kind: str, reply: Message) -> Message | None:
        return Message(Error(2, "the server never saw it"), reply_to=reply) if kind == "train" else reply

    with pytest.raises(RoundError):
        start(quick(method="feddeo", kit=str(tiny_kit)), "a", tamper=refuse)
    assert len(list((home / "cache").rglob("payload.pb"))) == 2
    import shutil

    shutil.rmtree(home / "runs" / "a")
    start(quick(method="feddeo", kit=str(tiny_kit), feddeo__lr=0.5), "a")
    for file in (home / "runs" / "a" / "payloads").glob("*.json"):
        assert json.loads(file.read_text())["costs"]["resent"] == 0.0


def swap_payload(change) -> object:  # type: ignore[no-untyped-def]
    """A tamper that changes the payload bytes of client 1 and leaves the header alone."""

    def tamper(index: int, kind: str, reply: Message) -> Message:
        if kind == "train" and index == 1:
            blob = change(reply.content.array_records["payload"]["payload"].data)
            reply.content["payload"] = ArrayRecord(
                {"payload": Array(dtype="uint8", shape=(len(blob),), stype="osfl.payload.v1", data=blob)}
            )
        return reply

    return tamper


def test_one_bad_payload_does_not_harm_the_others(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit), min_clients=1)
    start(config, tamper=swap_payload(lambda b: b[:-1] + bytes([b[-1] ^ 1])))
    result = metrics(home)
    assert result["server"]["synthetic_images"] == 10
    assert {row["client"] for row in map(json.loads, (home / "runs" / "job" / "manifest.jsonl").read_text().splitlines())} == {
        "client-0"
    }
    assert set(result["accuracy"]["FT"]) == {"client-0", "client-1", "average"}  # the model is still tested there
    assert not (home / "runs" / "job" / "payloads" / "client-1.pb").exists()


def test_a_bad_payload_that_is_needed_ends_the_run_with_its_reason(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(RoundError, match=r"1 of 2 clients.*\n.*payload of client-1: sha256"):
        start(quick(method="feddeo", kit=str(tiny_kit)), tamper=swap_payload(lambda b: b[:-1]))
    status = json.loads((home / "runs" / "job" / "status.json").read_text())
    assert status["phase"] == "failed"
    assert "client-1" in status["error"]
    assert not (home / "runs" / "job" / "report.html").exists()
    grid = start(quick(method="feddeo", kit=str(tiny_kit)))  # the good payload was kept, the bad one is asked for again
    assert [index for index, kind in grid.sent if kind == "train"] == [1]


def test_an_oversized_payload_is_refused_before_it_is_stored(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(RoundError, match=r"size: 1\d,\d+ bytes; the limit is 5,000"):
        start(quick(method="feddeo", kit=str(tiny_kit), max_payload_mb=0.005))
    assert not list((home / "runs" / "job").rglob("*.pb"))


def test_no_clients_and_too_few_clients_end_the_run(home: Path, tiny_kit: Path) -> None:
    config = quick(method="feddeo", kit=str(tiny_kit), join_timeout=1.0)
    with pytest.raises(RoundError, match=r"0 of 2 clients joined within 1 s"):
        start(config, count=0)
    with pytest.raises(RoundError, match=r"1 of 2 clients joined"):
        start(config, count=1)
    start({**config, "min-clients": 1}, count=1)


def test_a_client_without_data_says_so(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(RoundError, match=r"6 of 7 clients joined.*\n.*partition-id = 6: the data has 6 parts"):
        start(quick(method="prompts-only", kit=str(tiny_kit), num_clients=7))


def test_a_second_node_of_the_same_name_is_refused(home: Path, tiny_kit: Path) -> None:
    config = quick(method="prompts-only", kit=str(tiny_kit))
    grid = LoopGrid(app, config, [{"partition-id": 0, "num-partitions": 2}] * 2)
    with pytest.raises(RoundError, match="'client-0' is already taken by another node"):
        run_job(grid, parse_run_config(config), "job")


def test_a_job_id_stands_for_one_configuration(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-only", kit=str(tiny_kit)))
    with pytest.raises(ConfigError, match="'job' was started with seed = 0; this run has 1"):
        start(quick(method="prompts-only", kit=str(tiny_kit), seed=1))


def test_a_full_disk_is_noticed_before_anything_is_done(home: Path, tiny_kit: Path) -> None:
    config = quick(method="prompts-only", kit=str(tiny_kit), synthesis__images_per_class=1_000_000, num_clients=100_000)
    with pytest.raises(ConfigError, match=r"MB free, this run needs about [\d,]+ MB"):
        run_job(LoopGrid(app, config, []), parse_run_config(config), "job")
    assert not (home / "runs" / "job").exists()


def test_missing_kits_and_relative_folders_are_named(home: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"kit = 'nothing': no such kit"):
        start(quick(method="prompts-only", kit="nothing", classifier__init="none"))
    with pytest.raises(ConfigError, match="runs-dir = 'runs': must be an absolute path"):
        start(quick(method="prompts-only", runs_dir="runs"))


def test_global_models_are_kept_and_usable(home: Path, tiny_kit: Path) -> None:
    from osfl.classifiers import build_classifier

    start(quick(method="ceiling", kit=str(tiny_kit)))
    model = build_classifier("resnet18", 10, small_stem=True)
    model.load_state_dict(load_file(home / "runs" / "job" / "models" / "real.safetensors"))
    assert torch.isfinite(model.eval()(torch.zeros(1, 3, 32, 32))).all()
