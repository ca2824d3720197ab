"""Synthetic images as WebDataset shards in an object store: a real server that speaks S3."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, S3FileSystem
from typer.testing import CliRunner

from osfl.cli.main import app
from osfl.config import ConfigError
from osfl.run_folder.shards import write_shards
from tests.helpers.run_folders import make_run_of_colors

pytestmark = pytest.mark.slow

OUT = "s3://models/digits/shards"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """A server on loopback with a bucket `models`; the environment names it."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    # Servers of one process share their objects
    httpx.post(f"http://{address_of(server)}/moto-api/reset").raise_for_status()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address_of(server)}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client_of(server).create_dir("models")
    try:
        yield server
    finally:
        server.stop()


def address_of(server: ThreadedMotoServer) -> str:
    host, port = server.get_host_and_port()
    return f"{host}:{port}"


def client_of(server: ThreadedMotoServer) -> S3FileSystem:
    return S3FileSystem(
        endpoint_override=address_of(server), scheme="http", allow_bucket_creation=True
    )


@pytest.fixture
def store(server: ThreadedMotoServer) -> S3FileSystem:
    return client_of(server)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run_of_colors(tmp_path / "run")


def contents(store: S3FileSystem) -> dict[str, bytes]:
    """Return every object of the bucket."""
    infos = store.get_file_info(FileSelector("models", recursive=True))
    return {info.path: store.open_input_file(info.path).read() for info in infos if info.is_file}


def test_a_store_gets_the_bytes_that_a_folder_gets(
    store: S3FileSystem, run: Path, tmp_path: Path
) -> None:
    local = [Path(file) for file in write_shards(run, tmp_path / "out", 4)]
    files = write_shards(run, OUT, 4)
    assert files == [f"{OUT}/{file.name}" for file in local]
    expected = {
        f"models/digits/shards/{file.name}": file.read_bytes()
        for file in [*local, tmp_path / "out" / "shards.json"]
    }
    assert contents(store) == expected


def test_an_interrupted_upload_goes_on(store: S3FileSystem, run: Path) -> None:
    """A shard that is there is not uploaded again."""

    def stop(finished: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(run, OUT, 4, stop)
    first = "models/digits/shards/00000.tar"
    assert set(contents(store)) == {first, "models/digits/shards/shards.json"}
    with store.open_output_stream(first) as stream:
        stream.write(b"not again")
    write_shards(run, OUT + "/", 4)
    objects = contents(store)
    assert len(objects) == 4
    assert objects[first] == b"not again"


def test_shards_of_another_run_are_left_alone(store: S3FileSystem, run: Path) -> None:
    write_shards(run, OUT, 5)
    before = contents(store)
    with pytest.raises(ConfigError, match=f"{OUT} has shards of another run, or of another size"):
        write_shards(run, OUT, 4)
    assert contents(store) == before
    with store.open_output_stream("models/digits/shards/shards.json") as stream:
        stream.write(b"{")
    with pytest.raises(OSError, match=f"{OUT}/shards.json is corrupt; set an empty folder"):
        write_shards(run, OUT, 5)


@pytest.mark.parametrize("address", ["s3://", "https://models/digits", "s3:///x"])
def test_an_address_must_be_one_of_s3(run: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address}: .*it must be s3://BUCKET/FOLDER"):
        write_shards(run, address, 4)


def test_a_bucket_that_does_not_exist_is_named(store: S3FileSystem, run: Path) -> None:
    result = CliRunner().invoke(app, ["shards", str(run), "s3://absent/digits"])
    text = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "error s3://absent/digits: " in text
    assert "of a bucket that exists; set AWS_ACCESS_KEY_ID" in text


def test_a_store_that_goes_away_is_named(run: Path, server: ThreadedMotoServer) -> None:
    """A server that stops after the first shard."""
    seen = []

    def stop(finished: int, total: int) -> None:
        seen.append(finished)
        server.stop()

    with pytest.raises(ConfigError, match=f"{OUT}: .*and AWS_ENDPOINT_URL for a store other"):
        write_shards(run, OUT, 4, stop)
    assert seen == [4]
