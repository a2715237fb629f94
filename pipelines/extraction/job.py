"""Job of an extraction, small enough to send to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.featurestore.format.logits import TopRule
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.encoders.encoder import Encoder, HiddenStateSource
from bertvision.pipelines.encoders.kept_states import check_poolings
from bertvision.pipelines.encoders.loading import check_token_ids, dimensions
from bertvision.pipelines.encoders.sites.names import width_of
from bertvision.pipelines.encoders.vocabulary_head import load_next_tokens
from bertvision.pipelines.extraction.layers import layers_of_tokens
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.windows import Windows, special_ends
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.pretrained import checkpoint_of_states
from bertvision.pipelines.workspace.records import SnapshotInfo
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


class LoadedSource(NamedTuple):
    """Source of the hidden states of a snapshot, ready to extract."""

    source: HiddenStateSource
    """The encoder, or the stored tokens."""
    tokenizer: Any
    info: SnapshotInfo
    layers: Mapping[TokenPooling, tuple[int, ...]]
    """Indices of the hidden states, or of the sites, that are kept, by what is kept of a window."""
    hidden_size: int
    """Channels of a hidden state, or of a site."""
    check: Callable[[Windows], None]
    """Refuses windows that it cannot give the hidden states of."""


class TokenSplit(NamedTuple):
    """A stored split of all tokens that poolings are taken of."""

    name: str
    encoding: str


@dataclass(frozen=True)
class ExtractionJob:
    """The extraction of a split; any process that sees the workspace computes the same from it."""

    root: Path
    """Folder of the workspace."""
    tag: str
    split: str
    """Name of the split in the data."""
    options: ExtractOptions
    """With nothing left to choose: the data set, the tokens, the sites (each of them) and the
    precision are named."""
    pooled_from: TokenSplit | None = None
    """A stored split of the same snapshot; None runs the encoder."""


def load_encoder(
    workspace: Workspace, tag: str, options: ExtractOptions, *, alone: bool = False
) -> LoadedSource:
    """Load a snapshot's encoder for an extraction.

    Args:
        workspace: Workspace with the snapshot.
        tag: Tag of the snapshot.
        options: Tokens and layers, or sites, to keep of each window, and the precision.
        alone: Whether each window is computed by itself (see `Encoder`).

    Raises:
        InputError: it has no such hidden state, or no token for a pooling.
        WorkspaceError: the snapshot is damaged.
    """
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    tokens = options.tokens or ()
    check_poolings([pooling for pooling in tokens if pooling != "all"], snapshot.tokenizer)
    model = cast(PreTrainedModel, snapshot.model.base_model)
    size = dimensions(model.config, snapshot.tokenizer)
    pooler, sites = getattr(model, "pooler", None) is not None, options.sites or ()
    layers_kept = layers_of_tokens(options, size.layers, pooler=pooler)
    next_tokens = None
    if options.logits is not None:
        begun, at = checkpoint_of_states(workspace, SnapshotTag(tag)), SnapshotTag(tag)
        next_tokens = load_next_tokens(
            *(begun.folder, begun.name_or_path, TopRule.parse(options.logits), model),
            same=at.is_pretrained or at.is_named,
        )
    encoder = Encoder(
        *(model, layers_kept, resolve_precision(options.precision), sites),
        alone=alone,
        special=special_ends(snapshot.tokenizer),
        next_tokens=next_tokens,
    )

    def check(windows: Windows) -> None:
        check_lengths(size.max_length, windows)
        check_token_ids(windows.input_ids, snapshot.tokenizer, model)
        encoder.check(windows)

    return LoadedSource(
        encoder,
        snapshot.tokenizer,
        snapshot.info,
        layers_kept,
        width_of(sites, model.config),
        check,
    )


def check_lengths(longest: int, windows: Windows) -> None:
    """Refuse windows that are longer than an encoder takes.

    Args:
        longest: tokens of a window.
        windows: Windows of a split.

    Raises:
        InputError: one is.
    """
    longest_window = int(windows.n_tokens.max(initial=0))
    if longest_window > longest:
        raise InputError(
            f"a window of the data has {longest_window} tokens, and the encoder takes {longest} at "
            f"most: give --max-length {longest} where the data are first named, in another "
            "--workspace"
        )


class Extracted(NamedTuple):
    """Result of an extraction of one split.

    Attributes:
        tag: the snapshot.
        split: its name in the store.
        examples: windows of the split.
        shards_written: shards written by this call, with
        examples_written: windows; the others were there before.
        seconds: wall time of this call, of which
        encoder_seconds: were spent computing: forward pass, or pooling of stored tokens, and
            encoding. Both are of all splits that were written together.
        bytes: Size of all shards of the split, and of a transform's matrices.
        pooled_from: the stored split, ``1e/train``, that was pooled, or None: the encoder was run.
        encoding_error: by kind of token, the largest error that the encoding leaves in a layer, and
            that of each (see `SplitReader.info`).
    """

    tag: str
    split: str
    examples: int
    shards_written: int
    examples_written: int
    seconds: float
    encoder_seconds: float
    bytes: int
    pooled_from: str | None
    encoding_error: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return self._asdict()
