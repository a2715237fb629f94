"""Representational similarity analysis (RSA) of every layer with every layer, of sampled tokens.

Merchant et al. (2020), *What Happens To BERT Embeddings During Fine-tuning?*: cosines between the
tokens of a sample in one encoder, the same in the other, and Pearson's correlation of the two over
all pairs of different tokens. In the variant of Abnar et al. (2019), *Blackbox meets blackbox*, the
correlation is that of one token's cosines with all others, averaged over tokens.

Each layer has a cosine for every pair of tokens. They are computed in tiles of tokens × tokens; the
diagonal, a token with itself, never enters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Unpack

import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.moments import (
    Array,
    Block,
    Moments,
    each_merged,
    each_of,
    slabs,
)
from bertvision.pipelines.analysis.reduce import (
    Blocks,
    check_finite,
    gathered_blocks,
    tree_reduce,
)
from bertvision.pipelines.analysis.request import Request, check_layers
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Keeps, Labels, Numbers
from bertvision.pipelines.analysis.sides import joined_rows
from bertvision.pipelines.declare import OnDask, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, HeatMap, curves
from bertvision.pipelines.reading import Names, Tag, parse_names, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.scheduler import compute, use_scheduler

if TYPE_CHECKING:
    import dask.array as da


Matrices = Annotated[Array, Axes.of("splits", "repeats", "layers_x", "layers_y")]
OfSplits = Annotated[tuple[Count, ...], Axes.of("splits")]


@dataclass(frozen=True, eq=False, repr=False)
class RsaResult(AnalysisResult):
    """RSA of the layers of two snapshots, on one split or several beside each other.

    Attributes:
        of_pairs: (splits, repeats, layers_x, layers_y) correlation over pairs of tokens; NaN where
            a layer has a token of length 0, or cosines that do not vary.
        of_tokens: (splits, repeats, layers_x, layers_y) the variant: mean over tokens.
        x: Snapshot of the rows, for titles.
        y: Snapshot of the columns.
        splits: names of the splits.
        layers_x: layer numbers of the rows (0 = embedding output).
        layers_y: layer numbers of the columns.
        n_tokens: Tokens of a sample, by split.
        n_available: Tokens of each split.
        seed: Seed of the samples.
    """

    kind = "rsa"
    keeps: ClassVar[Keeps] = {"int8": "values", "int4": "course"}
    heading = "RSA: how tokens lie to each other"
    caption = "RSA: how alike the cosines between tokens are in the same layer of two snapshots"
    reading = (
        "RSA: how alike the cosines between tokens are in the same layer of both, 1 at most, "
        "mean ± standard deviation over samples; by token: the correlation of each token's "
        "cosines with all others, averaged. Layer × layer is in the figure, and what --csv and "
        "--json write."
    )
    seen = (
        "Lines: each layer beside the same layer of the other snapshot. Heat maps of layer × "
        "layer: the deeper the colour, the more alike the cosines between tokens are."
    )

    named = ("x", "y")

    of_pairs: Matrices
    of_tokens: Matrices
    x: str
    y: str
    splits: Labels
    layers_x: Numbers
    layers_y: Numbers
    n_tokens: OfSplits
    n_available: OfSplits
    seed: int

    @property
    def repeats(self) -> int:
        """Samples of each split."""
        return int(self.of_pairs.shape[1])

    def title(self) -> str:
        """One line that says what was measured on how much."""
        counts = ", ".join(
            f"{n:,} of {available:,} tokens of {split}"
            for split, n, available in zip(
                self.splits, self.n_tokens, self.n_available, strict=True
            )
        )
        return f"RSA, {self.x} × {self.y}, {self.repeats} × {counts}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each split and pair of layers: means and deviations over repeats."""
        whole = np.equal(self.n_tokens, self.n_available)
        values = {}
        for name, drawn in (("rsa", self.of_pairs), ("by_token", self.of_tokens)):
            values[name] = drawn.mean(axis=1)
            values[f"{name}_sd"] = np.full_like(values[name], np.nan)
            if self.repeats > 1:
                values[f"{name}_sd"][~whole] = drawn[~whole].std(axis=1, ddof=1)
        labels = {"split": self.splits, "layer_x": self.layers_x, "layer_y": self.layers_y}
        return self.listed(labels, values)

    def same_layers(self) -> list[dict[str, Any]]:
        """The rows of a layer beside the layer of the same number."""
        return [row for row in self.rows() if row["layer_x"] == row["layer_y"]]

    def shown(self) -> list[dict[str, Any]]:
        """The rows of `same_layers`."""
        return self.same_layers()

    def columns(self) -> list[Column]:
        """Both variants, with their deviations."""
        return [
            Column("layer_x", "layer", "text"),
            Column("split", "split", "text"),
            Column("rsa", "RSA", digits=3, sd=True),
            Column("by_token", "by token", digits=3, sd=True),
        ]

    def remarks(self) -> list[str]:
        """Names the splits of which there is one sample alone."""
        counts = zip(self.splits, self.n_tokens, self.n_available, strict=True)
        whole = [split for split, n, available in counts if n == available]
        one = f"All tokens of {', '.join(whole)} entered: there is one sample of them."
        return [one] if whole else []

    def charts(self) -> dict[str, Chart]:
        """Both variants of the layers of the same number, then a heat map for each split."""
        charts: dict[str, Chart] = {}
        if rows := self.same_layers():
            for key, label in (("rsa", "RSA"), ("by_token", "RSA by token")):
                charts[key] = curves(
                    [row | {"pair": f"{self.x} and {self.y}"} for row in rows],
                    key,
                    f"{label} of the same layer (correlation)",
                    by=["pair", "split"],
                    places="layer_x",
                    over="samples",
                )
        axes = (f"layer of {self.x}", self.layers_x, f"layer of {self.y}", self.layers_y)
        for split, values in zip(self.splits, self.of_pairs, strict=True):
            mean = values.mean(axis=0)
            title, signed = f"RSA on {split} (correlation)", bool((mean < 0).any())
            charts[f"map_{split}"] = HeatMap(
                *axes, title, mean, signed=signed, title=split, missing="layer does not vary"
            )
        return charts


ROWS = 256
"""Tokens of one edge of a tile: its cosines, of all layers, are to stay in the cache."""


class Correlations(NamedTuple):
    """How alike the cosines of the layers of two sides are; NaN where a layer has none that vary.

    Attributes:
        of_pairs: (layers_x, layers_y) over all pairs of different tokens.
        of_tokens: (layers_x, layers_y) mean over tokens of the correlation over all others.
        n: tokens.
    """

    of_pairs: Array
    of_tokens: Array
    n: int


def cosine_correlations(blocks: Blocks, depths: Sequence[int]) -> Correlations:
    """The correlations of every layer of the first side with every layer of the last.

    Costs tokens² · channels of all sides operations in float32; rows of cosines are summed in
    float32 over at most a block, then in float64.

    Args:
        blocks: Blocks of a sample that is held; an array per side, (tokens, layers, hidden).
        depths: layers of each side, of which there are one or two.

    Raises:
        NonFiniteError: NaN or infinity in the hidden states.
    """
    moments: list[Moments] = compute(tree_reduce(blocks, partial(each_of, Moments.of), each_merged))
    for m in moments:
        check_finite(m.sum_norm[:, None])
    # near 0 they lose no digits to their mean; a layer with a token of norm 0 has no cosines
    means = np.concatenate([m.cosine_by_channel().sum(axis=1) for m in moments])
    units = [tuple(delayed(_units)(part) for part in block) for block in blocks]
    rows: list[list[Delayed]] = [[] for _ in units]
    tile = delayed(partial(_tile, means=means, depths=tuple(depths)), nout=2)
    for i, one in enumerate(units):
        for j in range(i, len(units)):
            mine, theirs = tile(list(one), list(units[j]), i == j)
            rows[i].append(mine)
            if j > i:
                rows[j].append(theirs)
    complete: Blocks = [(delayed(_total)(parts),) for parts in rows]
    leaf = partial(_token_sums, n=moments[0].n)
    sums: _TokenSums = compute(tree_reduce(complete, leaf, _TokenSums.merge))
    return Correlations(sums.of_pairs(moments[0].n), sums.of_tokens / moments[0].n, moments[0].n)


class _Row(NamedTuple):
    """Sums over the other tokens, for each token of a block."""

    x: Array
    """(tokens, layers_x) Σ k."""
    y: Array
    xx: Array
    """(tokens, layers_x) Σ k²."""
    yy: Array
    xy: Array
    """(tokens, layers_x, layers_y) Σ k l."""


class _TokenSums(NamedTuple):
    """Sums over tokens: of their rows, and of their correlations."""

    row: _Row
    of_tokens: Array

    def merge(self, other: _TokenSums) -> _TokenSums:
        """The sums of both."""
        row = _Row(*(a + b for a, b in zip(self.row, other.row, strict=True)))
        return _TokenSums(row, self.of_tokens + other.of_tokens)

    def of_pairs(self, n: int) -> Array:
        """The correlation over all pairs of different tokens."""
        return _correlation(self.row, n * (n - 1))


def _correlation(row: _Row, n: int) -> Array:
    """(…, layers_x, layers_y) Pearson's correlation from sums over ``n`` cosines."""
    x, y = row.x / n, row.y / n
    covariance = row.xy / n - x[..., :, None] * y[..., None, :]
    product = (row.xx / n - x**2)[..., :, None] * (row.yy / n - y**2)[..., None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.where(product > 0, covariance / np.sqrt(product), np.nan)
    return result


def _units(block: Block) -> NDArray[Any]:
    """(tokens, layers, hidden) of length 1; NaN of what has no direction."""
    units = np.empty(block.shape, kernels.PRODUCTS)
    start = 0
    for slab in slabs(block):
        norm = np.linalg.norm(slab, axis=2, keepdims=True)
        slab /= np.where(norm > 0, norm, np.nan)
        units[start : start + len(slab)] = slab
        start += len(slab)
    return units


def _tile(
    one: list[NDArray[Any]],
    other: list[NDArray[Any]],
    itself: bool,
    *,
    means: Array,
    depths: tuple[int, ...],
) -> tuple[_Row, _Row]:
    """The sums of the tokens of one block over those of another, and the other way round."""
    # what came from another worker may begin at any byte, and products of it round otherwise
    one = [np.require(x, requirements=("C", "A")) for x in one]
    other = one if itself else [np.require(y, requirements=("C", "A")) for y in other]
    mine, theirs = _zeros(len(one[0]), depths), _zeros(len(other[0]), depths)
    for start in range(0, len(one[0]), ROWS):
        for begin in range(start if itself else 0, len(other[0]), ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            pairs = [
                (x[rows, i], y[columns, i])
                for x, y in zip(one, other, strict=True)
                for i in range(x.shape[1])
            ]
            cosines = np.stack([x @ y.T for x, y in pairs])  # (layers, rows, columns)
            cosines -= means[:, None, None].astype(cosines.dtype)
            diagonal = itself and start == begin
            if diagonal:
                np.einsum("ltt->lt", cosines)[:] = 0
            _add(mine, rows, cosines, depths)
            if not diagonal:
                _add(mine if itself else theirs, columns, cosines.swapaxes(1, 2), depths)
    return mine, theirs


def _zeros(tokens: int, depths: tuple[int, ...]) -> _Row:
    x, y = (tokens, depths[0]), (tokens, depths[-1])
    return _Row(*map(np.zeros, (x, y, x, y, (*x, depths[-1]))))


def _add(row: _Row, tokens: slice, cosines: NDArray[Any], depths: tuple[int, ...]) -> None:
    """Adds what some tokens share with others: (layers, tokens, others)."""
    by_token = np.ascontiguousarray(cosines.swapaxes(0, 1))
    products = by_token @ by_token.swapaxes(1, 2)  # (tokens, layers, layers)
    sums = by_token.sum(axis=2, dtype=np.float64)
    squares = np.einsum("nll->nl", products)
    x, y = slice(depths[0]), slice(-depths[-1], None)
    row.x[tokens] += sums[:, x]
    row.y[tokens] += sums[:, y]
    row.xx[tokens] += squares[:, x]
    row.yy[tokens] += squares[:, y]
    row.xy[tokens] += products[:, x, y]


def _total(parts: list[_Row]) -> _Row:
    return _Row(*(sum(column[1:], start=column[0]) for column in zip(*parts, strict=True)))


def _token_sums(row: _Row, *, n: int) -> _TokenSums:
    of_tokens = _correlation(row, n - 1).sum(axis=0)
    return _TokenSums(_Row(*(part.sum(axis=0) for part in row)), of_tokens)


class Paired(NamedTuple):
    """The tokens of a split in two encoders.

    Attributes:
        x: (token, layer, hidden) activations, chunked along the tokens.
        y: Activations of the same tokens, perhaps in another order; its layers and hidden size may
            differ.
        rows_x: (tokens,) rows of x.
        rows_y: (tokens,) rows of y; element i is the same token as that of ``rows_x``.
    """

    x: da.Array
    y: da.Array
    rows_x: NDArray[np.int64]
    rows_y: NDArray[np.int64]


def rsa_of_arrays(
    splits: Mapping[str, Paired],
    *,
    n_tokens: int = 5_000,
    repeats: int = 10,
    seed: int = 0,
    scheduler: str = "threads",
    names: tuple[str, str] = ("x", "y"),
    layers_x: Sequence[int] | None = None,
    layers_y: Sequence[int] | None = None,
) -> RsaResult:
    """RSA of every layer of x with every layer of y, split by split.

    Costs tokens² · (layers_x · hidden_x + layers_y · hidden_y) operations in float32 a repeat; a
    sample is held, tokens · channels · 4 bytes twice. Sums are in float64: values differ by less
    than 1e-6 from those in float64.

    Args:
        splits: Splits by name; all with the same layers.
        n_tokens: Number of tokens of a sample, drawn without replacement; of a split that has no
            more, all enter.
        repeats: samples of a split, drawn independently.
        seed: Seed of the samples; they depend on it, on the repeat and on the number of tokens
            alone.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        names: Names of x and y, for titles.
        layers_x: layer numbers of x; 0, 1, … by default.
        layers_y: layer numbers of y; 0, 1, … by default.

    Raises:
        InputError: a split has fewer than 3 tokens, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    if n_tokens < 3 or repeats < 1:
        raise InputError(
            f"{n_tokens} tokens and {repeats} repeats: give at least 3 tokens and 1 repeat"
        )
    of_pairs, of_tokens = [], []
    with use_scheduler(scheduler, "rsa"):
        for name, split in splits.items():
            samples = _samples(name, len(split.rows_x), n_tokens, repeats, seed)
            arrays = (split.x,) if split.x is split.y else (split.x, split.y)
            depths = [array.shape[1] for array in arrays]
            drawn = []
            for sample in samples:
                rows = (split.rows_x[sample], split.rows_y[sample])
                drawn.append(
                    cosine_correlations(gathered_blocks(arrays, rows[: len(arrays)]), depths)
                )
            drawn = drawn * repeats if len(drawn) < repeats else drawn
            of_pairs.append([correlations.of_pairs for correlations in drawn])
            of_tokens.append([correlations.of_tokens for correlations in drawn])
    first = next(iter(splits.values()))
    sizes = tuple(len(split.rows_x) for split in splits.values())
    return RsaResult(
        of_pairs=np.array(of_pairs),
        of_tokens=np.array(of_tokens),
        x=names[0],
        y=names[1],
        splits=tuple(splits),
        layers_x=tuple(range(first.x.shape[1]) if layers_x is None else layers_x),
        layers_y=tuple(range(first.y.shape[1]) if layers_y is None else layers_y),
        n_tokens=tuple(min(n_tokens, n) for n in sizes),
        n_available=sizes,
        seed=seed,
    )


def _samples(
    split: str, available: int, n_tokens: int, repeats: int, seed: int
) -> list[NDArray[np.int64]]:
    """Numbers of the tokens of each sample; one of all tokens where there are no more."""
    if available < 3:
        raise InputError(f"RSA compares pairs of tokens: {split} has {available}, give at least 3")
    if available <= n_tokens:
        return [np.arange(available)]
    draws = (np.random.default_rng([seed, k]) for k in range(repeats))
    return [draw.choice(available, n_tokens, replace=False, shuffle=False) for draw in draws]


@job
def rsa(
    first: Tag,
    second: Tag,
    *,
    split: Names = "dev",
    max_tokens: Annotated[int, Option(ge=3)] = 5_000,
    repeats: Annotated[int, Option(ge=1)] = 10,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> RsaResult:
    """Compare how tokens are arranged in two snapshots (RSA).

    Tokens are sampled, and their similarities to each other correlated (representational similarity
    analysis).

    Examples:
        >>> import bertvision
        >>> alike = bertvision.rsa("0.5e", "1e", max_tokens=100, repeats=3)
        >>> alike.of_pairs.shape  # (splits, repeats, layers, layers)
        (1, 3, 3, 3)
        >>> [list(row) for row in alike.same_layers()][0]
        ['x', 'y', 'split', 'layer_x', 'layer_y', 'rsa', 'rsa_sd', 'by_token', 'by_token_sd']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have; several side by side, such as dev,mpqa-all.
        max_tokens: Largest seeded sample of tokens.
        repeats: Samples of each split.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a number is too small.
        ProvenanceError: the two do not hold the same tokens; the message names them.
    """
    request = Request(rsa, locals())
    names = tuple(dict.fromkeys(parse_names(split)))
    tags = parse_tag(first), parse_tag(second)
    stored = request.splits(tags, *names, whole=False)
    rows, columns = stored[: len(names)], stored[len(names) :]
    check_layers(rows)
    check_layers(columns)

    def measure() -> RsaResult:
        pairs = {}
        for name, x, y in zip(names, rows, columns, strict=True):
            states = x.dask()
            both = states, states if x.name == y.name else y.dask()
            pairs[name] = Paired(*both, *joined_rows((x, y)))
        return rsa_of_arrays(
            pairs,
            n_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            scheduler=request.scheduler,
            names=tags,
            layers_x=rows[0].record.layers,
            layers_y=columns[0].record.layers,
        )

    return request.answer(RsaResult, measure)
