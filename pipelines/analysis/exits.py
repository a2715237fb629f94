"""Early exits: score against layers for each criterion.

From the logits of output layers to the curves of all criteria.

Early exits of a snapshot, out of its store: which output layers, and what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.models import Kind
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request, Setting
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Labels, Numbers
from bertvision.pipelines.declare import FromStore, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.reading import Names, Tag, parse_names, parse_tag
from bertvision.pipelines.records import Count, read_record
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.systems import read_windows
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.metrics import METRICS, MetricName
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.tasks.scores import (
    headline,
    headline_metric,
    trivial_score,
)
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.workspace.heads import head_activations
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.runs import HEAD_TOKENS
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.pipelines.tasks.task import Task
    from bertvision.pipelines.variants.exits import ExitLayers, Exits


OfPoints = Annotated[Array, Axes.of("criteria", "points")]
OfLayers = Annotated[Array, Axes.of("layers")]
_LIMITS = {"entropy": "at most", "probability": "at least", "patience": "in a row"}
"""Name of a threshold, by criterion."""


@dataclass(frozen=True, eq=False, repr=False)
class ExitsResult(AnalysisResult):
    """Scores where windows leave the encoder at the first output layer that is sure enough.

    Attributes:
        criteria: Criteria of an output layer: ``entropy``, ``probability``, ``patience``.
        thresholds: (criteria, points) of entropy, nats, the most, of the others the least at which
            a window leaves; NaN where none leaves early.
        mean_layers: (criteria, points) mean number of the layer at which windows leave, descending;
            NaN behind the last point of a criterion.
        scores: (criteria, points) of the task, per cent.
        least: (criteria,) fewest mean layers at any threshold with a score of at most one point
            below that of the last layer.
        least_scores: (criteria,) score there.
        layers: Layers with an output layer, the last of the encoder among them.
        fixed: (layers,) score where all windows leave at this layer.
        weights: (layers,) of their losses in training, sum 1; NaN where the encoder did not hear
            of them.
        metric: Metric of the scores.
        trivial: score of always giving the commonest answer; None where that is 0.
        tolerance: scores that differ by less agree; None where the task gives no scores.
        name: Name of the measured snapshot, for titles.
        n_windows: windows that entered.
        n_items: items that they are of.
    """

    kind = "exits"
    heading = "Leaving the encoder early (exits)"
    caption = "Score against the mean layer at which windows leave, by what decides it"
    reading = (
        "A window leaves at the first output layer that is sure enough, at the last in any case. "
        "In a row are the scores with so many layers in the mean over windows, or fewer, with the "
        "threshold that gives them: entropy of the classes, nats; probability of the likeliest "
        "class; patience, so many output layers in a row that said the same as the one before. "
        "Fixed: all leave at this layer. Weight: of the layer's loss in fine-tuning. Curves are "
        "exact: every threshold was tried."
    )
    seen = (
        "Score over the mean layer: a line for each criterion, one where all leave at one layer, "
        "and level lines for all layers and the commonest answer."
    )

    criteria: Labels
    thresholds: OfPoints
    mean_layers: OfPoints
    scores: OfPoints
    least: Annotated[Array, Axes.of("criteria")]
    least_scores: Annotated[Array, Axes.of("criteria")]
    layers: Numbers
    fixed: OfLayers
    weights: OfLayers
    metric: MetricName
    trivial: float | None
    tolerance: float | None
    name: str
    n_windows: Count
    n_items: Count

    def title(self) -> str:
        """One line that says what was measured on how much."""
        many = f"{METRICS[self.metric].label} of {self.n_items:,} items"
        if self.n_windows != self.n_items:
            many += f" in {self.n_windows:,} windows"
        return f"Early exits, {self.name}, {many}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each point of each curve, then one for each layer that all leave at."""
        values = self.to_json()
        of_points = zip(
            *(values[key] for key in ("criteria", "thresholds", "mean_layers", "scores")),
            strict=True,
        )
        rows = [
            {"name": self.name, "criterion": criterion, "threshold": limit, "layers": mean}
            | {"share": mean / self.layers[-1] if self.layers[-1] else None, self.metric: score}
            for criterion, *lines in of_points
            for limit, mean, score in zip(*lines, strict=True)
            if mean is not None
        ]
        return rows + [
            {"name": self.name, "criterion": "fixed", "threshold": None, "layers": float(layer)}
            | {"share": layer / self.layers[-1] if self.layers[-1] else None, self.metric: score}
            | {"weight": weight}
            for layer, score, weight in zip(
                self.layers, values["fixed"], values["weights"], strict=True
            )
        ]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each output layer: what so many layers in the mean are enough for."""
        values, rows = self.to_json(), []
        for place, layer in enumerate(self.layers):
            row = {"layer": layer, "fixed": values["fixed"][place]}
            row["weight"] = values["weights"][place]
            for k, criterion in enumerate(self.criteria):
                fits = np.flatnonzero(self.mean_layers[k] <= layer)
                at = int(fits[0]) if len(fits) else None  # the most that is allowed
                row[criterion] = None if at is None else values["scores"][k][at]
                row[f"{criterion}_threshold"] = None if at is None else values["thresholds"][k][at]
            rows.append(row)
        return rows

    def columns(self) -> list[Column]:
        """Score and threshold of each criterion."""
        columns = [Column("layer", "layers", "text"), Column("fixed", "fixed")]
        for criterion in self.criteria:
            digits = 0 if criterion == "patience" else 3
            columns.append(Column(criterion, criterion))
            label = _LIMITS.get(criterion, "threshold")
            columns.append(Column(f"{criterion}_threshold", label, digits=digits))
        if np.isfinite(self.weights).any():
            columns.append(Column("weight", "weight", digits=3))
        return columns

    def remarks(self) -> list[str]:
        """How few layers would do, and what one scores who looks at nothing."""
        least = ", ".join(
            f"{value:.2f} by {criterion}"
            for criterion, value in zip(self.criteria, self.least.tolist(), strict=True)
        )
        remarks = [
            f"Within one point of all {self.layers[-1]} layers ({float(self.fixed[-1]):.1f}): "
            f"{least} in the mean, with a threshold that was chosen on what is scored here."
        ]
        if self.trivial is not None:
            remarks.append(f"The commonest answer has {self.trivial:.1f}.")
        if self.tolerance is not None:
            remarks.append(f"Scores that differ by less than {self.tolerance:.3g} agree.")
        return remarks

    def charts(self) -> dict[str, Chart]:
        """Score over the mean layer, a line for each criterion."""
        metric = METRICS[self.metric].label
        chart = curves(
            self.rows(),
            self.metric,
            f"{metric} ({METRICS[self.metric].unit})",
            by=["criterion"],
            places="layers",
            of_places="mean layer at which windows leave",
            levels={"all layers": float(self.fixed[-1]), "commonest answer": self.trivial},
        )
        return {self.metric: chart}


WITHIN = 1.0
"""Points below the full encoder that `ExitsResult.least` allows."""
_STEPS = 4
"""Points of a curve that are kept, for each layer."""


def exits_of_logits(
    task: Task,
    logits: Sequence[Logits],
    layers: Sequence[int],
    criteria: Sequence[str],
    *,
    tolerance: float | None = None,
    threshold: float | None = None,
    weights: Sequence[float] | None = None,
    name: str = "x",
) -> ExitsResult:
    """Score against the mean layer at which windows leave, for each criterion.

    Args:
        task: Task that was learned.
        logits: Logits of each output layer, from the lowest, of the same windows.
        layers: their layers, ascending.
        criteria: Criteria of `confidence.CRITERIA`.
        tolerance: scores that differ by less agree; None is a tenth of the standard deviation of
            what the last layer gives.
        threshold: Threshold of no answer, of spans; None where there always is one.
        weights: Weights of their losses in training, summing to 1; None where they are not known.
        name: Name of what was measured, for titles.

    Raises:
        InputError: logits are not finite, or the task is scored by something that is no sum over
            items.
    """
    from bertvision.pipelines.analysis.exit_curve import (
        confidence,
        exit_curve,
        outcomes_of,
        points_of,
    )

    if not all(np.isfinite(values).all() for one in logits for values in one.arrays.values()):
        raise InputError(f"the logits of {name} hold NaN or infinity: its training has diverged")
    metrics = headline(task.score(logits[-1], None).rules)
    metric = headline_metric(task.name, metrics)
    outcomes = outcomes_of(task, logits, metric, threshold)
    windows = logits[-1].windows
    fixed = [
        outcomes.metric(outcomes.total(np.full(len(outcomes.item), place))[None])[0]
        for place in range(len(layers))
    ]
    if threshold in (None, 0.0) and not np.isclose(fixed[-1], metrics[metric], atol=1e-6):
        raise InputError(
            f"{task.name} computes its {metric} in a way of its own ({metrics[metric]:.4f}, and "
            f"{fixed[-1]:.4f} as it is followed over thresholds here)"
        )
    values = next(iter(logits[-1].arrays.values()))
    scores = values.ndim == 2 and values.shape[1] == 1
    if scores and tolerance is None:
        tolerance = 0.1 * float(values.std())
    arrays = [one.arrays for one in logits]
    budgets = np.linspace(layers[0], layers[-1], _STEPS * (layers[-1] - layers[0]) + 1)
    shown: list[tuple[Array, Array, Array]] = []
    least, least_scores = [], []
    for criterion in criteria:
        sure = confidence(criterion, arrays, windows.n_tokens, tolerance or 0.0)
        curve = exit_curve(sure, layers, outcomes)
        near = np.flatnonzero(curve.scores >= fixed[-1] - WITHIN)
        first = near[np.argmin(curve.layers[near])]
        least.append(float(curve.layers[first]))
        least_scores.append(float(curve.scores[first]))
        at = points_of(curve, budgets)
        sign = -1 if criterion == "entropy" else 1
        limits = np.where(np.isinf(curve.thresholds[at]), np.nan, sign * curve.thresholds[at])
        shown.append((limits, curve.layers[at], curve.scores[at]))
    thresholds, mean_layers, found = (_padded(list(one)) for one in zip(*shown, strict=True))
    trivial = trivial_score(metrics, metric)
    return ExitsResult(
        criteria=tuple(criteria),
        thresholds=thresholds,
        mean_layers=mean_layers,
        scores=found,
        least=np.array(least),
        least_scores=np.array(least_scores),
        layers=tuple(layers),
        fixed=np.array(fixed),
        weights=np.array(weights or [np.nan] * len(layers)),
        metric=metric,
        trivial=None if trivial is None else float(trivial),
        tolerance=tolerance if scores else None,
        name=name,
        n_windows=len(outcomes.item),
        n_items=len(windows.items),
    )


def _padded(rows: Sequence[Array]) -> Array:
    """(rows, longest), NaN behind the shorter ones."""
    padded = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


@job
def exits(
    checkpoint: Tag,
    *,
    split: str = "dev",
    criterion: Names | None = None,
    tolerance: Annotated[float | None, Option(ge=0, apart=True)] = None,
    **where: Unpack[FromStore],
) -> ExitsResult:
    """Measure what leaving the encoder early saves and costs.

    Windows that are sure leave early. Stored hidden states go through the output layers of the
    snapshot, and every threshold of a criterion is followed in one pass; the encoder is not run. A
    second call with the same settings, of the same weights, gives what was kept.

    Args:
        checkpoint: Snapshot that was fine-tuned with --variant exits:LAYERS.
        split: Split that is scored: dev or tune.
        criterion: Criteria by which a window leaves: entropy,probability,patience (default all).
        tolerance: Scores that differ by less agree (default a tenth of their standard deviation).

    Raises:
        UnknownNameError: there is no such snapshot, or what its output layers read is not stored.
        InputError: the snapshot has no output layer below its last, a criterion does not fit the
            task, or ``plot`` does not end in ``.svg``.
        WorkspaceError: fine-tuning kept no answers of this split, or those of other weights.
    """
    request = Request(exits, locals())
    space, tag = request.workspace, parse_tag(checkpoint)
    info = read_snapshot_info(space.require_snapshot(tag))
    from bertvision.pipelines.analysis.exit_curve import fitting_criteria
    from bertvision.pipelines.tasks.task import load_task
    from bertvision.pipelines.training.evaluate import run_over
    from bertvision.pipelines.variants.exits import ExitHead, Exits

    variants = [v for v in load_variants(info.finetune.variant) if isinstance(v, Exits)]
    depth = space.config.model.num_hidden_layers
    layers = tuple(at for v in variants for at, weight in v.weights(depth).items() if weight)
    if len(layers) < 2:
        raise InputError(
            f"snapshot {tag} of {space.root} has no trained output layer below its last: "
            "`bertvision finetune --variant exits:all` in another --workspace makes such snapshots"
        )
    if split not in ("dev", "tune"):
        raise InputError(f"--split {split}: what the last layer says is kept of dev and tune alone")
    task, kind = load_task(info.task.name), head_kind(info.task.name)
    scores = task.kind != "span" and task.outputs(info.task) == 1
    asked = None if criterion is None else parse_names(criterion)
    chosen = fitting_criteria(asked, scores=scores)
    if tolerance is not None and not scores:
        raise InputError(f"--tolerance {tolerance:g} is for scores, and {task.name} has none")
    stored = head_activations(space, tag, HEAD_TOKENS[kind], split)
    stored.layer_positions(layers[:-1])
    every = ",".join(fitting_criteria(None, scores=scores))
    request.settings["criterion"] = Setting(",".join(chosen), every, "-".join(chosen))
    request.tags, request.names, request.read = [tag], [split], [stored]

    def measure() -> ExitsResult:
        output_layers, weights = _output_layers(space, tag, variants[0], kind)
        windows = read_windows(space, tag, split)
        full, threshold = _of_the_last(space, tag, split, windows, stored)
        modules = [ExitHead(output_layers, i, at, kind) for i, at in enumerate(layers[:-1])]
        below = run_over(modules, task, stored, "32", f"exits {tag} {split}", layers=layers[:-1])
        logits = [Logits(_in_order(arrays, stored, windows, task), windows) for arrays in below]
        return exits_of_logits(
            task,
            [*logits, full],
            layers,
            chosen,
            tolerance=tolerance,
            threshold=threshold,
            weights=[weights[at] for at in layers],
            name=f"{tag}/{split}",
        )

    return request.answer(ExitsResult, measure)


def _output_layers(
    workspace: Workspace, tag: str, variant: Exits, kind: Kind
) -> tuple[ExitLayers, dict[int, float]]:
    """The output layers that a snapshot keeps, and the weights of the losses by layer."""
    from bertvision.pipelines.encoders.weights import weights_of
    from bertvision.pipelines.tasks.task import load_task
    from bertvision.pipelines.variants.exits import NAME, ExitLayers, ExitsDetached

    config, folder = workspace.config, workspace.snapshot_dir(tag)
    weights = variant.weights(config.model.num_hidden_layers)
    *below, _ = weights
    outputs = 2 if kind == "span" else load_task(config.task.name).outputs(config.task)
    exits = ExitLayers(below, config.model.hidden_size, outputs, learned=variant.learned)
    names = list(exits.state_dict())
    stored = weights_of(folder, [f"{NAME}.{name}" for name in names])
    exits.load_state_dict({name: stored[f"{NAME}.{name}"] for name in names})
    if exits.scores is not None:
        weights = dict(zip(weights, exits.scores.detach().softmax(0).tolist(), strict=True))
    if isinstance(variant, ExitsDetached):
        weights = dict.fromkeys(weights, float("nan"))
    return exits.eval(), weights


def _of_the_last(
    workspace: Workspace, tag: str, split: str, windows: WindowIndex, stored: ActivationSplit
) -> tuple[Logits, float | None]:
    """Logits of the last layer, and the threshold of no answer that it answers with."""
    folder, name = workspace.bert_dir(tag), f"{split}.safetensors"
    scores = read_record(folder / "metrics.json", BertScores, BERT_COMMAND)
    if scores.weights_sha256 != stored.record.provenance.get("weights_sha256"):
        raise WorkspaceError(
            f"{folder} has answers of other weights than {stored.name} was extracted with: "
            f"`{BERT_COMMAND}` makes those, `bertvision extract --checkpoint {tag}` these"
        )
    logits = Logits.load(folder / name, windows, BERT_COMMAND, scores.sha256.get(name))
    return logits, scores.rules["n-best"]["threshold"] if "n-best" in scores.rules else None


def _in_order(
    arrays: dict[str, npt.NDArray[np.float32]],
    stored: ActivationSplit,
    windows: WindowIndex,
    task: Task,
) -> dict[str, Any]:
    """Logits in the order of the data, out of the stored one."""
    lengths = stored.plan.n_tokens.astype(np.int64)
    place = np.argsort(stored.plan.example_id, kind="stable")
    same = len(place) == len(windows.n_tokens)
    if task.kind == "span":
        same = same and np.array_equal(lengths[place], windows.n_tokens)
        first = np.cumsum(lengths) - lengths
        tokens = [np.arange(first[at], first[at] + lengths[at]) for at in place]
        place = np.concatenate(tokens)
    if not same:
        raise ProvenanceError(
            f"{stored.name} holds other windows than the data make now: extract it again, in "
            "another --store"
        )
    return {name: values[place] for name, values in arrays.items()}
