"""The mean norm of stored vectors, which trainers of sparse autoencoders scale by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.lazy import decoded_layers
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.tokens.selection import KeptTokens

_SHARDS = 32  # of 4,096 tokens: the mean norm is within 0.1 % where norms differ by a third


def mean_norms(split: SplitReader, positions: Sequence[int], kept: KeptTokens) -> Tensor:
    """The mean Euclidean norm of the kept tokens of at most 32 shards, evenly spread.

    They are the shards of the split, whatever the order, rank or epoch of a stream, so that every
    process scales alike. The channel statistics of a split will not do: they may be widened for
    tokens that stand out, and the mean of norms is not the root of the mean square.

    Args:
        split: to read.
        positions: on the stored layer axis.
        kept: the tokens that count.

    Returns:
        (layers,) float64.

    Raises:
        CorruptStoreError: what is stored is damaged.
        InputError: the mean norm of a layer is 0, or not finite.
    """
    shards = np.flatnonzero(kept.counts)
    chosen = shards[np.linspace(0, len(shards) - 1, min(len(shards), _SHARDS)).round().astype(int)]
    total = np.zeros(len(positions))
    for shard in chosen.tolist():
        rows = kept.of_shard(shard)
        for i, states in enumerate(decoded_layers(split, shard, positions, any_order=True)):
            total[i] += np.linalg.norm(states[rows], axis=1).sum(dtype=np.float64)
    norms = total / kept.counts[chosen].sum()
    for position, norm in zip(positions, norms.tolist(), strict=True):
        if not 0 < norm < math.inf:
            raise InputError(
                f"the vectors of layer {split.record.layers[position]} of {split.name} have a mean "
                f"norm of {norm}, which no factor scales: leave the layer out, or scaled"
            )
    return torch.from_numpy(norms)
