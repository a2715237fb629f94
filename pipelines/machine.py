"""An examination of the machine: libraries, threads, arithmetic, memory pages, disk.

torch is imported late: a machine on which it is broken is examined too.
"""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from bertvision.pipelines.text import size

if TYPE_CHECKING:
    import torch

Verdict = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    """``warning`` where something could be better, ``error`` where bertvision cannot be used."""
    found: str
    """Observation, with numbers."""
    advice: str = ""
    """Advice in one sentence; empty where nothing is to change."""


_MAIN = ("torch", "transformers", "pytorch-lightning", "zarr", "datasets", "dask", "numpy")
"""Libraries whose versions are always told."""


def examine_libraries(version_of: Callable[[str], str] = metadata.version) -> list[Finding]:
    """Versions of Python and of all that bertvision requires.

    Args:
        version_of: the installed version of a distribution; PackageNotFoundError where there is
            none.

    Returns:
        One finding on Python, one on the libraries.
    """
    python = f"{platform.python_version()} ({platform.machine()}, {platform.system()})"
    try:
        declared = metadata.metadata("bertvision")
    except metadata.PackageNotFoundError:
        advice = "Install it with pip, or what it requires is not known here."
        return [
            Finding("python", "ok", python),
            Finding("libraries", "warning", "bertvision is not installed, but run", advice),
        ]
    due = SpecifierSet(declared["Requires-Python"] or "")
    fits = platform.python_version() in due
    return [
        Finding("python", "ok", python)
        if fits
        else Finding("python", "error", python, f"Install Python {due}."),
        _libraries(metadata.requires("bertvision") or [], version_of),
    ]


def _libraries(required: list[str], version_of: Callable[[str], str]) -> Finding:
    versions: dict[str, str] = {}
    missing: list[str] = []
    outside: list[str] = []
    for requirement in _needed(required):
        try:
            version = versions[requirement.name] = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            outside.append(f"{requirement.name} {version} (needed: {requirement.specifier})")
    versions_text = ", ".join(f"{name} {versions[name]}" for name in _MAIN if name in versions)
    if missing:
        install = f"Install what is missing: pip install {' '.join(map(repr, missing))}."
        return Finding(
            "libraries", "error", f"{versions_text}; without {', '.join(missing)}", install
        )
    if outside:
        advice = f"Install versions that are in the declared ranges: {', '.join(outside)}."
        return Finding("libraries", "warning", versions_text, advice)
    return Finding("libraries", "ok", f"{versions_text}; all {len(versions)} are in their ranges")


def _needed(required: list[str]) -> Iterator[Requirement]:
    """Requirements without any extra."""
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def examine_text() -> Finding:
    """Whether names of files and what is printed are UTF-8."""
    encodings = {
        "files": sys.getfilesystemencoding(),
        "texts": locale.getpreferredencoding(False),
        "output": getattr(sys.stdout, "encoding", None) or "unknown",
    }
    encodings_text = ", ".join(f"{what} {encoding}" for what, encoding in encodings.items())
    if all(name.lower().replace("-", "") == "utf8" for name in encodings.values()):
        return Finding("locale", "ok", encodings_text)
    return Finding(
        "locale", "warning", encodings_text, "Set PYTHONUTF8=1, or a locale such as C.UTF-8."
    )


_WIDTH, _REPEATS = 1024, 3
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = Path("/proc/driver/nvidia/version")


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def examine_threads(environment: Mapping[str, str] = os.environ) -> Finding:
    """Cores, those that may be used, and the threads that compute.

    Args:
        environment: Environment with OMP_NUM_THREADS, where that is set.
    """
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    told = environment.get("OMP_NUM_THREADS")
    counts_text = (
        f"{os.cpu_count()} cores, {cores} of them usable, {threads} thread{'s' * (threads > 1)}, "
        f"OMP_NUM_THREADS {told or 'not set'}"
    )
    if threads > cores:
        return Finding(
            *("threads", "warning", counts_text),
            f"Set OMP_NUM_THREADS={cores}: more threads than cores wait for each other.",
        )
    if told is not None and threads * 2 <= cores:
        return Finding(
            *("threads", "warning", counts_text),
            f"Unset OMP_NUM_THREADS, or set it to {cores}: {cores - threads} of {cores} cores "
            "stand still.",
        )
    return Finding("threads", "ok", counts_text)


def examine_bfloat16() -> Finding:
    """Whether bfloat16 is native, and whether a product of matrices is faster in it."""
    import torch

    from bertvision.pipelines.precision import has_bf16

    native = has_bf16()
    times = {dtype: matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    faster = times[torch.float32] / times[torch.bfloat16]
    speed = {dtype: 2 * _WIDTH**3 / seconds / 1e9 for dtype, seconds in times.items()}
    bf16_text = (
        f"{'native' if native else 'not native'}; a product of {_WIDTH} × {_WIDTH} matrices: "
        f"float32 {speed[torch.float32]:,.0f}, bfloat16 {speed[torch.bfloat16]:,.0f} GFLOP/s "
        f"({faster:.1f} times as fast)"
    )
    if native and faster < 1:
        return Finding(
            *("bfloat16", "warning", bf16_text),
            "Try --precision 32: --precision auto takes bfloat16 here, which was slower just now.",
        )
    return Finding("bfloat16", "ok", bf16_text)


def matmul_seconds(dtype: torch.dtype) -> float:
    """Least wall seconds of some products of two (1024, 1024) matrices on this machine's device.

    Args:
        dtype: Type of the matrices.
    """
    import torch

    from bertvision.pipelines.precision import device

    where = device()
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=where)
    times = []
    for _ in range(1 + _REPEATS):  # the first one chooses a kernel, and is not counted
        started = time.perf_counter()
        torch.mm(matrix, matrix).sum().item()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def examine_gpu() -> Finding:
    """The GPUs that torch sees."""
    import torch

    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus_text = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
        return Finding("gpu", "ok", gpus_text)
    if _NVIDIA.is_file():
        return Finding(
            *("gpu", "warning", f"a driver, but torch {torch.__version__} uses no GPU"),
            "Install a build of torch for its version of CUDA.",
        )
    return Finding("gpu", "ok", "none; the processor computes")


def examine_pages(path: Path = _PAGES, environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether torch gets memory in huge pages.

    Args:
        path: the kernel's setting.
        environment: Environment with THP_MEM_ALLOC_ENABLE, by which torch asks for them.
    """
    try:
        setting = path.read_text()
    except OSError:
        return Finding("huge pages", "ok", "no setting of this system")
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    asked = environment.get("THP_MEM_ALLOC_ENABLE") == "1"
    pages_text = f"{chosen}; torch {'asks' if asked else 'does not ask'} for them"
    if chosen == "never":
        return Finding(
            *("huge pages", "warning", pages_text),
            f"As root, echo madvise > {path}: training on the processor is faster with them.",
        )
    if chosen == "madvise" and not asked:
        return Finding(
            *("huge pages", "warning", pages_text),
            "Set THP_MEM_ALLOC_ENABLE=1 before torch is imported, as the command line does.",
        )
    return Finding("huge pages", "ok", pages_text)


_PIECE, _PIECES = 1 << 20, 48
_SLOW = 100e6
"""Bytes a second below which heads wait for most of what they read (docs/performance.md)."""
_LITTLE = 5_000_000_000
"""Bytes that a few snapshots of a base encoder and a small store take."""


class DiskSpeed(NamedTuple):
    """Bytes a second."""

    write: float
    """To the disk: the file was flushed."""
    read: float
    """From the disk where the system lets its cache be left out, else from that."""


def existing(folder: Path) -> Path:
    """A folder, or the first of its parents that is there."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def disk_speed(folder: Path) -> DiskSpeed:
    """Write and read a file of 48 MiB, which is removed.

    Args:
        folder: Folder in which the file is made for the time.

    Raises:
        OSError: nothing can be written there.
    """
    piece = os.urandom(_PIECE)  # which no file system stores smaller
    # without a name where the system can: a doctor that is killed leaves nothing behind
    with tempfile.TemporaryFile(prefix=".bertvision-doctor-", dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        started = time.perf_counter()
        for _ in range(_PIECES):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        begun = time.perf_counter()
        while os.read(descriptor, _PIECE):
            pass
        total = _PIECE * _PIECES
        return DiskSpeed(total / (written - started), total / (time.perf_counter() - begun))


def examine_disk(folder: Path) -> list[Finding]:
    """Speed of the disk, and what is free.

    Args:
        folder: Folder of the activations, there or to be made.
    """
    place = existing(folder)
    free = shutil.disk_usage(place).free
    space = f"{size(free)} in {place}"
    room = (
        Finding("free space", "ok", space)
        if free >= _LITTLE
        else Finding(
            *("free space", "warning", space),
            "Free some, or name another --store: --dry-run says what a job will write.",
        )
    )
    try:
        speed = disk_speed(place)
    except OSError as error:
        advice = "Use a --workspace in a folder that you may write to, on a disk that is not full."
        return [Finding("disk", "error", f"{place}: {error.strerror}", advice), room]
    rates_text = f"{place}: writes {size(int(speed.write))}/s, reads {size(int(speed.read))}/s"
    if min(speed) >= _SLOW:
        return [Finding("disk", "ok", rates_text), room]
    advice = (
        "Keep activations on a faster disk (--store), or make them smaller (--encoding int4, "
        "--compression zstd)."
    )
    return [Finding("disk", "warning", rates_text, advice), room]
