"""Runs whose clients send different kinds of payload."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import server_app.synthesis.images as synthesis_images
from client_app import kinds as client_kinds
from client_app.app import app
from client_app.privacy.ledger import Ledger
from osfl.cli import certs
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.inference.loading import load_model
from osfl.kit.folder import KitError
from osfl.models.classifiers import compute_logits
from osfl.payload import wire
from osfl.payload.messages import pack_bytes, unpack_bytes
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.verify import verify_run
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from server_app.methods import mixed as mixed_server
from tests.helpers.encoder_folders import save_whole_clip
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.system_tools import quick_arguments
from tests.helpers.whole_runs import Killed, files, metrics, nodes

pytestmark = pytest.mark.slow
KINDS = "feddeo,oscar,fedlmg"
# Client 2 chooses by itself, and gets the run's preferred kind
CHOICES = ("fedlmg", "oscar", "auto")


def mixed(kit: Path, methods: str = KINDS, **settings: Any) -> dict[str, Any]:
    return {**quick(method="mixed", kit=str(kit), **settings), "mixed.methods": methods}


def start(
    config: dict[str, Any],
    choices: tuple[str, ...] = CHOICES,
    job: str = "job",
    tamper: Any = None,
    **site: Any,
) -> LoopGrid:
    """Run a job whose nodes choose their kinds of payload."""
    sites = [
        {**node, "method": kind, "client-id": f"client-{node['partition-id']}", **site}
        for node, kind in zip(nodes(len(choices)), choices, strict=True)
    ]
    settings = {**config, "num-clients": len(choices)}
    run_job(LoopGrid(app, settings, sites, tamper), parse_run_config(settings), job)
    return LoopGrid(app, settings, sites, tamper)


def image_files(folder: Path, client: str) -> dict[str, bytes]:
    return files(folder, f"images/{client}")


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images of a class are enough to learn from."""
    monkeypatch.setattr(client_kinds, "MIN_CLASS_IMAGES", 3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path at which the first test leaves its finished run for the others."""
    return tmp_path_factory.mktemp("kept") / "base"


@pytest.fixture
def base(home: Path, tiny_kit: Path, kept: Path) -> Path:
    """The folder of a finished mixed run."""
    folder = home / "runs" / "base"
    if kept.exists():
        shutil.copytree(kept, folder)
        return folder
    start(mixed(tiny_kit), job="base")
    shutil.copytree(folder, kept)
    return folder


def test_the_report_shows_who_sent_what(base: Path, home: Path) -> None:
    results = metrics(home, "base")
    rows = {row["kind"]: row for row in results["kinds"]}
    assert {kind: row["clients"] for kind, row in rows.items()} == {
        "fedlmg": ["client-0"],
        "oscar": ["client-1"],
        "feddeo": ["client-2"],
    }
    assert results["shown"] == "Mixed"
    for kind, row in rows.items():
        (client,) = row["clients"]
        payload = base / "payloads" / f"{client}.pb"
        assert row["upload_bytes"] == payload.stat().st_size
        assert row["images"] == len(image_files(base, client)) == 10
        assert row["accuracy"] == results["accuracy"]["Mixed"][client]
        assert json.loads(payload.with_suffix(".json").read_text())["kind"] == kind
    page = (base / "report.html").read_text()
    assert "<h2>Kinds of payload</h2>" in page
    assert '<td>oscar</td><td class="words">client-1</td>' in page
    assert "its classifier, trained on its own images (fedlmg); or" in page
    assert "its kind of payload: fedlmg, oscar, feddeo; no images" in results["summary"]
    assert [problem for finding in verify_run(base) for problem in finding.problems] == []


@pytest.mark.parametrize("number", range(3), ids=["fedlmg", "oscar", "feddeo"])
def test_images_equal_those_of_a_pure_run(
    number: int, base: Path, home: Path, tiny_kit: Path
) -> None:
    """Bit by bit, with the same seed, client, classes and count."""
    method = ("fedlmg", "oscar", "feddeo")[number]
    start(quick(method=method, kit=str(tiny_kit)), ("auto",) * 3, "pure")
    client = f"client-{number}"
    pure = image_files(home / "runs" / "pure", client)
    assert len(pure) == 10
    assert image_files(base, client) == pure


def test_a_pure_run_has_no_trace_of_kinds(home: Path, tiny_kit: Path) -> None:
    start(quick(method="prompts-domain", kit=str(tiny_kit)), ("auto",) * 2)
    folder = home / "runs" / "job"
    assert "kinds" not in metrics(home)
    assert not [key for key in json.loads((folder / "config.json").read_text()) if "mixed" in key]
    record = json.loads((folder / "payloads" / "client-0.json").read_text())
    assert record.keys() == {"sha256", "bytes", "costs"}


def test_a_killed_server_resumes_with_the_stored_kinds(
    base: Path, home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are the quiet run's, although two sites name other kinds by now."""

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(synthesis_images, "_commit", die)
        with pytest.raises(Killed):
            start(mixed(tiny_kit))
    folder = home / "runs" / "job"
    payloads = files(folder, "payloads")
    start(mixed(tiny_kit), ("feddeo", "oscar", "oscar"))
    assert files(folder, "payloads") == payloads
    for number in range(3):
        client = f"client-{number}"
        assert image_files(folder, client) == image_files(base, client)


def test_payloads_of_a_mixed_run_are_reused(base: Path, home: Path, tiny_kit: Path) -> None:
    changed = {"oscar__guidance": 4.0}
    start(mixed(tiny_kit, **changed, payloads_from="base"), job="reused")
    reused = home / "runs" / "reused"
    assert [row["kind"] for row in metrics(home, "reused")["kinds"]] == [
        "fedlmg",
        "oscar",
        "feddeo",
    ]
    assert image_files(reused, "client-2") == image_files(base, "client-2")
    assert image_files(reused, "client-1") != image_files(base, "client-1")
    with pytest.raises(ConfigError, match="mixed.methods = 'feddeo,oscar': payloads of"):
        start(mixed(tiny_kit, "feddeo,oscar", payloads_from="base"), job="other")


def test_a_record_of_an_unknown_kind_is_asked_again(base: Path, home: Path, tiny_kit: Path) -> None:
    record = base / "payloads" / "client-1.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "kind": "votes"}))
    start(mixed(tiny_kit), job="base")
    assert json.loads(record.read_text())["kind"] == "oscar"
    assert (base / "payloads" / "client-1.pb.refused").is_file()


def test_another_kind_than_announced_is_refused(home: Path, tiny_kit: Path) -> None:
    """A client that announces oscar and sends what feddeo would, whose tensors nearly fit."""

    def tamper(index: int, kind: str, reply: Any) -> Any:
        if kind == "train" and index == 1:
            blob = unpack_bytes(reply.content.array_records["payload"])
            forgery = blob.replace(b"\x12\x05oscar", b"\x12\x06feddeo", 1)
            assert forgery != blob
            reply.content["payload"] = pack_bytes(forgery, "osfl.payload.v1")
            reply.content["header"]["sha256"] = wire.digest(forgery)
        return reply

    config = mixed(tiny_kit, "oscar,votes", min_clients=1)
    start(config, ("votes", "oscar"), tamper=tamper)
    assert [row["clients"] for row in metrics(home)["kinds"]] == [["client-0"]]
    refused = home / "runs" / "job" / "payloads" / "client-1.pb.refused"
    assert refused.is_file()


def test_a_kind_that_is_not_welcome_is_refused_at_the_join(home: Path, tiny_kit: Path) -> None:
    with pytest.raises(RoundError, match="'feddeo': this run welcomes oscar, votes"):
        start(mixed(tiny_kit, "oscar,votes"), ("votes", "feddeo"))

    def tamper(index: int, kind: str, reply: Any) -> Any:
        if kind == "query.join" and index == 1:
            reply.content["join"]["kind"] = "feddeo"
        return reply

    with pytest.raises(RoundError, match="client-1 announces a payload of kind 'feddeo'"):
        start(mixed(tiny_kit, "oscar,votes"), ("votes", "oscar"), job="other", tamper=tamper)


def test_a_cached_payload_decides_the_kind(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its memory allows another kind by now, a site sends what it has made already."""
    config = mixed(tiny_kit, "feddeo,votes", job_id="job")
    monkeypatch.setattr(client_kinds, "MEMORY_FACTOR", 1e9)
    with pytest.raises(RoundError, match="none of feddeo, votes fits this site"):
        start(config, ("auto", "votes"))
    lost: list[str] = []

    def tamper(index: int, kind: str, reply: Any) -> Any:
        lost.append(kind)
        if kind == "train":
            raise Killed
        return reply

    with pytest.raises(Killed):
        start(config, ("votes", "votes"), tamper=tamper)
    assert lost.count("train") == 1
    monkeypatch.setattr(client_kinds, "MEMORY_FACTOR", 1)
    start(config, ("auto", "auto"))
    rows = {row["kind"]: row["clients"] for row in metrics(home)["kinds"]}
    assert rows == {"votes": ["client-0"], "feddeo": ["client-1"]}


def test_a_joint_payload_makes_images_and_a_head(home: Path, tiny_kit: Path) -> None:
    """The two parts are sealed as one, and the statistics teach, too."""
    key = str(certs.make_sealing_key(home / "keys")[0])
    config = mixed(tiny_kit, "domain-vector+fedcgs,votes", sealing_key=key, sealed_store=True)
    start(config, ("auto", "votes"))
    results = metrics(home)
    models = home / "runs" / "job" / "models"
    untaught, head = (load_file(models / f"{name}.safetensors") for name in ("Mixed", "FedCGS"))
    taught = {**config, "mixed.teacher": "fedcgs", "payloads-from": "job"}
    start(taught, ("auto", "votes"), "taught")
    models = home / "runs" / "taught" / "models"
    result = load_file(models / "Mixed.safetensors")
    assert not all(torch.equal(result[name], untaught[name]) for name in untaught)
    result = load_file(models / "FedCGS.safetensors")
    assert all(torch.equal(result[name], head[name]) for name in head)
    assert set(results["accuracy"]) == {"Mixed", "FedCGS"}
    assert results["shown"] == "Mixed"
    assert results["server"]["synthetic_images"] == 20
    (row,) = [row for row in results["kinds"] if row["kind"] == "domain-vector+fedcgs"]
    assert row["sends"].startswith("a learned vector of its domain; and the number of images")
    # Its images are those of a pure run of domain-vector
    start(quick(method="domain-vector", kit=str(tiny_kit)), ("auto", "auto"), "pure")
    runs = [home / "runs" / job for job in ("job", "pure")]
    assert image_files(runs[0], "client-0") == image_files(runs[1], "client-0") != {}


def test_both_parts_of_a_payload_are_booked_as_one_draw(home: Path, tiny_kit: Path) -> None:
    config = mixed(tiny_kit, "domain-vector+fedpft", epsilon=2.0, delta=1e-5)
    site = {"epsilon-total": 2.0, "test-results": "exact"}
    start(config, ("auto", "auto"), **site)
    for number in range(2):
        (draw,) = Ledger(home / "state", f"client-{number}").draws()
        assert (draw.epsilon, draw.delta, draw.kept) == (2.0, 1e-5, True)
    assert metrics(home)["epsilons"] == [2.0]
    with pytest.raises(RoundError, match="epsilon-total = 2"):
        start({**config, "seed": 1}, ("auto", "auto"), job="again", **site)


def test_a_site_with_a_guarantee_chooses_a_kind_that_gives_one(home: Path, tiny_kit: Path) -> None:
    config = mixed(tiny_kit, "fgl,domain-vector+fedcgs,votes")
    start(config, ("auto", "auto"), epsilon=1.0)
    assert [row["kind"] for row in metrics(home)["kinds"]] == ["votes"]
    with pytest.raises(RoundError, match="epsilon = 1: this site sends no payload without a DP"):
        start(config, ("fgl", "auto"), job="named", epsilon=1.0)


def test_class_balance_is_one_rule_for_all_kinds(home: Path, tiny_kit: Path) -> None:
    """Three classes of ten a client: a class that one client holds gets the images of two."""
    settings = {"class_balance": True, "data__partition": "label", "data__shards_per_client": 3}
    start(mixed(tiny_kit, "oscar,votes", **settings), ("oscar", "votes"))
    rows = RunFolder(home / "runs" / "job").manifest_file.read_text().splitlines()
    by_class: dict[str, int] = {}
    for row in map(json.loads, rows):
        by_class[row["class"]] = by_class.get(row["class"], 0) + 1
    assert len(set(by_class.values())) == 1
    clients = {json.loads(row)["client"] for row in rows}
    assert clients == {"client-0", "client-1"}


def test_public_domains_are_drawn_once(home: Path, tiny_kit: Path) -> None:
    start(mixed(tiny_kit, "votes,oscar", public_domains="fog"), ("oscar", "votes"))
    assert len(image_files(home / "runs" / "job", "public.fog")) == 10
    assert metrics(home)["server"]["synthetic_images"] == 30


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pixels, labels and further arguments with which global models are trained."""
    calls: list[Any] = []
    train = mixed_server.train_global

    def record(job: Any, name: str, pixels: Any, labels: Any, *rest: Any) -> Any:
        calls.append((pixels, labels, rest))
        return train(job, name, pixels, labels, *rest)

    monkeypatch.setattr(mixed_server, "train_global", record)
    return calls


def test_teachers_label_the_images_of_their_own_clients_only(
    home: Path, tiny_kit: Path, trained: list[Any]
) -> None:
    # The mean teacher could label any image
    start(mixed(tiny_kit, "votes,fedlmg", fedlmg__strategies="ft,md"), ("fedlmg", "votes"))
    ((_, labels, (teacher, _, (term,))),) = trained
    assert teacher is None
    assert term.weight == 1.0
    sums = term.teacher.sum(dim=1)
    # The run's first kind comes first
    assert torch.equal(sums[:10], torch.zeros(10))
    assert torch.allclose(sums[10:], torch.ones(10))
    assert labels.tolist() == [*range(10), *range(10)]


def test_a_clip_teaches_the_model_of_synthetic_images(
    home: Path, tiny_kit: Path, trained: list[Any]
) -> None:
    """Targets of all images are the softmax at T = 4 of a pure zero-shot run's model."""
    clip = {"zero-shot.clip": str(save_whole_clip(home / "clip"))}
    taught = {"mixed.teacher": "zero-shot", "mixed.teacher-temperature": 4.0}
    taught["mixed.teacher-weight"] = 0.5
    start({**mixed(tiny_kit, "votes"), **clip, **taught}, ("votes", "votes"))
    start({**quick(method="zero-shot", kit=str(tiny_kit)), **clip}, ("auto", "auto"), "pure")
    ((pixels, _, (_, _, (term,))),) = trained
    assert (term.weight, term.temperature) == (0.5, 4.0)
    model = load_model(home / "runs" / "pure" / "models" / "CLIP.safetensors")
    logits = compute_logits(model.module, pixels, torch.device("cpu"))
    expected = (logits / 4).exp() / (logits / 4).exp().sum(dim=1, keepdim=True)
    assert len(expected) == 20
    assert torch.allclose(term.teacher, expected, atol=1e-6)
    assert not torch.allclose(term.teacher, torch.full_like(expected, 0.1), atol=1e-3)
    assert set(metrics(home)["accuracy"]) == {"Mixed"}


def test_a_missing_clip_is_named_before_clients_work(home: Path, tiny_kit: Path) -> None:
    kit = Path(shutil.copytree(tiny_kit, home / "kit", ignore=shutil.ignore_patterns("clip")))
    config = {**mixed(kit, "votes"), "mixed.teacher": "zero-shot"}
    sent: list[str] = []
    with pytest.raises(KitError, match="zero-shot.clip"):
        start(config, ("votes", "votes"), tamper=lambda *message: sent.append(message[1]))
    assert "train" not in sent


def test_a_dry_run_says_who_would_send_what(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    arguments = quick_arguments(tiny_kit, method="mixed")
    shown = CliRunner().invoke(
        cli,
        [
            "run",
            "--dry-run",
            *arguments,
            "mixed.methods=oscar+fedcgs,feddeo",
            "mixed.assignment=cyclic",
        ],
    )
    assert shown.exit_code == 0, shown.output
    assert "clients that choose oscar+fedcgs: 1" in shown.output
    assert "clients that choose feddeo: 1" in shown.output
    assert "the server synthesizes 20 images" in shown.output
    refused = CliRunner().invoke(cli, ["run", "--dry-run", *arguments, "mixed.methods=feddisc"])
    assert refused.exit_code == 1
    assert "'feddisc' samples with a kit of its own" in refused.output


def test_a_mixed_run_forgets_a_client_as_if_it_had_never_taken_part(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mixed(tiny_kit)
    start(config)
    folder = home / "runs" / "job"
    payloads = sorted(file.name for file in folder.glob("payloads/*.pb"))
    assert payloads == ["client-0.pb", "client-1.pb", "client-2.pb"]
    forgotten = CliRunner().invoke(cli, ["forget", str(folder), "--client", "client-1"])
    assert forgotten.exit_code == 0, forgotten.output
    assert "synthesized 0 images of other clients again" in forgotten.output
    monkeypatch.setenv("OSFL_RUNS", str(home / "others"))
    monkeypatch.setenv("OSFL_CACHE", str(home / "other-cache"))
    settings = {**config, "num-clients": 3, "min-clients": 2, "join-timeout": 1.0}
    sites = [
        {**node, "method": kind, "client-id": f"client-{node['partition-id']}"}
        for node, kind in zip(nodes(3), CHOICES, strict=True)
    ]
    run_job(LoopGrid(app, settings, sites[::2]), parse_run_config(settings), "job")
    reference = home / "others" / "job"
    results = ("images", "units", "manifest.jsonl", "models/Mixed.safetensors")
    assert files(folder, *results) == files(reference, *results)
