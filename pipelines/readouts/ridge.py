"""Probes of scores: ridge regressions on pooled hidden states of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Unpack

import numpy as np

from bertvision.errors import NonFiniteError
from bertvision.pipelines.extraction.layers import layers_text, wanted_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.progress import progress
from bertvision.pipelines.readouts.batched import Floats, Ints
from bertvision.pipelines.readouts.directions import SavedProbe
from bertvision.pipelines.readouts.inputs import (
    Extraction,
    Float32s,
    ensure_inputs,
    locked,
    read_inputs,
    with_twin,
)
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe_data import ProbeData, read_data
from bertvision.pipelines.readouts.probe_results import LayerProbe, LayerProbes, Row, made_from
from bertvision.pipelines.readouts.similarity_results import Value, agreement
from bertvision.pipelines.tasks.sentences.metrics import pearson
from bertvision.pipelines.workspace.workspace import Workspace

_RESAMPLES = 1000


class Ridge(NamedTuple):
    """A ridge regression, for vectors as they are stored."""

    weight: Floats
    """(width,)"""
    bias: float
    weight_decay: float
    """The chosen one."""

    @classmethod
    def fit(cls, x: Float32s, scores: Floats, options: ProbeOptions) -> Ridge:
        """Fit scikit-learn's ``RidgeCV``, which chooses by the error of each example left out.

        Its ``alpha`` is the weight decay times the examples; the bias has no penalty (Hoerl and
        Kennard 1970, Technometrics 12; leave-one-out in closed form: Golub, Heath and Wahba 1979,
        Technometrics 21).

        Args:
            x: (examples, width)
            scores: (examples,)
            options: Settings with ``weight_decays`` and ``standardise``.
        """
        from sklearn.linear_model import RidgeCV

        wide = x.astype(np.float64)
        mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
        if options.standardise:
            mean, spread = wide.mean(axis=0), wide.std(axis=0)
            varies = spread > 1e-8 * (np.abs(mean) + 1)
            scale = np.divide(1, spread, out=np.zeros_like(spread), where=varies)
        alphas = np.array(options.weight_decays) * len(x)
        model = RidgeCV(alphas).fit((wide - mean) * scale, scores)
        weight = model.coef_ * scale
        chosen = options.weight_decays[int(np.argmin(np.abs(alphas - model.alpha_)))]
        return cls(weight, float(model.intercept_ - weight @ mean), chosen)

    def predict(self, x: Float32s) -> Floats:
        """Scores of vectors, (examples, width): (examples,)."""
        predicted: Floats = x.astype(np.float64) @ self.weight + self.bias
        return predicted


class RidgeRecord(LayerProbe):
    """A ridge regression on one input; ``held_out`` is Pearson's correlation."""

    pearson: Value
    """From −100 to 100, over the scored examples."""
    spearman: Value
    rmse: float
    """Root of the mean squared error, in points of the score."""


class RidgeFile(LayerProbes[RidgeRecord]):
    """Probes of scores."""

    folder: ClassVar[str] = "ridge_probes"

    mean_rmse: float
    """``rmse`` of giving every scored example the mean of the training examples."""


def probe_scores(
    workspace: Workspace,
    dataset: str | None,
    tags: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    poolings: Sequence[TokenPooling] | None = None,
    concat: Sequence[str] = (),
    untrained: bool = False,
    save: bool = False,
    options: ProbeOptions,
    **extraction: Unpack[Extraction],
) -> list[RidgeFile]:
    """Fit ridge regressions on each layer, or find those fitted before; see `probe`.

    Args:
        workspace: Workspace with the snapshots.
        dataset: An added data set; None is the workspace's own data.
        tags: The snapshots.
        layers: Indices of hidden states; None is all.
        poolings: Poolings over the tokens of each window, by default cls (of decoders last) and
            mean.
        concat: Layers to be put end to end besides.
        untrained: Whether to probe the twin with random weights too.
        save: Whether to keep the weights too.
        options: Settings of the probes.
        **extraction: Settings of the extraction of hidden states that are missing.

    Returns:
        Everything that is now kept of each snapshot and pooling, snapshots in order.

    Raises:
        InputError: the data have no scores, or there is no such layer.
        NonFiniteError: hidden states hold NaN or infinity.
        ProvenanceError: probes or hidden states were made from something else; names the field.
        LockedError: another process probes the same data set.
    """
    source = workspace.dataset(dataset)
    data, model = read_data(source, options), workspace.config.model
    poolings = poolings or (model.pooling, "mean")
    choice = partial(wanted_layers, layers, concat, model.num_hidden_layers)
    snapshots = with_twin(tags, untrained)
    ensure_inputs(workspace, snapshots, source.name, list(data.sizes), poolings, choice, extraction)
    every = []
    with locked(workspace.root / RidgeFile.folder / data.name, f"probing {data.name}"):
        for tag in snapshots:
            for pooling in poolings:
                splits = [PooledSplit(workspace, tag, source.name, s, pooling) for s in data.sizes]
                file = _new(data, splits, options).resume(workspace.root)
                wanted = list(choice(splits[0].stored.record.layers))
                _complete(workspace, data, splits, file, wanted, save)
                every.append(file)
    return every


def _new(data: ProbeData, splits: Sequence[PooledSplit], options: ProbeOptions) -> RidgeFile:
    """A file without probes, with everything that decides what they become."""
    scores = _scores(data)
    errors = [scores[fold.test] - scores[fold.train].mean() for fold in data.folds]
    return RidgeFile(
        dataset=data.name,
        task=data.task,
        tag=splits[0].tag,
        pooling=splits[0].pooling,
        settings=options,
        made_from=made_from(splits),
        examples=data.counts,
        soundness=data.soundness,
        mean_rmse=_root_mean_square(np.concatenate(errors)),
    )


def _complete(
    workspace: Workspace,
    data: ProbeData,
    splits: Sequence[PooledSplit],
    file: RidgeFile,
    wanted: Iterable[tuple[int, ...]],
    save: bool,
) -> None:
    """Fit what is missing of a file, and write it after each input."""
    root, missing = workspace.root, []
    for layers in wanted:
        record = file.find(layers)
        if record is None or (save and not file.has_weights(root, record)):
            missing.append(layers)
    with progress(len(missing), f"{data.name} {file.tag} {file.pooling}", "probe") as bar:
        for layers in missing:
            x = np.concatenate([read_inputs(pooled, [layers])[:, 0] for pooled in splits])
            if not np.isfinite(x).all():
                raise NonFiniteError(
                    f"hidden states of {data.name} at {file.tag} hold NaN or infinity: no probe "
                    "can be trained on them; `bertvision store verify` says where they are"
                )
            record, first = measure_scores(x, data, file.settings, layers)
            if save:
                parameters = {
                    "weight": first.weight[None].astype(np.float32),
                    "bias": np.array([first.bias], np.float32),
                }
                nothing = np.empty((0, x.shape[1]), np.float32)
                saved = SavedProbe(parameters, nothing, ())
                record.weights = saved.save(file.weights_path(root, layers))
            file.put(record)
            file.write(root)
            bar.update(1)


def measure_scores(
    x: Float32s, data: ProbeData, options: ProbeOptions, layers: tuple[int, ...]
) -> tuple[RidgeRecord, Ridge]:
    """Fit one input fold by fold, and correlate its scores with the real ones.

    Args:
        x: (examples, width) vectors of the input.
        data: Scores and folds.
        options: Settings of the probes.
        layers: Hidden states of the input.

    Returns:
        The measures, with 95 % intervals over resampled examples; and the regression of the first
        fold.
    """
    scores, scored = _scores(data), data.scored
    predicted = np.empty(len(scores))
    fits, held_out = [], []
    for fold in data.folds:
        fits.append(Ridge.fit(x[fold.train], scores[fold.train], options))
        predicted[fold.test] = fits[-1].predict(x[fold.test])
        held_out.append(pearson(fits[-1].predict(x[fold.held_out]), scores[fold.held_out]))
    of_all: Ints = np.zeros(len(scored), np.int64)
    agreed = agreement(predicted[None, scored], scores[scored], of_all, [data.name], _RESAMPLES)[0]
    record = RidgeRecord(
        layers=layers,
        pearson=agreed.pearson,
        spearman=agreed.spearman,
        rmse=_root_mean_square(predicted[scored] - scores[scored]),
        held_out=float(np.mean(held_out)),
        weight_decay=[fit.weight_decay for fit in fits],
    )
    return record, fits[0]


def score_rows(files: Iterable[RidgeFile]) -> list[Row]:
    """A row for every probe of scores.

    Returns:
        ``dataset``, ``task``, ``tag``, ``pooling``, ``layers`` (text), ``probe`` (``ridge``),
        ``settings`` (a digest), ``pearson`` and ``spearman`` with ``…_low`` and ``…_high``,
        ``rmse``, ``mean_rmse`` (of giving always the mean), ``held_out``, ``weight_decay`` (mean
        over folds), ``examples`` (scored), ``best``: whether it is the single layer with the
        highest correlation on held-out examples; ``doubts``, ``data`` and ``weights`` as in
        `probe_rows`.
    """
    rows = []
    for file in files:
        best = file.best_layer()
        for record in file.probes:
            correlations = {"pearson": record.pearson, "spearman": record.spearman}
            row: Row = {
                "dataset": file.dataset,
                "task": file.task,
                "tag": str(file.tag),
                "pooling": file.pooling,
                "layers": layers_text(record.layers),
                "probe": "ridge",
                "settings": file.settings.digest,
            }
            for name, value in correlations.items():
                row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            row |= {
                "rmse": record.rmse,
                "mean_rmse": file.mean_rmse,
                "held_out": record.held_out,
                "weight_decay": sum(record.weight_decay) / len(record.weight_decay),
                "examples": file.examples["scored"],
                "best": record.layers == best,
                "doubts": file.doubts,
                "data": file.data,
                "weights": record.weights,
            }
            rows.append(row)
    return rows


def _scores(data: ProbeData) -> Floats:
    assert data.scores is not None  # `read_data` refuses classes with the solver of scores
    return data.scores


def _root_mean_square(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))
