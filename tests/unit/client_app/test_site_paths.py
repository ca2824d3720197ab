"""Files of a site that a run's settings may name, and rows of a data set that are read."""

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image as Picture

from client_app.app import app
from client_app.paths import allowed_folders, check_architecture, check_paths
from osfl.config import (
    SITE_PATHS,
    ConfigError,
    NodeConfig,
    OneOf,
    RunConfig,
    parse_node_config,
    parse_run_config,
    schema,
)
from osfl.data.load import load_images
from osfl.data.offline import check_rows
from osfl.data.partition import DataError
from osfl.launch import flower as launch
from osfl.methods import METHODS
from osfl.util.markers import SitePath, markers_of
from tests.helpers.settings import quick
from tests.helpers.whole_runs import nodes

# Texts that no machine resolves as a path
NO_PATHS = {
    *("job-id", "held-out", "public-domains", "device", "synthesis.ray-address", "tracking"),
    *("signatures", "data.domains", "replace-clients"),
    *("data.subset", "data.classes", "data.words", "data.train-split", "data.test-split"),
    *("data.image-column", "data.label-column", "data.domain-column", "data.group-column"),
    *("synthesis.prompt", "prompts-domain.prompt", "fgl.prompt", "fgl.negative-prompt"),
    *("zero-shot.templates",),
    *("votes.candidates", "votes.prompt", "fedlmg.strategies", "fedcado.strategies"),
    *("mixed.methods", "mixed.teacher"),
}
CAPTIONED: dict[str, Any] = {"method": "oscar"}
TRAINED: dict[str, Any] = {"method": "fedlmg"}
IN_A_FOLDER = {"data__name": "folder", "data__classes": "a, b", "kit": "o/n"}
IN_A_DATA_SET = {"data__name": "hf:owner/name", "data__classes": "a, b"}
USES = {
    "kit": ("kit", {"method": "feddeo"}),
    "feddisc.kit": ("feddisc__kit", {"method": "feddisc"}),
    "captioner": ("captioner", CAPTIONED),
    "image-encoder": ("image_encoder", {"method": "espresso"}),
    "classifier.init": ("classifier__init", TRAINED),
    "classifier.architecture": (
        "classifier__architecture",
        {**TRAINED, "classifier__init": "none"},
    ),
    "data.root": ("data__root", {"method": "prompts-domain", **IN_A_FOLDER}),
}


@pytest.fixture(autouse=True)
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's machine: nothing is allowed unless its node-config says so."""
    monkeypatch.delenv("OSFL_ALLOWED_DIRS")


def config_of(key: str, place: str, **more: Any) -> RunConfig:
    """A run that uses a key."""
    name, settings = USES[key]
    value = f"hf-hub:{place}" if key.endswith("architecture") else place
    return parse_run_config(quick(**{**settings, name: value, **more}))


def refusal(config: RunConfig, node: NodeConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        check_paths(config, node)
    return str(raised.value)


# ---- Every key ----


def test_every_text_of_the_run_is_a_path_or_known_to_be_none() -> None:
    """A new key with a free text must be marked `SitePath`, or be added above."""
    texts = set()
    for key, kind in schema().items():
        if getattr(kind, "__origin__", kind) is str and not markers_of(kind, OneOf):
            texts.add(key)
    assert texts == set(SITE_PATHS) | NO_PATHS


def test_every_clients_path_has_a_test_here() -> None:
    """The server's own models are tested by clients: `evaluate` names their architecture."""
    of_clients = {key for key, where in SITE_PATHS.items() if where == "client"}
    apart = {"data.name", "global-model.architecture", "global-model.init"}
    assert of_clients == set(USES) | apart
    assert set(SITE_PATHS.values()) == {"client", "server"}


@pytest.mark.parametrize("key", sorted(USES))
def test_a_path_outside_is_refused_in_the_same_words(key: str, tmp_path: Path) -> None:
    """The error is the same for a file, a folder, or nothing."""
    folder = tmp_path / "hospital"
    folder.mkdir()
    (folder / "file").write_text("secret")
    words = set()
    for place in (folder, folder / "file", folder / "nothing", Path("/nowhere/at/all")):
        message = refusal(
            config_of(key, str(place)), NodeConfig(allowed_dirs=str(tmp_path / "kits"))
        )
        words.add(message.replace(str(place), "PLACE"))
    (only,) = words
    assert only.startswith(f"{key} = 'PLACE': must be below a folder")
    check_paths(config_of(key, str(folder)), NodeConfig(allowed_dirs=f"/other, {tmp_path}"))


def test_a_home_tells_nothing_of_users(tmp_path: Path) -> None:
    words = set()
    for place in ("~root/model", "~nobody-of-this-name/model"):
        message = refusal(config_of("kit", place), NodeConfig(allowed_dirs=str(tmp_path)))
        words.add(message.replace(place, "PLACE"))
    (only,) = words
    assert "must be below a folder" in only
    with pytest.raises(ConfigError, match="data.root = .*must be an absolute path"):
        config_of("data.root", "~nobody-of-this-name/data")


@pytest.mark.parametrize("key", sorted(USES))
def test_a_link_leads_nowhere_else(key: str, tmp_path: Path) -> None:
    kits = tmp_path / "kits"
    kits.mkdir()
    (tmp_path / "outside").mkdir()
    (kits / "link").symlink_to(tmp_path / "outside")
    (kits / "loop").symlink_to(kits / "loop")
    node = NodeConfig(allowed_dirs=str(kits))
    for place in (kits / "link", kits / ".." / "outside", kits / "loop"):
        assert "must be below a folder" in refusal(config_of(key, str(place)), node)
    # A folder that begins alike
    (tmp_path / "kits-of-others").mkdir()
    assert "must be below" in refusal(config_of(key, str(tmp_path / "kits-of-others")), node)


def test_a_link_inside_a_folder_of_weights_leads_nowhere_else(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "tumour.safetensors").write_bytes(b"weights")
    node = NodeConfig(allowed_dirs=str(models))
    check_paths(config_of("classifier.init", str(models)), node)
    (models / "resnet18.safetensors").symlink_to(tmp_path / "tumour.safetensors")
    assert "must be below" in refusal(config_of("classifier.init", str(models)), node)


def test_names_without_a_path_are_free() -> None:
    for key, name in (("kit", "digits"), ("kit", "owner/name@main"), ("captioner", "owner/name")):
        check_paths(config_of(key, name), NodeConfig())
    for init in ("kit", "none", "imagenet"):
        check_paths(config_of("classifier.init", init), NodeConfig())
    check_paths(parse_run_config(quick(method="feddeo", **IN_A_DATA_SET, kit="o/n")), NodeConfig())


def test_the_servers_own_paths_are_not_the_clients() -> None:
    """A kit that the server alone uses, and what the node-config puts in a path's place."""
    server_alone = {"kit": "/srv/kit", "global_model__init": "/srv/weights", "runs_dir": "/srv"}
    check_paths(parse_run_config(quick(method="prompts-only", **server_alone)), NodeConfig())
    check_paths(config_of("kit", "/srv/kit"), NodeConfig(kit="/anywhere"))
    check_paths(config_of("data.root", "/srv/images"), NodeConfig(data_dir="/images"))


def test_a_site_that_only_tests_reads_no_file_but_its_images() -> None:
    node = NodeConfig(role="test")
    for key in USES.keys() - {"data.root"}:
        check_paths(config_of(key, "/srv/kits/x"), node)
    assert "must be below" in refusal(config_of("data.root", "/srv/images"), node)


def test_a_hub_id_that_is_a_folder_here_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert "must be below" in refusal(config_of("kit", "owner/name"), NodeConfig())
    config = parse_run_config(quick(method="feddeo", kit="o/n", **IN_A_DATA_SET))
    assert refusal(config, NodeConfig()).startswith("data.name = 'owner/name'")
    check_paths(config_of("kit", "owner/name"), NodeConfig(allowed_dirs=str(tmp_path)))


@pytest.mark.parametrize("name", ["hf:../images", "hf:./images", "hf:.hidden/images", "hf:a/.."])
def test_a_data_set_of_the_hub_is_no_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data.name = .* must be digits, folder, or hf:OWNER"):
        parse_run_config(quick(method="feddeo", data__name=name, data__classes="a, b"))


@pytest.mark.parametrize("name", ["local-dir:/hospital", "/hospital", "hf-hub:owner/name"])
def test_a_name_of_timms_is_no_folder(name: str) -> None:
    config = quick(classifier__architecture=f"timm:{name}", classifier__init="none")
    with pytest.raises(ConfigError, match=r"classifier.architecture = 'timm:.*must be timm:NAME"):
        parse_run_config(config)


def test_shipped_kits_and_the_hubs_cache_are_allowed(tmp_path: Path) -> None:
    from huggingface_hub import constants

    (kits,) = {folder for folder in allowed_folders(NodeConfig()) if folder.name == "kits"}
    check_paths(config_of("kit", str(kits / "digits")), NodeConfig())
    check_paths(config_of("kit", f"{constants.HF_HUB_CACHE}/models--a--b"), NodeConfig())
    with pytest.raises(ConfigError, match="allowed-dirs: 'kits' must be an absolute path"):
        allowed_folders(NodeConfig(allowed_dirs="/a, kits"))


# ---- Messages ----


@pytest.mark.parametrize("kind", ["query.join", "train", "query.acknowledge"])
def test_every_message_is_checked(kind: str, home: Path, tiny_kit: Path) -> None:
    config = quick(**TRAINED, classifier__init=str(tiny_kit / "classifiers"))
    record = {"job": ConfigRecord({"job": "job"}), "kit": ConfigRecord({})}
    message = Message(RecordDict(record), dst_node_id=100, message_type=kind)
    message.metadata.__dict__["_message_id"] = "1"
    with pytest.raises(ConfigError, match="classifier.init = .*must be below a folder"):
        app(message, Context(1, 100, nodes(2)[0], RecordDict(), config))


def test_a_global_models_architecture_is_no_folder_of_the_site(home: Path) -> None:
    with pytest.raises(ConfigError, match="global-model.architecture = '/hospital': must be"):
        check_architecture("hf-hub:/hospital", NodeConfig())
    for free in ("resnet18", "timm:resnet18", "hf-hub:owner/name@main"):
        check_architecture(free, NodeConfig())
    header = ConfigRecord({"architecture": "hf-hub:/hospital"})
    message = Message(RecordDict({"header": header}), dst_node_id=100, message_type="evaluate")
    message.metadata.__dict__["_message_id"] = "1"
    with pytest.raises(ConfigError, match="global-model.architecture = '/hospital'"):
        app(message, Context(1, 100, nodes(2)[0], RecordDict(), quick(method="prompts-only")))


def test_a_simulation_allows_what_its_user_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment of its own SuperLink decides: no run-config and no message can set it."""
    started = []

    class Stopped(Exception):
        pass

    start = subprocess.Popen

    def popen(command: list[str], env: dict[str, str] | None = None, **more: Any) -> Any:
        if env is None:  # the guard
            return start(command, **more)
        started.append(env)
        raise Stopped

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    with pytest.raises(Stopped), launch.local_superlink(tmp_path, tmp_path / ".client-cache"):
        pass
    (environment,) = started
    monkeypatch.setenv("OSFL_ALLOWED_DIRS", environment["OSFL_ALLOWED_DIRS"])
    check_paths(config_of("classifier.init", "/anywhere"), NodeConfig())
    assert not environment["OSFL_STATE"].startswith(environment["OSFL_CACHE"])
    assert "allowed-dirs" not in schema()
    assert parse_node_config({"allowed-dirs": "/srv/kits"}).allowed_dirs == "/srv/kits"
    assert get_type_hints(NodeConfig)["allowed_dirs"] is str


# ---- Rows ----


class _Counting(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012  (shared by the requests of a server, by design)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a server on this machine that counts its requests."""
    _Counting.asked.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), _Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.png"
        server.shutdown()


FEATURES = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})


def saved(folder: Path, places: list[str]) -> None:
    """A part whose images stay where they are: `save_to_disk` would take them in."""
    rows = {"image": [{"bytes": None, "path": place} for place in places]}
    plain = Features({"image": {"bytes": Value("binary"), "path": Value("string")}})
    part = Dataset.from_dict(rows, plain)
    part = part.add_column("label", [n % 2 for n in range(len(places))])
    part = part.cast_column("label", FEATURES["label"])
    part.save_to_disk(str(folder))
    info = folder / "dataset_info.json"
    metadata = json.loads(info.read_text())
    metadata["features"] = FEATURES.to_dict()
    info.write_text(json.dumps(metadata))


def read(folder: Path, **settings: Any) -> Any:
    overrides = {"data__classes": "a, b", "data__name": "hf:owner/name", "kit": "o/n", **settings}
    config = parse_run_config(quick(method="prompts-domain", **overrides))
    return load_images(config.data, NodeConfig(data_dir=str(folder)), "train", 0, 8)


def picture(file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    Picture.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
    return str(file)


def test_rows_that_are_addresses_are_not_asked_for(tmp_path: Path, address: str) -> None:
    saved(tmp_path / "part", [address] * 8)
    with pytest.raises(DataError, match="data.image-column = 'image': .*a URL or a file"):
        read(tmp_path / "part")
    assert not _Counting.asked


def test_rows_elsewhere_on_the_disk_are_not_opened(tmp_path: Path) -> None:
    outside = picture(tmp_path / "hospital" / "a.png")
    for place in (outside, f"{tmp_path}/part/../hospital/a.png", "a.png", f"file://{outside}"):
        saved(tmp_path / "part", [place] * 8)
        with pytest.raises(DataError, match="a file outside the data set, which is not allowed"):
            read(tmp_path / "part")


def test_rows_inside_the_data_set_are_read(tmp_path: Path) -> None:
    inside = [picture(tmp_path / "part" / "images" / f"{n}.png") for n in range(8)]
    saved(tmp_path / "part", inside)
    assert len(read(tmp_path / "part")) > 0


def test_media_are_neither_labels_nor_lists(tmp_path: Path, address: str) -> None:
    saved(tmp_path / "part", [address] * 8)
    for key in ("label", "domain"):
        with pytest.raises(DataError, match=rf"data.{key}-column = 'image': .* other media"):
            read(tmp_path / "part", **{f"data__{key}_column": "image"})
    rows = {"image": [[{"bytes": None, "path": address}]] * 8, "label": [0, 1] * 4}
    plain = Features(
        {
            "image": List({"bytes": Value("binary"), "path": Value("string")}),
            "label": ClassLabel(names=["a", "b"]),
        }
    )
    nested = Dataset.from_dict(rows, plain).cast_column("image", List(Image()))
    data = parse_run_config(quick(method="feddeo", **IN_A_DATA_SET, kit="o/n")).data
    with pytest.raises(DataError, match="does not contain single images"):
        check_rows(nested, data, tmp_path, "part")
    assert not _Counting.asked


@dataclass(frozen=True)
class OwnSection:
    words: Annotated[str, SitePath("client")] = ""


def test_a_path_of_an_installed_packages_method_is_restricted_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = replace(METHODS["prompts-domain"], section="own", settings=OwnSection)
    monkeypatch.setitem(METHODS, "own", method)
    (rule,) = markers_of(schema()["method"], OneOf)
    monkeypatch.setattr(rule, "choices", (*rule.choices, "own"))
    monkeypatch.setattr("client_app.paths.SITE_PATHS", {**SITE_PATHS, "own.words": "client"})
    config = parse_run_config({**quick(), "method": "own", "own.words": "/etc/passwd"})
    with pytest.raises(ConfigError, match=r"own.words = '/etc/passwd': must be below a folder"):
        check_paths(config, NodeConfig())
    check_paths(config, NodeConfig(allowed_dirs="/etc"))
