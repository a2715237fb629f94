"""How sure output layers are of what they say: what decides where a window leaves.

Entropy: Xin et al. (2020, arXiv:2004.12993, section 3.2), *DeeBERT*. Probability of the likeliest
class: Schwartz et al. (2020, arXiv:2004.07453), *The Right Tool for the Job*. Patience: Zhou et al.
(2020, arXiv:2006.04152, section 3.2), *BERT Loses Patience* (PABEE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, did_you_mean
from bertvision.pipelines.results.ensemble import log_partition

Array = npt.NDArray[np.float64]
Logits = Sequence[Mapping[str, npt.NDArray[np.floating]]]
"""By output layer, from the lowest, the arrays of `tasks.logits.Logits`."""

CRITERIA = ("entropy", "probability", "patience")
"""In the order in which they are shown."""


def fitting_criteria(asked: Sequence[str] | None, *, scores: bool) -> tuple[str, ...]:
    """The criteria that can be told, of those that were asked for.

    Args:
        asked: names; None is all that fit.
        scores: whether the task is regression.

    Raises:
        InputError: there is none of a name, or it does not fit scores.
    """
    fit = CRITERIA[-1:] if scores else CRITERIA
    for name in asked or ():
        if name not in CRITERIA:
            raise InputError(
                f"--criterion {name}: there is none; {did_you_mean(name, CRITERIA)}choose of "
                f"{', '.join(CRITERIA)}"
            )
        if name not in fit:
            raise InputError(
                f"--criterion {name}: the task gives scores, which have no {name}; take patience, "
                "which asks whether scores change less than --tolerance"
            )
    return tuple(name for name in fit if asked is None or name in asked)


def confidence(
    criterion: str, logits: Logits, n_tokens: npt.NDArray[np.integer], tolerance: float = 0.0
) -> Array:
    """How sure each output layer but the last is of each window.

    Args:
        criterion: of `CRITERIA`.
        logits: finite; those of the last layer are not looked at.
        n_tokens: (windows,) where the logits are of tokens.
        tolerance: scores that differ by less agree.

    Returns:
        (windows, output layers − 1), higher where surer: minus the entropy in nats, of spans the
        mean of that of start and end; the probability of the likeliest class, of spans of the
        likeliest start times that of the likeliest end; or how many output layers in a row, up to
        this one, said the same as the one before.
    """
    found = [_patience(logits, n_tokens, tolerance)] if criterion == "patience" else []
    for arrays in logits[:-1] if not found else ():
        logs = [_log_probabilities(values, n_tokens) for values in arrays.values()]
        if criterion == "entropy":
            found.append(np.mean([_sums(np.exp(x) * x, n) for x, n in logs], axis=0))
        else:
            found.append(np.exp(np.sum([_highest(x, n) for x, n in logs], axis=0)))
    return found[0] if criterion == "patience" else np.stack(found, axis=1)


def _log_probabilities(
    values: npt.NDArray[np.floating], n_tokens: npt.NDArray[np.integer]
) -> tuple[Array, npt.NDArray[np.integer]]:
    """Log-probabilities one after another, and how many belong to each window."""
    lengths = n_tokens if values.ndim == 1 else np.full(len(values), values.shape[1])
    flat = values.astype(np.float64).ravel()
    return flat - np.repeat(log_partition(flat[None], lengths)[0], lengths), lengths


def _first(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def _sums(values: Array, lengths: npt.NDArray[np.integer]) -> Array:
    found: Array = np.add.reduceat(values, _first(lengths))
    return found


def _highest(values: Array, lengths: npt.NDArray[np.integer]) -> Array:
    found: Array = np.maximum.reduceat(values, _first(lengths))
    return found


def _patience(logits: Logits, n_tokens: npt.NDArray[np.integer], tolerance: float) -> Array:
    """(windows, output layers − 1) PABEE's counter; 0 at the first."""
    said = [
        np.stack([_said(values, n_tokens) for values in arrays.values()]) for arrays in logits[:-1]
    ]
    scores = next(iter(logits[0].values())).shape[1:] == (1,)
    counters = [np.zeros(said[0].shape[1])]
    for before, now in zip(said, said[1:], strict=False):
        same = np.abs(now - before) < tolerance if scores else now == before
        counters.append(np.where(same.all(axis=0), counters[-1] + 1, 0.0))
    return np.stack(counters, axis=1)


def _said(values: npt.NDArray[np.floating], n_tokens: npt.NDArray[np.integer]) -> Array:
    """(windows,) the likeliest class or token, or the score."""
    if values.ndim == 2:
        return values[:, 0].astype(np.float64) if values.shape[1] == 1 else values.argmax(1) * 1.0
    first = _first(n_tokens)
    windows = [values[a : a + n].argmax() for a, n in zip(first, n_tokens, strict=True)]
    return np.array(windows, np.float64)
