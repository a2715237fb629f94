"""The intrinsic dimension of hidden states, from the two nearest neighbours of each token.

Facco et al. (2017), *Estimating the intrinsic dimension of datasets by a minimal neighborhood
information* (TwoNN); Ansuini et al. (2019), *Intrinsic dimension of data representations in deep
neural networks*, followed it through layers.
"""

from __future__ import annotations

from typing import Annotated, Unpack

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import LabelledResult, Variable
from bertvision.pipelines.declare import OnDask, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Tags, parse_tags

FITTED = 0.9
"""Share of the tokens that the line is fitted to: those whose two neighbours are least apart."""
FEWEST = 20
"""Distinct vectors that an estimate takes at least."""


class TwoNnResult(LabelledResult):
    """Intrinsic dimension by snapshot and layer."""

    kind = "twonn"
    heading = "Intrinsic dimension (TwoNN)"
    caption = "Intrinsic dimension of the hidden states of each layer"
    reading = (
        "Intrinsic dimension: how many coordinates the tokens' hidden states need near each token, "
        "mean ± standard deviation over samples. Distinct: tokens of a sample without repeats."
    )
    seen = "Lines: the intrinsic dimension of each layer."
    variables = {
        "dimension": Variable("snapshot layer", "dimension", digits=1, sd=True),
        "distinct": Variable("snapshot layer", "distinct", digits=0),
        "tokens": Variable("snapshot", "tokens", digits=0),
    }

    def remarks(self) -> list[str]:
        """A sentence where there is no deviation."""
        alone = bool(self.dataset.dimension_sd.isnull().any())
        return ["Without ±: one sample was taken, or all tokens are in it."] if alone else []


def intrinsic_dimension(vectors: NDArray[np.floating]) -> float:
    """Estimate the intrinsic dimension of distinct vectors (Facco et al., equations 3 to 5).

    The ratio μ of the distances to the second and the first neighbour has the distribution
    1 − μ⁻ᵈ, so that −log(1 − F(μ)) over log μ is a line through 0 with slope d.

    Args:
        vectors: (vectors, hidden), no two alike.

    Returns:
        The dimension; NaN of fewer than 20 vectors.
    """
    n = int(FITTED * len(vectors))
    if len(vectors) < FEWEST:
        return np.nan
    x = vectors.astype(np.float64)
    centred = x - x.mean(axis=0)
    lengths = (centred**2).sum(axis=1)
    squared = lengths[:, None] + lengths - 2 * centred @ centred.T
    np.fill_diagonal(squared, np.inf)
    # that is rounded, so the distances to the nearest few are computed anew
    near = np.argpartition(squared, 3, axis=1)[:, :4]
    nearest = np.sort(np.linalg.norm(x[:, None] - x[near], axis=2), axis=1)
    ratios = np.log(np.sort(nearest[:, 1] / nearest[:, 0])[:n])
    missing = -np.log1p(-np.arange(1, n + 1) / len(x))
    return float(ratios @ missing / (ratios @ ratios))


@job
def twonn(
    checkpoint: Tags,
    *,
    split: str = "dev",
    max_tokens: Annotated[int, Option("Tokens of a sample, at most.", ge=FEWEST)] = 2_000,
    repeats: Annotated[int, Option("Samples of each snapshot.", ge=1)] = 3,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> TwoNnResult:
    """Estimate the intrinsic dimension of hidden states in each layer.

    The estimate comes from the distances of each token to its two nearest neighbours (TwoNN).

    Examples:
        >>> import bertvision
        >>> result = bertvision.twonn("0.5e,1e", max_tokens=200)
        >>> result.to_xarray().dimension.sizes
        Frozen({'snapshot': 2, 'layer': 3})

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.

    Raises:
        UnknownNameError: There is no such snapshot or split.
        InputError: A split has fewer than 20 tokens, or ``plot`` does not end in ``.svg``.
        ProvenanceError: The snapshots do not hold the same layers.
    """
    request = Request(twonn, locals())
    splits = request.splits(tuple(dict.fromkeys(parse_tags(checkpoint))), split, whole=False)
    layers = request.same_layers()
    if (fewest := min(x.record.tokens for x in splits)) < FEWEST:
        raise InputError(f"--split {split} holds {fewest} tokens: name one with {FEWEST} or more")

    def measure() -> TwoNnResult:
        import xarray as xr

        shape = (repeats, len(splits), len(layers))
        dimension, distinct = np.full(shape, np.nan), np.full(shape, np.nan)
        sizes = [min(max_tokens, x.record.tokens) for x in splits]
        for k in range(repeats):
            for i, states in enumerate(request.samples(max_tokens, [seed, k])):
                if k and sizes[i] == splits[i].record.tokens:
                    continue  # all tokens are one sample
                for j in range(len(layers)):
                    vectors = np.unique(states[:, j], axis=0)
                    dimension[k, i, j] = intrinsic_dimension(vectors)
                    distinct[k, i, j] = len(vectors)
        dims = ("sample", "snapshot", "layer")
        samples = xr.Dataset(
            {"dimension": (dims, dimension), "distinct": (dims, distinct)},
            {"snapshot": list(request.tags), "layer": list(layers)},
        )
        dataset = samples.mean("sample")
        dataset["dimension_sd"] = samples.dimension.std("sample", ddof=1)
        dataset["tokens"] = ("snapshot", sizes)
        return TwoNnResult(dataset.assign_attrs(title=f"Intrinsic dimension, {split}"))

    return request.answer(TwoNnResult, measure)
