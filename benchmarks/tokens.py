"""Batches of single tokens' vectors of one layer, as trainers of sparse autoencoders take them.

    python benchmarks/tokens.py --json docs/performance/tokens.json

Batches have 4,096 tokens. 'float32' is a batch as a trainer on a CPU takes it, 'stored' as it is
sent to a device: codes and scales, or float16. Three limits check nothing, and decode by the same
function: one reads the chunks of a store like ours with two threads, one draws rows of 16 such
chunks at random, and one reads the same int8 bytes from one file, in its order and into one buffer.
'in memory' permutes float32 rows that were read before. 'cold' drops the files from the page cache.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import itertools
import os
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from common.data import Synthetic, lengths
from peers.vector_limits import Chunks, MixedChunks, Pair, Preadv
from peers.vectors import (
    BATCH,
    BUFFER,
    OURS,
    Bertvision,
    InMemory,
    MemMap,
    Resident,
    SAELensCache,
    Side,
)


def check(side: Side) -> None:
    """Compare an epoch with the truth, so that nobody is fast by reading less.

    Raises:
        RuntimeError: tokens are missing, or their values are not those that were written.
    """
    count = total = 0.0
    for batch in side.vectors(0):
        count += len(batch)
        total += float(batch.abs().sum(dtype=torch.float64))
    per_row = side.layer.abs().sum(dim=1, dtype=torch.float64)
    truth = float(per_row[side.rows].mean())
    if (side.whole and count != len(side.rows)) or abs(total / count / truth - 1) > 0.02:
        raise RuntimeError(
            f"{side.name}: {count:.0f} of {len(side.rows)} tokens, {total / count} a token"
        )


def measured(side: Side, condition: str, seconds: float) -> Callable[[], float]:
    """A function that measures a side in tokens/s: whole epochs, so many seconds at least."""
    seeds, cold = itertools.count(1), condition.endswith("cold")

    def epoch() -> int:
        if condition.startswith("float32"):
            return sum(len(batch) for batch in side.vectors(next(seeds)))
        batches = side.stored(next(seeds))
        assert batches is not None
        # a pair of codes and scale has a length of its own
        return sum(len(b.codes if isinstance(b, Pair) else b) for b in batches)

    def measure() -> float:
        if cold:
            harness.drop_cache([side.folder])
        else:
            epoch()
        tokens, started = 0, time.perf_counter()
        while True:
            tokens += epoch()
            elapsed = time.perf_counter() - started
            if cold or elapsed >= seconds:
                return tokens / elapsed

    return measure


def main() -> None:
    """Prepare all sides, check that they give the same, measure, report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--examples", type=int, default=3600)
    options = parser.parse_args()
    layers, hidden, seconds = 5, 768, 1.0
    if options.quick:
        layers, hidden, options.examples, seconds, options.repeats = 2, 64, 120, 0.05, 2
    synthetic = Synthetic(lengths(options.examples), layers=layers, hidden=hidden)
    folder = options.folder / f"tokens-{options.examples}x{layers}x{hidden}"
    kinds: list[type[Side]] = [
        Bertvision,
        Resident,
        Chunks,
        MixedChunks,
        Preadv,
        MemMap,
        InMemory,
    ]
    notes = []
    if find_spec("sae_lens") is None:
        notes.append("not installed: sae-lens")
    else:
        kinds.append(SAELensCache)
    sides = [kind(folder, synthetic) for kind in kinds]
    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for side in sides:
        check(side)
    for condition in ("stored, warm", "float32, warm", "stored, cold", "float32, cold"):
        chosen = [side for side in sides if side.disk or not condition.endswith("cold")]
        if condition.startswith("stored"):
            chosen = [side for side in chosen if side.stored(0) is not None]
        found = harness.interleave(
            {side.name: measured(side, condition, seconds) for side in chosen}, options.repeats
        )
        results |= {f"{name} | {condition}": figures for name, figures in found.items()}
        compared = harness.ratios(found, OURS, higher_is_better=True)
        ratios |= {f"{name} | {condition}": ratio for name, ratio in compared.items()}
    harness.report(
        options.json,
        benchmark="tokens",
        settings={
            "tokens": int(synthetic.n_tokens.sum()),
            "layers": layers,
            "hidden": hidden,
            "batch_size": BATCH,
            "buffer_shards": BUFFER,
            "repeats": options.repeats,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            **harness.versions(["sae-lens", "datasets"]),
        },
        unit="tokens/s",
        results=results,
        ratios=ratios,
        notes=notes,
    )


if __name__ == "__main__":
    # of libraries; the report is what should be read
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    main()
