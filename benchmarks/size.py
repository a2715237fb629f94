"""Bytes and reconstruction error of every encoding, and what it costs a trained head.

    python benchmarks/size.py --workspace WORKSPACE --json docs/performance/size.json

Bytes are those of whole stores on disk (checksums, index, labels and metadata included), of
examples with SQuAD's lengths, against dense float32 padded to 386 tokens. Errors are of decoded
against original hidden states. Both are of synthetic activations at BERT-large's size; with
--workspace also of the real ones of a snapshot, whose heads are then trained and scored on each
encoding: extraction, training and evaluation are the commands' own, in a copy of the workspace for
each encoding, and what is done is not done again when the script is started again.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from common import data
from torch import Tensor

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import Calibration, ChannelStatsAccumulator
from bertvision.featurestore.format.encoding import ChannelStats, decode, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.split_extraction import calibrate
from bertvision.pipelines.files import write_json
from bertvision.pipelines.text import format_table
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import FILE, Workspace

STORED = [
    *(("float32", "none"), ("float16", "none"), ("bfloat16", "none"), ("int8", "none")),
    *(("int4", "none"), ("float32", "pcodec"), ("float16", "pcodec"), ("bfloat16", "pcodec")),
    *(("int8", "zstd"), ("int4", "zstd")),
]
QUANTISED = ("int8", "int4")
TRAINED = ("float32", "int8", "int4", "transform:0.05", "transform:0.115", "transform:0.3")
HEADS = ["learned-pooling", "adapter-64-shared", "adapter-386-shared", "adapter-386-shared-skip"]


class Sample(NamedTuple):
    """Hidden states of whole examples.

    Attributes:
        name: of the sample.
        hidden_states: (tokens, layers, hidden) float32, examples one after another.
        n_tokens: (examples,) which fill whole shards.
        stats: by quantised encoding the channel statistics that an extraction would use, of other
            tokens where there are enough.
        plain: those of all tokens alike.
    """

    name: str
    hidden_states: Tensor
    n_tokens: npt.NDArray[np.int64]
    stats: Mapping[str, ChannelStats]
    plain: ChannelStats


def fitting(lengths: Callable[[int], npt.NDArray[np.int64]], shards: int) -> npt.NDArray[np.int64]:
    """As many lengths as fit so many shards: an emptier last one would count in no large store."""
    n = shards * SHARD_TOKENS // 100
    while ShardPlan.make(lengths(n), shard_tokens=SHARD_TOKENS, seed=0).n_shards > shards:
        n -= 1
    return lengths(n)


def synthetic(shards: int) -> Sample:
    """Activations of BERT-large's size (see `data.hidden_states`); every token is its own."""
    n_tokens = fitting(data.lengths, shards)
    accumulator = ChannelStatsAccumulator()
    calibration, tokens = 4096, int(n_tokens.sum())
    h = data.hidden_states(calibration + tokens)
    for block in h[:calibration].split(256):
        accumulator.add(block)
    name = f"synthetic, {data.LAYERS} × {data.HIDDEN}"
    stats = {e: accumulator.result(get_encoding(e).levels) for e in QUANTISED}
    return Sample(name, h[calibration:], n_tokens, stats, accumulator.result())


def real(workspace: Workspace, tag: str, shards: int) -> Sample:
    """Activations of training windows, with the statistics that an extraction would use."""
    snapshot = load_snapshot(workspace.require_snapshot(tag))
    windows = workspace.windows("train", snapshot.tokenizer)
    states = range(snapshot.model.config.num_hidden_layers + 1)
    encoder = Encoder(snapshot.model.base_model, {"all": states}, "32")
    rows = np.random.default_rng(0).permutation(len(windows))
    n_tokens = fitting(lambda n: windows.n_tokens[rows[:n]].astype(np.int64), shards)
    # copied: the encoder uses its memory again
    h = torch.cat([encoder(windows, rows[b])[0].clone() for b in encoder.batches(n_tokens)])
    name = f"real, {h.shape[1]} × {h.shape[2]}"
    hidden = h.shape[2]
    found = {e: calibrate(encoder, windows, e, hidden_size=hidden)[0] for e in QUANTISED}
    plain = found["int8"].plain
    assert plain is not None  # what was calibrated just now has it
    return Sample(name, h, n_tokens, {e: of.stats for e, of in found.items()}, plain)


def stored_bytes(sample: Sample, encoding: str, compression: Any, folder: Path) -> float:
    """Bytes per example of a store of the sample."""
    h, total = sample.hidden_states, int(sample.n_tokens.sum())
    token = np.arange(total, dtype=np.int32)
    example = np.arange(len(sample.n_tokens), dtype=np.int32)
    plan = ShardPlan.make(sample.n_tokens, shard_tokens=SHARD_TOKENS, seed=0)
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
    with open_writer(folder, spec, contents, lambda: Calibration(sample.stats[encoding])) as writer:
        examples = h.split(sample.n_tokens.tolist())
        for shard in writer.pending():
            members = plan.examples_of(shard)
            rows = plan.example_id[members.start : members.stop]
            packed = torch.cat([examples[row] for row in rows])
            writer.write_shard(shard, *encode(packed, writer.split.encoding, writer.stats))
    return harness.size_of([folder]) / len(example)


def errors(sample: Sample, encoding: str) -> dict[str, float]:
    """Relative Frobenius error of all and of the worst layer; error in channel deviations."""
    squared = norm = torch.zeros(())
    in_deviations, stats = 0.0, sample.stats.get(encoding)
    for h in sample.hidden_states.split(512):
        codes, scale, _ = encode(h, get_encoding(encoding), stats)
        difference = decode(codes, scale, stats) - h
        squared = squared + difference.square().sum(dim=(0, 2), dtype=torch.float64)
        norm = norm + h.square().sum(dim=(0, 2), dtype=torch.float64)
        in_deviations += float((difference / sample.plain.std).square().sum(dtype=torch.float64))
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
                    runs = [Run(head, seed=seed) for head in HEADS]
                    train(workspace, runs, tag, TrainOptions(), overwrite=True)
                    found = evaluate(workspace, runs, trained_on=tag, tag=tag)
                    scored = zip(HEADS, found, strict=True)
                    write_json(file, {h: m.rules["n-best"]["metrics"] for h, m in scored})
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
    parser = harness.arguments(__doc__)
    parser.add_argument("--workspace", type=Path, help="with a snapshot, to measure what is real")
    parser.add_argument("--checkpoint", default="1e", help="tag of that snapshot")
    parser.add_argument("--questions", type=int, default=6000, help="to train heads on")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each head")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    workspace = options.workspace and Workspace.find(options.workspace)
    shards = 1 if options.quick else 3
    samples = [synthetic(shards)]
    if workspace:
        samples.append(real(workspace, options.checkpoint, 8 * shards))
    results: dict[str, list[float]] = {}
    smaller: dict[str, float] = {}
    lost: dict[str, dict[str, float]] = {}
    for sample in samples:
        layers, hidden = sample.hidden_states.shape[1:]
        dense = 4.0 * data.MAX_LENGTH * layers * hidden
        results[f"dense float32, padded | {sample.name}"] = [dense]
        for encoding in dict(STORED):
            lost[f"{encoding} | {sample.name}"] = errors(sample, encoding)
        for encoding, compression in STORED:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                stored = stored_bytes(sample, encoding, compression, Path(folder, "store"))
            name = encoding if compression == "none" else f"{encoding} + {compression}"
            results[f"{name} | {sample.name}"] = [stored]
            smaller[f"{name} | {sample.name}"] = dense / stored
    written = harness.report(
        None,
        benchmark="size",
        settings={"max_length": data.MAX_LENGTH, "shards": shards, "shard_tokens": SHARD_TOKENS}
        | {sample.name: {"mean_tokens": float(sample.n_tokens.mean())} for sample in samples},
        unit="bytes per example",
        results=results,
        ratios=smaller,
        notes=["ratios are dense float32, padded, against the store of that encoding"],
    )
    columns = list(next(iter(lost.values())))
    rows = [[name, *(f"{row[c]:.2e}" for c in columns)] for name, row in lost.items()]
    print(format_table(["reconstruction error", *columns], rows))
    written["errors"] = lost
    if workspace:
        folder = options.folder / f"heads-{options.checkpoint}-{options.questions}"
        scores = head_scores(
            workspace,
            options.checkpoint,
            folder,
            questions=options.questions,
            seeds=options.seeds,
        )
        written["heads"] = {"scores": scores, "compared": compare(scores)}
        titles = list(written["heads"]["compared"][0])
        cells = [
            [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
            for row in written["heads"]["compared"]
        ]
        print(format_table(["heads: " + titles[0], *titles[1:]], cells))
    if options.json:
        write_json(options.json, written)


if __name__ == "__main__":
    main()
