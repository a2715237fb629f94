"""Servers that stores can be read from: HTTP with latency and a rate, and S3.

Where the environment variable BERTVISION_TEST_S3 holds the URL of an S3 server, that one is taken,
with the credentials of the environment; else one is made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

_BLOCK = 1 << 16
OUTSIDE = os.environ.get("BERTVISION_TEST_S3")
only_ours = pytest.mark.skipif(bool(OUTSIDE), reason="looks into the server that the tests make")


class SlowServer(ThreadingHTTPServer):
    """Serves a folder: ranges of files, and listings as pages of links.

    Args:
        folder: to serve.
        latency: seconds between a request and the first byte of its answer.
        rate: bytes per second of all answers together; 0 is no limit.
        connection_rate: bytes per second of one answer; 0 is no limit.

    Attributes:
        requests: (method, path, bytes answered) of each.
        status: where it is not 0, what every request is answered with, and
        body: in its answer; -1 hangs up.
    """

    daemon_threads = True

    def __init__(
        self, folder: Path, *, latency: float = 0.0, rate: float = 0.0, connection_rate: float = 0.0
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.latency = latency
        self.rate = rate
        self.connection_rate = connection_rate
        self.requests: list[tuple[str, str, int]] = []
        self.status, self.body = 0, b""
        self._line = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def transmit(self, size: int) -> None:
        """Wait until a block of all connections' common line has gone through it."""
        if not self.rate:
            return
        with self._line:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))

    @contextmanager
    def running(self) -> Iterator[SlowServer]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # or headers and body are 40 ms apart
    protocol_version = "HTTP/1.1"
    server: SlowServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        time.sleep(self.server.latency)
        path = self.server.folder / self.path.lstrip("/")
        if self.server.status < 0:
            self.close_connection = True
            return self.connection.close()
        if self.server.status:
            return self._send(self.server.status, self.server.body, body)
        if path.is_dir():
            links = "".join(
                f'<a href="{p.name}{"/" if p.is_dir() else ""}">.</a>' for p in path.iterdir()
            )
            return self._send(200, links.encode(), body, kind="text/html")
        if not path.is_file():
            return self._send(404, b"", body)
        size = path.stat().st_size
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        begin, _, last = wanted.partition("-")
        first, end = int(begin or 0), min(size, int(last or size - 1) + 1)
        if wanted and first >= size:
            return self._send(416, b"", body)
        with path.open("rb") as file:
            file.seek(first)
            content = file.read(end - first)
        described = {"Content-Range": f"bytes {first}-{end - 1}/{size}"} if wanted else {}
        return self._send(206 if wanted else 200, content, body, **described)

    def _send(
        self,
        status: int,
        content: bytes,
        body: bool,
        kind: str = "application/octet-stream",
        **headers: str,
    ) -> None:
        self.server.requests.append((self.command, self.path, len(content) if body else 0))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        started, sent = time.monotonic(), 0
        while body and sent < len(content):
            block = content[sent : sent + _BLOCK]
            self.server.transmit(len(block))
            sent += len(block)
            if self.server.connection_rate:
                due = started + sent / self.server.connection_rate
                time.sleep(max(0.0, due - time.monotonic()))
            self.wfile.write(block)

    def log_message(self, *args: Any) -> None:
        pass


class FaultyProxy(ThreadingHTTPServer):
    """Stands before the S3 server of the environment; of each write the first answer is lost.

    Args:
        latency: seconds before a request is passed on.

    Attributes:
        lost: the requests whose answers were lost.
    """

    daemon_threads = True

    def __init__(self, *, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.latency = latency
        self.lost: list[str] = []
        self.server = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.server_address[1]}")
            forget_file_systems()
            try:
                yield self
            finally:
                forget_file_systems()
                self.shutdown()
                self.server_close()
                thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""


class _Forward(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # or headers and body are 40 ms apart
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _forward(self) -> None:
        body = self._body()
        time.sleep(self.server.latency)
        to = HTTPConnection(self.server.server)
        to.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "transfer-encoding", "content-length"):
                to.putheader(name, value)
        to.putheader("Content-Length", str(len(body)))
        to.endheaders(body)
        answer = to.getresponse()
        content = answer.read()
        to.close()
        line = f"{self.command} {self.path.partition('?')[0]}"
        completes = self.command == "POST" and "uploadId" in self.path
        puts = self.command == "PUT" and "?" not in self.path
        if (completes or puts) and line not in self.server.lost:
            self.server.lost.append(line)
            self.close_connection = True
            self.connection.close()
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def _body(self) -> bytes:
        """The body of a request, in the chunks that it comes in, as the server is to have it."""
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def s3_server(**more: str) -> Iterator[list[str]]:
    """A local S3 server with the bucket ``bucket``; the environment leads to it.

    Args:
        more: variables of the environment; an outside server has credentials of its own.

    Yields:
        The lines of the requests that it answers; none of an outside server.
    """
    if OUTSIDE:
        with _outside(OUTSIDE):
            yield []
        return
    import fsspec
    from moto.moto_server import werkzeug_app
    from moto.server import ThreadedMotoServer

    requests: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            werkzeug_app.MotoRequestHandler,
            "log_request",
            lambda handler, *_: requests.append(handler.requestline),
        )
        patch.setattr(werkzeug_app.MotoRequestHandler, "disable_nagle_algorithm", True)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        values = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            **more,
        }
        for name, value in values.items():
            patch.setenv(name, value)
        forget_file_systems()
        reset = Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        urlopen(reset).close()  # or what an earlier server of this process held were there
        fsspec.filesystem("s3").mkdir("bucket")
        try:
            yield requests
        finally:
            server.stop()
            forget_file_systems()


@contextmanager
def _outside(url: str) -> Iterator[None]:
    import fsspec

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        forget_file_systems()
        fs = fsspec.filesystem("s3")
        if not fs.exists("bucket"):
            fs.mkdir("bucket")
        assert not fs.ls("bucket", refresh=True), f"the tests empty the bucket `bucket` of {url}"
        try:
            yield
        finally:
            forget_file_systems()
            fs = fsspec.filesystem("s3")
            for path in fs.ls("bucket", refresh=True):
                fs.rm(path, recursive=True)
            forget_file_systems()


def forget_file_systems() -> None:
    """Let the next S3 file system look at the environment again."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
