"""An epoch of head training from the store against running the encoder again, side by side.

    python benchmarks/epoch.py --workspace DIR --checkpoint 1e --heads adapter-386-shared

Both sides do the same training step on the same examples; the one decodes stored activations, the
other runs the encoder (unpadded as far as sorting by length allows, the way extraction does). Sides
are interleaved and repeated, medians are compared. On a busy machine trust the ratios alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from bertvision.featurestore.stream import ActivationLoader
from bertvision.models.outputs import span_loss
from bertvision.pipelines.datamodule import HiddenStates, decoded
from bertvision.pipelines.encoder import Encoder, length_groups
from bertvision.pipelines.module import build_heads
from bertvision.pipelines.precision import autocast, device, resolve_precision
from bertvision.pipelines.snapshots import load_snapshot
from bertvision.pipelines.tables import format_table
from bertvision.pipelines.workspace import Workspace


def main() -> None:
    """Measure, print a table, and write every repetition as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--checkpoint", default="1e")
    parser.add_argument("--heads", nargs="+", default=["adapter-386-shared"])
    parser.add_argument("--examples", type=int, default=480, help="per repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = measure(options)
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    ratio = statistics.median(
        (run["encoder"] + run["encoder step"]) / (run["wait"] + run["decode"] + run["step"])
        for run in runs
    )
    waiting = statistics.median(
        run["wait"] / (run["wait"] + run["decode"] + run["step"]) for run in runs
    )
    rows = [[name, f"{1000 * value:.2f}"] for name, value in median.items()]
    print(format_table(["part", "ms per example"], rows))
    print(f"running the encoder again takes {ratio:.1f}× as long as an epoch from the store")
    print(f"waiting for data: {waiting:.1%} of the epoch")
    if options.json:
        report = {
            "heads": options.heads,
            "examples": options.examples,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "ratios": {"encoder again / from the store": ratio, "waiting / epoch": waiting},
            "seconds_per_example": runs,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds per example of every part, a row per repetition; the first one warms up."""
    space = Workspace.find(options.workspace)
    split = space.split(options.checkpoint, "train")
    snapshot = load_snapshot(space.require_snapshot(options.checkpoint))
    windows = space.windows("train", snapshot.tokenizer)
    precision = resolve_precision("auto")
    encoder = Encoder(snapshot.model.bert, split.record.layers, 0, precision)
    heads = build_heads(
        options.heads,
        layers=len(split.record.layers),
        hidden=split.record.hidden_size,
        seed=0,
    )
    parameters = [p for head in heads.values() for p in head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def step(batch: HiddenStates) -> float:
        started = time.perf_counter()
        with autocast(precision, device()):
            start, end = (batch.labels[f"{side}_positions"].long() for side in ("start", "end"))
            loss = torch.stack(
                [
                    span_loss(head(batch.hidden_states, batch.lengths), start, end)
                    for head in heads.values()
                ]
            ).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    loader = ActivationLoader(split, batch_size=16)
    # one stream for all repetitions: what its start costs belongs to an epoch, not to each of them
    stream = itertools.chain.from_iterable(itertools.repeat(loader))
    runs = []
    for repeat in range(options.repeats + 1):
        times = dict.fromkeys(("wait", "decode", "step", "encoder", "encoder step"), 0.0)
        seen: list[int] = []
        waited = loader.wait_seconds
        for packed in stream:
            started = time.perf_counter()
            batch = decoded(packed.to(device()), dtype)
            times["decode"] += time.perf_counter() - started
            times["step"] += step(batch)
            seen += packed.examples.tolist()
            if len(seen) >= options.examples:
                break
        times["wait"] = loader.wait_seconds - waited
        examples = np.array(seen)
        for group in length_groups(split.plan.n_tokens[examples].astype(np.int64)):
            for part in np.array_split(group, -(-len(group) // 16)):
                chosen = examples[part]
                started = time.perf_counter()
                hidden_states = encoder(windows, split.plan.example_id[chosen])
                times["encoder"] += time.perf_counter() - started
                labels = {k: torch.from_numpy(v[chosen]) for k, v in split.labels.items()}
                lengths = torch.from_numpy(split.plan.n_tokens[chosen].astype(np.int64))
                ids = torch.from_numpy(chosen)
                # cloned: tensors made in inference mode cannot take part in a backward pass
                own = hidden_states.to(dtype).clone()
                times["encoder step"] += step(HiddenStates(own, lengths, labels, ids))
        if repeat:
            runs.append({name: value / len(seen) for name, value in times.items()})
    return runs


if __name__ == "__main__":
    main()
