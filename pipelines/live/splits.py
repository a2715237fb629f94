"""Source of the hidden states that heads train on: the store, or the encoder.

A split is computed shard by shard, in the order in which a loader asks for them, by what extracts
it too. So heads are the same to the last bit, whether their states were stored before, are stored
while the first epoch runs (``auto``), or are computed anew in each epoch (``live``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from bertvision.errors import (
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.creation import SplitSpec
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import SplitRecord
from bertvision.featurestore.format.shard import ShardReader, shard_key
from bertvision.featurestore.readahead import MOST_EARLY
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.featurestore.stream import default_buffer
from bertvision.featurestore.writer import SplitWriter, expected_bytes, free_bytes
from bertvision.featurestore.writing.growth import remove_split
from bertvision.pipelines.extraction.extract import asked_jobs
from bertvision.pipelines.extraction.job import LoadedSource
from bertvision.pipelines.extraction.shardwork import ShardWork
from bertvision.pipelines.extraction.split_extraction import ExtractionCost, SplitExtraction
from bertvision.pipelines.extraction.stored_tokens import load_sources, plan_jobs
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.heads import head_activations
from bertvision.pipelines.workspace.job_options import ExtractOptions, Source
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.reproduce import stored_options
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

_PREFIX = "bertvision-live-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def needed_bytes(plan: ShardPlan, spec: SplitSpec | SplitRecord, missing: float = 1.0) -> int:
    """Room to ask for before a split is stored.

    Args:
        plan: Plan of the split.
        spec: Encoding, layers and width.
        missing: Part of the shards that is not stored yet.

    Returns:
        Bytes of these shards, a twentieth more, and a mebibyte for what lies beside them.
    """
    return round(1.05 * missing * expected_bytes(plan, spec)) + (1 << 20)


class ComputedSplit(ActivationSplit):
    """A split whose missing shards are computed when they are first read.

    Args:
        writer: Writer of the split.
        compute: Writes a shard, in one thread at a time.
        capacity: Number of shards that are kept; of more the oldest is removed, and computed again
            when it is asked for. None keeps all.
    """

    def __init__(
        self, writer: SplitWriter, compute: Callable[[int], None], capacity: int | None
    ) -> None:
        super().__init__(writer.ledger.storage, writer.ledger.tag, writer.ledger.split)
        self._compute, self._capacity = compute, capacity
        self._shards = deque(sorted(self.ledger.shards()))
        self._computing = threading.Lock()

    def passes(self, epochs: int) -> float:
        """How often a shuffled loader has the whole split computed in some epochs.

        Shards that are still there when an epoch comes to them are not computed again. That is
        counted over the orders of shards that `ShuffleSampler` draws.

        Args:
            epochs: Number of epochs of all loaders.
        """
        n_shards, computed, kept = self.plan.n_shards, 0, deque[int]()
        for epoch in range(epochs):
            for shard in np.random.default_rng([0, epoch]).permutation(n_shards).tolist():
                if shard not in kept:
                    computed += 1
                    kept.append(shard)
                if self._capacity is not None and len(kept) > self._capacity:
                    kept.popleft()
        return computed / n_shards

    def require_complete(self, *, any_order: bool = False) -> Self:
        """Return the split itself: what it lacks is computed."""
        return self

    def open_shard(self, shard: int, *, any_order: bool = False) -> ShardReader:
        """Open a shard, which is computed first where it is missing."""
        with self._computing:
            if shard not in self._shards:
                self._compute(shard)
                self._shards.append(shard)
            reader = super().open_shard(shard, any_order=any_order)
            # an open file can be read on after its name is gone
            while self._capacity is not None and len(self._shards) > self._capacity:
                self._remove(self._shards.popleft())
        return reader

    def _remove(self, shard: int) -> None:
        committed = self.ledger.find_shard(shard, self.record)
        self.ledger.retract_shard(shard)
        for name in committed.files if committed else ():
            self.storage.remove(shard_key(self.record, name, shard))


class Splits:
    """Opens the splits that heads read: each once, and computed as it is read.

    Args:
        source: ``auto``, which takes what is stored and stores the rest; or ``live``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._splits: dict[tuple[str, TokenPooling, str], ActivationSplit] = {}
        self._loaded: dict[ExtractOptions, LoadedSource] = {}
        self._encoding = threading.Lock()  # one encoder for all splits, in one thread at a time
        self._reserved = 0  # bytes that splits which are being stored will take
        self._stack, self._closed = ExitStack(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._encoding:  # a loader that was left open may be computing
            self._closed = True
        self._stack.close()

    def __call__(
        self, workspace: Workspace, tag: str, tokens: TokenPooling, split: str
    ) -> ActivationSplit:
        """The split that heads read.

        Args:
            workspace: Workspace of the heads.
            tag: Tag of the snapshot.
            tokens: Tokens that the heads read (`Run.tokens`).
            split: Split of the workspace: train or tune.

        Raises:
            UnknownNameError: There is no such snapshot.
            ProvenanceError: The split was begun from something else.
            InputError: The encoder has no token for the pooling.
            LockedError: Another process writes the split.
        """
        key = str(tag), tokens, split
        if key not in self._splits:
            self._splits[key] = self._open(workspace, tag, tokens, split)
        return self._splits[key]

    def _open(
        self, workspace: Workspace, tag: str, tokens: TokenPooling, split: str
    ) -> ActivationSplit:
        if self._source.name != "live":  # what is not stored whole is computed
            with suppress(StoreNotFoundError, UnknownNameError, IncompleteSplitError):
                return head_activations(workspace, tag, tokens, split)
        name = StoredName(split, tokens).name
        options = ExtractOptions(splits=(split,), tokens=(tokens,))
        if name in workspace.stored().get(tag, ()):
            options = stored_options(StoredSplit(workspace.activations, tag, name))
        if self._source.encoding is not None:
            options = replace(options, encoding=self._source.encoding)
        extraction = self._extraction(workspace, tag, options)
        plan, spec = extraction.contents[tokens].plan, extraction.specs[tokens]
        ledger = Ledger(extraction.storage, spec.tag, spec.split)
        begun = bool(ledger.exists and ledger.shards())
        missing = 1 - len(ledger.shards()) / plan.n_shards if begun else 1.0
        needed = needed_bytes(plan, spec, missing)
        free = free_bytes(extraction.storage)
        is_stored = self._source.name == "auto" and (
            free is None or self._reserved + needed <= free
        )
        if is_stored:
            self._reserved += needed
            if not begun:
                self._stack.callback(_remove_empty, ledger)
            when = f"while the first epoch runs, and stored: {size(needed)}"
        else:
            when = "as heads need it, and not stored"
            if self._source.name == "auto":
                when += f", since {size(needed)} are needed to store it, and {size(free or 0)} free"
            extraction.storage = open_storage(self._stack.enter_context(temporary_folder()))
        writer = self._stack.enter_context(extraction.open_writer(tokens))
        log.info("%s/%s is computed %s", tag, name, when)
        work = ShardWork({tokens: writer}, extraction.windows, extraction.source, options.nonfinite)
        if not is_stored:
            capacity = default_buffer(writer.split, len(spec.layers)) + MOST_EARLY
            return ComputedSplit(writer, partial(self._compute, work, tokens, None), capacity)
        cost = self._stack.enter_context(extraction.cost(tokens, fresh=not begun))
        return ComputedSplit(writer, partial(self._compute, work, tokens, cost), None)

    def _extraction(
        self, workspace: Workspace, tag: str, options: ExtractOptions
    ) -> SplitExtraction:
        data = workspace.dataset()
        planned = asked_jobs(workspace, data, tag, ensure_snapshot(workspace, tag), options)
        (job,) = plan_jobs(workspace, planned, lossy=True, mend=False)
        encoder = replace(job.options, splits=None)
        if job.pooled_from is not None or encoder not in self._loaded:
            self._loaded[encoder] = load_sources(workspace, [job])[job]
        return SplitExtraction(workspace, data, job, self._loaded[encoder])

    def _compute(
        self, work: ShardWork, tokens: TokenPooling, cost: ExtractionCost | None, shard: int
    ) -> None:
        with self._encoding:
            if self._closed:
                raise InputError("the training that these states are computed for has ended")
            started = time.perf_counter()
            (written,) = work.write({shard: [tokens]})
            if cost is not None:
                cost.seconds = (cost.seconds or 0.0) + time.perf_counter() - started
                cost.note(written.record, work.seconds)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for shards that are not kept; those of processes that were killed are removed.

    The operating system releases the folder's lock when its process dies.
    """
    for leftover in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_leftover(leftover)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        descriptor = os.open(folder, _FOLDER)
        try:
            with suppress(OSError):  # a file system without locks, on which none is removed either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _remove_leftover(folder: Path) -> None:
    """Remove such a folder of this user, unless a process holds its lock, or is about to."""
    with suppress(OSError):
        descriptor = os.open(folder, _FOLDER)
        try:
            # whatever is in it was written under its lock
            if os.fstat(descriptor).st_uid == os.getuid() and os.listdir(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _remove_empty(ledger: Ledger) -> None:
    """Remove a split of which nothing was computed, such as one for heads that are trained."""
    if ledger.exists and not ledger.shards():
        with ledger.lock():
            remove_split(ledger)
