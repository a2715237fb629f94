"""Analyses as a workspace keeps them, in ``analysis/<name>.json`` beside the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from bertvision.pipelines.measurements import read_each
from bertvision.pipelines.records import Record, read_record

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


def read_analyses(root: Path, damaged: list[str]) -> dict[Path, Analysis]:
    """All analyses of the workspace at ``root``, by file.

    Args:
        root: of the workspace.
        damaged: gets a message for each file that is damaged, which is then left out.
    """
    return read_each((root / FOLDER).glob("*.json"), _read, damaged)


def _read(path: Path) -> Analysis:
    return read_record(path, Analysis, "bertvision " + path.name.partition("-")[0])
