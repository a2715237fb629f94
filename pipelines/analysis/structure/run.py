"""Structure of a workspace's snapshots: which splits are read, what is kept, what stands beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from bertvision.errors import ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.records import FOLDER
from bertvision.pipelines.analysis.structure.baselines import (
    BASELINES,
    Unlearned,
    majority,
    tree_baselines,
    unlearned,
)
from bertvision.pipelines.analysis.structure.gold import Floats
from bertvision.pipelines.analysis.structure.intervals import ByLength, Share, interval, score
from bertvision.pipelines.analysis.structure.measure import (
    EDGE_PROBES,
    METRICS,
    Measured,
    Metric,
    Parts,
    measure,
)
from bertvision.pipelines.analysis.structure.options import StructureOptions, treebank_splits
from bertvision.pipelines.analysis.structure.result import PERCENT, StructureResult, beside
from bertvision.pipelines.analysis.structure.states import TreeStates
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.progress import progress
from bertvision.pipelines.workspace.workspace import Workspace


def structure(
    workspace: Workspace,
    tags: Sequence[str],
    *,
    split: str,
    options: StructureOptions,
    plot: Path | None = None,
) -> StructureResult:
    """Structure in all layers of snapshots, each measured where it is not kept.

    Args:
        workspace: with the stored treebank.
        tags: snapshots.
        split: that is scored; probes are trained on the data set's train, and chosen on its dev.
        options: settings.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``, or a split holds no trees.
        ProvenanceError: splits were not extracted alike.
        CorruptStoreError: what is stored is damaged.
    """
    names = treebank_splits(split)
    folder = workspace.root / FOLDER
    drawn = plot or folder / f"{StructureResult.kind}-{'+'.join(tags)}-{split}.svg"
    check_suffix(drawn)
    default = asdict(StructureOptions())
    given = {name: Given(value, default[name]) for name, value in asdict(options).items()}
    results = []
    for tag in tags:
        splits = [workspace.split(tag, name).require_complete() for name in names]
        _check_alike(splits)
        job = Job(StructureResult, (tag,), (split,), given, splits)
        own = drawn if len(tags) == 1 else None
        measured = partial(_measured, splits, options)
        results.append(kept_or_measured(workspace, job, measured, own))
    if len(results) == 1:
        return results[0]
    found = beside(results)
    found.figure().save(drawn)
    return found


def _measured(splits: Sequence[ActivationSplit], options: StructureOptions) -> StructureResult:
    parts = Parts(*map(TreeStates, splits))
    name = f"structure of {splits[0].tag}"
    seeds = range(options.seed, options.seed + options.seeds)
    with progress(options.seeds * options.epochs, name, "epoch") as bar:
        found = [measure(parts, options, seed, bar.update) for seed in seeds]
    return result_of(str(splits[0].tag), parts, found, options)


def result_of(
    tag: str, parts: Parts, found: Sequence[Measured], options: StructureOptions
) -> StructureResult:
    """The result of the probes of all seeds, with baselines and intervals.

    Args:
        tag: of the snapshot.
        parts: its sentences.
        found: by seed what the probes say.
        options: settings.
    """
    layers = len(parts.scored.layers)
    alone, upto = [], []
    for measured in found:
        scores = {metric: scale(metric) * score(of) for metric, of in measured.scored.items()}
        alone.append([scores[metric][:layers] for metric in METRICS])
        # the mix of the first layer alone is that layer's own probe
        mixes = (np.append(scores[task][:1], scores[task][layers:]) for task in EDGE_PROBES)
        upto.append(list(mixes))
    each = np.array(alone)
    means = {metric: _mean([of.scored[metric] for of in found]) for metric in METRICS}
    ends = np.array(
        [scale(m) * interval(of, options.resamples)[:layers] for m, of in means.items()]
    )
    lacking = {task: unlearned(parts.train, parts.scored, task) for task in EDGE_PROBES}
    untrained, unscored = (_both(lacking, side) for side in (0, 1))
    return StructureResult(
        tags=(tag,),
        layers=parts.scored.layers,
        metrics=METRICS,
        value=each.mean(axis=0)[None],
        low=ends[None, :, :, 0],
        high=ends[None, :, :, 1],
        sd=(each.std(axis=0, ddof=1) if len(each) > 1 else np.full_like(each[0], np.nan))[None],
        baselines=BASELINES,
        baseline=_baselines(parts, options.seed),
        tasks=tuple(EDGE_PROBES),
        upto=np.array(upto)[None],
        weights=np.array([of.weights for of in found])[None],
        parts=tuple(part.split.split for part in parts),
        sentences=tuple(map(len, parts)),
        cut=tuple(part.cut for part in parts),
        wordless=tuple(part.wordless for part in parts),
        untrained=tuple(label for label, _ in untrained),
        untrained_counts=tuple(n for _, n in untrained),
        unscored=tuple(label for label, _ in unscored),
        unscored_counts=tuple(n for _, n in unscored),
        rank=options.rank,
        units=options.units,
    )


def scale(metric: Metric) -> float:
    """By what a metric is multiplied to be shown."""
    return 100.0 if metric in PERCENT else 1.0


def _baselines(parts: Parts, seed: int) -> Floats:
    """(baselines, metrics) scores, means over trees; NaN where a baseline says nothing."""
    found = tree_baselines(parts.scored, seed) | {"majority": majority(parts.train, parts.scored)}
    values = [
        [scale(m) * score(found[b][m]).mean() if m in found[b] else np.nan for m in METRICS]
        for b in BASELINES
    ]
    return np.array(values, np.float64)


def _mean(scored: Sequence[Share | ByLength]) -> Share | ByLength:
    """The mean over seeds sentence by sentence, whose score is the mean of the scores."""
    first = scored[0]
    return first._replace(**{first._fields[0]: np.mean([of[0] for of in scored], axis=0)})


def _both(lacking: Mapping[Metric, Unlearned], side: int) -> list[tuple[str, int]]:
    return [found for of in lacking.values() for found in of[side]]


def _check_alike(splits: Sequence[ActivationSplit]) -> None:
    """Refuse parts that hold other layers, or the same in another encoding."""
    first, *others = splits
    for other in others:
        if other.record.layers != first.record.layers:
            raise ProvenanceError(
                f"{first.name} holds layers {layers_text(first.record.layers)}, {other.name} "
                f"{layers_text(other.record.layers)}: extract the same layers of both"
            )
        for field in ("encoding", "precision", "max_length", "weights_sha256"):
            one, another = (
                {**x.record.provenance, "encoding": x.record.encoding}.get(field)
                for x in (first, other)
            )
            if one != another:
                raise ProvenanceError(
                    f"{first.name} has {field} = {one!r}, {other.name} {another!r}: extract all "
                    "splits of the treebank alike, into another --store"
                )
