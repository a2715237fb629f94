"""Everything that is asked of a treebank's hidden states: probes trained, sentences scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.structure.edges import EdgeProbes, RelationProbes, UposProbes
from bertvision.pipelines.analysis.structure.gold import Floats
from bertvision.pipelines.analysis.structure.intervals import ByLength, Share
from bertvision.pipelines.analysis.structure.options import StructureOptions
from bertvision.pipelines.analysis.structure.probes import DepthProbes, DistanceProbes, Probes
from bertvision.pipelines.analysis.structure.scores import (
    LONGEST,
    SHORTEST,
    Gold,
    distance_correlation,
    finds_root,
    n_edges,
    rank_correlation,
    right_edges,
)
from bertvision.pipelines.analysis.structure.states import TreeStates
from bertvision.pipelines.analysis.structure.training import train

Metric = Literal["uuas", "dspr", "root", "nspr", "upos", "relation"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""In the order of tables: two of the distance probe, two of the depth probe, two of edge probes."""
EDGE_PROBES: dict[Metric, type[EdgeProbes]] = {"upos": UposProbes, "relation": RelationProbes}

Scored = dict[Metric, Share | ByLength]
"""Scores of sentences by metric; in front of the axis of sentences stand systems."""


class Parts(NamedTuple):
    """The sentences of a snapshot by what they are for."""

    train: TreeStates
    dev: TreeStates
    """Learning rates and epochs are chosen on these."""
    scored: TreeStates


class Measured(NamedTuple):
    """What the probes of one seed say."""

    scored: Scored
    """(probes, sentences): of edge probing each layer alone, then mixes up to each layer but the
    first; otherwise a probe for each layer."""
    weights: Floats
    """(tasks, layers) shares of the layers in the mix of all, in the order of `EDGE_PROBES`."""


def measure(
    parts: Parts,
    options: StructureOptions,
    seed: int,
    done: Callable[[int], object] = lambda epochs: None,
) -> Measured:
    """Train the probes of all layers with one seed, and score the sentences.

    Args:
        parts: of one snapshot.
        options: settings.
        seed: of starts and batches.
        done: told of each epoch that ended, of ``options.epochs`` at most.

    Raises:
        InputError: training has fewer than two parts of speech or relations.
        CorruptStoreError: what is stored is damaged.
    """
    layers, hidden = len(parts.train.layers), parts.train.split.record.hidden_size
    distance = DistanceProbes(layers, hidden, options.rank)
    depth = DepthProbes(layers, hidden, options.rank)
    edges: dict[Metric, EdgeProbes] = {
        name: kind(layers, hidden, options.units, classes_of(parts.train, name))
        for name, kind in EDGE_PROBES.items()
    }
    kinds: dict[str, Probes] = {"distance": distance, "depth": depth}
    kinds |= {str(name): kind for name, kind in edges.items()}
    best = train(kinds, parts.train, parts.dev, options, seed, done)
    scored = parts.scored
    trees: list[Floats] = [np.empty(0)] * len(scored)
    right = {name: np.zeros((kind.count, len(scored))) for name, kind in edges.items()}
    for batch in scored.batches(scored.in_order(options.batch_size)):
        between = distance.by_sentence(best["distance"], batch)
        deep = depth.by_sentence(best["depth"], batch)
        for i, number in enumerate(batch.numbers):
            trees[number] = structural(between[i], deep[i], batch.golds[i])
        for name, kind in edges.items():
            right[name][:, batch.numbers] = kind.right(best[name], batch)
    scores = structural_scores(trees, scored.golds)
    for name in edges:
        scores[name] = Share(right[name], n_labels(scored, name))
    mixes = [kind.weights(best[name][0])[-1].cpu().numpy() for name, kind in edges.items()]
    return Measured(scores, np.array(mixes, np.float64))


def structural(
    between: npt.NDArray[np.floating], deep: npt.NDArray[np.floating], gold: Gold
) -> Floats:
    """The four structural scores of a sentence, of some systems.

    Args:
        between: (systems, words, words) predicted distances.
        deep: (systems, words) predicted depths.
        gold: of the sentence.

    Returns:
        (4, systems): right edges, correlation of distances, whether the root is found, correlation
        of depths; correlations are 0 of sentences whose length does not count.
    """
    found = np.zeros((4, len(between)))
    found[0], found[2] = right_edges(between, gold), finds_root(deep, gold)
    if SHORTEST <= len(gold.depths) <= LONGEST:
        found[1] = distance_correlation(between, gold)
        found[3] = rank_correlation(deep, gold.depths)
    return found


def structural_scores(found: Sequence[Floats], golds: Sequence[Gold]) -> Scored:
    """Scores of all sentences.

    Args:
        found: (sentences,) of `structural`.
        golds: (sentences,)
    """
    values = np.stack(found, axis=-1)
    lengths = np.array([len(gold.depths) for gold in golds])
    return {
        "uuas": Share(values[0], np.array([n_edges(gold) for gold in golds], np.float64)),
        "dspr": ByLength(values[1], lengths),
        "root": Share(values[2], np.ones(len(golds))),
        "nspr": ByLength(values[3], lengths),
    }


def classes_of(states: TreeStates, task: Metric) -> tuple[str, ...]:
    """The labels that training sentences have, in the order of their names.

    Raises:
        InputError: there are fewer than two.
    """
    labels = EDGE_PROBES[task].labels
    found = sorted({label for sentence in states.sentences for label in labels(sentence)})
    if len(found) < 2:
        raise InputError(
            f"{states.split.name} has {len(found)} different labels of {task}: a classifier needs "
            "two or more; give a treebank with more sentences"
        )
    return tuple(found)


def n_labels(states: TreeStates, task: Metric) -> Floats:
    """(sentences,) how many labels each has."""
    labels = EDGE_PROBES[task].labels
    return np.array([len(labels(sentence)) for sentence in states.sentences], np.float64)
