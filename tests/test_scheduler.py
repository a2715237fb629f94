"""Schedulers: the same bits everywhere, progress everywhere, and errors that name what to do."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import cluster
from dask.delayed import delayed
from processes import warm_pool
from stores import Made

from bertvision.errors import InputError, StoreNotFoundError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines import scheduler as scheduler_module
from bertvision.pipelines.analysis.cca import cca_of_arrays as cca
from bertvision.pipelines.analysis.cka import cka_of_arrays as cka
from bertvision.pipelines.analysis.context import Samples
from bertvision.pipelines.analysis.context import context_of_arrays as context
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.analysis.rsa import Paired
from bertvision.pipelines.analysis.rsa import rsa_of_arrays as rsa
from bertvision.pipelines.analysis.uses import Uses, sample_positions, sample_windows
from bertvision.pipelines.scheduler import (
    ClusterError,
    compute,
    is_cluster,
    use_scheduler,
)

LENGTHS = [40, 90, 17, 64, 31, 88, 70, 12, 55, 93] * 4


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster of two worker processes."""
    with cluster(2, allowed_failures=0) as made:
        yield made.scheduler_address


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    made = Made(LENGTHS, layers=3, hidden=96, encoding="int8", shard_tokens=128)
    return made.write(tmp_path_factory.mktemp("store"))


def results(split: ActivationSplit, scheduler: str) -> list[Any]:
    """Results of analyses of a split: all tokens, and a sample that is held between two passes."""
    x = split.dask()
    y = x[:, ::-1] ** 2
    rows = np.arange(len(x))
    paired = Paired(x, y, rows, rows[::-1])
    found = [
        *(cka(x, y, scheduler=scheduler, max_tokens=n) for n in (None, 700)),
        *(isotropy({"1e": x}, scheduler=scheduler, max_tokens=n) for n in (None, 700)),
        cca(x, y, scheduler=scheduler, max_tokens=1200),
        rsa({"dev": paired}, n_tokens=600, repeats=2, scheduler=scheduler),
        context({"1e": x}, words(), scheduler=scheduler),
    ]
    return [result.to_json() for result in found]


def words() -> Samples:
    """The tokens of the split as 150 words, with more uses than one block holds, and windows."""
    drawn = np.random.default_rng(0).permutation(sum(LENGTHS))
    groups = [np.split(drawn[first : first + 1200], 150) for first in (0, 900)]
    lengths = np.array(LENGTHS)
    windows = sample_windows(np.zeros(sum(LENGTHS), bool), lengths, 1500, 0)
    at = sample_positions(lengths, (0, 5), 20, 0)
    return Samples(Uses(*groups, 0, 0, 0, 0, 0, 150), windows, at, (0, 5))


def test_threads_processes_and_a_cluster_agree_to_the_last_bit(
    split: ActivationSplit, address: str
) -> None:
    threads = results(split, "threads")
    assert threads == results(split, address)
    with warm_pool():
        assert threads == results(split, "processes")


def _blas_threads() -> list[int]:
    import numpy  # noqa: F401 - loads the BLAS
    from threadpoolctl import threadpool_info

    return [
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    ]


def _two_blas_threads() -> None:
    import numpy  # noqa: F401 - loads the BLAS
    from threadpoolctl import threadpool_limits

    threadpool_limits(2, "blas")


def test_blas_has_one_thread_in_a_worker_while_it_is_used_and_its_own_after() -> None:
    from distributed import Client

    with cluster(1) as made:
        with Client(made) as client:
            client.run(_two_blas_threads)
            assert max(client.run(_blas_threads).popitem()[1]) == 2
        with use_scheduler(made.scheduler_address):
            assert max(compute(delayed(_blas_threads)())) == 1
        with Client(made) as client:
            assert max(client.run(_blas_threads).popitem()[1]) == 2


@pytest.mark.parametrize("where", ["threads", "cluster"])
def test_progress_is_shown_and_the_link_of_the_dashboard(
    where: str,
    address: str,
    split: ActivationSplit,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "bertvision")
    isotropy({"1e": split.dask()}, scheduler=address if where == "cluster" else "threads")
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.replace("\n", "\r").rstrip("\r").rpartition("\r")[2]
    assert last.startswith("isotropy")
    assert ": 100%" in last
    done, total = last.split("| ")[1].split(" ")[0].split("/")
    assert done == total
    assert int(total) >= split.plan.n_shards
    messages = [message for message in caplog.messages if "dashboard" in message]
    if where == "cluster":
        assert len(messages) == 1
        assert messages[0].startswith(f"cluster at {address}: 2 workers; dashboard: http://127.0.0")
    else:
        assert not messages


def _die() -> None:
    os._exit(1)


def test_a_task_that_kills_its_workers_is_an_error_that_speaks_of_memory(address: str) -> None:
    with (
        pytest.raises(ClusterError, match=r"^1 worker died,.* memory.*--memory-limit"),
        use_scheduler(address),
    ):
        compute(delayed(_die)())


def test_a_store_that_a_worker_does_not_see_is_named(tmp_path: Path, address: str) -> None:
    x = Made(LENGTHS, shard_tokens=128).write(tmp_path / "here").dask()
    shutil.move(tmp_path / "here", tmp_path / "there")
    expected = f"a worker says: there is no split 1e/train in {tmp_path}/here; every worker must"
    with pytest.raises(StoreNotFoundError, match=expected):
        isotropy({"1e": x}, scheduler=address)


def test_an_error_of_a_task_arrives_as_it_was_raised(address: str) -> None:
    with pytest.raises(ZeroDivisionError), use_scheduler(address):
        compute(delayed(int.__floordiv__)(1, 0))
    with use_scheduler(address):
        assert compute(delayed(sum)([1, 2])) == 3  # and the next one is computed


def test_a_cluster_without_workers_is_an_error_and_no_endless_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "CONNECT_SECONDS", 0.5)
    with (
        cluster(0) as made,
        pytest.raises(ClusterError, match=f"no workers.*dask worker {made.scheduler_address}`"),
        use_scheduler(made.scheduler_address),
    ):
        pass


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("thread", "unknown scheduler 'thread'; use threads, processes"),
        ("http://localhost:8786", "unknown scheduler"),
        ("tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9"),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_named(
    scheduler: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "CONNECT_SECONDS", 0.2)
    with pytest.raises(InputError, match=message), use_scheduler(scheduler):
        pass


def test_a_cluster_without_distributed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    expected = r"pip install bertvision\[cluster\]"
    with pytest.raises(InputError, match=expected), use_scheduler("tcp://a:1"):
        pass


def test_an_address_is_a_cluster_and_a_name_is_not() -> None:
    assert is_cluster("tcp://10.0.0.1:8786")
    assert is_cluster("tls://10.0.0.1:8786")
    assert not is_cluster("threads")
    assert not is_cluster("processes")
