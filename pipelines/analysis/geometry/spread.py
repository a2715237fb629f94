"""What the moments of vectors say of how they spread: variance, correlation, outlier channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertvision.pipelines.analysis.sums.moments import Array, Moments
from bertvision.pipelines.scheduler import map_here

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What is told of the channels of a layer: the least, the quartiles, the largest."""


class Spread(NamedTuple):
    """How the vectors of each layer spread; NaN where they do not vary.

    Attributes:
        explained_variance: (layers, components) share of the variance in the first k principal
            components; k / hidden of white vectors.
        mean_share: (layers,) squared length of the mean vector, as a part of the vectors' mean
            squared length.
        sd: (layers, quantiles) of the channels' standard deviations σ_j.
        gamma: (layers, quantiles) of the channels' γ_j = mean over k of ρ_jk²; 1 / hidden of white
            vectors, 1 where all channels say the same.
        mean_correlation: (layers,) mean of the absolute correlations |ρ_jk| of two channels.
        dominant: (layers,) the least part of the channels that holds half of the variance; 0.5
            where all vary alike.
    """

    explained_variance: Array
    mean_share: Array
    sd: Array
    gamma: Array
    mean_correlation: Array
    dominant: Array

    @classmethod
    def of(cls, moments: Moments, variances: Array, components: Sequence[int]) -> Spread:
        """The spread of vectors with these moments.

        The statistics are those that Zhou et al. (2021), *IsoBN: Fine-Tuning BERT with Isotropic
        Batch Normalization*, section 3, take of [CLS].

        Args:
            moments: with covariances.
            variances: (layers, hidden) of the principal components, falling.
            components: numbers of principal components.
        """
        layers = zip(moments.mean, moments.covariance(), variances, strict=True)
        found = map_here(lambda of: _layer(*of, components), list(layers))
        return cls(*(np.array(column) for column in zip(*found, strict=True)))


class Rounding(NamedTuple):
    """What an encoding's rounding adds to the variance of each channel.

    Attributes:
        variance: (layers, hidden) of a quantised encoding, or 0.
        relative: Root mean square error of a float encoding, as a part of the value.
    """

    variance: Array | float = 0.0
    relative: float = 0.0

    def share(self, moments: Moments) -> Array:
        """Part of the variance that is rounding, (layers,), at most 1; NaN where nothing varies.

        The larger of two: of the variance in all channels, and of that in the median channel, which
        a few channels with most of the variance would hide.

        Args:
            moments: Moments of the decoded vectors.
        """
        variance = moments.variance()
        rounding = self.variance + self.relative**2 * (variance + moments.mean**2)
        shares = []
        for of_layer, total in zip(rounding, variance, strict=True):
            varies = total > 0  # a channel that does not has nothing to hide
            if not varies.any():
                shares.append(np.nan)
                continue
            whole = of_layer.sum() / total.sum()
            shares.append(max(whole, np.median(of_layer[varies] / total[varies])))
        return np.clip(shares, None, 1.0)


def outlier_channels(moments: Moments, outlier_sd: float) -> list[list[int]]:
    """By layer the channels whose mean or standard deviation is far from that of the others.

    Args:
        moments: of the vectors.
        outlier_sd: how many standard deviations over the channels are far.
    """
    far = np.zeros(moments.mean.shape, dtype=bool)
    for statistic in (moments.mean, np.sqrt(moments.variance())):
        centred = statistic - statistic.mean(axis=1, keepdims=True)
        far |= np.abs(centred) > outlier_sd * centred.std(axis=1, keepdims=True)
    return [np.flatnonzero(layer).tolist() for layer in far]


def _layer(
    mean: Array, covariance: Array, variances: Array, components: Sequence[int]
) -> tuple[object, ...]:
    variance = covariance.diagonal()
    total, length = variance.sum(), variance.sum() + mean @ mean
    share = mean @ mean / length if length > 0 else np.nan
    if not total > 0:
        none = np.full(len(QUANTILES), np.nan)
        return np.full(len(components), np.nan), share, none, none, np.nan, np.nan
    held = np.cumsum(variances.clip(min=0))
    explained = held[np.array(components) - 1] / held[-1]
    sd = np.sqrt(variance)
    varies = sd > 0  # a channel that does not has no correlation
    rho = covariance[np.ix_(varies, varies)] / np.outer(sd[varies], sd[varies])
    k = len(rho)
    apart = (np.abs(rho).sum() - np.trace(rho)) / (k * (k - 1)) if k > 1 else np.nan
    largest = np.cumsum(np.sort(variance)[::-1])
    half = (np.searchsorted(largest, 0.5 * total) + 1) / len(variance)
    gamma = np.quantile((rho**2).mean(axis=1), QUANTILES)
    return explained, share, np.quantile(sd, QUANTILES), gamma, apart, half
