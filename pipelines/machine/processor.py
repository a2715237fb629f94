"""Threads, arithmetic and memory pages: what decides how fast encoders and heads compute."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bertvision.pipelines.machine.finding import Finding
from bertvision.pipelines.precision import device, has_bf16

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
        environment: with OMP_NUM_THREADS, where that is set.
    """
    cores, threads = usable_cores(), torch.get_num_threads()
    told = environment.get("OMP_NUM_THREADS")
    found = (
        f"{os.cpu_count()} cores, {cores} of them usable, {threads} thread{'s' * (threads > 1)}, "
        f"OMP_NUM_THREADS {told or 'not set'}"
    )
    if threads > cores:
        return Finding(
            *("threads", "warning", found),
            f"Set OMP_NUM_THREADS={cores}: more threads than cores wait for each other.",
        )
    if told is not None and threads * 2 <= cores:
        return Finding(
            *("threads", "warning", found),
            f"Unset OMP_NUM_THREADS, or set it to {cores}: {cores - threads} of {cores} cores "
            "stand still.",
        )
    return Finding("threads", "ok", found)


def examine_bfloat16() -> Finding:
    """Whether bfloat16 is native, and whether a product of matrices is faster in it."""
    native = has_bf16()
    times = {dtype: matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    faster = times[torch.float32] / times[torch.bfloat16]
    speed = {dtype: 2 * _WIDTH**3 / seconds / 1e9 for dtype, seconds in times.items()}
    found = (
        f"{'native' if native else 'not native'}; a product of {_WIDTH} × {_WIDTH} matrices: "
        f"float32 {speed[torch.float32]:,.0f}, bfloat16 {speed[torch.bfloat16]:,.0f} GFLOP/s "
        f"({faster:.1f} times as fast)"
    )
    if native and faster < 1:
        return Finding(
            *("bfloat16", "warning", found),
            "Try --precision 32: --precision auto takes bfloat16 here, which was slower just now.",
        )
    return Finding("bfloat16", "ok", found)


def matmul_seconds(dtype: torch.dtype) -> float:
    """Least wall seconds of some products of two (1024, 1024) matrices on this machine's device.

    Args:
        dtype: of the matrices.
    """
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
    if torch.cuda.is_available():
        held = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in held)
        return Finding("gpu", "ok", found)
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
        environment: with THP_MEM_ALLOC_ENABLE, by which torch asks for them.
    """
    try:
        setting = path.read_text()
    except OSError:
        return Finding("huge pages", "ok", "no setting of this system")
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    asked = environment.get("THP_MEM_ALLOC_ENABLE") == "1"
    found = f"{chosen}; torch {'asks' if asked else 'does not ask'} for them"
    if chosen == "never":
        return Finding(
            *("huge pages", "warning", found),
            f"As root, echo madvise > {path}: training on the processor is faster with them.",
        )
    if chosen == "madvise" and not asked:
        return Finding(
            *("huge pages", "warning", found),
            "Set THP_MEM_ALLOC_ENABLE=1 before torch is imported, as the command line does.",
        )
    return Finding("huge pages", "ok", found)
