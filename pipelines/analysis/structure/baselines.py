"""What is scored without looking at a hidden state, and which labels can be told at all."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, get_args

import numpy as np

from bertvision.pipelines.analysis.structure.gold import (
    Floats,
    chain,
    depths,
    distances,
    random_tree,
)
from bertvision.pipelines.analysis.structure.intervals import Share
from bertvision.pipelines.analysis.structure.measure import (
    EDGE_PROBES,
    Metric,
    Scored,
    n_labels,
    structural,
    structural_scores,
)
from bertvision.pipelines.analysis.structure.states import TreeStates

Baseline = Literal["chain", "random", "majority"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Each word hangs on the one before it; a random tree; the label that training has most often."""
RANDOM_TREES = 10
"""Drawn for each sentence; scores are their means."""


def tree_baselines(scored: TreeStates, seed: int) -> dict[Baseline, Scored]:
    """Structural scores of trees that know nothing but the number of words.

    Args:
        scored: the sentences.
        seed: of the random trees.

    Returns:
        By baseline; (trees, sentences) of one chain, or of `RANDOM_TREES` trees.
    """
    random = np.random.default_rng(seed)
    found: dict[Baseline, list[Floats]] = {"chain": [], "random": []}
    for gold in scored.golds:
        words = len(gold.depths)
        drawn = [random_tree(words, random) for _ in range(RANDOM_TREES)]
        trees: dict[Baseline, list[list[int]]] = {"chain": [chain(words)], "random": drawn}
        for name, heads in trees.items():
            between = np.array([distances(tree) for tree in heads])
            deep = np.array([depths(tree) for tree in heads])
            found[name].append(structural(between, deep, gold))
    return {name: structural_scores(of, scored.golds) for name, of in found.items()}


def majority(train: TreeStates, scored: TreeStates) -> Scored:
    """Accuracy of the label that training has most often: (1, sentences)."""
    found: Scored = {}
    for task, kind in EDGE_PROBES.items():
        counts = Counter(label for s in train.sentences for label in kind.labels(s))
        most = min(counts, key=lambda label: (-counts[label], label))
        right = [kind.labels(sentence).count(most) for sentence in scored.sentences]
        found[task] = Share(np.array([right], np.float64), n_labels(scored, task))
    return found


class Unlearned(NamedTuple):
    """Labels that one side lacks, each with its count on the other, most frequent first."""

    untrained: tuple[tuple[str, int], ...]
    """Scored sentences have them and training has not: they count as wrong."""
    unscored: tuple[tuple[str, int], ...]
    """Training has them and scored sentences have not: nothing is known of them."""


def unlearned(train: TreeStates, scored: TreeStates, task: Metric) -> Unlearned:
    """The labels of a task without examples on one side."""
    kind = EDGE_PROBES[task]
    learned, asked = (
        Counter(label for sentence in states.sentences for label in kind.labels(sentence))
        for states in (train, scored)
    )
    lacking = [
        {label: n for label, n in one.items() if label not in other}
        for one, other in ((asked, learned), (learned, asked))
    ]
    return Unlearned(
        *(tuple(sorted(of.items(), key=lambda item: (-item[1], item[0]))) for of in lacking)
    )
