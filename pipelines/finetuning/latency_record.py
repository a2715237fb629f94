"""What is kept of how long answers take: ``latency/<tag>.json``."""

from __future__ import annotations

import logging
from pathlib import Path

from bertvision.pipelines.records import Count, Record, leaving_out, read_record
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

FILES = "latency/*.json"
"""Where the records are, in a workspace."""


class Latency(Record):
    """How long a system takes for a window."""

    name: str
    """``BERT``, or a head's run."""
    trained_on: Tag | None = None
    """Snapshot that the head was trained on."""
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


def system_name(name: str, trained_on: str | None, tag: str) -> str:
    """A system as it is shown: with the snapshot of its head where it is not ``tag``."""
    return name if trained_on in (None, tag) else f"{name} trained on {trained_on}"


def latency_file(workspace: Workspace, tag: str) -> Path:
    """Where the measurement on a snapshot is kept."""
    return workspace.root / "latency" / f"{tag}.json"


def read_latencies(workspace: Workspace, damaged: list[str]) -> list[Latencies]:
    """What was measured in a workspace, a record for each snapshot.

    What was measured with other weights than stand there now is left out, which is logged.

    Args:
        workspace: where it was measured.
        damaged: gets a message for each file that is damaged and left out.
    """
    found = []
    for tag in workspace.snapshots():
        with leaving_out(damaged):
            if not (path := latency_file(workspace, tag)).is_file():
                continue
            command = f"bertvision latency --checkpoint {tag}"
            measured = read_record(path, Latencies, command, "delete it, or measure again")
            weights = read_snapshot_info(workspace.snapshot_dir(tag)).weights_sha256
            if (measured.tag, measured.weights_sha256) == (tag, weights):
                found.append(measured)
            else:
                log.info("%s is of other weights, and left out: `%s` measures anew", path, command)
    return found
