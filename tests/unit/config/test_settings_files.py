"""Settings as users hand them in: any editor's files, odd names, hostile values."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from osfl.cli.main import app as cli
from osfl.config import ConfigError, parse_run_config
from osfl.config import toml as toml_files
from osfl.launch import flower as launch
from osfl.settings import default_config, read_overrides, resolve_config, shipped, with_recommended
from osfl.tables.table_file import read_table
from osfl.util.text import quote

MOST_SHOWN = 3000  # characters of an error
LONG = "x" * 3_000_000


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_files_of_any_editor_are_read(tmp_path: Path, mark: bytes, end: bytes) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(mark + end.join([b'method = "fedcgs"', b"num-clients = 2", b""]))
    assert read_overrides([str(file)]) == {"method": "fedcgs", "num-clients": 2}
    table = tmp_path / "table.toml"
    table.write_bytes(mark + end.join([b"[rows.a]", b'method = "local"', b""]))
    assert read_table(table).rows["a"] == {"method": "local"}


def test_a_preset_with_a_mark_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "data").mkdir(parents=True)
    preset = '[data]\nname = "folder"\nclasses = "cat,dog"\n'
    (tmp_path / "configs" / "data" / "own.toml").write_bytes(b"\xef\xbb\xbf" + preset.encode())
    table = tmp_path / "table.toml"
    table.write_text("[common]\npreset = 'own'\n[rows.a]\nmethod='local'\nclassifier.init='none'\n")
    assert read_table(table).rows["a"]["data.classes"] == "cat,dog"


def test_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 1\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"a\.toml: not valid TOML: .*save the file as UTF-8"):
        read_overrides([str(file)])


def test_a_file_with_an_equals_sign_in_its_path_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").mkdir()
    (tmp_path / "seed=1" / "c.toml").write_text('method = "fedcgs"\n')
    (tmp_path / "lr=2.toml").write_text("feddeo.lr = 0.2\n")
    for name in ("seed=1/c.toml", str(tmp_path / "seed=1" / "c.toml")):
        assert read_overrides([name]) == {"method": "fedcgs"}
    assert read_overrides(["lr=2.toml", "seed=1"]) == {"feddeo.lr": 0.2, "seed": 1}


@pytest.mark.parametrize("text", ["𠮷田,犬", "🐈,🐕", "a\x1bb", "a\x7fb\x00", 'q"\\', "Ä, é"])
def test_settings_for_flower_are_those_that_were_set(tmp_path: Path, text: str) -> None:
    """tomllib and the parser of Flower's --run-config read them."""
    from flwr.common.config import parse_config_args

    overrides = {"data.classes": text, "seed": 3, "feddeo.lr": 1e-5, "client-contribution": True}
    file = tmp_path / "overrides.toml"
    launch.write_overrides(overrides, file)
    assert tomllib.loads(file.read_text(encoding="utf-8")) == overrides
    assert parse_config_args([str(file)]) == overrides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed={}"], r"seed = \{\}: must be a string, a number"),
        (["seed={a=1}"], r"seed = \{'a': 1\}: must be a string, a number"),
        (["seed=[[1]]"], r"seed = \[\[1\]\]: must be a string, a number"),
        (["seed=" + "9" * 10_000], r"seed = '9+'… \(10,000 characters\): must be a whole number"),
        (["seed=0x" + "f" * 10_000], "seed = .*must be a whole number"),
        (["seed=1\nnum-clients=3"], r"seed = '1\\nnum-clients=3': must be a whole number"),
        (["job-id=a\n"], r"job-id = 'a\\n': must be 1 to 64 letters"),
        (["data.name=folder", f"data.root=/{LONG}"], "data.root = .*must have at most 4,096"),
        ([f"kit={LONG}"], "kit = 'x+'… .3,000,000 characters.: must have at most 4,096"),
        ([f"{LONG}=1"], "'x+'… .3,000,000 characters.: unknown key"),
        ([LONG], "'x+'… .3,000,000 characters.: no such file"),
        (["kit=/\udc80"], r"kit = '/\\udc80': must be UTF-8"),
        (["method=fedcg"], r"method = 'fedcg': must be one of .* \(did you mean fedcgs\?\)"),
        (["data.name=folder", "data.classes=" + "a," * 30_000], "'a' is listed twice"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode(),
)
def test_values_that_no_key_can_have_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_config(arguments)
    assert len(str(caught.value)) < MOST_SHOWN


HOSTILE = {
    "deep arrays": "seed = " + "[" * 100_000 + "]" * 100_000,
    "rather deep arrays": "seed = " + "[" * 300 + "]" * 300,
    "deep inline tables": "seed = " + "{a = " * 50_000 + "1" + "}" * 50_000,
    "deep tables": "[" + ".".join(["a"] * 100_000) + "]",
    "rather deep tables": "[" + ".".join(["a"] * 900) + "]\nb = 1",
    "a long number": "seed = " + "9" * 10_000,
    "a long hexadecimal number": "seed = 0x" + "f" * 10_000,
    "a large file": 'kit = "' + "x" * 2_000_000 + '"',
    "a long key": "x" * 500_000 + " = 1",
    "a long text": 'kit = "' + "x" * 500_000 + '"',
    "many keys": "".join(f"x{number} = 1\n" for number in range(20_000)),
    "a table in place of a value": "seed = {}",
    "a null character": 'data.root = "/a\\u0000b"',
    "a date": "seed = 2024-01-01",
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.timeout(60)
def test_hostile_files_are_refused_in_a_few_words(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(HOSTILE[kind])
    for call in (lambda: resolve_config([str(file)]), lambda: read_table(file)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert 0 < len(str(caught.value)) < MOST_SHOWN


def test_the_limits_leave_room_for_every_shipped_file() -> None:
    files = shipped("configs").rglob("*.toml")
    assert all(file.stat().st_size < toml_files.MAX_BYTES / 20 for file in files)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows = 5", r"rows = 5: must be a section, \[rows\]"),
        ("rows.a = 5", r"rows\.a = 5: must be a section, \[rows\.a\]"),
        ("common = 5\n[rows.a]", r"common = 5: must be a section"),
        ("grid = [5]\n[rows.a]", r"grid = \[5\]: must be a section"),
        ("lacks = 'x'\n[rows.a]", r"lacks = 'x': must be a section"),
        ("published.a = 5\n[rows.a]", r"published\.a = 5: must be a section"),
        ("title = 5\n[rows.a]", "title = 5: must be a string"),
        ("seeds = '12'\n[rows.a]", "seeds = '12': must be a list of integers"),
    ],
)
def test_tables_of_the_wrong_kinds_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "table.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(file)


def test_a_quoted_value_is_short_and_printable() -> None:
    assert quote("a\nb") == r"'a\nb'"
    assert quote(1.5) == "1.5"
    assert quote("y" * 300, 10) == "'yyyyyyyyyy'… (300 characters)"
    assert quote("\x1b[31m‮") == r"'\x1b[31m\u202e'"
    assert "too long to show" in quote(16**10_000)
    assert len(quote([LONG])) <= 400


def test_a_table_without_a_method_has_the_recommended_one(tmp_path: Path) -> None:
    """The same as `osfl run` with the same settings."""
    file = tmp_path / "table.toml"
    file.write_text(
        "[common]\nseeds = 1\n[rows.a]\nglobal-model.lr = 0.5\n".replace("seeds = 1\n", "")
    )
    row = read_table(file).rows["a"]
    assert (row["method"], row["domain-vector.steps"]) == ("domain-vector", 600)
    assert row["global-model.lr"] == 0.5


# ---- One default for the method ----


def test_a_file_without_a_method_runs_what_the_same_arguments_run(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("num-clients = 3\n[domain-vector]\nlr = 1.0\n")
    by_file, _ = resolve_config(with_recommended([str(file)]))
    arguments = ["num-clients=3", "domain-vector.lr=1.0"]
    by_arguments, _ = resolve_config(with_recommended(arguments))
    assert by_file == by_arguments
    assert (by_file.method, by_file.synthesis.images_per_class) == ("domain-vector", 30)


def test_the_default_method_is_reported(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("seed = 1\n")
    (tmp_path / "named.toml").write_text('method = "local"\n')
    for command in (["run", "--dry-run"], ["fetch"]):
        result = CliRunner().invoke(cli, [*command, str(tmp_path / "study.toml"), "kit=./nowhere"])
        assert result.exit_code == 1
        assert "method domain-vector (default, configs/recommended.toml)" in result.output, command
    result = CliRunner().invoke(cli, ["run", "--dry-run", str(tmp_path / "named.toml"), "kit=./x"])
    assert "default" not in result.output


# ---- What depends on the kind of the data ----

FOLDER = {"data.name": "folder", "data.classes": "cat,dog", "kit": "/models/mine"}
HUB = {"data.name": "hf:owner/name", "data.classes": "cat,dog", "kit": "/models/mine"}
AUTO = {"global-model.augmentation": "auto", "classifier.augmentation": "auto"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, (32, True, "affine-color")),
        (FOLDER, (224, False, "trivialaugment")),
        (HUB, (224, False, "trivialaugment")),
    ],
    ids=["digits", "folder", "hub"],
)
def test_defaults_follow_the_kind_of_the_data(
    data: dict[str, str], expected: tuple[int, bool, str]
) -> None:
    """Server and clients parse Flower's settings alike, whoever started the run."""
    size, stem, augmentation = expected
    config = parse_run_config({**default_config(), **data, **AUTO})
    assert config.data.image_size == size
    for settings in (config.classifier, config.global_model):
        assert (settings.small_stem, settings.augmentation) == (stem, augmentation)


@pytest.mark.parametrize("data", [{}, FOLDER])
def test_set_values_win_over_defaults(data: dict[str, str]) -> None:
    arguments = [f"{key}={value}" for key, value in data.items()]
    for stem in ("true", "false"):
        overrides = [
            f"data.image-size=48 classifier.small-stem={stem} global-model.augmentation=none"
        ]
        config, _ = resolve_config([*arguments, *overrides[0].split()])
        assert config.data.image_size == 48
        assert config.classifier.small_stem == (stem == "true")
        assert config.global_model.augmentation == "none"
    asked, _ = resolve_config([*arguments, "data.image-size=auto"])
    assert asked.data.image_size == (224 if data else 32)


def test_the_recommended_recipe_suits_photographs() -> None:
    photographs = ["data.name=folder", "data.classes=cat,dog", "kit=/models/mine"]
    for name in ("configs/recommended.toml", "configs/demo.toml"):
        config, _ = resolve_config([name, *photographs])
        assert config.global_model.augmentation == "trivialaugment"
        config, _ = resolve_config([name])
        assert config.global_model.augmentation == "affine-color"


# ---- One machine ----


@pytest.mark.parametrize("given", ["", "hospital.example"])
def test_a_simulation_asks_no_proxy_for_its_own_addresses(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", given)
    monkeypatch.setenv("no_grpc_proxy", "other.example")
    environment = launch.local_environment(Path("/tmp/osfl-x"))
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        assert {"127.0.0.1", "localhost", "::1"} <= set(environment[name].split(","))
    assert ("hospital.example" in environment["no_proxy"].split(",")) == bool(given)
    assert "other.example" in environment["no_grpc_proxy"].split(",")
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "large.example")
    environment = launch.local_environment(Path("/tmp/osfl-x"))
    assert "no_grpc_proxy" not in environment
    assert "large.example" in environment["no_proxy"].split(",")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_superlink_is_reached_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health check by HTTP, and Flower's own commands by gRPC."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with launch.local_superlink(tmp_path, tmp_path) as environment:
        command = ["flwr", "list", "osfl", "--format", "json"]
        result = subprocess.run(
            command, cwd=launch.WORKING_FOLDER, env=environment, capture_output=True
        )
        assert json.loads(result.stdout[result.stdout.index(b"{") :])["success"]


def test_flowers_error_is_its_last_line() -> None:
    """`flwr list` says this of a run that an older copy of the SuperLink's database lacks."""
    answer = {
        "success": False,
        "error-message": "Using SuperLink: x\n\n[code: 16] Run ID not found.",
    }
    assert (
        launch._error_in(b"words " + json.dumps(answer).encode()) == "[code: 16] Run ID not found."
    )
    for output in (
        b"",
        b"{",
        b'{"success": true}',
        b'{"error-message": 5}',
        b'{"error-message": ""}',
    ):
        assert launch._error_in(output) == ""
