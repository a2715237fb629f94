"""What scorers read: layers alone or end to end, and on what scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.extraction.layers import Layers
from bertvision.pipelines.ranking.metrics import Candidates
from bertvision.pipelines.ranking.options import ScorerName
from bertvision.pipelines.ranking.training import Vectors


def scaled(vectors: Vectors, scorer: ScorerName, train: Candidates | None) -> Vectors:
    """The vectors on the scale that a scorer reads them on.

    ``cosine`` is indifferent to length. ``bilinear`` reads vectors of length 1, so that it begins
    as the cosine. The others read each channel with mean 0 and deviation 1 over the distinct
    queries, and likewise the distinct passages, of the training data: products and differences of
    channels of very different sizes, as BERT's are, would leave most of them without a part. A
    channel that does not vary there becomes 0.

    Args:
        vectors: as they are stored.
        scorer: which reads them.
        train: the training data; None only for a scorer that learns nothing.
    """
    if scorer == "cosine" or train is None:
        return vectors
    if scorer == "bilinear":
        return Vectors(*(torch.nn.functional.normalize(v, dim=-1) for v in vectors))
    return Vectors(
        _standard(vectors.queries, torch.from_numpy(train.query).unique()),
        _standard(vectors.passages, torch.from_numpy(train.passage).unique()),
    )


def stacked(
    queries: npt.NDArray[np.float32],
    passages: npt.NDArray[np.float32],
    layers: Sequence[int],
    inputs: Sequence[Layers],
) -> Vectors:
    """The vectors of inputs that are equally wide.

    Args:
        queries: (queries, layers, hidden).
        passages: (passages, layers, hidden).
        layers: which hidden states these are.
        inputs: of these layers, as many in each.
    """
    place = {layer: i for i, layer in enumerate(layers)}

    def stack(values: npt.NDArray[np.float32]) -> Tensor:
        chosen = [values[:, [place[layer] for layer in layers]] for layers in inputs]
        return torch.from_numpy(np.stack(chosen).reshape(len(inputs), len(values), -1))

    return Vectors(stack(queries), stack(passages))


def _standard(values: Tensor, rows: Tensor) -> Tensor:
    """(inputs, texts, width) with mean 0 and deviation 1 of each channel over some rows."""
    result = torch.empty_like(values)
    for scaled, given in zip(result, values, strict=True):
        known = given[rows.to(given.device)].double()
        mean, deviation = known.mean(0), known.std(0, correction=0)
        varies = deviation > 1e-6 * (1 + mean.abs())  # beyond the rounding of float32
        scale = torch.where(varies, 1 / deviation, 0)
        scaled[:] = (given - mean.float()) * scale.float()
    return result
