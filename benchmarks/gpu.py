"""Whether stored activations beat running the encoder again, on a machine with a GPU.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --device cpu --quick          # does it run? no figures worth keeping

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

import argparse
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from bert import encoder_of, split_of, windows_of
from data import lengths
from epoch import BATCH, EIGHT, ONE, Heads
from harness import arguments, drop_cache, interleave, report, warm_cache
from pinned import PinnedBuffers

from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.encoding import ChannelStats, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.encoders.calibration import calibrate
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.shardwork import ShardWork
from bertvision.pipelines.precision import Precision, resolve_precision
from bertvision.pipelines.tasks.windows import Windows

ENCODING = "int8"


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
    bench = Bench(options, size)
    sides = {
        "forward": bench.forward,
        "encode": bench.encode,
        "write": bench.write,
        "extraction": bench.extraction,
        "copy, GB/s": bench.plain_copy,
        "stream, codes on the device": bench.streamed,
        "stream, decoded": bench.stream_decoded,
    }
    for count, names in (("one head", ONE), ("eight heads", EIGHT)):
        train = Heads(names, bench.split, bench.precision)
        sides |= {
            f"epoch, disk, {count}": lambda t=train: bench.epoch(t, bench.from_disk),
            f"epoch, page cache, {count}": lambda t=train: bench.epoch(t, bench.from_cache),
            f"epoch, device memory, {count}": lambda t=train: bench.epoch(t, bench.resident),
            f"epoch, encoder again, {count}": lambda t=train: bench.epoch(t, bench.recomputed),
            f"step alone, {count}": lambda t=train: bench.steps(t),
        }
    results = interleave(sides, options.repeats, warmup=0 if options.quick else 1)
    medians = {name: median(values) for name, values in results.items()}
    found, notes = _conclusions(medians, bench.bytes_per_example)
    report(
        options.json,
        benchmark="gpu",
        settings={
            "device": options.device,
            "size": size,
            "examples": len(bench.split),
            "bytes_per_example": bench.bytes_per_example,
            "shard_tokens": options.shard_tokens,
            "precision": bench.precision,
            "eight heads": EIGHT,
        },
        unit="examples/s where nothing else is said",
        results=results,
        ratios=found,
        notes=notes,
    )


def _conclusions(
    rate: dict[str, float], bytes_per_example: float
) -> tuple[dict[str, float], list[str]]:
    """Shares, and from when on storing pays, all from measured rates (examples/s)."""
    found = {
        "extraction / forward": rate["extraction"] / rate["forward"],
        "bus, stream / plain copy": rate["stream, codes on the device"]
        * bytes_per_example
        / 1e9
        / rate["copy, GB/s"],
    }
    slowest = min(("forward", "encode", "write"), key=lambda name: rate[name])
    bus = rate["stream, codes on the device"] * bytes_per_example / 1e9
    notes = [
        f"extraction is limited by: {slowest} ({rate[slowest]:.0f} examples/s alone)",
        f"the stream brings {bus:.2f} GB/s of codes to the device",
    ]
    for count in ("one head", "eight heads"):
        again = rate[f"epoch, encoder again, {count}"]
        for where in ("disk", "page cache", "device memory"):
            stored = rate[f"epoch, {where}, {count}"]
            found[f"{where} / encoder again, {count}"] = stored / again
            if stored <= again:
                notes.append(f"{count}, {where}: running the encoder again is faster")
            else:
                epochs = 1 / rate["extraction"] / (1 / again - 1 / stored)
                notes.append(f"{count}, {where}: extraction pays after {epochs:.1f} epochs")
        # reading is hidden behind the steps, so the disk decides only where it is slower than they
        notes.append(
            f"{count}: from a disk below {bytes_per_example * again / 1e9:.2f} GB/s running the "
            "encoder again is faster"
        )
    disk, step = 1 / rate["epoch, disk, one head"], 1 / rate["step alone, one head"]
    if disk > 1 / rate["epoch, encoder again, one head"]:
        heads = (disk - 1 / rate["forward"]) / step
        notes.append(f"disk: storing pays from {heads:.1f} such heads in one pass")
    eight = 8 * rate["epoch, page cache, eight heads"] / rate["epoch, encoder again, one head"]
    found["eight heads in one pass from the page cache / eight runs of the encoder"] = eight
    return found, notes


class Bench:
    """A split that this machine extracted, the encoder it came from, and all ways to its codes."""

    def __init__(self, options: argparse.Namespace, size: str) -> None:
        self.device = torch.device(options.device)
        self.precision: Precision = resolve_precision("auto")
        self._folder: Path = options.folder / f"gpu-{size}-{options.examples}"
        self._cuda = self.device.type == "cuda"
        self._windows: Windows = windows_of(lengths(options.examples))
        model = encoder_of(size)
        self._spec, self._contents = split_of(
            self._windows, model, ENCODING, shard_tokens=options.shard_tokens
        )
        states = range(model.config.num_hidden_layers + 1)
        self._encoder = Encoder(model, {"all": states}, self.precision)
        (self._calibration,) = calibrate(self._encoder, self._windows, ENCODING)
        self._extract(self._folder)
        self.split = ActivationSplit(self._folder, self._spec.tag, self._spec.split)
        self._loader = ActivationLoader(self.split, batch_size=BATCH)
        self._resident: list[ActivationBatch] | None = None
        self._buffers = PinnedBuffers(self.device)
        record = self.split.record
        per_token = len(record.layers) * (record.hidden_size + 4)
        self.bytes_per_example = per_token * record.tokens / record.examples

    # -- the encoder, and extraction by its parts; all in examples/s

    def forward(self) -> float:
        """The forward pass of extraction's batches, nothing kept."""

        def run() -> None:
            for rows in self._batches():
                self._encoder.forward(self._windows, rows)

        return len(self.split) / self._timed(run)

    def encode(self) -> float:
        """Encoding alone, of one batch over and over."""
        rows = next(self._batches())
        (states,) = self._encoder(self._windows, rows)
        stats = ChannelStats(*(x.to(self.device) for x in self._calibration.stats))
        encoding, times = get_encoding(ENCODING), 4

        def run() -> None:
            for _ in range(times):
                encode(states, encoding, stats)

        return times * len(rows) / self._timed(run)

    def write(self) -> float:
        """Writing alone, of one shard over and over, by one thread."""
        plan = self._contents.plan
        folder = self._folder.with_name("gpu-write")
        shutil.rmtree(folder, ignore_errors=True)
        count = len(plan.examples_of(0))
        held = self.split.read(range(count))
        with open_writer(folder, self._spec, self._contents, lambda: self._calibration) as writer:
            started = time.perf_counter()
            writer.write_shard(0, held.codes, held.scale)
            seconds = time.perf_counter() - started
        shutil.rmtree(folder)
        return count / seconds

    def extraction(self) -> float:
        """All of it, until the last shard is on the disk."""
        folder = self._folder.with_name("gpu-extraction")
        shutil.rmtree(folder, ignore_errors=True)
        seconds = self._extract(folder)
        shutil.rmtree(folder)
        return len(self._windows) / seconds

    def _extract(self, folder: Path) -> float:
        with open_writer(folder, self._spec, self._contents, lambda: self._calibration) as writer:
            work = ShardWork({"all": writer}, self._windows, self._encoder, "error")
            pending = {shard: ("all",) for shard in writer.pending()}
            return self._timed(lambda: deque(work.write(pending), maxlen=0))

    def _batches(self) -> Iterator[np.ndarray]:
        plan = self._contents.plan
        for shard in range(plan.n_shards):
            members = np.array(plan.examples_of(shard))
            for batch in self._encoder.batches(plan.n_tokens[members]):
                yield plan.example_id[members[batch]]

    # -- the bus

    def plain_copy(self) -> float:
        """GB/s of one page-locked copy to the device, of a batch's size."""
        nbytes, times = int(self.bytes_per_example * BATCH), 16
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        def run() -> None:
            for _ in range(times):
                there.copy_(host, non_blocking=True)

        return nbytes * times / self._timed(run) / 1e9

    def streamed(self) -> float:
        """Codes from the page cache to the device."""
        warm_cache([self._folder])
        return len(self.split) / self._timed(lambda: deque(self.from_cache(), maxlen=0))

    def stream_decoded(self) -> float:
        """The same, decoded there."""
        warm_cache([self._folder])

        def run() -> None:
            for batch in self.from_cache():
                batch.decode(torch.bfloat16)

        return len(self.split) / self._timed(run)

    # -- where an epoch's batches come from

    def from_cache(self) -> Iterator[ActivationBatch]:
        """Batches of an epoch on the device, each copied while the one before is worked on."""
        return self._buffers.moved(self._loader)

    def from_disk(self) -> Iterator[ActivationBatch]:
        """The same with nothing in the page cache."""
        return self.from_cache()

    def resident(self) -> Iterator[ActivationBatch]:
        """Batches whose codes stay in device memory."""
        if self._resident is None:
            self._resident = [batch.to(self.device) for batch in self._loader]
        return iter(self._resident)

    def recomputed(self) -> Iterator[tuple[torch.Tensor, ActivationBatch]]:
        """Batches of 16 windows, of which only labels are stored; with their hidden states."""
        order, plan = self._loader.order(0), self.split.plan
        for i in range(len(order)):
            examples = order.batch(i)
            rows = plan.example_id[examples]
            parts = [
                self._encoder(self._windows, rows[part])[0].to(torch.bfloat16, copy=True)
                for part in self._encoder.batches(self._windows.n_tokens[rows])
            ]
            labels = {k: torch.from_numpy(v[examples]) for k, v in self.split.labels.items()}
            n_tokens = torch.from_numpy(plan.n_tokens[examples].astype(np.int64))
            empty = torch.empty(0)
            only = ActivationBatch(empty, None, None, n_tokens, torch.from_numpy(examples), labels)
            yield torch.cat(parts), only.to(self.device)

    def epoch(self, training: Heads, source: Callable[[], Iterator]) -> float:
        """Examples/s of an epoch of training."""
        if source == self.from_disk:
            drop_cache([self._folder / "arrays.zarr"])
        elif source == self.from_cache:
            warm_cache([self._folder])
        elif source == self.resident:
            source()  # what comes to the device once is not part of an epoch

        def run() -> None:
            for batch in source():
                if isinstance(batch, ActivationBatch):
                    batch = batch.decode(torch.bfloat16), batch
                training.step(batch[0], batch[1].lengths, batch[1].labels)

        return len(self.split) / self._timed(run)

    def steps(self, training: Heads) -> float:
        """Examples/s of training steps alone, on one batch over and over."""
        batch = next(self.resident())
        hidden_states, times = batch.decode(torch.bfloat16), 4

        def run() -> None:
            for _ in range(times):
                training.step(hidden_states, batch.lengths, batch.labels)

        return times * len(batch) / self._timed(run)

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds until the device is done with everything: by its own clock, where it has one."""
        if not self._cuda:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000


if __name__ == "__main__":
    main()
