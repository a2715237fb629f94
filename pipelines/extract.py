"""Extraction: a snapshot's hidden states of every window, into the activation store.

The shard plan comes first, from token lengths alone; then shard after shard is a function of
(snapshot, shard): computed and encoded on the device, in stored order, and written by a thread
while the next one is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from bertvision.errors import DiskSpaceError, InputError
from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.encoding import ChannelStats, get_encoding
from bertvision.featurestore.ledger import Ledger
from bertvision.featurestore.place import Place, place_of
from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.shardfile import CompressionName
from bertvision.featurestore.writer import expected_bytes, free_bytes, open_writer
from bertvision.pipelines.encoder import Encoder, channel_stats
from bertvision.pipelines.extraction_cost import ExtractionCost
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.selection import parse_stored_split, stored_split, windows_of
from bertvision.pipelines.shardwork import NonFinite, ShardWork
from bertvision.pipelines.snapshots import load_snapshot
from bertvision.pipelines.split_contents import (
    as_recorded,
    kept_layers,
    provenance,
    split_contents,
)
from bertvision.pipelines.tables import size
from bertvision.pipelines.tasks.registry import TASKS, Tokens
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace import Workspace

log = logging.getLogger(__name__)


class Extracted(NamedTuple):
    """What an extraction did to one split.

    Attributes:
        tag: the snapshot.
        split: its name.
        examples: windows of the split.
        shards_written: shards written by this call, with
        examples_written: windows; the others were there before.
        seconds: wall time of this call, of which
        encoder_seconds: were spent computing: forward pass and encoding.
        bytes: of all shards of the split.
    """

    tag: str
    split: str
    examples: int
    shards_written: int
    examples_written: int
    seconds: float
    encoder_seconds: float
    bytes: int


def extract(
    workspace: Workspace,
    tag: str,
    *,
    splits: Sequence[str] | None = None,
    tokens: Tokens | None = None,
    encoding: str = "int8",
    compression: CompressionName = "none",
    layers: Sequence[int] | None = None,
    precision: str = "auto",
    nonfinite: NonFinite = "error",
    shard_tokens: int | None = None,
    shards: Sequence[int] | None = None,
    mend: bool = False,
    store: str | None = None,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again.

    Args:
        workspace: with the snapshot.
        tag: which snapshot.
        splits: names of splits, also as they are stored (``train-cls``); all of the workspace by
            default.
        tokens: which tokens of each window to keep: all of them (stored as ``train``), or the [CLS]
            alone, with the pooler output where the snapshot has a pooler (``train-cls``). None is
            what the task's heads need.
        encoding: int8, int4, bfloat16, float16 or float32. The [CLS] vectors of early layers lie so
            close together that bfloat16 rounds away most of what tells them apart (measured with
            all-MiniLM-L6-v2: up to 84 % of it); int8, which stores the deviation from a channel's
            mean, loses 0.7 %.
        compression: of the codes: none, zstd or pcodec.
        layers: indices of the hidden states to keep (0 is the embedding output), or all.
        precision: of the forward pass: auto, 32 or bf16.
        nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
        shard_tokens: capacity of a shard; None is what suits the tokens.
        shards: which to write, of those that are missing; all of them by default.
        mend: write everything beside the shards again, and ``shards`` even where they are there.
        store: another folder or URL for the activations: the workspace's from the moment on when a
            split of it is open for writing, so that a failure before leaves the workspace as it is.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong, or the splits are not all of the same tokens.
        ProvenanceError: a split was begun from something else.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    get_encoding(encoding)
    tag = SnapshotTag(tag)
    workspace.at(store)  # a wrong name is said before BERT is loaded
    names, of = _wanted(workspace, splits, tokens)
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    bert = snapshot.model.bert
    depth, pooler = bert.config.num_hidden_layers, bert.pooler is not None
    kept = kept_layers(layers, depth, pooler=pooler, tokens=of)
    arithmetic = resolve_precision(precision)
    encoder = Encoder(bert, kept, arithmetic, of)
    wanted = {split: workspace.questions(split) for split in names}
    done = []
    for split, questions in wanted.items():
        windows = windows_of(questions, snapshot.tokenizer, workspace.config.task)
        seed = workspace.config.finetune.seed if split == "train" else None
        contents = split_contents(windows, questions, of, seed=seed, shard_tokens=shard_tokens)
        made_from = provenance(workspace, snapshot, split, of, arithmetic, nonfinite)
        spec = SplitSpec(
            tag=tag,
            split=stored_split(split, of),
            encoding=encoding,
            compression=compression,
            layers=kept,
            hidden_size=bert.config.hidden_size,
            provenance=made_from,
        )
        done.append(
            _extract_split(
                workspace, store, spec, contents, windows, encoder, nonfinite, shards, mend
            )
        )
    return done


def _wanted(
    workspace: Workspace, splits: Sequence[str] | None, tokens: Tokens | None
) -> tuple[list[str], Tokens]:
    """Which splits of the workspace are meant, and which tokens of them."""
    default = tokens or TASKS[workspace.config.task.name].tokens
    names = list(splits or workspace.splits())
    parsed = [parse_stored_split(name) for name in names]
    kinds = {"cls" if stored == "cls" else default for _, stored in parsed}
    if len(kinds) > 1 or (tokens is not None and kinds != {tokens}):
        raise InputError(
            f"splits {', '.join(names)}: a name that ends with -cls means the [CLS] alone, the "
            f"others here mean {default!r}: extract those of all tokens and those of the [CLS] "
            "by two calls, or choose with --tokens"
        )
    return [split for split, _ in parsed], kinds.pop()


def _extract_split(
    workspace: Workspace,
    store: str | None,
    spec: SplitSpec,
    contents: SplitContents,
    windows: Windows,
    encoder: Encoder,
    nonfinite: NonFinite,
    shards: Sequence[int] | None,
    mend: bool,
) -> Extracted:
    place, started = place_of(workspace.at(store).activations), time.perf_counter()
    plan, name = contents.plan, f"{spec.tag}/{spec.split}"
    total = expected_bytes(plan, spec)
    free = free_bytes(place)
    log.info(
        "%s: %d windows, %d tokens, %d shards, %s; free on the disk: %s",
        name,
        len(plan),
        plan.total_tokens,
        plan.n_shards,
        size(total),
        "unknown" if free is None else size(free),
    )
    ledger = Ledger(place, spec.tag, spec.split)
    fresh = not ledger.exists
    if fresh:
        _check_space(place, total)
    elif mend:
        contents = as_recorded(contents, ledger.read_split().arrays)

    def calibrate() -> ChannelStats:
        return channel_stats(encoder, windows, nonfinite)

    with open_writer(
        place, spec, contents, calibrate, mend=(shards or ()) if mend else None
    ) as writer:
        workspace.keep_at(store)
        pending = [s for s in writer.pending() if shards is None or s in shards]
        _check_space(place, total * len(pending) // plan.n_shards)
        count = sum(len(plan.examples_of(shard)) for shard in pending)
        cost = _cost(workspace, place, spec, contents, encoder, fresh=fresh, started=started)
        with progress(count, f"extract {name}", "example") as bar, cost:
            work = ShardWork(writer, windows, encoder, nonfinite)
            for record in work.write(pending):
                bar.update(record.examples)
                if not mend:  # a repair is not what it takes to extract
                    cost.note(record, work.seconds)
            stored = cost.bytes = writer.split.info()["bytes"]
    return Extracted(
        tag=str(spec.tag),
        split=spec.split,
        examples=len(plan),
        shards_written=len(pending),
        examples_written=count,
        seconds=time.perf_counter() - started,
        encoder_seconds=work.seconds,
        bytes=stored,
    )


def _cost(
    workspace: Workspace,
    place: Place,
    spec: SplitSpec,
    contents: SplitContents,
    encoder: Encoder,
    *,
    fresh: bool,
    started: float,
) -> ExtractionCost:
    """The record of what the extraction of this split costs, with the options it is made with."""
    path = workspace.root / "extraction" / spec.tag / f"{spec.split}.json"
    known = {
        "tag": str(spec.tag),
        "split": spec.split,
        "examples": len(contents.plan),
        "tokens": encoder.tokens,
        "layers": list(spec.layers),
        "encoding": spec.encoding,
        "compression": spec.compression,
        "precision": spec.provenance["precision"],
        "nonfinite": spec.provenance["nonfinite"],
        "shard_tokens": contents.plan.shard_tokens,
        "device": encoder.device.type,
        "store": str(place),
    }
    return ExtractionCost(path, fresh=fresh, started=started, known=known)


def _check_space(place: Place, needed: int) -> None:
    free = free_bytes(place)
    if free is not None and needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {place}, {size(free)} are free: free some space, keep "
            "fewer --layers, extract one --split at a time, or use --encoding int8 or int4"
        )
