"""What a worker of a cluster does in an extraction: compute and write the shards it is given."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from bertvision.errors import InputError, ProvenanceError, StoreNotFoundError, WorkspaceError
from bertvision.featurestore.delegation import Grant
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.writer import SplitWriter, granted_writer
from bertvision.featurestore.writing.origin import TOKEN_IDS
from bertvision.pipelines.extraction.contents import provenance, token_ids_digest
from bertvision.pipelines.extraction.job import ExtractionJob
from bertvision.pipelines.extraction.shardwork import ShardWork, Written
from bertvision.pipelines.extraction.source_choice import load_sources
from bertvision.pipelines.scheduler import ClusterError
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.workspace import Workspace


def write_shards(
    job: ExtractionJob,
    grants: Mapping[TokenPooling, Grant],
    shards: Mapping[int, Sequence[TokenPooling]],
) -> tuple[list[Written], float]:
    """Compute and write shards, except those that are committed already.

    Args:
        job: what decides the activations.
        grants: the right to write each split.
        shards: by number, the splits that lack it.

    Returns:
        The records of all these shards, and the seconds spent computing.
    """
    with _ONE_AT_A_TIME:
        _use_threads_of_worker()
        work, writers = _open(job, tuple(grants.items()))
        found, missing = [], dict[int, list[TokenPooling]]()
        for shard, wanted in shards.items():
            for kept in wanted:
                split = writers[kept].split
                record = split.ledger.find_shard(shard, split.record)
                if record is None:
                    missing.setdefault(shard, []).append(kept)
                else:
                    found.append(Written(kept, record))
        before = work.seconds
        found += work.write(missing)
        return found, work.seconds - before


_ONE_AT_A_TIME = threading.Lock()
"""A process has one encoder, which uses all threads of the worker."""


@lru_cache(maxsize=1)
def _open(
    job: ExtractionJob, grants: tuple[tuple[TokenPooling, Grant], ...]
) -> tuple[ShardWork, dict[TokenPooling, SplitWriter]]:
    """The encoder, windows and writers; made once per process and extraction."""
    host = socket.gethostname()
    try:
        writers = {kept: granted_writer(grant) for kept, grant in grants}
        workspace = Workspace.find(job.root).at(str(grants[0][1].store))
        loaded = load_sources(workspace, [job])[job]
        windows = workspace.dataset(job.options.dataset).windows(job.split, loaded.tokenizer)
        loaded.check(windows)
    except (StoreNotFoundError, WorkspaceError, InputError, FileNotFoundError) as error:
        raise ClusterError(
            f"the worker on {host} does not find what it needs: {error}; every worker must see the "
            f"workspace {job.root} and the store {grants[0][1].store} under these very paths: put "
            "them on a file system that all machines share (the store may be in an object store), "
            "and run the same command again"
        ) from error
    data, source = workspace.dataset(job.options.dataset), loaded.source
    for kept, writer in writers.items():
        stored = writer.split.record.provenance
        here = provenance(workspace, data, loaded.info, job, kept, source.attention)
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
        if not np.array_equal(source.kept(kept, windows.n_tokens)[plan.example_id], plan.n_tokens):
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
