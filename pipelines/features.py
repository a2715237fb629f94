"""Pooled hidden states as arrays: what probes and rankers are trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, StoreNotFoundError, UnknownNameError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extract import extract
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.pretrained import ensure_snapshot
from bertvision.pipelines.selection import stored_split
from bertvision.pipelines.snapshots import read_snapshot_info
from bertvision.pipelines.split_contents import made_from_data
from bertvision.pipelines.tasks.registry import POOLINGS, Tokens
from bertvision.pipelines.workspace import Workspace

_READ_AT_ONCE = 4096  # examples: bounds the memory of codes beside the features


def ensure_features(
    workspace: Workspace,
    tags: Sequence[str],
    dataset: str | None,
    splits: Sequence[str],
    poolings: Sequence[Tokens],
    *,
    layers: Sequence[int] | None = None,
    encoding: str | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
) -> None:
    """Extract the pooled hidden states that are missing; what is stored whole is left alone.

    Args:
        workspace: with the snapshots; ``0e`` and ``untrained`` are made where they are missing.
        tags: the snapshots.
        dataset: an added data set; None is the workspace's own data.
        splits: of the data.
        poolings: ``cls``, ``sep``, ``mean``, ``max``.
        layers: to keep; None keeps all.
        encoding: of what is missing, and asked of what is stored; None is int8 for what is
            missing, and takes what is stored as it is.
        precision: of the forward pass; ``auto`` takes what is stored as it is.
        scheduler: see `extract`.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: a pooling is not known, or the encoder has no token for it.
        ProvenanceError: what is stored was extracted from another snapshot or other data.
    """
    unknown = [pooling for pooling in poolings if pooling not in POOLINGS]
    if unknown or not poolings:
        raise InputError(
            f"--pool {','.join(map(str, poolings))}: choose from {', '.join(POOLINGS)}"
        )
    for tag in tags:
        ensure_snapshot(workspace, tag)
    for tag in tags:
        for split in splits:
            missing = [
                pooling
                for pooling in poolings
                if not _is_there(
                    *(workspace, tag, dataset, split, pooling),
                    layers=layers,
                    encoding=encoding,
                    precision=precision,
                )
            ]
            if missing:
                extract(
                    workspace,
                    tag,
                    splits=[split],
                    tokens=missing,
                    dataset=dataset,
                    layers=layers,
                    encoding=encoding or "int8",
                    precision=precision,
                    scheduler=scheduler,
                )


def _is_there(
    workspace: Workspace,
    tag: str,
    dataset: str | None,
    split: str,
    pooling: Tokens,
    *,
    layers: Sequence[int] | None,
    encoding: str | None,
    precision: str,
) -> bool:
    """Whether a split is stored whole, as was asked; else `extract` says what differs."""
    data = workspace.dataset(dataset)
    try:
        found = workspace.split(tag, stored_split(split, pooling, data.name))
    except (StoreNotFoundError, UnknownNameError):
        return False
    record, made_from = found.record, found.record.provenance
    wanted = {
        "weights_sha256": read_snapshot_info(workspace.snapshot_dir(tag)).weights_sha256,
        **made_from_data(data, split),
    }
    if precision != "auto":
        wanted["precision"] = resolve_precision(precision)
    every = range(workspace.config.model.num_hidden_layers + 1)
    return (
        all(made_from.get(field) == value for field, value in wanted.items())
        and set(every if layers is None else layers) <= set(record.layers)
        and encoding in (None, record.encoding)
        and found.is_complete
    )


def feature_split(
    workspace: Workspace, tag: str, dataset: str | None, split: str, pooling: Tokens
) -> ActivationSplit:
    """The stored split of a pooling.

    Raises:
        StoreNotFoundError: nothing was extracted yet.
        UnknownNameError: this was not extracted.
        IncompleteSplitError: its extraction has not ended.
    """
    name = stored_split(split, pooling, workspace.dataset(dataset).name)
    return workspace.split(tag, name).require_complete()


def feature_layers(
    workspace: Workspace, tag: str, dataset: str | None, split: str, pooling: Tokens
) -> list[int]:
    """Indices of the stored hidden states; of cls the pooler output may be the last.

    Raises:
        UnknownNameError: this was not extracted.
    """
    return list(feature_split(workspace, tag, dataset, split, pooling).record.layers)


def features(
    workspace: Workspace,
    tag: str,
    dataset: str | None,
    split: str,
    pooling: Tokens,
    layers: Sequence[int] | None = None,
) -> npt.NDArray[np.float32]:
    """Pooled hidden states of all items of a split, decoded.

    Args:
        workspace: with the activations.
        tag: the snapshot.
        dataset: an added data set; None is the workspace's own data.
        split: of the data.
        pooling: over the tokens of a window.
        layers: indices of hidden states, of which alone bytes are read; None is all.

    Returns:
        (windows, layers, hidden) in the order of the data; of sentences a window is an item.

    Raises:
        UnknownNameError: this was not extracted.
        IncompleteSplitError: its extraction has not ended.
        InputError: a layer is not stored.
    """
    stored = feature_split(workspace, tag, dataset, split, pooling)
    positions = stored.layer_positions(layers)
    found = np.empty((len(stored), len(positions), stored.record.hidden_size), np.float32)
    for start in range(0, len(stored), _READ_AT_ONCE):
        examples = np.arange(start, min(start + _READ_AT_ONCE, len(stored)))
        rows = stored.plan.example_id[examples]
        found[rows] = stored.read(examples, layers).decode().numpy()
    return found
