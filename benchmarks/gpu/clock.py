"""Seconds of work on a device, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device is done with everything: by its own clock, where it has one."""
    if device.type != "cuda":
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
