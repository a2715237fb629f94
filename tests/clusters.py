"""Dask clusters of separate processes on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import pytest
from processes import warm_context


@contextmanager
def cluster(
    n_workers: int = 2,
    *,
    allowed_failures: int = 3,
    fresh: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """A LocalCluster whose workers are processes with one thread, restarted when they die.

    Args:
        n_workers: how many.
        allowed_failures: how many workers a task may outlive.
        fresh: each worker is a fresh process, which takes seconds to import what it needs, and
            reads its environment; others are forked from one that has imported everything.
        options: of LocalCluster.
    """
    distributed = pytest.importorskip("distributed")
    settings = {
        "distributed.scheduler.allowed-failures": allowed_failures,
        "distributed.worker.multiprocessing-method": "spawn" if fresh else "forkserver",
    }
    with dask.config.set(settings):
        distributed.utils.get_mp_context()  # sets modules of its own, the first time
        if not fresh:
            warm_context()
        with distributed.LocalCluster(
            n_workers=n_workers,
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            **{"threads_per_worker": 1} | options,
        ) as made:
            yield made
