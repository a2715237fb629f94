"""When to stop: SentEval's rule, for many probes at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Look(NamedTuple):
    """What a look at the held-out examples says of each probe."""

    improved: npt.NDArray[np.bool_]
    """(probes,) whose score is higher than ever before."""
    stopped: npt.NDArray[np.bool_]
    """(probes,) that are trained no longer."""


class EarlyStopping:
    """Keep the best, stop after too many looks without a new best.

    The rule is that of SentEval's ``PyTorchClassifier.fit``: misses are counted over the whole
    training and never forgotten at a new best, and the miss after ``tenacity`` others ends it.
    """

    def __init__(self, probes: int, tenacity: int) -> None:
        """Begin without a score.

        Args:
            probes: how many there are.
            tenacity: misses that are forgiven.
        """
        self.best = np.full(probes, -np.inf)
        self._misses = np.zeros(probes, np.int64)
        self._tenacity = tenacity

    def look(self, scores: npt.NDArray[np.float64]) -> Look:
        """Take the scores of all probes that are still trained.

        Args:
            scores: (probes,) higher is better.
        """
        improved = scores > self.best
        self.best = np.where(improved, scores, self.best)
        self._misses += ~improved
        return Look(improved, self._misses > self._tenacity)

    def keep(self, probes: npt.NDArray[np.bool_]) -> None:
        """Forget all other probes.

        Args:
            probes: (probes,) which stay.
        """
        self.best, self._misses = self.best[probes], self._misses[probes]
