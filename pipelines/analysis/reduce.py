"""From the blocks of Dask arrays to one result: aligning, sampling, tree reduction.

The graph is fixed by the blocks alone and every merge has its place in it, so that all schedulers
add the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from dask.base import persist as dask_persist
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from bertvision.errors import InputError, NonFiniteError

if TYPE_CHECKING:
    import dask.array as da


T = TypeVar("T")
Blocks = list[tuple[Delayed, ...]]

SAMPLE_ROWS = 1024
"""Sampled tokens are gathered into blocks of about this many, so that products are large enough to
be fast and blocks numerous enough to be shared out."""


def aligned_blocks(arrays: Sequence[da.Array], size: int | None = None) -> Blocks:
    """The blocks of arrays that hold the same tokens, one tuple per block of the first array.

    Args:
        arrays: (token, layer, hidden) each; layers and hidden sizes may differ, tokens may not.
        size: tokens of a block, at most: larger ones are cut into even parts, so that few blocks
            can be shared out evenly too. None leaves them as they are.

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
    tokens = arrays[0].chunks[0]
    if size is not None:
        tokens = tuple(part for rows_of_group in tokens for part in _even(rows_of_group, size))
    chunks = {0: tokens, 1: -1, 2: -1}
    columns = [array.rechunk(chunks).to_delayed().ravel() for array in arrays]  # type: ignore[no-untyped-call]
    return list(zip(*columns, strict=True))


def sampled_blocks(
    arrays: Sequence[da.Array],
    max_tokens: int | None,
    seed: int,
    size: int = SAMPLE_ROWS,
    places: NDArray[np.int64] | None = None,
) -> Blocks:
    """The blocks of a uniform sample of tokens, the same tokens of each array, in token order.

    Where there are more than ``max_tokens`` tokens, the sample is read once and held (in memory, or
    on the workers of a cluster): ``max_tokens`` × layers × hidden × 4 bytes per array. Otherwise
    the blocks are those of the arrays, and each pass reads them again; but where the arrays have
    their tokens in another order, all of them are held. Call it inside `use_scheduler`.

    Args:
        arrays: (token, layer, hidden) each, with the same tokens.
        max_tokens: sample size; None takes all tokens.
        seed: seed of the sample, which depends on nothing else.
        size: tokens of a block, at most.
        places: (tokens,) row of the second array that holds the token of each row of the first;
            None is the same row.

    Raises:
        InputError: ``max_tokens`` is below 2, or the arrays do not hold the same tokens.
    """
    if max_tokens is not None and max_tokens < 2:
        raise InputError(f"max_tokens is {max_tokens}; give at least 2, or None for all tokens")
    blocks = aligned_blocks(arrays, size)
    n_tokens = arrays[0].shape[0]
    drawn = sampled_rows(n_tokens, max_tokens, seed)
    if len(drawn) == n_tokens and places is None:
        return blocks
    rows = [drawn] * len(arrays) if places is None else [drawn, places[drawn]]
    return gathered_blocks(arrays, rows, size)


def _even(tokens: int, size: int) -> list[int]:
    """Tokens of the parts of a block, which differ by one at most."""
    parts = max(1, -(-tokens // size))
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def sampled_rows(available: int, most: int | None, seed: int | Sequence[int]) -> NDArray[np.int64]:
    """Rows of a uniform sample, ascending; all where there are no more.

    Args:
        available: rows that there are.
        most: rows of the sample; None takes all.
        seed: Seed of the sample, which depends on nothing else.
    """
    drawn = np.arange(available)
    if most is None or available <= most:
        return drawn
    drawn = np.random.default_rng(seed).choice(available, most, replace=False, shuffle=False)
    drawn.sort()
    return drawn


def gathered_blocks(
    arrays: Sequence[da.Array], rows: Sequence[NDArray[np.int64]], size: int = SAMPLE_ROWS
) -> Blocks:
    """Blocks of chosen tokens, read once and held; in the order in which the first array has them.

    Call it inside `use_scheduler`.

    Args:
        arrays: (token, layer, hidden) each.
        rows: Rows of each array, (chosen,); element i is the same token in all.
        size: tokens of a block, at most.
    """
    return hold(chosen_blocks(arrays, rows, size))[0]


def chosen_blocks(
    arrays: Sequence[da.Array], rows: Sequence[NDArray[np.int64]], size: int = SAMPLE_ROWS
) -> Blocks:
    """As `gathered_blocks`, but nothing is read yet."""
    order = np.argsort(rows[0], kind="stable")
    cuts = np.array_split(order, -(-len(order) // size))
    columns = [
        _gather(array, [rows_of_array[cut] for cut in cuts])
        for array, rows_of_array in zip(arrays, rows, strict=True)
    ]
    return list(zip(*columns, strict=True))


def cut_blocks(array: da.Array, cuts: Sequence[NDArray[np.int64]]) -> Blocks:
    """A block for each set of rows of an array, in the order of the rows; nothing is read yet.

    Args:
        array: (token, layer, hidden).
        cuts: rows of each block.
    """
    return [(block,) for block in _gather(array, cuts)]


def hold(*blocks: Blocks) -> list[Blocks]:
    """Read blocks once and hold them; what several need is read once for all. See `sampled_blocks`.

    Call it inside `use_scheduler`.
    """
    return [list(persisted) for persisted in dask_persist(*blocks)]  # type: ignore[no-untyped-call]


def _gather(array: da.Array, cuts: Sequence[NDArray[np.int64]]) -> list[Delayed]:
    """A delayed block for each set of rows, out of the chunks that hold them."""
    chunks = array.rechunk({1: -1, 2: -1}).to_delayed().ravel()  # type: ignore[no-untyped-call]
    starts = np.cumsum([0, *array.chunks[0]])
    blocks = []
    for rows in cuts:
        block_of_row = np.searchsorted(starts, rows, side="right") - 1
        pieces, places = [], []
        for chunk in np.unique(block_of_row).tolist():
            of_chunk = np.flatnonzero(block_of_row == chunk)
            pieces.append(delayed(_take)(chunks[chunk], rows[of_chunk] - starts[chunk]))
            places.append(of_chunk)
        blocks.append(delayed(_concatenate)(pieces, np.concatenate(places)))
    return blocks


def tree_reduce(
    blocks: Blocks,
    leaf: Callable[..., T],
    merge: Callable[[T, T], T],
) -> Delayed:
    """The result of all blocks as one delayed value: ``leaf`` of each block, merged pairwise.

    Neighbours are merged first, so that with w workers about w + log₂(blocks) partial results are
    alive at a time.

    Args:
        blocks: Arguments of ``leaf``, one tuple per block; at least one.
        leaf: picklable; from one block (an array per element of the tuple) to a partial result.
        merge: picklable; associative; must not change its operands.
    """
    level: list[Delayed] = [delayed(_leaf)(leaf, *block) for block in blocks]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [delayed(merge)(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def check_finite(values: NDArray[np.floating[Any]]) -> None:
    """Raises NonFiniteError where sums over (layers, hidden) show NaN or infinity in a layer."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise NonFiniteError(
            f"the activations hold NaN or infinity in {len(bad)} of {len(values)} layers (the "
            f"first is number {bad[0]} of those read); check them with `bertvision store verify`"
        )


def _leaf(leaf: Callable[..., T], *block: Any) -> T:
    # sums over axes in another order in memory add in another order, and an array that came from
    # another process is in order
    return leaf(*(np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for x in block))


def _take(block: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    taken: NDArray[Any] = block[rows]
    return taken


def _concatenate(parts: list[NDArray[Any]], places: NDArray[np.int64]) -> NDArray[Any]:
    """The parts behind one another, each row where it belongs."""
    block = np.empty((len(places), *parts[0].shape[1:]), parts[0].dtype)
    block[places] = np.concatenate(parts)
    return block
