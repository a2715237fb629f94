"""Pooled hidden states as arrays: what probes and rankers are trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, ProvenanceError, StoreNotFoundError, UnknownNameError
from bertvision.featurestore.format.encoding import get_encoding
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extraction.contents import made_from_data
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.shardwork import NonFinite
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.registry import POOLINGS, TokenPooling
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.selection import stored_split
from bertvision.pipelines.workspace.snapshots import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

_READ_AT_ONCE = 4096  # examples: bounds the memory of codes beside the features


def ensure_features(
    workspace: Workspace,
    tags: Sequence[str],
    dataset: str | None,
    splits: Sequence[str],
    poolings: Sequence[TokenPooling],
    *,
    layers: Sequence[int] | None = None,
    encoding: str | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
) -> None:
    """Extract the pooled hidden states that are missing; what is stored whole is left alone.

    Everything is checked before the first extraction, so that a refusal leaves nothing half made.
    Of one pooling all splits of all tags must be of one encoding, precision and treatment of
    non-finite values: features are compared, and a difference would be that of the arithmetic too.

    Args:
        workspace: with the snapshots; ``0e`` and ``untrained`` are made where they are missing.
        tags: the snapshots.
        dataset: an added data set; None is the workspace's own data.
        splits: of the data.
        poolings: ``cls``, ``sep``, ``mean``, ``max``.
        layers: that must be there; None is every hidden state, without the pooler's output. Where
            nothing is stored yet all are extracted.
        encoding: of what is missing, and asked of what is stored; None is int8 for what is
            missing, and takes what is stored as it is.
        precision: of the forward pass; ``auto`` takes what is stored as it is.
        scheduler: see `extract`.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: a pooling is not known, or the encoder has no token for it.
        ProvenanceError: what is stored was extracted from another snapshot or other data, lacks a
            layer, or differs in a setting from what was asked or from what it is compared with.
    """
    unknown = [pooling for pooling in poolings if pooling not in POOLINGS]
    if unknown or not poolings:
        raise InputError(
            f"--pool {','.join(map(str, poolings))}: choose from {', '.join(POOLINGS)}"
        )
    for tag in tags:
        ensure_snapshot(workspace, tag)
    arithmetic = resolve_precision(precision)
    if encoding is not None:
        get_encoding(encoding)
    asked = {"encoding": encoding, "precision": None if precision == "auto" else arithmetic}
    depth = workspace.config.model.num_hidden_layers
    needed = set(range(depth + 1) if layers is None else layers)
    new = _Kept(None, encoding or "int8", arithmetic, "error")
    name = workspace.dataset(dataset).name
    missing: dict[tuple[str, str, _Kept], list[TokenPooling]] = {}
    for pooling in poolings:
        known: dict[str, _Kept] = {}
        for tag in tags:
            for split in splits:
                found = _stored(workspace, tag, dataset, split, pooling)
                if found is not None:
                    _check_stored(workspace, dataset, split, found, asked, needed)
                kept = new if found is None else _kept(found)
                known[f"{tag}/{stored_split(split, pooling, name)}"] = kept
                if found is None or not found.is_complete:
                    missing.setdefault((tag, split, kept), []).append(pooling)
        _check_alike(known)
    for (tag, split, kept), lacking in missing.items():
        extract(
            workspace,
            tag,
            splits=[split],
            tokens=lacking,
            dataset=dataset,
            layers=kept.layers,
            encoding=kept.encoding,
            precision=kept.precision,
            nonfinite=kept.nonfinite,
            scheduler=scheduler,
        )


class _Kept(NamedTuple):
    """How a split is stored, or will be."""

    layers: tuple[int, ...] | None
    encoding: str
    precision: str
    nonfinite: NonFinite


def _stored(
    workspace: Workspace, tag: str, dataset: str | None, split: str, pooling: TokenPooling
) -> ActivationSplit | None:
    """What is stored of a split, whole or begun; None where nothing is."""
    data = workspace.dataset(dataset)
    if split not in data.splits:
        data.items(split)  # refuses it by name
    try:
        return workspace.split(tag, stored_split(split, pooling, data.name))
    except (StoreNotFoundError, UnknownNameError):
        return None


def _kept(found: ActivationSplit) -> _Kept:
    record, made_from = found.record, found.record.provenance
    nonfinite: NonFinite = "record" if made_from.get("nonfinite") == "record" else "error"
    layers = tuple(record.layers)
    return _Kept(layers, record.encoding, str(made_from.get("precision")), nonfinite)


def _check_stored(
    workspace: Workspace,
    dataset: str | None,
    split: str,
    found: ActivationSplit,
    asked: Mapping[str, str | None],
    needed: Collection[int],
) -> None:
    """Refuse what is stored of another snapshot or other data, or not as was asked."""
    weights = read_snapshot_info(workspace.snapshot_dir(found.tag)).weights_sha256
    wanted = {"weights_sha256": weights, **made_from_data(workspace.dataset(dataset), split)}
    wanted |= {field: value for field, value in asked.items() if value is not None}
    there = {**found.record.provenance, "encoding": found.record.encoding}
    for field, value in wanted.items():
        if there.get(field) != value:
            raise ProvenanceError(
                f"{found.name} was extracted with {field} = {there.get(field)!r}, now it is "
                f"{value!r}: use the same, or another --store"
            )
    if lacking := sorted(set(needed).difference(found.record.layers)):
        held = ",".join(map(str, found.record.layers))
        raise ProvenanceError(
            f"{found.name} holds layers {held} and not {', '.join(map(str, lacking))}: give "
            f"--layers {held} or some of them, or extract all into another --store"
        )


def _check_alike(known: Mapping[str, _Kept]) -> None:
    """Refuse splits that are compared but were not, or would not be, extracted alike."""
    for field in ("encoding", "precision", "nonfinite"):
        for first, other in pairwise(known):
            here, there = getattr(known[first], field), getattr(known[other], field)
            if here != there:
                raise ProvenanceError(
                    f"{first} has {field} = {here!r}, {other} {there!r}, so that they cannot be "
                    f"compared: ask for the {field} of what is stored (--encoding, --precision), "
                    "or extract all alike into another --store"
                )


def feature_split(
    workspace: Workspace, tag: str, dataset: str | None, split: str, pooling: TokenPooling
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
    workspace: Workspace, tag: str, dataset: str | None, split: str, pooling: TokenPooling
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
    pooling: TokenPooling,
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
    for rows, values in feature_blocks(stored, layers):
        found[rows] = values
    return found


def feature_blocks(
    stored: ActivationSplit, layers: Sequence[int] | None = None
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """The pooled hidden states of a split, decoded some at a time, so that memory stays bounded.

    Args:
        stored: see `feature_split`.
        layers: indices of hidden states, of which alone bytes are read; None is all.

    Yields:
        (block,) numbers of the windows in the order of the data, and their (block, layers, hidden).

    Raises:
        InputError: a layer is not stored.
    """
    for start in range(0, len(stored), _READ_AT_ONCE):
        examples = np.arange(start, min(start + _READ_AT_ONCE, len(stored)))
        yield stored.plan.example_id[examples], stored.read(examples, layers).decode().numpy()
