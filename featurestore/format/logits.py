"""The most probable next tokens beside each stored token, with their log-probabilities.

A split that has them names `TOP_LOGITS` among what it requires, and the rule as ``logits`` in its
provenance. They lie in files of its shards, one for each of `OUTPUTS`, as its hidden states do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bertvision.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

LOGITS = "logits"
"""Name of the rule in a split's provenance."""
TOP_LOGITS = "top_logits"
"""Name in ``requires`` of a split whose shards have files of log-probabilities."""
OUTPUTS = {"topk_logprobs": "float32", "topk_indices": "int32", "tail_mass": "float32"}
"""Types of the arrays by name; the first two have an axis of tokens of the vocabulary."""
MOST = 1024
"""Tokens of the vocabulary that are kept at most: a reader takes those of a shard at once."""
_RULE = re.compile(r"top:([1-9]\d{0,3})", re.ASCII)


class TopRule(NamedTuple):
    """A rule which log-probabilities are stored of each token.

    Examples:
        >>> from bertvision.featurestore.format.logits import TopRule
        >>> TopRule.parse("top:64").shapes
        {'topk_logprobs': (64,), 'topk_indices': (64,), 'tail_mass': ()}
    """

    k: int
    """Number of the most probable next tokens."""

    @classmethod
    def parse(cls, text: object) -> TopRule:
        """Read a rule.

        Raises:
            InputError: It is none.
        """
        match = _RULE.fullmatch(text) if isinstance(text, str) else None
        if match is None or int(match[1]) > MOST:
            raise InputError(
                f"logits is {text!r}: give top:K, the K most probable next tokens, with K from 1 "
                f"to {MOST:,}, such as top:64; leave it out for none"
            )
        return cls(int(match[1]))

    def __str__(self) -> str:
        return f"top:{self.k}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of an entry of each array by its name."""
        return {name: () if name == "tail_mass" else (self.k,) for name in OUTPUTS}

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return 8 * self.k + 4

    def empty(self, tokens: int) -> TopLogits:
        """Zeros for so many tokens, arrays of NumPy."""
        import numpy as np

        return TopLogits(
            *(np.zeros((tokens, *shape), OUTPUTS[name]) for name, shape in self.shapes.items())
        )

    def of(self, logits: Tensor) -> TopLogits:
        """Reduce logits to what is stored of them.

        Args:
            logits: (tokens, vocabulary) float of any type.

        Raises:
            InputError: The vocabulary has fewer tokens than are kept, or logits are no such array.
        """
        import torch

        if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] < self.k:
            raise InputError(
                f"logits are {logits.dtype} of shape {tuple(logits.shape)}, of which {self} takes "
                f"(tokens, vocabulary) floats with {self.k} or more in the vocabulary"
            )
        logits = logits.float()
        best, indices = logits.topk(self.k, dim=1)
        total = logits.logsumexp(dim=1, keepdim=True)
        # of the others by themselves: 1 − Σ p would lose all digits of a small rest
        rest = logits.scatter(1, indices, -torch.inf).logsumexp(dim=1, keepdim=True)
        return TopLogits(best - total, indices.int(), (rest - total).exp().squeeze(1))


class TopLogits(NamedTuple):
    """The most probable next tokens of some tokens, as arrays of NumPy or torch."""

    topk_logprobs: Any
    """(tokens, k) float32 natural logarithms of probabilities, the largest first."""
    topk_indices: Any
    """(tokens, k) int32 their indices in the vocabulary."""
    tail_mass: Any
    """(tokens,) float32 probability that all other tokens have together."""

    def map(self, change: Callable[[Any], Any]) -> TopLogits:
        """The same after a change to each array."""
        return TopLogits(*map(change, self))

    @classmethod
    def joined(cls, parts: Sequence[TopLogits]) -> TopLogits:
        """Parts one after another, arrays of NumPy."""
        import numpy as np

        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
