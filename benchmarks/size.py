"""Bytes and reconstruction error of every encoding, and what it costs a trained head.

Bytes are those of whole stores on disk (checksums, index, labels and metadata included), of examples
with SQuAD's lengths, against dense float32 padded to 386 tokens. Errors are of decoded against
original hidden states. Both are of synthetic activations at BERT-large's size; with ``--workspace``
also of the real ones of a snapshot, whose heads are then trained and scored on each encoding:
extraction, training and evaluation are the commands' own, in a copy of the workspace for each
encoding, and what is done is not done again when the script is started again.
"""

from __future__ import annotations

from harness import arguments, report, size_of  # first: it sets the environment for torch

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

import data
from bertvision.featurestore.calibration import ChannelStatsAccumulator
from bertvision.featurestore.encoding import ChannelStats, decode, encode, get_encoding
from bertvision.featurestore.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.writer import SplitContents, SplitSpec, open_writer
from bertvision.pipelines.encoder import Encoder, channel_stats, length_groups
from bertvision.pipelines.evaluate import evaluate
from bertvision.pipelines.extract import extract
from bertvision.pipelines.files import write_json
from bertvision.pipelines.snapshots import load_snapshot
from bertvision.pipelines.tables import format_table
from bertvision.pipelines.train import TrainOptions, train
from bertvision.pipelines.workspace import FILE, Workspace

STORED = [
    *(("float32", "none"), ("float16", "none"), ("bfloat16", "none"), ("int8", "none")),
    *(("int4", "none"), ("float32", "pcodec"), ("float16", "pcodec"), ("bfloat16", "pcodec")),
    *(("int8", "zstd"), ("int4", "zstd")),
]
TRAINED = ("float32", "int8", "int4")
HEADS = ["learned-pooling", "adapter-64-shared", "adapter-386-shared", "adapter-386-shared-skip"]


class Sample(NamedTuple):
    """Hidden states of whole examples, in plan order.

    Attributes:
        name: of the sample.
        hidden_states: (tokens, layers, hidden) float32.
        n_tokens: (examples,) which fill whole shards but for what the ragged lengths leave.
        stats: channel statistics, from other tokens where there are enough.
    """

    name: str
    hidden_states: Tensor
    n_tokens: npt.NDArray[np.int64]
    stats: ChannelStats


def whole_shards(n_tokens: npt.NDArray[np.int64], shards: int) -> int:
    """How many examples, in order, make so many shards (so that no half-empty one is counted)."""
    plan = ShardPlan.make(n_tokens, shard_tokens=SHARD_TOKENS, seed=None)
    return int(np.searchsorted(plan.shard, shards))


def synthetic(shards: int) -> Sample:
    """Activations of BERT-large's size (see `data.hidden_states`); every token is its own."""
    n_tokens = data.lengths(40 * shards)
    n_tokens = n_tokens[: whole_shards(n_tokens, shards)]
    accumulator = ChannelStatsAccumulator()
    calibration, tokens = 4096, int(n_tokens.sum())
    h = data.hidden_states(calibration + tokens)
    for block in h[:calibration].split(256):
        accumulator.add(block)
    name = f"synthetic, {data.LAYERS} × {data.HIDDEN}"
    return Sample(name, h[calibration:], n_tokens, accumulator.result())


def real(workspace: Workspace, tag: str, shards: int) -> Sample:
    """Activations of dev windows, with the statistics that an extraction of them would use."""
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    windows = workspace.windows("dev", snapshot.tokenizer)
    config = snapshot.model.config
    states = range(config.num_hidden_layers + 1)
    encoder = Encoder(snapshot.model.bert, states, snapshot.tokenizer.pad_token_id, "32")
    n_tokens = windows.n_tokens.astype(np.int64)
    n_tokens = n_tokens[: whole_shards(n_tokens, shards)]
    parts: list[Tensor] = [torch.empty(0)] * len(n_tokens)
    for group in length_groups(n_tokens):
        packed = encoder(windows, group).split(n_tokens[group].tolist())
        for row, part in zip(group, packed, strict=True):
            parts[row] = part
    name = f"real, {len(states)} × {config.hidden_size}"
    return Sample(name, torch.cat(parts), n_tokens, channel_stats(encoder, windows))


def stored_bytes(sample: Sample, encoding: str, compression: Any, folder: Path) -> float:
    """Bytes per example of a store of the sample."""
    h, total = sample.hidden_states, int(sample.n_tokens.sum())
    token = np.arange(total, dtype=np.int32)
    example = np.arange(len(sample.n_tokens), dtype=np.int32)
    plan = ShardPlan.make(sample.n_tokens, shard_tokens=SHARD_TOKENS, seed=None)
    contents = SplitContents(
        plan,
        per_token={
            "input_ids": token % 30000,
            "token_type_ids": (token % 2).astype(np.int8),
            "offset_mapping": np.stack([token, token + 1], 1),
        },
        per_example={
            name: example for name in ("question_index", "start_positions", "end_positions")
        },
        examples=pa.table({"id": [str(i) for i in example]}),
    )
    spec = SplitSpec(
        *("1e", "train", encoding, tuple(range(h.shape[1])), h.shape[2]),
        provenance={},
        compression=compression,
    )
    with open_writer(folder, spec, contents, lambda: sample.stats) as writer:
        for shard in writer.pending():
            members = plan.examples_of(shard)
            first = int(sample.n_tokens[: members.start].sum())
            rows = slice(first, first + plan.tokens_of(shard))
            writer.write_shard(shard, *encode(h[rows], writer.split.encoding, writer.stats))
    return size_of([folder]) / len(example)


def errors(sample: Sample, encoding: str) -> dict[str, float]:
    """Relative Frobenius error of all and of the worst layer, and the error in channel deviations."""
    squared = norm = torch.zeros(())
    in_deviations = 0.0
    for h in sample.hidden_states.split(512):
        codes, scale, _ = encode(h, get_encoding(encoding), sample.stats)
        difference = decode(codes, scale, sample.stats) - h
        squared = squared + difference.double().square().sum(dim=(0, 2))
        norm = norm + h.double().square().sum(dim=(0, 2))
        in_deviations += float((difference / sample.stats.std).double().square().sum())
    return {
        "relative error": float((squared.sum() / norm.sum()).sqrt()),
        "worst layer": float((squared / norm).sqrt().max()),
        "nrmse": (in_deviations / sample.hidden_states.numel()) ** 0.5,
    }


def head_scores(
    source: Workspace, tag: str, folder: Path, *, questions: int, seeds: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """EM and F1 of heads by encoding and head, one entry per seed; kept in ``folder`` as it goes.

    Equal seeds mean equal initial weights and equal batches, so that encodings can be compared
    seed by seed.
    """
    scores: dict[str, dict[str, list[dict[str, float]]]] = {}
    for encoding in TRAINED:
        root = folder / encoding
        files = [root / f"seed-{seed}.json" for seed in range(seeds)]
        if not all(file.exists() for file in files):
            workspace = _copy(source, root, questions)
            extract(workspace, tag, splits=["train", "dev"], encoding=encoding)
            for seed, file in enumerate(files):
                if not file.exists():
                    train(workspace, HEADS, tag, TrainOptions(seed=seed), overwrite=True)
                    found = evaluate(workspace, HEADS, trained_on=tag, tag=tag)
                    write_json(file, {m["head"]: m["rules"]["n-best"]["metrics"] for m in found})
            shutil.rmtree(workspace.activations)
        by_seed = [json.loads(file.read_text()) for file in files]
        scores[encoding] = {
            head: [{"EM": s[head]["exact"], "F1": s[head]["f1"]} for s in by_seed] for head in HEADS
        }
    return scores


def _copy(source: Workspace, root: Path, questions: int) -> Workspace:
    """A workspace with the same snapshots and part of the training questions."""
    if not (root / FILE).exists():
        finetune = source.config.finetune.model_copy(update={"train_questions": questions})
        config = source.config.model_copy(update={"finetune": finetune})
        Workspace.create(root, config)
        (root / "snapshots").symlink_to(source.root / "snapshots")
    return Workspace.find(root)


def compare(scores: dict[str, dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """Mean difference to float32 over heads and seeds, with its standard error, by encoding."""
    rows = []
    for encoding in TRAINED:
        for metric in ("EM", "F1"):
            pairs = [
                (score[metric], reference[metric])
                for head in HEADS
                for score, reference in zip(
                    scores[encoding][head], scores["float32"][head], strict=True
                )
            ]
            differences = [score - reference for score, reference in pairs]
            rows.append(
                {
                    "encoding": encoding,
                    "metric": metric,
                    "mean": statistics.mean(score for score, _ in pairs),
                    "difference": statistics.mean(differences),
                    "standard error": statistics.stdev(differences) / len(differences) ** 0.5,
                    "pairs": len(pairs),
                }
            )
    return rows


def main() -> None:
    """Run, print and write the report."""
    parser = arguments(__doc__)
    parser.add_argument("--workspace", type=Path, help="with the snapshot to take heads from")
    parser.add_argument("--checkpoint", default="1e", help="tag of that snapshot")
    parser.add_argument("--questions", type=int, default=6000, help="to train heads on")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    workspace = options.workspace and Workspace.find(options.workspace)
    shards = 1 if options.quick else 6
    samples = [synthetic(max(1, shards // 2))]
    if workspace:
        samples.append(real(workspace, options.checkpoint, shards))
    found: dict[str, Any] = {}
    rows = []
    for sample in samples:
        layers, hidden = sample.hidden_states.shape[1:]
        dense = 4.0 * data.MAX_LENGTH * layers * hidden
        for encoding, compression in STORED:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                stored = stored_bytes(sample, encoding, compression, Path(folder, "store"))
            name = encoding if compression == "none" else f"{encoding} + {compression}"
            found[f"{sample.name}: {name}"] = {"bytes": stored, "times smaller": dense / stored} | (
                errors(sample, encoding)
            )
            rows.append([name, *map("{:.4g}".format, found[f"{sample.name}: {name}"].values())])
    scores: dict[str, Any] = {}
    ...


if __name__ == "__main__":
    main()
