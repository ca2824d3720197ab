"""votes: which prompt is nearest, who wins, with what probability, and what is drawn of it."""

import itertools
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.privacy.noisy_argmax import win_probabilities
from client_app.app import app, client_settings
from client_app.methods import votes as client_half
from client_app.privacy.bernoulli import bernoulli_exp
from client_app.privacy.ledger import Ledger
from client_app.privacy.mechanisms import permute_and_flip
from osfl.config import ConfigError, NodeConfig, parse_run_config
from osfl.models.diffusion import Kit
from osfl.payload.kinds import Votes
from osfl.payload.wire import PayloadError
from server_app.app import run_job
from server_app.expected import check_plausible
from server_app.methods import votes
from tests.helpers import analytic
from tests.helpers.analytic import CLASSES, TIMESTEPS, analytic_kit, numbers
from tests.helpers.analytic_clients import SHAPE, generator, images, job_of
from tests.helpers.composition import CPU, PLAN, config_of, prompts_of, server
from tests.helpers.loop_grid import LoopGrid
from tests.helpers.settings import quick
from tests.helpers.whole_runs import metrics, nodes

DRAWN = 40_000


def standard_errors(seen: float, expected: float) -> float:
    """Return how far a share of `DRAWN` draws is from a probability."""
    return abs(seen - expected) / math.sqrt(expected * (1 - expected) / DRAWN + 1e-12)


# ---- The mechanism ----


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(3, 10), Fraction(1), Fraction(5, 2)])
def test_chance_is_exp_of_minus_gamma(gamma: Fraction) -> None:
    below = random.Random(1).randrange
    share = sum(bernoulli_exp(gamma, below) for _ in range(DRAWN)) / DRAWN
    if gamma == 0:
        assert share == 1
    else:
        assert standard_errors(share, math.exp(-gamma)) < 4


@pytest.mark.parametrize(
    ("counts", "epsilon"), [((3, 1, 0), 1.0), ((2, 2, 1), 0.5), ((5, 4, 4, 0), 2.0), ((7, 0), 0.1)]
)
def test_winners_come_as_often_as_permute_and_flip_says(
    counts: tuple[int, ...], epsilon: float
) -> None:
    below = random.Random(2).randrange
    wins = Counter(permute_and_flip(counts, epsilon, below) for _ in range(DRAWN))
    expected = win_probabilities(counts, epsilon)
    assert sum(expected) == pytest.approx(1)
    for candidate, probability in enumerate(expected):
        assert standard_errors(wins[candidate] / DRAWN, probability) < 4


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_one_image_changes_no_probability_by_more_than_its_bound(epsilon: float) -> None:
    """Elections of three candidates and up to five images: one that votes for another changes a
    probability by exp(epsilon) at most, one that comes or goes by exp(epsilon / 2).
    """
    elections = [(a, b, c) for a in range(6) for b in range(6 - a) for c in range(6 - a - b)]
    compared = 0
    for election in elections:
        for alternative in elections:
            changes = [there - here for here, there in zip(election, alternative, strict=True)]
            bound = {(-1, 0, 1): epsilon, (0, 0, 1): epsilon / 2}.get(tuple(sorted(changes)))
            if bound is not None:
                pairs = zip(
                    win_probabilities(election, epsilon),
                    win_probabilities(alternative, epsilon),
                    strict=True,
                )
                assert all(abs(math.log(p / q)) <= bound + 1e-9 for p, q in pairs)
                compared += 1
    assert compared > 100


def test_chance_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from a seed, which the server knows."""
    torch.manual_seed(0)
    random.seed(0)
    first = [permute_and_flip((1, 0), 0.01) for _ in range(200)]
    torch.manual_seed(0)
    random.seed(0)
    assert [permute_and_flip((1, 0), 0.01) for _ in range(200)] != first


# ---- The client ----


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    test_kit = analytic_kit()
    monkeypatch.setattr(client_half, "load_kit", lambda *_: test_kit)
    return test_kit


TWO = {
    "method": "votes",
    "votes__candidates": "x, image",
    "votes__draws": 3,
    "votes__batch_size": 2,
}


def test_errors_are_the_denoisers_at_the_middles_of_the_schedules_parts(kit: Kit) -> None:
    """Three draws: t = 166, 500 and 833. Of five images and two prompts, whatever the batches."""
    data = images(3, 1, 0, 3, 2)
    job = job_of(data, **TWO)
    latents, _ = client_half.posteriors(kit, data, job)
    errors = client_half.candidate_errors(kit, latents, data.labels, job)
    source = generator(job.config.seed, "votes")
    mean, _ = analytic.encode(data.pixels.numpy())
    a = analytic.alphas_cumprod()
    expected = np.zeros((5, 2))
    for t in (166, 500, 833):
        noise = numbers(torch.randn(SHAPE, generator=source))
        for row, label in enumerate(data.labels.tolist()):
            z = np.sqrt(a[t]) * mean[row] + np.sqrt(1 - a[t]) * noise
            for column, word in enumerate(("x", "image")):
                c = numbers(kit.text([f"a {word} of a {CLASSES[label]}"]))
                e = analytic.eps(z[None], a[t], analytic.mu(c))[0]
                expected[row, column] += ((noise - e) ** 2).mean() / 3
    assert TIMESTEPS == 1000
    np.testing.assert_allclose(numbers(errors), expected, rtol=1e-4)
    assert np.abs(expected[:, 0] - expected[:, 1]).min() > 1e-4
    # One image's vote depends on no other image
    alone = client_half.candidate_errors(kit, latents[3:4], data.labels[3:4], job)
    torch.testing.assert_close(alone[0], errors[3])


def elections(
    monkeypatch: pytest.MonkeyPatch, kit: Kit, *, votes: Sequence[int]
) -> Callable[..., Any]:
    """Makes the payload of images that vote so; three of `zero` and four of `two`."""

    def errors(kit: Kit, latents: torch.Tensor, labels: torch.Tensor, job: Any) -> torch.Tensor:
        return 1 - torch.nn.functional.one_hot(torch.tensor(votes), 3).float()

    monkeypatch.setattr(client_half, "candidate_errors", errors)
    settings = {**TWO, "votes__candidates": "x, image, style"}

    def made(**more: object) -> Votes:
        return client_half.make_payload(job_of(images(0, 2, 0, 2, 0, 2, 2), **settings, **more))

    return made


def test_the_candidate_with_the_most_votes_wins(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """zero: 1, 1, 2; two: a tie of 0 and 2, of which the first. All together: 3 of 7 for 2."""
    payload = elections(monkeypatch, kit, votes=(1, 0, 1, 2, 2, 2, 0))
    by_class = payload()
    assert by_class.classes == ("zero", "two")
    assert (by_class.winners.tolist(), by_class.winners.dtype) == ([1, 0], torch.uint8)
    assert payload(votes__granularity="client").winners.tolist() == [2, 2]


def test_with_an_epsilon_the_mechanism_elects(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each class, or once for all: every further election would cost as much again."""
    asked: list[tuple[list[int], float]] = []

    def mechanism(counts: list[int], epsilon: float) -> int:
        asked.append((counts, epsilon))
        return 1

    monkeypatch.setattr(client_half, "permute_and_flip", mechanism)
    payload = elections(monkeypatch, kit, votes=(1, 0, 1, 2, 2, 2, 0))
    assert payload(epsilon=0.5).winners.tolist() == [1, 1]
    assert asked == [([0, 2, 1], 0.5), ([2, 0, 2], 0.5)]
    asked.clear()
    assert payload(epsilon=2.0, votes__granularity="client").winners.tolist() == [1, 1]
    assert asked == [([2, 2, 3], 2.0)]


# ---- What a site asks for ----


@pytest.mark.parametrize(
    ("run", "site", "expected"), [(0, 0, 0), (2, 0, 2), (0, 1, 1), (2, 1, 1), (1, 2, 1)]
)
def test_the_lower_epsilon_holds(run: float, site: float, expected: float) -> None:
    config = parse_run_config(quick(method="votes", epsilon=float(run)))
    node = NodeConfig(partition_id=0, num_partitions=2, epsilon=float(site))
    assert client_settings(config, node)[0].epsilon == expected


@pytest.mark.parametrize("method", ["espresso", "fedcgs", "prompts-domain", "fedavg"])
def test_a_site_that_asks_for_privacy_sends_nothing_without_it(method: str, tiny_kit: Path) -> None:
    site = NodeConfig(partition_id=0, num_partitions=2, epsilon=1.0)
    config = parse_run_config(quick(method=method, kit=str(tiny_kit)))
    # Whatever the message is: a node may have been told so after it joined
    with pytest.raises(ConfigError, match=rf"node-config epsilon = 1: .*'{method}' provides none"):
        client_settings(config, site)
    for private in ("votes", "prompts-only"):
        client_settings(parse_run_config(quick(method=private, kit=str(tiny_kit))), site)


def test_a_run_cannot_ask_for_what_its_method_does_not_give() -> None:
    with pytest.raises(
        ConfigError, match=r"epsilon = 1: method 'fgl' gives no .* does: feddeo, fedlmg, "
    ):
        parse_run_config(quick(method="fgl", epsilon=1.0))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"votes__candidates": "photo"}, "1 names; must be 2 to 256"),
        ({"votes__candidates": ", ".join(f"a{k}" for k in range(257))}, "257 names; must be 2"),
        ({"votes__candidates": "photo, photo"}, "a name is listed twice"),
        ({"votes__candidates": "photo, a/b"}, "'a/b' .* part of a prompt"),
        ({"votes__prompt": "a {class}"}, "votes.prompt = 'a {class}': must contain"),
    ],
)
def test_candidates_are_names(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_run_config(quick(method="votes", **settings))


def test_a_ledger_adds_up_what_is_given_away_and_stops_at_the_total(tmp_path: Path) -> None:
    site = Ledger(tmp_path, "a")
    assert site.spend("one", "k", 1.0, 1e-5) == (1.0, 1e-5)
    assert site.spend("two", "k", 0.5, 0.0, 1.5) == (1.5, 1e-5)
    assert Ledger(tmp_path, "b").spend("one", "k", 0.25, 0.0, 1.0) == (0.25, 0)
    with pytest.raises(ConfigError, match=r"epsilon-total = 1.5: with job 'three'"):
        site.spend("three", "k", 0.1, 0.0, 1.5)
    assert site.spend("three", "k", 0.1, 2e-5, 2.0) == (1.6, 3e-5)
    assert [draw.job for draw in site.draws()] == ["one", "two", "three"]
    assert site.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_payload_that_is_asked_for_again_is_the_same_one(
    home: Path, tiny_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has lost its run, after it had acknowledged. Another seed is another draw."""
    elections = itertools.cycle(range(6))
    monkeypatch.setattr(client_half, "permute_and_flip", lambda *_: next(elections))
    config = quick(method="votes", kit=str(tiny_kit), epsilon=1.0)

    def sent() -> list[bytes]:
        run_job(LoopGrid(app, config, nodes(2)), parse_run_config(config), "job")
        files = sorted((home / "runs" / "job" / "payloads").glob("*.pb"))
        payloads = [file.read_bytes() for file in files]
        shutil.rmtree(home / "runs" / "job")
        return payloads

    first = sent()
    assert sent() == first
    ledger = Ledger(home / "state", "client-0")
    assert len(ledger.draws()) == 1
    config["seed"] = 5
    assert sent() != first
    assert len(ledger.draws()) == 2


# ---- The server ----


def test_images_are_of_the_winner(tiny_kit: Path, composed: Any) -> None:
    """a's three won 1 and eight 0; b's eight won 2."""
    config = config_of(tiny_kit, votes__candidates="sketch, old_photo, neon", votes__guidance=4.5)
    payloads = {
        "a": Votes(("three", "eight"), torch.tensor([1, 0], dtype=torch.uint8)),
        "b": Votes(("eight",), torch.tensor([2], dtype=torch.uint8)),
    }
    votes.sampler(server(tiny_kit, config), CPU, payloads)(PLAN)
    c0, (only,) = composed[0]
    texts = ("a old photo of a three", "a sketch of a eight", "a neon of a eight")
    torch.testing.assert_close(only.c, prompts_of(tiny_kit, *texts))
    assert torch.equal(c0, prompts_of(tiny_kit, ""))
    assert only.scale == 4.5


def test_a_vote_without_candidate_is_refused() -> None:
    config = parse_run_config(quick(method="votes", votes__candidates="photo, sketch, neon"))
    sound = Votes(("three",), torch.tensor([2], dtype=torch.uint8))
    check_plausible(sound, "a", config)
    with pytest.raises(PayloadError, match="winners: candidate 3; the run has 3, from 0"):
        check_plausible(replace(sound, winners=sound.winners + 1), "a", config)


@pytest.mark.slow
def test_a_run_says_what_it_guarantees(home: Path, tiny_kit: Path) -> None:
    """One site lowers the run's 2 to 0.5."""
    config = quick(method="votes", kit=str(tiny_kit), epsilon=2.0)
    sites = [nodes(2)[0], {**nodes(2)[1], "epsilon": 0.5}]
    run_job(LoopGrid(app, config, sites), parse_run_config(config), "job")
    results = metrics(home)
    assert [client["epsilon"] for client in results["clients"].values()] == [2.0, 0.5]
    page = (home / "runs" / "job" / "report.html").read_text()
    assert "differentially private for the replacement of one image, with ε = 0.5 to 2." in page
    left_out = {**config, "num-clients": 3, "held-out": "client-2"}
    run_job(LoopGrid(app, left_out, nodes(3)), parse_run_config(left_out), "held-out")
    page = (home / "runs" / "held-out" / "report.html").read_text()
    # Who sends no payload gives nothing away
    assert "for the replacement of one image, with ε = 2." in page
    config["epsilon"] = 0.0
    for number, site in enumerate((nodes(2), sites)):
        run_job(LoopGrid(app, config, site), parse_run_config(config), f"job-{number}")
        page = (home / "runs" / f"job-{number}" / "report.html").read_text()
        some = " for some clients" * number
        assert f"There is no guarantee of differential privacy{some}." in page
