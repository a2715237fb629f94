"""What is kept of how long answers take: ``latency/<tag>.json``."""

from __future__ import annotations

from pathlib import Path

from bertvision.pipelines.records import Count, Record, leaving_out, read_record
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.workspace import Workspace

FILES = "latency/*.json"
"""Where the records are, in a workspace."""


class Latency(Record):
    """How long a system takes for a window."""

    name: str
    """``BERT``, or a head's run."""
    layers: Count
    """Transformer layers that are run: the encoder is cut above the last that the head takes."""
    seconds: float
    """Per window: median over rounds."""
    low: float
    """Seconds of the fastest round."""
    high: float
    """Seconds of the slowest round."""
    speed_up: float
    """BERT's seconds over these: median of the ratios within a round."""


class Latencies(Record):
    """``latency/<tag>.json``: how long systems take for a window, measured in turns."""

    tag: Tag
    weights_sha256: str
    """Digest of the snapshot's weights."""
    windows: Count
    tokens: float
    """Mean length of a window."""
    batch_size: Count
    rounds: Count
    precision: str
    device: str
    threads: Count
    systems: tuple[Latency, ...]
    """BERT first."""


def latency_file(workspace: Workspace, tag: str) -> Path:
    """Where the measurement on a snapshot is kept."""
    return workspace.root / "latency" / f"{tag}.json"


def read_latencies(workspace: Workspace, damaged: list[str]) -> list[Latencies]:
    """What was measured in a workspace, a record for each snapshot.

    Args:
        workspace: where it was measured.
        damaged: gets a message for each file that is damaged and left out.
    """
    found = []
    for tag in workspace.snapshots():
        with leaving_out(damaged):
            if (path := latency_file(workspace, tag)).is_file():
                command = f"bertvision latency --checkpoint {tag}"
                found.append(read_record(path, Latencies, command, "delete it, or measure again"))
    return found
