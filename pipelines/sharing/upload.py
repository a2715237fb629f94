"""Files sent to a repository: in stages, each in commits of some hundred files.

What is there already is not sent again, so that a push that was interrupted goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bertvision.errors import counted
from bertvision.pipelines.sharing.hub import Repository, ask, exists, resolve, sizes
from bertvision.pipelines.sharing.limits import check_limits
from bertvision.pipelines.text import size

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)
FILES_OF_A_COMMIT = 256

Content = Path | bytes
Stage = Mapping[str, Content]
"""Files by path in the repository."""


class Sent(NamedTuple):
    """What a push left in a repository."""

    repository: Repository
    """At the commit that it ended with."""
    url: str
    files: int
    bytes: int


def bytes_of(content: Content) -> int:
    """Length of a file, or of what is to be one."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def base_of(api: HfApi, repository: Repository) -> Repository | None:
    """The commit that a push begins with; None where the repository is still to be made.

    Raises:
        HubError: the hub cannot be reached, or refuses.
    """
    if not exists(api, repository):
        return None
    if repository.revision is not None and repository.revision not in _branches(api, repository):
        repository = repository._replace(revision=None)  # what the branch will begin with
    return resolve(api, repository)


def send(
    api: HfApi,
    repository: Repository,
    stages: Sequence[Stage],
    message: str,
    *,
    private: bool | None,
    remedy: str,
    base: Repository | None,
) -> Sent:
    """Send files, a stage after the other; make the repository and its branch where need be.

    Args:
        api: of the hub.
        repository: to send to; its revision is a branch.
        stages: files. A later stage is begun when all of the one before it is committed.
        message: of the commits.
        private: whether a new repository is; None is what its owner has as the default.
        remedy: what to do where the hub does not take so many or so large files.
        base: as `base_of` found it.

    Raises:
        InputError: the hub does not take so much; nothing was sent.
        HubError: it cannot be reached, or refuses; the same call goes on.
    """
    lengths = {path: bytes_of(content) for stage in stages for path, content in stage.items()}
    check_limits(lengths, sizes(api, base) if base else (), remedy)
    url = str(
        ask(
            repository,
            api.create_repo,
            repository.name,
            repo_type=repository.kind,
            private=private,
            exist_ok=True,
            space_sdk="static" if repository.kind == "space" else None,
        )
    )
    branch = repository.revision
    if branch is not None:
        name, kind = repository.name, repository.kind
        ask(repository, api.create_branch, name, branch=branch, repo_type=kind, exist_ok=True)
    done, commit = 0, None
    for batch in chain.from_iterable(map(_batches, stages)):
        commit = ask(repository, _commit, api, repository, batch, message)
        done += len(batch)
        if done < len(lengths):
            log.info("%s: %s of %s", repository, f"{done:,}", counted(len(lengths), "file"))
    log.info("%s: %s sent", repository, size(sum(lengths.values())))
    at = repository._replace(revision=commit or branch)
    return Sent(at, url, len(lengths), sum(lengths.values()))


def _batches(stage: Stage) -> Iterator[Stage]:
    """The files of a stage, as many at a time as go into one commit."""
    items = list(stage.items())
    for begin in range(0, len(items), FILES_OF_A_COMMIT):
        yield dict(items[begin : begin + FILES_OF_A_COMMIT])


def _commit(api: HfApi, repository: Repository, files: Stage, message: str) -> str:
    from huggingface_hub import CommitOperationAdd

    # made anew for each try: what was sent before is found out and left out
    added = [CommitOperationAdd(path, content) for path, content in files.items()]
    info = api.create_commit(
        repository.name,
        added,
        commit_message=message,
        repo_type=repository.kind,
        revision=repository.revision,
    )
    return str(info.oid)


def _branches(api: HfApi, repository: Repository) -> set[str]:
    name, kind = repository.name, repository.kind
    found = ask(repository, api.list_repo_refs, name, repo_type=kind)
    return {ref.name for ref in found.branches}
