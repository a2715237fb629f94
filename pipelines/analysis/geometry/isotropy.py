"""Isotropy of the hidden states of each layer: do vectors spread over all directions, or few?

Mean cosine of two different vectors (Ethayarajh 2019), share of the variance that the first
principal components explain, isotropy by the partition function and after the correction of Mu &
Viswanath (2018), the statistics of [CLS] of Zhou et al. (2021), outlier channels, and the channel
that adds most to the mean cosine (Timkey & van Schijndel 2021).

Two passes over the blocks: moments, then projections on the directions that these give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.geometry.isotropy_result import IsotropyResult
from bertvision.pipelines.analysis.geometry.partition import Bases, Partition, merged
from bertvision.pipelines.analysis.geometry.spread import (
    QUANTILES,
    Rounding,
    Spread,
    outlier_channels,
)
from bertvision.pipelines.analysis.sums.moments import Array, Block, Moments
from bertvision.pipelines.analysis.sums.reduce import (
    Blocks,
    aligned_blocks,
    check_finite,
    chosen_blocks,
    hold,
    sampled_rows,
    tree_reduce,
)
from bertvision.pipelines.scheduler import compute, use_scheduler

Rows = NDArray[np.int64]

ROWS = 2048
"""Vectors of a block: partial results hold covariances, and are worth so many."""


class _Measured(NamedTuple):
    """What the passes over a set of vectors give."""

    moments: Moments
    spread: Spread
    partition: Partition


def isotropy(
    snapshots: Mapping[str, da.Array],
    *,
    first: Mapping[str, Rows] | None = None,
    components: Sequence[int] = (1, 3, 10),
    outlier_sd: float = 6.0,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    name: str = "x",
    layers: Sequence[int] | None = None,
    rounding: Mapping[str, Sequence[Rounding]] | None = None,
) -> IsotropyResult:
    """Isotropy of every layer of snapshots, of their tokens and of [CLS].

    Costs vectors · layers · hidden² operations in float64 and 4 times as many in the type of the
    activations for each snapshot and set, and two eigenvalue problems of hidden size for each
    layer; a partial result holds the covariances, layers · hidden² · 8 bytes.

    Args:
        snapshots: by name (token, layer, hidden) float32 activations, chunked along the tokens, all
            of the same layers.
        first: by snapshot the rows of [CLS], which are then measured apart too.
        components: how many first principal components to sum the explained variance over.
        outlier_sd: threshold of the outlier channels. Kovaleva et al. (2021) take 3 for the
            parameters of the output LayerNorm; Bondarenko et al. (2021) take 6 for activations.
        max_tokens: size of the uniform sample of each set; None takes all.
        seed: of the samples.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: what they are of, for titles.
        layers: layer numbers; 0, 1, … by default.
        rounding: By snapshot what the encoding adds to the variance of tokens, and of [CLS]; by
            default nothing.

    Raises:
        InputError: fewer than two vectors, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    x = next(iter(snapshots.values()))
    hidden = x.shape[-1]
    if not components or not all(1 <= k <= hidden for k in components):
        raise InputError(
            f"components are {list(components)}; give numbers from 1 to the hidden size {hidden}"
        )
    if not outlier_sd > 0:
        raise InputError(f"outlier_sd is {outlier_sd}; give a number above 0, such as 6")
    if max_tokens is not None and max_tokens < 2:
        raise InputError(f"max_tokens is {max_tokens}; give at least 2, or None for all tokens")
    found: list[list[_Measured]] = []
    with use_scheduler(scheduler, "isotropy"):
        for snapshot, states in snapshots.items():
            rows = [np.arange(states.shape[0]), *([first[snapshot]] if first else [])]
            sets = _blocks(states, rows, max_tokens, seed)
            found.append([_measured(blocks, states, components) for blocks in sets])

    def each(value: Any) -> Array:
        return np.array([[value(of) for of in sets] for sets in found])

    shares = [
        [
            (rounding[tag][j] if rounding else Rounding()).share(of.moments)
            for j, of in enumerate(sets)
        ]
        for tag, sets in zip(snapshots, found, strict=True)
    ]
    # what does not vary has nothing left when its mean is taken out, but rounding errors
    varies = np.isfinite(each(lambda of: of.spread.mean_correlation))
    cosines = [[of.moments.cosine_by_channel() for of in sets] for sets in found]
    by_channel = np.array(cosines)
    top = by_channel.argmax(axis=-1)
    bases_removed = hidden - found[0][0].partition.sum_unit.shape[1]
    return IsotropyResult(
        mean_cosine=by_channel.sum(axis=-1),
        mean_norm=each(lambda of: of.moments.sum_norm / of.moments.n),
        mean_share=each(lambda of: of.spread.mean_share),
        components=tuple(components),
        explained_variance=each(lambda of: of.spread.explained_variance),
        log_ratio=each(lambda of: of.partition.log_ratio()),
        removed=bases_removed,
        corrected_cosine=np.where(varies, each(lambda of: of.partition.corrected_cosine()), np.nan),
        corrected_ratio=np.where(varies, each(lambda of: of.partition.corrected_ratio()), np.nan),
        quantiles=QUANTILES,
        sd=each(lambda of: of.spread.sd),
        gamma=each(lambda of: of.spread.gamma),
        mean_correlation=each(lambda of: of.spread.mean_correlation),
        dominant=each(lambda of: of.spread.dominant),
        top_channel=_tuples(top.tolist()),
        top_cosine=np.take_along_axis(by_channel, top[..., None], axis=-1)[..., 0],
        outlier_channels=_tuples(
            [[outlier_channels(of.moments, outlier_sd) for of in sets] for sets in found]
        ),
        outlier_sd=outlier_sd,
        rounding=np.array(shares),
        snapshots=tuple(snapshots),
        sets=("tokens", "[CLS]") if first else ("tokens",),
        name=name,
        layers=tuple(range(x.shape[1]) if layers is None else layers),
        n_vectors=tuple(tuple(of.moments.n for of in sets) for sets in found),
        n_available=tuple(
            (states.shape[0], *([len(first[snapshot])] if first else []))
            for snapshot, states in snapshots.items()
        ),
        seed=seed,
    )


def _blocks(
    states: da.Array, rows: Sequence[Rows], max_tokens: int | None, seed: int
) -> list[Blocks]:
    """The blocks of each set: what is sampled is read once for all and held, else streamed."""
    sampled = [of[sampled_rows(len(of), max_tokens, seed)] for of in rows]
    whole = aligned_blocks((states,), ROWS)
    parts = [
        whole if len(of) == states.shape[0] else chosen_blocks((states,), [of], ROWS)
        for of in sampled
    ]
    held = iter(hold(*(part for part in parts if part is not whole)))
    return [part if part is whole else next(held) for part in parts]


def _measured(blocks: Blocks, states: da.Array, components: Sequence[int]) -> _Measured:
    leaf = partial(_moments, shape=states.shape[1:])
    moments = compute(tree_reduce(blocks, leaf, Moments.merge))
    if moments.n < 2:
        raise InputError("isotropy compares vectors; there is only one")
    check_finite(moments.m2)
    bases = Bases.of(moments, np.result_type(states.dtype, np.float32))
    shared = delayed(bases)  # one object in the graph, not one in each task
    partition = compute(tree_reduce([(*block, shared) for block in blocks], Partition.of, merged))
    return _Measured(moments, Spread.of(moments, bases.variances, components), partition)


def _moments(block: Block, shape: tuple[int, int]) -> Moments:
    moments = Moments.empty(*shape, covariance=True)
    moments.add(block)
    return moments


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
