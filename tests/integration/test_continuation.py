"""A run that continues another one (`continue-from`): later clients, new classes, grown data."""

import json
import re
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from flwr.app import Message
from PIL import Image
from safetensors.torch import load_file, safe_open
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from client_app.privacy.ledger import Ledger
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.run_folder.layout import RunFolder
from osfl.run_folder.status import read_status
from osfl.run_folder.verify import verify_run
from osfl.util import files as util_files
from server_app.app import run_job
from server_app.federation.exchange import RoundError
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import Killed, app, files, metrics, nodes

pytestmark = pytest.mark.slow


def play(config: dict[str, Any], sites: list[dict[str, Any]], job: str) -> set[int]:
    """Run a job with these sites, and return the sites that were asked for a payload."""
    grid = LoopGrid(app, config, sites)
    run_job(grid, parse_run_config(config), job)
    return {index for index, kind in grid.sent if kind == "train"}


def drawn(folder: Path) -> int:
    """The number of images that a run has drawn itself."""
    lines = (folder / "timings.jsonl").read_text().splitlines()
    return sum(json.loads(line)["images"] for line in lines)


def problems(folder: Path) -> list[str]:
    return [problem for finding in verify_run(folder) for problem in finding.problems]


def assert_same_models(*folders: Path) -> None:
    names = [{file.name for file in folder.glob("models/*.safetensors")} for folder in folders]
    assert names[0] == names[1] != set()
    for name in names[0]:
        state, second_state = (load_file(folder / "models" / name) for folder in folders)
        assert all(
            torch.equal(state[key], second_state[key]) for key in state.keys() | second_state.keys()
        )


def label(folder: Path, name: str = "FT") -> str:
    """Return what a model's file says that it was trained on."""
    with safe_open(folder / "models" / f"{name}.safetensors", "pt") as file:
        text: str = json.loads(file.metadata()["osfl"])["trained_on"]
    return text


@pytest.mark.parametrize("method", ["oscar", "fedlmg", "fedcgs"])
def test_a_later_client_gives_the_model_of_a_run_of_all(
    home: Path, tiny_kit: Path, method: str
) -> None:
    """Bit by bit. Only the later client is asked, and only its images are drawn."""
    config = quick(method=method, kit=str(tiny_kit))
    sites = nodes(3)
    play(config, sites[:2], "first")
    first = home / "runs" / "first"
    before = files(first, ".")
    larger = {**config, "num-clients": 3}
    assert play({**larger, "continue-from": "first"}, sites, "second") == {2}
    assert play(larger, sites, "all") == {0, 1, 2}
    second, of_all = home / "runs" / "second", home / "runs" / "all"
    assert files(second, "images") == files(of_all, "images")
    assert_same_models(second, of_all)
    assert metrics(home, "second")["confusion"] == metrics(home, "all")["confusion"]
    if method != "fedcgs":
        assert drawn(second) == len(list(second.glob("images/client-2/*/*.png"))) > 0
        assert drawn(of_all) == 3 * drawn(second)
    assert problems(second) == problems(first) == []
    assert files(first, ".") == before
    text = label(second, "FedCGS" if method == "fedcgs" else "FT")
    assert "version 2, of 3 payloads: 2 that job first had, 1 new; SHA-256" in text
    assert text.endswith("trained anew")
    page = (second / "report.html").read_text()
    assert "Version 2 of the model, which continues job <code>first</code>: payloads of" in page
    assert "client-0, client-1 are from there" in page
    assert "version" not in label(of_all, "FedCGS" if method == "fedcgs" else "FT")
    # A third version needs the second alone. It asks no client
    first.rename(home / "elsewhere")
    assert play({**larger, "continue-from": "second"}, sites, "third") == set()
    assert_same_models(home / "runs" / "third", of_all)
    check_history(home)
    # Each client's payload states the job that it was made for
    record = RunFolder(home / "runs" / "third").continuation()
    assert record is not None
    assert record.jobs == {"client-0": "first", "client-1": "first", "client-2": "second"}


def test_joint_payloads_are_carried(home: Path, tiny_kit: Path) -> None:
    """Each of a message's parts names the job that it was made for, as the message does."""
    config = quick(method="mixed", kit=str(tiny_kit))
    config["mixed.methods"] = "prompts-domain+fedcgs"
    play(config, nodes(2), "first")
    larger = {**config, "num-clients": 3}
    assert play({**larger, "continue-from": "first"}, nodes(3), "second") == {2}
    assert play(larger, nodes(3), "all") == {0, 1, 2}
    assert_same_models(home / "runs" / "second", home / "runs" / "all")
    reusing = {**larger, "payloads-from": "second"}
    assert play(reusing, nodes(3), "reusing") == set()
    assert_same_models(home / "runs" / "reusing", home / "runs" / "all")


def check_history(home: Path) -> None:
    """The report of the third version shows the second, and says that the first is gone."""
    version = metrics(home, "third")["version"]
    assert version["number"] == 3
    earlier = metrics(home, "second")
    gone, row = version["history"]
    assert gone == {"number": 1, "job": "first"}
    assert (row["number"], row["job"], row["carried"], row["new"]) == (2, "second", 2, 1)
    assert row["average"] == earlier["average"]
    shown = dict(earlier["accuracy"][earlier["shown"]])
    del shown["average"]
    assert row["accuracy"] == shown
    page = (home / "runs" / "third" / "report.html").read_text()
    assert page.count('aria-label="accuracy, % of each version"') == 1
    assert "its folder has no results" in page
    (line,) = re.findall(r'<polyline class="all" points="([^"]*)"><title>average', page)
    # One point of each version with a test
    assert len(line.split()) == 2
    (first,) = metrics(home, "second")["version"]["history"]
    assert (first["number"], first["carried"], first["new"]) == (1, 0, 2)
    assert first["accuracy"].keys() == {"client-0", "client-1"}


def test_it_resumes_after_a_kill_while_it_carries(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick(method="oscar", kit=str(tiny_kit))
    sites = nodes(3)
    play(config, sites[:2], "first")
    larger = {**config, "num-clients": 3, "continue-from": "first"}
    link = util_files.os.link
    for turn in (1, 2, 10):
        calls = iter(range(turn))

        def killed(file: Path, target: Path, calls: Any = calls) -> None:
            if next(calls, None) is None:
                raise Killed
            link(file, target)

        with monkeypatch.context() as patch:
            patch.setattr("osfl.util.files.os.link", killed)
            with pytest.raises(Killed):
                play(larger, sites, "second")
    assert play(larger, sites, "second") == {2}
    second = home / "runs" / "second"
    assert drawn(second) == len(list(second.glob("images/client-2/*/*.png")))
    with pytest.raises(ConfigError, match="'second' was started with continue-from = .*first"):
        play({**larger, "continue-from-model": True}, sites, "second")
    # A lost payload comes from the first run again, and no client is asked
    (second / "payloads" / "client-0.pb").unlink()
    assert play(larger, sites, "second") == set()
    assert problems(second) == []


def write_images(folder: Path, *names: str) -> None:
    """Eight scanned digits of each class to train on, and as many to test."""
    scans = load_digits()
    for label_number, name in enumerate(("zero", "one", "two", "three")):
        for number, scan in enumerate(scans.images[scans.target == label_number][:16]):
            file = folder / ("train" if number < 8 else "test") / name / f"{number}.png"
            if name in names:
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((scan * 15.9).astype("uint8")).save(file)


def site(home: Path, name: str, *classes: str) -> dict[str, Any]:
    write_images(home / name, *classes)
    return {"client-id": name, "data-dir": str(home / name)}


FOLDERS = {
    "data__name": "folder",
    "data__classes": "two,one",
    "classifier__small_stem": True,
    "global_model__small_stem": True,
}


def test_a_new_class_keeps_old_images(home: Path, tiny_kit: Path) -> None:
    config = quick(method="oscar", kit=str(tiny_kit), **FOLDERS)
    sites = [site(home, "a", "one", "two"), site(home, "b", "two")]
    play(config, sites, "first")
    larger = {**config, "num-clients": 3, "data.classes": "two,one,zero"}
    later = [*sites, site(home, "c", "zero", "one")]
    assert play({**larger, "continue-from": "first"}, later, "second") == {2}
    second = home / "runs" / "second"
    assert drawn(second) == 2
    old = files(home / "runs" / "first", "images")
    assert {name: files(second, "images")[name] for name in old} == old
    play(larger, later, "all")
    assert files(second, "images") == files(home / "runs" / "all", "images")
    assert_same_models(second, home / "runs" / "all")
    assert load_file(second / "models" / "FT.safetensors")["fc.bias"].shape == (3,)
    # The units keep their names in the next version, too
    assert play({**larger, "continue-from": "second"}, later, "third") == set()
    assert not (home / "runs" / "third" / "timings.jsonl").exists()
    for classes, message in [
        ("one,two,zero", "must begin with those of .*first, in their order: 'two,one'"),
        ("two", "must list at least two names"),
    ]:
        with pytest.raises(ConfigError, match=message):
            play({**larger, "data.classes": classes, "continue-from": "first"}, later, "other")


def test_classifiers_have_a_fixed_number_of_classes(home: Path, tiny_kit: Path) -> None:
    config = quick(method="local", kit=str(tiny_kit), classifier__init="none", **FOLDERS)
    sites = [site(home, "a", "one", "two"), site(home, "b", "two")]
    play(config, sites, "first")
    larger = {**config, "data.classes": "two,one,zero", "continue-from": "first"}
    with pytest.raises(ConfigError, match="'zero' is new, but with method 'local' a classifier"):
        play(larger, sites, "second")


def test_training_can_start_from_the_earlier_model(home: Path, tiny_kit: Path) -> None:
    """The model is labeled.

    Forgetting a client that shaped the earlier model trains anew, forgetting a later one does not.
    """
    config = quick(method="oscar", kit=str(tiny_kit))
    sites = nodes(3)
    play(config, sites[:2], "first")
    larger = {**config, "num-clients": 3, "continue-from": "first"}
    play({**larger, "continue-from-model": True}, sites, "second")
    play(larger, sites, "anew")
    second, anew = home / "runs" / "second", home / "runs" / "anew"
    assert label(second).endswith("trained from the model of job first")
    assert "Training started from the earlier model" in (second / "report.html").read_text()
    weights = [load_file(folder / "models" / "FT.safetensors") for folder in (second, anew)]
    assert not torch.equal(weights[0]["fc.weight"], weights[1]["fc.weight"])
    assert problems(second) == []
    assert CliRunner().invoke(cli, ["forget", str(second), "--client", "client-2"]).exit_code == 0
    assert label(second).endswith("trained from the model of job first")
    forgotten = CliRunner().invoke(cli, ["forget", str(second), "--client", "client-1"])
    assert forgotten.exit_code == 0, forgotten.output
    assert not (second / "previous").exists()
    # What client-0 alone gives
    play({**config, "num-clients": 1}, sites[:1], "alone")
    assert_same_models(second, home / "runs" / "alone")


def test_a_grown_client_replaces_its_payload(home: Path, tiny_kit: Path) -> None:
    """Only its units are drawn, the earlier payload is gone, and its ledger books a new draw."""
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0, num_clients=2)
    sites = [
        {**node, "client-id": f"site-{number}", "epsilon-total": 1.0, "test-results": "exact"}
        for number, node in enumerate(nodes(3))
    ]
    sites[1]["epsilon-total"] = 2.0
    play(config, sites[:2], "first")
    # Other images of the same site
    sites[1]["partition-id"] = 2
    replacing = {**config, "continue-from": "first", "replace-clients": "site-1"}
    assert play(replacing, sites[:2], "second") == {1}
    first, second = home / "runs" / "first", home / "runs" / "second"
    assert drawn(second) == len(list(second.glob("images/site-1/*/*.png"))) > 0
    payloads = [(folder / "payloads" / "site-1.pb").read_bytes() for folder in (first, second)]
    assert payloads[0] != payloads[1]
    assert files(second, "images/site-0") == files(first, "images/site-0")
    jobs = [
        [draw.job for draw in Ledger(home / "state", f"site-{number}").draws()]
        for number in range(2)
    ]
    assert jobs == [["first"], ["first", "second"]]
    # Also the site whose budget is exhausted tests
    assert metrics(home, "second")["not_tested"] == []
    version = metrics(home, "second")["version"]
    assert (version["carried"], version["new"]) == (["site-0"], ["site-1"])
    # Another run with the same payloads, which were made for two jobs
    assert play({**config, "payloads-from": "second"}, sites[:2], "all") == set()
    assert_same_models(second, home / "runs" / "all")
    with pytest.raises(ConfigError, match="replace-clients: 'site-9' has no payload in .*first"):
        play({**replacing, "replace-clients": "site-9"}, sites[:2], "third")


def test_a_client_that_left_stays_away_unless_it_is_named(home: Path, tiny_kit: Path) -> None:
    config = quick(method="oscar", kit=str(tiny_kit), num_clients=3, min_clients=2)
    sites = nodes(3)
    play(config, sites, "first")
    command = ["forget", str(home / "runs" / "first"), "--client", "client-1"]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert play({**config, "continue-from": "first"}, sites, "second") == set()
    assert set(metrics(home, "second")["clients"]) == {"client-0", "client-2"}
    assert play({**config, "continue-from": "second"}, sites, "third") == set()


def test_a_client_that_leaves_meanwhile_is_dropped(home: Path, tiny_kit: Path) -> None:
    """The client left the first run while the second awaited a payload: nothing of it remains."""
    config = quick(method="oscar", kit=str(tiny_kit))
    sites = nodes(3)
    play(config, sites[:2], "first")
    first, second = home / "runs" / "first", home / "runs" / "second"

    def leave(index: int, kind: str, reply: Message) -> Message:
        if kind == "train":
            assert list(second.glob("images/client-1/*/*.png"))
            result = CliRunner().invoke(cli, ["forget", str(first), "--client", "client-1"])
            assert result.exit_code == 0, result.output
            # As far as the first run knows it may be too late
            message = "'second' has this payload of the client, and drops it unless it is synthes"
            assert message in " ".join(result.output.split())
        return reply

    larger = {**config, "num-clients": 3, "continue-from": "first"}
    grid = LoopGrid(app, larger, sites, leave)
    run_job(grid, parse_run_config(larger), "second")
    assert {index for index, kind in grid.sent if kind == "evaluate"} == {0, 2}
    names = [str(file.relative_to(second)) for file in second.rglob("*")]
    contents = [file.read_bytes() for file in second.rglob("*") if file.is_file()]
    assert not [text for text in contents if b"client-1" in text]
    assert not [name for name in names if "client-1" in name]
    assert problems(second) == []
    play(config, sites[::2], "fresh")
    assert files(second, "images") == files(home / "runs" / "fresh", "images")
    assert_same_models(second, home / "runs" / "fresh")
    # Started again, also with the client online, it only tests
    assert play(larger, sites, "second") == set()
    assert set(metrics(home, "second")["clients"]) == {"client-0", "client-2"}


def test_a_run_that_was_killed_drops_a_client_that_has_left(home: Path, tiny_kit: Path) -> None:
    config = quick(method="oscar", kit=str(tiny_kit))
    play(config, nodes(2), "first")
    larger = {**config, "num-clients": 3, "continue-from": "first"}

    def die(index: int, kind: str, reply: Message) -> Message:
        raise Killed

    with pytest.raises(Killed):
        run_job(LoopGrid(app, larger, nodes(3), die), parse_run_config(larger), "second")
    command = ["forget", str(home / "runs" / "first"), "--client", "client-1"]
    said = " ".join(CliRunner().invoke(cli, command).output.split())
    assert "'second' has this payload of the client, and drops it before its training" in said
    assert play(larger, nodes(3), "second") == {2}
    assert set(metrics(home, "second")["clients"]) == {"client-0", "client-2"}


@pytest.mark.parametrize("name", ["archived", "latest", "."])
def test_a_folder_of_another_name_is_the_same_run(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Renamed, a link, or the working directory: its payloads are of the job `first`."""
    config = quick(method="oscar", kit=str(tiny_kit), job_id="first", num_clients=3, min_clients=2)
    play(config, nodes(3), "first")
    play({**config, "job-id": "pair"}, nodes(3)[::2], "pair")
    runs = home / "runs"
    folder = runs / "first"
    if name == "archived":
        folder = folder.rename(runs / "archived")
    if name == "latest":
        (runs / "latest").symlink_to(folder)
    if name == ".":
        monkeypatch.chdir(folder)
    path = Path(".") if name == "." else runs / name
    later = {**config, "job-id": "second", "continue-from": str(path.absolute())}
    assert play(later, nodes(3), "second") == set()
    reusing = {**config, "job-id": "third", "payloads-from": str(path.absolute())}
    assert play(reusing, nodes(3), "third") == set()
    result = CliRunner().invoke(cli, ["forget", str(path), "--client", "client-1"])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in folder.glob("payloads/*.pb*")) == [
        "client-0.pb",
        "client-2.pb",
    ]
    assert_same_models(folder, runs / "pair")
    (removal,) = RunFolder(folder).removals().values()
    assert removal.job == "first"


def test_a_finished_version_needs_no_client(home: Path, tiny_kit: Path) -> None:
    """Asked for again while only a test-only site is online, it stays finished."""
    config = quick(method="oscar", kit=str(tiny_kit))
    play(config, nodes(2), "first")
    later = {**config, "num-clients": 3, "continue-from": "first"}
    play(later, nodes(3), "second")
    accuracy = metrics(home, "second")["accuracy"]
    tester = [{**nodes(4)[3], "role": "test", "client-id": "tester"}]
    assert play(later, tester, "second") == set()
    assert metrics(home, "second")["accuracy"] == accuracy
    assert read_status(home / "runs" / "second")["phase"] == "finished"


@pytest.mark.parametrize("name", ["opinion-1", "opinion-2"])
def test_opinions_do_not_start_from_those_of_an_earlier_version(
    home: Path, tiny_kit: Path, name: str
) -> None:
    """An earlier version's may have been trained on images that they judge."""
    settings = {"synthesis__images_per_class": 3, "label_filter": "filter"}
    config = quick(method="oscar", kit=str(tiny_kit), **settings)
    play(config, nodes(2), "first")
    larger = {**config, "num-clients": 3}
    play({**larger, "continue-from": "first", "continue-from-model": True}, nodes(3), "second")
    play(larger, nodes(3), "all")
    file = f"models/{name}.safetensors"
    states = [load_file(home / "runs" / job / file) for job in ("second", "all")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_model_that_the_earlier_version_lacks_is_refused_at_once(
    home: Path, tiny_kit: Path
) -> None:
    config = quick(method="fedlmg", kit=str(tiny_kit), fedlmg__strategies="ft")
    play(config, nodes(2), "first")
    more = {**config, "fedlmg.strategies": "ft,md", "continue-from": "first"}
    with pytest.raises(ConfigError, match="fedlmg.strategies = 'ft,md', .* has no model of md"):
        play({**more, "continue-from-model": True}, nodes(2), "second")


def test_new_clients_are_counted_from_those_that_stayed(home: Path, tiny_kit: Path) -> None:
    """Two new ones are enough, although one has left, and none has left the place of another."""
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    sites = [{**node, "domain": "sketch"} for node in nodes(5)]
    play(config, sites[:2], "first")
    first = home / "runs" / "first"
    assert CliRunner().invoke(cli, ["forget", str(first), "--client", "client-1"]).exit_code == 0
    later = {**config, "continue-from": "first", "new-clients": 2}
    assert play(later, sites, "second") == {2, 3}
    assert metrics(home, "second")["summary"].startswith("Three clients each sent one message")
    # One new client alone, when join-timeout is over; a client that has left is no reason to end
    start = monotonic()
    assert play({**later, "join-timeout": 2.0}, sites[:3], "third") == {2}
    assert monotonic() - start > 2
    # After `osfl forget` it needs neither a new client nor time
    second = home / "runs" / "second"
    assert CliRunner().invoke(cli, ["forget", str(second), "--client", "client-3"]).exit_code == 0
    start = monotonic()
    assert play({**later, "join-timeout": 60.0}, sites[:3:2], "second") == set()
    assert monotonic() - start < 30
    assert set(metrics(home, "second")["clients"]) == {"client-0", "client-2"}
    with pytest.raises(RoundError, match="1 of 3 clients joined within 1 s .* at least 2 are"):
        play({**later, "join-timeout": 1.0}, sites[:1], "fourth")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "seed = 1: payloads of .*first were made with seed = 0; set it as it was"),
        ({"continue-from": "nothing"}, "continue-from = 'nothing': .* is not the folder of a run"),
        ({"continue-from": "runs/first"}, "continue-from = 'runs/first': must be a job id in the"),
        ({"num-clients": 1}, "num-clients = 1: .*first has 2 payloads; set num-clients to these"),
        ({"method": "fedavg"}, "with method 'fedavg' the server keeps no payload that a new"),
        ({"payloads-from": "first"}, "continue-from = 'first': must be \"\" with payloads-from"),
        (
            {"continue-from-model": True, "global-model.architecture": "resnet18"},
            "global-model.architecture = 'resnet18', but .*first has 'shufflenet_v2_x1_0'; set",
        ),
        (
            {"continue-from-model": True, "replace-clients": "client-0"},
            "must be false with replace-clients, because a model that a payload has shaped",
        ),
        (
            {"continue-from": "", "new-clients": 1},
            "new-clients: requires continue-from; set it to the run to continue",
        ),
        (
            {"continue-from": "", "replace-clients": "client-0"},
            "replace-clients: requires continue-from; set it to the run to continue",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(
    home: Path, tiny_kit: Path, settings: dict[str, Any], message: str
) -> None:
    config = quick(method="prompts-domain", kit=str(tiny_kit))
    sites = [{**node, "domain": "sketch"} for node in nodes(2)]
    play(config, sites, "first")
    with pytest.raises(ConfigError, match=message):
        play({**config, "continue-from": "first", **settings}, sites, "second")
