"""Dask clusters of separate processes on this machine."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dask
import pytest


@contextmanager
def cluster(
    n_workers: int = 2,
    *,
    allowed_failures: int = 3,
    preload: Sequence[str] = (),
    **options: Any,
) -> Iterator[Any]:
    """A LocalCluster whose workers are processes with one thread, restarted when they die.

    Args:
        n_workers: how many.
        allowed_failures: how many workers a task may outlive.
        preload: modules that are imported once, in a process that all workers are forked from;
            without any, each worker is a fresh process that takes seconds to import what it needs.
        options: of LocalCluster.
    """
    distributed = pytest.importorskip("distributed")
    settings = {
        "distributed.scheduler.allowed-failures": allowed_failures,
        "distributed.worker.multiprocessing-method": "forkserver" if preload else "spawn",
    }
    with dask.config.set(settings):
        if preload:
            distributed.utils.get_mp_context()  # sets modules of its own, the first time
            multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
        with distributed.LocalCluster(
            n_workers=n_workers,
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            **{"threads_per_worker": 1} | options,
        ) as made:
            yield made
