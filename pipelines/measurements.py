"""What was measured of snapshots, kept by what it was made from: added to where it still is that.

A command that is given again measures only what is missing. So a file says what its results were
made from, and is refused instead of being added to where they would be made from something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.options import Options
from bertvision.pipelines.records import Record, leaving_out, read_record, write_record
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.config import Tag

_T = TypeVar("_T")


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

    def place(self, root: Path) -> Path:
        """Where the file is kept in the workspace at ``root``."""
        name = f"{self.tag}-{self.pooling}-{self.settings.digest}.json"
        return root / self.folder / self.dataset / name

    def write(self, root: Path) -> None:
        """Keep the file in the workspace at ``root``; it is whole at any time."""
        path = self.place(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, self)

    def resume(self, root: Path) -> Self:
        """What was kept of the same snapshot, pooling and settings; these where nothing was.

        Args:
            root: of the workspace.

        Raises:
            ProvenanceError: what was kept was made from something else; names the field.
            WorkspaceError: the file is damaged.
        """
        path = self.place(root)
        if not path.exists():
            return self
        held = self.read(path)
        mend = "delete that file to measure again, or use another --workspace"
        check_made_from(path, held.told(), self.told(), mend)
        return held

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            WorkspaceError: it is missing or damaged.
        """
        return read_record(path, cls, cls.makes)

    @classmethod
    def read_all(cls, root: Path, damaged: list[str] | None = None) -> list[Self]:
        """All files of the workspace at ``root``, by data set, settings, snapshot and pooling.

        Args:
            root: of the workspace.
            damaged: gets a message for each file that is damaged, which is then left out.

        Raises:
            WorkspaceError: a file is damaged, and there is no list of these.
        """
        found = read_each((root / cls.folder).glob("*/*.json"), cls.read, damaged)
        return sorted(
            found.values(),
            key=lambda f: (f.dataset, f.settings.digest, SnapshotTag(f.tag), f.pooling),
        )


def check_made_from(
    place: Path, there: Mapping[str, object], here: Mapping[str, object], mend: str
) -> None:
    """Refuse to add to, or to take for what is asked, what was made from something else.

    Args:
        place: of what was kept, for the message.
        there: what that was made from.
        here: what it would be made from now.
        mend: what can be done.

    Raises:
        ProvenanceError: they differ; names the field and both values.
    """
    if difference := first_difference(there, here):
        name, kept, now = difference
        raise ProvenanceError(f"{place} was made with {name} = {kept!r}, now it is {now!r}: {mend}")


def read_each(
    paths: Iterable[Path], read: Callable[[Path], _T], damaged: list[str] | None
) -> dict[Path, _T]:
    """The records of files, in the order of their names.

    Args:
        paths: of the files.
        read: reads one.
        damaged: gets a message for each file that is damaged, which is then left out.

    Raises:
        WorkspaceError: a file is damaged, and there is no list of these.
    """
    found = {}
    for path in sorted(paths):
        with leaving_out(damaged):
            found[path] = read(path)
    return found
