"""benchmarks/harness.py and benchmarks/federation.py: rows, cells, captions and clients' images."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.federation import client_images
from benchmarks.harness import Experiment, command_line, some_of, write_table

ORDER = ("FGL", "OSCAR, pooled", "Espresso")
EXPERIMENT = Experiment("benchmarks/speed/some_name.py", ORDER, "Seeds {seeds}.", (0, 1))


def table(seeds: tuple[int, ...] = (0, 1)) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(
        EXPERIMENT.table_file(seeds).with_suffix(".json").read_text()
    )["rows"]
    return rows


def test_other_rows_stay_while_the_caption_is_the_same() -> None:
    old = [{"": "Espresso", "best": "5"}, {"": "FGL: a", "best": "8"}, {"": "FGL: b", "best": "9"}]
    write_table(EXPERIMENT.table_file(), old, EXPERIMENT.about())
    new = {"": "FGL: b", "best": "3"}
    EXPERIMENT.write(
        ["OSCAR, pooled", "FGL"], lambda row, seeds: [{"": row}] if "," in row else [new], (0, 1)
    )
    assert table() == [new, {"": "OSCAR, pooled"}, old[0]]
    write_table(EXPERIMENT.table_file(), old, "Another caption.")
    EXPERIMENT.write(["FGL"], lambda row, seeds: new, (0, 1))
    assert table() == [new]


def test_a_table_grows_line_by_line_and_resumes() -> None:
    """Interrupted after its first line, a row keeps the earlier lines that were not made again."""
    old = [{"": "FGL: a", "best": "8"}, {"": "FGL: b", "best": "9"}]
    write_table(EXPERIMENT.table_file(), old, EXPERIMENT.about())

    def lines_of(row: str, seeds: object) -> Iterator[dict[str, str]]:
        yield {"": "FGL: a", "best": "1"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.write(["FGL"], lines_of, (0, 1))
    assert table() == [{"": "FGL: a", "best": "1"}, old[1]]


def test_a_caption_ends_with_its_command_and_other_seeds_have_another_table() -> None:
    command = "python -m benchmarks.speed.some_name --seeds 0,1"
    assert EXPERIMENT.about() == f"Seeds 0,1. Command: `{command}`."
    assert EXPERIMENT.about((3,)).endswith("some_name --seeds 3`.")
    assert EXPERIMENT.table_file((0, 1)).name == "some-name"
    assert EXPERIMENT.table_file((0, 3)).name == "some-name-seeds-0-3"
    assert EXPERIMENT.table_file().parent.parts[-2:] == ("speed", "tables")


def test_a_cell_is_computed_once() -> None:
    results = iter([[1.5], [2.5]])
    assert EXPERIMENT.cell("a/b", lambda: next(results)) == [1.5]
    assert EXPERIMENT.cell("a/b", lambda: next(results)) == [1.5]
    assert EXPERIMENT.cell("c", lambda: next(results)) == [2.5]
    vectors = EXPERIMENT.tensors("v", lambda: torch.ones(2))
    assert torch.equal(EXPERIMENT.tensors("v", lambda: None), vectors)


@pytest.mark.parametrize("known", [ORDER, (10, 20), (0.0, 0.5)])
def test_a_command_makes_what_was_asked_for_or_all(known: tuple[Any, ...]) -> None:
    parser = command_line("What it makes.")
    assert some_of([known[1]], known, parser) == [known[1]]
    assert some_of([], known, parser) == list(known)


def test_an_unknown_row_ends_the_command_and_lists_the_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = command_line("First line.\n\n    python -m it   # as it stands")
    with pytest.raises(SystemExit) as ended:
        some_of(["FGL", "FedSomething"], ORDER, parser)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "'FedSomething': must be some of FGL; OSCAR, pooled; Espresso" in message
    assert "First line.\n\n    python -m it   # as it stands" in parser.format_help()


def test_clients_have_a_hundred_images_to_learn_from_and_three_hundred_to_be_tested_on() -> None:
    for split, count in (("train", 100), ("test", 300)):
        parts = client_images(split)
        assert [len(part) for part in parts] == [count] * 6
        assert all(len(set(part.labels.tolist())) == 10 for part in parts)
        # Each in its own style
        means = {round(float(part.pixels.float().mean()), 2) for part in parts}
        assert len(means) == 6


def in_parallel_pool(calls: list[tuple[Any, ...]]) -> type:
    """Return a pool that makes each call at once and records it; calls with 0 fail."""

    class Pool:
        def __init__(self, jobs: int, context: object, first: object, threads: tuple[int]):
            assert jobs == 2
            # Two of sixteen cores have eight threads each
            assert (first, threads) == (torch.set_num_threads, (8,))

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, act: object, *arguments: Any) -> Future[None]:
            calls.append(arguments)
            future: Future[None] = Future()
            if arguments[0] == 0:
                future.set_exception(RuntimeError("out of memory"))
            else:
                future.set_result(None)
            return future

    return Pool


def test_all_calls_are_made_before_the_error_of_one_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(harness, "ProcessPoolExecutor", in_parallel_pool(calls))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    with pytest.raises(RuntimeError, match="out of memory"):
        harness.in_parallel(print, [(1,), (0,), (2,)], 2)
    assert calls == [(1,), (0,), (2,)]


def test_all_futures_are_waited_for_before_an_error_is_raised() -> None:
    first: Future[None] = Future()
    last: Future[None] = Future()
    first.set_exception(RuntimeError("out of memory"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(harness.wait_for_all, [first, last])
        with pytest.raises(TimeoutError):
            waiting.exception(timeout=0.2)
        last.set_result(None)
        assert isinstance(waiting.exception(timeout=30), RuntimeError)
