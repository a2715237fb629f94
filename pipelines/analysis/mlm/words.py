"""The word that each stored token is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit


def words_of(split: ActivationSplit) -> NDArray[np.int64]:
    """(tokens,) vocabulary index of each token, in the order of ``split.dask()``.

    Raises:
        InputError: the split keeps a vector for each window, or does not say which words it is of.
    """
    tokens = split.record.provenance.get("tokens", "all")
    if tokens != "all" or "input_ids" not in split.record.arrays:
        raise InputError(
            f"{split.name} does not keep the states of all tokens beside their words (tokens: "
            f"{tokens}): name a split that was extracted without --pool"
        )
    lengths = split.plan.n_tokens.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    rows = np.repeat(split.plan.first_token - before, lengths) + np.arange(lengths.sum())
    words: NDArray[np.int64] = split.array("input_ids")[rows].astype(np.int64)
    return words
