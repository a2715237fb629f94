"""What is kept of an encoder with 8-bit linear layers: ``quantised/<tag>/metrics.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bertvision.pipelines.records import Count
from bertvision.pipelines.tasks.scores import Rules
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
