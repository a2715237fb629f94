"""Whether stored activations beat running the encoder again, on a machine with a GPU.

    python benchmarks/gpu --json gpu.json
    python benchmarks/gpu --device cpu --quick          # does it run? no figures worth keeping

Dimensions of BERT-large, random weights, SQuAD's lengths, bfloat16. Measured:

- *forward*: the encoder alone; *extraction*: with int8 encoding on the device and shards copied to
  the host and written durably meanwhile; each part alone, so that one sees what limits it;
- *stream*: batches of 16 from the page cache: read, copied through page-locked buffers, decoded on
  the device; the bytes that cross the bus against a plain page-locked copy of the same size;
- *epochs* of adapter-386-shared and of eight heads in one pass: from a cold disk, from the page
  cache, with the codes resident in device memory, and with the encoder run again for every batch.

From these follows when extraction pays: after how many epochs, with how many heads in one pass,
from how fast a disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # where scripts beside this folder stand

import torch
from common.harness import arguments, interleave, report
from common.heads import EIGHT, ONE, Heads

from gpu.conclusions import conclusions
from gpu.epochs import Epochs
from gpu.extraction import Extraction


def main() -> None:
    """Measure, print tables, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--examples", type=int, default=1536)
    parser.add_argument("--shard-tokens", type=int, default=4096)
    options = parser.parse_args()
    size = "large"
    if options.quick:
        size, options.examples, options.repeats = "minilm", 16, 2
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for one
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --device cpu --quick tries the script out")
    made = Extraction(options, size)
    bench = Epochs(made)
    sides = {
        "forward": made.forward,
        "encode": made.encode,
        "write": made.write,
        "extraction": made.extraction,
        "copy, GB/s": bench.plain_copy,
        "stream, codes on the device": bench.streamed,
        "stream, decoded": bench.stream_decoded,
    }
    for count, names in (("one head", ONE), ("eight heads", EIGHT)):
        train = Heads(names, made.split, made.precision)
        sides |= {
            f"epoch, disk, {count}": lambda t=train: bench.epoch(t, bench.from_disk),
            f"epoch, page cache, {count}": lambda t=train: bench.epoch(t, bench.from_cache),
            f"epoch, device memory, {count}": lambda t=train: bench.epoch(t, bench.resident),
            f"epoch, encoder again, {count}": lambda t=train: bench.epoch(t, bench.recomputed),
            f"step alone, {count}": lambda t=train: bench.steps(t),
        }
    results = interleave(sides, options.repeats, warmup=0 if options.quick else 1)
    medians = {name: median(values) for name, values in results.items()}
    found, notes = conclusions(medians, bench.bytes_per_example)
    report(
        options.json,
        benchmark="gpu",
        settings={
            "device": options.device,
            "size": size,
            "examples": len(made.split),
            "bytes_per_example": bench.bytes_per_example,
            "shard_tokens": options.shard_tokens,
            "precision": made.precision,
            "eight heads": EIGHT,
        },
        unit="examples/s where nothing else is said",
        results=results,
        ratios=found,
        notes=notes,
    )


if __name__ == "__main__":
    main()
