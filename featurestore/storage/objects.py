"""Conditional and large writes to object stores, which fsspec's own interface does not offer.

An object appears whole when its upload is complete, and is durable when the call returns. A
condition (*only if it is not there*, *only if it is still this one*) is judged by the server in the
same step: what a lock needs.

What may go wrong with a remote store, said clearly and without a secret.

Libraries that talk to object stores put URLs, headers and answers of servers into their messages,
and with them passwords and tokens. So none of their text is passed on, and their exceptions are
not chained to ours: only which kind of error it was, and the code a server gave it.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, ParamSpec, TypeVar

from bertvision.errors import BertvisionError, InputError, StoreError
from bertvision.featurestore.storage.storage import ABSENT

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

CREDENTIALS = (
    "credentials are taken from the environment (for S3: AWS_PROFILE, or AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; for the Hugging Face hub: HF_TOKEN or its login) "
    "or from fsspec's configuration (~/.config/fsspec)"
)
# names of errors of Python, fsspec, botocore and aiohttp, or of what they inherit from
_DENIED = {
    *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),
    *("CredentialRetrievalError", "TokenRetrievalError", "SSOError"),
}
_UNREACHABLE = {
    *("TimeoutError", "FSTimeoutError", "ConnectionError", "HTTPClientError"),
    *("EndpointResolutionError", "ClientConnectionError", "ClientPayloadError"),
    "TransportError",  # of httpx
}
# containers of Azure: abfs://container@account.dfs.core.windows.net
_CONTAINER = re.compile(r"[a-z0-9-]+@[a-z0-9.-]+", re.ASCII)


def check_url(url: str) -> str:
    """A URL without the slashes at its end, if it holds nothing that must not be written down.

    Raises:
        InputError: it may hold a secret, which the message does not repeat; or it is none.
    """
    protocol, _, rest = url.partition("://")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol):
        raise InputError("the URL of a store begins with its protocol, such as s3://")
    host = rest.split("/")[0]
    azure = protocol.startswith(("ab", "az", "ad")) and _CONTAINER.fullmatch(host)
    if ("@" in host and not azure) or re.search(r"[?#]", rest):
        raise InputError(
            f"the URL of the store ({protocol}://…) holds a user name, a password or a query: "
            f"leave them out; {CREDENTIALS}"
        )
    if "::" in rest or ".." in rest.split("/"):
        raise InputError(
            f"the URL of the store ({protocol}://…) holds '::' or '..': name the folder of the "
            "store itself, such as s3://bucket/activations"
        )
    rest = rest.rstrip("/")
    if not rest and protocol != "memory":
        raise InputError(f"{url} names no place: such as {protocol}://bucket/activations")
    return f"{protocol}://{rest}"


def guarded(
    where: str, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs
) -> _Result:
    """Call a function of a file system.

    Args:
        where: URL of the file or folder, for the message.
        function: Function to call.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Raises:
        FileNotFoundError: there is no such file or folder.
        StoreError: anything else went wrong.
    """
    try:
        return function(*args, **kwargs)
    except BertvisionError:
        raise
    except Exception as error:
        clear = _clear(where, error)
    # outside of the handler, so that nothing of the other error hangs on this one
    raise clear


def server_code(error: BaseException) -> str | None:
    """The code that a server gave an error: of S3 such as ``NoSuchKey``, of HTTP its status."""
    for cause in _chain(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
            code = answer.get("Error", {}).get("Code") or status
        else:
            code = getattr(cause, "status", "") or getattr(answer, "status_code", "")
        if re.fullmatch(r"[A-Za-z0-9]{1,40}", str(code)):
            return str(code)
    return None


def _clear(where: str, error: Exception) -> Exception:
    kinds = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    code = server_code(error)
    reason = type(error).__name__ + (f", {code}" if code else "")
    if code == "NoSuchBucket":
        return StoreError(f"{where}: there is no such bucket: make it, or correct the URL")
    if kinds & _DENIED or code in ("401", "403", "AccessDenied"):
        return StoreError(f"{where}: access is not allowed ({reason}): {CREDENTIALS}")
    if kinds & _UNREACHABLE:
        return StoreError(
            f"{where} cannot be reached ({reason}): look at the network, at the host in the URL "
            "and, for S3, at AWS_ENDPOINT_URL; then run the same command again"
        )
    if "FileNotFoundError" in kinds or code in ("404", "NoSuchKey"):
        return FileNotFoundError(f"{where} is missing")
    return StoreError(
        f"{where}: the file system failed ({reason}): run the same command again; where that does "
        "not help, try the same with the tool of its provider"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


PART_BYTES = 16 << 20
"""Size of the parts of a large upload."""
UPLOADS = 4
"""Parts of one upload that are on the way at once; an upload holds one more in memory."""


class Stored(NamedTuple):
    """An object.

    Attributes:
        data: its bytes.
        version: changes whenever it is written.
        age: seconds since it was written, by the clock of the server alone.
    """

    data: bytes
    version: str
    age: float


class Objects(ABC):
    """Objects of a store that can be written.

    Attributes:
        judges_conditions: whether it was seen that the server judges conditions.
    """

    judges_conditions = False

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system

    @abstractmethod
    def put(self, path: str, data: bytes, only_if: str | None = None) -> str | None:
        """Write an object in one request.

        Args:
            path: Path of the object.
            data: its bytes.
            only_if: the version it must have, or `ABSENT`; None writes it in any case.

        Returns:
            The new version; None where the condition did not hold.
        """

    @abstractmethod
    def get(self, path: str) -> Stored | None:
        """Read an object; None where there is none."""

    @abstractmethod
    def version(self, path: str) -> str:
        """The version of an object; `ABSENT` where there is none."""

    @abstractmethod
    def upload(
        self, path: str, pieces: Iterable[bytes | memoryview], only_if: str | None = None
    ) -> str | None:
        """Write an object of any size; it is there whole when this returns, or as it was before.

        Args:
            path: Path of the object.
            pieces: Pieces of its bytes, each valid until the next is asked for.
            only_if: As in `put`.

        Returns:
            As of `put`.
        """


class MemoryObjects(Objects):
    """Objects of fsspec's ``memory://``, which all threads of the process share."""

    _lock = threading.Lock()

    def put(self, path: str, data: bytes, only_if: str | None = None) -> str | None:  # noqa: D102
        with self._lock:
            there = self.get(path)
            if only_if is not None and only_if != (there.version if there else ABSENT):
                return None
            self._fs.pipe_file(path, data)
        return hashlib.sha256(data).hexdigest()

    def get(self, path: str) -> Stored | None:  # noqa: D102
        try:
            data, modified = self._fs.cat_file(path), self._fs.modified(path)
        except FileNotFoundError:
            return None
        return Stored(data, hashlib.sha256(data).hexdigest(), time.time() - modified.timestamp())

    def version(self, path: str) -> str:  # noqa: D102
        there = self.get(path)
        return there.version if there else ABSENT

    def upload(  # noqa: D102
        self, path: str, pieces: Iterable[bytes | memoryview], only_if: str | None = None
    ) -> str | None:
        # not joined: the pieces may share their memory
        return self.put(path, b"".join(_parts(pieces)), only_if)


class S3Objects(Objects):
    """Objects of S3, or of a server that speaks as it does.

    Conditions are ``If-None-Match`` and ``If-Match`` of PutObject and CompleteMultipartUpload.
    Each request carries a checksum of its bytes, which the server compares.
    """

    # what S3 answers where a condition does not hold: it is another one, there is none (of
    # If-Match), somebody is writing it at this moment, or an upload that is completed again
    _REFUSED = {
        *("PreconditionFailed", "412", "NoSuchKey", "404", "ConditionalRequestConflict"),
        "NoSuchUpload",
    }

    def put(self, path: str, data: bytes, only_if: str | None = None) -> str | None:  # noqa: D102
        return self._write("put_object", path, only_if, Body=data)

    def _write(self, call: str, path: str, only_if: str | None, **fields: Any) -> str | None:
        """Make the call that lets an object appear, and give its version; None if refused."""
        if only_if is not None:
            # bare: S3 takes an ETag with its quotes and without, Ceph only without
            bare = only_if.strip('"')
            fields |= {"IfMatch": bare} if bare else {"IfNoneMatch": "*"}
        try:
            done = self._fs.call_s3(call, **self._at(path), **fields)
        except Exception as error:
            if only_if is not None and server_code(error) in self._REFUSED:
                return None
            raise
        return str(done.get("ETag") or self.version(path))  # Ceph gives none of an upload

    def get(self, path: str) -> Stored | None:  # noqa: D102
        from fsspec.asyn import sync

        try:
            data, answer = sync(self._fs.loop, self._get, path)
        except FileNotFoundError as error:
            if server_code(error) == "NoSuchBucket":
                raise
            return None
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Stored(data, answer["ETag"], (now - answer["LastModified"]).total_seconds())

    async def _get(self, path: str) -> tuple[bytes, dict[str, Any]]:
        answer = await self._fs._call_s3("get_object", **self._at(path))
        async with answer["Body"] as body:
            return await body.read(), answer

    def version(self, path: str) -> str:  # noqa: D102
        try:
            return str(self._fs.call_s3("head_object", **self._at(path))["ETag"])
        except FileNotFoundError:
            return ABSENT

    def upload(  # noqa: D102
        self, path: str, pieces: Iterable[bytes | memoryview], only_if: str | None = None
    ) -> str | None:
        parts = _parts(pieces)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            return self.put(path, first, only_if)
        upload = self._at(path)
        # which checksum the parts have is to be said before they come
        begun = self._fs.call_s3("create_multipart_upload", ChecksumAlgorithm="CRC32", **upload)
        upload["UploadId"] = begun["UploadId"]
        try:
            with ThreadPoolExecutor(UPLOADS, "bertvision-upload") as threads:
                done: list[dict[str, Any]] = []
                on_the_way: deque[Future[dict[str, Any]]] = deque()
                for part in _objects_chain(first, second, parts):
                    number = len(done) + len(on_the_way) + 1
                    on_the_way.append(threads.submit(self._upload_part, upload, number, part))
                    if len(on_the_way) == UPLOADS:
                        done.append(on_the_way.popleft().result())
                done += [future.result() for future in on_the_way]
            fields = {"UploadId": upload["UploadId"], "MultipartUpload": {"Parts": done}}
            version = self._write("complete_multipart_upload", path, only_if, **fields)
        except BaseException:
            self._abort(upload)
            raise
        if version is None:
            self._abort(upload)
        return version

    def _abort(self, upload: dict[str, str]) -> None:
        with suppress(Exception):  # or what was uploaded of it would be kept, and paid for
            self._fs.call_s3("abort_multipart_upload", **upload)

    def _upload_part(self, upload: dict[str, str], number: int, part: bytes) -> dict[str, Any]:
        fields = {"PartNumber": number, "Body": part, "ChecksumAlgorithm": "CRC32"}
        done = self._fs.call_s3("upload_part", **fields, **upload)
        # with the checksum that was sent, which the server compares again at the end
        sums = {name: done[name] for name in done if name.startswith("Checksum") and done[name]}
        sums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": done["ETag"], **sums}

    def _at(self, path: str) -> dict[str, str]:
        bucket, key, _ = self._fs.split_path(path)
        return {"Bucket": bucket, "Key": key}


def _parts(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Copies of pieces, cut and joined to parts of `PART_BYTES`; the last may be shorter."""
    part = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            room = PART_BYTES - len(part)
            part += view[:room]
            view = view[room:]
            if len(part) == PART_BYTES:
                yield bytes(part)
                part = bytearray()
    if part:
        yield bytes(part)


def _objects_chain(first: bytes, second: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from others
