"""Features from which labels can be told to a known degree, for the tests of probes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import Inputs, Problem
from bertvision.pipelines.readouts.probe_data import Labelled, ProbeData, partition


def blobs(
    examples: int, classes: int, width: int, *, inputs: int = 1, noise: float = 1.0, seed: int = 0
) -> tuple[Inputs, npt.NDArray[np.int64]]:
    """A centre for each class and Gaussian noise about it; each input has centres of its own."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, examples)
    centres = random.standard_normal((classes, inputs, width))
    values = centres[labels] + noise * random.standard_normal((examples, inputs, width))
    return Inputs(torch.from_numpy(values.astype(np.float32))), labels


def problem(inputs: Inputs, labels: npt.NDArray[np.int64], options: ProbeOptions) -> Problem:
    """Probes that learn all classes there are."""
    return Problem(inputs, torch.from_numpy(labels), int(labels.max()) + 1, options)


def as_data(
    labels: npt.NDArray[np.int64], options: ProbeOptions, *, texts: list[str] | None = None
) -> ProbeData:
    """Half of the examples train, a quarter is held out, a quarter is scored."""
    texts = texts or [f"sentence {i}" for i in range(len(labels))]
    ends = [0, len(labels) // 2, 3 * len(labels) // 4, len(labels)]
    parts = {
        name: Labelled(labels[a:b], texts[a:b])
        for name, a, b in zip(("train", "dev", "test"), ends, ends[1:], strict=False)
    }
    classes = tuple(str(k) for k in range(int(labels.max()) + 1))
    return ProbeData(
        dataset="made",
        task="made",
        sizes={name: len(part.labels) for name, part in parts.items()},
        labels=labels,
        texts=texts,
        classes=classes,
        folds=partition(parts, options),
        soundness={},
    )
