"""What decides the activations of a split, small enough to send to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformers import PreTrainedModel

from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import dimensions
from bertvision.pipelines.encoders.token_pooling import check_poolings
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.snapshots import SnapshotInfo, load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


class LoadedEncoder(NamedTuple):
    """A snapshot's encoder, ready to extract."""

    encoder: Encoder
    tokenizer: Any
    info: SnapshotInfo
    layers: Mapping[TokenPooling, tuple[int, ...]]
    """Indices of the hidden states that are kept, by what is kept of a window."""
    hidden_size: int


@dataclass(frozen=True)
class ExtractionJob:
    """The extraction of a split; any process that sees the workspace computes the same from it."""

    root: Path
    """Folder of the workspace."""
    tag: str
    split: str
    """Name of the split in the data."""
    options: ExtractOptions
    """With nothing left to choose: the data set, the tokens and the precision are named."""

    def load(self) -> tuple[Encoder, Windows]:
        """The encoder, and the windows of the split in the order of the data."""
        workspace = Workspace.find(self.root)
        loaded = load_encoder(workspace, self.tag, self.options)
        windows = workspace.dataset(self.options.dataset).windows(self.split, loaded.tokenizer)
        return loaded.encoder, windows


def load_encoder(workspace: Workspace, tag: str, options: ExtractOptions) -> LoadedEncoder:
    """Load a snapshot's encoder for an extraction.

    Args:
        workspace: with the snapshot.
        tag: of the snapshot.
        options: which tokens and layers to keep of each window, and the precision.

    Raises:
        InputError: it has no such hidden state, or no token for a pooling.
        WorkspaceError: the snapshot is damaged.
    """
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    tokens = options.tokens or ()
    check_poolings([kept for kept in tokens if kept != "all"], snapshot.tokenizer)
    model = cast(PreTrainedModel, snapshot.model.base_model)
    size = dimensions(model.config)
    pooler = getattr(model, "pooler", None) is not None
    kept = {t: kept_layers(options.layers, size.layers, pooler=pooler, tokens=t) for t in tokens}
    encoder = Encoder(model, kept, resolve_precision(options.precision))
    return LoadedEncoder(encoder, snapshot.tokenizer, snapshot.info, kept, size.hidden_size)
