"""Analyses as a workspace keeps them, in ``analysis/<name>.json`` beside the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.records import Record, read_record
from bertvision.pipelines.workspace.workspace import Workspace

FOLDER = "analysis"
"""Where they are, in a workspace."""


class Analysis(Record):
    """An analysis of stored activations, and what it is of."""

    kind: Literal["cka", "isotropy"]
    command: str
    """The command that makes it."""
    weights_sha256: dict[str, str]
    """By snapshot the digest of the weights whose hidden states were read."""
    result: dict[str, JsonValue]
    """What ``--json`` prints."""

    @property
    def weights(self) -> list[tuple[str, object]]:
        """Snapshots, and the digests of their weights."""
        return list(self.weights_sha256.items())

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`; first what is stored is to be of these weights."""
        tags = ",".join(self.weights_sha256)
        return f"`bertvision extract --checkpoint {tags}`, then `{self.command}`"


def read_analyses(workspace: Workspace, left_out: list[str]) -> dict[Path, Analysis]:
    """All analyses of a workspace, by file.

    Args:
        workspace: that they are of.
        left_out: see `read_current`.
    """
    return read_current(workspace, (workspace.root / FOLDER).glob("*.json"), _read, left_out)


def _read(path: Path) -> Analysis:
    return read_record(path, Analysis, "bertvision " + path.name.partition("-")[0])
