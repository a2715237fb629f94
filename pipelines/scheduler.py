"""Where Dask computes: threads or processes of this machine, or the workers of a cluster.

What is computed is the same everywhere, to the last bit: the graph is fixed by the data alone, and
BLAS has one thread in every task. Wherever it runs, stderr shows how far it is.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import dask
from dask.base import compute as dask_compute
from dask.callbacks import Callback
from dask.system import CPU_COUNT
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bertvision.errors import BertvisionError, InputError, StoreNotFoundError
from bertvision.pipelines.progress import progress

if TYPE_CHECKING:
    from distributed import Client, Future

log = logging.getLogger(__name__)
A = TypeVar("A")
B = TypeVar("B")

CONNECT_SECONDS = 10.0
"""How long a Dask cluster may take to answer, and to have its first worker."""

_LOCAL = ("threads", "processes")
_CLUSTER = ("tcp://", "tls://")


class ClusterError(BertvisionError, RuntimeError):
    """The workers of a Dask cluster cannot do the work: they die, or lack what it needs."""


def is_cluster(scheduler: str) -> bool:
    """Whether a scheduler is the address of a Dask cluster.

    Raises:
        InputError: it is neither that nor ``threads`` nor ``processes``.
    """
    if scheduler in _LOCAL:
        return False
    if not scheduler.startswith(_CLUSTER):
        raise InputError(
            f"unknown scheduler {scheduler!r}; use threads, processes, or the address of a Dask "
            f"cluster such as tcp://localhost:8786"
        )
    _host_and_port(scheduler)
    return True


def check_scheduler(scheduler: str) -> None:
    """Refuse a scheduler that there is not, or whose machine does not answer, without a client.

    Raises:
        InputError: it is not; see `is_cluster`.
    """
    if not is_cluster(scheduler):
        return
    try:
        socket.create_connection(_host_and_port(scheduler), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_answer(scheduler, error) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.partition("://")[2].rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise InputError(
            f"scheduler {address!r} names no host and port: write it such as tcp://localhost:8786"
        )
    return host.strip("[]"), int(port)


def _no_answer(address: str, error: Exception) -> InputError:
    return InputError(
        f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` "
        f"and at least one `dask worker {address}`"
    )


@contextmanager
def use_scheduler(scheduler: str, desc: str = "analysis") -> Iterator[None]:
    """Runs what Dask computes inside the block on a scheduler, with progress on stderr.

    On a cluster, progress is shown for what `compute` is given.

    Args:
        scheduler: ``threads``, ``processes``, or the address of a Dask cluster,
            ``tcp://host:port`` (or ``tls://``).
        desc: label of the progress bar.

    Raises:
        InputError: an unknown scheduler, no answer at the address, or ``distributed`` is missing.
        ClusterError: the cluster has no workers, or these lack bertvision.
    """
    if not is_cluster(scheduler):
        # The tasks share the cores out. Threads of BLAS inside them would only wait for each other
        # (five times the processor time of a 384 × 384 product).
        settings = {"scheduler": scheduler, "multiprocessing.initializer": _one_blas_thread}
        with dask.config.set(settings), _one_blas_thread(), _Bar(desc):
            yield
        return
    # A client makes itself the default of dask.compute and dask.persist until it is closed.
    with connect(scheduler) as client, _one_blas_thread_each(client):
        token = _CLIENT.set((client, desc))
        try:
            yield
        finally:
            _CLIENT.reset(token)


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """A client of a Dask cluster that has workers; logs the link of its dashboard.

    Args:
        address: ``tcp://host:port`` (or ``tls://``) of its scheduler.

    Raises:
        InputError: no answer at the address, or ``distributed`` is missing.
        ClusterError: the cluster has no workers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError(
            f"scheduler {address} needs Dask's distributed: pip install bertvision[cluster]"
        ) from error
    try:
        client = Client(address, timeout=CONNECT_SECONDS)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise _no_answer(address, error) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError:
            raise ClusterError(
                f"the Dask scheduler at {address} has no workers: start at least one with "
                f"`dask worker {address}`, on a machine that sees the workspace and its store"
            ) from None
        workers = len(client.nthreads())  # type: ignore[no-untyped-call]
        log.info(
            "cluster at %s: %d worker%s; dashboard: %s",
            address,
            workers,
            "" if workers == 1 else "s",
            client.dashboard_link,
        )
        yield client


def compute(value: Any) -> Any:
    """Computes one delayed value or array on the scheduler in use (see `use_scheduler`).

    Raises:
        ClusterError: the workers that computed it died again and again, or lack bertvision.
    """
    if (using := _CLIENT.get()) is None:
        return dask_compute(value)[0]  # type: ignore[no-untyped-call]
    client, desc = using
    future = client.compute(value)  # type: ignore[no-untyped-call]
    watch(client, future, desc)
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever a worker raised
        raise_from_worker(error)


def map_here(function: Callable[[A], B], items: Sequence[A], desc: str | None = None) -> list[B]:
    """Map a function over items in threads of this process, with one BLAS thread each.

    For what would take longer to send than to compute.

    Args:
        function: mostly products and decompositions of matrices.
        items: Items that it is called with.
        desc: label of a progress bar; None shows none.
    """
    with _one_blas_thread(), ThreadPoolExecutor(CPU_COUNT) as pool:
        results = pool.map(function, items)
        if desc is None:
            return list(results)
        with progress(len(items), desc, "task") as bar:
            done = []
            for value in results:
                done.append(value)
                bar.update()
            return done


def watch(client: Client, future: Future[Any], desc: str) -> None:
    """Shows progress over the tasks that a future needs, until it is finished or failed.

    Args:
        client: Client of the cluster that computes it.
        future: Future of what is computed.
        desc: label of the progress bar.
    """
    from distributed.diagnostics.progressbar import ProgressBar

    class Bar(ProgressBar):
        def _draw_bar(self, remaining: int, all: int, **_: object) -> None:  # noqa: A002
            bar.total = all
            bar.update(all - remaining - bar.n)

    with progress(0, desc, "task") as bar:
        client.sync(Bar([future]).listen)  # type: ignore[no-untyped-call]


def raise_from_worker(error: Exception) -> NoReturn:
    """Raises an error that came from a worker again, in words that help on a cluster."""
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        died = error.allowed_failures + 1
        raise ClusterError(
            f"{died} worker{'' if died == 1 else 's'} died, one after another, computing "
            f"{error.task}; most often a worker had too little memory: start workers with more "
            "of it (`dask worker --memory-limit`), or with fewer threads each (`--nthreads 1`)"
        ) from error
    if isinstance(error, StoreNotFoundError):
        raise StoreNotFoundError(
            f"a worker says: {error}; every worker must see the store under the same path: put "
            "it on a file system that all machines share, or in an object store (s3://…)"
        ) from error
    if isinstance(error, ModuleNotFoundError):
        raise ClusterError(
            f"a worker says: {error}; install the same bertvision on the machines of the workers"
        ) from error
    raise error


_CLIENT: ContextVar[tuple[Client, str] | None] = ContextVar("client", default=None)


def _one_blas_thread() -> Any:
    """Limit BLAS in this process; gives the limits, which end with their object's own methods."""
    import numpy  # noqa: F401  what is not loaded yet cannot be limited

    return threadpool_limits(1, user_api="blas")


@contextmanager
def _one_blas_thread_each(client: Client) -> Iterator[None]:
    """One thread of BLAS on every worker, also on those that come later.

    The nanny of a worker sets it when it starts it; workers without a nanny have as many threads as
    cores, and other threads add in another order.
    """
    from distributed import WorkerPlugin

    class OneBlasThread(WorkerPlugin):
        def setup(self, worker: object) -> None:
            self.limits = _one_blas_thread()

        def teardown(self, worker: object) -> None:
            self.limits.restore_original_limits()

    name = f"one-blas-thread-{client.id}"
    client.register_plugin(OneBlasThread(), name=name)
    try:
        yield
    finally:
        if client.status == "running":
            client.unregister_worker_plugin(name)  # type: ignore[no-untyped-call]


class _Bar(Callback):
    """A progress bar over the tasks of each computation of a local scheduler."""

    def __init__(self, desc: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.desc, self.passes = desc, 0

    def _start_state(self, dsk: Any, state: dict[str, Any]) -> None:
        total = sum(len(state[key]) for key in ("ready", "waiting"))
        self.passes += 1
        desc = self.desc if self.passes == 1 else f"{self.desc}, pass {self.passes}"
        self.bar = progress(total, desc, "task")

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker_id: Any) -> None:
        self.bar.update()

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        self.bar.close()
