"""A head on frozen features as the teacher of a mixed run's images, by hand."""

import math

import torch
from torch import nn

from osfl.models.training import Distillation, ExtraLoss, fit
from server_app.distillation import head_distillation
from tests.helpers.settings import plain_classifier


def softmax(logits: list[float], temperature: float) -> list[float]:
    powers = [math.exp(logit / temperature) for logit in logits]
    return [power / sum(powers) for power in powers]


class Head(nn.Module):
    """Logits (s, 0, -s) for an image whose first pixel has the value s / 10."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raw = images[:, 0, 0, 0]
        return torch.stack([raw, torch.zeros_like(raw), -raw], dim=1)


def test_the_teacher_is_a_softmax_at_a_temperature() -> None:
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    pixels[1] = 200
    head = Head()
    logits = [row.tolist() for row in _logits(head, pixels)]
    term = head_distillation(head, pixels, torch.device("cpu"), temperature=4.0, weight=0.5)
    assert (term.temperature, term.weight) == (4.0, 0.5)
    for row, expected in zip(term.teacher, logits, strict=True):
        assert torch.allclose(row, torch.tensor(softmax(expected, 4.0)), atol=1e-6)


def _logits(head: Head, pixels: torch.Tensor) -> torch.Tensor:
    from osfl.models.classifiers import compute_logits

    return compute_logits(head, pixels, torch.device("cpu"))


def test_the_term_is_t_squared_times_the_divergence() -> None:
    """w T^2 KL(p_T || q_T), a mean over the batch; a row of zeros adds nothing."""
    teacher = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 0.0], [0.1, 0.1, 0.8]])
    logits = [[1.0, 0.5, -2.0], [3.0, 0.0, 0.0]]
    term = Distillation(teacher, weight=0.25, temperature=3.0)
    expected = 0.0
    for p, z in zip(teacher[[2, 1]].tolist(), logits, strict=True):
        q = softmax(z, 3.0)
        expected += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a)
    value = term.loss(torch.tensor([2, 1]), torch.tensor(logits))
    assert math.isclose(value.item(), 0.25 * 9 * expected / 2, rel_tol=1e-5)


def test_a_training_adds_every_term_to_its_cross_entropy() -> None:
    """The first loss of a training, before any step, by hand."""
    losses: list[float] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    model.num_classes = 2  # type: ignore[assignment]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pixels = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 0, 1])
    one_hot = torch.eye(2)[labels]
    terms = (Distillation(one_hot, 0.5), Distillation(1 - one_hot, 2.0, 2.0))
    config = plain_classifier(epochs=1, batch_size=4, augmentation="none", label_smoothing=0.0)

    def first_loss(*distillations: Distillation) -> float:
        model.load_state_dict(state)
        losses.clear()
        extra = ExtraLoss(distillations=distillations)
        fit(
            model, pixels, labels, config, 0, torch.device("cpu"), extra=extra, record=losses.append
        )
        return losses[0]

    plain = first_loss()
    # With one-hot targets at T = 1 the divergence is the cross-entropy
    assert math.isclose(first_loss(terms[0]), 1.5 * plain, rel_tol=1e-5)
    both = first_loss(*terms)
    assert math.isclose(both - 1.5 * plain, first_loss(terms[1]) - plain, rel_tol=1e-4)
    assert both > 1.5 * plain
