"""Hidden states in the coordinates of their principal directions, each of variance one.

Correlations of such coordinates need no large differences of large sums: a product in float32 is
right to 2⁻²⁴ whatever the variance of the channels it came from. The coordinates themselves, and
the covariances they come from, are computed in float64.

Canonical correlations of every layer of one split with every layer of another, streamed.

SVCCA (Raghu et al. 2017, *SVCCA: Singular Vector Canonical Correlation Analysis*): the mean
correlation of the directions that hold most of the variance. PWCCA (Morcos et al. 2018, *Insights
on representational similarity in neural networks with canonical correlation*, eq. 4 and 5): of all
directions, each weighted by how much of its own layer it makes up.

Two passes over the blocks: covariances of each layer in float64, then products of whitened
coordinates, in float32 and summed in float64. Values differ by less than 1e-5 from those in
float64.

Run it on the splits of a workspace.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Unpack

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.errors import BertvisionWarning, InputError
from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.kernels import FEATURES, Pair, groups, product, wanted_pairs
from bertvision.pipelines.analysis.layer_maps import LayerByLayer, Matrix
from bertvision.pipelines.analysis.moments import (
    Array,
    Block,
    Moments,
    each_merged,
    each_of,
    layer_slabs,
)
from bertvision.pipelines.analysis.reduce import Blocks, check_finite, sampled_blocks, tree_reduce
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import Axes, Keeps
from bertvision.pipelines.analysis.sides import pair
from bertvision.pipelines.declare import MaxTokens, OnDask, OtherWorkspace, Seed, job
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.scheduler import compute, map_here, use_scheduler

if TYPE_CHECKING:
    import dask.array as da


_moments = partial(each_of, partial(Moments.of, covariance=True))
NULL = 1e-12
"""A direction with less variance than this part of the largest is none."""


class WhiteLayer(NamedTuple):
    """Facts about a layer that remain when its coordinates are computed.

    Attributes:
        loadings: (hidden, hidden) see `Whitening`.
        rank: Number of directions.
        kept: Number that holds the share of the variance that was asked for.
    """

    loadings: Array
    rank: int
    kept: int


class Whitening(NamedTuple):
    """How the hidden states of one side are whitened; directions by falling variance.

    Attributes:
        mean: (layers, hidden) subtracted.
        directions: (layers, hidden, hidden) a column for each: v / √(λ + ridge), 0 of none.
        loadings: (layers, hidden, hidden) a column for each: λ v / √(λ + ridge), which is the
            covariance of the channels with the coordinate.
        ranks: per layer, how many directions there are.
        kept: per layer, how many of them hold the share of the variance that was asked for.
    """

    mean: Array
    directions: Array
    loadings: Array
    ranks: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, moments: Moments, keep: float, ridge: float) -> Whitening:
        """The whitening of hidden states with these moments.

        Args:
            moments: Moments of all tokens, with covariances.
            keep: share of the variance.
            ridge: added to the variance of every direction, as a part of the channels' mean one.

        Raises:
            NonFiniteError: NaN or infinity in the hidden states.
        """
        check_finite(moments.m2)
        covariances = moments.covariance()
        directions, loadings = np.zeros_like(covariances), np.zeros_like(covariances)
        ranks, eigenvectors = [], []
        for i, covariance in enumerate(covariances):
            values, vectors = np.linalg.eigh(covariance)
            values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
            rank = int((values > NULL * values[0]).sum()) if values[0] > 0 else 0
            values, vectors = values[:rank], vectors[:, :rank]
            scale = np.sqrt(values + ridge * values.sum() / len(covariance))
            directions[i, :, :rank] = vectors / scale
            loadings[i, :, :rank] = vectors * (values / scale)
            share = np.cumsum(values) / values.sum()
            ranks.append(rank)
            # what rounding leaves of 1 must not cost a direction
            eigenvectors.append(min(rank, int(np.searchsorted(share, keep - 1e-12)) + 1))
        return cls(moments.mean, directions, loadings, tuple(ranks), tuple(eigenvectors))

    def layer(self, i: int) -> WhiteLayer:
        """Facts about a layer.

        Args:
            i: its place.
        """
        return WhiteLayer(self.loadings[i], self.ranks[i], self.kept[i])

    def apply(self, block: Block) -> NDArray[Any]:
        """(tokens, layers, hidden) coordinates, of type `kernels.PRODUCTS`."""
        whitened = np.empty(block.shape, kernels.PRODUCTS)
        # what came from another worker may begin at any byte, and products of it round otherwise
        planes = np.require(self.directions, requirements=("C", "A"))
        for rows, i, slab in layer_slabs(block):
            slab -= self.mean[i]
            whitened[rows, i] = slab @ planes[i]
        return whitened


TOKENS_PER_CHANNEL = 10
"""With fewer tokens than so many for each channel, correlations are too high by chance."""


@dataclass(frozen=True, eq=False, repr=False)
class CcaResult(LayerByLayer):
    """Canonical correlations of the layers of two splits; see `LayerByLayer` for the rest.

    Attributes:
        pwcca: (layers_x, layers_y) projection-weighted; NaN where a layer does not vary.
        svcca: (layers_x, layers_y) mean over the directions that are kept.
        kept_x: per layer of x, how many directions hold ``keep`` of the variance.
        kept_y: the same of y.
        keep: share of the variance.
        ridge: added to the variance of every direction, as a part of the channels' mean variance.
        hidden: channels of the wider side.
    """

    kind = "cca"
    keeps: ClassVar[Keeps] = {"int8": "values", "int4": "course"}
    heading = "SVCCA and PWCCA: what layers hold of each other"
    caption = "PWCCA: layers of the first snapshot (rows) and of the second (columns)"
    reading = (
        "Canonical correlation asks what of one layer can be read from another by any linear map, "
        "however small its variance: 1 where all can. PWCCA weights each direction by what it "
        "makes up of its layer; SVCCA is the mean over the directions that hold most of the "
        "variance. Unrelated layers are above 0 by chance, the more the fewer tokens there are."
    )
    seen = "Heat maps of layer × layer; the deeper the colour, the more one layer tells of another."
    quantity = "correlation"

    pwcca: Matrix
    svcca: Matrix
    kept_x: Annotated[tuple[Count, ...], Axes.of("layers_x")]
    kept_y: Annotated[tuple[Count, ...], Axes.of("layers_y")]
    keep: float
    ridge: float
    hidden: Count

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return f"SVCCA and PWCCA, {self.tokens()}"

    def measures(self) -> dict[str, str]:
        """Both, with the share of the variance that SVCCA keeps."""
        return {"pwcca": "PWCCA", "svcca": f"SVCCA, {100 * self.keep:g} % of the variance"}

    def remarks(self) -> list[str]:
        """Says that there were too few tokens, where there were."""
        few = self.n_tokens < TOKENS_PER_CHANNEL * self.hidden
        return [too_few(self.n_tokens, self.hidden)] if few else []


def too_few(tokens: int, hidden: int) -> str:
    """Sentence on correlations that are too high by chance.

    Args:
        tokens: Tokens that entered.
        hidden: channels of the wider side.
    """
    return (
        f"{tokens:,} tokens are few for canonical correlations of {hidden:,} channels, which are "
        f"too high by chance: take {TOKENS_PER_CHANNEL * hidden:,} or more (--max-tokens), or "
        "compare values of the same number of tokens alone"
    )


def cca_of_arrays(
    x: da.Array,
    y: da.Array,
    *,
    places: NDArray[np.int64] | None = None,
    keep: float = 0.99,
    ridge: float = 1e-6,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    names: tuple[str, str] = ("x", "y"),
    layers_x: Sequence[int] | None = None,
    layers_y: Sequence[int] | None = None,
) -> CcaResult:
    """SVCCA and PWCCA of every layer of x with every layer of y.

    Costs 2 · tokens · (layers_x · hidden_x) · (layers_y · hidden_y) operations in float32, half of
    it where x is y, and an eigenvalue problem of hidden size for each pair of layers.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        y: (token, layer, hidden) activations of the same tokens; its layers and hidden size may
            differ.
        places: (tokens,) row of y that holds the token of each row of x; None is the same row.
        keep: share of the variance whose directions SVCCA takes; 1 takes all.
        ridge: added to the variance of every direction, as a part of the channels' mean variance,
            so that directions of rounding errors count for nothing.
        max_tokens: size of the uniform sample of tokens; None takes all of them.
        seed: Seed of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        names: Names of x and y, for titles.
        layers_x: layer numbers of x; 0, 1, … by default.
        layers_y: layer numbers of y; 0, 1, … by default.

    Raises:
        InputError: the tokens do not match, are fewer than 2, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    if not 0 < keep <= 1:
        raise InputError(f"keep is {keep}; give a share of the variance above 0, such as 0.99")
    if not 0 <= ridge < 1:
        raise InputError(f"ridge is {ridge}; give a part of the variance below 1, such as 1e-6")
    arrays = (x,) if x is y else (x, y)
    tokens = min(x.shape[0], max_tokens or x.shape[0])
    hidden = max(x.shape[-1], y.shape[-1])
    if tokens < 2:
        raise InputError("canonical correlations need more than one token")
    if tokens < TOKENS_PER_CHANNEL * hidden:
        warnings.warn(too_few(tokens, hidden), BertvisionWarning, stacklevel=2)
    with use_scheduler(scheduler, "cca"):
        blocks = sampled_blocks(arrays, max_tokens, seed, FEATURES.rows(tokens), places)
        moments: list[Moments] = compute(tree_reduce(blocks, _moments, each_merged))
        sides = map_here(lambda m: Whitening.of(m, keep, ridge), moments)
        pwcca, svcca = _correlations(blocks, sides, moments[0].n)
    return CcaResult(
        x=names[0],
        y=names[1],
        layers_x=tuple(range(x.shape[1]) if layers_x is None else layers_x),
        layers_y=tuple(range(y.shape[1]) if layers_y is None else layers_y),
        n_tokens=moments[0].n,
        n_available=x.shape[0],
        seed=seed,
        pwcca=pwcca,
        svcca=svcca,
        kept_x=sides[0].kept,
        kept_y=sides[-1].kept,
        keep=keep,
        ridge=ridge,
        hidden=hidden,
    )


def _correlations(blocks: Blocks, sides: Sequence[Whitening], n: int) -> tuple[Array, Array]:
    """PWCCA and SVCCA, (layers_x, layers_y) each."""
    shapes = [side.mean.shape for side in sides]
    delayed_sides = list(map(delayed, sides))  # one object in the graph, not one in each task
    whitened: Blocks = [
        tuple(
            delayed(Whitening.apply)(side, part)
            for side, part in zip(delayed_sides, block, strict=True)
        )
        for block in blocks
    ]
    last = len(sides) - 1
    across = [p for p in wanted_pairs(shapes) if (p.side, p.other) == (0, last)]
    pwcca, svcca = (np.full((shapes[0][0], shapes[-1][0]), np.nan) for _ in range(2))
    for pairs in groups(across):
        leaf = partial(_products, pairs=pairs)
        products: list[Array] = compute(tree_reduce(whitened, leaf, _add))
        places = [(k, i, j) for k, p in enumerate(pairs) for i, j in p.places()]

        def of(place: tuple[int, int, int]) -> tuple[float, float, float]:
            k, i, j = place
            m = products[k][:, j - pairs[k].layers.start] / n  # noqa: B023  called in this turn
            one, other = sides[0].layer(i), sides[last].layer(j)
            # of one side, what is left of the diagonal is what is right of it, turned
            turned = _pwcca(m.T, other, one) if last == 0 and i != j else np.nan
            return _pwcca(m, one, other), _svcca(m, one, other), turned

        for (_, i, j), values in zip(places, map_here(of, places, "cca of layers"), strict=True):
            pwcca[i, j], svcca[i, j] = values[:2]
            if last == 0 and i != j:
                pwcca[j, i], svcca[j, i] = values[2], values[1]
    return pwcca, svcca


def _svcca(m: Array, x: WhiteLayer, y: WhiteLayer) -> float:
    """The mean correlation of the directions that are kept; NaN where there are none."""
    block = m[: x.kept, : y.kept]
    gram = block @ block.T if len(block) < block.shape[1] else block.T @ block
    return float(np.sqrt(np.linalg.eigvalsh(gram).clip(0, 1)).mean()) if gram.size else np.nan


def _pwcca(m: Array, x: WhiteLayer, y: WhiteLayer) -> float:
    """Σ α ρ / Σ α over canonical directions h of x, with α = Σ |⟨h, channel⟩| over its channels.

    Where y has fewer directions, of these, as in the code of Morcos et al. NaN where a side has
    none.
    """
    if y.rank < x.rank:
        return _pwcca(m.T, y, x)
    if x.rank == 0:
        return np.nan
    squares, vectors = np.linalg.eigh(m @ m.T)
    correlations = np.sqrt(squares[::-1][: x.rank].clip(0, 1))
    weights = np.abs(x.loadings @ vectors[:, ::-1][:, : x.rank]).sum(axis=0)
    return float(correlations @ weights / weights.sum())


def _products(*blocks: NDArray[Any], pairs: Sequence[Pair]) -> list[Array]:
    # what came from another worker may begin at any byte, and products of it round otherwise
    z = [np.require(block, requirements=("C", "A")) for block in blocks]
    return [product(z[p.side][:, p.layer], z[p.other][:, p.layers]) for p in pairs]


def _add(one: list[Array], other: list[Array]) -> list[Array]:
    return [a + b for a, b in zip(one, other, strict=True)]


@job
def cca(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    keep: float = 0.99,
    ridge: float = 1e-6,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> CcaResult:
    """Compare the layers of two snapshots by SVCCA and PWCCA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cca("0.5e", "1e", max_tokens=330)
        >>> alike.pwcca.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'pwcca', 'svcca']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        keep: Share of the variance whose directions SVCCA takes.
        ridge: Part of the channels' mean variance that is added to each direction.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a share is out of range.
        ProvenanceError: the two do not hold the same tokens.
    """
    request = Request(cca, locals())
    both = pair(request, parse_tag(first), parse_tag(second), split, beside)

    def measure() -> CcaResult:
        x, y, places = both.arrays()
        return cca_of_arrays(
            x,
            y,
            places=places,
            keep=keep,
            ridge=ridge,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=request.scheduler,
            **both.told(),
        )

    return request.answer(CcaResult, measure)
