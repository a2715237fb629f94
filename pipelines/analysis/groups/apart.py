"""What tells groups of vectors apart, before and after each group is moved to the same centre.

Libovický, Rosa and Fraser (2019), *How Language-Neutral is Multilingual BERT?* (arXiv:1911.03310):
a language's states are those of all languages moved by a vector of its own, so that taking away
the mean of each language (centring) leaves what they have in common.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.floating]
Groups = npt.NDArray[np.int64]


def centroids(x: Vectors, groups: Groups, count: int) -> npt.NDArray[np.float64]:
    """The mean vector of each group, (groups, hidden) float64.

    Args:
        x: (texts, hidden)
        groups: (texts,) number of each text's group; every group has a text.
        count: of groups.
    """
    return np.stack([x[groups == g].mean(axis=0, dtype=np.float64) for g in range(count)])


def between_share(x: Vectors, groups: Groups, count: int) -> float:
    """Share of the variance that lies between groups, η²: 0 where all have one centre, 1 at most.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        count: of groups.

    Returns:
        Sum of squares between centroids over that of all texts; NaN where texts do not vary.
    """
    means = centroids(x, groups, count)
    centre = x.mean(axis=0, dtype=np.float64)
    sizes = np.bincount(groups, minlength=count)
    between = float((sizes * ((means - centre) ** 2).sum(axis=1)).sum())
    total = float(((x - centre) ** 2).sum(dtype=np.float64))
    return between / total if total > 0 else float("nan")


def v_measure(x: Vectors, groups: Groups, count: int, seed: int) -> float:
    """How well clusters of the vectors are the groups, from 0 (as chance) to 1.

    V-measure (Rosenberg & Hirschberg 2007): harmonic mean of homogeneity and completeness, of
    k-means with as many clusters as groups, the best of ten starts.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        count: of groups.
        seed: of the starts.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score

    found = KMeans(count, n_init=10, random_state=seed).fit_predict(x)
    return float(v_measure_score(groups, found))


def identified(x: Vectors, groups: Groups, train: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether a linear classifier names the group of texts that it was not trained on.

    Logistic regression on features of mean 0 and deviation 1 over the training texts.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        train: (texts,) which of them it is trained on.

    Returns:
        (other texts,) in their order.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    model.fit(x[train], groups[train])
    right: npt.NDArray[np.bool_] = model.predict(x[~train]) == groups[~train]
    return right


def retrieved(x: Vectors, groups: Groups, count: int) -> float:
    """How often the nearest text of another group, by cosine, is the translation.

    The n-th text of each group is the translation of the n-th of every other.

    Args:
        x: (texts, hidden)
        groups: (texts,) as many of each.
        count: of groups.

    Returns:
        Mean over the ordered pairs of groups, and their texts.
    """
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    each = [unit[groups == g] for g in range(count)]
    shares = [
        float(((each[a] @ each[b].T).argmax(axis=1) == np.arange(len(each[a]))).mean())
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    return float(np.mean(shares))
