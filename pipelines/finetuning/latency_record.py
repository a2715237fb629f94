"""Records of the time that answers take: ``latency/<tag>.json``.

What is kept of an encoder with 8-bit linear layers: ``quantised/<tag>/metrics.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.records import Count, Record, read_record
from bertvision.pipelines.tasks.scores import Rules
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.records import BertScores
from bertvision.pipelines.workspace.workspace import Workspace

FILES = "latency/*.json"
"""Where the records are, in a workspace."""


class Latency(Record):
    """How long a system takes for a window."""

    name: str
    """``BERT``, the same in 8 bits, a head's run, or ``FOLDER:TAG`` of an encoder elsewhere."""
    trained_on: Tag | None = None
    """Snapshot that the head was trained on."""
    layers: Count
    """Transformer layers that are run: the encoder is cut above the last that the head takes."""
    weights_sha256: str | None = None
    """Digest of the weights of an encoder elsewhere."""
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

    @property
    def weights(self) -> list[tuple[str, object]]:
        """The snapshot, and the digest of its weights."""
        return [(self.tag, self.weights_sha256)]

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`."""
        return f"`bertvision latency --checkpoint {self.tag}` measures anew"


def system_name(name: str, trained_on: str | None, tag: str) -> str:
    """A system as it is shown: with the snapshot of its head where it is not ``tag``."""
    return name if trained_on in (None, tag) else f"{name} trained on {trained_on}"


def latency_file(workspace: Workspace, tag: str) -> Path:
    """Where the measurement on a snapshot is kept."""
    return workspace.root / "latency" / f"{tag}.json"


def read_latencies(workspace: Workspace, left_out: list[str]) -> list[Latencies]:
    """Measured latencies of a workspace, a record for each snapshot.

    Args:
        workspace: Workspace in which it was measured.
        left_out: see `read_current`.
    """
    latencies = read_current(workspace, workspace.root.glob(FILES), _read, left_out)
    return sorted(latencies.values(), key=lambda measured: SnapshotTag(measured.tag))


def _read(path: Path) -> Latencies:
    again = f"bertvision latency --checkpoint {path.stem}"
    latencies = read_record(path, Latencies, again, "delete it, or measure again")
    if latencies.tag != path.stem:
        raise WorkspaceError(
            f"{path} is of the snapshot {latencies.tag}: `{again}` measures this one"
        )
    return latencies


FOLDER = "quantised"
"""Where the records are, in a workspace: a folder for each snapshot."""
NAME, RUN = "BERT, int8", "bert-int8"
"""The system, as people read it and as they type it."""


class QuantisedScores(BertScores):
    """``metrics.json`` of an encoder with 8-bit linear layers."""

    layers: Count
    """Linear layers in 8 bits."""
    bytes: Count
    """Size of the encoder's weights with them, without the task's output layer."""
    float_bytes: Count
    """Size in float32."""
    precision: Literal["32"]
    """Arithmetic of what is not in 8 bits."""
    whole: Rules | None
    """Scores of the encoder without 8-bit layers in this precision, by rule; None where the
    workspace's own are of it."""
    engine: str
    """Kernels of torch that computed them."""


def quantised_dir(workspace: Workspace, tag: str) -> Path:
    """Folder of the 8-bit encoder's logits, predictions and metrics at a snapshot."""
    return workspace.root / FOLDER / tag


def quantise_command(tag: str) -> str:
    """The command that makes them."""
    return f"bertvision quantise --checkpoint {tag}"
