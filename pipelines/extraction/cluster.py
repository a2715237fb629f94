"""Extraction on a Dask cluster: whole shards, handed to workers a few at a time.

The client has created the splits and holds their locks; it lends the workers the right to write
(see `featurestore.delegation`). A shard is a function of snapshot and shard, so it does not matter
who computes it, nor how often: the store that comes out is that of a single process, byte for byte
where the workers' processors and libraries do the same arithmetic. The shards of a worker that dies
are computed by another one, except those that were committed.

What a worker of a cluster does in an extraction: compute and write the shards it is given.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bertvision.errors import (
    BertvisionError,
    InputError,
    ProvenanceError,
    StoreNotFoundError,
    WorkspaceError,
    counted,
)
from bertvision.featurestore.delegation import Grant, granted
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.writer import SplitWriter, granted_writer
from bertvision.featurestore.writing.origin import TOKEN_IDS
from bertvision.pipelines.extraction.contents import chosen_tokens, provenance, token_ids_digest
from bertvision.pipelines.extraction.job import ExtractionJob
from bertvision.pipelines.extraction.shardwork import ShardWork, Written
from bertvision.pipelines.extraction.stored_tokens import load_sources
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.scheduler import ClusterError, connect, is_cluster, raise_from_worker
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from distributed import Client, Future


def write_shards(
    job: ExtractionJob,
    grants: Mapping[TokenPooling, Grant],
    shards: Mapping[int, Sequence[TokenPooling]],
) -> tuple[list[Written], float]:
    """Compute and write shards, except those that are committed already.

    Args:
        job: Job that decides the activations.
        grants: the right to write each split.
        shards: Splits that lack each shard, by number.

    Returns:
        The records of all these shards, and the seconds spent computing.
    """
    with _ONE_AT_A_TIME:
        _use_threads_of_worker()
        work, writers = _open(job, tuple(grants.items()))
        written, missing = [], dict[int, list[TokenPooling]]()
        for shard, wanted in shards.items():
            for pooling in wanted:
                split = writers[pooling].split
                record = split.ledger.find_shard(shard, split.record)
                if record is None:
                    missing.setdefault(shard, []).append(pooling)
                else:
                    written.append(Written(pooling, record))
        before = work.seconds
        written += work.write(missing)
        return written, work.seconds - before


_ONE_AT_A_TIME = threading.Lock()
"""A process has one encoder, which uses all threads of the worker."""


@lru_cache(maxsize=1)
def _open(
    job: ExtractionJob, grants: tuple[tuple[TokenPooling, Grant], ...]
) -> tuple[ShardWork, dict[TokenPooling, SplitWriter]]:
    """The encoder, windows and writers; made once per process and extraction."""
    host = socket.gethostname()
    try:
        writers = {pooling: granted_writer(grant) for pooling, grant in grants}
        workspace = Workspace.find(job.root).at(str(grants[0][1].store))
        loaded = load_sources(workspace, [job])[job]
        data = workspace.dataset(job.options.dataset)
        windows = data.windows(job.split, loaded.tokenizer, job.options.tokens or ())
        loaded.check(windows)
        windows = chosen_tokens(windows, job, data.task)
    except (StoreNotFoundError, WorkspaceError, InputError, FileNotFoundError) as error:
        raise ClusterError(
            f"the worker on {host} does not find what it needs: {error}; every worker must see the "
            f"workspace {job.root} and the store {grants[0][1].store} under these very paths: put "
            "them on a file system that all machines share (the store may be in an object store), "
            "and run the same command again"
        ) from error
    source = loaded.source
    for pooling, writer in writers.items():
        stored = writer.split.record.provenance
        here = provenance(workspace, data, loaded.info, job, pooling, source.attention)
        if TOKEN_IDS in stored:
            here[TOKEN_IDS] = token_ids_digest(windows)
        if difference := first_difference(stored, here):
            field, kept_value, seen = difference
            raise ProvenanceError(
                f"the worker on {host} sees another {job.root} than the process that hands out "
                f"shards: {field} = {seen!r} there, {kept_value!r} here; every worker must see "
                "the same workspace"
            )
        plan = writer.plan
        if not np.array_equal(source.kept(pooling, windows.n_kept)[plan.example_id], plan.n_tokens):
            raise ProvenanceError(
                f"the worker on {host} cuts the data into other windows than the process that "
                "hands out shards: install the same versions of tokenizers and transformers there"
            )
    return ShardWork(writers, windows, source, job.options.nonfinite), writers


def _use_threads_of_worker() -> None:
    from distributed import get_worker

    # the nanny sets one thread for everything, as Dask's own tasks fill the cores; here one task
    # has all of them
    torch.set_num_threads(get_worker().state.nthreads)


def forget() -> None:
    """Free the memory of the encoder."""
    _open.cache_clear()


log = logging.getLogger(__name__)

PIECE_SHARDS = 8
"""Most shards of a task: enough that writing one hides behind computing the next."""
PIECES_AHEAD = 2
"""Tasks per worker that are handed out: one is computed, the next is there when it ends."""
ATTEMPTS = 3
"""How often a single shard may fail, or kill its worker, before the extraction gives up."""
_LOOK_SECONDS = 5.0
"""How often the client looks how many workers there are."""


class Piece(NamedTuple):
    """Shards that are computed by one task.

    Attributes:
        shards: by number, what the splits that lack it keep of a window.
        failed: Number of failed tries.
    """

    shards: Mapping[int, Sequence[TokenPooling]]
    failed: int = 0


class ClusterWork:
    """Computes and writes shards on the workers of a cluster, as `ShardWork` does here.

    Args:
        writers: Writers by token pooling; their locks are held by this process.
        job: Job that decides the activations.
        scheduler: address of the cluster, ``tcp://host:port``.

    Attributes:
        seconds: Time that workers spent computing so far, added up.

    Raises:
        InputError: the scheduler is none of a cluster.
    """

    def __init__(
        self, writers: Mapping[TokenPooling, SplitWriter], job: ExtractionJob, scheduler: str
    ) -> None:
        if not is_cluster(scheduler):
            raise InputError(
                f"scheduler {scheduler!r}: shards are computed here, where none is named, or on a "
                "Dask cluster such as tcp://localhost:8786"
            )
        self.seconds = 0.0
        self._writers = writers
        self._job = job
        self._scheduler = scheduler

    def write(self, shards: Mapping[int, Sequence[TokenPooling]]) -> Iterator[Written]:
        """Write shards; gives the record of each once it is known to be committed.

        Args:
            shards: Splits that lack each shard, by number.

        Raises:
            InputError: no answer from the cluster.
            ClusterError: it has no workers or was lost, a worker does not see the workspace or the
                store, or a shard failed `ATTEMPTS` times.
            LockedError: another process took the lock over.
            NonFiniteError: names shard and window.
            DiskSpaceError: the disk is full.
        """
        if not shards:
            return
        with connect(self._scheduler) as client, ExitStack() as stack:
            grants = {
                pooling: stack.enter_context(granted(writer.ledger))
                for pooling, writer in self._writers.items()
            }
            stack.callback(_forget_on_workers, client)
            yield from _Dealer(client, self, self._job, grants).deal(shards)


class _Dealer:
    """Hands pieces to the workers of a cluster, and takes back what comes of them."""

    def __init__(
        self,
        client: Client,
        work: ClusterWork,
        job: ExtractionJob,
        grants: Mapping[TokenPooling, Grant],
    ) -> None:
        self._client, self._work, self._job, self._grants = client, work, job, grants
        self._running: dict[object, tuple[Future[Any], Piece]] = {}
        self._finished: SimpleQueue[Future[Any]] = SimpleQueue()
        self._workers = self._count_workers()

    def deal(self, shards: Mapping[int, Sequence[TokenPooling]]) -> Iterator[Written]:
        waiting = deque(_cut(shards, self._workers))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._most(waiting[0]):
                    self._submit(waiting.popleft())
                try:
                    future = self._finished.get(timeout=_LOOK_SECONDS)
                except Empty:
                    self._look()
                    continue
                if future.status in ("lost", "pending"):
                    # its worker died with the result, and another one computes it again
                    future.add_done_callback(self._finished.put)  # type: ignore[no-untyped-call]
                    continue
                _, piece = self._running.pop(future.key)
                if future.status == "finished":
                    written, seconds = future.result()
                    self._work.seconds += seconds
                    yield from written
                else:
                    # first: what fails again should do so soon
                    waiting.extendleft(reversed(self._again(future, piece)))
                self._workers = self._count_workers()
        finally:
            if self._running and self._client.status == "running":
                futures = [future for future, _ in self._running.values()]
                self._client.cancel(futures)  # type: ignore[no-untyped-call]

    def _most(self, following: Piece) -> int:
        """How many pieces may be handed out at a time."""
        # who dies takes along what waits beside it: where pieces have failed, each has a worker
        # to itself, so that the one that kills is told from the others
        running = (piece for _, piece in self._running.values())
        failed = any(piece.failed for piece in (following, *running))
        return max(1, self._workers) * (1 if failed else PIECES_AHEAD)

    def _submit(self, piece: Piece) -> None:
        future = self._client.submit(
            write_shards, self._job, self._grants, dict(piece.shards), pure=False
        )
        self._running[future.key] = future, piece
        future.add_done_callback(self._finished.put)  # type: ignore[no-untyped-call]

    def _again(self, future: Future[Any], piece: Piece) -> list[Piece]:
        """Shards to try again after a failure; raises where that would not help."""
        from distributed import KilledWorker

        if future.status != "error":
            raise ClusterError(
                "the cluster lost its scheduler, or somebody cancelled the extraction there; what "
                "was committed is whole: run the same command again, it goes on from there"
            )
        error = future.exception()  # type: ignore[no-untyped-call]
        if isinstance(error, (BertvisionError, ModuleNotFoundError)):
            raise_from_worker(error)
        failed = piece.failed + 1
        first, *rest = piece.shards
        if not rest and failed >= ATTEMPTS:
            what = "killed its worker" if isinstance(error, KilledWorker) else f"failed ({error!r})"
            raise ClusterError(
                f"shard {first} of {self._job.split} of {self._job.tag} {what} {failed} times: "
                "look at the workers' logs; most often a worker had too little memory (`dask "
                "worker --memory-limit`, one worker per GPU); what was committed is whole: run the "
                "same command again, it goes on from there"
            ) from error
        many = counted(len(piece.shards), "shard")
        log.warning("%s from %d on will be tried again: %r", many, first, error)
        # one by one, so that one that kills its worker does not take others along
        return [Piece({shard: poolings}, failed) for shard, poolings in piece.shards.items()]

    def _look(self) -> None:
        """While nothing ends: are there workers, is there a scheduler?"""
        before, self._workers = self._workers, self._count_workers()
        if self._workers == 0 and before > 0:
            log.warning("the cluster has no workers any more: waiting for one to come back")

    def _count_workers(self) -> int:
        try:
            return len(self._client.nthreads())  # type: ignore[no-untyped-call]
        except (OSError, TimeoutError):
            return 0


def _forget_on_workers(client: Client) -> None:
    """Let the workers free the memory of the encoder."""
    if client.status == "running":
        with suppress(Exception):  # a worker that is gone has forgotten already
            client.run(forget, on_error="ignore")


def _cut(shards: Mapping[int, Sequence[TokenPooling]], workers: int) -> Iterator[Piece]:
    """Pieces of consecutive shards; small enough at the end that all workers end together."""
    size = max(1, min(PIECE_SHARDS, len(shards) // (8 * max(1, workers))))
    items = iter(shards.items())
    while part := dict(islice(items, size)):
        yield Piece(part)
