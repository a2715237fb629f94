"""Measurements of snapshots, kept by what they were made from.

A command that is given again measures only what is missing. So a file says what its results were
made from, and is refused instead of being added to where they would be made from something else.
Tables leave out what is of other weights than its snapshot has now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar

from bertvision.errors import ProvenanceError, StoreNotFoundError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.options import Options
from bertvision.pipelines.poolings import TokenPooling, file_part
from bertvision.pipelines.records import (
    Record,
    leave_out,
    leaving_out,
    read_record,
    write_record,
)
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace


class OfSnapshots(Protocol):
    """A record of something that was measured of snapshots."""

    @property
    def weights(self) -> Iterable[tuple[str, object]]:
        """Snapshots, and the digests of their weights that were measured."""

    def mend(self, path: Path) -> str:
        """Advice on a file whose weights are not the snapshot's."""


_T = TypeVar("_T", bound=OfSnapshots)


class Measurements(Record):
    """All results of a snapshot, a pooling and a data set with one choice of settings.

    The file is replaced as a whole whenever some are added.
    """

    folder: ClassVar[str]
    """Where files of this kind are, in a workspace."""
    makes: ClassVar[str]
    """The command that makes them."""

    dataset: str
    """Name of the data set, or of the workspace's task."""
    tag: Tag
    """The snapshot."""
    pooling: TokenPooling
    """Over the tokens of each window."""
    settings: Options
    made_from: Provenance
    """Provenance of the hidden states and of the data: any difference is refused."""

    def told(self) -> Mapping[str, object]:
        """By field what decides the results."""
        return self.made_from

    @property
    def weights(self) -> list[tuple[str, object]]:
        """The snapshot, and the digests of its weights that the hidden states were computed by."""
        names = [name for name in self.made_from if name.split(": ")[-1] == "weights_sha256"]
        return [(self.tag, self.made_from[name]) for name in names]

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`."""
        command = f"{self.makes} {self.dataset} --checkpoint {self.tag} --pool {self.pooling}"
        return f"delete that file, and `{command}` measures anew"

    def place(self, root: Path) -> Path:
        """Where the file is kept in the workspace at ``root``."""
        name = f"{self.tag}-{file_part(self.pooling)}-{self.settings.digest}.json"
        return root / self.folder / self.dataset / name

    def write(self, root: Path) -> None:
        """Keep the file in the workspace at ``root``; it is whole at any time."""
        path = self.place(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, self)

    def resume(self, root: Path) -> Self:
        """Kept measurements of the same snapshot, pooling and settings; these where there are none.

        Args:
            root: Root of the workspace.

        Raises:
            ProvenanceError: what was kept was made from something else; names the field.
            WorkspaceError: the file is damaged.
        """
        path = self.place(root)
        if not path.exists():
            return self
        before = self.read(path)
        mend = "delete that file to measure again, or use another --workspace"
        check_made_from(path, before.told(), self.told(), mend)
        return before

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            WorkspaceError: it is missing or damaged.
        """
        return read_record(path, cls, cls.makes)

    @classmethod
    def read_all(cls, workspace: Workspace, left_out: list[str] | None = None) -> list[Self]:
        """All files of a workspace, by data set, settings, snapshot and pooling.

        Args:
            workspace: Workspace that they are of.
            left_out: see `read_current`.

        Raises:
            WorkspaceError: a file is damaged, and there is no list of what is left out.
        """
        paths = (workspace.root / cls.folder).glob("*/*.json")
        return sorted(
            read_current(workspace, paths, cls.read, left_out).values(),
            key=lambda f: (f.dataset, f.settings.digest, SnapshotTag(f.tag), f.pooling),
        )


def check_made_from(
    place: Path, there: Mapping[str, object], here: Mapping[str, object], mend: str
) -> None:
    """Refuse to add to, or to take for what is asked, what was made from something else.

    Args:
        place: Place of what was kept, for the message.
        there: Origin that was recorded.
        here: Origin that it would have now.
        mend: Next step.

    Raises:
        ProvenanceError: they differ; names the field and both values.
    """
    if difference := first_difference(there, here):
        name, before, now = difference
        raise ProvenanceError(
            f"{place} was made with {name} = {before!r}, now it is {now!r}: {mend}"
        )


def read_current(
    workspace: Workspace,
    paths: Iterable[Path],
    read: Callable[[Path], _T],
    left_out: list[str] | None,
) -> dict[Path, _T]:
    """The records of files, in the order of their names, of the weights that snapshots have now.

    Args:
        workspace: Workspace that they are of.
        paths: Paths of the files.
        read: reads one.
        left_out: gets a message for each file that is damaged or of other weights, and left out;
            where there is no such list, those of other weights are logged.

    Raises:
        WorkspaceError: a file is damaged, and there is no list.
    """
    results, snapshots = {}, cache(partial(weights_of_snapshot, workspace))
    for path in sorted(paths):
        with leaving_out(left_out):
            record = read(path)
            weights = [(workspace.snapshot_dir(t), x, snapshots(t)) for t, x in record.weights]
            if is_current(path, weights, record.mend(path), left_out):
                results[path] = record
    return results


def is_current(
    place: Path,
    weights: Iterable[tuple[Path, object, object]],
    mend: str,
    left_out: list[str] | None,
) -> bool:
    """Whether what was measured is of the weights that stand there now; if not, it is said.

    It is not where a snapshot was fine-tuned anew since, or where a part of another workspace was
    copied into this one. What was removed since, and what an earlier version did not record, cannot
    be compared.

    Args:
        place: Place of what was measured.
        weights: Snapshot that has them, the digest of those that were measured, and of those there
            are.
        mend: Command that makes it again.
        left_out: see `leave_out`.
    """
    for holder, measured, there in weights:
        if None not in (measured, there) and measured != there:
            leave_out(f"{place} is of other weights than {holder} has: {mend}", left_out)
            return False
    return True


def weights_of_snapshot(workspace: Workspace, tag: str) -> str | None:
    """Digest of a snapshot's weights; None where it is not there, or its record is damaged."""
    with suppress(WorkspaceError, StoreNotFoundError):
        return read_snapshot_info(workspace.snapshot_dir(tag)).weights_sha256
    return None
