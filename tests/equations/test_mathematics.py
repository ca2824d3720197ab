"""The equations, against numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import nn

from osfl.models.classifiers import MEAN, STD, dequantize, quantize
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import Kit, Sampling, ddim_step, forward_noise, load_kit, x0hat
from server_app.synthesis.guidance import Condition, as_teacher, classifier_loss, compose, guide
from server_app.synthesis.samplers import ddim
from server_app.training import mean_teacher, specific_teacher
from tests.helpers.batch_norm import bn_model
from tests.helpers.settings import plain_classifier

A = torch.tensor(0.64)  # sqrt(a) = 0.8, sqrt(1 - a) = 0.6


def plane(value: float) -> torch.Tensor:
    return torch.full((1, 1, 2, 2), value)


def test_forward_noise_by_hand() -> None:
    # 0.8 * 2 + 0.6 * (-1) = 1.0
    assert torch.allclose(forward_noise(plane(2.0), plane(-1.0), A.view(1)), plane(1.0))


def test_forward_noise_takes_a_timestep_for_each_row() -> None:
    z = forward_noise(torch.ones(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), torch.tensor([0.25, 0.81]))
    assert torch.allclose(z.flatten(), torch.tensor([0.5, 0.9]))


def test_x0hat_undoes_forward_noise() -> None:
    # (1.0 - 0.6 * (-1)) / 0.8 = 2.0
    assert torch.allclose(x0hat(plane(1.0), plane(-1.0), A), plane(2.0))


def test_ddim_step_by_hand() -> None:
    # x0hat = 2; to a_prev = 0.36: 0.6 * 2 + 0.8 * (-1) = 0.4
    assert torch.allclose(ddim_step(plane(1.0), plane(-1.0), A, torch.tensor(0.36)), plane(0.4))


class FakeKit:
    """eps(z, t, c) = the mean of c, everywhere: branches with known predictions."""

    sampling = Sampling()

    def eps(self, z: torch.Tensor, t: torch.Tensor, c: Conditioning) -> torch.Tensor:
        return c.states.mean(dim=(1, 2)).view(-1, 1, 1, 1).expand_as(z)


def branch(values: list[float], scale: float) -> Condition:
    return Condition(Conditioning(torch.tensor(values).view(-1, 1, 1).expand(-1, 3, 4)), scale)


def test_classifier_free_guidance_by_hand() -> None:
    # e0 = 1, e_text = 3, g = 2: 1 + 2 * (3 - 1) = 5; the second row has its own condition: 1 + 2 *
    # (2 - 1) = 3
    e = compose(
        FakeKit(),
        torch.zeros(2, 1, 1, 1),
        torch.tensor(0),
        Conditioning(torch.ones(1, 3, 4)),
        [branch([3.0, 2.0], 2.0)],
    )  # type: ignore[arg-type]
    assert torch.allclose(e.flatten(), torch.tensor([5.0, 3.0]))


def test_compositional_guidance_by_hand() -> None:
    # 1 + 3 * (3 - 1) + 3 * (0 - 1) = 4
    conditions = [branch([3.0], 3.0), branch([0.0], 3.0)]
    e = compose(
        FakeKit(),
        torch.zeros(1, 1, 1, 1),
        torch.tensor(0),
        Conditioning(torch.ones(1, 3, 4)),
        conditions,
    )  # type: ignore[arg-type]
    assert torch.allclose(e.flatten(), torch.tensor([4.0]))


def image_with_normalised_pixels(*values: float) -> torch.Tensor:
    """[1, 3, 1, n] in [-1, 1] whose pixels are `values` after the classifier's normalisation."""
    mean = torch.tensor(MEAN).view(1, 3, 1, 1)
    std = torch.tensor(STD).view(1, 3, 1, 1)
    return (torch.tensor(values).view(1, 1, 1, -1) * std + mean) * 2 - 1


def test_bn_loss_by_hand() -> None:
    # pixels 0 and 2 in all three channels: mu = 1, var = 1 (biased). Against mean 0 and variance 3:
    # ||(1,1,1)|| + ||(-2,-2,-2)|| = sqrt(3) + 2 sqrt(3) = 3 sqrt(3). Logits are equal, so CE = ln
    # 4.
    teacher = as_teacher(bn_model(0.0, 3.0))
    loss = classifier_loss(
        teacher,
        image_with_normalised_pixels(0, 2),
        torch.tensor([1]),
        classifier_weight=0.5,
        bn_weight=0.1,
    )
    assert loss.item() == pytest.approx(0.5 * math.log(4) + 0.1 * 3 * math.sqrt(3), rel=1e-5)


def test_bn_loss_of_an_image_does_not_depend_on_its_batch() -> None:
    teacher = as_teacher(bn_model(0.2, 2.0))
    image = image_with_normalised_pixels(0, 2)
    second_image = image_with_normalised_pixels(1, -1)
    alone = classifier_loss(teacher, image, torch.tensor([0]), 1.0, 1.0)
    together = classifier_loss(
        teacher, torch.cat([image, second_image]), torch.tensor([0, 3]), 1.0, 1.0
    )
    assert torch.allclose(alone, together[:1])


def test_bn_loss_of_a_unit_by_hand() -> None:
    # pixels 0, 2, 1, -1 of both images together: mu = 0.5, var = 1.25. Against mean -0.5 and
    # variance 1: ||(1,1,1)|| + ||(0.25,0.25,0.25)|| = 1.25 sqrt(3), the same for both images.
    images = torch.cat([image_with_normalised_pixels(0, 2), image_with_normalised_pixels(1, -1)])
    loss = classifier_loss(
        as_teacher(bn_model(-0.5, 1.0)),
        images,
        torch.tensor([0, 3]),
        0.0,
        1.0,
        bn_statistics="unit",
    )
    assert torch.allclose(loss, torch.full((2,), 1.25 * math.sqrt(3)), rtol=1e-5)


def test_bn_loss_has_a_finite_gradient_where_it_is_zero() -> None:
    image = image_with_normalised_pixels(1, 1).requires_grad_()
    loss = classifier_loss(as_teacher(bn_model(1.0, 0.0)), image, torch.tensor([0]), 0.0, 1.0)
    (gradient,) = torch.autograd.grad(loss.sum(), image)
    assert torch.isfinite(gradient).all()


def test_a_model_without_batchnorm_has_no_bn_loss() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    images = image_with_normalised_pixels(0, 2)
    labels = torch.tensor([1])
    assert torch.equal(
        classifier_loss(as_teacher(model), images, labels, 1, 0),
        classifier_loss(as_teacher(model), images, labels, 1, 9),
    )


def test_guide_by_hand_and_its_sign() -> None:
    # L = z^2 / 2 at z = 3: grad = 3; e = 1: 1 + 2 * 0.6 * 3 = 4.6
    z = plane(3.0).requires_grad_()
    e = guide(z, plane(1.0), A, (z**2 / 2).sum(dim=(1, 2, 3)), scale=2.0)
    assert torch.allclose(e, plane(4.6))
    # x0hat falls from (3 - 0.6) / 0.8 to (3 - 2.76) / 0.8: L at x0hat falls, it would rise with the
    # papers' minus
    before = x0hat(z, plane(1.0), A)
    after = x0hat(z, e, A)
    assert after.abs().max() < before.abs().max()


@pytest.fixture(scope="module")
def exact(tiny_kit) -> Kit:  # type: ignore[no-untyped-def]
    return load_kit(tiny_kit, dtype=torch.float64)


@pytest.mark.slow
def test_guidance_gradient_against_finite_differences(exact: Kit) -> None:
    """Through UNet, x0hat, VAE decoder, normalisation and classifier, in float64."""
    from osfl.models.classifiers import build_classifier

    torch.manual_seed(1)
    teacher = as_teacher(build_classifier("resnet18", 10, small_stem=True).double())
    t = torch.tensor(500)
    labels = torch.tensor([3, 7])
    c0 = exact.text([""])
    c = exact.text(["an image of one", "an image of two"])
    conditions = [Condition(c, 3.0)]
    a_t = exact.alphas_cumprod[500].double()

    def loss(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = compose(exact, z, t, c0, conditions)
        return e, classifier_loss(teacher, exact.decode(x0hat(z, e, a_t)), labels, 1.0, 0.1)

    z = (0.3 * torch.randn(2, 4, 8, 8, dtype=torch.float64)).requires_grad_()
    e, value = loss(z)
    gradient = (guide(z, e, a_t, value, scale=1.0) - e.detach()) / (1 - a_t).sqrt()
    with torch.no_grad():
        for row in range(2):
            direction = torch.zeros_like(z)
            direction[row] = torch.randn_like(z[row])
            h = 1e-8  # smaller than the distance to most kinks of the ReLUs
            numeric = (loss(z + h * direction)[1].sum() - loss(z - h * direction)[1].sum()) / (
                2 * h
            )
            assert (gradient * direction).sum().item() == pytest.approx(numeric.item(), rel=1e-4)


@pytest.mark.slow
def test_guided_loss_falls_along_the_whole_sampling(exact: Kit) -> None:
    """One seed, with and without guidance.

    The classifier's loss at the end must be lower with it, and higher with the papers' minus.
    """
    from osfl.models.classifiers import build_classifier

    torch.manual_seed(2)
    teacher = as_teacher(build_classifier("resnet18", 10, small_stem=True).double())
    labels = torch.tensor([1, 2])
    c0 = exact.text([""])
    start = torch.randn(2, 4, 8, 8, dtype=torch.float64)

    def final_loss(scale: float) -> float:
        def predict(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            z = z.detach().requires_grad_()
            e = compose(exact, z, t, c0, [])
            a_t = exact.alphas_cumprod[t].double()
            value = classifier_loss(teacher, exact.decode(x0hat(z, e, a_t)), labels, 1.0, 0.0)
            return guide(z, e, a_t, value, scale)

        z = ddim(exact, start, 6, predict)
        return classifier_loss(teacher, exact.decode(z), labels, 1.0, 0.0).mean().item()

    assert final_loss(3.0) < final_loss(0.0) < final_loss(-3.0)


class Constant(nn.Module):
    """A classifier with the same probabilities for every image."""

    def __init__(self, *probabilities: float):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), -1)


TEACHERS = {"a": Constant(0.6, 0.3, 0.1), "b": Constant(0.2, 0.2, 0.6)}
PIXELS = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)


def test_mean_teacher_by_hand() -> None:
    plain = mean_teacher(
        TEACHERS, {"a": [0, 1, 2], "b": [0, 1, 2]}, PIXELS, torch.device("cpu"), plain=True
    )
    assert torch.allclose(plain[0], torch.tensor([0.4, 0.25, 0.35]))
    # a holds classes 0 and 1, b holds 1 and 2: class 0 is 0.6 (a), class 1 is (0.3 + 0.2) / 2,
    # class 2 is 0.6 (b); sum 1.45
    class_mean = mean_teacher(
        TEACHERS, {"a": [0, 1], "b": [1, 2]}, PIXELS, torch.device("cpu"), plain=False
    )
    assert torch.allclose(class_mean[1], torch.tensor([0.6, 0.25, 0.6]) / 1.45)


def test_own_teacher_by_hand() -> None:
    target = specific_teacher(TEACHERS, ("b", "a"), PIXELS, torch.device("cpu"))
    assert torch.allclose(target, torch.tensor([[0.2, 0.2, 0.6], [0.6, 0.3, 0.1]]))


def test_distillation_term_by_hand() -> None:
    """One SGD step on a bias.

    The gradient of CE + w KL(teacher || softmax) is (p - onehot) + w (p - teacher).
    """
    from osfl.models.training import ExtraLoss, fit

    model = Constant(0.5, 0.25, 0.25)
    before = model.logits.detach().clone()
    settings = plain_classifier(epochs=1, batch_size=2, lr=1.0)
    teacher = torch.tensor([[0.1, 0.8, 0.1]] * 2)
    fit(
        model,
        PIXELS,
        torch.tensor([0, 0]),
        settings,
        0,
        torch.device("cpu"),
        extra=ExtraLoss(teacher, 2.0),
    )
    p = torch.tensor([0.5, 0.25, 0.25])
    expected = (p - torch.tensor([1.0, 0, 0])) + 2.0 * (p - teacher[0])
    assert torch.allclose(before - model.logits.detach(), expected, atol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_rounded_weights_are_within_half_a_step(bits: int, most: int) -> None:
    state = {"w": torch.randn(5, 3, 3, 3), "b": torch.randn(5), "n": torch.tensor(7)}
    packed = quantize(state, bits)
    assert packed["w"].numel() == (135 if bits == 8 else 68)  # one or two to a byte
    back = dequantize(packed)
    assert torch.equal(back["b"], state["b"])
    assert torch.equal(back["n"], state["n"])
    step = state["w"].flatten(1).abs().amax(dim=1) / most
    assert ((back["w"] - state["w"]).abs().flatten(1).amax(dim=1) <= step / 2 * 1.001).all()


def test_ddim_on_a_known_distribution() -> None:
    """With the exact noise prediction of a point mass at 5, every start ends at 5 (up to the
    schedule's last a_t).
    """
    alphas_cumprod = torch.linspace(0.999, 0.01, 1000, dtype=torch.float64)
    scheduler = SimpleNamespace(
        timesteps=torch.arange(981, 0, -20),
        set_timesteps=lambda n: None,
        config=FrozenDict({"num_train_timesteps": 1000}),
        final_alpha_cumprod=torch.tensor(1.0),
    )
    kit = SimpleNamespace(
        sampling=Sampling(),
        scheduler=scheduler,
        alphas_cumprod=alphas_cumprod,
        device=torch.device("cpu"),
    )
    z = ddim(
        kit,
        torch.randn(3, 1, 2, 2, dtype=torch.float64),
        50,
        lambda z, t: (z - alphas_cumprod[t].sqrt() * 5) / (1 - alphas_cumprod[t]).sqrt(),
    )  # type: ignore[arg-type]
    assert torch.allclose(z, torch.full_like(z, 5.0))
