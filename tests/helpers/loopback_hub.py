"""A Hugging Face hub on loopback, of folders: what its client libraries ask for when they fetch."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `root/OWNER/NAME` as the repository OWNER/NAME, a model and a data set alike.

    Attributes:
        fetched: the files whose content was sent.
        tampered: files that are sent with other bytes than their stated SHA-256 is of.
    """

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.fetched: list[str] = []
        self.tampered: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """A hub of the repositories in a folder, until the end."""
    server = Hub(root)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers of the hub's API, as far as fetching needs them."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_POST(self) -> None:
        """Answer which of some paths exist."""
        length = int(self.headers.get("Content-Length", 0))
        asked = self.rfile.read(length).decode()
        repository = self.repository(self.parts())
        paths = json.loads(asked)["paths"] if asked.startswith("{") else []
        entries = [entry for entry in self.files(repository) if entry["path"] in paths]
        self.send_json(entries)

    def parts(self) -> list[str]:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            parts = parts[1:]
        return parts[1:] if parts[0] in ("datasets", "models") else parts

    def repository(self, parts: list[str]) -> Path:
        return self.server.root / parts[0] / parts[1]

    def files(self, repository: Path) -> list[dict]:
        entries = []
        for file in sorted(path for path in repository.rglob("*") if path.is_file()):
            name = file.relative_to(repository).as_posix()
            digest = hashlib.sha1(file.read_bytes()).hexdigest()
            size = file.stat().st_size
            entries.append({"type": "file", "path": name, "size": size, "oid": digest})
        return entries

    def answer(self, with_body: bool) -> None:
        parts = self.parts()
        repository = self.repository(parts) if len(parts) > 1 else self.server.root / "nothing"
        if not repository.is_dir():
            self.send_missing("RepoNotFound")
            return
        kind = parts[2] if len(parts) > 2 else "revision"
        if kind == "revision" and len(parts) > 3 and parts[3] not in ("main", REVISION):
            self.send_missing("RevisionNotFound")
            return
        if kind == "resolve":
            self.send_file(repository / "/".join(parts[4:]), with_body)
        elif kind == "tree":
            self.send_tree(repository, "/".join(parts[4:]))
        elif kind == "revision":
            names = [{"rfilename": entry["path"]} for entry in self.files(repository)]
            metadata = {"id": "/".join(parts[:2]), "sha": REVISION, "siblings": names}
            flags = {
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
            }
            self.send_json({**metadata, **flags})
        else:
            self.send_missing("EntryNotFound")

    def send_tree(self, repository: Path, below: str) -> None:
        """The files of a folder, and its folders; with `recursive`, of those too."""
        folder = repository / below
        if not folder.is_dir():
            self.send_missing("EntryNotFound")
            return
        listed = self.files(repository)
        deep = "recursive=true" in self.path.lower()
        entries = []
        for entry in listed:
            file = repository / entry["path"]
            if file.is_relative_to(folder) and (deep or file.parent == folder):
                entries.append(entry)
        folders = folder.rglob("*") if deep else folder.glob("*")
        for path in sorted(path for path in folders if path.is_dir()):
            name = path.relative_to(repository).as_posix()
            entries.append({"type": "directory", "path": name, "size": 0, "oid": "0" * 40})
        self.send_json(entries)

    def send_file(self, file: Path, with_body: bool) -> None:
        if not file.is_file():
            self.send_missing("EntryNotFound")
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        # Of large files, as the hub states it
        if file.suffix == ".safetensors":
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.server.fetched.append(file.relative_to(self.server.root).as_posix())
            changed = file.relative_to(self.server.root).as_posix() in self.server.tampered
            self.wfile.write(content[:-1] + b"!" if changed else content)

    def send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its own."""
