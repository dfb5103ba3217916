"""A stand-in for the Hugging Face hub: the requests that `huggingface_hub` makes for a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Revisions by name, each a folder's files by name."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    """Who does not send it is told that the repository is gated."""

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.revisions.items():
            if revision in (name, commit(files)):
                return commit(files), files
        return None


def commit(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Hub:
    """Serves `repositories` at `url` on a thread and notes what was asked; a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.downloads: list[str] = []
        """`owner/name/FILE` of each file sent."""
        self.failure: int | None = None
        """Status of every answer, if set."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], token: str | None = None) -> str:
        """A repository with one revision, `main`; its commit."""
        self.repositories[name] = Repository({"main": files}, token)
        return commit(files)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if self.hub.failure is not None:
            return self._refuse(self.hub.failure, "Broken")
        match = api or file
        if match is None:
            return self._refuse(404, "EntryNotFound")
        repository = self.hub.repositories.get(match[1])
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        sent = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repository.token is not None and sent != repository.token:
            return self._refuse(403 if sent else 401, "GatedRepo")
        found = repository.find(unquote((match[3] if api else match[2]) or "main"))
        if found is None:
            return self._refuse(404, "RevisionNotFound")
        if api:
            return self._describe(match[1], match[2] == "tree", *found)
        return self._send_file(match[1], unquote(match[3]), *found)

    def _describe(self, name: str, tree: bool, sha: str, files: dict[str, bytes]) -> None:
        listing: Any = [
            {"type": "file", "path": f, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for f, data in files.items()
        ]
        if not tree:
            siblings = [{"rfilename": f} for f in files]
            listing = {"id": name, "modelId": name, "sha": sha, "siblings": siblings}
        self._send(json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, file: str, sha: str, files: dict[str, bytes]) -> None:
        if file not in files:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": sha})
        if self.command == "GET":
            self.hub.downloads.append(f"{name}/{file}")
        etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
        self._send(files[file], {"ETag": etag, "X-Repo-Commit": sha, "Accept-Ranges": "bytes"})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()
