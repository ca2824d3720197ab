"""benchmarks/codec_trials.py: each coding by hand, and what a row says of it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import codec_trials
from benchmarks.clients import CLIENTS
from osfl.payloads import Descriptions, DomainVector
from osfl.prompts import DIGITS


def test_decibels_by_hand() -> None:
    """The square of the numbers is 100, of their errors 1."""
    exact = np.array([[6.0, 8.0]])
    assert codec_trials.decibels(exact, exact + np.array([[1.0, 0.0]])) == pytest.approx(20)


def test_residual_vector_quantisation_by_hand() -> None:
    """Nearest to (5, 0.5) is (4, 0), and to what is left (1, 0); to (0, 9) (0, 8), then (0, 1)."""
    books = [np.array([[4.0, 0.0], [0.0, 8.0]]), np.array([[1.0, 0.0], [0.0, 1.0], [-9.0, 0.0]])]
    size, arrived = codec_trials.in_steps(np.array([[5.0, 0.5], [0.0, 9.0]]), books)
    assert size == 4
    assert arrived.tolist() == [[5.0, 0.0], [0.0, 9.0]]


def test_codebooks_hold_what_the_stages_before_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures of two vectors lie on a line, of which each stage's 256 entries leave little."""
    monkeypatch.setattr(codec_trials, "STAGES", 2)
    public = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    books = codec_trials.codebooks(public)
    assert [book.shape for book in books] == [(256, 3)] * 2
    mixed = np.array([[0.25, 1.5, 0.0], [0.5, 1.0, 0.0]])
    _, by_one = codec_trials.in_steps(mixed, books[:1])
    _, by_all = codec_trials.in_steps(mixed, books)
    assert codec_trials.decibels(mixed, by_one) > 30
    assert codec_trials.decibels(mixed, by_all) > codec_trials.decibels(mixed, by_one) + 10
    # What is not between them stays away
    _, away = codec_trials.in_steps(np.array([[0.0, 0.0, 5.0]]), books)
    assert abs(away[0, 2]) < 1e-9


def test_the_entropy_of_steps_by_hand() -> None:
    """Half of 128 steps are 7, and half -7: a bit each, 16 bytes; two scales of two bytes."""
    numbers = np.array([[3.0] * 32 + [-3.0] * 32, [0.5] * 32 + [-0.5] * 32])
    assert codec_trials.shortest(numbers) == pytest.approx(16 + 4)


def test_a_rotation_spreads_a_single_large_number() -> None:
    """Alone in its block it takes all steps. Turned, all 64 are as large, and each is exact."""
    numbers = np.full((1, 64), 0.01)
    numbers[0, 5] = 1.0
    _, plain = codec_trials.in_four_bits(numbers)
    assert np.count_nonzero(plain) == 1
    single = np.zeros((1, 64))
    single[0, 5] = 8.0
    size, turned = codec_trials.rotated(single)
    # By float16's scales
    assert turned == pytest.approx(single, abs=8e-3)
    assert 2 < size <= 34


def test_components_that_hold_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_trials, "COMPONENTS", 1)
    public = np.array([[[1.0, 5.0], [2.0, 5.0]], [[3.0, 5.0], [7.0, 5.0]]])
    assert codec_trials.kept_by_components(np.array([[2.0, 0.0]]), public) == pytest.approx(100)
    assert codec_trials.kept_by_components(np.array([[3.0, 4.0]]), public) == pytest.approx(36)


def payloads(kind: str) -> dict[str, Descriptions | DomainVector]:
    """Of six clients; each class's numbers are its prompt's encoding and a little."""
    found: dict[str, Descriptions | DomainVector] = {}
    generator = torch.Generator().manual_seed(0)
    for client in CLIENTS:
        if kind == "whole":
            little = 0.01 * torch.randn(10, 4, 64, generator=generator)
            found[client] = Descriptions(DIGITS, 1 + little)
        else:
            found[client] = DomainVector(DIGITS, torch.randn(4, 64, generator=generator))
    return found


@pytest.mark.parametrize("kind", ["whole", "domain"])
def test_a_row_has_each_codings_bytes_and_errors(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its prompt's encoding a payload's difference is small, and its errors with it."""
    monkeypatch.setattr(codec_trials, "sent", lambda settings: payloads(kind))
    monkeypatch.setattr(codec_trials, "STAGES", 2)
    monkeypatch.setattr(codec_trials, "MIXTURES", 100)

    def encodings(kit: str, texts: tuple[str, ...], pooled: bool) -> np.ndarray:
        assert not pooled
        noise = np.random.default_rng(len(texts)).normal(size=(len(texts), 4, 64))
        return np.ones((len(texts), 4, 64)) + (0 if len(texts) == 10 else 0.1 * noise)

    monkeypatch.setattr(codec_trials, "encodings", encodings)
    name = "FedDEO description alone" if kind == "whole" else "domain-vector"
    row = codec_trials.line(name)
    vectors = 40 if kind == "whole" else 4
    assert row[""] == name
    assert row["2 bytes a vector"].startswith(f"{2 * vectors}, ")
    by_difference = row["int4, less the prompt's encoding"]
    if kind == "domain":
        assert by_difference == ""
        return
    # A hundredth of the numbers, in as many steps: some 40 dB more
    plain = float(row["int4"].split(", ")[1].removesuffix(" dB"))
    assert math.isclose(
        float(by_difference.split(", ")[1].removesuffix(" dB")), plain + 30, abs_tol=12
    )


def test_what_the_server_knows_is_public() -> None:
    """Each class's prompt, and each class in each style of which clients may vote."""
    config = codec_trials.config_of(codec_trials.settings_of("domain-vector", 0))
    prompts = codec_trials.prompts_of(config)
    captions = codec_trials.captions_of(config)
    assert len(prompts) == 10
    assert all(name in prompt for name, prompt in zip(DIGITS, prompts, strict=True))
    assert captions[-10:] == prompts
    assert len(captions) == 10 * len(config.votes.words) + 10
    assert len(set(captions)) == len(captions)
