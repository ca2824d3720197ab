"""Sources of classifiers' initial weights: a kit, a file, a folder, torchvision's own."""

import hashlib
import json
import pickle
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import ResNet50_Weights, VisionTransformer, get_model_weights

from osfl.config import ClassifierConfig, ConfigError, parse_run_config
from osfl.kit import initial_weights
from osfl.kit.used_parts import kit_parts, parts_by_step
from osfl.models import classifiers
from osfl.models.classifiers import ClassifierError, build_classifier, load_initial_weights
from osfl.payload.kinds import Classifier
from server_app.app import check_server
from server_app.federation.exchange import RoundError
from server_app.kit import client_download_bytes
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, start


def numbered(architecture: str, num_classes: int = 1000) -> dict[str, torch.Tensor]:
    """A state dict of which every tensor holds its own number: of no size on the disk."""
    state = classifiers.meta_classifier(architecture, num_classes, False).state_dict()
    return {
        name: torch.tensor(number, dtype=value.dtype).expand(value.shape)
        for number, (name, value) in enumerate(state.items())
    }


def empty(model: nn.Module) -> nn.Module:
    """A model without weights, ready to be given some."""
    return model.to_empty(device="cpu")


def settings(**changes: object) -> ClassifierConfig:
    plain = replace(parse_run_config(quick()).classifier, small_stem=False)
    return replace(plain, **changes)  # type: ignore[arg-type]


# ---- What torchvision's older files look like ----


def test_a_densenets_file_with_its_old_names_is_taken(tmp_path: Path) -> None:
    """`denselayer1.norm.1.weight`, as published, for `denselayer1.norm1.weight`."""
    weights = numbered("densenet121")
    old = {}
    for name, value in weights.items():
        for part in ("norm", "conv"):
            for digit in "12":
                if "denselayer" in name:
                    name = name.replace(f".{part}{digit}.", f".{part}.{digit}.")
        old[name] = value
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "densenet121.pth")
    model = empty(classifiers.meta_classifier("densenet121", 10, False))
    classifiers.load_initial_weights(model, tmp_path / "densenet121.pth")
    for name, value in model.state_dict().items():
        if not name.startswith("classifier."):
            assert torch.equal(value, weights[name]), name


def test_a_vision_transformers_file_with_its_old_names_is_taken(tmp_path: Path) -> None:
    """The layers know `mlp.linear_1` for `mlp.0`; another width under the old name is refused."""

    def transformer(mlp: int, num_classes: int) -> nn.Module:
        return VisionTransformer(32, 16, 1, 2, 16, mlp, num_classes=num_classes)

    weights = transformer(24, 1000).state_dict()
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
        for name, value in weights.items()
    }
    assert "encoder.layers.encoder_layer_0.mlp.linear_1.weight" in old
    torch.save(old, tmp_path / "vit.pth")
    model = transformer(24, 10)
    classifiers.load_initial_weights(model, tmp_path / "vit.pth")
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]) != name.startswith("heads."), name
    with pytest.raises(ClassifierError, match="does not fit this architecture or stem: .*mlp"):
        classifiers.load_initial_weights(transformer(20, 10), tmp_path / "vit.pth")


# ---- A folder ----


def folder_of(root: Path, *names: str) -> Path:
    """Files of weights under these names; of which architecture, their beginning says."""
    root.mkdir(exist_ok=True)
    for name in names:
        architecture = "shufflenet_v2_x1_0" if name.startswith("shuffle") else name.split("-")[0]
        architecture = architecture.split(".")[0]
        if name.endswith(".safetensors"):
            tensors = {n: v.contiguous() for n, v in numbered(architecture).items()}
            save_file(tensors, root / name)
        else:
            torch.save(numbered(architecture), root / name)
    return root


def first(model: nn.Module) -> float:
    """The number of the first convolution's tensor: of `numbered` weights 0."""
    return float(next(model.parameters()).detach().mean())


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("mobilenet_v2", "mobilenet_v2.safetensors"),
        ("mobilenet_v2", "mobilenet_v2.pth"),
        # As torchvision calls them: V1's and V2's, and one whose name is not the architecture's
        ("mobilenet_v2", "mobilenet_v2-b0353104.pth"),
        ("mobilenet_v2", "mobilenet_v2-7ebf99e0.pth"),
        ("shufflenet_v2_x1_0", "shufflenetv2_x1-5666bf0f80.pth"),
    ],
)
def test_an_architecture_finds_its_own_file_in_a_folder(
    tmp_path: Path, architecture: str, name: str
) -> None:
    folder = folder_of(tmp_path / "weights", name)
    (folder / f"{architecture}_bn.pth").write_bytes(b"another's")
    config = settings(architecture=architecture, init=str(folder))
    assert initial_weights.find_initial_weights(config, "") == folder / name
    model = classifiers.new_classifier(config, 10, "", 0)
    assert first(model) == 0
    assert float(next(model.buffers()).mean()) > 0


def test_the_plain_name_wins_among_several_files(tmp_path: Path) -> None:
    """Then torchvision's default, the second version of its weights."""
    default, older = (
        weights.url.rpartition("/")[2]
        for weights in (ResNet50_Weights.DEFAULT, ResNet50_Weights.IMAGENET1K_V1)
    )
    config = settings(architecture="resnet50", init=str(tmp_path))
    for name in (older, default, "resnet50.pth", "resnet50.safetensors"):
        (tmp_path / name).touch()
        assert initial_weights.find_initial_weights(config, "").name == name  # type: ignore[union-attr]


def test_missing_files_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "weights", "mobilenet_v2.pth")
    config = settings(architecture="vgg16", init=str(folder))
    with pytest.raises(ConfigError) as caught:
        initial_weights.find_initial_weights(config, "", "classifier.init")
    message = str(caught.value)
    assert message.startswith(
        f"classifier.init = '{folder}': the folder lacks vgg16.safetensors or vgg16.pth"
    )
    assert "vgg16-397923af.pth" in message
    # A ResNet-34 is made from a ResNet-18 of the kit alone
    (folder / "resnet18.pth").touch()
    with pytest.raises(ConfigError, match="the folder lacks resnet34.safetensors"):
        initial_weights.find_initial_weights(replace(config, architecture="resnet34"), "")
    with pytest.raises(ConfigError, match="'/nowhere/at/all': no such file or folder"):
        initial_weights.find_initial_weights(replace(config, init="/nowhere/at/all"), "")


def mixed(kit: Path, folder: Path, **changes: object) -> dict:
    """A client with a ShuffleNet and one with a MobileNet, whose small stems take any weights."""
    return quick(
        method="local",
        kit=str(kit),
        classifier__architecture="shufflenet_v2_x1_0,mobilenet_v2",
        classifier__init=str(folder),
        **changes,
    )


@pytest.mark.slow
def test_clients_of_mixed_architectures_take_each_their_own_from_one_folder(
    home: Path, tiny_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its file a client says so when it joins, before any work."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for architecture in ("shufflenet_v2_x1_0", "mobilenet_v2"):
        model = classifiers.build_classifier(architecture, 7)
        torch.save(model.state_dict(), folder / f"{architecture}.pth")
    config = mixed(tiny_kit, folder)
    loaded = []
    load = classifiers.load_initial_weights
    monkeypatch.setattr(
        classifiers,
        "load_initial_weights",
        lambda model, file, key: loaded.append(file.name) or load(model, file, key),
    )
    start(config)
    # When they join, and when they begin to train
    assert loaded == ["shufflenet_v2_x1_0.pth", "mobilenet_v2.pth"] * 2
    assert metrics(home)["kit_not_counted"]
    (folder / "mobilenet_v2.pth").unlink()
    with pytest.raises(RoundError) as caught:
        start(config, "other")
    assert "1 of 2 clients joined" in str(caught.value)
    assert f"classifier.init = '{folder}': the folder lacks mobilenet_v2" in str(caught.value)


@pytest.mark.parametrize("method", ["feddeo", "fedavg"])
def test_the_server_looks_for_its_own_first(tiny_kit: Path, tmp_path: Path, method: str) -> None:
    key = "classifier.init" if method == "fedavg" else "global-model.init"
    config = quick(method=method, kit=str(tiny_kit)) | {key: str(tmp_path)}
    with pytest.raises(ConfigError, match=f"{key} = .*the folder lacks shufflenet_v2_x1_0.safe"):
        check_server(parse_run_config(config))
    (tmp_path / "shufflenet_v2_x1_0.pth").write_bytes(b"damaged")
    with pytest.raises(ClassifierError, match=f"{key} = .*x1_0.pth' cannot be read"):
        check_server(parse_run_config(config))


# ---- The kit, and its ResNet-34 ----


@pytest.mark.slow
def test_a_resnet34_takes_the_kits_own_weights_where_it_has_some(
    tiny_kit: Path, tmp_path: Path
) -> None:
    """And who has it fetched that file, not the ResNet-18's."""
    kit = tmp_path / "kit"
    (kit / "classifiers").mkdir(parents=True)
    source = tiny_kit / "classifiers" / "resnet18.safetensors"
    (kit / "classifiers" / "resnet18.safetensors").write_bytes(source.read_bytes())
    config = parse_run_config(
        quick(method="fedlmg", kit=str(kit), classifier__architecture="resnet34,resnet18")
    )
    payload = Classifier((), "resnet34", {})
    classifier_config = replace(config.classifier, architecture="resnet34")
    shared = ("classifiers/resnet18.safetensors",)
    assert kit_parts(config, str(kit)) == shared
    assert client_download_bytes(config, payload) == source.stat().st_size
    grown = classifiers.new_classifier(classifier_config, 10, str(kit), 0)
    assert not grown.layer1[2].bn2.weight.any()  # type: ignore[union-attr, index]

    trained = classifiers.build_classifier("resnet34", 24, small_stem=True)
    file = kit / "classifiers" / "resnet34.safetensors"
    classifiers.save_initial_weights(trained, file)
    assert kit_parts(config, str(kit)) == ("classifiers/resnet34.safetensors", *shared)
    assert client_download_bytes(config, payload) == file.stat().st_size
    # The server's job is tied to the same file, and to the models of all architectures
    assert parts_by_step(config)["payloads"] == (str(kit), kit_parts(config, str(kit)))
    both = parse_run_config(
        quick(
            method="feddf",
            kit=str(kit),
            classifier__architecture="resnet34,resnet18",
            global_model__architecture="vgg16",
        )
    )
    files = ("classifiers/resnet34.safetensors", *shared, "classifiers/vgg16.safetensors")
    assert parts_by_step(both)["models"] == (str(kit), files)
    initial = classifiers.new_classifier(classifier_config, 10, str(kit), 0).state_dict()
    weights = classifiers.dequantize(classifiers.quantize(trained.state_dict()))
    for name in ("layer1.2.bn2.weight", "layer3.5.conv1.weight"):
        assert torch.equal(initial[name], weights[name])


# ---- Torchvision's own ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch's cache, empty, and no network: its proxy is a port without a listener."""
    # Remembers the proxies of its first use
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "torch" / "hub" / "checkpoints"


def test_imagenets_weights_are_torchvisions_default(cache: Path) -> None:
    cache.mkdir(parents=True)
    url = get_model_weights("mobilenet_v2").DEFAULT.url
    folder_of(cache, url.rpartition("/")[2])
    config = settings(architecture="mobilenet_v2", init="imagenet")
    model = classifiers.new_classifier(config, 10, "", 0)
    assert first(model) == 0
    assert float(next(model.buffers()).mean()) > 0


def test_without_a_network_the_way_out_is_named(cache: Path) -> None:
    url = get_model_weights("mobilenet_v2").DEFAULT.url
    config = settings(architecture="mobilenet_v2", init="imagenet")
    with pytest.raises(ConfigError) as caught:
        initial_weights.find_initial_weights(config, "", "classifier.init")
    message = str(caught.value)
    assert message.startswith("classifier.init = 'imagenet': ")
    assert str(cache / url.rpartition("/")[2]) in message
    assert "Connection refused" in message
    assert "TORCH_HOME" in message
    with pytest.raises(ConfigError, match="torchvision has no weights of resnet19"):
        initial_weights.find_initial_weights(replace(config, architecture="resnet19"), "")


def test_clients_check_imagenets_weights_when_they_join(
    home: Path, tiny_kit: Path, cache: Path
) -> None:
    config = quick(method="local", kit=str(tiny_kit), classifier__init="imagenet")
    with pytest.raises(RoundError, match="0 of 2 clients joined.*\n.*classifier.init = 'imagenet'"):
        start(config)


@pytest.fixture
def website(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """(A folder, and the address under which it is served.)"""
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    folder = tmp_path / "website"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_fetched_weights_must_have_the_digest_in_their_name(
    website: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = website
    digits = hashlib.sha256(b"weights").hexdigest()[:8]
    name = f"net-{digits}.pth"
    (folder / name).write_bytes(b"weights")
    place = tmp_path / "new" / name
    initial_weights._fetch(f"{address}/{name}", place, "init")
    assert place.read_bytes() == b"weights"
    (folder / name).write_bytes(b"another's")
    place.unlink()
    with pytest.raises(ConfigError, match="init = 'imagenet': .*cannot be fetched .*hash"):
        initial_weights._fetch(f"{address}/{name}", place, "init")
    assert not place.exists()


# ---- Files that are something else ----


def numbers_of_another_kind(file: Path) -> None:
    torch.save([1.5, 2], file)


def numbers_by_number(file: Path) -> None:
    torch.save({1: torch.zeros(2)}, file)


def packed(shape: object) -> Callable[[Path], None]:
    """Weights in 4 bits with an odd shape beside them."""
    state = {"conv1.weight": torch.zeros(4, dtype=torch.uint8), "conv1.weight.shape": shape}
    return lambda file: save_file(state, file)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.pth", lambda file: file.write_text("<!DOCTYPE html><html>"), "it is a web page"),
        ("a.pth", lambda file: file.write_text("version https://git-lfs.github"), "a Git LFS"),
        ("a.pth", lambda file: file.write_bytes(b""), "it is empty"),
        ("a.pth", lambda file: file.write_text("\x1b[31mno weights"), "it is cut short, corrupt"),
        ("a.pth", lambda file: file.write_bytes(pickle.dumps(Path("/"))), "it is cut short"),
        ("a.pth", numbers_of_another_kind, "is not a state dict"),
        ("a.pth", numbers_by_number, "is not a state dict"),
        ("a.safetensors", lambda file: file.write_text("<html>"), "it is a web page"),
        ("a.safetensors", lambda file: file.write_bytes(b"\0" * 4), "cannot be read"),
        ("a.safetensors", lambda file: file.write_bytes(b"\xff" * 40), "header too large"),
        ("a.safetensors", packed(torch.tensor(5)), "cut short, corrupt"),
        ("a.safetensors", packed(torch.tensor([1.5, 2.0])), "cut short, corrupt"),
    ],
)
def test_a_file_that_holds_no_weights_is_named_in_our_words(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / name)
    model = build_classifier("resnet18", 3)
    with pytest.raises(ClassifierError, match=f"classifier.init = .*{message}") as caught:
        load_initial_weights(model, tmp_path / name, "classifier.init")
    assert "weights_only" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "resnet18.pth"
    torch.save(build_classifier("resnet18", 3).state_dict(), file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ClassifierError, match="cut short") as caught:
        load_initial_weights(build_classifier("resnet18", 3), file, "classifier.init")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"architecture": None}, {"architecture": 5}])
def test_settings_of_timm_without_an_architecture_are_refused(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    pytest.importorskip("timm")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ClassifierError, match="timm cannot build it"):
        build_classifier(f"hf-hub:{tmp_path}", 3)
