"""A hub on loopback, over real HTTP: what huggingface_hub asks of one, and faults.

Repositories with branches and commits, uploads by Git LFS (no Xet is offered), listings in pages,
files with redirects, ranges and digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_thisIsTheSecretOfTheTests"
PAGE = 40
_API = re.compile(r"/api/(model|dataset|space)s/([^/]+/[^/]+)(?:/(.*))?")
_FILE = re.compile(r"/(datasets/|spaces/|)([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BATCH = re.compile(r"/(?:datasets/|spaces/|)([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_KINDS = {"": "model", "datasets/": "dataset", "spaces/": "space"}


@dataclass
class Stored:
    """A file of a commit."""

    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """Git's name of the blob; the blob of a large file is a pointer."""
        data = self.content if not self.lfs else f"oid sha256:{self.sha256}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


@dataclass
class Repository:
    """Commits by their name, and where branches stand."""

    private: bool = False
    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    log: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The message of each commit, and the commit that it follows."""

    def commit(
        self, branch: str, files: dict[str, Stored], message: str, description: str = ""
    ) -> str:
        text = f"{len(self.commits)} {branch} {message}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        told = {"id": name, "title": message, "message": description, "authors": []}
        told |= {"date": "2026-01-02T03:04:05.000Z", "parent": self.branches.get(branch)}
        self.log[name] = told
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def files(self, revision: str = "main") -> dict[str, Stored]:
        return self.commits[self.branches.get(revision, revision)]


Fault = Callable[["_Handler"], bool]
"""Answers a request in its own way, and says whether it did."""


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        repositories: by kind and name.
        uploaded: contents of large files by digest, committed or not.
        requests: method and path of each, in order.
        faults: asked before a request is answered; one that has answered is taken out.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.uploaded: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, kind: str, name: str, revision: str = "main") -> dict[str, bytes]:
        held = self.repositories[kind, name].files(revision)
        return {path: stored.content for path, stored in held.items()}

    def change(self, kind: str, name: str, path: str, content: bytes) -> None:
        """Put another content in the place of a file, as a commit would."""
        repository = self.repositories[kind, name]
        files = dict(repository.files("main"))
        files[path] = Stored(content, files[path].lfs)
        repository.commit("main", files, "changed")

    def asked(self, method: str, part: str) -> list[str]:
        """Paths of the requests of a method that have a part."""
        return [path for done, path in self.requests if done == method and part in path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""


def status(code: int, method: str, part: str, **headers: str) -> Fault:
    """One answer of a status to the first request of a method whose path has a part."""

    def fault(handler: _Handler) -> bool:
        if handler.command == method and part in handler.path:
            handler.answer(code, {"error": f"fault {code}"}, **headers)
            return True
        return False

    return fault


def cut(part: str, after: int) -> Fault:
    """One download of a path with a part that ends behind so many bytes."""

    def fault(handler: _Handler) -> bool:
        if handler.command == "GET" and part in handler.path and "/resolve/" in handler.path:
            handler.resolve(cut=after)
            return True
        return False

    return fault


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # or headers and body are 40 ms apart
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing is said."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunks()
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            for number, fault in enumerate(self.server.faults):
                if fault(self):
                    del self.server.faults[number]
                    return
            self._route()

    def _chunks(self) -> bytes:
        found = b""
        while self.headers.get("Transfer-Encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            found += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                break
        return found

    def _route(self) -> None:
        self.url = urlsplit(self.path)
        path = self.url.path
        if path.startswith("/lfs/"):
            return self._put(path.removeprefix("/lfs/"))
        if self.command not in ("GET", "HEAD") and not self._may():
            return self.answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            return self._create()
        if path == "/api/validate-yaml":
            return self.answer(200, {"warnings": [], "errors": []})
        if _BATCH.fullmatch(path):
            return self._batch()
        if _FILE.fullmatch(path):
            return self.resolve()
        if found := _API.fullmatch(path):
            return self._api(found[1], found[2], found[3] or "")
        return self.answer(404, {"error": f"no such place: {path}"})

    def _may(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer(self, code: int, value: Any, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self, what: str) -> None:
        self.answer(404, {"error": f"{what} is not there"}, X_Error_Code=what)

    def _find(self, kind: str, name: str) -> Repository | None:
        found = self.server.repositories.get((kind, name))
        if found is None or (found.private and not self._may()):
            self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    def _create(self) -> None:
        asked = json.loads(self.body)
        kind = asked.get("type") or "model"
        name = f"{asked['organization']}/{asked['name']}"
        prefix = "" if kind == "model" else f"{kind}s/"
        told = {"url": f"{self.server.url}/{prefix}{name}"}
        if (kind, name) in self.server.repositories:
            return self.answer(409, {"error": "You already created this repo", **told})
        made = Repository(
            private=asked.get("visibility") == "private" or bool(asked.get("private"))
        )
        made.commit("main", {}, "initial commit")
        self.server.repositories[kind, name] = made
        return self.answer(200, told)

    def _api(self, kind: str, name: str, rest: str) -> None:
        repository = self._find(kind, name)
        if repository is None:
            return None
        what, _, more = rest.partition("/")
        if what == "branch":
            branch = unquote(more)
            if branch in repository.branches:
                return self.answer(409, {"error": "Reference already exists"})
            begin = json.loads(self.body).get("startingPoint") if self.body else None
            repository.branches[branch] = begin or repository.branches["main"]
            return self.answer(200, {})
        revision = unquote(more.split("/")[0]) or "main"
        revision = repository.branches.get(revision, revision)
        if revision not in repository.commits:
            return self._missing("RevisionNotFound")
        files = repository.files(revision)
        if what in ("", "revision"):
            siblings = [{"rfilename": path} for path in files]
            found = {"id": name, "sha": revision, "private": repository.private}
            return self.answer(200, {**found, "siblings": siblings, "tags": []})
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": at}
                for branch, at in repository.branches.items()
            ]
            return self.answer(200, {"branches": branches, "converts": [], "tags": []})
        if what == "tree":
            return self._tree(files, unquote(more.partition("/")[2]))
        if what == "commits":
            log, at = [], revision
            while at is not None:
                log.append(repository.log[at])
                at = log[-1]["parent"]
            return self.answer(200, log)
        if what == "preupload":
            return self._preupload(files)
        if what == "commit":
            return self._commit(repository, unquote(more), files)
        return self.answer(404, {"error": f"no such place: {rest}"})

    def _tree(self, files: dict[str, Stored], below: str) -> None:
        asked = parse_qs(self.url.query)
        recursive = asked.get("recursive", ["False"])[0].lower() == "true"
        prefix = f"{below}/" if below else ""
        found: dict[str, dict[str, Any]] = {}
        for path, stored in sorted(files.items()):
            inside = path.removeprefix(prefix)
            if not path.startswith(prefix):
                continue
            for folder in (prefix + inside[: at.start()] for at in re.finditer("/", inside)):
                found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            found[path] = {"type": "file", "path": path, "oid": stored.oid}
            found[path]["size"] = len(stored.content)
            if stored.lfs:
                lfs = {"oid": stored.sha256, "size": len(stored.content), "pointerSize": 134}
                found[path]["lfs"] = lfs
        shown = [
            entry
            for path, entry in found.items()
            if recursive or "/" not in path.removeprefix(prefix)
        ]
        if not shown and below:
            return self._missing("EntryNotFound")
        begin = int(asked.get("cursor", ["0"])[0])
        more = {}
        if begin + PAGE < len(shown):
            place = f"{self.server.url}{self.url.path}?recursive={recursive}&cursor={begin + PAGE}"
            more["Link"] = f'<{place}>; rel="next"'
        return self.answer(200, shown[begin : begin + PAGE], **more)

    def _preupload(self, files: dict[str, Stored]) -> None:
        told = []
        for file in json.loads(self.body)["files"]:
            there = files.get(file["path"])
            binary = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 10_000
            mode = "lfs" if binary and file["size"] else "regular"
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if there is not None:
                told[-1]["oid"] = there.etag
        self.answer(200, {"files": told})

    def _batch(self) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            told = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.uploaded:
                href = f"{self.server.url}/lfs/{wanted['oid']}"
                told["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(told)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def _put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.answer(400, {"error": "the digest is another"})
        self.server.uploaded[oid] = self.body
        return self.answer(200, {})

    def _commit(self, repository: Repository, branch: str, files: dict[str, Stored]) -> None:
        if branch not in repository.branches:
            return self._missing("RevisionNotFound")
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, message, description = dict(files), "", ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message, description = value["summary"], value["description"]
                if value.get("parentCommit", at := repository.branches[branch]) != at:
                    return self.answer(412, {"error": "A commit has happened since"})
            elif line["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    return self._missing("EntryNotFound")
            elif line["key"] == "file":
                files[value["path"]] = Stored(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.uploaded:
                    return self.answer(400, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = Stored(self.server.uploaded[value["oid"]], lfs=True)
        name = repository.commit(branch, files, message, description)
        return self.answer(200, {"commitUrl": f"{self.server.url}/c/{name}", "commitOid": name})

    def resolve(self, cut: int | None = None) -> None:
        self.url = urlsplit(self.path)
        found = _FILE.fullmatch(self.url.path)
        assert found is not None
        repository = self._find(_KINDS[found[1]], found[2])
        if repository is None:
            return None
        revision = unquote(found[3])
        revision = repository.branches.get(revision, revision)
        if revision not in repository.commits:
            return self._missing("RevisionNotFound")
        stored = repository.files(revision).get(unquote(found[4]))
        if stored is None:
            return self._missing("EntryNotFound")
        size = len(stored.content)
        begin, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        first, end = int(begin or 0), min(size, int(last or size - 1) + 1)
        if begin and first >= size:
            return self.answer(416, {"error": "no such range"})
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{stored.etag}"')
        self.send_header("X-Repo-Commit", revision)
        self.send_header("Accept-Ranges", "bytes")
        if stored.lfs:
            self.send_header("X-Linked-ETag", f'"{stored.etag}"')
            self.send_header("X-Linked-Size", str(size))
        if begin:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.wfile.write(stored.content[first:end][:cut])
        if cut is not None:
            self.close_connection = True
        return None


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A hub that huggingface_hub talks to in this process, without waits between its tries."""
    from types import SimpleNamespace

    from huggingface_hub import constants, file_download, get_token
    from huggingface_hub.utils import _http

    from bertvision.pipelines.sharing import hub

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert get_token() == TOKEN
        at_once = SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr(_http, "time", at_once)
        monkeypatch.setattr(file_download, "time", at_once)
        monkeypatch.setattr(hub, "WAITS", (0.0, 0.0, 0.0))
        monkeypatch.setenv("TQDM_DISABLE", "1")
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
