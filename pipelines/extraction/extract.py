"""Extraction: a snapshot's hidden states of every window, into the activation store.

The shard plan comes first, from token lengths alone; then shard after shard is a function of
(snapshot, shard): computed and encoded on the device, in stored order, and written by a thread
while the next one is computed. All poolings of a window come from one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.errors import InputError
from bertvision.featurestore.format.encoding import get_encoding
from bertvision.featurestore.format.shardfile import CompressionName
from bertvision.pipelines.extraction.job import ExtractionJob, load_encoder
from bertvision.pipelines.extraction.shardwork import NonFinite
from bertvision.pipelines.extraction.split_extraction import Extracted as Extracted
from bertvision.pipelines.extraction.split_extraction import SplitExtraction, StorageOptions
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.registry import TASKS, TokenPooling
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.selection import StoredName
from bertvision.pipelines.workspace.workspace import Workspace


def extract(
    workspace: Workspace,
    tag: str,
    *,
    splits: Sequence[str] | None = None,
    tokens: TokenPooling | Sequence[TokenPooling] | None = None,
    dataset: str | None = None,
    encoding: str = "int8",
    compression: CompressionName = "none",
    layers: Sequence[int] | None = None,
    precision: str = "auto",
    nonfinite: NonFinite = "error",
    shard_tokens: int | None = None,
    shards: Sequence[int] | None = None,
    mend: bool = False,
    store: str | None = None,
    scheduler: str | None = None,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again.

    Args:
        workspace: with the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        tag: which snapshot.
        splits: names of splits, also as they are stored (``train-cls``); all of the data by
            default.
        tokens: what to keep of each window: ``("all",)`` tokens (stored as ``train``), or poolings
            of them, ``cls``, ``sep``, ``mean``, ``max`` (``train-cls``, …; with cls goes the pooler
            output where the snapshot has a pooler). None is what the task's heads need.
        dataset: an added data set; None is the workspace's own data.
        encoding: see `StorageOptions`, also for compression, shard_tokens and store.
        compression: of the codes.
        layers: indices of the hidden states to keep (0 is the embedding output), or all.
        precision: of the forward pass: auto, 32 or bf16.
        nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
        shard_tokens: capacity of a shard.
        shards: which to write, of those that are missing; all of them by default.
        mend: write everything beside the shards again, and ``shards`` even where they are there.
        store: another place for the activations.
        scheduler: address of a Dask cluster (``tcp://…``) whose workers compute the shards; None
            computes them here.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: an option is wrong, the encoder has no token for a pooling, or the splits are
            not all of the same tokens.
        ProvenanceError: a split was begun from something else.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    get_encoding(encoding)
    keeping = StorageOptions(encoding, compression, shard_tokens, store)
    workspace.at(store)  # a wrong name is said before the encoder is loaded
    data = workspace.dataset(_dataset(dataset, splits))
    names, kept = _wanted(data, splits, tokens)
    ensure_snapshot(workspace, tag)
    arithmetic = resolve_precision(precision)
    loaded = load_encoder(workspace, tag, kept, layers, arithmetic)
    items = {split: data.items(split) for split in names}  # of all, before hours go into the first
    done = []
    for split, found in items.items():
        job = ExtractionJob(
            root=workspace.root,
            tag=tag,
            dataset=data.name,
            split=split,
            tokens=kept,
            layers=None if layers is None else tuple(layers),
            precision=arithmetic,
            nonfinite=nonfinite,
        )
        extraction = SplitExtraction(workspace, data, found, job, loaded, keeping)
        done += extraction.run(shards, mend, scheduler)
    return done


def _dataset(dataset: str | None, splits: Sequence[str] | None) -> str | None:
    """The data set that is meant: named, or part of the names of stored splits."""
    named = {StoredName.parse(name).dataset for name in splits or ()} - {None}
    if len(named | ({dataset} if dataset else set())) > 1:
        raise InputError(
            f"splits {', '.join(splits or ())} are of {' and '.join(sorted(map(str, named)))}"
            + (f", not of {dataset}" if dataset else "")
            + ": extract one data set at a time"
        )
    return dataset or next(iter(named), None)


def _wanted(
    data: Dataset,
    splits: Sequence[str] | None,
    tokens: TokenPooling | Sequence[TokenPooling] | None,
) -> tuple[list[str], tuple[TokenPooling, ...]]:
    """Which splits of the data are meant, and what of their windows is kept."""
    if isinstance(tokens, str):
        tokens = (tokens,)
    default = tuple(dict.fromkeys(tokens or (TASKS[data.config.name].tokens,)))
    if "all" in default and len(default) > 1:
        raise InputError(
            f"{', '.join(default)}: all tokens and poolings are extracted by two calls, or leave "
            "the poolings out: `bertvision probe` computes them from all tokens"
        )
    names = list(splits or data.splits)
    if not names:
        raise InputError(
            "the workspace has no data of its own: name a data set with --task and --data"
        )
    parsed = [StoredName.parse(name) for name in names]
    kinds = {default if found.tokens == "all" else (found.tokens,) for found in parsed}
    if len(kinds) > 1 or (tokens is not None and kinds != {default}):
        raise InputError(
            f"splits {', '.join(names)}: a name that ends with a pooling means that alone, the "
            f"others here mean {', '.join(default)!r}: extract them by two calls, or choose with "
            "--pool"
        )
    return [found.split for found in parsed], kinds.pop()
