"""A small result of every kind of analysis, of random hidden states."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np

from bertvision.pipelines.analysis.alike.cka import CkaResult, cka
from bertvision.pipelines.analysis.alike.rsa import Paired, RsaResult, rsa
from bertvision.pipelines.analysis.isotropy import IsotropyResult, isotropy
from bertvision.pipelines.analysis.result import AnalysisResult


def states(seed: int, tokens: int = 40, layers: int = 3, hidden: int = 6) -> da.Array:
    values = np.random.default_rng(seed).standard_normal((tokens, layers, hidden))
    return da.from_array(values, chunks=(16, layers, hidden))


def _rsa() -> RsaResult:
    rows = np.arange(40)
    splits = {name: Paired(states(i), states(i + 1), rows, rows) for i, name in enumerate("ab")}
    return rsa(splits, n_tokens=20, repeats=2)


MAKERS: dict[type[AnalysisResult], Callable[[], AnalysisResult]] = {
    CkaResult: lambda: cka(states(0), states(1, layers=2)),
    RsaResult: _rsa,
    IsotropyResult: lambda: isotropy(states(0), components=(1, 3), outlier_sd=1.0),
}
