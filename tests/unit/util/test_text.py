"""Words from outside, on their way to terminals, logs and files."""

import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import time
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
from flwr.app import Context, Error, Message, RecordDict
from typer.testing import CliRunner

from client_app.app import app as client_app
from client_app.errors import ClientError, sanitize_errors
from osfl.cli.display import console, print_error
from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.data.parts import DataError
from osfl.launch import flower as launch
from osfl.launch.views import client_rows
from osfl.payload.wire import PayloadError
from osfl.run_folder.report.metrics import write_report
from osfl.run_folder.status import Status
from osfl.tables.markdown import as_markdown
from osfl.tables.records import records_of
from osfl.tables.runner import Outcome
from osfl.tables.table_file import Cell, TableFile
from osfl.util.text import (
    REPLACEMENT,
    is_public_uri,
    masked_uri,
    name_problem,
    sanitize,
    sanitize_lines,
    sanitize_record,
    without_credentials,
)
from server_app.app import run_job
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import ROOT, defaults, quick

ESC = "\x1b"
# By what each would do to a terminal, or to who reads it
HOSTILE = {
    "colour": f"{ESC}[31mred",
    "clipboard": f"{ESC}]52;c;cm0gLXJm\x07",
    "link": f"{ESC}]8;;http://evil\x1b\\\\click{ESC}]8;;{ESC}\\\\",
    "one-byte CSI": "\x9b2J",
    "carriage return": "good\rbad",
    "new lines": "a\nERROR: b\r\nc\vd\fe\x85f\u2028g\u2029h",
    "bidi": "\u202aa\u202bb\u202cc\u202dd\u202e\u2066e\u2067f\u2068g\u2069\u200e\u200f\u061c",
    "zero width": "cat\u200b\u200c\u200d\u2060\ufeff",
    "fillers": "\u034f\u115f\u1160\u3164\uffa0\ufe0f\U000e0100\U000e0041",
    "NUL": "a\0b",
    "lone surrogate": "photo-\udc80\ud800.png",
    "backspace": "safe\b\b\b\bevil",
}


def is_safe(text: str) -> bool:
    forbidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return not any(unicodedata.category(c) in forbidden for c in text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_terminal_codes_are_shown_as_text(text: str) -> None:
    shown = sanitize(text)
    assert is_safe(shown)
    assert len(shown) == len(text)  # nothing vanishes: who reads it sees that there was something
    shown.encode()
    assert sanitize(shown) == shown
    lines = sanitize_lines(text)
    assert all(is_safe(line) for line in lines.split("\n"))
    assert lines.count("\n") == text.count("\n")


def test_every_character_is_printable_afterwards() -> None:
    everything = "".join(map(chr, range(0x110000)))
    shown = sanitize(everything, len(everything))
    assert is_safe(shown)
    assert shown.isprintable()
    lost = {c for c in everything if c.isprintable()} - set(shown)
    assert set(HOSTILE["fillers"][:-1]) <= lost
    assert len(lost) == 267  # invisible letters and marks; every other printable character stays


def test_good_words_stay_as_they_are() -> None:
    for words in ("client-0", "Straße, café (2 µm) — 日本 عربي 👍", "e\u0301", "a [b] `c` | d", ""):
        assert sanitize(words) == words


def test_a_long_text_is_cut_and_says_so() -> None:
    assert sanitize("x" * 300) == "x" * 300
    shown = sanitize("x" * 301)
    assert len(shown) == 300
    assert shown.endswith("xxx… (301 characters)")
    assert sanitize(shown) == shown
    assert sanitize("x" * 50, 5) == "xxxx…"
    lines = sanitize_lines("line\n" * 10_000, 100)
    assert len(lines) == 100
    assert lines.endswith("\nline… (50,000 characters)")


@pytest.mark.parametrize("kind", [str, bytes])
def test_fifty_megabytes_cost_nothing(kind: type) -> None:
    huge = f"{ESC}[2J" * 12_500_000 if kind is str else f"{ESC}[2J".encode() * 12_500_000
    tracemalloc.start()
    began = time.process_time()
    assert sanitize(huge).endswith("(50,000,000 characters)")
    assert sanitize_lines(huge).endswith("(50,000,000 characters)")
    assert time.process_time() - began < 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_nothing_raises() -> None:
    assert sanitize(Wordless()) == "(Wordless without text)"
    assert sanitize(None) == "None"
    assert sanitize(b"\xff\x1b[31m") == f"{REPLACEMENT}{REPLACEMENT}[31m"
    assert sanitize(ValueError("a\nb")) == "a b"
    assert sanitize("abc", 0) in ("", "…")


def test_a_logger_with_the_filter_writes_plain_lines() -> None:
    """Also the words of arguments and of tracebacks, with all their causes."""
    log = logging.Logger("test")
    written = io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    log.addFilter(sanitize_record)
    for text in HOSTILE.values():
        log.error("node %s failed: %s", text, text)
        try:
            try:
                raise OSError(text)
            except OSError as error:
                raise ValueError(text) from error
        except ValueError:
            log.exception("it %s", text)
    log.error("%d of %d", "not a number", "x")  # a mistake of ours
    log.error("x" * 50_000_000)
    lines = written.getvalue()
    assert all(is_safe(line) for line in lines.split("\n"))
    assert "direct cause" in lines
    assert len(lines) < 100_000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        (" \t", "is empty"),
        ("a/b", "slash"),
        ("a\\b", "slash"),
        ("..", "begins with '.'"),
        (".hidden", "begins with '.'"),
        ("-rf", "begins with '-'"),
        ("a\0b", "cannot be printed"),
        ("a\nb", "cannot be printed"),
        ("a\u202eb", "cannot be printed"),
        ("a\x1b[31mb", "cannot be printed"),
        ("a\udc80", "cannot be printed"),
        ("é" * 51, "has 102 bytes"),
    ],
)
def test_names_that_are_no_folders(name: str, problem: str) -> None:
    assert problem in name_problem(name)


def test_names_that_are_folders() -> None:
    for name in ("cat", "alarm_clock", "Real World", "7", "T-shirt", "é" * 50, "日本"):
        assert name_problem(name) == ""


# ---- Where such words arrive ----


def a_hostile_line(words: str) -> str:
    """All that a terminal, rich's markup or Markdown would obey."""
    return (
        "".join(HOSTILE.values()) + f"[bold red]{words}[/] :skull: | `x` <img src=x> [a](http://e)"
    )


def is_clean(text: str) -> bool:
    return all(is_safe(line) for line in text.split("\n"))


def test_a_client_sends_plain_words(tmp_path: Path) -> None:
    """Flower's own path: the mod sees every message that the app knows."""
    message = Message(RecordDict(), dst_node_id=1, message_type="query.join")
    for name in HOSTILE.values():
        with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever the app raises)
            client_app(message, Context(1, 1, {name: "x"}, RecordDict(), {**defaults(), name: 1}))
        assert is_clean(str(caught.value))
        assert len(str(caught.value)) < 5000
    assert set(client_app._registered_funcs) >= {"query.join", "train.default", "evaluate.default"}


@pytest.mark.parametrize("huge", [50_000_000, 10])
def test_a_clients_error_is_bounded(huge: int) -> None:
    """The traceback, which stays at home, is the same."""

    def fail(message: Message, context: Context) -> Message:
        raise DataError(f"{ESC}]0;title\x07" * huge)

    with pytest.raises(ClientError, match=r"DataError: .\]0;title") as caught:
        sanitize_errors(None, None, fail)  # type: ignore[arg-type]
    assert len(str(caught.value)) <= 4100
    assert is_clean(str(caught.value))
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert [frame.name for frame in caught.traceback][-1] == "fail"


def test_a_clients_error_in_plain_text_stays(tmp_path: Path) -> None:
    """With its type and its lines."""
    error = ConfigError("invalid run-config:\n  seed: missing\n  data.root: missing")

    def fail(message: Message, context: Context) -> Message:
        raise error from OSError("why")

    with pytest.raises(ConfigError) as caught:
        sanitize_errors(None, None, fail)  # type: ignore[arg-type]
    assert caught.value is error

    def fall_silent(message: Message, context: Context) -> Message:
        raise Wordless

    with pytest.raises(ClientError, match="Wordless without text"):
        sanitize_errors(None, None, fall_silent)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["version", "error", "huge error", "no identifier"])
def test_a_servers_log_status_and_error_are_plain(
    home: Path, kind: str, capfd: pytest.CaptureFixture
) -> None:
    """A node answers with all that a terminal obeys, or with 50 MB of it."""
    words = a_hostile_line("gone") * (200_000 if kind == "huge error" else 1)

    def tamper(index: int, message_type: str, reply: Message) -> Message:
        if kind.endswith("error"):
            return Message(Error(2, words), reply_to=reply)
        key = "version" if kind == "version" else "client"
        reply.content.config_records["join"][key] = words
        return reply

    config = quick(method="local", num_clients=1, join_timeout=3.0, classifier__init="none")
    grid = LoopGrid(client_app, config, [{"partition-id": 0, "num-partitions": 1}], tamper)
    with pytest.raises(RuntimeError, match="at least 1 are required") as caught:
        run_job(grid, parse_run_config(config), "job")
    written = (home / "runs" / "job" / "status.json").read_text()
    assert REPLACEMENT in str(caught.value) or kind == "no identifier"
    for text in (capfd.readouterr().err.replace(ESC + "[", ""), str(caught.value)):
        assert is_clean(text)
        assert len(text) < 20_000
    assert is_clean(json.loads(written)["error"])
    assert len(written) < 20_000


@pytest.mark.parametrize("module", ["osfl.run_folder.status", "client_app.app"])
def test_flowers_logger_is_plain_on_either_side_alone(module: str) -> None:
    code = f"import logging, {module}; logging.getLogger('flwr').error('%s', 'a\\x1b[2J\\u202eb')"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert f"a{REPLACEMENT}[2J{REPLACEMENT}b" in result.stderr.decode()


def test_a_payloads_error_is_plain_and_crosses_processes() -> None:
    error = PayloadError("a", f"{ESC}[2Jclasses", a_hostile_line("x") * 1000)
    for instance in (error, pickle.loads(pickle.dumps(error))):
        assert is_clean(str(instance))
        assert len(str(instance)) < 1500


def test_a_states_words_are_plain(tmp_path: Path) -> None:
    status = Status(tmp_path)
    status.client("a\x1b[2J", a_hostile_line("x"))
    status.fail(RuntimeError(a_hostile_line("x") + "\nsecond line" + "x" * 50_000_000))
    state = json.loads((tmp_path / "status.json").read_text())
    assert all(map(is_safe, (*state["clients"], *state["clients"].values())))
    assert is_clean(state["error"])
    assert "\nsecond line" in state["error"]
    assert len(state["error"]) == 10_000


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A `flwr` that says what a hostile client made the server log; as a process."""
    program = tmp_path / "bin" / "flwr"
    program.parent.mkdir()
    (tmp_path / "words").write_text(a_hostile_line("x"), errors="surrogatepass")
    code = (
        f"#!{sys.executable}\nimport json, sys\n"
        f"words = open({str(tmp_path / 'words')!r}, errors='replace').read()\n"
        "out = sys.stdout.buffer\n"
        "if sys.argv[1] == 'log':\n"
        "    out.write(b'\\x1b[92mINFO \\x1b[0m: a line\\n\\xff\\n' + words.encode())\n"
        "    out.write(b'x' * 10_000_000 + b'\\nthe end')\n"
        "elif sys.argv[1] == 'list':\n"
        "    print(json.dumps({'runs': [{'status': 'finished:failed', 'details': words * 100}]}))\n"
        "else:\n"
        "    print(json.dumps({'success': False, 'error-message': words * 100}))\n"
    )
    program.write_text(code)
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return {**os.environ, "PATH": path}


@pytest.mark.slow
def test_the_log_of_a_federation_is_plain(flower: dict[str, str]) -> None:
    lines: list[str] = []
    launch.follow_log(7, "there", flower, lines.append)
    assert lines[0] == "INFO : a line"
    assert lines[1] == REPLACEMENT
    assert lines[-1] == "the end"
    assert all(map(is_safe, lines))
    assert max(map(len, lines)) <= launch.MAX_LINE_LENGTH
    assert sum(map(len, lines)) > 10_000_000


def test_flowers_log_of_a_run_is_sanitized(flower: dict[str, str]) -> None:
    status, details = launch.outcome(7, "there", flower)
    assert status == "finished:failed"
    with pytest.raises(launch.LaunchError) as caught:
        launch.submit({}, "there", flower)
    for text in (details, str(caught.value)):
        assert "[bold red]x" in text
        assert is_clean(text)
        assert len(text) < 2100


def test_tables_on_a_terminal_show_words_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rich obeys no markup in them."""
    monkeypatch.setattr(console, "_width", 999)
    words = a_hostile_line("x")
    row = {words[:99]: 1.0, "average": 1.0}
    metrics = {
        "method": words,
        "accuracy": {words: row},
        "over_images": {words: 1.0},
        "clients": {words[:99]: {"upload_bytes": 1}},
        "server": {"synthetic_images": 0, "seconds_per_image": None},
        "rounds": 1,
        "versions": {},
        "not_tested": [words],
        "confusion": {},
        "config": {},
    }
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    shown = CliRunner().invoke(cli, ["show", str(tmp_path)])
    assert shown.exit_code == 0
    assert is_clean(shown.output)
    assert shown.output.count("[bold red]x[/] :skull:") >= 3
    states = {"a[/]\x1b[2J": words, "[red]": "asked"}
    with console.capture() as captured:
        console.print(client_rows(states, tmp_path))
    assert "[red]" in captured.get()
    assert is_clean(captured.get().replace(f"{ESC}[", ""))


def test_an_error_on_a_terminal_is_plain(capsys: pytest.CaptureFixture) -> None:
    print_error(ConfigError(a_hostile_line("x") + "\nsecond"))
    shown = capsys.readouterr().out
    assert is_clean(shown)
    assert "[bold red]x[/] :skull:" in shown
    assert "\nsecond" in shown


def test_a_table_in_markdown_has_its_cells_and_no_others() -> None:
    words = a_hostile_line("x")
    table = TableFile("t", words, (0,), {"a | b": {}, "c": {}})
    outcomes = [Outcome(Cell("c", 0, "", ()), error=words * 1000)]
    good = {"row": "a | b", "seed": 0, "average": 1.0, "accuracy": {"x|y": 1.0}, "rounds": 1}
    good |= dict.fromkeys(("upload_bytes", "download_bytes", "client_flops"), 1)
    good |= dict.fromkeys(("client_seconds", "client_memory_mb", "server_seconds_per_image"), 1)
    good |= {
        "over_images": 1.0,
        "branches": "",
        "versions": {},
        "kit_not_counted": False,
        "not_tested": ["p|q"],
    }
    records = [good, *records_of(outcomes[0])]
    page = as_markdown(table, records, "osfl compare", 1)
    assert is_clean(page)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    assert len(rows) == 3
    missing = page[page.index("Missing:") :]
    assert not re.search(r"(?<!\\)[<`|\[]", missing)
    assert len(missing) < 3000


def test_a_report_shows_plain_words(tmp_path: Path) -> None:
    words = a_hostile_line("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "FT.json").write_text(json.dumps({words: [[1, 0], [0, 1]]}))
    (tmp_path / "config.json").write_text(
        json.dumps({"method": "feddeo", "seed": 0, "kit": words, "data.classes": words * 1000})
    )
    write_report(tmp_path, (words, "dog"))
    page = (tmp_path / "report.html").read_text()
    assert is_clean(page)
    assert "<img src=x>" not in page
    assert len(page) < 50_000
    assert json.loads((tmp_path / "metrics.json").read_text())["config"]["data.classes"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:word@host:5000/x failed", "http://***@host:5000/x failed"),
        ("postgresql://me:w/o@rd@host/db", "postgresql://***@host/db"),
        ("at https://host/?token=word, why?", "at https://host/?***"),
        (
            "https://host/path?token=word failed: why? Nothing",
            "https://host/path?*** failed: why? ",
        ),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("http://me:pa word@host failed", "http://***@host failed"),
        ("http://host/x#key=word failed", "http://host/x#*** failed"),
        # No credentials
        ("http://host:5000 refused a@b", "http://host:5000 refused a@b"),
        ("http://host:5000: ask a@b", "http://host:5000: ask a@b"),
        ("http://host: ask a@b", "http://host: ask a@b"),
        ("http://host/x: no a@b", "http://host/x: no a@b"),
    ],
)
def test_the_credentials_of_a_uri_are_left_out(text: str, expected: str) -> None:
    assert without_credentials(text).startswith(expected)
    assert "word" not in without_credentials(text)


@pytest.mark.parametrize(
    ("uri", "masked"),
    [
        *(("", ""), ("http://host:5000/x", "http://host:5000/x"), ("databricks", "databricks")),
        *(("/my runs/a@b#1", "/my runs/a@b#1"), ("sqlite:////a b@c.db", "sqlite:////a b@c.db")),
        ("http://me:pa word@host:5000/x", "http://***@host:5000/x"),
        ("http://me my:pa word@host", "http://***@host"),
        ("http://me:w/o@r word@host", "http://***@host"),
        ("http://me:w/word@host", "http://***@host"),
        ("http://host#key=word", "http://host"),
        ("http://host?key=a@word", "***"),
        ("http://me:wo?word@host", "***"),
        ("http://ho st", "http://ho"),
        *(("me:pa word@host", "***"), ("//me:word@host", "***")),
        ("sqlite://me:word@host/x", "sqlite://***@host/x"),
        ("sqlite:///x?key=word", "sqlite:///x"),
    ],
)
def test_of_a_uri_with_secrets_scheme_and_place_are_shown(uri: str, masked: str) -> None:
    assert masked_uri(uri) == masked
    assert is_public_uri(uri) == (uri == masked)
    assert "word" not in masked_uri(uri)
