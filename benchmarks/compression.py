"""Entropy coding of stored codes, against none: warm and cold cache, and slow disks.

    python benchmarks/compression.py --json OUT [--quick]

Every side streams the same examples at BERT-large dimensions as packed codes. A slow disk is the
store's own reader behind a device that passes so many bytes a second, one request after the other.
Every token is drawn anew, because repeated ones would flatter a compressor.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from common import data, harness

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import Calibration, ChannelStatsAccumulator
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.storage import OpenFile
from bertvision.featurestore.stream import ActivationLoader
from bertvision.featurestore.writer import open_writer

FORMS = [
    ("int8", "none"),
    ("int8", "zstd"),
    ("int4", "none"),
    ("int4", "zstd"),
    ("bfloat16", "none"),
    ("bfloat16", "zstd"),
    ("bfloat16", "pcodec"),
]
RATES = {"disk of 400 MB/s": 400e6, "disk of 100 MB/s": 100e6}


class SlowStorage(LocalStorage):
    """A local folder behind a device of limited bandwidth."""

    def __init__(self, root: Path, rate: float) -> None:
        super().__init__(root)
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def open(self, key: str) -> OpenFile:
        """A file whose bytes pass the device."""
        return _SlowFile(super().open(key), self)

    def transfer(self, nbytes: int) -> None:
        """Return when the device has passed so many bytes more."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.perf_counter()))


class _SlowFile:
    def __init__(self, file: OpenFile, storage: SlowStorage) -> None:
        self._file, self._storage = file, storage
        self.size = file.size

    def prefetch(self, offset: int, length: int) -> None:
        """Nothing: the device is busy with what is read."""

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        self._file.read_into(out, offset)
        self._storage.transfer(out.nbytes)

    def close(self) -> None:
        self._file.close()


def main() -> None:
    """Measure every form on every medium; print tables and write one report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--examples", type=int, default=192)
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    n_tokens = data.lengths(48 if options.quick else options.examples, seed=0)
    folder = options.folder / f"compression-{len(n_tokens)}"
    splits = {f"{e} {c}": write(folder / f"{e}-{c}", n_tokens, e, c) for e, c in FORMS}
    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for medium in ("warm", "cold", *RATES):
        sides = {name: side(split, medium, len(n_tokens)) for name, split in splits.items()}
        measured = harness.interleave(sides, repeats)
        results |= {f"{name}, {medium}": figures for name, figures in measured.items()}
        for encoding, compression in FORMS:
            if compression != "none":
                pair = {c: measured[f"{encoding} {c}"] for c in ("none", compression)}
                found = harness.ratios(pair, "none", higher_is_better=True)
                ratios[f"{encoding} {compression}, {medium}"] = found[compression]
    sizes = {name: split.info()["bytes"] / len(n_tokens) for name, split in splits.items()}
    harness.report(
        options.json,
        benchmark="compression",
        settings={"examples": len(n_tokens), "layers": data.LAYERS, "hidden": data.HIDDEN},
        unit="examples/s",
        results=results,
        ratios=ratios,
        notes=[f"{name}: {size / 1e6:.2f} MB an example" for name, size in sizes.items()],
    )


def side(split: ActivationSplit, medium: str, examples: int) -> Callable[[], float]:
    """A function that streams an epoch and gives examples per second."""
    root = Path(str(split.storage))

    def run() -> float:
        if medium == "cold":
            harness.drop_cache([root / "arrays.zarr"])
        storage = SlowStorage(root, RATES[medium]) if medium in RATES else root
        loader = ActivationLoader(ActivationSplit(storage, split.tag, split.split))
        started = time.perf_counter()
        for _ in loader:
            pass
        return examples / (time.perf_counter() - started)

    return run


def write(
    folder: Path, n_tokens: npt.NDArray[np.int64], encoding: str, compression: Any
) -> ActivationSplit:
    """Write a split in which every shard has tokens of its own, or open the one that is there."""
    plan = ShardPlan.make(n_tokens, seed=0)
    spec = SplitSpec(
        tag="1e",
        split="train",
        encoding=encoding,
        compression=compression,
        layers=tuple(range(data.LAYERS)),
        hidden_size=data.HIDDEN,
        provenance={"model": "synthetic", "max_length": data.MAX_LENGTH},
    )
    contents = SplitContents(
        plan, {}, {"start_positions": np.zeros(len(plan), np.int32)}, pa.table({"id": n_tokens})
    )
    accumulator = ChannelStatsAccumulator()
    drawn = hidden_states(plan.n_shards * plan.shard_tokens)
    accumulator.add(drawn[:2048])
    with open_writer(folder, spec, contents, lambda: Calibration(accumulator.result())) as writer:
        for shard in writer.pending():
            first = shard * plan.shard_tokens
            values = drawn[first : first + plan.tokens_of(shard)].float()
            writer.write_shard(shard, *encode(values, writer.split.encoding, writer.stats))
    return ActivationSplit(folder, "1e", "train")


@functools.lru_cache(maxsize=1)
def hidden_states(tokens: int) -> Any:
    """(tokens, layers, hidden) of one model, the same for every form, in half the memory."""
    return data.hidden_states(tokens, layers=data.LAYERS, hidden=data.HIDDEN).half()


if __name__ == "__main__":
    main()
