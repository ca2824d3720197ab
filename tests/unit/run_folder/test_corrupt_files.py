"""Every file of a run, damaged in every way: it is reported, named, or made anew.

Nothing raises.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from typer.testing import CliRunner, Result

from client_app.app import app
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.run_folder.layout import CHECKSUMS, RunFolder, open_run_folder, read_image, read_rows
from osfl.run_folder.status import Status
from osfl.run_folder.verify import verify_run, write_checksums
from osfl.tables.runner import Runner
from osfl.tables.table_file import Cell
from osfl.util.files import CorruptFileError
from server_app.app import run_job
from server_app.baselines.run import _keep, _resume
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick

NOBODY = 65534
ESTIMATE = {"value": 0.9, "low": 0.8, "high": 1.0}
TOGETHER = {"specificity": 0.9, "auroc": None, "sensitivity": ESTIMATE, "ece": ESTIMATE}
TOGETHER |= {"brier": ESTIMATE}
GAIN = {"local": 50.0, "points": 3.0, "low": 1.0, "high": 5.0}
GARBAGE = b"\x00\xff\x1b[2J\x1b]52;c;cm0gLXJm\x07\xe2\x80\xae" * 20


def remove(file: Path) -> None:
    file.unlink()


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def writing(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return damage


DAMAGES = {
    "removed": remove,
    "empty": writing(lambda content: b""),
    "half": writing(lambda content: content[: len(content) // 2]),
    "garbage": writing(lambda content: GARBAGE),
    "a list": writing(lambda content: b"[1, 2]\n"),
    "an empty object": writing(lambda content: b"{}\n"),
    "deep": writing(lambda content: b"[" * 100_000),
    "a folder": to_folder,
    "unreadable": lambda file: file.chmod(0),
}


@contextmanager
def damaged(file: Path, how: str) -> Iterator[None]:
    """For a while; then the file is as it was."""
    good = file.rename(file.with_name(f".{file.name}.good"))
    shutil.copy2(good, file)
    DAMAGES[how](file)
    try:
        with not_root() if how == "unreadable" else nullcontext():
            yield
    finally:
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        good.replace(file)


@contextmanager
def not_root() -> Iterator[None]:
    """Root reads every file, whatever its mode."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def config(home: Path, tiny_kit: Path) -> dict:
    return quick(method="feddeo", kit=str(tiny_kit))


def go(config: dict, job: str = "job") -> LoopGrid:
    nodes = [{"partition-id": k, "num-partitions": 2} for k in range(2)]
    grid = LoopGrid(app, config, nodes)
    run_job(grid, parse_run_config(config), job)
    return grid


FINISHED: dict[str, Path] = {}  # once in a process: what is slow is to make it
MODES: dict[str, int] = {}  # of its files and folders, and of its clients' caches


@pytest.fixture
def finished(home: Path, config: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied."""
    if not FINISHED:
        before = os.umask(0)  # as bad as it gets
        try:
            go(config)
        finally:
            os.umask(before)
        for path in (
            home / "runs",
            home / "cache",
            *home.glob("runs/**/*"),
            *home.glob("cache/**/*"),
        ):
            MODES[str(path.relative_to(home))] = path.stat().st_mode
        FINISHED["job"] = tmp_path_factory.mktemp("finished") / "job"
        (home / "runs" / "job").rename(FINISHED["job"])
    return FINISHED["job"]


@pytest.fixture
def run(finished: Path) -> Iterator[Path]:
    """The same, where another user could read it too if its files let him."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copytree(finished, Path(folder) / "job"))
        if not os.geteuid():
            for path in (copied.parent, copied, *copied.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield copied


@pytest.fixture
def job(finished: Path, home: Path) -> Path:
    """The same, where it was made: it can be resumed."""
    return Path(shutil.copytree(finished, home / "runs" / "job"))


def say(*arguments: str | Path) -> Result:
    """Run a command of `osfl`, which must not end by an unexpected exception."""
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(cli, words, env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output.replace("\n", "").isprintable()
    return result


def of_each_kind(run: Path) -> list[str]:
    """One of the images, one of the units, and so on; every other file."""
    names = [str(file.relative_to(run)) for file in sorted(run.rglob("*")) if file.is_file()]
    kinds = {re.sub(r"\d+-\w+/\d+|\d+|[0-9a-f]{12,}", "", name): name for name in names}
    # A curve is an aid, not a record
    return [name for name in kinds.values() if name not in (".lock", "curves/FT.json")]


def wrong(run: Path) -> list[str]:
    return [problem for finding in verify_run(run) for problem in finding.problems]


@pytest.mark.slow
def test_verify_names_every_file_that_is_damaged(run: Path) -> None:
    assert wrong(run) == []
    kinds = of_each_kind(run)
    assert {"config.json", "status.json", "metrics.json", "report.html", CHECKSUMS} <= set(kinds)
    assert len(kinds) == 18
    for name in kinds:
        for how in DAMAGES:
            with damaged(run / name, how):
                problems = wrong(run)
            pattern = rf"{re.escape(name)} (is missing|cannot be read|is corrupt)"
            also = r"|status.json does not say that the run has finished"
            also = also if (name, how) == ("status.json", "an empty object") else ""
            assert any(re.fullmatch(pattern + also, problem) for problem in problems), (
                name,
                how,
                problems,
            )
            assert len(problems) == len(set(problems)), (name, how)
            assert all(problem.isprintable() for problem in problems), (name, how)
    assert wrong(run) == []


@pytest.mark.slow
def test_verify_notices_each_file_that_is_gone(run: Path) -> None:
    for file in sorted(run.rglob("*")):
        # A curve is an aid, not a record
        if file.is_file() and file.name != ".lock" and file.parent.name != "curves":
            with damaged(file, "removed"):
                assert f"{file.relative_to(run)} is missing" in wrong(run)
    for name in ("units", "payloads", "models", "tests", "histograms", "images"):
        (run / name).rename(run / ".away")
        assert any(problem.startswith(f"{name}/") for problem in wrong(run)), name
        (run / ".away").rename(run / name)


def test_verify_notices_two_files_that_are_gone_together(run: Path) -> None:
    """Each alone would vouch for the other."""
    for file_name in ("metrics.json", "report.html"):
        gone = [
            name
            for name in (CHECKSUMS, "status.json", "metrics.json", "report.html")
            if name != file_name
        ]
        for name in gone:
            (run / name).rename(run / f".{name}")
        assert {f"{CHECKSUMS} is missing", "status.json is missing"} <= set(wrong(run))
        for name in gone:
            (run / f".{name}").rename(run / name)
    assert wrong(run) == []


@pytest.mark.slow
def test_verify_looks_at_nothing_outside_of_the_run(run: Path) -> None:
    """Whatever a row or a list of digests says."""
    os.mkfifo(run.parent / "pipe")  # who opens it waits for ever
    unit = sorted((run / "units").glob("*.jsonl"))[0]
    row = read_rows(unit)[0]
    for name in ("../pipe", "images/../../pipe", str(run.parent / "pipe"), "pipe", "", "images\0"):
        for file in (unit, run / "manifest.jsonl"):
            with damaged(file, "empty"):
                file.write_text(json.dumps({**row, "file": name}) + "\n")
                assert f"{file.relative_to(run)} is corrupt" in wrong(run)
        with damaged(run / CHECKSUMS, "empty"):
            (run / CHECKSUMS).write_text(f"# 1 files\n{'0' * 64}  {name}\n")
            assert wrong(run)


def test_rows_are_read_strictly(tmp_path: Path) -> None:
    row = {"file": "images/a/0/0.png", "client": "a", "class": "x", "seed": 1, "sha256": "0"}
    good = json.dumps(row) + "\n"
    file = tmp_path / "x.jsonl"
    file.write_text(good * 2)
    assert read_rows(file) == [row, row]
    wrong_rows = [
        {**row, "seed": "1"},
        {**row, "file": None},
        {**row, "file": "images/../x"},
        [],
        1,
    ]
    wrong_rows += [{key: row[key] for key in row if key != gone} for gone in row]
    texts = [good + json.dumps(wrong_row) + "\n" for wrong_row in wrong_rows]
    for text in (
        *texts,
        "",
        "\n",
        good + "\n",
        good[:-1],
        good + good[:-1],
        good + "{\n",
        "\udcff\n",
    ):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(
            CorruptFileError, match="x.jsonl is corrupt; repeat the same `osfl run`"
        ):
            read_rows(file)


def test_a_picture_that_makes_pillow_raise_is_damaged(tmp_path: Path) -> None:
    """Pillow has errors of its own for a picture that claims a billion pixels."""
    Image.new("RGB", (1, 1)).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png") is not None
    png = bytearray((tmp_path / "x.png").read_bytes())
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    (tmp_path / "x.png").write_bytes(png)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png") is None


def test_a_picture_is_whole_or_damaged(tmp_path: Path) -> None:
    """Pillow decodes a PNG that lacks up to 20 bytes, and one with bytes behind its end."""
    file = tmp_path / "x.png"
    noise = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    content = file.read_bytes()
    assert np.array_equal(read_image(file).permute(1, 2, 0).numpy(), noise)
    damages = [content[:-cut] for cut in range(1, 40)]
    damages += [content + b"x", content + content, content[:-1] + b"x"]
    # The checksum of the pixels' chunk, and the length of the end
    damages += [content[:at] + b"\xaa" + content[at + 1 :] for at in (-14, -12)]
    for damaged_content in damages:
        file.write_bytes(damaged_content)
        assert read_image(file) is None, len(damaged_content)


def test_a_picture_of_another_format_is_damaged(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    for name in ("BMP", "GIF", "TIFF", "PPM"):
        picture.save(tmp_path / "x.png", name)
        assert read_image(tmp_path / "x.png") is None, name


@pytest.mark.parametrize(("size", "whole"), [((4096, 4096), True), ((4096, 4097), False)])
def test_pixels_beyond_the_bound_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], whole: bool
) -> None:
    """Four PNGs of 0.5 MB with 169 million pixels each took 7 GB."""
    Image.new("L", size).save(tmp_path / "x.png")
    decoded = []
    load = PngImageFile.load
    monkeypatch.setattr(PngImageFile, "load", lambda self: decoded.append(1) or load(self))
    assert (read_image(tmp_path / "x.png") is not None, bool(decoded)) == (whole, whole)


def test_existing_files_of_an_unfinished_run_are_verified(home: Path, config: dict) -> None:
    """A payload and a model have their records, and these have them; the rest may come yet."""
    folder = open_run_folder(parse_run_config(config), "job", 0)
    run = folder.path
    assert wrong(run) == []
    Status(run).phase("joining")
    for client in ("a", "b", "c"):
        folder.store_payload(client, b"x", {"sha256": hashlib.sha256(b"x").hexdigest()})
    folder.store_model("FT", {"w": torch.ones(1)}, {})
    assert wrong(run) == []
    (run / "payloads" / "a.json").unlink()
    (run / "payloads" / "b.pb").unlink()
    (run / "payloads" / "c.json").write_text("{}")
    (run / "models" / "FT.json").unlink()
    (run / "status.json").write_text("{")
    (run / "config.json").write_text("[]")
    assert sorted(wrong(run)) == [
        "config.json is corrupt",
        "models/FT.json is missing",
        "payloads/a.json is missing",
        "payloads/b.pb is missing",
        "payloads/c.pb is corrupt",
        "status.json is corrupt",
    ]
    assert say("verify", run).exit_code == 1


def test_a_run_that_begins_again_is_not_finished(home: Path, config: dict) -> None:
    run = open_run_folder(parse_run_config(config), "job", 0).path
    write_checksums(run)
    Status(run).phase("finished")
    assert wrong(run) == []
    open_run_folder(parse_run_config(config), "job", 0)
    Status(run).phase("joining")
    assert wrong(run) == []
    assert not (run / CHECKSUMS).exists()


def test_the_list_of_digests_is_what_sha256sum_reads(run: Path) -> None:
    result = subprocess.run(
        ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=run, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count(": OK\n") == 17


@pytest.mark.slow
def test_the_commands_name_what_is_damaged(run: Path, tmp_path: Path) -> None:
    """And go on without what they do not need."""
    picture = str(next((run / "images").rglob("*.png")).relative_to(run))
    for name in ("metrics.json", "manifest.jsonl", picture, "config.json", CHECKSUMS):
        for how in DAMAGES:
            with damaged(run / name, how):
                shown = say("show", run)
                verified = say("verify", run)
                with tempfile.TemporaryDirectory() as out:
                    os.chmod(out, 0o777)
                    written = say("shards", run, Path(out) / "out")
            for result, hit in (
                (verified, True),
                (shown, name == "metrics.json"),
                (written, name in ("manifest.jsonl", picture)),
            ):
                assert result.exit_code == int(hit), (name, how, result.output)
                assert name in result.output or not hit, (name, how, result.output)
    with damaged(run / "metrics.json", "removed"), damaged(run / "status.json", "garbage"):
        assert "this run has not finished (not started)" in say("show", run).output
    assert "is not the folder of a run" in say("verify", tmp_path).output
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shards.json").write_bytes(GARBAGE)
    assert "shards.json is corrupt" in say("shards", run, tmp_path / "out").output


def test_verify_sees_a_damaged_or_missing_secure_sum(run: Path) -> None:
    """Once it is open, no client could add its part again."""
    folder = RunFolder(run)
    folder.store_secure_sum(b"sum of all")
    write_checksums(run)
    (file,) = run.glob("*.bin")
    assert wrong(run) == []
    for how in ("garbage", "removed"):
        with damaged(file, how):
            assert [problem for problem in wrong(run) if file.name in problem]
    file.unlink()
    write_checksums(run)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("method",), 5),
        (("accuracy", "FT", "average"), "95"),
        (("accuracy", "FT", "client-0"), None),
        (("accuracy", "FT"), {}),
        (("accuracy", "FT"), [95.0]),
        (("over_images", "FT"), "95"),
        (("over_images",), {}),
        (("clients", "client-0"), 3),
        (("clients", "client-0", "upload_bytes"), "3"),
        (("server", "synthetic_images"), "20"),
        (("server", "seconds_per_image"), {}),
        (("server", "peak_memory_mb"), "much"),
        (("not_tested",), [1]),
        (("warnings",), "text"),
        (("warnings",), [{}]),
        (("versions", "torch"), 2),
        (("config",), []),
        (("figures",), []),
        (("figures",), {"FT": {}}),
        (("figures",), {"FT": {"together": {**TOGETHER, "specificity": "0.9"}}}),
        (("figures",), {"FT": {"together": {**TOGETHER, "ece": {"value": 1.0, "low": 0.0}}}}),
        (("figures",), {"FT": {"together": {"specificity": 0.9}}}),
        (("gain",), {"clients": {}, "average": GAIN}),
        (("gain",), {"clients": {}, "average": GAIN, "model": 3}),
        (("withheld",), "client-0"),
        (("withheld",), [3]),
    ],
)
def test_show_refuses_metrics_of_other_types(run: Path, keys: tuple, value: object) -> None:
    """With one sentence that names the file, and no traceback."""
    metrics = json.loads((run / "metrics.json").read_text())
    inner = metrics
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (run / "metrics.json").write_text(json.dumps(metrics))
    shown = say("show", run)
    assert shown.exit_code == 1
    assert "metrics.json is corrupt" in shown.output
    assert isinstance(shown.exception, SystemExit)


def test_show_prints_no_terminal_codes(run: Path) -> None:
    text = (run / "metrics.json").read_text()
    metrics = json.loads(text.replace("client-0", "client\\u001b[2J-0"))
    metrics["warnings"] = ["\x1b]52;c;cm0gLXJm\x07[bold]"]
    metrics["not_tested"] = ["\u202ex"]
    (run / "metrics.json").write_text(json.dumps(metrics))
    shown = say("show", run)
    assert shown.exit_code == 0
    assert not re.search("[\x1b\x07\u202e]", shown.output)
    assert "[bold]" in shown.output


def test_a_table_runs_again_what_is_damaged(run: Path) -> None:
    cell = Cell("row", 0, "job", ())
    runner = Runner(run.parent, 1)
    assert runner._finished(cell)
    for name in ("metrics.json", "status.json"):
        for how in DAMAGES:
            with damaged(run / name, how):
                if how == "unreadable":
                    with pytest.raises(PermissionError, match=name):
                        runner._finished(cell)
                else:
                    assert runner._finished(cell) is None, (name, how)


def test_a_run_without_its_config_is_refused(home: Path, config: dict) -> None:
    """The settings of its payloads and images are unknown. Another seed would be taken for the same
    run.
    """
    folder = open_run_folder(parse_run_config(config), "job", 0).path
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "server.log").touch()
    (folder / "status.json").touch()
    open_run_folder(parse_run_config(config), "job", 0)  # there is nothing to lose yet
    RunFolder(folder).store_payload("client-0", b"x", {})
    assert (folder / "config.json").read_bytes() == (folder.parent / "config.json").read_bytes()
    for how in set(DAMAGES) - {"unreadable", "an empty object"}:
        with (
            damaged(folder / "config.json", how),
            pytest.raises(
                (ConfigError, CorruptFileError), match="config.json.*[Rr]estore it from a backup"
            ),
        ):
            open_run_folder(parse_run_config(config), "job", 0)


def test_config_changes_only_while_no_server_is_at_work(
    home: Path, config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osfl.run_folder.layout.LOCK_SECONDS", 0.05)
    folder = open_run_folder(parse_run_config(config), "job", 0)
    before = (folder.path / "config.json").read_bytes()
    with (
        folder.lock(),
        pytest.raises(ConfigError, match="another server is at work"),
    ):
        open_run_folder(parse_run_config({**config, "deadline": 7.0}), "job", 0)
    assert (folder.path / "config.json").read_bytes() == before
    open_run_folder(parse_run_config({**config, "deadline": 7.0}), "job", 0)
    assert json.loads((folder.path / "config.json").read_text())["deadline"] == 7.0


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "unreadable"])
def test_a_payload_whose_record_is_damaged_is_set_aside(tmp_path: Path, how: str) -> None:
    """The payload is handled like a corrupt one; its client is asked again, and nothing is lost."""
    folder = RunFolder(tmp_path)
    figures = {"sha256": "0", "bytes": 1, "costs": {"seconds": 1.0}}
    for client in ("a", "b"):
        folder.store_payload(client, b"x", figures)
    DAMAGES[how](tmp_path / "payloads" / "a.json")
    assert folder.stored_clients() == ["b"]
    assert (tmp_path / "payloads" / "a.pb.refused").read_bytes() == b"x"
    folder.store_payload("a", b"y", figures)
    DAMAGES[how](tmp_path / "payloads" / "a.json")  # again, over what was set aside
    assert folder.stored_clients() == ["b"]
    to_folder(tmp_path / "payloads" / "b.pb")
    assert folder.stored_clients() == []


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "unreadable"])
def test_a_model_whose_record_is_damaged_is_trained_again(tmp_path: Path, how: str) -> None:
    folder = RunFolder(tmp_path)
    weights = {"w": torch.ones(2)}
    folder.store_model("FT", weights, {"inputs": "0", "seconds": 1.0})
    model = folder.stored_model("FT", "0")
    assert model is not None
    assert model["w"].tolist() == [1, 1]
    for name in ("FT.json", "FT.safetensors"):
        with damaged(tmp_path / "models" / name, how):
            assert folder.stored_model("FT", "0") is None, name


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "unreadable"])
def test_rounds_that_are_damaged_are_named(tmp_path: Path, how: str) -> None:
    """Rounds can only be made again all together."""
    job = SimpleNamespace(folder=RunFolder(tmp_path))
    strategy = SimpleNamespace(memory={"h": np.ones(2)})
    start = {"w": torch.zeros(2)}
    _keep(job, strategy, 3, 1.5, {"w": torch.ones(2)}, {"a": {"seconds": 1.0}})
    number, seconds, state, costs = _resume(job, strategy, start)
    assert (number, seconds, costs) == (3, 1.5, {"a": {"seconds": 1.0}})
    assert state["w"].tolist() == [1, 1]
    for name in ("000003.safetensors", "000003.memory.safetensors", "done.json"):
        if (name, how) == ("done.json", "removed"):
            continue  # no round was done, as far as anybody knows
        with (
            damaged(tmp_path / "rounds" / name, how),
            pytest.raises(CorruptFileError, match=f"rounds/{name} .*; move the folder rounds away"),
        ):
            _resume(job, strategy, start)


@pytest.mark.slow
def test_the_same_run_again_makes_anew_what_can_be(job: Path, config: dict) -> None:
    """Each file that can be, one damaged in this way and one in that; then the other way round."""
    run = job
    good = (run / "manifest.jsonl").read_bytes()
    what_it_is_of = ("config.json", "kit.json", "synthesis.json")
    names = [name for name in of_each_kind(run) if name not in what_it_is_of]
    for first, hows in enumerate((["removed", "half", "garbage"], ["empty", "a list", "deep"])):
        for number, name in enumerate(names):
            DAMAGES[hows[(first + number) % 3]](run / name)
        grid = go(config)
        assert [kind for _, kind in grid.sent].count("train") == 1  # whose payload was damaged
        assert wrong(run) == []
        assert (run / "manifest.jsonl").read_bytes() == good


@pytest.mark.slow
def test_resuming_names_what_is_in_the_way(job: Path, config: dict) -> None:
    run = job
    for name in ("metrics.json", "tests/FT.json"):
        to_folder(run / name)
        with pytest.raises(OSError, match=name):
            go(config)
        (run / name).rmdir()
    for name in ("kit.json", "synthesis.json"):
        with (
            damaged(run / name, "half"),
            pytest.raises(CorruptFileError, match=f"{name} is corrupt"),
        ):
            go(config)
    go(config)
    assert wrong(run) == []


def prepared(folder: Path, how: str) -> Path:
    """A job's folder as another user could have prepared it; returns where it would be written."""
    target = folder.with_name("elsewhere")
    target.mkdir(parents=True)
    (target / "status.json").write_text("theirs")
    if how == "link":
        folder.symlink_to(target)
        return target
    target.rename(folder)
    if how == "of another user":
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(0o777)
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("link", "is a link"),
        ("of another user", "belongs to another user"),
        ("open to all", "is writable by every user"),
    ],
)
def test_a_folder_that_others_may_have_prepared_is_refused(
    home: Path, config: dict, how: str, words: str
) -> None:
    """At the server, at a client, and by `osfl run` before anything starts."""
    if how == "of another user" and os.geteuid():
        pytest.skip("only root can give a folder to another user")
    target = prepared(home / "runs" / "job", how)
    with pytest.raises(ConfigError, match=words):
        open_run_folder(parse_run_config(config), "job", 0)
    settings = (f"runs-dir={home / 'runs'}", "job-id=job", "num-clients=2", "method=fedcgs")
    refused = say("run", *settings)
    assert refused.exit_code == 1
    assert words in refused.output
    assert [file.name for file in target.iterdir()] == ["status.json"]
    assert (target / "status.json").read_text() == "theirs"
    cache = prepared(home / "cache" / "other", how)
    config["join-timeout"] = config["deadline"] = 1.0
    with pytest.raises(Exception, match=words):
        go(config, "other")
    assert [file.name for file in cache.iterdir()] == ["status.json"]


def test_a_run_is_its_owners_alone(finished: Path) -> None:
    """Made with a umask that takes nothing away."""
    assert len([name for name in MODES if name.endswith(".png")]) == 20
    assert {"runs", "runs/job", "cache/job", "runs/job/.lock"} <= set(MODES)
    for name, mode in MODES.items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), name
