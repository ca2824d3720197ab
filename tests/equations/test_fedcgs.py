"""FedCGS: statistics and head against NumPy on the pooled features, in 64 bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import Ridge
from torch import nn

from client_app.learning import features as frozen_features
from client_app.methods import fedcgs
from osfl.config import ConfigError, parse_run_config
from osfl.data.load import Images
from osfl.methods.fedcgs import FedCGSConfig
from osfl.models.classifiers import ClassifierError, new_classifier, normalize, remove_head
from osfl.models.projection import random_projection
from osfl.payload import wire
from osfl.payload.codecs import pack, unpack
from osfl.payload.kinds import FeatureStatistics
from osfl.payload.wire import PayloadError
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from osfl.util.pixels import to_float
from server_app.context import ServerJob
from server_app.expected import check_plausible, expected_tensors
from server_app.heads import NEVER_PREDICTED
from server_app.methods import fedcgs as server_half
from server_app.methods.fedcgs import check_statistics, closed_form_head
from tests.helpers.class_statistics import CLASSES, WIDTH, drawn, statistics
from tests.helpers.client_jobs import images, job_of
from tests.helpers.settings import quick

SETTINGS = FedCGSConfig("within", 0.1, 0)


def assert_near(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Within a thousandth of the largest number, whatever the features' scale."""
    largest = np.abs(wanted).max()
    assert largest > 0
    np.testing.assert_allclose(found / largest, wanted / largest, rtol=0, atol=1e-3)


def head_of(
    parts: list[np.ndarray], shrinkage: float, head: str = "total"
) -> tuple[np.ndarray, np.ndarray]:
    """The head from the statistics of several clients, each with these rows."""
    features, labels = drawn()
    payloads = {}
    client_labels = {}
    for number, rows in enumerate(parts):
        payloads[f"c{number}"], client_labels[f"c{number}"] = statistics(
            features[rows], labels[rows]
        )
    weight, bias = closed_form_head(
        payloads, client_labels, CLASSES, FedCGSConfig(head, shrinkage, 0)
    )
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
        expected = np.linalg.inv(sigma) @ mean
        np.testing.assert_allclose(weight[label], expected, rtol=2e-3, atol=2e-3)
        prior = np.log((labels == label).mean())
        np.testing.assert_allclose(bias[label], prior - mean @ expected / 2, rtol=2e-3, atol=2e-3)
    # Nobody holds the third class: it is never chosen
    assert weight[2].tolist() == [0] * WIDTH
    assert bias[2] == NEVER_PREDICTED
    assert ((features @ weight.T + bias).argmax(axis=1) == labels).mean() > 0.9


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_the_within_head_uses_the_covariance_within_classes(shrinkage: float) -> None:
    """GH-OFL's LDA, from each class's own covariance by NumPy."""
    features, labels = drawn()
    scatter = sum(
        ((labels == label).sum() - 1) * np.cov(features[labels == label].T) for label in (0, 1, 3)
    )
    sigma = scatter / (len(labels) - 3)
    sigma = (1 - shrinkage) * sigma + shrinkage * np.trace(sigma) / WIDTH * np.eye(WIDTH)
    skewed = [np.flatnonzero(labels == 0), np.flatnonzero(labels != 0)]
    weight, bias = head_of(skewed, shrinkage, "within")
    for label in (0, 1, 3):
        mean = features[labels == label].mean(axis=0)
        expected = np.linalg.solve(sigma, mean)
        np.testing.assert_allclose(weight[label], expected, rtol=2e-3, atol=2e-3)
        prior = np.log((labels == label).mean())
        np.testing.assert_allclose(bias[label], prior - mean @ expected / 2, rtol=2e-3, atol=2e-3)
    assert bias[2] == NEVER_PREDICTED


def test_the_within_head_needs_a_class_with_two_images() -> None:
    labels = drawn()[1]
    rows = [int(np.flatnonzero(labels == label)[0]) for label in (0, 1, 3)]
    with pytest.raises(ConfigError, match=r"fedcgs.head = 'within': must be total or ridge"):
        head_of([np.array(rows)], 0.1, "within")


def test_the_ridge_head_is_scikit_learns_regression() -> None:
    """AFL: one-hot labels regressed on features without intercept; gamma is a multiple of I."""
    features, labels = drawn()
    gamma = 0.2
    alpha = gamma * np.trace(features.T @ features) / WIDTH / (1 - gamma)
    regression = Ridge(alpha, fit_intercept=False).fit(features, np.eye(CLASSES)[labels])
    weight, bias = head_of([np.arange(100), np.arange(100, 400)], gamma, "ridge")
    np.testing.assert_allclose(weight, regression.coef_ / (1 - gamma), rtol=2e-3, atol=2e-3)
    assert bias.tolist() == [0, 0, NEVER_PREDICTED, 0]


@pytest.mark.parametrize("head", ["total", "within", "ridge"])
def test_skew_changes_nothing(head: str) -> None:
    labels = drawn()[1]
    pooled_head = head_of([np.arange(len(labels))], 0.1, head)
    by_class = head_of([np.flatnonzero(labels == label) for label in (0, 1, 3)], 0.1, head)
    for pooled_part, class_part in zip(pooled_head, by_class, strict=True):
        np.testing.assert_allclose(pooled_part, class_part, rtol=1e-3, atol=1e-3)


def test_clients_send_sums_of_the_frozen_networks_features(
    tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several batches; the features are what the last layer is given."""
    monkeypatch.setattr(frozen_features, "BATCH", 3)
    private: Images = images(0, 3, 4, 4, 0)
    job = job_of(tiny_kit, private, method="fedcgs")
    payload = fedcgs.make_payload(job)
    model = new_classifier(job.config.classifier, len(job.classes), job.kit, job.config.seed)
    inputs: list[torch.Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_hook(lambda module, given, out: inputs.append(given[0]))
    with torch.no_grad():
        model.eval()(normalize(to_float(private.pixels)))
    features = inputs[0].double().numpy()
    labels = private.labels.numpy()
    class_labels = sorted(set(labels.tolist()))
    assert payload.classes == tuple(job.classes[label] for label in class_labels)
    assert payload.counts.tolist() == [int((labels == label).sum()) for label in class_labels]
    sums = np.stack([features[labels == label].sum(axis=0) for label in class_labels])
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
    (result,) = server_half.run(job, payloads).values()
    weight, bias = closed_form_head(payloads, job.held(payloads), len(job.classes), config.fedcgs)
    pixels = images(0, 3, 4).pixels
    backbone, _ = remove_head(
        new_classifier(config.classifier, 10, str(tiny_kit), config.seed).eval()
    )
    with torch.no_grad():
        features = backbone(normalize(to_float(pixels)))
        logits = result.model(normalize(to_float(pixels)))
    torch.testing.assert_close(logits, features @ weight.T + bias, rtol=1e-4, atol=1e-4)
    stored = load_file(folder.path / "models" / "FedCGS.safetensors")
    assert torch.equal(stored["fc.weight"], weight)
    assert result.architecture == config.classifier.architecture
    assert set(logits.argmax(dim=1).tolist()) <= {0, 3, 4}


def test_a_projection_is_public_and_keeps_the_networks_shape(home: Path, tiny_kit: Path) -> None:
    """The sums are those of P f, and the model's logits those of the small head on P f."""
    size = 5
    settings = {"method": "fedcgs", "fedcgs__projection": size}
    config = parse_run_config(quick(kit=str(tiny_kit), **settings))
    private = images(0, 0, 3, 3, 4, 4)
    payload = fedcgs.make_payload(job_of(tiny_kit, private, **settings))
    full_payload = fedcgs.make_payload(job_of(tiny_kit, private, method="fedcgs"))
    width = full_payload.sums.shape[1]
    projection = random_projection(width, size, config.seed)
    assert set(projection.unique().tolist()) == {-(size**-0.5), size**-0.5}
    assert not torch.equal(projection, random_projection(width, size, config.seed + 1))
    assert_near(payload.sums, (full_payload.sums.double() @ projection.T).numpy())
    assert_near(
        payload.moments, (projection @ full_payload.moments.double() @ projection.T).numpy()
    )
    assert expected_tensors(config)["triangle"] == ((15,), torch.float32)
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a",))
    (result,) = server_half.run(job, {"a": payload}).values()
    client_labels = job.held({"a": payload})
    weight, bias = closed_form_head({"a": payload}, client_labels, len(job.classes), config.fedcgs)
    backbone, _ = remove_head(
        new_classifier(config.classifier, 10, str(tiny_kit), config.seed).eval()
    )
    x = normalize(to_float(private.pixels))
    with torch.no_grad():
        expected = (backbone(x).double() @ projection.T) @ weight.double().T + bias
        torch.testing.assert_close(result.model(x).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [7, 60])
def test_a_rounded_payload_has_a_factor_of_the_scatter(tiny_kit: Path, count: int) -> None:
    """R^T R is the scatter within classes, by NumPy; with 7 images it is singular."""
    private = images(*(number % 3 for number in range(count)))
    settings = {"method": "fedcgs", "fedcgs__projection": 16, "payload_codec": "int8"}
    payload = fedcgs.make_payload(job_of(tiny_kit, private, **settings))
    assert payload.triangle is None
    exact = fedcgs.make_payload(job_of(tiny_kit, private, **{**settings, "payload_codec": "raw"}))
    assert exact.factor is None
    moments = exact.moments.double().numpy()
    means = exact.sums.double().numpy() / exact.counts.numpy()[:, None]
    scatter = moments - sum(
        n * np.outer(m, m) for n, m in zip(exact.counts.numpy(), means, strict=True)
    )
    r = np.zeros((16, 16))
    r[np.triu_indices(16)] = payload.factor[0]
    assert_near(torch.tensor(r.T @ r), scatter)
    assert_near(payload.moments, moments)
    config = parse_run_config(quick(kit=str(tiny_kit), **settings))
    shapes = expected_tensors(config)
    assert (set(shapes), shapes["factor"]) == (
        {"counts", "sums", "factor"},
        ((1, 136), torch.float32),
    )
    blob = wire.encode(payload, "fedcgs", "job", "a", "int8")
    # A byte for each number of the factor and of three sums
    assert len(blob) < 136 + 3 * 16 + 250
    names = ("zero", "one", "two")
    expected = wire.Expected("fedcgs", "job", "a", names, 10_000, shapes, codec="int8")
    received = wire.decode(blob, expected)
    check_plausible(received, "a", config)
    largest = np.abs(moments).max()
    np.testing.assert_allclose(received.moments / largest, moments / largest, atol=0.02)


def test_a_head_survives_the_rounding_of_its_factor() -> None:
    """And not that of the moments themselves: the features' mean hides their scatter."""
    features, labels = drawn()
    features = features + 30
    exact, class_labels = statistics(features, labels)
    means = exact.sums.double() / exact.counts[:, None]
    within = torch.tensor(features.T @ features) - exact.sums.double().T @ means
    factor = fedcgs.scatter_factor(within)[*torch.triu_indices(WIDTH, WIDTH)].float()[None]

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        flat = numbers.flatten().numpy()
        packed = bytes(pack(flat, "int8"))
        return torch.tensor(unpack(packed, len(flat), "int8")).view(numbers.shape)

    def agreement(payload: FeatureStatistics) -> float:
        answers = []
        for part in (exact, payload):
            weight, bias = closed_form_head({"a": part}, {"a": class_labels}, CLASSES, SETTINGS)
            answers.append((torch.tensor(features).float() @ weight.T + bias).argmax(dim=1))
        return float((answers[0] == answers[1]).float().mean())

    sums = rounded(exact.sums)
    factored = replace(exact, sums=sums, triangle=None, factor=rounded(factor))
    check_statistics(factored, "a")
    assert agreement(factored) > 0.97
    naive = replace(exact, sums=sums, triangle=rounded(exact.triangle))
    assert agreement(naive) < 0.9
    with pytest.raises(PayloadError, match="triangle: cannot come from features"):
        check_statistics(naive, "a")


def test_impossible_statistics_are_refused_before_they_are_used() -> None:
    sound, _ = statistics(*drawn())
    config = parse_run_config(quick(method="fedcgs"))
    check_plausible(sound, "a", config)
    with pytest.raises(PayloadError, match="triangle: cannot come from features"):
        check_plausible(replace(sound, triangle=-sound.triangle), "a", config)
    shapes: wire.Tensors = {
        "counts": (("classes",), torch.int64),
        "sums": (("classes", WIDTH), torch.float32),
        "triangle": ((WIDTH * (WIDTH + 1) // 2,), torch.float32),
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
    half = replace(sound, triangle=sound.triangle * 0.1)
    with pytest.raises(PayloadError, match="payload of a: triangle: cannot come from features"):
        check_statistics(half, "a")
    negative = replace(sound, triangle=-sound.triangle)
    with pytest.raises(PayloadError, match="triangle: cannot come from features"):
        check_statistics(negative, "a")
    # One image a class has no spread, and rounding may lower it
    lone_statistics, _ = statistics(features[:1], labels[:1])
    check_statistics(lone_statistics, "a")


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
