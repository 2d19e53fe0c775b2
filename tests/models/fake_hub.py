"""A hub that speaks as much of the Hugging Face hub's API as huggingface_hub asks for to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(kw_only=True)
class Repository:
    """Revisions of one model, each the files of a directory."""

    revisions: dict[str, Path]
    """By branch or tag; ``main`` is what is meant without a revision."""
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit that a branch, a tag or a commit is."""
        commits = {name: hashlib.sha1(str(path).encode()).hexdigest() for name, path in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> dict[str, Path]:
        """Every file of a commit by its name there."""
        root = next(path for name, path in self.revisions.items() if self.commit(name) == commit)
        return {str(file.relative_to(root)): file for file in sorted(root.rglob("*")) if file.is_file()}


@dataclass(kw_only=True)
class FakeHub:
    """Where it listens, what it holds, what was asked of it."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """``METHOD PATH`` of every request."""

    @property
    def fetched(self) -> set[str]:
        """Names of the files whose contents were sent."""
        return {path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path}


@contextmanager
def fake_hub(repositories: Mapping[str, Repository]) -> Iterator[FakeHub]:
    """Serve ``repositories`` on a port of this machine."""
    hub = FakeHub(repositories=dict(repositories))

    class Handler(_Handler):
        serving = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    serving: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.serving.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if api else parts
        repository = self.serving.repositories.get(f"{owner}/{name}")
        if repository is None or (repository.private and "authorization" not in {key.lower() for key in self.headers}):
            return self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        revision = "/".join(rest[1:]) if api else rest[1]
        commit = repository.commit(revision or "main")
        if commit is None:
            return self._send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self._of_api(f"{owner}/{name}", repository, commit, rest[0] if rest else "revision")
        if repository.gated:
            return self._send(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        return self._file(repository.files(commit)["/".join(rest[2:])], commit)

    def _of_api(self, name: str, repository: Repository, commit: str, kind: str) -> None:
        files = repository.files(commit)
        if kind == "tree":
            tree = [{"type": "file", "path": each, "oid": _digest(file), "size": file.stat().st_size}
                    for each, file in files.items()]  # fmt: skip
            return self._send(200, tree)
        siblings = [{"rfilename": each} for each in files]
        about = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "downloads": 0}
        return self._send(200, {**about, "siblings": siblings, "gated": "manual" if repository.gated else False})

    def _file(self, file: Path, commit: str) -> None:
        body = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send(self, status: int, tree: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
