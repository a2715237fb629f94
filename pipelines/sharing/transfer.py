"""Files sent to a repository and brought from it; both continue after an interruption.

They are sent in stages, each in commits of some hundred files. Files that are there already are
not sent again. Each commit names the one that it follows, so that of two pushes at once one is
refused, and nothing is lost. Limits of the hub are checked before anything is sent
(https://huggingface.co/docs/hub/storage-limits).
"""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from bertvision.errors import DiskSpaceError, HubError, InputError, counted
from bertvision.featurestore.storage.durable import full_disk_named, make_folder
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.sharing.hub import Repository, ask, exists, resolve, sizes
from bertvision.pipelines.sharing.manifest import FILE
from bertvision.pipelines.text import size

if TYPE_CHECKING:
    from huggingface_hub import HfApi


MOST_FILES = 100_000
MOST_ENTRIES = 10_000
MOST_BYTES = 50 * 10**9


def check_limits(sent: Mapping[str, int], there: Collection[str], remedy: str) -> None:
    """Check that a repository can hold what is to be sent.

    Args:
        sent: bytes of each file, by path in the repository.
        there: paths of the files that it holds already.
        remedy: Remedy that makes fewer or smaller files, for the message.

    Raises:
        InputError: it cannot; nothing was sent.
    """
    paths = {*sent, *there}
    if len(paths) > MOST_FILES:
        raise InputError(
            f"the repository would hold {len(paths):,} files, and the hub takes {MOST_FILES:,}: "
            f"{remedy}; nothing was sent"
        )
    entries: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        while name:
            if name in entries[folder]:
                break  # and so are the folders above
            entries[folder].add(name)
            folder, _, name = folder.rpartition("/")
    folder, names = max(entries.items(), key=lambda item: len(item[1]), default=("", set()))
    if len(names) > MOST_ENTRIES:
        raise InputError(
            f"{folder} would have {len(names):,} entries, and the hub takes {MOST_ENTRIES:,} in a "
            f"folder: {remedy}; nothing was sent"
        )
    path = max(sent, key=lambda path: sent[path], default="")
    if path and sent[path] > MOST_BYTES:
        raise InputError(
            f"{path} has {size(sent[path])}, and the hub takes {size(MOST_BYTES)} in a file: "
            f"{remedy}; nothing was sent"
        )


log = logging.getLogger(__name__)
FILES_OF_A_COMMIT = 256

Content = Path | bytes
Stage = Mapping[str, Content]
"""Files by path in the repository."""


class Base(NamedTuple):
    """State of a repository before a push."""

    repository: Repository
    """At a commit."""
    files: dict[str, int]
    """All that it holds: bytes by path."""


class Sent(NamedTuple):
    """State of a repository after a push."""

    repository: Repository
    """At the commit that it ended with."""
    url: str
    files: int
    bytes: int


def bytes_of(content: Content) -> int:
    """Length of a file, or of what is to be one."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def base_of(api: HfApi, repository: Repository) -> Base | None:
    """The commit that a push begins with; None where the repository is still to be made.

    Raises:
        HubError: the hub cannot be reached, or refuses.
    """
    if not exists(api, repository):
        return None
    if repository.revision is not None and repository.revision not in _branches(api, repository):
        repository = repository._replace(revision=None)  # what the branch will begin with
    at = resolve(api, repository)
    return Base(at, sizes(api, at))


def send(
    api: HfApi,
    repository: Repository,
    stages: Sequence[Stage],
    message: str,
    *,
    private: bool | None,
    remedy: str,
    base: Base | None,
    removed: Collection[str] = (),
) -> Sent:
    """Send files, a stage after the other; make the repository and its branch where need be.

    Args:
        api: API of the hub.
        repository: Repository to send to; its revision is a branch.
        stages: files. A later stage is begun when all of the one before it is committed. The first
            begins with the manifest, by which a push that goes on knows the repository for its own.
        message: Message of the commits.
        private: Whether a new repository is; None is what its owner has as the default.
        remedy: Next step where the hub does not take so many or so large files.
        base: as `base_of` found it, and nothing was pushed since.
        removed: paths in ``base`` that the first commit takes away.

    Raises:
        InputError: the hub does not take so much; nothing was sent.
        HubError: it cannot be reached, or refuses, or something was pushed since; the same call
            goes on.
    """
    lengths = {path: bytes_of(content) for stage in stages for path, content in stage.items()}
    check_limits(lengths, set(base.files).difference(removed) if base else (), remedy)
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
    begin = base.repository.revision if base else None
    if (branch := repository.revision) is not None:
        ask(
            repository,
            api.create_branch,
            repository.name,
            branch=branch,
            revision=begin,
            repo_type=repository.kind,
            exist_ok=True,
        )
    if base is None:
        base = base_of(api, repository)
        if base is None or FILE in base.files:
            raise _overtaken(repository)
    parent, done = str(base.repository.revision), 0
    for batch in chain.from_iterable(map(_batches, stages)):
        parent = _commit(api, repository, batch, () if done else removed, message, parent)
        done += len(batch)
        if done < len(lengths):
            log.info("%s: %s of %s", repository, f"{done:,}", counted(len(lengths), "file"))
    if removed:
        log.info("%s: %s of before removed", repository, counted(len(removed), "file"))
    log.info("%s: %s sent", repository, size(sum(lengths.values())))
    at = repository._replace(revision=parent)
    return Sent(at, url, len(lengths), sum(lengths.values()))


def _batches(stage: Stage) -> Iterator[Stage]:
    """The files of a stage, as many at a time as go into one commit."""
    items = list(stage.items())
    for begin in range(0, len(items), FILES_OF_A_COMMIT):
        yield dict(items[begin : begin + FILES_OF_A_COMMIT])


def _commit(
    api: HfApi,
    repository: Repository,
    files: Stage,
    removed: Collection[str],
    message: str,
    parent: str,
) -> str:
    """Commit files on top of a commit; where nothing changes, that commit is returned.

    Raises:
        HubError: the branch stands elsewhere; or the hub cannot be reached, or refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    name, kind, branch = repository.name, repository.kind, repository.revision
    mark = token_hex(8)  # by which a commit is known whose answer was lost
    tries = count()

    def commit() -> str:
        if next(tries):
            last = api.list_repo_commits(name, repo_type=kind, revision=branch)[0]
            if mark in last.message:
                return last.commit_id
            if last.commit_id != parent:
                raise _overtaken(repository)
        # made anew for each try: what was sent before is found out and left out
        added = [CommitOperationAdd(path, content) for path, content in files.items()]
        info = api.create_commit(
            name,
            [*added, *(CommitOperationDelete(path, is_folder=False) for path in sorted(removed))],
            commit_message=message,
            commit_description=f"push {mark}",
            repo_type=kind,
            revision=branch,
            parent_commit=parent,
        )
        # where no file differs nothing is committed, and the branch is told without a comparison
        committed = bool(removed) or any(each._is_committed for each in added)
        if not committed and info.oid != parent:
            raise _overtaken(repository)
        return str(info.oid)

    return ask(repository, commit)


def _overtaken(repository: Repository) -> HubError:
    return HubError(
        f"{repository}: something else was pushed there meanwhile, and stays: run the same command "
        "again, it goes on from there"
    )


def _branches(api: HfApi, repository: Repository) -> set[str]:
    name, kind = repository.name, repository.kind
    refs = ask(repository, api.list_repo_refs, name, repo_type=kind)
    return {ref.name for ref in refs.branches}


@contextmanager
def staging(place: Path, repository: Repository) -> Iterator[Path]:
    """A folder beside ``place`` for what is brought from a repository, alone.

    It stays where the block ends with an error, so that the next call goes on; and is removed
    where it ends well.

    Raises:
        LockedError: another process is bringing the same.
        DiskSpaceError: the disk is full.
    """
    name = str(repository._replace(revision=None)).replace("/", "--")
    folder = place / f".pull-{name}"
    with full_disk_named(place):
        make_folder(folder)
        with exclusive(place / f".pull-{name}.lock", f"pulling {repository}"):
            yield folder
            shutil.rmtree(folder, ignore_errors=True)


def fetch(
    api: HfApi,
    repository: Repository,
    listing: Mapping[str, int],
    wanted: Sequence[str],
    folder: Path,
    patterns: Sequence[str],
) -> None:
    """Bring files of a repository into a folder; those that are there already are not asked for.

    Args:
        api: API of the hub.
        repository: Repository at a commit.
        listing: Listing of the repository, bytes by path.
        wanted: paths in the repository, and in the folder.
        folder: Folder to put them in.
        patterns: Patterns of fnmatch, that these files fit, and few enough to compare all others
            with.

    Raises:
        InputError: other files of the repository fit too, which nobody would have counted.
        HubError: the hub cannot be reached, or refuses, or a file did not arrive whole.
        DiskSpaceError: the disk is too small for what is still to come.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    files = {path: listing[path] for path in wanted}
    for path in filter_repo_objects(listing, allow_patterns=list(patterns)):
        if path not in files:
            raise InputError(
                f"{repository}: {path!r} lies among files that are pulled, and is none that was "
                "pushed: nothing was put in place"
            )

    due = sum(
        length
        for path, length in files.items()
        if not (folder / path).is_file() or (folder / path).stat().st_size != length
    )
    free = shutil.disk_usage(folder).free
    if due > free:
        raise DiskSpaceError(
            f"{repository} needs {size(due)} on the disk of {folder.parent}, where {size(free)} "
            "are free: make room, or name another folder"
        )
    ask(
        repository,
        snapshot_download,
        repository.name,
        repo_type=repository.kind,
        revision=repository.revision,
        local_dir=folder,
        allow_patterns=list(patterns),
        endpoint=api.endpoint,
    )
    # where the hub cannot be asked, huggingface_hub returns a folder as it finds it
    for path, length in files.items():
        if not (folder / path).is_file() or (folder / path).stat().st_size != length:
            raise HubError(
                f"{path} of {repository} did not arrive whole: run the same command again, it "
                "goes on from there"
            )
