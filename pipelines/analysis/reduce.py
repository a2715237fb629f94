"""From the blocks of Dask arrays to one result: aligning, sampling, tree reduction, schedulers.

The graph is fixed by the blocks alone and every merge has its place in it, so that all schedulers
add the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import dask
import dask.array as da
import numpy as np
from dask.base import compute as dask_compute
from dask.base import persist as dask_persist
from dask.callbacks import Callback
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.progress import progress

T = TypeVar("T")
Blocks = list[tuple[Delayed, ...]]

SAMPLE_ROWS = 1024
"""Sampled tokens are gathered into blocks of about this many, so that products are large enough
to be fast and numerous enough to be shared out."""

CONNECT_SECONDS = 10.0
"""How long a Dask cluster may take to answer."""


def aligned_blocks(arrays: Sequence[da.Array]) -> Blocks:
    """The blocks of arrays that hold the same tokens, one tuple per block of the first array.

    Args:
        arrays: (token, layer, hidden) each; layers and hidden sizes may differ, tokens may not.

    Raises:
        InputError: an array has not three axes, no tokens, or another number of tokens.
    """
    for array in arrays:
        if array.ndim != 3 or array.shape[0] == 0:
            raise InputError(
                f"activations must be (token, layer, hidden) with at least one token; "
                f"this array has shape {array.shape}"
            )
    lengths = {array.shape[0] for array in arrays}
    if len(lengths) > 1:
        raise InputError(
            f"the activations hold different numbers of tokens ({sorted(lengths)}); compare splits "
            f"that were extracted from the same data with the same tokenizer and lengths"
        )
    chunks = {0: arrays[0].chunks[0], 1: -1, 2: -1}
    columns = [array.rechunk(chunks).to_delayed().ravel() for array in arrays]  # type: ignore[no-untyped-call]
    return list(zip(*columns, strict=True))


def sampled_blocks(arrays: Sequence[da.Array], max_tokens: int | None, seed: int) -> Blocks:
    """The blocks of a uniform sample of tokens, the same tokens of each array, in token order.

    Where there are more than ``max_tokens`` tokens, the sample is read once and held (in memory, or
    on the workers of a cluster): ``max_tokens`` × layers × hidden × 4 bytes per array. Otherwise
    the blocks are those of the arrays, and each pass reads them again. Call it inside
    ``use_scheduler``.

    Args:
        arrays: (token, layer, hidden) each, with the same tokens.
        max_tokens: sample size; None takes all tokens.
        seed: seed of the sample, which depends on nothing else.

    Raises:
        InputError: ``max_tokens`` is below 2, or the arrays do not hold the same tokens.
    """
    if max_tokens is not None and max_tokens < 2:
        raise InputError(f"max_tokens is {max_tokens}; give at least 2, or None for all tokens")
    blocks = aligned_blocks(arrays)
    n_tokens = arrays[0].shape[0]
    if max_tokens is None or n_tokens <= max_tokens:
        return blocks
    rows = np.random.default_rng(seed).choice(n_tokens, max_tokens, replace=False, shuffle=False)
    rows.sort()
    ends = np.cumsum(arrays[0].chunks[0])
    pieces = np.split(rows, np.searchsorted(rows, ends[:-1]))
    binned: list[list[tuple[Delayed, ...]]] = []
    filled = SAMPLE_ROWS
    for block, piece, end, size in zip(blocks, pieces, ends, arrays[0].chunks[0], strict=True):
        if len(piece) == 0:
            continue
        if filled >= SAMPLE_ROWS:
            binned.append([])
            filled = 0
        local = piece - (end - size)
        binned[-1].append(tuple(delayed(_take)(part, local) for part in block))
        filled += len(piece)
    sample = [
        tuple(delayed(_concatenate)(list(parts)) for parts in zip(*group, strict=True))
        for group in binned
    ]
    (held,) = dask_persist(sample)  # type: ignore[no-untyped-call]
    return list(held)


def tree_reduce(
    blocks: Blocks,
    leaf: Callable[..., T],
    merge: Callable[[T, T], T],
) -> Delayed:
    """The result of all blocks as one delayed value: ``leaf`` of each block, merged pairwise.

    Neighbours are merged first, so that with w workers about w + log₂(blocks) partial results are
    alive at a time.

    Args:
        blocks: what ``leaf`` is called with, one tuple per block; at least one.
        leaf: picklable; from one block (an array per element of the tuple) to a partial result.
        merge: picklable; associative; must not change its operands.
    """
    level: list[Delayed] = [delayed(leaf)(*block) for block in blocks]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [delayed(merge)(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


@contextmanager
def use_scheduler(scheduler: str, desc: str = "analysis") -> Iterator[None]:
    """Runs what Dask computes inside the block on a scheduler; local ones show progress on stderr.

    Args:
        scheduler: ``threads``, ``processes``, or the address of a Dask cluster,
            ``tcp://host:port`` (or ``tls://``).
        desc: label of the progress bar.

    Raises:
        InputError: an unknown scheduler, no answer at the address, or ``distributed`` is missing.
    """
    if scheduler in ("threads", "processes"):
        # The tasks share the cores out. Threads of BLAS inside them would only wait for each other
        # (five times the processor time of a 384 × 384 product); workers of a cluster have one.
        settings = {"scheduler": scheduler, "multiprocessing.initializer": _one_blas_thread}
        with dask.config.set(settings), threadpool_limits(1, user_api="blas"), _Bar(desc):
            yield
        return
    if not scheduler.startswith(("tcp://", "tls://")):
        raise InputError(
            f"unknown scheduler {scheduler!r}; use threads, processes, or the address of a Dask "
            f"cluster such as tcp://localhost:8786"
        )
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError(
            f"scheduler {scheduler} needs Dask's distributed: pip install bertvision[cluster]"
        ) from error
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(
            f"no Dask scheduler answers at {scheduler} ({error}); start one with `dask scheduler` "
            f"and at least one `dask worker {scheduler}`"
        ) from error
    # A client makes itself the default of dask.compute and dask.persist until it is closed.
    with client:
        yield


def compute(value: Delayed) -> Any:
    """Computes one delayed value on the scheduler in use (see ``use_scheduler``)."""
    return dask_compute(value)[0]  # type: ignore[no-untyped-call]


def check_finite(values: NDArray[np.floating[Any]]) -> None:
    """Raises NonFiniteError where sums over (layers, hidden) show NaN or infinity in a layer."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise NonFiniteError(
            f"the activations hold NaN or infinity in {len(bad)} of {len(values)} layers (the "
            f"first is number {bad[0]} of those read); check them with `bertvision store verify`"
        )


def _one_blas_thread() -> None:
    threadpool_limits(1, user_api="blas")


def _take(block: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    taken: NDArray[Any] = block[rows]
    return taken


def _concatenate(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts)


class _Bar(Callback):
    """A progress bar over the tasks of each computation of a local scheduler."""

    def __init__(self, desc: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.desc = desc

    def _start_state(self, dsk: Any, state: dict[str, Any]) -> None:
        total = sum(len(state[key]) for key in ("ready", "waiting"))
        self.bar = progress(total, self.desc, "task")

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker_id: Any) -> None:
        self.bar.update()

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        self.bar.close()
