"""benchmarks/codec_trials.py: each coding by hand, and what a row says of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from benchmarks import codec_trials
from benchmarks.clients import CLIENTS
from osfl.payload.kinds import Descriptions, DomainVector, Encodings
from osfl.util.prompts import DIGITS


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


def test_a_rotation_spreads_a_single_large_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 alone in its block becomes a row of Hadamard's matrix, whose numbers are 1 or -1, or that
    row with the other sign; and itself when it is turned back.
    """
    seen: list[np.ndarray] = []

    def kept(numbers: np.ndarray) -> tuple[int, np.ndarray]:
        seen.append(numbers)
        return 7, numbers

    monkeypatch.setattr(codec_trials, "in_four_bits", kept)
    size, turned = codec_trials.rotated(8 * np.eye(64))
    assert size == 7
    assert turned == pytest.approx(8 * np.eye(64))
    signs = (seen[0] * hadamard(64)).mean(axis=1)
    assert set(signs) == {-1, 1}
    assert seen[0] == pytest.approx(signs[:, None] * hadamard(64))


def test_components_that_hold_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_trials, "COMPONENTS", 1)
    public = np.array([[[1.0, 5.0], [2.0, 5.0]], [[3.0, 5.0], [7.0, 5.0]]])
    assert codec_trials.kept_by_components(np.array([[2.0, 0.0]]), public) == pytest.approx(100)
    assert codec_trials.kept_by_components(np.array([[3.0, 4.0]]), public) == pytest.approx(36)


Sent = dict[str, Descriptions | Encodings | DomainVector]
SHAPES = {"FedDEO description alone": (10, 4, 64), "OSCAR-pooled": (10, 64)}


def payloads(system: str) -> Sent:
    """Of six clients; each class's numbers are its prompt's encoding and a little."""
    found: Sent = {}
    generator = torch.Generator().manual_seed(0)
    for client in CLIENTS:
        if shape := SHAPES.get(system):
            kind = Descriptions if len(shape) == 3 else Encodings
            found[client] = kind(DIGITS, 1 + 0.01 * torch.randn(*shape, generator=generator))
        else:
            found[client] = DomainVector(DIGITS, torch.randn(4, 64, generator=generator))
    return found


@pytest.mark.parametrize("system", [*SHAPES, "domain-vector"])
def test_a_row_has_each_codings_bytes_and_errors(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near its prompt's encoding a payload's difference is small, and its errors with it."""
    monkeypatch.setattr(codec_trials, "sent", lambda settings: payloads(system))
    monkeypatch.setattr(codec_trials, "STAGES", 2)
    monkeypatch.setattr(codec_trials, "MIXTURES", 300)
    monkeypatch.setattr(codec_trials, "TABLES", tmp_path)
    monkeypatch.setattr("sys.argv", ["codec_trials", system])

    def encodings(kit: str, texts: tuple[str, ...], pooled: bool) -> np.ndarray:
        assert pooled == (system == "OSCAR-pooled")
        shape = (len(texts), 64) if pooled else (len(texts), 4, 64)
        noise = np.random.default_rng(len(texts)).normal(size=shape)
        return np.ones(shape) + (0 if len(texts) == 10 else 0.1 * noise)

    monkeypatch.setattr(codec_trials, "encodings", encodings)
    codec_trials.main()
    (row,) = json.loads((tmp_path / "codec-trials.json").read_text())["rows"]
    assert row[""] == system
    vectors = {"FedDEO description alone": 40, "OSCAR-pooled": 10, "domain-vector": 4}[system]
    exact = np.stack([codec_trials.numbers_of(sent) for sent in payloads(system).values()])
    assert exact.shape == (6, vectors, 64)
    entropy = np.mean([codec_trials.shortest(one) for one in exact])
    assert row["int4, by its entropy"] == f"{entropy:.0f} B"
    assert row["2 bytes a vector"].startswith(f"{2 * vectors} B, ")
    plain = decibels_in(row["int4"])
    codings = {"int4": codec_trials.in_four_bits, "int4, rotated": codec_trials.rotated}
    for coding, code in codings.items():
        arrived = np.stack([code(one)[1] for one in exact])
        expected = 10 * np.log10((exact**2).sum() / ((exact - arrived) ** 2).sum())
        assert decibels_in(row[coding]) == pytest.approx(expected, abs=0.06)
    if system == "domain-vector":
        assert row["int4, less the prompt's encoding"] == ""
        # A random direction has a quarter of its square in 16 of 64
        assert float(row["16 of 64 components keep (%)"]) == pytest.approx(25, abs=8)
        return
    # A seventh of what is left, three hundredths, in place of a seventh of one
    assert decibels_in(row["int4, less the prompt's encoding"]) == pytest.approx(plain + 28, abs=6)


def decibels_in(cell: str) -> float:
    return float(cell.split(" B, ")[1].removesuffix(" dB"))


def test_what_the_server_knows_is_public() -> None:
    """Each class's prompt, and each class in each style of which clients may vote."""
    config = codec_trials.config_of(codec_trials.settings_of("domain-vector", 0))
    prompts = config.prompts(DIGITS)
    captions = codec_trials.captions_of(config)
    assert len(prompts) == 10
    assert all(name in prompt for name, prompt in zip(DIGITS, prompts, strict=True))
    assert captions[-10:] == tuple(prompts)
    assert len(captions) == 10 * len(config.votes.words) + 10
    assert len(set(captions)) == len(captions)
