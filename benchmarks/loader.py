"""Shuffled mini-batches of 16 from bertvision's store and from everything else, side by side.

    python benchmarks/loader.py --json docs/performance/loader.json

Every reader gives the same examples. 'stored' is a batch as it is stored, in memory, ready to be
sent to a device: codes and scales for us, float16 or float32 for most others. 'bfloat16' is the
same batch as a tensor that the model takes. 'cold' drops the files from the page cache first.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from importlib.metadata import packages_distributions
from typing import Any

import torch
from common.data import HIDDEN, LAYERS, MAX_LENGTH, Synthetic, lengths
from peers import OURS, readers
from peers.base import BATCH, Batch, Reader, magnitude

CONDITIONS = ("stored, warm", "bfloat16, warm", "stored, cold")


def main() -> None:
    """Prepare all readers, check that they read the same, measure, report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--examples", type=int, default=160)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--only", nargs="+", default=[], help="parts of readers' names")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    options = parser.parse_args()
    layers, hidden, examples, seconds = options.layers, options.hidden, options.examples, 0.5
    if options.quick:
        layers, hidden, examples, seconds = 3, 64, 48, 0.05
        options.repeats = 2
    synthetic = Synthetic(lengths(examples), layers=layers, hidden=hidden)
    available, missing = readers(layers, hidden)
    chosen = [
        r
        for r in available
        if r.name == OURS or not options.only or any(part in r.name for part in options.only)
    ]
    folder = options.folder / f"loader-{examples}x{layers}x{hidden}"
    for reader in chosen:
        reader.prepare(folder, synthetic)
        check(reader, synthetic)
    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    left_out: list[str] = []
    for condition in options.conditions:
        sides = {
            reader.name: side(reader, condition, seconds)
            for reader in chosen
            if reader.disk or not condition.endswith("cold")
        }
        measured = harness.interleave(sides, options.repeats)
        for name in [n for n, figures in measured.items() if any(map(math.isnan, figures))]:
            left_out.append(
                f"{name}: its files stayed in the page cache, so no cold figure is shown"
            )
            del measured[name]
        results |= {f"{name} | {condition}": figures for name, figures in measured.items()}
        compared = harness.ratios(measured, OURS, higher_is_better=True)
        ratios |= {f"{name} | {condition}": ratio for name, ratio in compared.items()}
    packages = packages_distributions()
    notes = [*left_out, *([f"not installed: {', '.join(missing)}"] if missing else [])]
    notes += [f"{r.name}: {r.examples} of the examples" for r in chosen if r.examples < examples]
    harness.report(
        options.json,
        benchmark="loader",
        settings={
            "examples": examples,
            "mean_tokens": float(synthetic.n_tokens.mean()),
            "max_length": MAX_LENGTH,
            "layers": layers,
            "hidden": hidden,
            "batch_size": BATCH,
            "repeats": options.repeats,
            "readers": {
                r.name: {
                    "stored": r.stored,
                    "shuffled": r.shuffled,
                    "examples": r.examples,
                    "bytes_per_example": harness.size_of(r.files) / r.examples,
                    **harness.versions(packages.get(r.needs, [])),
                }
                for r in chosen
            },
        },
        unit="examples/s",
        results=results,
        ratios=ratios,
        notes=notes,
    )


def check(reader: Reader, synthetic: Synthetic) -> None:
    """Read an epoch and compare it with the truth, so that nobody is fast by reading less.

    Raises:
        RuntimeError: examples are missing, or their values are not those that were written.
    """
    reader.open()
    examples, found = magnitude(reader.batches(seed=0))
    reader.close()
    per_token = synthetic.pool.abs().sum(dim=(1, 2), dtype=torch.float64)
    truth = sum(float(per_token[synthetic.rows(i)].sum()) for i in range(reader.examples))
    if examples != reader.examples or abs(found / truth - 1) > 0.005:
        raise RuntimeError(
            f"{reader.name} gave {examples} of {reader.examples} examples, and {found / truth:.4f} "
            "of their magnitudes"
        )


def side(reader: Reader, condition: str, seconds: float) -> Callable[[], float]:
    """A function that measures one reader in examples/s: whole epochs, so many seconds at least."""
    work, _, cache = condition.partition(", ")
    ready: Callable[[Batch], Any] = Batch.bfloat16 if work == "bfloat16" else _nothing
    seeds = itertools.count(1)

    def epoch() -> int:
        examples = 0
        for batch in reader.batches(next(seeds)):
            ready(batch)
            examples += batch.examples
        return examples

    def measure() -> float:
        harness.warm_cache(reader.files)
        reader.open()
        try:
            # workers started, buffers touched, caches of the reader filled: its steady state
            started = time.perf_counter()
            while time.perf_counter() - started < 2 * seconds:
                epoch()
            if cache == "cold":
                if reader.mapped:
                    reader.close()
                if not harness.drop_cache(reader.files):
                    return math.nan
                if reader.mapped:
                    reader.open()
            examples, started = 0, time.perf_counter()
            while True:
                examples += epoch()
                elapsed = time.perf_counter() - started
                if elapsed >= seconds or cache == "cold":
                    return examples / elapsed
        finally:
            reader.close()

    return measure


def _nothing(batch: Batch) -> None:
    """Stored batches are ready as they are."""


if __name__ == "__main__":
    # before the libraries are imported; the report is what should be read
    os.environ |= {"LANCE_LOG": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    main()
