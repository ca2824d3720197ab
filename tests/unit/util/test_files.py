"""Files that are either whole or not there, and their owner's alone."""

import os
import stat
from pathlib import Path

import pytest

from osfl.kit.digests import SMALL_BYTES, file_sha256
from osfl.util import files
from osfl.util.files import (
    CorruptFileError,
    make_private_folder,
    open_private,
    parse_json,
    read_below,
    read_json,
    write_atomically,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(autouse=True)
def _open_umask() -> None:  # type: ignore[misc]
    """The worst umask: no permission is removed from what is requested."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_written_files_are_private_to_their_owner(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "c.json"
    write_atomically(file, b"one")
    assert (mode(file), mode(file.parent), mode(file.parent.parent)) == (0o600, 0o700, 0o700)
    file.chmod(0o666)
    write_atomically(file, b"two")
    assert (mode(file), file.read_bytes()) == (0o600, b"two")
    write_atomically(tmp_path / "ca.crt", b"", files.PUBLIC)
    assert mode(tmp_path / "ca.crt") == 0o644
    with open_private(tmp_path / "log", "a") as log:
        log.write("line\n")
    assert mode(tmp_path / "log") == 0o600
    assert [f.name for f in file.parent.iterdir()] == ["c.json"]


def test_the_memory_of_digests_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the folders above it, where it is the first thing there."""
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "osfl" / "cache"))
    (tmp_path / "weights").write_bytes(bytes(SMALL_BYTES))
    file_sha256(tmp_path / "weights")
    folders = [tmp_path / "osfl", tmp_path / "osfl" / "cache"]
    assert [mode(path) for path in folders] == [0o700, 0o700]


def test_a_public_file_is_public_under_a_private_umask(tmp_path: Path) -> None:
    os.umask(0o077)
    write_atomically(tmp_path / "ca.crt", b"", files.PUBLIC)
    assert mode(tmp_path / "ca.crt") == 0o644


def test_a_folder_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    make_private_folder(tmp_path)
    make_private_folder(tmp_path / "x" / "y")
    make_private_folder(tmp_path / "x" / "y")
    assert (mode(tmp_path), mode(tmp_path / "x"), mode(tmp_path / "x" / "y")) == (
        0o750,
        0o700,
        0o700,
    )
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        make_private_folder(tmp_path / "file")
    with pytest.raises(FileExistsError, match="file"):
        write_atomically(tmp_path / "file" / "x", b"")


def test_no_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one at the target, nor one where the temporary file will be, should anybody guess its
    name.
    """
    (tmp_path / "other").write_text("mine")
    target = tmp_path / "target"
    target.symlink_to("other")
    write_atomically(target, b"new")
    assert not target.is_symlink()
    assert (target.read_bytes(), (tmp_path / "other").read_text()) == (b"new", "mine")
    names = iter(["known", "known", "free"])
    monkeypatch.setattr(files.tempfile, "_get_candidate_names", lambda: names)
    (tmp_path / ".target.known.tmp").symlink_to("other")
    write_atomically(target, b"newer")
    assert (target.read_bytes(), (tmp_path / "other").read_text()) == (b"newer", "mine")
    (tmp_path / "log").symlink_to("other")
    with pytest.raises(OSError, match="log"):
        open_private(tmp_path / "log", "a")


def test_temporary_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (names.append(path.name), replace(path, to))
    )
    for _ in range(3):
        write_atomically(tmp_path / "x", b"")
    assert len(set(names)) == 3
    assert not any(str(os.getpid()) in name for name in names)


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "x", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "x", b"new")
    monkeypatch.setattr(os, "fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "x", b"new")
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == {"x": b"old"}
    write_atomically(tmp_path / "x", b"new", durable=False)
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is corrupt"),
        (b'{"a": ', "is corrupt"),
        (b"\xff\xfe\x00\x1b[2J", "is corrupt"),
        (b"[" * 100_000, "is corrupt"),
        (b"9" * 10_000, "is corrupt"),
        (b"[1]", r"is corrupt \(another type of JSON value\)"),
        (b"null", r"is corrupt \(another type of JSON value\)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_json_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match=f"x.json {problem}.*; throw it away$") as caught:
        read_json(file, hint="throw it away")
    assert str(caught.value).isprintable()


def test_json_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="x.json is missing$"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CorruptFileError, match="x.json is not a file$"):
        read_json(tmp_path / "x.json")
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(CorruptFileError, match="pipe is not a file$"):
        read_json(tmp_path / "pipe")
    (tmp_path / "good.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "good.json") == {"a": 1}


def test_a_file_below_a_folder_is_read_without_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (root / "link").symlink_to(tmp_path)
    (root / "a" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "a" / "pipe")
    assert read_below(root, "a/file", 6) == b"inside"
    for name in ("", ".", "..", "../secret", "a/../../secret", str(tmp_path / "secret"), "a/\0"):
        with pytest.raises(ValueError, match="is not a path below a folder"):
            read_below(root, name, 100)
    for name in ("link/secret", "a/link", "a/pipe", "a", "a/file/x", "missing", "x" * 300):
        with pytest.raises(OSError):  # noqa: PT011
            read_below(root, name, 100)
    with pytest.raises(ValueError, match="has more than 5 bytes"):
        read_below(root, "a/file", 5)
    # The user chose the root, which may be a link
    assert read_below(root / "link", "root/a/file", 6) == b"inside"


@pytest.mark.parametrize(
    ("content", "deepest"),
    [("1", 0), ("", 0), ('{"a": 1}', 1), ("1, [2], 3", 1), ('{"a": [[]]}, 4', 3)],
)
def test_json_is_nested_at_most_a_hundred_levels(content: str, deepest: int) -> None:
    """Numbers of a long list are passed over, and lists among them are not."""
    for levels in (100 - deepest, 101 - deepest):
        text = "[" * levels + content + "]" * levels
        if levels + deepest == 100:
            parse_json(text)
        else:
            with pytest.raises(ValueError, match="deeper than 100 levels"):
                parse_json(text)
