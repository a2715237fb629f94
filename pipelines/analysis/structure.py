"""Structure of a workspace's snapshots: gold trees in each layer, by structural and edge probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from bertvision.errors import ProvenanceError, UnknownNameError, counted
from bertvision.pipelines.analysis.moments import Array as Floats
from bertvision.pipelines.analysis.request import Request, check_layers
from bertvision.pipelines.analysis.result import FOLDER, AnalysisResult, Axes, Labels, Numbers
from bertvision.pipelines.declare import DEFAULTS, FigurePath, StorePath, WorkspacePath, job
from bertvision.pipelines.files import to_json
from bertvision.pipelines.plotting import Chart, check_suffix, curves
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import Tags, parse_tags, path_of
from bertvision.pipelines.readouts.options import (
    BASELINES,
    SYNTAX_METRICS,
    Baseline,
    StructureOptions,
    SyntaxMetric,
    treebank_splits,
)
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.pipelines.readouts.structure import Measured, Parts
    from bertvision.pipelines.readouts.trees import ByLength, Share


Scores = Annotated[Floats, Axes.of("tags", "metrics", "layers")]
BySeed = Annotated[Floats, Axes.of("tags", "seeds", "tasks", "layers")]
OfParts = Annotated[tuple[Count, ...], Axes.of("parts")]

PERCENT = ("uuas", "root", "upos", "relation")
"""Metrics in per cent; the others are correlations from −1 to 1."""
LABELS = {
    "uuas": "UUAS",
    "dspr": "DSpr",
    "root": "root",
    "nspr": "NSpr",
    "upos": "part of speech",
    "relation": "relation",
    "chain": "chain",
    "random": "random trees",
    "majority": "majority",
}


@dataclass(frozen=True, eq=False, repr=False)
class StructureResult(AnalysisResult):
    """Structure in the layers of one snapshot, or of several beside each other.

    Attributes:
        tags: The snapshots.
        layers: Layer numbers (0 = embedding output).
        metrics: Metrics of each layer.
        value: (tags, metrics, layers) means over seeds, in per cent or correlations.
        low: (tags, metrics, layers) lower end of the 95 % interval over sentences.
        high: (tags, metrics, layers) upper end.
        sd: (tags, metrics, layers) standard deviation over seeds; NaN of one seed.
        baselines: Systems that are scored without hidden states.
        baseline: (baselines, metrics) scores; NaN where a baseline says nothing.
        tasks: Tasks of edge probing.
        upto: (tags, seeds, tasks, layers) accuracy in per cent of mixes of the layers up to each.
        weights: (tags, seeds, tasks, layers) shares of the layers in the mix of all.
        parts: Train, dev, and the split that is scored.
        sentences: Sentences that entered, by part.
        cut: Sentences left out since they are longer than a window, by part.
        wordless: Others left out since a word of theirs has no token, by part.
        untrained: Labels that scored sentences have and training has not.
        untrained_counts: Number of times that the scored sentences have each.
        unscored: Labels that training has and no scored sentence.
        unscored_counts: Number of times that training has each.
        rank: Rank of the structural probes.
        units: Units of the hidden layer of the classifiers.
    """

    kind = "structure"
    heading = "Structure: trees in hidden states"
    caption = "Structural probes and edge probing: what of gold trees a probe of each layer tells"
    reading = (
        "UUAS: edges of the gold tree, in per cent, that the spanning tree of predicted distances "
        "has, punctuation left out. DSpr: rank correlation of predicted and gold distances. Root: "
        "sentences in per cent whose root has the smallest predicted depth. NSpr: rank correlation "
        "of depths. Correlations are averaged over lengths of 5 to 50 words. Part of speech, "
        "relation: accuracy in per cent of edge probes on the layer alone, the relation of an arc "
        "whose two words are given. ± is the standard deviation over seeds; intervals over "
        "sentences are in what --csv and --json write."
    )
    seen = (
        "Panels over the layers, a line for each snapshot with 95 % intervals over sentences; "
        "level lines are baselines. Mixes of all layers up to one, of edge probing, have panels "
        "of their own."
    )

    tags: Labels
    layers: Numbers
    metrics: Annotated[tuple[SyntaxMetric, ...], Field(min_length=1)]
    value: Scores
    low: Scores
    high: Scores
    sd: Scores
    baselines: tuple[Baseline, ...]
    baseline: Annotated[Floats, Axes.of("baselines", "metrics")]
    tasks: tuple[SyntaxMetric, ...]
    upto: BySeed
    weights: BySeed
    parts: Labels
    sentences: OfParts
    cut: OfParts
    wordless: OfParts
    untrained: tuple[str, ...]
    untrained_counts: Annotated[tuple[Count, ...], Axes.of("untrained")]
    unscored: tuple[str, ...]
    unscored_counts: Annotated[tuple[Count, ...], Axes.of("unscored")]
    rank: int
    units: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        counts = ", ".join(
            f"{n:,} {name}" for name, n in zip(self.parts, self.sentences, strict=True)
        )
        return f"Structure, {', '.join(self.tags)}, sentences: {counts}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each snapshot and layer, then one for each baseline, without a layer."""
        ends = {"": self.value, "_sd": self.sd, "_low": self.low, "_high": self.high}
        numbers = {
            f"{metric}{end}": values[:, m]
            for m, metric in enumerate(self.metrics)
            for end, values in ends.items()
        }
        for k, task in enumerate(self.tasks):
            numbers[f"{task}_upto"] = self.upto[:, :, k].mean(axis=1)
            numbers[f"{task}_weight"] = self.weights[:, :, k].mean(axis=1)
        lines = self.listed({"system": self.tags, "layer": self.layers}, numbers)
        empty = dict.fromkeys(lines[0]) if lines else {}
        for name, values in zip(self.baselines, to_json(self.baseline), strict=True):
            scores = dict(zip(self.metrics, values, strict=True))
            lines.append({**empty, "system": name, "layer": None, **scores})
        return lines

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with words for what has no layer."""
        return [
            row
            | {
                "system": LABELS.get(row["system"], row["system"]),
                "layer": "" if row["layer"] is None else str(row["layer"]),
            }
            for row in self.rows()
        ]

    def columns(self) -> list[Column]:
        """The metrics, of edge probing on each layer alone."""
        return [
            Column("system", "of", "text"),
            Column("layer", "layer", "text"),
            *(
                Column(m, LABELS[m], digits=1 if m in PERCENT else 3, sd=True, interval=False)
                for m in self.metrics
            ),
        ]

    def remarks(self) -> list[str]:
        """Layers that edge probes look at, and everything that was left out."""
        said = [
            self._layers_of(t, k) for t in range(len(self.tags)) for k in range(len(self.tasks))
        ]
        for name, n, cut, wordless in zip(
            self.parts, self.sentences, self.cut, self.wordless, strict=True
        ):
            if out := cut + wordless:
                said.append(
                    f"{name}: left out {out:,} of {counted(n + out, 'sentence')}, {cut:,} longer "
                    f"than a window, {wordless:,} with a word that has no token."
                )
        for what, labels, counts in (
            ("Not in training, and counted as wrong", self.untrained, self.untrained_counts),
            ("In training alone", self.unscored, self.unscored_counts),
        ):
            if labels:
                named = (f"{label} ({n:,})" for label, n in zip(labels, counts, strict=True))
                said.append(f"{what}: {', '.join(named)}.")
        return said

    def centres(self) -> Floats:
        """(tags, seeds, tasks) centres of gravity of the mixes of all layers."""
        from bertvision.pipelines.readouts.structure import centre_of_gravity

        return centre_of_gravity(self.weights, self.layers)

    def expected_layers(self) -> Floats:
        """(tags, seeds, tasks) expected layers of the mixes up to each; NaN where none adds."""
        from bertvision.pipelines.readouts.structure import expected_layer

        return expected_layer(self.upto, self.layers)

    def charts(self) -> dict[str, Chart]:
        """A line for each snapshot with intervals over sentences, and level baselines."""
        rows, charts = self.rows(), dict[str, Chart]()
        for m, metric in enumerate(self.metrics):
            unit = "%" if metric in PERCENT else "correlation"
            levels = {
                LABELS[b]: values[m]
                for b, values in zip(self.baselines, self.baseline, strict=True)
            }
            label = f"{LABELS[metric]} ({unit})"
            charts[metric] = curves(
                rows, metric, label, by=["system"], levels=levels, title=LABELS[metric]
            )
        for task in self.tasks:
            label = f"{LABELS[task]}, mix of the layers up to it (%)"
            charts[f"{task}_upto"] = curves(rows, f"{task}_upto", label, by=["system"])
        return charts

    def _layers_of(self, t: int, k: int) -> str:
        """The layers that a task's edge probes look at."""
        from bertvision.pipelines.readouts.structure import centre_of_gravity, expected_layer

        weights, upto = self.weights[t, :, k].mean(axis=0), self.upto[t, :, k].mean(axis=0)
        expected = expected_layer(upto, self.layers)
        told = f"{expected:.2f}" if np.isfinite(expected) else "none (no layer adds to the first)"
        best = self.layers[int(np.argmax(upto))]
        return (
            f"{self.tags[t]}, {LABELS[self.tasks[k]]}: centre of gravity of the mix "
            f"{centre_of_gravity(weights, self.layers):.2f}, expected layer {told}, best mix of "
            f"the layers up to {best} with {upto.max():.1f}."
        )


def beside(results: Sequence[StructureResult]) -> StructureResult:
    """Several snapshots in one result.

    Args:
        results: Results of the same sentences, measured alike.

    Raises:
        ProvenanceError: they are of different layers or sentences.
    """
    first, *others = results
    for other in others:
        for name in ("layers", "parts", "sentences", "metrics", "tasks", "baselines"):
            one, another = getattr(first, name), getattr(other, name)
            if one != another:
                raise ProvenanceError(
                    f"{', '.join(first.tags)} and {', '.join(other.tags)} cannot stand side by "
                    f"side: their {name} are {one} and {another}: extract both alike"
                )
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(result, name) for result in results])
        for name in ("value", "low", "high", "sd", "upto", "weights")
    }
    tags = tuple(tag for result in results for tag in result.tags)
    return replace(first, tags=tags, **joined)


@job
def structure(
    checkpoint: Tags,
    *,
    split: str = "treebank-test",
    options: StructureOptions = DEFAULTS,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> StructureResult:
    """Measure how much of gold syntax trees each layer holds.

    Structural probes and edge probing read a stored treebank with train and dev, which `bertvision
    extract --task treebank` stores. A second call with the same settings, of the same weights,
    gives what was kept.

    Args:
        checkpoint: Snapshots, such as 0e,1e; untrained has random weights.
        split: Split to score; probes are trained on the treebank's train.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a split holds no trees.
        ProvenanceError: splits were not extracted alike; names what differs.
    """
    tags, names = parse_tags(checkpoint), treebank_splits(split)
    given = locals() if len(tags) == 1 else {**locals(), "plot": None}
    if plot is not None:
        check_suffix(Path(plot))
    asked = []
    for tag in tags:
        request = Request(structure, given)
        try:
            splits = request.splits([tag], *names)
        except UnknownNameError as error:
            if f"no split {split!r}" not in str(error):
                raise
            raise UnknownNameError(
                f"{error}; a part that is stored is scored with --split, such as "
                "--split treebank-dev"
            ) from None
        request.names = [split]
        _check_alike(splits)
        asked.append((request, splits))
    results = [
        request.answer(StructureResult, partial(_measured, splits, options))
        for request, splits in asked
    ]
    if len(results) == 1:
        return results[0]
    joined = beside(results)
    name = f"{StructureResult.kind}-{'+'.join(tags)}-{split}.svg"
    joined.figure().save(path_of(plot) or request.workspace.root / FOLDER / name)
    return joined


def _measured(splits: Sequence[ActivationSplit], options: StructureOptions) -> StructureResult:
    from bertvision.pipelines.readouts.structure import Parts, measure
    from bertvision.pipelines.readouts.trees import TreeStates

    parts = Parts(*map(TreeStates, splits))
    name = f"structure of {splits[0].tag}"
    seeds = range(options.seed, options.seed + options.seeds)
    with progress(options.seeds * options.epochs, name, "epoch") as bar:
        measured = [measure(parts, options, seed, bar.update) for seed in seeds]
    return result_of(str(splits[0].tag), parts, measured, options)


def result_of(
    tag: str, parts: Parts, by_seed: Sequence[Measured], options: StructureOptions
) -> StructureResult:
    """The result of the probes of all seeds, with baselines and intervals.

    Args:
        tag: Tag of the snapshot.
        parts: Its sentences.
        by_seed: Scores of the probes, by seed.
        options: Settings of the training and the intervals.
    """
    from bertvision.pipelines.readouts.structure import EDGE_PROBES, unlearned
    from bertvision.pipelines.readouts.trees import interval, score

    layers = len(parts.scored.layers)
    alone, upto = [], []
    for measured in by_seed:
        scores = {m: scale(m) * score(scored) for m, scored in measured.scored.items()}
        alone.append([scores[metric][:layers] for metric in SYNTAX_METRICS])
        # the mix of the first layer alone is that layer's own probe
        upto.append([np.append(scores[t][:1], scores[t][layers:]) for t in EDGE_PROBES])
    each = np.array(alone)
    means = {m: _mean([measured.scored[m] for measured in by_seed]) for m in SYNTAX_METRICS}
    ends = np.array(
        [scale(m) * interval(mean, options.resamples)[:layers] for m, mean in means.items()]
    )
    lacking = [unlearned(parts.train, parts.scored, task) for task in EDGE_PROBES]
    untrained = [label for labels in lacking for label in labels.untrained]
    unscored = [label for labels in lacking for label in labels.unscored]
    return StructureResult(
        tags=(tag,),
        layers=parts.scored.layers,
        metrics=SYNTAX_METRICS,
        value=each.mean(axis=0)[None],
        low=ends[None, :, :, 0],
        high=ends[None, :, :, 1],
        sd=(each.std(axis=0, ddof=1) if len(each) > 1 else np.full_like(each[0], np.nan))[None],
        baselines=BASELINES,
        baseline=_baselines(parts, options.seed),
        tasks=tuple(EDGE_PROBES),
        upto=np.array(upto)[None],
        weights=np.array([measured.weights for measured in by_seed])[None],
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


def scale(metric: SyntaxMetric) -> float:
    """The factor that a metric is shown by."""
    return 100.0 if metric in PERCENT else 1.0


def _baselines(parts: Parts, seed: int) -> Floats:
    """(baselines, metrics) scores, means over trees; NaN where a baseline says nothing."""
    from bertvision.pipelines.readouts.structure import majority, tree_baselines
    from bertvision.pipelines.readouts.trees import score

    scored = tree_baselines(parts.scored, seed) | {"majority": majority(parts.train, parts.scored)}
    values = [
        [
            scale(m) * score(scored[b][m]).mean() if m in scored[b] else np.nan
            for m in SYNTAX_METRICS
        ]
        for b in BASELINES
    ]
    return np.array(values, np.float64)


def _mean(scored: Sequence[Share | ByLength]) -> Share | ByLength:
    """The mean over seeds sentence by sentence, whose score is the mean of the scores."""
    first = scored[0]
    return first._replace(**{first._fields[0]: np.mean([one[0] for one in scored], axis=0)})


def _check_alike(splits: Sequence[ActivationSplit]) -> None:
    """Refuse parts that hold other layers, or the same in another encoding."""
    check_layers(splits)
    facts = [{**x.record.provenance, "encoding": x.record.encoding} for x in splits]
    for field, (other, own) in product(
        ("encoding", "precision", "max_length", "weights_sha256"), zip(splits, facts, strict=True)
    ):
        if own.get(field) != facts[0].get(field):
            raise ProvenanceError(
                f"{splits[0].name} has {field} = {facts[0].get(field)!r}, {other.name} "
                f"{own.get(field)!r}: extract all splits of the treebank alike, into another "
                "--store"
            )
