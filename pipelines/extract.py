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
from bertvision.featurestore.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.shardfile import CompressionName
from bertvision.featurestore.writer import expected_bytes, free_bytes, open_writer
from bertvision.pipelines.encoder import PACKED_ATTENTION, Encoder, channel_stats
from bertvision.pipelines.precision import Precision, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.questions import questions_table
from bertvision.pipelines.selection import windows_of
from bertvision.pipelines.shardwork import NonFinite, ShardWork
from bertvision.pipelines.snapshots import Snapshot, load_snapshot
from bertvision.pipelines.tables import size
from bertvision.pipelines.tasks.squad import Question
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
    encoding: str = "int8",
    compression: CompressionName = "none",
    layers: Sequence[int] | None = None,
    precision: str = "auto",
    nonfinite: NonFinite = "error",
    shard_tokens: int = SHARD_TOKENS,
    shards: Sequence[int] | None = None,
    mend: bool = False,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again.

    Args:
        workspace: with the snapshot.
        tag: which snapshot.
        splits: names of splits; all of the workspace by default.
        encoding: int8, int4, bfloat16, float16 or float32.
        compression: of the codes: none, zstd or pcodec.
        layers: indices of the hidden states to keep (0 is the embedding output), or all.
        precision: of the forward pass: auto, 32 or bf16.
        nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
        shard_tokens: capacity of a shard.
        shards: which to write, of those that are missing; all of them by default.
        mend: write everything beside the shards again, and ``shards`` even where they are there.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        ProvenanceError: a split was begun from something else.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    get_encoding(encoding)
    tag = SnapshotTag(tag)
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    kept = _layers(layers, snapshot.model.config.num_hidden_layers)
    arithmetic = resolve_precision(precision)
    encoder = Encoder(snapshot.model.bert, kept, arithmetic)
    wanted = {split: workspace.questions(split) for split in splits or workspace.splits()}
    done = []
    for split, questions in wanted.items():
        windows = windows_of(questions, snapshot.tokenizer, workspace.config.task)
        seed = workspace.config.finetune.seed if split == "train" else None
        plan = ShardPlan.make(windows.n_tokens, seed=seed, shard_tokens=shard_tokens)
        spec = SplitSpec(
            tag=tag,
            split=split,
            encoding=encoding,
            compression=compression,
            layers=kept,
            hidden_size=snapshot.model.config.hidden_size,
            provenance=_provenance(workspace, snapshot, split, arithmetic, nonfinite),
        )
        contents = _contents(plan, windows, questions)
        done.append(
            _extract_split(workspace, spec, contents, windows, encoder, nonfinite, shards, mend)
        )
    return done


def _contents(plan: ShardPlan, windows: Windows, questions: list[Question]) -> SplitContents:
    return SplitContents(
        plan,
        per_token={
            "input_ids": windows.input_ids,
            "token_type_ids": windows.token_type_ids,
            "offset_mapping": windows.offset_mapping,
        },
        per_example={
            "question_index": windows.question_index,
            "start_positions": windows.start_positions,
            "end_positions": windows.end_positions,
        },
        examples=questions_table(questions),
    )


def _extract_split(
    workspace: Workspace,
    spec: SplitSpec,
    contents: SplitContents,
    windows: Windows,
    encoder: Encoder,
    nonfinite: NonFinite,
    shards: Sequence[int] | None,
    mend: bool,
) -> Extracted:
    place, started = place_of(workspace.activations), time.perf_counter()
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
    if not Ledger(place, spec.tag, spec.split).exists:
        _check_space(place, total)

    def calibrate() -> ChannelStats:
        return channel_stats(encoder, windows, nonfinite)

    with open_writer(
        place, spec, contents, calibrate, mend=(shards or ()) if mend else None
    ) as writer:
        pending = [s for s in writer.pending() if shards is None or s in shards]
        _check_space(place, total * len(pending) // plan.n_shards)
        count = sum(len(plan.examples_of(shard)) for shard in pending)
        with progress(count, f"extract {name}", "example") as bar:
            work = ShardWork(writer, windows, encoder, nonfinite)
            for record in work.write(pending):
                bar.update(record.examples)
        split = writer.split
    return Extracted(
        tag=str(spec.tag),
        split=spec.split,
        examples=len(plan),
        shards_written=len(pending),
        examples_written=count,
        seconds=time.perf_counter() - started,
        encoder_seconds=work.seconds,
        bytes=split.info()["bytes"],
    )


def _provenance(
    workspace: Workspace,
    snapshot: Snapshot,
    split: str,
    precision: Precision,
    nonfinite: NonFinite,
) -> dict[str, str | int | float | bool | None]:
    task, info = workspace.config.task, snapshot.info
    return {
        "model": info.pretrained.name_or_path,
        "model_revision": info.pretrained.revision,
        "step": info.step,
        "weights_sha256": info.weights_sha256,
        "config_sha256": info.config_sha256,
        "tokenizer_sha256": info.tokenizer_sha256,
        "task": task.name,
        "data_sha256": workspace.config.data[split].sha256,
        "max_length": task.max_length,
        "max_question_length": task.max_question_length,
        "overlap": task.overlap,
        "answerable_only": task.answerable_only,
        "tune_fraction": task.tune_fraction,
        "train_questions": workspace.config.finetune.train_questions,
        "seed": workspace.config.finetune.seed,
        "precision": precision,
        "nonfinite": nonfinite,
        "attn_implementation": PACKED_ATTENTION,
    }


def _layers(layers: Sequence[int] | None, num_hidden_layers: int) -> tuple[int, ...]:
    states = num_hidden_layers + 1
    if layers is None:
        return tuple(range(states))
    wanted = sorted({layer + states if layer < 0 else layer for layer in layers})
    if not wanted or wanted[0] < 0 or wanted[-1] >= states:
        raise InputError(
            f"layers {list(layers)}: the encoder has hidden states 0 (embedding output) to "
            f"{states - 1}"
        )
    return tuple(wanted)


def _check_space(place: Place, needed: int) -> None:
    free = free_bytes(place)
    if free is not None and needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {place}, {size(free)} are free: free some space, keep "
            "fewer --layers, extract one --split at a time, or use --encoding int8 or int4"
        )
