"""Files brought from a repository into a folder, where an interrupted download goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import DiskSpaceError, HubError, InputError
from bertvision.featurestore.storage.durable import full_disk_named, make_folder
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.sharing.hub import Repository, ask
from bertvision.pipelines.text import size

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@contextmanager
def staging(place: Path, repository: Repository) -> Iterator[Path]:
    """A folder beside ``place`` for what is brought from a repository, alone.

    It stays where the block ends with an error, so that the next call goes on; and is removed
    where it ends well.

    Raises:
        LockedError: another process is bringing the same.
        DiskSpaceError: the disk is full.
    """
    kept = str(repository._replace(revision=None)).replace("/", "--")
    folder = place / f".pull-{kept}"
    with full_disk_named(place):
        make_folder(folder)
        with exclusive(place / f".pull-{kept}.lock", f"pulling {repository}"):
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
        api: of the hub.
        repository: at a commit.
        listing: of the repository, bytes by path.
        wanted: paths in the repository, and in the folder.
        folder: to put them in.
        patterns: of fnmatch, that these files fit, and few enough to compare all others with.

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
