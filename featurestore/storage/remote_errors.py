"""What may go wrong with a remote store, said clearly and without a secret.

Libraries that talk to object stores put URLs, headers and answers of servers into their messages,
and with them passwords and tokens. So none of their text is passed on, and their exceptions are
not chained to ours: only which kind of error it was, and the code a server gave it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from bertvision.errors import BertvisionError, InputError, StoreError

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
        function: to call.
        args: of the function.
        kwargs: of the function.

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
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
