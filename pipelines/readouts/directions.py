"""Weights of probes that are kept, and the directions in the space of the hidden states they name.

A linear probe and the difference of class means are the two directions of a label that are read,
steered by and removed (Belrose et al. 2023, arXiv:2306.03819, compare both; Marks and Tegmark 2023,
arXiv:2310.06824, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.readouts.batched import Floats, Ints
from bertvision.pipelines.readouts.probe import Problem
from bertvision.pipelines.readouts.probe_data import ProbeData

Float32s = npt.NDArray[np.float32]
DirectionKind = Literal["probe", "means"]
"""Weights of the probe, or means of the classes."""


class SavedProbe(NamedTuple):
    """A probe's weights, for vectors as they are stored; and the means of the classes."""

    parameters: dict[str, Float32s]
    """``weight`` (classes, width) and ``bias`` (classes,) of a linear probe; with a hidden layer
    also ``hidden_weight`` (units, width) and ``hidden_bias`` (units,), and ``weight`` is (classes,
    units)."""
    means: Float32s
    """(classes, width) mean vector of the training examples of each class; NaN without any."""
    classes: tuple[str, ...]
    """Names of the classes; none of scores, whose ``weight`` is (1, width)."""
    source: Mapping[str, str] = MappingProxyType({})
    """``dataset``, ``tag``, ``pooling`` and ``layers`` of the vectors that it was trained on."""

    def save(self, path: Path) -> str:
        """Write a file of safetensors, whole or not at all.

        Args:
            path: Path of the file.

        Returns:
            Its SHA-256.
        """
        from safetensors.numpy import save

        tensors = {**self.parameters, "means": self.means}
        contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
        # one entry: safetensors writes several in any order, and the file would differ each time
        metadata = {"probe": json.dumps({"classes": self.classes, **self.source})}
        write_durably(path, save(contiguous, metadata))
        return sha256_of_files([path])

    @classmethod
    def load(cls, path: Path, sha256: str) -> SavedProbe:
        """Read a file that `save` wrote.

        Args:
            path: Path of the file.
            sha256: SHA-256 that it had.

        Raises:
            WorkspaceError: it is gone or not as it was written.
        """
        from safetensors import safe_open

        if not path.is_file() or sha256_of_files([path]) != sha256:
            raise WorkspaceError(
                f"{path} is gone or not as it was written: `bertvision probe … --save` makes it "
                "again"
            )
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            source = json.loads((file.metadata() or {})["probe"])
        classes = tuple(source.pop("classes"))
        return cls(tensors, tensors.pop("means"), classes, source)

    def direction(self, label: str | int | None = None, kind: DirectionKind = "probe") -> Float32s:
        """The direction towards a class, away from the mean of the others; or to higher scores.

        Args:
            label: Name of the class, or its index; of two classes the second by default.
            kind: ``probe`` takes the weights of the linear probe, ``means`` the class means, of
                those classes that have training examples.

        Returns:
            (width,) in the space of the hidden states, not of length 1.

        Raises:
            InputError: there is no such class or kind, none is named of several, the training had
                no examples of it, or the probe has a hidden layer, so that no direction is its.
        """
        if kind not in get_args(DirectionKind):
            raise InputError(f"kind {kind!r}: choose probe or means")
        if kind == "probe" and "hidden_weight" in self.parameters:
            raise InputError(
                "a probe with a hidden layer reads no single direction: probe linearly, or ask for "
                "kind='means'"
            )
        if not self.classes:
            if label is not None or kind == "means":
                raise InputError(
                    "a probe of scores has no classes: leave label and kind out, the direction "
                    "leads to higher scores"
                )
            upwards: Float32s = self.parameters["weight"][0]
            return upwards
        own = self._class(label)
        rows = (self.means if kind == "means" else self.parameters["weight"]).astype(np.float64)
        others = np.delete(rows, own, axis=0)
        others = others[~np.isnan(others).any(axis=1)]
        if np.isnan(rows[own]).any() or not len(others):
            raise InputError(
                f"class {self.classes[own]}: it or all others have no training examples, whose "
                "mean there is; take kind='probe'"
            )
        direction: Float32s = (rows[own] - others.mean(axis=0)).astype(np.float32)
        return direction

    def _class(self, label: str | int | None) -> int:
        """Index of a class, by its name or else its number."""
        names = ", ".join(self.classes)
        if label is None:
            if len(self.classes) != 2:
                raise InputError(
                    f"name the class that the direction leads to: label= one of {names}"
                )
            return 1
        if str(label) in self.classes:
            return self.classes.index(str(label))
        if isinstance(label, int) and 0 <= label < len(self.classes):
            return label
        raise InputError(
            f"label {label!r}: choose one of {names}, or an index from 0 to {len(self.classes) - 1}"
        )


def saved_probes(
    problem: Problem, data: ProbeData, weight_decay: Floats, epochs: Ints
) -> list[SavedProbe]:
    """Train the probes of the first fold as before, for their weights.

    Args:
        problem: All examples of the data.
        data: Labels and folds.
        weight_decay: (inputs,) weight decay that each probe had.
        epochs: (inputs,) epochs of each.
    """
    rows = problem.rows(data.folds[0].train)
    seen = problem.standardised(rows)
    parameters = seen.train_alike(rows, weight_decay, epochs).parameters
    weight, bias = parameters[0].double(), parameters[1].double()
    if seen.inputs.scale is not None and seen.inputs.mean is not None:
        weight = weight * seen.inputs.scale  # what is scaled and shifted before is read as it is
        bias = bias - (weight * seen.inputs.mean).sum(-1)
    stacked = [weight, bias, *parameters[2:]]
    names = ["hidden_weight", "hidden_bias", "weight", "bias"][-len(stacked) :]
    means = class_means(problem, rows).cpu().numpy()
    return [
        SavedProbe(
            {
                name: part[i].float().cpu().numpy()
                for name, part in zip(names, stacked, strict=True)
            },
            means[i],
            tuple(data.classes),
        )
        for i in range(problem.inputs.count)
    ]


def class_means(problem: Problem, rows: Tensor) -> Tensor:
    """Mean vector of each class, (inputs, classes, width); NaN of a class without examples.

    Args:
        problem: All examples of the data.
        rows: Numbers of the examples that are averaged.
    """
    labels, inputs = problem.labels[rows], problem.inputs
    sums = torch.zeros(
        (inputs.count, problem.classes, inputs.width), dtype=torch.float64, device=labels.device
    )
    for part, own in zip(rows.split(1024), labels.split(1024), strict=True):
        sums.index_add_(1, own, inputs.take(part).double())
    counts = torch.bincount(labels, minlength=problem.classes)
    return (sums / counts.unsqueeze(-1)).float()
