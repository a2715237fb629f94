"""Extraction: a snapshot's hidden states of every window, into the activation store.

The shard plan comes first, from token lengths alone; then shard after shard is a function of
(snapshot, shard): sorted by length so that no time goes into padding, encoded on the device, and
written by a thread while the next one is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import DiskSpaceError, InputError, NonFiniteError
from bertvision.featurestore.encoding import (
    ChannelStats,
    encode,
    get_encoding,
)
from bertvision.featurestore.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.schema import ShardRecord, SnapshotTag
from bertvision.featurestore.writer import (
    SplitContents,
    SplitSpec,
    SplitWriter,
    expected_bytes,
    free_bytes,
    open_writer,
)
from bertvision.pipelines.encoder import Encoder, channel_stats, length_groups
from bertvision.pipelines.precision import Precision, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.questions import questions_table
from bertvision.pipelines.snapshots import Snapshot, load_snapshot
from bertvision.pipelines.tables import size
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace import Workspace, windows_of

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
        encoder_seconds: were spent in the forward pass.
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
    layers: Sequence[int] | None = None,
    precision: str = "auto",
    shard_tokens: int = SHARD_TOKENS,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again.

    Args:
        workspace: with the snapshot.
        tag: which snapshot.
        splits: names of splits; all of the workspace by default.
        encoding: int8, bfloat16, float16 or float32.
        layers: indices of the hidden states to keep (0 is the embedding output), or all.
        precision: of the forward pass: auto, 32 or bf16.
        shard_tokens: capacity of a shard.

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
    encoder = Encoder(snapshot.model.bert, kept, snapshot.tokenizer.pad_token_id or 0, arithmetic)
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
            layers=kept,
            hidden_size=snapshot.model.config.hidden_size,
            provenance=_provenance(workspace, snapshot, split, arithmetic),
        )
        done.append(_extract_split(workspace, spec, plan, windows, questions, encoder))
    return done


def _extract_split(
    workspace: Workspace,
    spec: SplitSpec,
    plan: ShardPlan,
    windows: Windows,
    questions: list[Question],
    encoder: Encoder,
) -> Extracted:
    store, started, encoder_before = workspace.activations, time.perf_counter(), encoder.seconds
    contents = SplitContents(
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
    total = expected_bytes(plan, spec)
    log.info(
        "%s/%s: %d windows, %d tokens, %d shards, %s; free on the disk: %s",
        spec.tag,
        spec.split,
        len(plan),
        plan.total_tokens,
        plan.n_shards,
        size(total),
        size(free_bytes(store)),
    )

    def calibrate() -> ChannelStats:
        return channel_stats(encoder, windows)

    _check_space(store, total if not (store / "ledger").exists() else 0)
    with open_writer(store, spec, contents, calibrate) as writer:
        pending = writer.pending()
        _check_space(store, total * len(pending) // plan.n_shards)
        _write_shards(writer, pending, windows, encoder, f"extract {spec.tag}/{spec.split}")
        split = writer.split
    return Extracted(
        tag=str(spec.tag),
        split=spec.split,
        examples=len(plan),
        shards_written=len(pending),
        examples_written=sum(len(plan.examples_of(shard)) for shard in pending),
        seconds=time.perf_counter() - started,
        encoder_seconds=encoder.seconds - encoder_before,
        bytes=split.info()["bytes"],
    )


def _write_shards(
    writer: SplitWriter, pending: list[int], windows: Windows, encoder: Encoder, desc: str
) -> None:
    """Compute shards in order while a thread writes the one before."""
    plan = writer.plan
    total = sum(len(plan.examples_of(shard)) for shard in pending)
    written: Future[ShardRecord] | None = None
    with progress(total, desc, "example") as bar, ThreadPoolExecutor(1, "shard-writer") as thread:
        for shard in pending:
            codes, scale = _encode_shard(writer, shard, windows, encoder)
            if written is not None:
                bar.update(written.result().examples)
            written = thread.submit(writer.write_shard, shard, codes, scale)
        if written is not None:
            bar.update(written.result().examples)


def _encode_shard(
    writer: SplitWriter, shard: int, windows: Windows, encoder: Encoder
) -> tuple[Tensor, Tensor | None]:
    """Codes and scale of a shard's real tokens, on the CPU, in stored order."""
    plan, record, encoding = writer.plan, writer.split.record, writer.split.encoding
    members = plan.examples_of(shard)
    rows = plan.example_id[members.start : members.stop]
    lengths = plan.n_tokens[members.start : members.stop].astype(np.int64)
    starts = plan.first_token[members.start : members.stop] - shard * plan.shard_tokens
    shape = (int(lengths.sum()), len(record.layers))
    codes = torch.empty((*shape, record.hidden_size), dtype=encoding.torch_dtype)
    scale = torch.empty(shape) if encoding.quantised else None
    for group in length_groups(lengths):
        hidden_states = encoder(windows, rows[group])
        stats = writer.stats and ChannelStats(*(s.to(hidden_states.device) for s in writer.stats))
        try:
            packed, packed_scale = encode(hidden_states, encoding, stats)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{writer.split.name}, shard {shard}, in the batch of windows "
                f"{', '.join(map(str, rows[group]))}: {error}"
            ) from None
        parts = packed.cpu().split(lengths[group].tolist())
        for start, part in zip(starts[group], parts, strict=True):
            codes[start : start + len(part)] = part
        if scale is not None and packed_scale is not None:
            scales = packed_scale.cpu().split(lengths[group].tolist())
            for start, s in zip(starts[group], scales, strict=True):
                scale[start : start + len(s)] = s
    return codes, scale


def _provenance(
    workspace: Workspace, snapshot: Snapshot, split: str, precision: Precision
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
        "attn_implementation": str(snapshot.model.config._attn_implementation),
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


def _check_space(store: Any, needed: int) -> None:
    free = free_bytes(store)
    if needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {store}, {size(free)} are free: free some space, keep "
            "fewer --layers, extract one --split at a time, or use --encoding int8"
        )
