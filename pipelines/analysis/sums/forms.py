"""The two forms of sums over pairs of tokens, and which of them takes fewer operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bertvision.pipelines.analysis.sums.centring import Centring
from bertvision.pipelines.analysis.sums.features import feature_cost, feature_sums
from bertvision.pipelines.analysis.sums.gram import gram_cost, gram_sums
from bertvision.pipelines.analysis.sums.kernels import KernelSums
from bertvision.pipelines.analysis.sums.reduce import SAMPLE_ROWS, Blocks

Shape = tuple[int, int]
"""Layers and hidden size of a side."""


class Form(NamedTuple):
    """A way to the same sums."""

    sums: Callable[[Blocks, Sequence[Centring]], KernelSums]
    cost: Callable[[int, Sequence[Shape]], int]
    """About how many operations it takes of so many tokens."""
    most_rows: int
    """Tokens of a block, at most: partial results of the feature form are large, so it has few."""

    def rows(self, tokens: int) -> int:
        """Tokens of a block of a sample of so many: four blocks, or more where these are large."""
        return min(max(SAMPLE_ROWS, -(-tokens // 4)), self.most_rows)


FEATURES = Form(feature_sums, feature_cost, 4 * SAMPLE_ROWS)
GRAM = Form(gram_sums, gram_cost, SAMPLE_ROWS)


def cheaper_form(tokens: int, shapes: Sequence[Shape]) -> Form:
    """The form that takes fewer operations; it depends on nothing but its arguments.

    Args:
        tokens: how many.
        shapes: of one side or of two.
    """
    return min((FEATURES, GRAM), key=lambda form: form.cost(tokens, shapes))
