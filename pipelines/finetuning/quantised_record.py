"""What is kept of an encoder with 8-bit linear layers: ``quantised/<tag>/metrics.json``."""

from __future__ import annotations

from pathlib import Path

from bertvision.pipelines.records import Count
from bertvision.pipelines.workspace.records import BertScores
from bertvision.pipelines.workspace.workspace import Workspace

FOLDER = "quantised"
"""Where the records are, in a workspace: a folder for each snapshot."""
NAME, RUN = "BERT, int8", "bert-int8"
"""The system, as people read it and as they type it."""


class QuantisedScores(BertScores):
    """``metrics.json`` of an encoder with 8-bit linear layers."""

    layers: Count
    """Linear layers in 8 bits."""
    bytes: Count
    """Size of the model's weights with them."""
    float_bytes: Count
    """Size in float32."""
    engine: str
    """Kernels of torch that computed them."""


def quantised_dir(workspace: Workspace, tag: str) -> Path:
    """Folder of the 8-bit encoder's logits, predictions and metrics at a snapshot."""
    return workspace.root / FOLDER / tag


def quantise_command(tag: str) -> str:
    """The command that makes them."""
    return f"bertvision quantise --checkpoint {tag}"
