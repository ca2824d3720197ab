"""Classifiers of timm and of the hub: their own weights, mean, deviation and size."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from client_app.app import app
from osfl.config import ConfigError, parse_run_config
from osfl.models.classifiers import (
    ClassifierError,
    build_classifier,
    compute_logits,
    new_classifier,
    normalize,
    rebuild_classifier,
)
from osfl.models.training import fit
from osfl.util.pixels import to_float
from server_app.app import run_job
from server_app.synthesis.guidance import as_teacher, classifier_loss
from tests.helpers.hub_requests import unused_address, use_hub, weights_of
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.loopback_hub import REVISION, Hub, hub
from tests.helpers.settings import plain_classifier, quick
from tests.helpers.whole_runs import nodes

CPU = torch.device("cpu")
# Takes 160 px alone, mean and deviation 0.5
VIT = "timm:test_vit"
# Takes any size
RESNET = "timm:test_resnet"
MEDICAL = f"hf-hub:owner/medical@{REVISION}"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories like timm's `push_to_hf_hub` makes them: settings and weights."""
    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(3)
    for name, model, mean in (
        ("timm/test_vit.r160_in1k", timm.create_model("test_vit"), (0.5, 0.5, 0.5)),
        ("owner/medical", timm.create_model("test_resnet"), (0.1, 0.2, 0.3)),
    ):
        folder = root / name
        folder.mkdir(parents=True)
        state = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "pytorch_model.bin").write_bytes(b"not for us")
        config = {
            "architecture": model.pretrained_cfg["architecture"],
            "num_classes": 1000,
            "pretrained_cfg": {**model.pretrained_cfg, "mean": mean, "std": (0.2, 0.2, 0.2)},
        }
        (folder / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def served(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(repositories) as server:
        use_hub(monkeypatch, server.address, tmp_path / "cache")
        yield server


def pixels(count: int = 4, side: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


@pytest.mark.slow
def test_an_images_mean_deviation_and_size_are_the_models_own() -> None:
    """timm's small ViT: (x / 255 - 0.5) / 0.5, at 160 px; its ResNet takes images as they are."""
    vit = build_classifier(VIT, 5)
    images = pixels(side=160)
    expected = (images.numpy() / 255 - 0.5) / 0.5
    assert normalize(to_float(images), vit).numpy() == pytest.approx(expected, abs=1e-5)
    assert normalize(to_float(pixels()), vit).shape == (4, 3, 160, 160)
    assert normalize(to_float(pixels()), build_classifier(RESNET, 5)).shape == (4, 3, 24, 24)
    # Torchvision's have ImageNet's
    mean = np.array([0.485, 0.456, 0.406])[:, None, None]
    std = np.array([0.229, 0.224, 0.225])[:, None, None]
    plain = normalize(to_float(images), build_classifier("resnet18", 5)).numpy()
    assert plain == pytest.approx((images.numpy() / 255 - mean) / std, abs=1e-5)


def test_training_guidance_and_testing_see_the_same_input(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = []
    model = build_classifier(VIT, 5)
    model.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach().clone()))
    images = pixels(2)
    config = plain_classifier(epochs=1, batch_size=2, lr=0.0 + 1e-8)
    compute_logits(model, images, CPU)
    fit(model, images, torch.tensor([0, 1]), config, 0, CPU)
    teacher = as_teacher(model)
    classifier_loss(teacher, to_float(images), torch.tensor([0, 1]), 1.0, 0.0, 24)
    tested, trained, guided = inputs[0], inputs[1], inputs[-1]
    order = [0, 1] if torch.allclose(tested, trained, atol=1e-5) else [1, 0]
    assert torch.allclose(tested[order], trained, atol=1e-5)
    assert torch.allclose(tested, guided, atol=1e-5)


def test_a_gradient_goes_through_the_resizing() -> None:
    model = build_classifier(VIT, 5).eval()
    image = to_float(pixels(1)).requires_grad_()
    F.cross_entropy(model(normalize(image, model)), torch.tensor([1])).backward()
    assert image.grad is not None
    assert int((image.grad != 0).sum()) > 100


def test_a_models_own_weights_come_from_the_hub_but_for_the_head(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm's own weights and another repository's come once, and then without a network."""
    stored = load_file(served.root / "timm" / "test_vit.r160_in1k" / "model.safetensors")
    for architecture, name in ((VIT, "timm/test_vit.r160_in1k"), (MEDICAL, "owner/medical")):
        config = plain_classifier(architecture=architecture, init="pretrained", small_stem=False)
        stored = load_file(served.root / name / "model.safetensors")
        model = new_classifier(config, 5, "", 0)
        for key, value in model.state_dict().items():
            if key.startswith(("head.", "fc.")):
                assert value.shape[0] == 5
            else:
                assert torch.equal(value, stored[key]), key
    fetched = weights_of(served)
    assert fetched == ["test_vit.r160_in1k/model.safetensors", "medical/model.safetensors"]
    medical = new_classifier(config, 5, "", 0)
    assert medical.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]  # type: ignore[index]
    use_hub(monkeypatch, unused_address(), tmp_path / "cache")
    again = new_classifier(config, 5, "", 0).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in medical.state_dict().items())
    assert weights_of(served) == fetched


def test_random_weights_need_the_settings_alone(served: Hub) -> None:
    new_classifier(plain_classifier(architecture=MEDICAL, small_stem=False), 5, "", 0)
    assert weights_of(served) == []


def test_a_trained_one_is_rebuilt_of_its_numbers(served: Hub) -> None:
    for architecture in (VIT, RESNET, MEDICAL):
        torch.manual_seed(1)
        model = build_classifier(architecture, 5)
        state = {key: value + 0.01 for key, value in model.state_dict().items()}
        rebuilt_model = rebuild_classifier(state, architecture, 5, small_stem=False)
        model.load_state_dict(state)
        assert torch.allclose(
            compute_logits(rebuilt_model, pixels(), CPU), compute_logits(model, pixels(), CPU)
        )


def test_the_head_alone_is_trained(served: Hub) -> None:
    """A linear probe: all else, BatchNorm's statistics too, is as it was; and may be trained on."""
    torch.manual_seed(1)
    model = build_classifier(RESNET, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    labels = torch.arange(4) % 3
    config = plain_classifier(epochs=2, batch_size=2, lr=0.1, momentum=0.9, weight_decay=0.1)
    fit(model, pixels(), labels, replace(config, trained="head"), 0, CPU)
    changed = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert changed == {"fc.weight", "fc.bias"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    fit(model, pixels(), labels, config, 0, CPU)
    assert not torch.equal(model.state_dict()["conv1.0.weight"], before["conv1.0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedlmg", "fedcgs", "fedpft", "fedprox", "feddf"])
def test_a_run_with_a_backbone(
    served: Hub, home: Path, tiny_kit: Path, tmp_path: Path, method: str
) -> None:
    """From the clients' models to the global one, through the wire."""
    settings = {
        "classifier.architecture": MEDICAL,
        "global-model.architecture": MEDICAL,
        "classifier.init": "pretrained",
        "global-model.init": "pretrained",
        "classifier.small-stem": False,
        "global-model.small-stem": False,
        "classifier.trained": "all" if method == "fedlmg" else "head",
        "rounds.count": 1,
        "runs-dir": str(tmp_path / "runs"),
    }
    if method == "feddf":
        settings |= {"rounds.proxy-images": 4, "rounds.distillation-steps": 1}
    config = quick(method=method, kit=str(tiny_kit), **settings)
    run_job(LoopGrid(app, config, nodes(2)), parse_run_config(config), "job")
    metrics = json.loads((tmp_path / "runs" / "job" / "metrics.json").read_text())
    assert len(metrics["accuracy"]) >= 1
    assert metrics["config"]["classifier.architecture"] == MEDICAL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classifier.init": "kit"}, r"classifier.init = 'kit': has no weights for 'timm:test"),
        ({"classifier.init": "imagenet"}, "set it to pretrained for"),
        (
            {"classifier.architecture": "resnet18", "classifier.init": "pretrained"},
            "is for timm: and hf-hub: models; for resnet18 set it to imagenet",
        ),
    ],
)
def test_weights_that_there_are_not_are_refused(settings: dict, message: str) -> None:
    config = quick(method="local", **{"classifier.architecture": VIT, **settings})
    with pytest.raises(ConfigError, match=message):
        parse_run_config(config)


@pytest.mark.parametrize("name", ["local-dir:/hospital", "hf-hub:owner/model", "a\\b"])
def test_timm_reads_and_fetches_nothing_by_itself(name: str) -> None:
    """A message with a global model names its architecture: a folder could be told by errors."""
    message = "must be timm:NAME, a name of timm's alone"
    with pytest.raises(ClassifierError, match=message):
        build_classifier(f"timm:{name}", 5)
    settings = quick(classifier__architecture=f"timm:{name}", classifier__init="none")
    with pytest.raises(ConfigError, match=message):
        parse_run_config(settings)


def test_an_architecture_that_cannot_be_built_is_reported(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClassifierError, match="'timm:nothing': timm cannot build it: Unknown"):
        build_classifier("timm:nothing", 5)
    with pytest.raises(ClassifierError, match="architecture: 'owner' is neither a hub id"):
        build_classifier("hf-hub:owner", 5)
    with pytest.raises(ClassifierError, match="the hub has no such model"):
        build_classifier("hf-hub:owner/nothing", 5)
    with pytest.raises(ClassifierError, match="small-stem is for ResNet"):
        build_classifier(VIT, 5, small_stem=True)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ClassifierError, match=r"needs the package timm: pip install 'osfl\[back"):
        build_classifier(VIT, 5)
