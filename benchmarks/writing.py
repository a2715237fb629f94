"""Writing hidden states out of memory: the store's writer beside the disk and what people use.

    python benchmarks/writing.py --json writing.json
    python benchmarks/writing.py --folder /mnt/fast --examples 1024 --json writing.json

Sides, all in MB/s of the same examples as float16 in memory, from the first byte until all is
flushed to the disk:

- *plain files*: the same bytes into files of a shard's size, each flushed when it is written;
- *the disk*: as many bytes, out of 1 GiB of huge pages and past the page cache (O_DIRECT), 8 MB at
  a time, each file flushed; on Linux, where the file system knows it. That memory stays taken while
  the other sides are measured;
- *the disk, 8 MB again and again*: the same out of 8 MB, which stay in the processor's cache: data
  of this size do not;
- *writer, float16* and *writer, int8*: `ActivationStore.writer`, finished, with all its checksums
  and flushes; int8 writes half of the bytes;
- *torch.save* and *safetensors*: a file for each example, all flushed at the end;
- *h5py*: one data set (tokens, layers, hidden) that grows by an example, in chunks of 256 tokens;
- *zarr*: an array of all tokens, written in blocks of a shard, each a chunk.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common.data import hidden_states, lengths
from common.harness import arguments, interleave, ratios, report
from safetensors.torch import save_file
from torch import Tensor

from bertvision import ActivationStore
from bertvision.featurestore.format.plan import SHARD_TOKENS

OURS = "writer, float16"
_POOL_TOKENS = 4096
_WRITTEN = 1 << 23
Examples = Sequence[Tensor]


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--examples", type=int, default=384)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    if options.quick:
        options.examples, options.layers, options.hidden, options.repeats = 64, 7, 384, 2
    sizes = lengths(options.examples)
    shape = {"layers": options.layers, "hidden": options.hidden}
    # the values decide nothing here but the encoding's scales: parts of some, again and again, but
    # of more than a processor's cache holds
    some = hidden_states(_POOL_TOKENS, **shape).half()
    room = _POOL_TOKENS - int(sizes.max())
    first = np.random.default_rng(0).integers(0, room, len(sizes)).tolist()
    examples = [some[i : i + n] for i, n in zip(first, sizes.tolist(), strict=True)]
    size = sum(states.nbytes for states in examples)
    folder = options.folder / "writing"

    def measured(write: Callable[[Path, Examples], None]) -> Callable[[], float]:
        def side() -> float:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            started = time.perf_counter()
            write(folder, examples)
            seconds = time.perf_counter() - started
            shutil.rmtree(folder)
            return size / 1e6 / seconds

        return side

    sides: dict[str, Callable[[Path, Examples], None]] = {
        OURS: lambda folder, examples: write_store(folder, examples, "float16"),
        "writer, int8": lambda folder, examples: write_store(folder, examples, "int8"),
        "plain files": write_plain,
        **direct_sides(1 << 26 if options.quick else 1 << 30),
        "torch.save, a file each": write_torch,
        "safetensors, a file each": write_safetensors,
        "zarr, blocks": write_zarr,
    }
    notes = []
    try:
        import h5py  # noqa: F401
    except ImportError:
        notes.append("h5py is not installed: left out")
    else:
        sides["h5py, growing"] = write_hdf5
    results = interleave({name: measured(side) for name, side in sides.items()}, options.repeats)
    report(
        options.json,
        benchmark="writing",
        settings={
            **shape,
            "examples": len(examples),
            "tokens": int(sizes.sum()),
            "MB": round(size / 1e6, 1),
            "shard_tokens": SHARD_TOKENS,
        },
        unit="MB/s",
        results=results,
        ratios=ratios(results, OURS, higher_is_better=True),
        notes=notes,
    )


def write_store(folder: Path, examples: Examples, encoding: str) -> None:
    """Write with the store's writer."""
    _, layers, hidden = examples[0].shape
    store = ActivationStore.create(folder)
    with store.writer(
        "0e", "train", hidden_size=hidden, layers=range(layers), encoding=encoding
    ) as writer:
        for key, states in enumerate(examples):
            writer.add(key, states)
        writer.finish()


def write_plain(folder: Path, examples: Examples) -> None:
    """Write the bytes alone, a file for as many examples as a shard has."""
    for number, block in enumerate(_blocks(examples)):
        with (folder / str(number)).open("wb", buffering=0) as file:
            for states in block:
                file.write(states.numpy().data)
            os.fsync(file.fileno())


def direct_sides(size: int) -> dict[str, Callable[[Path, Examples], None]]:
    """The sides that write past the page cache, where the system can, out of so much memory."""
    if not hasattr(os, "O_DIRECT"):
        return {}
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages, which the disk takes faster
        room.madvise(mmap.MADV_HUGEPAGE)
    some = np.random.default_rng(0).bytes(_WRITTEN)  # zeros might be written as holes
    for _ in range(size // _WRITTEN):
        room.write(some)
    memory = memoryview(room)
    return {
        "the disk": partial(write_direct, memory=memory),
        "the disk, 8 MB again and again": partial(write_direct, memory=memory[:_WRITTEN]),
    }


def write_direct(folder: Path, examples: Examples, memory: memoryview) -> None:
    """Write as many bytes past the page cache, a file for as many examples as a shard has."""
    parts = itertools.cycle(memory[i : i + _WRITTEN] for i in range(0, len(memory), _WRITTEN))
    for number, block in enumerate(_blocks(examples)):
        whole, rest = divmod(sum(states.nbytes for states in block), _WRITTEN)
        path, flags = folder / str(number), os.O_WRONLY | os.O_CREAT
        file = os.open(path, flags | os.O_DIRECT, 0o644)
        for _ in range(whole):
            os.write(file, next(parts))
        os.close(file)
        with path.open("ab", buffering=0) as end:
            end.write(next(parts)[:rest])
            os.fsync(end.fileno())


def write_torch(folder: Path, examples: Examples) -> None:
    """Write with torch.save, a file for each example."""
    for key, states in enumerate(examples):
        # a view would be saved with all the memory that it is of
        torch.save({"hidden_states": states.clone()}, folder / f"{key}.pt")
    _flush(folder)


def write_safetensors(folder: Path, examples: Examples) -> None:
    """Write with safetensors, a file for each example."""
    for key, states in enumerate(examples):
        save_file({"hidden_states": states}, folder / f"{key}.safetensors")
    _flush(folder)


def write_hdf5(folder: Path, examples: Examples) -> None:
    """Write into one HDF5 data set that grows."""
    import h5py

    row = tuple(examples[0].shape[1:])
    with h5py.File(folder / "states.h5", "w") as file:
        made = file.create_dataset(
            "hidden_states", (0, *row), "f2", maxshape=(None, *row), chunks=(256, *row)
        )
        for states in examples:
            first = len(made)
            made.resize(first + len(states), axis=0)
            made[first:] = states.numpy()
    _flush(folder)


def write_zarr(folder: Path, examples: Examples) -> None:
    """Write one Zarr array, a chunk for as many tokens as a shard has."""
    import zarr

    row = tuple(examples[0].shape[1:])
    tokens = sum(len(states) for states in examples)
    array = zarr.create_array(
        folder / "states.zarr",
        shape=(tokens, *row),
        dtype="float16",
        chunks=(SHARD_TOKENS, *row),
        compressors=None,
    )
    waiting, first = np.empty((0, *row), np.float16), 0
    for block in _blocks(examples):
        waiting = np.concatenate([waiting, *(states.numpy() for states in block)])
        whole = len(waiting) // SHARD_TOKENS * SHARD_TOKENS
        array[first : first + whole] = waiting[:whole]
        waiting, first = waiting[whole:], first + whole
    array[first:] = waiting
    _flush(folder)


def _blocks(examples: Examples) -> list[list[Tensor]]:
    """Examples in the order given, as many at a time as a shard holds."""
    blocks: list[list[Tensor]] = [[]]
    tokens = 0
    for states in examples:
        if tokens + len(states) > SHARD_TOKENS:
            blocks.append([])
            tokens = 0
        blocks[-1].append(states)
        tokens += len(states)
    return blocks


def _flush(folder: Path) -> None:
    """Flush every file to the disk, as the store does of its own."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


if __name__ == "__main__":
    main()
