"""The statistics of isotropy as one writes them with all hidden states in memory.

NumPy and scikit-learn on the float32 states as they were decoded, layer by layer, each quantity
computed once: one covariance serves the variances, the correlations and the components, and sums
of exponentials are shifted by hand, which takes a part of the time of `scipy.special.logsumexp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

Array = npt.NDArray[Any]
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
NAMES = (
    *("mean_cosine", "mean_norm", "mean_share", "explained_variance", "log_ratio"),
    *("corrected_cosine", "corrected_ratio", "sd", "gamma", "mean_correlation", "dominant"),
    *("top_channel", "top_cosine"),
)
"""The statistics, outlier channels apart, as `bertvision.isotropy` names them."""


def statistics(x: Array, components: Sequence[int], outlier_sd: float) -> dict[str, Array]:
    """Each of `NAMES` by layer, and ``outlier_channels`` (layers, hidden), true where one is.

    Args:
        x: (vectors, layers, hidden) float32.
        components: numbers of principal components whose variance is summed.
        outlier_sd: threshold of the outlier channels, in standard deviations over the channels.
    """
    found = [_of_layer(x[:, i], components, outlier_sd) for i in range(x.shape[1])]
    return {name: np.stack([of[name] for of in found]) for name in found[0]}


def _of_layer(x: Array, components: Sequence[int], outlier_sd: float) -> dict[str, Array]:
    n, hidden = x.shape
    mean = x.mean(axis=0)
    centred = x - mean
    covariance = centred.T @ centred / n
    variance = covariance.diagonal()
    sd = np.sqrt(variance)
    rho = covariance / np.outer(sd, sd)
    variances, axes = np.linalg.eigh(covariance)

    norm = np.linalg.norm(x, axis=1)
    unit = x / norm[:, None]
    by_channel = (unit.sum(axis=0) ** 2 - (unit**2).sum(axis=0)) / (n * (n - 1))

    rest = centred @ axes[:, : hidden - max(1, round(hidden / 100))]
    total = normalize(rest).sum(axis=0)
    half = np.searchsorted(np.cumsum(np.sort(variance)[::-1]), variance.sum() / 2) + 1
    return {
        "mean_cosine": by_channel.sum(),
        "mean_norm": norm.mean(),
        "mean_share": mean @ mean / (mean @ mean + variance.sum()),
        "explained_variance": np.cumsum(variances[::-1])[np.array(components) - 1]
        / variances.sum(),
        "log_ratio": _log_ratio(x @ np.linalg.eigh(x.T @ x)[1]),
        "corrected_cosine": (total @ total - n) / (n * (n - 1)),
        "corrected_ratio": _log_ratio(rest),
        "sd": np.quantile(sd, QUANTILES),
        "gamma": np.quantile((rho**2).mean(axis=1), QUANTILES),
        "mean_correlation": (np.abs(rho).sum() - hidden) / (hidden * (hidden - 1)),
        "dominant": half / hidden,
        "top_channel": by_channel.argmax(),
        "top_cosine": by_channel.max(),
        "outlier_channels": _far(mean, outlier_sd) | _far(sd, outlier_sd),
    }


def _log_ratio(along: Array) -> Array:
    """Log of the least over the largest partition function, of both senses of each direction."""
    values = np.concatenate([_log_sum_exp(along), _log_sum_exp(-along)])
    return values.min() - values.max()


def _log_sum_exp(values: Array) -> Array:
    largest = values.max(axis=0)
    return largest + np.log(np.exp(values - largest).sum(axis=0))


def _far(statistic: Array, outlier_sd: float) -> Array:
    return np.abs(statistic - statistic.mean()) > outlier_sd * statistic.std()


def cosine_and_components(x: Array, components: int) -> Array:
    """(2, layers) mean cosine of two vectors, and variance in the first principal components.

    Args:
        x: (vectors, layers, hidden) float32.
        components: how many.
    """
    n = len(x)
    cosines, shares = [], []
    for i in range(x.shape[1]):
        total = normalize(x[:, i]).sum(axis=0)
        cosines.append((total @ total - n) / (n * (n - 1)))
        shares.append(PCA(components).fit(x[:, i]).explained_variance_ratio_.sum())
    return np.array([cosines, shares])
