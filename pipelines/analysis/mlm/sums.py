"""What a decoder onto the vocabulary makes of the states of each layer, summed over tokens.

A vocabulary has tens of thousands of words, and a block of tokens has a logit for each of them in
each layer: together they would be gigabytes. So the vocabulary is gone through in tiles. The
logarithm of the sum of exponentials is carried along with the largest logit so far, as in Milakov
& Gimelshein (2018), *Online normalizer calculation for softmax*, algorithm 3, and so is the
divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import NonFiniteError
from bertvision.pipelines.analysis.moments import Array

Floats = NDArray[np.float32]

TILE, TOKENS = 4096, 512
"""Words and tokens whose logits are held at a time: 8 MB for each of a few matrices."""


class Decoder(Protocol):
    """Reads states over a vocabulary: logits of a layer are weight · features + bias."""

    weight: Floats
    """(vocabulary, width), the same for all layers."""

    def features(self, place: int, states: Floats) -> Floats:
        """(tokens, width) of (tokens, hidden) states, ``place`` on the layer axis."""

    def bias(self, place: int) -> Floats:
        """(vocabulary,) of the layer at ``place``."""


@dataclass(frozen=True)
class LensSums:
    """Sums over tokens; of rare tokens those whose word is rare.

    Attributes:
        n: tokens.
        n_rare: rare ones among them.
        top1: (layers,) tokens whose own word has the largest logit, and shares it with none.
        top1_rare: (layers,) rare ones among them.
        reciprocal_rank: (layers,) of 1 / rank; words with the same logit stand before it.
        log_p: (layers,) of the log-probability of the own word, nats.
        kl: (layers,) of KL(p ‖ q) in nats, p what the last layer says and q what this one does.
    """

    n: int
    n_rare: int
    top1: Array
    top1_rare: Array
    reciprocal_rank: Array
    log_p: Array
    kl: Array

    @classmethod
    def empty(cls, layers: int) -> LensSums:
        """The sums of no token."""
        return cls(0, 0, *(np.zeros(layers) for _ in range(5)))

    def merge(self, other: LensSums) -> LensSums:
        """The sums of the tokens of both."""
        return LensSums(
            self.n + other.n,
            self.n_rare + other.n_rare,
            self.top1 + other.top1,
            self.top1_rare + other.top1_rare,
            self.reciprocal_rank + other.reciprocal_rank,
            self.log_p + other.log_p,
            self.kl + other.kl,
        )


def lens_sums(
    states: Floats, words: NDArray[np.int64], rare: NDArray[np.bool_], decoder: Decoder, tile: int
) -> LensSums:
    """The sums of a block of tokens.

    Args:
        states: (tokens, layers, hidden).
        words: (tokens,) vocabulary index of each token; negative ones are left out.
        rare: (vocabulary,) which words are rare.
        decoder: of the layers.
        tile: words at a time.

    Raises:
        NonFiniteError: a logit is NaN or infinite.
    """
    used = np.flatnonzero(words >= 0)
    sums = LensSums.empty(states.shape[1])
    for start in range(0, len(used), TOKENS):
        part = used[start : start + TOKENS]
        sums = sums.merge(_part(states[part], words[part], rare, decoder, tile))
    return sums


def _part(
    states: Floats, words: NDArray[np.int64], rare: NDArray[np.bool_], decoder: Decoder, tile: int
) -> LensSums:
    tokens, layers = states.shape[:2]
    order = [layers - 1, *range(layers - 1)]  # what the others are compared with comes first
    rows = np.arange(tokens)
    biases = [decoder.bias(i) for i in range(layers)]
    features = [decoder.features(i, states[:, i]) for i in range(layers)]
    own = np.stack(
        [
            np.einsum("tw,tw->t", f, decoder.weight[words]) + b[words]
            for f, b in zip(features, biases, strict=True)
        ]
    )
    above = np.zeros((layers, tokens), np.int64)
    largest = np.full((layers, tokens), -np.inf, np.float32)
    total = np.zeros((layers, tokens))
    apart = np.zeros((layers, tokens))  # Σ exp(last − its largest) · (last − this)
    for start in range(0, len(decoder.weight), tile):
        weight = decoder.weight[start : start + tile]
        inside = (words >= start) & (words < start + len(weight))
        last = shares = np.empty(0, np.float32)
        rescale = np.empty(0)
        for i in order:
            logits = features[i] @ weight.T
            logits += biases[i][start : start + tile]
            before = largest[i].copy()
            np.maximum(before, logits.max(axis=1), out=largest[i])
            shrink = np.exp(before - largest[i], dtype=np.float64)
            exp = np.exp(logits - largest[i][:, None])
            total[i] = total[i] * shrink + exp.sum(axis=1, dtype=np.float64)
            if i == layers - 1:
                last, shares, rescale = logits, exp, shrink
            else:
                more = (shares * (last - logits)).sum(axis=1, dtype=np.float64)
                apart[i] = apart[i] * rescale + more
            as_large = logits >= own[i][:, None]
            as_large[rows[inside], words[inside] - start] = False
            above[i] += as_large.sum(axis=1)
    logsumexp = largest + np.log(total)
    if not np.isfinite(logsumexp).all():
        place = int(np.flatnonzero(~np.isfinite(logsumexp).all(axis=1))[0])
        raise NonFiniteError(
            f"the logits of the layer at place {place} of those stored hold NaN or infinity; check "
            "the activations with `bertvision store verify`"
        )
    kl = apart / total[-1] - logsumexp[-1] + logsumexp
    is_rare = rare[words]
    return LensSums(
        tokens,
        int(is_rare.sum()),
        (above == 0).sum(axis=1).astype(np.float64),
        (above == 0)[:, is_rare].sum(axis=1).astype(np.float64),
        (1 / (1 + above)).sum(axis=1),
        (own - logsumexp).sum(axis=1, dtype=np.float64),
        kl.sum(axis=1),
    )
