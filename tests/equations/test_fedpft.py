"""FedPFT: mixtures against the features' own moments, drawn features against the mixtures, and the
head against the gradient of its loss, with NumPy.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_app.learning.features import width_and_features
from client_app.methods import fedpft
from osfl.config import ConfigError, FedPFTConfig, parse_run_config
from osfl.payload.kinds import FeatureMixtures
from osfl.run_folder.layout import open_run_folder
from osfl.run_folder.status import Status
from server_app.context import ServerJob
from server_app.heads import NEVER_PREDICTED
from server_app.methods import fedpft as server_half
from server_app.methods.fedpft import sample_features, train_head
from tests.helpers.client_jobs import images, job_of
from tests.helpers.settings import quick

LABELS = [0, 3, 3, 3, 3, 4, 4]
SETTINGS = parse_run_config(quick(method="fedpft")).fedpft


def payload_of(kit: Path, **settings: object) -> tuple[FeatureMixtures, np.ndarray]:
    """(what a client with LABELS sends, its features)."""
    private = images(*LABELS)
    job = job_of(kit, private, method="fedpft", **settings)
    _, batches = width_and_features(job, private)
    features = torch.cat([batch for _, batch in batches]).numpy()
    return fedpft.make_payload(job), features


@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_one_gaussian_has_the_features_moments(tiny_kit: Path, covariance: str) -> None:
    """This network has random weights and features near 0; their variances are still their own."""
    options = {"fedpft__covariance": covariance, "fedpft__components": 1}
    payload, features = payload_of(tiny_kit, **options)
    # scikit-learn adds a millionth of the features' own variance
    added = 1e-6 * features.var(ddof=1)
    assert added < 1e-12
    labels = np.array(LABELS)
    assert payload.classes == ("zero", "three", "four")
    assert payload.counts.tolist() == [1, 4, 2]
    assert payload.weights.tolist() == [[1], [1], [1]]
    for row, label in enumerate((0, 3, 4)):
        group = features[labels == label]
        small = 1e-6 * features.std()
        np.testing.assert_allclose(payload.means[row, 0], group.mean(axis=0), rtol=1e-5, atol=small)
        variances = group.var(axis=0)
        expected = variances.mean(keepdims=True) if covariance == "spherical" else variances
        np.testing.assert_allclose(payload.variances[row, 0], expected + added, rtol=1e-3, atol=0)
    assert payload.variances.shape[2] == (1 if covariance == "spherical" else features.shape[1])


def test_a_class_with_fewer_images_than_components(tiny_kit: Path) -> None:
    """Each image is one of them; the places left over have no weight."""
    payload, features = payload_of(tiny_kit, fedpft__components=3)
    assert payload.weights.shape == (3, 3)
    assert payload.weights[0].tolist() == [1, 0, 0]
    assert payload.weights[2].tolist() == pytest.approx([0.5, 0.5, 0])
    np.testing.assert_allclose(payload.means[0, 0], features[0], rtol=1e-4, atol=0)
    means = sorted(payload.means[2, :2, 0].tolist())
    assert means == pytest.approx(sorted(features[5:, 0].tolist()), rel=1e-4, abs=0)
    assert payload.means[2, 2].abs().sum() == 0


def mixture() -> FeatureMixtures:
    """Two features: a class of two Gaussians, one three times as heavy, and a class of one."""
    return FeatureMixtures(
        ("a", "b"),
        torch.tensor([40_000, 3]),
        torch.tensor([[0.25, 0.75], [1.0, 0.0]]),
        torch.tensor([[[-10.0, 0.0], [10.0, 4.0]], [[1.0, 2.0], [99.0, 99.0]]]),
        torch.tensor([[[4.0, 0.25], [0.01, 9.0]], [[1.0, 1.0], [0.0, 0.0]]]),
    )


def test_features_are_drawn_from_the_mixtures() -> None:
    features, labels, shares = sample_features({"c": mixture()}, {"c": [5, 2]}, 100_000, seed=0)
    assert labels.tolist() == [5] * 40_000 + [2] * 3
    assert shares.tolist() == [1] * 40_003
    drawn = features[:40_000].numpy()
    left_side = drawn[:, 0] < 0
    assert left_side.mean() == pytest.approx(0.25, abs=0.01)
    np.testing.assert_allclose(drawn[left_side].mean(axis=0), [-10, 0], atol=0.06)
    np.testing.assert_allclose(drawn[~left_side].mean(axis=0), [10, 4], atol=0.06)
    np.testing.assert_allclose(drawn[left_side].var(axis=0), [4, 0.25], rtol=0.05)
    np.testing.assert_allclose(drawn[~left_side].var(axis=0), [0.01, 9], rtol=0.05)
    # Never from a place without weight
    assert features[40_000:].abs().max() < 10


def test_a_class_counts_as_its_images_however_few_are_drawn() -> None:
    """A count that a client made up costs no memory."""
    liar = replace(mixture(), counts=torch.tensor([10**9, 3]))
    features, labels, shares = sample_features({"c": liar}, {"c": [0, 1]}, 4, seed=0)
    assert len(features) == 4 + 3
    assert labels.tolist() == [0] * 4 + [1] * 3
    assert shares.tolist() == [10**9 / 4] * 4 + [1] * 3


def test_numbers_as_large_as_the_wire_takes_give_a_head() -> None:
    """Finite, so that one client does not end the run."""
    most = torch.finfo(torch.float32).max
    honest = mixture()
    liar = replace(honest, means=honest.means.sign() * most, variances=torch.full((2, 2, 2), most))
    drawn = sample_features({"c": honest, "d": liar}, {"c": [0, 1], "d": [0, 1]}, 20, seed=0)
    for part in (*drawn, *train_head(*drawn, 2, SETTINGS)):
        assert torch.isfinite(part).all()


def test_draws_are_each_clients_and_classs_own() -> None:
    both = {"c": mixture(), "d": mixture()}
    client_labels = {"c": [0, 1], "d": [0, 1]}
    features, _, _ = sample_features(both, client_labels, 5, seed=0)
    again, _, _ = sample_features(dict(reversed(both.items())), client_labels, 5, seed=0)
    second_draw, _, _ = sample_features(both, client_labels, 5, seed=1)
    assert torch.equal(features, again)
    assert not torch.equal(features, second_draw)
    assert not torch.equal(features[:8], features[8:])
    alone, _, _ = sample_features({"d": mixture()}, client_labels, 5, seed=0)
    assert torch.equal(alone, features[8:])


def settings_of(**changes: object) -> FedPFTConfig:
    return replace(SETTINGS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("present", [(0, 1, 3), (1, 3)], ids=["three classes", "two classes"])
def test_the_head_is_where_the_loss_has_no_slope(present: tuple[int, ...]) -> None:
    """Softmax' cross-entropy on standardised features, each with its share, and the L2 penalty."""
    draw = np.random.default_rng(0)
    labels = draw.choice(present, 300)
    centres = draw.normal(size=(4, 5))
    features = 3 + (2 * centres[labels] + draw.normal(size=(300, 5))) * [1, 5, 0.1, 1, 2]
    shares = np.where(labels == 3, 9.0, 1.0)
    weight, bias = train_head(
        torch.tensor(features).float(),
        torch.tensor(labels),
        torch.tensor(shares).float(),
        4,
        settings_of(inverse_penalty=0.5),
    )
    absent = sorted({0, 1, 2, 3} - set(present))
    assert bias[absent].tolist() == [NEVER_PREDICTED] * len(absent)
    assert weight[absent].abs().sum() == 0

    mean = np.average(features, axis=0, weights=shares)
    deviation = np.sqrt(np.average((features - mean) ** 2, axis=0, weights=shares))
    z = (features - mean) / deviation
    rows = list(present)
    w = weight.double().numpy()[rows] * deviation
    b = bias.double().numpy()[rows] + weight.double().numpy()[rows] @ mean
    logits = z @ w.T + b
    chance = np.exp(logits - logits.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    error = (chance - (labels[:, None] == rows)) * shares[:, None]
    # Of two classes the penalty is on the difference of their rows, and the first's is 0
    penalty = w / 0.5
    slope = error.T @ z + penalty
    if len(rows) == 2:
        slope = slope[1:]
        assert np.abs(w[0]).sum() == 0
    # scikit-learn stops at 1e-4 of the mean loss
    assert np.abs(slope).max() < 2e-4 * shares.sum()
    assert np.abs(error.sum(axis=0)).max() < 2e-4 * shares.sum()
    assert np.abs(penalty).max() > 1
    assert (np.array(rows)[logits.argmax(axis=1)] == labels).mean() > 0.6


def test_a_single_class_is_always_chosen() -> None:
    weight, bias = train_head(torch.ones(3, 2), torch.full((3,), 2), torch.ones(3), 4, SETTINGS)
    assert weight.abs().sum() == 0
    assert bias.tolist() == [NEVER_PREDICTED, NEVER_PREDICTED, 0, NEVER_PREDICTED]


def test_the_model_is_the_frozen_network_with_that_head(home: Path, tiny_kit: Path) -> None:
    config = parse_run_config(quick(method="fedpft", kit=str(tiny_kit)))
    folder = open_run_folder(config, "job", 0)
    job = ServerJob(config, folder, Status(folder.path), ("a", "b"))
    payloads = {
        client: fedpft.make_payload(job_of(tiny_kit, images(*labels), method="fedpft"))
        for client, labels in {"a": [0, 0, 3, 3], "b": [3, 4, 4]}.items()
    }
    (result,) = server_half.run(job, payloads).values()
    drawn = sample_features(payloads, job.held(payloads), config.fedpft.samples, config.seed)
    weight, bias = train_head(*drawn, 10, config.fedpft)
    stored = load_file(folder.path / "models" / "FedPFT.safetensors")
    assert torch.equal(stored["fc.weight"], weight)
    assert torch.equal(stored["fc.bias"], bias)
    assert result.architecture == config.classifier.architecture


def test_one_architecture_has_the_features() -> None:
    settings = quick(method="fedpft", classifier__architecture="resnet18,vgg16")
    with pytest.raises(ConfigError, match="fedpft uses the features of one architecture"):
        parse_run_config(settings)
