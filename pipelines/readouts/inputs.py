"""Vectors that readouts of pooled states read, and the folder of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from bertvision.featurestore.format.layout import EncodingName
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.layers import LayerChoice, Layers, needed_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.workspace.workspace import Workspace

Float32s = npt.NDArray[np.float32]
UNTRAINED = "untrained"
"""Tag of the twin with random weights."""


class Extraction(TypedDict, total=False):
    """Settings of the extraction of hidden states that are missing; see `ensure_features`."""

    encoding: EncodingName | None
    """Encoding of these hidden states."""
    precision: str
    """Precision of the forward pass."""
    scheduler: str | None
    """Address of a cluster that extracts."""


def ensure_inputs(
    workspace: Workspace,
    tags: Sequence[str],
    dataset: str | None,
    splits: Sequence[str],
    poolings: Sequence[TokenPooling],
    choice: LayerChoice,
    extraction: Extraction,
) -> None:
    """Extract the hidden states that are missing.

    Args:
        workspace: Workspace with the snapshots.
        tags: The snapshots.
        dataset: An added data set; None is the workspace's own data.
        splits: Splits of the data.
        poolings: Poolings over the tokens of a window.
        choice: Choice of the inputs.
        extraction: Settings of the extraction.

    Raises:
        InputError: there is no such layer or pooling.
        ProvenanceError: what is stored was not extracted alike; names the field.
    """
    layers = needed_layers(choice, poolings, workspace.config.model.num_hidden_layers)
    ensure_features(workspace, tags, dataset, splits, poolings, layers=layers, **extraction)


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a folder of results, which is made where it is missing.

    Args:
        folder: Folder of the results.
        doing: The work that holds the lock, for the message of another process.

    Raises:
        LockedError: another process works in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", doing):
        yield


def with_twin(tags: Sequence[str], untrained: bool) -> list[SnapshotTag]:
    """Snapshots in order, with the untrained twin if it is asked for."""
    return sorted({SnapshotTag(tag) for tag in (*tags, *([UNTRAINED] if untrained else []))})


def read_inputs(pooled: PooledSplit, inputs: Sequence[Layers]) -> Float32s:
    """The vectors of inputs that are equally wide, decoded some texts at a time.

    Args:
        pooled: Stored hidden states.
        inputs: Layers of each input, as many in each.

    Returns:
        (texts, inputs, width) in the order of the data.
    """
    layers = sorted({layer for chosen in inputs for layer in chosen})
    width = len(inputs[0]) * pooled.width
    values = np.empty((len(pooled), len(inputs), width), np.float32)
    for rows, read in pooled.blocks(layers):
        values[rows] = end_to_end(read, layers, inputs)
    return values


def end_to_end(values: Float32s, layers: Sequence[int], inputs: Sequence[Layers]) -> Float32s:
    """The vectors of inputs, each of a layer or of several end to end.

    Args:
        values: (texts, layers, hidden)
        layers: Numbers of these layers.
        inputs: Layers of each input, as many in each.

    Returns:
        (texts, inputs, width)
    """
    places = [[layers.index(layer) for layer in chosen] for chosen in inputs]
    return values[:, places].reshape(len(values), len(inputs), -1)
