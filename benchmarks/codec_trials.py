"""Codings that `payload-codec` does not have; to benchmarks/tables/codec-trials.{md,json}.

python -m benchmarks.codec_trials                 # every system
python -m benchmarks.codec_trials domain-vector   # some; the table keeps its other rows

The payloads are benchmarks.main_table's of seed 0. Nothing is trained of what comes out: the table
has bytes, and how far the numbers are above their errors.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from scipy.linalg import hadamard
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.metrics import pairwise_distances_argmin

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import sent
from benchmarks.main_table import CODED, config_of, settings_of
from osfl.config import RunConfig
from osfl.kit.kits import find_kit
from osfl.models.encoders import load_text_encoder
from osfl.payload.codecs import BLOCK, pack, unpack
from osfl.payload.kinds import Descriptions, DomainVector, Encodings
from osfl.util.prompts import DIGITS, fill_prompt

SYSTEMS = (*CODED, "OSCAR-pooled")
# Of residual vector quantisation: a byte each
STAGES = 16
MIXTURES = 2_000
# Of the 64 numbers of a text encoding
COMPONENTS = 16


def numbers_of(payload: Descriptions | Encodings | DomainVector) -> np.ndarray:
    """What a payload holds for its classes, or its domain: [vectors, d]."""
    found = payload.domain if isinstance(payload, DomainVector) else payload.vectors
    return found.reshape(-1, found.shape[-1]).numpy()


@cache
def encodings(kit: str, texts: tuple[str, ...], pooled: bool) -> np.ndarray:
    """What the server can compute of texts by itself: [texts, tokens, d], or pooled [texts, d]."""
    text = load_text_encoder(find_kit(kit), torch.device("cpu"), torch.float32)
    found = text.pooled(texts) if pooled else text(texts)
    return found.numpy()


def captions_of(config: RunConfig) -> tuple[str, ...]:
    """Public ones: every class in every style of which `votes` may vote, and the prompts."""
    styles = itertools.product(config.votes.words, DIGITS)
    named = [fill_prompt(config.votes.prompt, {"domain": a, "class": b}) for a, b in styles]
    return (*named, *config.prompts(DIGITS))


def decibels(exact: np.ndarray, coded: np.ndarray) -> float:
    """How far the numbers' square is above that of their errors."""
    return 10 * math.log10(np.square(exact).sum() / np.square(exact - coded).sum())


def in_four_bits(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    """By int4, as it is: bytes, and what arrives."""
    flat = numbers.astype("<f4").reshape(-1)
    data = bytes(pack(flat, "int4"))
    return len(data), unpack(data, flat.size, "int4").reshape(numbers.shape)


def rotated(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    """int4 after random signs and Hadamard's matrix in every block (EDEN, arXiv 2108.08842)."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], BLOCK)
    turn = signs[:, None] * hadamard(BLOCK) / math.sqrt(BLOCK)
    size, arrived = in_four_bits(numbers.reshape(-1, BLOCK) @ turn)
    return size, (arrived @ turn.T).reshape(numbers.shape)


def in_steps(numbers: np.ndarray, books: Sequence[np.ndarray]) -> tuple[int, np.ndarray]:
    """Residual vector quantisation: in each stage the entry nearest to what is left, a byte."""
    arrived = np.zeros_like(numbers)
    for book in books:
        left = numbers - arrived
        arrived = arrived + book[pairwise_distances_argmin(left, book)]
    return len(books) * len(numbers), arrived


def codebooks(public: np.ndarray) -> list[np.ndarray]:
    """Learned from mixtures of public encodings, as means of captions are: a stage's entries are
    the means of what the stages before leave.
    """
    shares = np.random.default_rng(0).dirichlet(np.full(len(public), 0.1), MIXTURES)
    left = np.tensordot(shares, public, axes=1).reshape(-1, public.shape[-1])
    books = []
    for stage in range(STAGES):
        found = MiniBatchKMeans(256, batch_size=4096, n_init=1, random_state=stage).fit(left)
        books.append(found.cluster_centers_)
        left = left - found.cluster_centers_[found.labels_]
    return books


def shortest(numbers: np.ndarray) -> float:
    """Bytes of int4 by the best code for all steps alike: their entropy, and the scales."""
    blocks = numbers.reshape(-1, BLOCK)
    steps = np.rint(7 * blocks / np.abs(blocks).max(axis=1, keepdims=True))
    shares = np.unique(steps, return_counts=True)[1] / steps.size
    return -(shares * np.log2(shares)).sum() * steps.size / 8 + 2 * len(blocks)


def kept_by_components(numbers: np.ndarray, public: np.ndarray) -> float:
    """The share (%) of their square that the public vectors' first components hold."""
    vectors = public.reshape(-1, public.shape[-1])
    found = PCA(COMPONENTS).fit(vectors).components_
    return 100 * np.square(numbers @ found.T).sum() / np.square(numbers).sum()


def line(system: str) -> dict[str, str]:
    """A row of the table: bytes a client, the mean of six; decibels of them all together."""
    settings = settings_of(system, 0)
    config = config_of(settings)
    exact = np.stack([numbers_of(payload) for payload in sent(settings).values()])
    pooled = config.method == "oscar-pooled"
    public = encodings(config.kit, captions_of(config), pooled)
    books = codebooks(public)

    def by(code: Callable[[np.ndarray], tuple[int, np.ndarray]], known: np.ndarray) -> str:
        """Of what remains when the server's own numbers are taken off."""
        made = [code(one - known) for one in exact]
        arrived = np.stack([numbers for _, numbers in made]) + known
        size = np.mean([size for size, _ in made])
        return f"{size:.0f} B, {decibels(exact, arrived):.1f} dB"

    nothing = np.zeros_like(exact[0])
    prompts = encodings(config.kit, tuple(config.prompts(DIGITS)), pooled)
    prompts = prompts.reshape(-1, exact.shape[-1])
    # What is added to a prompt, or is one vector for a class, has no encoding beside it
    beside = prompts.shape == exact[0].shape
    return {
        "": system,
        "int4": by(in_four_bits, nothing),
        "int4, less the prompt's encoding": by(in_four_bits, prompts) if beside else "",
        "int4, rotated": by(rotated, nothing),
        "int4, by its entropy": f"{np.mean([shortest(one) for one in exact]):.0f} B",
        f"{STAGES} bytes a vector": by(lambda numbers: in_steps(numbers, books), nothing),
        f"{COMPONENTS} of {exact.shape[-1]} components keep (%)": (
            f"{kept_by_components(exact.reshape(-1, exact.shape[-1]), public):.0f}"
        ),
    }


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    parser.add_argument("systems", nargs="*", help=f"some of {listed(SYSTEMS)}; none: all")
    given = parser.parse_args()
    systems = some_of(given.systems, SYSTEMS, parser)
    about = (
        "Bytes of a client's numbers for the digits' ten classes, and how far they are above their "
        "errors, by other codings than payload-codec's: the difference to what the server's text "
        "encoder makes of the class's prompt; random signs and Hadamard's rotation in blocks of "
        f"{BLOCK}, as EDEN begins; the entropy of int4's steps, which bounds every code that is "
        f"the same for all of them; residual vector quantisation in {STAGES} stages, and principal "
        "components, both learned from the encodings of public captions. The payloads of "
        "benchmarks.main_table, seed 0. Command: `python -m benchmarks.codec_trials`."
    )
    for system in systems:
        lines = with_others([line(system)], TABLES / "codec-trials.json", about, SYSTEMS)
        write_table(TABLES / "codec-trials", lines, about)


if __name__ == "__main__":
    main()
