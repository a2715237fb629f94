"""Analyses as a workspace keeps them, in ``analysis/<name>.json`` beside the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Self, TypeVar

from pydantic import JsonValue, model_validator

from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.records import Record, read_record
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.workspace import Workspace

FOLDER = "analysis"
"""Where they are, in a workspace."""

R = TypeVar("R", bound=AnalysisResult)


class Analysis(Record, Generic[R]):
    """An analysis of stored activations, and what it is of; ``Analysis[CkaResult]``, for one."""

    command: str
    """The command that makes it."""
    weights_sha256: dict[Tag, str]
    """By snapshot the digest of the weights whose hidden states were read."""
    splits_sha256: dict[str, str] = {}
    """By stored split the digest of its record; none in what earlier versions wrote."""
    files_sha256: dict[str, str] = {}
    """By name the digest of what else was read."""
    settings: dict[str, JsonValue] = {}
    """Settings that decide the result beside the splits."""
    notes: tuple[str, ...] = ()
    """Sentences on the encodings of the splits, where they change what is told."""
    kind: str
    """The kind of its result."""
    result: R

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.kind != self.result.kind:
            raise ValueError(f"kind is {self.kind!r} where {self.result.kind!r} belongs")
        self.result.with_notes(self.notes)
        return self

    @property
    def weights(self) -> list[tuple[str, object]]:
        """Snapshots, and the digests of their weights."""
        return list(self.weights_sha256.items())

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`; first what is stored is to be of these weights."""
        if self.files_sha256:  # no stored state is among what was read
            return f"`{self.command}`"
        tags = ",".join(self.weights_sha256)
        return f"`bertvision extract --checkpoint {tags}`, then `{self.command}`"


def read_analysis(path: Path, result: type[R], again: str | None = None) -> Analysis[R]:
    """Read an analysis that a command kept.

    Args:
        path: of the file.
        result: class of its result.
        again: the command that makes it, for the messages.

    Raises:
        WorkspaceError: it is missing or damaged; names the field and what to do.
    """
    # mypy takes no class that is known at run time alone
    record: type[Analysis[R]] = Analysis[result]  # type: ignore[valid-type]
    return read_record(path, record, again or f"bertvision {result.kind}")


def read_analyses(
    workspace: Workspace, result: type[R], left_out: list[str]
) -> dict[str, Analysis[R]]:
    """The analyses of a kind that a workspace keeps, by the file inside of it.

    Args:
        workspace: that they are of.
        result: class of their results.
        left_out: see `read_current`.
    """
    files = (workspace.root / FOLDER).glob(f"{result.kind}-*.json")
    found = read_current(workspace, files, lambda path: read_analysis(path, result), left_out)
    return {path.relative_to(workspace.root).as_posix(): of for path, of in found.items()}
