"""``bertvision.json`` in a repository: what was pushed there, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from bertvision.errors import HubError, InputError
from bertvision.featurestore.storage.seal import sealed
from bertvision.featurestore.storage.storage import SMALL_BYTES
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.records import Count, Record, read_record
from bertvision.pipelines.sharing.hub import Repository, ask
from bertvision.pipelines.text import size

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FILE = "bertvision.json"
CARD = "README.md"
Kind = Literal["head", "snapshot", "store", "report"]


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
    """What a repository holds.

    Attributes:
        kind: of what was pushed.
        name: as it was called where it was pushed; of a store, nothing.
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    return read_record(folder / FILE, Manifest, "bertvision pull", "pull it again")


def fetch_manifest(api: HfApi, repository: Repository, files: Mapping[str, int]) -> Manifest:
    """The manifest of a repository.

    Args:
        api: of the hub.
        repository: at a commit.
        files: what it holds.

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
