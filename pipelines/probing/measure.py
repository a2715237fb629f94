"""Train and score probes on a set of inputs: accuracy, control task, description length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.probing.batch import Inputs
from bertvision.pipelines.probing.control import Control, control_labels, unseen_share
from bertvision.pipelines.probing.data import ProbeData
from bertvision.pipelines.probing.mdl import OnlineCode, online_code
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.probing.partition import Fold, Rows
from bertvision.pipelines.probing.trainer import Done, Trained, predictions, train, train_alike


class Measured(NamedTuple):
    """Probes on several inputs, over all folds."""

    correct: npt.NDArray[np.bool_]
    """(inputs, scored examples) whether each is right, in the order of `ProbeData.scored`."""
    held_out: npt.NDArray[np.float64]
    """(inputs,) accuracy in per cent on the held-out examples, mean over folds."""
    weight_decay: npt.NDArray[np.float64]
    """(folds, inputs) which was chosen."""
    epochs: npt.NDArray[np.int64]
    """(folds, inputs) of the chosen probe."""


def measure(
    inputs: Inputs, data: ProbeData, options: ProbeOptions, done: Done = lambda probes: None
) -> Measured:
    """Train probes fold by fold and say of every scored example whether they are right.

    Args:
        inputs: of all examples of the data.
        data: labels and folds.
        options: settings.
        done: told of probes that ended.
    """
    labels = _tensor(data.labels, inputs)
    places = {int(row): i for i, row in enumerate(data.scored)}
    correct = np.zeros((inputs.count, len(places)), bool)
    probes = []
    for fold in data.folds:
        rows = [_tensor(part, inputs) for part in fold]
        seen = inputs.standardised(rows[0]) if options.standardise else inputs
        probes.append(train(seen, labels, rows[0], rows[1], len(data.classes), options, done=done))
        right = predictions(probes[-1].parameters, seen, rows[2]) == data.labels[fold.test]
        correct[:, [places[int(row)] for row in fold.test]] = right
    return Measured(
        correct,
        100 * np.mean([p.held_out for p in probes], axis=0),
        np.stack([p.weight_decay for p in probes]),
        np.stack([p.epochs for p in probes]),
    )


def measure_control(
    inputs: Inputs,
    data: ProbeData,
    options: ProbeOptions,
    weight_decay: npt.NDArray[np.float64],
    epochs: npt.NDArray[np.int64],
    accuracy: npt.NDArray[np.float64],
    done: Done = lambda probes: None,
) -> list[Control]:
    """Train the same probes on random labels: the weight decay and the epochs are the real ones'.

    Args:
        inputs: of all examples of the data.
        data: labels and folds.
        options: settings.
        weight_decay: (folds, inputs) of the probes on the real labels.
        epochs: (folds, inputs) of theirs.
        accuracy: (inputs,) theirs, in per cent.
        done: told of probes that ended.
    """
    random = control_labels(data.texts, data.labels, options.seed)
    labels = _tensor(random, inputs)
    right = np.zeros(inputs.count)
    memorised, unseen = [], []
    for fold, decays, until in zip(data.folds, weight_decay, epochs, strict=True):
        rows = [_tensor(part, inputs) for part in fold]
        seen = inputs.standardised(rows[0]) if options.standardise else inputs
        like = Trained([], decays, until, np.full(inputs.count, np.nan))
        probes = train_alike(seen, labels, rows[0], len(data.classes), options, like, done=done)
        right += _right(probes, seen, rows[2], random, fold.test)
        memorised.append(_right(probes, seen, rows[0], random, fold.train) / len(fold.train))
        unseen.append(unseen_share(data.texts, fold.train, fold.test))
    test = 100 * right / len(data.scored)
    return [
        Control(float(t), float(a - t), float(100 * m), float(np.mean(unseen)))
        for t, a, m in zip(test, accuracy, np.mean(memorised, axis=0), strict=True)
    ]


def measure_mdl(
    inputs: Inputs, data: ProbeData, options: ProbeOptions, done: Done = lambda probes: None
) -> OnlineCode:
    """Code the labels of the training examples; in a cross-validation, those of the first fold.

    Args:
        inputs: of all examples of the data.
        data: labels and folds.
        options: settings.
        done: told of probes that ended.
    """
    fold: Fold = data.folds[0]
    return online_code(
        inputs,
        _tensor(data.labels, inputs),
        _tensor(fold.train, inputs),
        _tensor(fold.held_out, inputs),
        len(data.classes),
        options,
        done=done,
    )


def _right(
    probes: Trained, inputs: Inputs, rows: Tensor, labels: Rows, numbers: Rows
) -> npt.NDArray[np.int64]:
    """(inputs,) how many of the examples are told right."""
    found: npt.NDArray[np.int64] = (
        predictions(probes.parameters, inputs, rows) == labels[numbers]
    ).sum(axis=1)
    return found


def _tensor(values: Rows, inputs: Inputs) -> Tensor:
    return torch.from_numpy(values).to(inputs.values.device)
