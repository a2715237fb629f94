"""Shared parts of all benchmarks: interleaved repetitions, ratios, cold files, and the report.

Machines are noisy, so sides are never measured one after another: every repetition runs each of
them once, in an order drawn anew, and a ratio compares two sides within one repetition. What is
reported is the median over repetitions; the JSON keeps every one of them.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does, before torch

import argparse
import ctypes
import gc
import json
import mmap
import platform
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertvision.featurestore.format.compiled import KERNELS
from bertvision.pipelines.text import format_table

Results = Mapping[str, Sequence[float]]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes; each may add its own.

    Args:
        doc: the script's docstring, whose first line becomes the description.
    """
    parser = argparse.ArgumentParser(description=(doc or "").strip().partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--quick", action="store_true", help="small sizes and 2 repetitions")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of every side")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bertvision-benchmarks",
        help="where synthetic data are kept between runs",
    )
    return parser


def interleave(
    sides: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1, seed: int = 0
) -> dict[str, list[float]]:
    """Measure every side once per repetition, in an order shuffled anew each time.

    Args:
        sides: by name, a function that runs the side and returns its figure.
        repeats: repetitions that count.
        warmup: repetitions before them, whose figures are dropped.
        seed: of the orders.

    Returns:
        By side, one figure per repetition: figures at the same position belong together.
    """
    rng = random.Random(seed)
    results: dict[str, list[float]] = {name: [] for name in sides}
    KERNELS.make()  # of every side's steady state
    gc.freeze()  # or each collection would look through all modules
    try:
        for repetition in range(-warmup, repeats):
            turn = "warm-up" if repetition < 0 else f"repetition {repetition + 1} of {repeats}"
            print(f"{turn}, {len(sides)} sides", file=sys.stderr)  # a run takes a while
            for name in rng.sample(sorted(sides), len(sides)):
                gc.collect()  # what one side left behind is not the next one's work
                figure = float(sides[name]())
                if repetition >= 0:
                    results[name].append(figure)
    finally:
        gc.unfreeze()
    return results


def ratios(results: Results, ours: str, higher_is_better: bool) -> dict[str, float]:
    """How many times better ours is than each peer: the median over repetitions.

    Args:
        results: from `interleave`.
        ours: the side to compare with all others.
        higher_is_better: whether figures are rates (or, if not, times or bytes).
    """

    def better(mine: float, theirs: float) -> float:
        return mine / theirs if higher_is_better else theirs / mine

    return {
        name: statistics.median(map(better, results[ours], figures))
        for name, figures in results.items()
        if name != ours
    }


def report(
    path: Path | None,
    *,
    benchmark: str,
    settings: Mapping[str, Any],
    unit: str,
    results: Results,
    ratios: Mapping[str, float],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Print a table and write everything as JSON.

    Args:
        path: of the JSON, or None to print only.
        benchmark: its name.
        settings: sizes and choices that the figures depend on, in JSON types.
        unit: of the figures.
        results: from `interleave`, every repetition.
        ratios: from `ratios`.
        notes: what a reader has to know to judge the figures.

    Returns:
        What was written.
    """
    medians = {name: statistics.median(figures) for name, figures in results.items()}
    written = {
        "benchmark": benchmark,
        "command": _command(),
        "machine": machine(),
        "settings": dict(settings),
        "unit": unit,
        "results": {name: list(figures) for name, figures in results.items()},
        "medians": medians,
        "ratios": dict(ratios),
        "notes": list(notes),
    }
    rows = [
        [name, f"{medians[name]:.4g}", f"{min(figures):.4g}", f"{max(figures):.4g}"]
        + [f"{ratios[name]:.2f}" if name in ratios else "-"]
        for name, figures in results.items()
    ]
    print(format_table([f"{benchmark}: {unit}", "median", "least", "most", "ours ×"], rows))
    for note in notes:
        print(f"note: {note}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1) + "\n")
    return written


def machine() -> dict[str, Any]:
    """The machine of the figures: hardware and versions, no names of hosts or paths."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    } | versions(["bertvision", "torch", "numpy", "zarr"])


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def drop_cache(paths: Iterable[Path]) -> bool:
    """Make files cold: write them out, then let the kernel forget their pages.

    Warns where pages stay (a file that is mapped somewhere, or a file system that ignores the
    advice), because figures would then be called cold and be warm.

    Args:
        paths: files, or folders with everything below them.

    Returns:
        Whether they are cold.
    """
    files = list(_files(paths))
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    if (share := cached_share(files)) > 0.1:
        names = ", ".join(sorted({file.parent.name for file in files})[:3])
        warnings.warn(f"{share:.0%} of the files in {names} stayed cached", stacklevel=2)
    return share <= 0.1


def cached_share(paths: Iterable[Path]) -> float:
    """The share of the pages of files (or of all files in folders) that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = resident = 0
    for file in _files(paths):
        size = file.stat().st_size
        if not size:
            continue
        handle = os.open(file, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        finally:
            os.close(handle)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap", str(file))
        count = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        failed = libc.mincore(address, size, found)
        libc.munmap(address, size)
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        pages += count
        resident += int((np.frombuffer(found, np.uint8) & 1).sum())
    return resident / pages if pages else 0.0


def warm_cache(paths: Iterable[Path]) -> None:
    """Read files once, so that their pages are cached, as far as memory allows."""
    buffer = bytearray(16 << 20)
    for file in _files(paths):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of files, or of all files in folders."""
    return sum(file.stat().st_size for file in _files(paths))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _command() -> str:
    """The command line, with absolute paths cut down to their last part."""
    words = [word if not os.path.isabs(word) else Path(word).name for word in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve()
    place = script.parent if script.name == "__main__.py" else script
    return " ".join(["python", str(place.relative_to(Path(__file__).parents[2])), *words])
