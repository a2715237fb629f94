"""Metrics of classes and of scores, in per cent.

What a formula leaves undefined is 0: a system whose answers are all alike tells nothing, and 0 is
what guessing gets of a correlation. So a system that collapsed to one class has Matthews 0 and an
F1 of 0 for the class it never names, and a report can still sort it.

Sources: F1 of van Rijsbergen (1979); the correlation of Matthews (1975) for two classes and of
Gorodkin (2004, Comput. Biol. Chem. 28, equation 8) for any number; Pearson (1895); Spearman (1904)
on ranks that ties share. GLUE's choice of them: Wang et al. 2019 (arXiv:1804.07461), section 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

_Int = npt.NDArray[np.integer]
_Float = npt.NDArray[np.floating]


def accuracy(predicted: _Int, gold: _Int) -> float:
    """Part of the items whose class is right.

    Args:
        predicted: (items,) indices of classes.
        gold: (items,)
    """
    _check(predicted, gold)
    return 100.0 * int((predicted == gold).sum()) / len(gold)


def f1(predicted: _Int, gold: _Int, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of one class; 0 where it is neither said nor true.

    Args:
        predicted: (items,) indices of classes.
        gold: (items,)
        positive: the class.
    """
    _check(predicted, gold)
    said, true = predicted == positive, gold == positive
    sum_ = int(said.sum()) + int(true.sum())
    return 200.0 * int((said & true).sum()) / sum_ if sum_ else 0.0


def macro_f1(predicted: _Int, gold: _Int) -> float:
    """Unweighted mean of the F1 of every class that is said or true anywhere.

    Args:
        predicted: (items,) indices of classes.
        gold: (items,)
    """
    _check(predicted, gold)
    confusion = _confusion(predicted, gold)
    said_and_true = confusion.sum(axis=0) + confusion.sum(axis=1)
    return float(np.mean(200.0 * confusion.diagonal() / said_and_true))


def matthews(predicted: _Int, gold: _Int) -> float:
    """Correlation of the classes, −100 to 100; 0 where either side has one class alone.

    Args:
        predicted: (items,) indices of classes.
        gold: (items,)
    """
    _check(predicted, gold)
    confusion = _confusion(predicted, gold).astype(np.float64)
    total, said, true = confusion.sum(), confusion.sum(axis=0), confusion.sum(axis=1)
    covariance = confusion.trace() * total - said @ true
    variances = (total**2 - said @ said) * (total**2 - true @ true)
    return float(100.0 * covariance / np.sqrt(variances)) if variances > 0 else 0.0


def pearson(predicted: _Float, gold: _Float) -> float:
    """Linear correlation, −100 to 100; 0 where either side is constant.

    Args:
        predicted: (items,)
        gold: (items,)
    """
    _check(predicted, gold)
    if _constant(predicted) or _constant(gold):
        return 0.0
    x, y = (np.asarray(side, np.float64) for side in (predicted, gold))
    x, y = x - x.mean(), y - y.mean()
    # Scaled first, so that squares of tiny or huge numbers neither vanish nor overflow
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(100.0 * np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1, 1))


def spearman(predicted: _Float, gold: _Float) -> float:
    """Correlation of the ranks, −100 to 100; ties share their mean rank; 0 as in `pearson`.

    Args:
        predicted: (items,)
        gold: (items,)
    """
    _check(predicted, gold)
    return pearson(_ranks(predicted), _ranks(gold))


def classification_metrics(
    predicted: _Int, gold: _Int, positive: int | None = None
) -> dict[str, Any]:
    """All metrics of classes.

    Args:
        predicted: (items,) indices of classes.
        gold: (items,)
        positive: the class that ``f1`` is of, where one of them is what is looked for.

    Returns:
        ``accuracy``; ``f1`` where there is a positive class; ``macro_f1``; ``matthews``;
        ``majority``, the accuracy of always naming the commonest class; ``total``, the number of
        items.
    """
    return {
        "accuracy": accuracy(predicted, gold),
        **({} if positive is None else {"f1": f1(predicted, gold, positive)}),
        "macro_f1": macro_f1(predicted, gold),
        "matthews": matthews(predicted, gold),
        "majority": 100.0 * int(np.unique(gold, return_counts=True)[1].max()) / len(gold),
        "total": len(gold),
    }


def regression_metrics(predicted: _Float, gold: _Float) -> dict[str, Any]:
    """All metrics of scores.

    Args:
        predicted: (items,)
        gold: (items,)

    Returns:
        ``pearson``, ``spearman``, and ``total``, the number of items.
    """
    return {
        "pearson": pearson(predicted, gold),
        "spearman": spearman(predicted, gold),
        "total": len(gold),
    }


def _check(predicted: npt.NDArray[Any], gold: npt.NDArray[Any]) -> None:
    if predicted.ndim != 1 or predicted.shape != gold.shape or not len(gold):
        raise InputError(
            f"predictions of shape {predicted.shape} cannot be scored against labels of shape "
            f"{gold.shape}: give one prediction for each item, of one item or more"
        )
    if not (np.isfinite(predicted).all() and np.isfinite(gold).all()):
        raise InputError(
            "predictions or labels hold NaN or infinity: the model that made them has diverged, "
            "or an item has no label"
        )


def _confusion(predicted: _Int, gold: _Int) -> npt.NDArray[np.int64]:
    """(classes, classes) items by gold and predicted class, of the classes that occur."""
    _, both = np.unique(np.concatenate([gold, predicted]), return_inverse=True)
    classes = int(both.max()) + 1
    cells = both[: len(gold)] * classes + both[len(gold) :]
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def _ranks(values: _Float) -> npt.NDArray[np.float64]:
    """(items,) ranks from 1; equal values share the mean of theirs."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    middle: npt.NDArray[np.float64] = np.cumsum(sizes) - (sizes - 1) / 2
    return middle[group]


def _constant(values: _Float) -> bool:
    """Whether numbers differ by no more than rounding does."""
    spread = float(np.ptp(np.asarray(values, np.float64)))
    return spread <= 1e-12 * float(np.abs(values).max())
