"""The scorers on the vectors of a data set: the cosine, and the one that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.extraction.layers import Layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.precision import device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.similarity.data import Floats, Pairs, SimilarityParts
from bertvision.pipelines.similarity.metrics import accuracy, agreement, squared_error
from bertvision.pipelines.similarity.options import ScorerName, SimilarityOptions
from bertvision.pipelines.similarity.records import SimilarityScore, Target
from bertvision.pipelines.similarity.trainer import (
    Trained,
    pair_features,
    target_distribution,
    train_scorer,
)
from bertvision.pipelines.tasks.sentences.metrics import pearson, spearman
from bertvision.pipelines.tasks.sentences.similarity_data import ENTAILMENT

Float32Array = npt.NDArray[np.float32]


def targets_of(data: SimilarityParts, scorer: ScorerName) -> list[Target]:
    """What a scorer can tell of the data; nothing where it cannot be trained."""
    if scorer == "cosine":
        return ["relatedness"]
    if data.train is None or data.chosen_on is None:
        return []
    return ["relatedness", "entailment"] if data.entailment else ["relatedness"]


def measure(
    data: SimilarityParts,
    pooled: PooledSplit,
    missing: Sequence[tuple[Layers, ScorerName, Target]],
    options: SimilarityOptions,
) -> Iterator[SimilarityScore]:
    """Each scorer on each input that is missing, input by input, as it is measured.

    What a score is does not depend on which others are measured beside it.

    Args:
        data: whose pairs are scored.
        pooled: vectors of its texts.
        missing: what is to be measured.
        options: of the training and the intervals.

    Raises:
        NonFiniteError: vectors hold NaN or infinity.
    """
    with progress(len(missing), f"{data.name} {pooled.tag} {pooled.pooling}", "score") as bar:
        for inputs in dict.fromkeys(inputs for inputs, _, _ in missing):
            layers = sorted(inputs)
            read = pooled.features(layers)[:, [layers.index(layer) for layer in inputs]]
            vectors = read.reshape(len(read), -1)
            for scorer, target in ((s, t) for i, s, t in missing if i == inputs):
                if scorer == "cosine":
                    yield _cosine(data, vectors, inputs, options)
                else:
                    yield _trained(data, vectors, inputs, target, options)
                bar.update(1)


def cosines(vectors: Float32Array, pairs: Pairs) -> Floats:
    """u·v / (‖u‖ ‖v‖) of each pair; 0 of a vector of zeros: (pairs,).

    Args:
        vectors: (texts, width)
        pairs: of these texts.
    """
    long = vectors.astype(np.float64)
    norms = np.linalg.norm(long, axis=1, keepdims=True)
    unit = np.divide(long, norms, out=np.zeros_like(long), where=norms > 0)
    found: Floats = (unit[pairs.first] * unit[pairs.second]).sum(1)
    return found


def _cosine(
    data: SimilarityParts,
    vectors: Float32Array,
    layers: Layers,
    options: SimilarityOptions,
) -> SimilarityScore:
    chosen_on = data.chosen_on
    return SimilarityScore(
        layers=layers,
        scorer="cosine",
        target="relatedness",
        agreements=agreement(
            cosines(vectors, data.scored)[None],
            data.scored.score,
            data.scored.subset,
            data.subsets,
            options.resamples,
        ),
        dev=spearman(cosines(vectors, chosen_on), chosen_on.score) if chosen_on else None,
    )


def _trained(
    data: SimilarityParts,
    vectors: Float32Array,
    layers: Layers,
    target: Target,
    options: SimilarityOptions,
) -> SimilarityScore:
    fit = _relatedness if target == "relatedness" else _entailment
    assert data.train is not None  # by `targets_of`
    assert data.chosen_on is not None
    return fit(data, data.train, data.chosen_on, vectors, layers, options)


def _relatedness(
    data: SimilarityParts,
    train: Pairs,
    held: Pairs,
    vectors: Float32Array,
    layers: Layers,
    options: SimilarityOptions,
) -> SimilarityScore:
    found = train_scorer(
        _features(vectors, train, held, data.scored),
        target_distribution(train.score, data.classes),
        lambda p: pearson(p @ data.classes, held.score),
        options,
        device(),
    )
    predicted, scored = found.probabilities @ data.classes, data.scored
    return SimilarityScore(
        layers=layers,
        scorer="trained",
        target="relatedness",
        agreements=agreement(
            predicted, scored.score, scored.subset, data.subsets, options.resamples
        ),
        mse=squared_error(predicted, scored.score, options.resamples),
        **_training(found),
    )


def _entailment(
    data: SimilarityParts,
    train: Pairs,
    held: Pairs,
    vectors: Float32Array,
    layers: Layers,
    options: SimilarityOptions,
) -> SimilarityScore:
    found = train_scorer(
        _features(vectors, train, held, data.scored),
        np.eye(len(ENTAILMENT), dtype=np.float32)[train.label],
        lambda p: 100 * float((p.argmax(1) == held.label).mean()),
        options,
        device(),
    )
    right = found.probabilities.argmax(2) == data.scored.label
    return SimilarityScore(
        layers=layers,
        scorer="trained",
        target="entailment",
        accuracy=accuracy(right, options.resamples),
        **_training(found),
    )


def _features(
    vectors: Float32Array, train: Pairs, held: Pairs, scored: Pairs
) -> tuple[Float32Array, Float32Array, Float32Array]:
    return (
        pair_features(vectors, train),
        pair_features(vectors, held),
        pair_features(vectors, scored),
    )


def _training(found: Trained) -> dict[str, Any]:
    return {"dev": float(np.mean(found.dev)), "epochs": found.epochs}
