"""Shuffled batches of one vector per layer and example, as probes and heads on [CLS] read them.

    python benchmarks/pooled.py --json docs/performance/pooled.json

A batch is 64 examples of 13 × 768, in bfloat16, drawn in a new order in each epoch: *warm*, from
files that were read before, and *cold*, the first epoch of a new reader from files that the page
cache has dropped. Sides, all in examples a second:

- *bertvision, int8* and *bertvision, bfloat16*: `ActivationLoader` and `decode`;
- *safetensors* and *numpy, memory-mapped*: one float16 file, rows of which are taken;
- *safetensors, a file each*: a float16 file for each example.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common.harness import arguments, drop_cache, interleave, ratios, report, size_of
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from bertvision import ActivationLoader, ActivationStore
from bertvision.pipelines.extraction.contents import POOLED_SHARD_WINDOWS

OURS = "bertvision, int8"
BATCH, LAYERS, HIDDEN = 64, 13, 768
Epoch = Callable[[int], Iterator[Tensor]]


def main() -> None:
    """Write the files, check that all sides read the same, measure, report."""
    parser = arguments(__doc__)
    parser.add_argument("--examples", type=int, default=8192)
    options = parser.parse_args()
    seconds = 0.5
    if options.quick:
        options.examples, options.repeats, seconds = 256, 2, 0.05
    values = torch.randn(
        (options.examples, LAYERS, HIDDEN), generator=torch.Generator().manual_seed(0)
    )
    folder = options.folder / f"pooled-{options.examples}"
    written = write(folder, values)
    makers: dict[str, Callable[[], Epoch]] = {
        OURS: partial(loader, folder, "int8"),
        "bertvision, bfloat16": partial(loader, folder, "bfloat16"),
        "safetensors": partial(in_one_file, folder / "all.safetensors"),
        "numpy, memory-mapped": partial(mapped, folder / "all.npy"),
        "safetensors, a file each": partial(in_files, folder / "each", options.examples),
    }
    for name, make in makers.items():
        total = sum(float(batch.double().abs().sum()) for batch in make()(0))
        if abs(total / float(values.double().abs().sum()) - 1) > 0.01:
            raise RuntimeError(f"{name} reads other values than were written")
    conditions = {
        "warm": {n: warm(make(), options.examples, seconds) for n, make in makers.items()},
        "cold": {n: cold(make, written[n], options.examples) for n, make in makers.items()},
    }
    results: dict[str, list[float]] = {}
    compared: dict[str, float] = {}
    for condition, sides in conditions.items():
        measured = interleave(sides, options.repeats)
        found = ratios(measured, OURS, higher_is_better=True)
        results |= {f"{name} | {condition}": figures for name, figures in measured.items()}
        compared |= {f"{name} | {condition}": ratio for name, ratio in found.items()}
    report(
        options.json,
        benchmark="pooled",
        settings={
            "examples": options.examples,
            "layers": LAYERS,
            "hidden": HIDDEN,
            "batch_size": BATCH,
            "repeats": options.repeats,
            "bytes_per_example": {n: size_of([p]) / options.examples for n, p in written.items()},
        },
        unit="examples/s",
        results=results,
        ratios=compared,
    )


def write(folder: Path, values: Tensor) -> dict[str, Path]:
    """The files of all sides, where they are not there; by side."""
    store = ActivationStore.create(folder / "store")
    half = values.numpy().astype(np.float16)
    for encoding in ("int8", "bfloat16"):
        if "0e" in store and encoding in store["0e"]:
            continue
        with store.writer(
            *("0e", encoding),
            layers=range(LAYERS),
            hidden_size=HIDDEN,
            encoding=encoding,
            shard_tokens=POOLED_SHARD_WINDOWS,
        ) as writer:
            for i, value in enumerate(values):
                writer.add(str(i), value[None])
            writer.finish()
    (folder / "each").mkdir(exist_ok=True)
    if not (folder / "all.npy").is_file():
        for i, value in enumerate(half):
            save_file({"states": value}, folder / "each" / f"{i}.safetensors")
        save_file({"states": half}, folder / "all.safetensors")
        np.save(folder / "all.npy", half)
    arrays = folder / "store" / "arrays.zarr" / "0e"
    return {
        OURS: arrays / "int8",
        "bertvision, bfloat16": arrays / "bfloat16",
        "safetensors": folder / "all.safetensors",
        "numpy, memory-mapped": folder / "all.npy",
        "safetensors, a file each": folder / "each",
    }


def loader(folder: Path, encoding: str) -> Epoch:
    """Batches of a split of the store."""
    split = ActivationStore.open(folder / "store")["0e"][encoding]
    made = ActivationLoader(split, batch_size=BATCH)

    def epoch(seed: int) -> Iterator[Tensor]:
        for batch in made:
            yield batch.decode(torch.bfloat16)

    return epoch


def in_one_file(path: Path) -> Epoch:
    """Rows of one file of safetensors, as its own reader takes them."""

    def epoch(seed: int) -> Iterator[Tensor]:
        with safe_open(path, "pt") as file:
            states = file.get_tensor("states")  # pages of the file, which are read when touched
        for rows in order(len(states), seed):
            yield states[torch.from_numpy(rows)].to(torch.bfloat16)

    return epoch


def mapped(path: Path) -> Epoch:
    """Rows of a memory-mapped file of NumPy."""

    def epoch(seed: int) -> Iterator[Tensor]:
        states = np.load(path, mmap_mode="r")
        for rows in order(len(states), seed):
            yield torch.from_numpy(states[rows]).to(torch.bfloat16)

    return epoch


def in_files(folder: Path, examples: int) -> Epoch:
    """A file for each example, as people save them."""

    def read(i: int) -> Tensor:
        with safe_open(folder / f"{i}.safetensors", "pt") as file:
            states: Tensor = file.get_tensor("states")
        return states

    def epoch(seed: int) -> Iterator[Tensor]:
        for rows in order(examples, seed):
            yield torch.stack([read(i) for i in rows.tolist()]).to(torch.bfloat16)

    return epoch


def order(examples: int, seed: int) -> list[np.ndarray]:
    """The rows of the batches of an epoch."""
    drawn = np.random.default_rng(seed).permutation(examples)
    return [drawn[i : i + BATCH] for i in range(0, examples, BATCH)]


def warm(epoch: Epoch, examples: int, seconds: float) -> Callable[[], float]:
    """A function that measures whole epochs in examples/s, so many seconds at least."""
    seeds = itertools.count(1)

    def measure() -> float:
        for _ in epoch(next(seeds)):  # buffers are touched
            pass
        passes, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in epoch(next(seeds)):
                pass
            passes += 1
        return passes * examples / (time.perf_counter() - started)

    return measure


def cold(make: Callable[[], Epoch], files: Path, examples: int) -> Callable[[], float]:
    """A function that measures the first epoch of a new reader, whose files the disk gives."""
    seeds = itertools.count(1)

    def measure() -> float:
        drop_cache([files])
        started = time.perf_counter()
        for _ in make()(next(seeds)):
            pass
        return examples / (time.perf_counter() - started)

    return measure


if __name__ == "__main__":
    main()
