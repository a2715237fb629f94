"""The hub: its repositories by name, and what may go wrong there, said clearly.

Texts of servers and libraries may hold what was sent to them, so of an error only its kind, its
status and what the server says of it get into a message, never a token.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from bertvision.errors import BertvisionError, HubError, InputError, UnknownNameError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_Result = TypeVar("_Result")

RepositoryKind = Literal["model", "dataset", "space"]
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try of what may pass."""
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_PASSING = {408, 409, 412, 425, 429, 500, 502, 503, 504}
_LIBRARIES = {"huggingface_hub", "hf_xet", "httpx", "httpx2"}
# names of errors of httpx, or of what they inherit from
_UNREACHABLE = {"TransportError", "TimeoutError", "ConnectionError"}


class Repository(NamedTuple):
    """A repository on the hub."""

    name: str
    """``owner/name``."""
    kind: RepositoryKind
    revision: str | None = None
    """Branch, tag or commit; None is the main branch."""

    def __str__(self) -> str:
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        return f"{prefix}{self.name}" + (f"@{self.revision}" if self.revision else "")


def parse_repository(text: str) -> tuple[RepositoryKind | None, str]:
    """The kind of a repository, where its name says it, and ``owner/name``.

    Args:
        text: ``owner/name``, ``datasets/owner/name``, ``spaces/owner/name``, or one of these behind
            ``hf://``.

    Raises:
        InputError: it is none of these.
    """
    name, kind = text.removeprefix("hf://"), None
    for one in get_args(RepositoryKind):
        if name.startswith(f"{one}s/") and name.count("/") == 2:
            name, kind = name.removeprefix(f"{one}s/"), one
    if not _NAME.fullmatch(name) or ".." in name or "--" in name:
        raise InputError(
            f"{text!r} is no repository: write owner/name, such as me/squad-head, or "
            "datasets/owner/name where it must be told from a model of the same name"
        )
    return kind, name


def connect(token: str | bool | None = None) -> HfApi:
    """The hub's API.

    Args:
        token: None is that of the environment (``HF_TOKEN``) or of the hub's login; False is none.
    """
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="bertvision", library_version=version("bertvision"))


def ask(
    what: object, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs
) -> _Result:
    """Call a function of huggingface_hub, again where its error may pass.

    Args:
        what: Subject of the call, for messages.
        function: Function to call; a second call must do no harm.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Raises:
        HubError: it cannot be reached, or refuses.
        UnknownNameError: there is no such repository, revision or file.
    """
    waits = iter(WAITS)
    while True:
        try:
            return function(*args, **kwargs)
        except BertvisionError:
            raise
        except Exception as error:
            known = clear_error(what, error)
            if known is None:
                raise
            clear, wait = known, next(waits, None) if _may_pass(error) else None
            pause = 0.0 if wait is None else _asked_wait(error) or wait
        if wait is None:  # outside of the handler, so that nothing of the other error hangs on this
            raise clear
        log.info("%s; again in %g seconds", clear, pause)
        time.sleep(pause)


def cached_folder(
    place: str,
    patterns: Sequence[str],
    missing: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
) -> Path:
    """The folder in the hub's cache with files of a repository of models.

    Args:
        place: ``owner/name``.
        patterns: Files to bring.
        missing: Advice where ``place`` is no such name.
        revision: Branch, tag or commit.
        token: Token for the hub; None is that of the environment or of its login.
        cache_dir: Folder of downloads; None is the hub's cache.
        local_files_only: Take what the cache has, and ask nobody.

    Raises:
        UnknownNameError: it is no name of a repository.
        HubError: the hub cannot be reached, or refuses.
    """
    try:
        _, name = parse_repository(place)
    except InputError:
        raise UnknownNameError(f"there is no folder {place}: {missing}") from None

    def brought() -> str:
        return connect(token).snapshot_download(
            name,
            allow_patterns=[*patterns],
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )

    return Path(ask(Repository(name, "model", revision), brought))


def exists(api: HfApi, repository: Repository) -> bool:
    """Whether there is a repository that the token may read.

    Raises:
        HubError: the hub cannot be reached, or refuses.
    """
    is_there: bool = ask(repository, api.repo_exists, repository.name, repo_type=repository.kind)
    return is_there


def resolve(api: HfApi, repository: Repository) -> Repository:
    """The same repository at the commit that its revision stands for now.

    Raises:
        HubError: the hub cannot be reached, or refuses, or has no such repository or revision.
    """
    info = ask(
        repository,
        api.repo_info,
        repository.name,
        repo_type=repository.kind,
        revision=repository.revision,
    )
    return repository._replace(revision=str(info.sha))


def sizes(api: HfApi, repository: Repository) -> dict[str, int]:
    """The files of a repository: their bytes by path."""
    from huggingface_hub import RepoFile

    def listed() -> dict[str, int]:
        entries = api.list_repo_tree(
            repository.name,
            recursive=True,
            repo_type=repository.kind,
            revision=repository.revision,
        )
        return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

    return ask(repository, listed)


def clear_error(what: object, error: Exception) -> BertvisionError | None:
    """Clear error for one of huggingface_hub; None of one that is no error of the hub.

    Args:
        what: was asked for or written.
        error: Error that was raised.
    """
    kinds = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    code = _status(error)
    if "RevisionNotFoundError" in kinds:
        return HubError(f"{what}: there is no such revision: name a branch, a tag or a commit")
    if "GatedRepoError" in kinds:
        return HubError(f"{what} is gated: ask for access on its page, then use your token")
    if "RepositoryNotFoundError" in kinds:
        return HubError(
            f"{what}: the hub has no such repository, or it is private and the token may not read "
            "it: correct the name, or set HF_TOKEN or run `hf auth login`"
        )
    if "OfflineModeIsEnabled" in kinds or _is_not_in_cache(error):
        return HubError(
            f"{what}: it is not in the cache, and the hub is not asked: unset HF_HUB_OFFLINE, and "
            "leave local_files_only away"
        )
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return HubError(f"{what}: a file is not in the repository")
    if code in (401, 403):
        return HubError(
            f"{what}: the hub does not allow it ({code}{_said(error)}): set HF_TOKEN to a token "
            "that may do it (for push: that may write), or run `hf auth login`"
        )
    if code == 429:
        return HubError(
            f"{what}: too many requests for the hub (429): run the same command again in some "
            "minutes, it goes on from there"
        )
    if code is not None and code >= 500:
        return HubError(
            f"{what}: the hub failed ({code}): run the same command again, it goes on from there"
        )
    if code is not None:
        return HubError(f"{what}: the hub refused it ({code}{_said(error)})")
    if kinds & _UNREACHABLE or "LocalEntryNotFoundError" in kinds:
        return HubError(
            f"{what}: the hub cannot be reached ({type(error).__name__}): look at the network and, "
            "where it is set, at HF_ENDPOINT; then run the same command again, it goes on from "
            "there"
        )
    if "HFValidationError" in kinds:
        return InputError(f"{what}: the hub takes no such name")
    if isinstance(error, OSError) and str(error).startswith("Consistency check failed"):
        return HubError(f"{what}: a file did not arrive whole: run the same command again")
    if type(error).__module__.partition(".")[0] in _LIBRARIES:
        return HubError(
            f"{what}: the hub's library failed ({type(error).__name__}): run the same command "
            "again; where that does not help, try with HF_HUB_DISABLE_XET=1"
        )
    return None


def _may_pass(error: Exception) -> bool:
    kinds = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    code = _status(error)
    if code is not None:
        return code in _PASSING
    return not ("OfflineModeIsEnabled" in kinds or _is_not_in_cache(error)) and bool(
        kinds & _UNREACHABLE or "LocalEntryNotFoundError" in kinds or isinstance(error, OSError)
    )


def _is_not_in_cache(error: Exception) -> bool:
    """Whether a file was looked for in the cache alone: no other error is behind it then."""
    return type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ is None


def _status(error: BaseException) -> int | None:
    for cause in _chain(error):
        code = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(code, int):
            return code
    return None


def _asked_wait(error: BaseException) -> float | None:
    """Seconds that the server asks to wait, five minutes at most."""
    for cause in _chain(error):
        headers: Any = getattr(getattr(cause, "response", None), "headers", {})
        text = headers.get("Retry-After", "")
        if text.isdecimal():
            return min(float(text), 300.0)
    return None


def _said(error: BaseException) -> str:
    """The server's reason for a refusal, unless it repeats the token."""
    from huggingface_hub import get_token

    tokens = {get_token(), *(token for cause in _chain(error) for token in _sent(cause))}
    for cause in _chain(error):
        text = " ".join(str(getattr(cause, "server_message", None) or "").split())[:200]
        if text and not any(token in text for token in tokens if token):
            return f": {text}"
    return ""


def _sent(error: BaseException) -> list[str]:
    """The token that a request was made with, which may be that of an argument."""
    request = getattr(getattr(error, "response", None), "request", None)
    return str(getattr(request, "headers", {}).get("Authorization", "")).split()[1:]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
