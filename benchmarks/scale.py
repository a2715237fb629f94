"""How reading scales: throughput, memory and opening time as a store grows, and parts of layers.

    python benchmarks/scale.py --json scale.json

- *stream*: batches of 16 from stores of 1, 4 and 16 times the size, in a process of its own each;
  its peak resident memory counts from after the imports, so with the split and all it needs.
- *open*: opening a split, and making its loader, at 10⁵ and 10⁶ examples: all metadata as they are,
  a ledger record for every shard, but no shard data.
- *layers*: the stream of 1, 5 and all layers.
- *one layer*: the codes of one layer of all examples, from chunks of one layer (ours) and from
  chunks of (128 tokens, all layers) that zarr writes and reads (peer); ours also through Dask.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from common.data import HIDDEN, LAYERS, lengths, write_split
from common.harness import arguments, interleave, ratios, report, warm_cache
from common.metadata import write_metadata
from peers.chunks import all_layers

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

BATCH = 16
TAG, SPLIT = "1e", "train"


def main() -> None:
    """Measure, print tables, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--examples", type=int, default=96, help="of the smallest store")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_streamed(options.child)))
        return
    sizes, counts, layers, hidden = (1, 4, 16), (10**5, 10**6), LAYERS, HIDDEN
    if options.quick:
        options.examples, options.repeats = 48, 2
        sizes, counts, layers, hidden = (1, 4), (10**4, 10**5), 7, 384
    splits = {
        size: write_split(
            _folder(options.folder, size * options.examples, hidden),
            lengths(size * options.examples),
            layers=layers,
            hidden=hidden,
        )
        for size in sizes
    }
    results, figures = {}, {}
    found, figures["stream"] = _stream(options, sizes, hidden)
    results |= found
    found, figures["open"] = _open(options, counts)
    results |= found
    largest = _folder(options.folder, sizes[-1] * options.examples, hidden)
    middle = splits[sizes[-2]]
    found, figures["layers"] = _layers(options, middle)
    results |= found
    found, figures["one layer"] = _one_layer(options, middle)
    results |= found
    flat = {f"{part}: {name}": v for part, values in figures.items() for name, v in values.items()}
    report(
        options.json,
        benchmark="scale",
        settings={
            "examples": options.examples,
            "sizes": list(sizes),
            "largest_bytes": sum(f.stat().st_size for f in largest.rglob("*") if f.is_file()),
            "layers": layers,
            "hidden": hidden,
            "threads": torch.get_num_threads(),
        },
        unit="in the names",
        results=results,
        ratios=flat,
        notes=[f"{name}: {value:.4g}" for name, value in flat.items()],
    )


def _stream(
    options: argparse.Namespace, sizes: Sequence[int], hidden: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Rate and memory of a fresh process per store."""
    memory: dict[str, list[float]] = {f"{size}x peak, MiB": [] for size in sizes}

    def side(size: int) -> Callable[[], float]:
        folder = _folder(options.folder, size * options.examples, hidden)
        warm_cache([folder])

        def run() -> float:
            command = [sys.executable, __file__, "--child", str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures = json.loads(done.stdout)
            memory[f"{size}x peak, MiB"].append(figures["peak_mib"])
            return float(figures["examples_per_second"])

        return run

    repeats = max(2, options.repeats // 2)
    rates = interleave(
        {f"{size}x stream, examples/s": side(size) for size in sizes}, repeats, warmup=0
    )
    first, last = (median(memory[f"{size}x peak, MiB"]) for size in (sizes[0], sizes[-1]))
    speed = [median(rates[f"{size}x stream, examples/s"]) for size in (sizes[0], sizes[-1])]
    return rates | memory, {
        f"rate at {sizes[-1]}x / 1x": speed[1] / speed[0],
        f"peak memory at {sizes[-1]}x / 1x": last / first,
        "peak memory, GiB": max(median(values) for values in memory.values()) / 1024,
    }


def _streamed(folder: Path) -> dict[str, float]:
    """In a process of its own: two epochs, the rate of the second, and the memory of both."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, without the imports
    idle = _resident("VmRSS")
    split = ActivationStore.open(folder)[TAG][SPLIT]
    loader = ActivationLoader(split, batch_size=BATCH)
    for _ in loader:
        pass
    started = time.perf_counter()
    examples = sum(len(batch) for batch in loader)
    seconds = time.perf_counter() - started
    return {"examples_per_second": examples / seconds, "peak_mib": _resident("VmHWM") - idle}


def _resident(field: str) -> float:
    """Resident memory of this process in MiB: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _open(
    options: argparse.Namespace, counts: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds to open a split of so many examples, and to make its loader."""
    sides: dict[str, Callable[[], float]] = {}
    for count in counts:
        folder = options.folder / f"scale-open-{count}"
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_metadata(folder, count, tag=TAG, split=SPLIT)
            (folder / "whole").touch()

        def opened(folder: Path = folder) -> float:
            started = time.perf_counter()
            split = ActivationStore.open(folder)[TAG][SPLIT]
            _ = split.plan, split.labels, split.require_complete()
            return time.perf_counter() - started

        def looped(folder: Path = folder) -> float:
            started = time.perf_counter()
            ActivationLoader(ActivationStore.open(folder)[TAG][SPLIT], batch_size=BATCH)
            return time.perf_counter() - started

        sides[f"{count:.0e} examples, open, s"] = opened
        sides[f"{count:.0e} examples, open and loader, s"] = looped
    times = interleave(sides, options.repeats)
    return times, {name: median(values) for name, values in times.items()}


def _layers(
    options: argparse.Namespace, split: ActivationSplit
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Rates of the stream of some layers."""
    stored = split.record.layers
    wanted = {"all": None, "5": stored[:: max(1, len(stored) // 5)][:5], "1": stored[-1:]}

    def side(layers: Sequence[int] | None) -> Callable[[], float]:
        loader = ActivationLoader(split, batch_size=BATCH, layers=layers)

        def run() -> float:
            started = time.perf_counter()
            examples = sum(len(batch) for batch in loader)
            return examples / (time.perf_counter() - started)

        return run

    rates = interleave(
        {f"{name} layers, examples/s": side(layers) for name, layers in wanted.items()},
        options.repeats,
    )
    faster = {
        f"{name} layers / all": 1
        / ratios(rates, "all layers, examples/s", True)[f"{name} layers, examples/s"]
        for name in ("5", "1")
    }
    return rates, faster


def _one_layer(
    options: argparse.Namespace, split: ActivationSplit
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds to read one layer of all examples, ours and the peer's."""
    layer = split.record.layers[len(split.record.layers) // 2]
    path = options.folder / f"scale-peer-{len(split)}-{split.record.hidden_size}.zarr"
    peer = all_layers(path, split)
    warm_cache([path])
    loader = ActivationLoader(split, batch_size=4 * BATCH, layers=[layer], shuffle=False)
    position = split.layer_positions([layer])[0]

    def ours() -> float:
        started = time.perf_counter()
        tokens = sum(len(batch.codes) for batch in loader)
        seconds = time.perf_counter() - started
        assert tokens == split.plan.total_tokens
        return seconds

    def theirs() -> float:
        started = time.perf_counter()
        step = split.record.shard_tokens
        tokens = sum(len(peer[a : a + step, position]) for a in range(0, peer.shape[0], step))
        seconds = time.perf_counter() - started
        assert tokens == split.plan.total_tokens
        return seconds

    def decoded() -> float:
        started = time.perf_counter()
        split.dask(layers=[layer]).mean(axis=0).compute()
        return time.perf_counter() - started

    mine, other = "one layer, chunk a layer, s", "one layer, chunk of all layers (zarr), s"
    dask = "one layer, decoded and averaged with Dask, s"
    times = interleave({mine: ours, other: theirs, dask: decoded}, options.repeats)
    faster = ratios(times, mine, higher_is_better=False)
    return times, {"chunk of all layers / chunk a layer": faster[other]}


def _folder(folder: Path, examples: int, hidden: int) -> Path:
    return folder / f"scale-{examples}-{hidden}"


if __name__ == "__main__":
    main()
