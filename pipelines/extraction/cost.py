"""What the extraction of a split has cost so far, added up over interrupted calls.

It lies in the workspace, not in the store: it tells of work that was done here, with times that no
other machine would repeat.
"""

from __future__ import annotations

import time
from pathlib import Path

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.records import ShardRecord
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.workspace.records import ExtractionCosts

_WRITE_EVERY = 10.0
"""Seconds between two writes: so much of a killed call may be missing."""


class ExtractionCost:
    """The record ``extraction/<tag>/<stored split>.json``, kept while a split is extracted.

    A context manager: what was noted is written when it ends, also by an error. Where nothing was
    noted nothing is written. The caller holds the split's lock.

    Args:
        path: of the record.
        fresh: the split is created by this call; what an earlier one cost does not count.
        started: `time.perf_counter` of when this call took up the split.
        new: the record before anything was extracted.

    Attributes:
        bytes: of all shards written so far.
    """

    def __init__(self, path: Path, *, fresh: bool, started: float, new: ExtractionCosts) -> None:
        if fresh:
            path.unlink(missing_ok=True)
        self._path = path
        self._started = self._written = started
        self._new = new
        self._before = _read(path, new)
        self._examples = self._before.examples_written
        self.bytes = self._before.bytes
        self._spent_computing = 0.0
        self._noted = False

    def __enter__(self) -> ExtractionCost:
        return self

    def __exit__(self, *error: object) -> None:
        if self._noted:
            self._write()

    def note(self, record: ShardRecord, encoder_seconds: float) -> None:
        """Count a shard that was committed.

        Args:
            record: of the shard.
            encoder_seconds: spent computing by this call so far.
        """
        self._noted = True
        self._examples += record.examples
        self.bytes += sum(file.bytes for file in record.files.values())
        self._spent_computing = encoder_seconds
        if time.perf_counter() - self._written >= _WRITE_EVERY:
            self._write()

    def _write(self) -> None:
        self._written = time.perf_counter()
        sums = {
            "examples_written": self._examples,
            "seconds": self._before.seconds + self._written - self._started,
            "encoder_seconds": self._before.encoder_seconds + self._spent_computing,
            "bytes": self.bytes,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self._path, self._new.model_copy(update=sums))


def _read(path: Path, new: ExtractionCosts) -> ExtractionCosts:
    """The sums of earlier calls; ``new`` where the record is damaged or tells of another store."""
    try:
        before = read_record(path, ExtractionCosts, "bertvision extract")
    except WorkspaceError:
        return new
    # as earlier versions wrote it
    absolute = str(path.parents[2] / new.store)
    return before if before.store in (new.store, absolute) else new
