"""``bertvision.json`` in a repository: what was pushed there, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from bertvision.errors import HubError, InputError, WorkspaceError, counted
from bertvision.featurestore.storage.durable import sealed
from bertvision.featurestore.storage.storage import SMALL_BYTES
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.records import Count, Record, read_record
from bertvision.pipelines.sharing.hub import Repository, ask
from bertvision.pipelines.text import size

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)
FILE = "bertvision.json"
CARD = "README.md"
_OF_THE_HUB = {".gitattributes"}
"""Files of a repository that is just made."""
Kind = Literal["head", "snapshot", "store", "report", "predictor"]


class SharedFile(Record):
    """A file of a repository, as it was when it was sent."""

    size: Count
    """Bytes of it."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, content: Path | bytes) -> SharedFile:
        """The length and digest of a file, or of what is to be one."""
        if isinstance(content, Path):
            return cls(size=content.stat().st_size, sha256=sha256_of_files([content]))
        return cls(size=len(content), sha256=hashlib.sha256(content).hexdigest())


class Manifest(Record):
    """Content of a repository.

    Attributes:
        kind: Kind of what was pushed.
        name: Name where it was pushed; of a store, nothing.
        bertvision: version that pushed it.
        files: all but the card, by path. Of a store there are none here: its ledger has them.
    """

    kind: Kind
    name: str = ""
    bertvision: str
    files: dict[str, SharedFile] = {}

    def content(self) -> bytes:
        """The file, with its own checksum."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False)
        return sealed(text.encode()) + b"\n"


def write_manifest(folder: Path, kind: Kind, name: str, files: Iterable[str]) -> None:
    """Write the digests of files of a folder beside them.

    Args:
        folder: The folder.
        kind: Kind of what is in it.
        name: Its name where it was made.
        files: Paths inside the folder.
    """
    listed = {path: SharedFile.of(folder / path) for path in files}
    manifest = Manifest(kind=kind, name=name, bertvision=version("bertvision"), files=listed)
    (folder / FILE).write_bytes(manifest.content())


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    return read_record(folder / FILE, Manifest, "bertvision pull", "pull it again")


def fetch_manifest(api: HfApi, repository: Repository, files: Mapping[str, int]) -> Manifest:
    """The manifest of a repository.

    Args:
        api: API of the hub.
        repository: Repository at a commit.
        files: Files of the push.

    Raises:
        InputError: it was not pushed by bertvision, or the manifest is larger than any is.
        WorkspaceError: the manifest is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    if FILE not in files:
        raise InputError(
            f"{repository} has no {FILE}: `bertvision pull` brings what `bertvision push` sent; "
            "others are brought by `hf download`"
        )
    if files[FILE] > SMALL_BYTES:
        raise InputError(f"{FILE} of {repository} has {size(files[FILE])}, and is no manifest")
    with TemporaryDirectory() as folder:
        ask(
            f"{FILE} of {repository}",
            api.snapshot_download,
            repository.name,
            allow_patterns=[FILE],
            repo_type=repository.kind,
            revision=repository.revision,
            local_dir=folder,
        )
        return read_manifest(Path(folder))


def earlier_push(
    api: HfApi, repository: Repository, files: Mapping[str, int], kind: Kind, *, replace: bool
) -> Manifest | None:
    """The manifest of what was pushed to a repository before, that is to be pushed to again.

    Args:
        api: API of the hub.
        repository: Repository at a commit.
        files: Files that it holds.
        kind: Kind of what is to be pushed.
        replace: Take the place of whatever it holds.

    Returns:
        None of one that is empty, or holds what somebody else put there.

    Raises:
        InputError: it holds what `push` did not send, or another kind of thing, and ``replace`` is
            not set; nothing was sent.
        HubError: the hub cannot be reached, or refuses.
    """
    name = str(repository._replace(revision=None))
    otherwise = (
        "push to another name, or, to have what is sent in the place of its card and of files of "
        "the same names, with --replace (in Python, replace=True); nothing was sent"
    )
    manifest = None
    try:
        if FILE in files:
            manifest = fetch_manifest(api, repository, files)
    except (InputError, WorkspaceError):
        log.info("%s: its %s is none", repository, FILE)
    foreign = set(files) - _OF_THE_HUB
    if replace or not foreign:
        return manifest
    if manifest is None:
        raise InputError(
            f"{name} holds {counted(len(foreign), 'file')} that `bertvision push` did not send, "
            f"such as {CARD if CARD in foreign else min(foreign)}: {otherwise}"
        )
    if manifest.kind != kind:
        raise InputError(f"{name} holds a {manifest.kind}, and this is a {kind}: {otherwise}")
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a folder with their digests; a file that differs is removed.

    Raises:
        HubError: one differs or is missing; names all.
    """
    wrong = []
    for name, due in manifest.files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != due.size or sha256_of_files([path]) != due.sha256:
            path.unlink()
            wrong.append(f"{name} is not as it was sent")
    if wrong:
        raise HubError(
            f"{'; '.join(wrong)}: nothing was put in place; run the same command again, which "
            "brings these alone, or name an earlier --revision"
        )
