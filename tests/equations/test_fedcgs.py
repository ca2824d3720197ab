"""FedCGS: statistics and head against NumPy on the pooled features, in 64 bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from client_app.learning import features as frozen_features
from client_app.methods import fedcgs
from osfl.config import ConfigError, parse_run_config
from osfl.data.load import Images
from osfl.models.classifiers import ClassifierError, new_classifier, normalize, remove_head
from osfl.payload import wire
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.util.pixels import to_float
from server_app.context import ServerJob
from server_app.expected import check_plausible
from server_app.heads import NEVER_PREDICTED
from server_app.methods import fedcgs as server_half
from server_app.methods.fedcgs import check_statistics, closed_form_head
from tests.helpers.class_statistics import CLASSES, WIDTH, drawn, statistics
from tests.helpers.client_jobs import images, job_of
from tests.helpers.settings import quick


def assert_near(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Within a thousandth of the largest number, whatever the features' scale."""
    largest = np.abs(wanted).max()
    assert largest > 0
    np.testing.assert_allclose(found / largest, wanted / largest, rtol=0, atol=1e-3)


def head_of(parts: list[np.ndarray], shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """The head from the statistics of several clients, each with these rows."""
    features, labels = drawn()
    payloads = {}
    held = {}
    for number, rows in enumerate(parts):
        payloads[f"c{number}"], held[f"c{number}"] = statistics(features[rows], labels[rows])
    weight, bias = closed_form_head(payloads, held, CLASSES, shrinkage)
    return weight.numpy(), bias.numpy()


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_the_head_is_the_pooled_features_own(shrinkage: float) -> None:
    """Two clients with unlike classes: as if all features were in one place."""
    features, labels = drawn()
    sigma = np.cov(features.T)
    sigma = (1 - shrinkage) * sigma + shrinkage * np.trace(sigma) / WIDTH * np.eye(WIDTH)
    skewed = [np.flatnonzero(labels == 0), np.flatnonzero(labels != 0)]
    weight, bias = head_of(skewed, shrinkage)
    for label in (0, 1, 3):
        mean = features[labels == label].mean(axis=0)
        wanted = np.linalg.inv(sigma) @ mean
        np.testing.assert_allclose(weight[label], wanted, rtol=2e-3, atol=2e-3)
        prior = np.log((labels == label).mean())
        np.testing.assert_allclose(bias[label], prior - mean @ wanted / 2, rtol=2e-3, atol=2e-3)
    # Nobody holds the third class: it is never chosen
    assert weight[2].tolist() == [0] * WIDTH
    assert bias[2] == NEVER_PREDICTED
    assert ((features @ weight.T + bias).argmax(axis=1) == labels).mean() > 0.9


def test_skew_changes_nothing() -> None:
    labels = drawn()[1]
    whole = head_of([np.arange(len(labels))], 0.1)
    by_class = head_of([np.flatnonzero(labels == label) for label in (0, 1, 3)], 0.1)
    for one, other in zip(whole, by_class, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_clients_send_sums_of_the_frozen_networks_features(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several batches; the features are what the last layer is given."""
    monkeypatch.setattr(frozen_features, "BATCH", 3)
    private: Images = images(0, 3, 4, 4, 0)
    job = job_of(tiny_kit, private, method="fedcgs")
    payload = fedcgs.make_payload(job)
    model = new_classifier(job.config.classifier, len(job.classes), job.kit, job.config.seed)
    seen: list[torch.Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    with torch.no_grad():
        model.eval()(normalize(to_float(private.pixels)))
    features = seen[0].double().numpy()
    labels = private.labels.numpy()
    held = sorted(set(labels.tolist()))
    assert payload.classes == tuple(job.classes[label] for label in held)
    assert payload.counts.tolist() == [int((labels == label).sum()) for label in held]
    sums = np.stack([features[labels == label].sum(axis=0) for label in held])
    assert_near(payload.sums, sums)
    assert_near(payload.moments, features.T @ features)
    check_statistics(payload, "a")
    assert not [p for p in model.parameters() if p.grad is not None]


def test_the_model_is_the_frozen_network_with_that_head(home: Path, tiny_kit: Path) -> None:
    """From two clients' payloads to logits, the features taken before its last layer."""
    config = parse_run_config(quick(method="fedcgs", kit=str(tiny_kit)))
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a", "b"))
    payloads = {
        client: fedcgs.make_payload(job_of(tiny_kit, images(*labels), method="fedcgs"))
        for client, labels in {"a": [0, 0, 3, 3], "b": [3, 4, 4]}.items()
    }
    (made,) = server_half.run(job, payloads).values()
    weight, bias = closed_form_head(
        payloads, job.held(payloads), len(job.classes), config.fedcgs.shrinkage
    )
    pixels = images(0, 3, 4).pixels
    backbone, _ = remove_head(
        new_classifier(config.classifier, 10, str(tiny_kit), config.seed).eval()
    )
    with torch.no_grad():
        features = backbone(normalize(to_float(pixels)))
        logits = made.model(normalize(to_float(pixels)))
    torch.testing.assert_close(logits, features @ weight.T + bias, rtol=1e-4, atol=1e-4)
    stored = load_file(folder.path / "models" / "FedCGS.safetensors")
    assert torch.equal(stored["fc.weight"], weight)
    assert made.architecture == config.classifier.architecture
    assert set(logits.argmax(dim=1).tolist()) <= {0, 3, 4}


def test_impossible_statistics_are_refused_before_they_are_used() -> None:
    sound, _ = statistics(*drawn())
    config = parse_run_config(quick(method="fedcgs"))
    check_plausible(sound, "a", config)
    with pytest.raises(PayloadError, match="moments: cannot come from features"):
        check_plausible(replace(sound, moments=-sound.moments), "a", config)
    shapes: wire.Tensors = {
        "counts": (("classes",), torch.int64),
        "sums": (("classes", WIDTH), torch.float32),
        "moments": ((WIDTH, WIDTH), torch.float32),
    }
    expected = wire.Expected("fedcgs", "job", "a", ("0", "1", "3"), 10_000, shapes)
    assert wire.decode(wire.encode(sound, "fedcgs", "job", "a"), expected).classes == sound.classes
    for count in (0, -1, 10**9 + 1):
        counts = torch.tensor([count, 1, 1])
        blob = wire.encode(replace(sound, counts=counts), "fedcgs", "job", "a")
        with pytest.raises(PayloadError, match="counts: must be at least 1, and no more than"):
            wire.decode(blob, expected)


def test_statistics_of_no_images_are_refused() -> None:
    features, labels = drawn()
    sound, _ = statistics(features, labels)
    check_statistics(sound, "a")
    half = replace(sound, moments=sound.moments * 0.1)
    with pytest.raises(PayloadError, match="payload of a: moments: cannot come from features"):
        check_statistics(half, "a")
    negative = replace(sound, moments=-sound.moments)
    with pytest.raises(PayloadError, match="moments: cannot come from features"):
        check_statistics(negative, "a")
    skewed = sound.moments.clone()
    skewed[0, 1] += 10
    with pytest.raises(PayloadError, match="moments: are not symmetric"):
        check_statistics(replace(sound, moments=skewed), "a")
    # One image a class has no spread, and rounding may lower it
    one, _ = statistics(features[:1], labels[:1])
    check_statistics(one, "a")


def test_networks_without_a_linear_layer_at_their_end_are_refused() -> None:
    from torchvision.models import get_model

    for name, width in (("resnet18", 512), ("mobilenet_v2", 1280), ("vgg16", 4096)):
        with torch.device("meta"):
            assert remove_head(get_model(name))[1] == width
    with torch.device("meta"), pytest.raises(ClassifierError, match="SqueezeNet does not end with"):
        remove_head(get_model("squeezenet1_0"))
    settings = quick(method="fedcgs", classifier__architecture="resnet18,vgg16")
    with pytest.raises(ConfigError, match="fedcgs uses the features of one architecture"):
        parse_run_config(settings)
