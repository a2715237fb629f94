"""Measures of probes: accuracy, a control task, and the length of a code of the labels.

The accuracy of a probe says little by itself. It may memorise, which its control task shows (Hewitt
& Liang 2019, EMNLP), or need many examples, which the length of an online code of the labels shows
(Voita & Titov 2020, EMNLP).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bertvision.pipelines.readouts.batched import Bools, Floats, Ints
from bertvision.pipelines.readouts.directions import class_means
from bertvision.pipelines.readouts.probe import Inputs, Problem
from bertvision.pipelines.readouts.probe_data import ProbeData
from bertvision.pipelines.uncertainty import cluster_numbers

FRACTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Parts of the training examples at which blocks of the online code end; section 4 of the paper."""
_NEGLIGIBLE = 1e-5  # part of the norm of weights that is rounding
_LOOK_AFTER = 50  # least optimiser steps between two looks of the probe of a small block


class Measured(NamedTuple):
    """Probes on several inputs, over all folds."""

    correct: Bools
    """(inputs, scored examples) whether each is right, in the order of `ProbeData.scored`."""
    held_out: Floats
    """(inputs,) accuracy in per cent on the held-out examples, mean over folds."""
    weight_decay: Floats
    """(folds, inputs) weight decay that was chosen."""
    epochs: Ints
    """(folds, inputs) epochs of the chosen probe."""


def measure(problem: Problem, data: ProbeData) -> Measured:
    """Train probes fold by fold and say of every scored example whether they are right.

    Args:
        problem: All examples of the data.
        data: Labels and folds.
    """
    places = {int(row): i for i, row in enumerate(data.scored)}
    correct = np.zeros((problem.inputs.count, len(places)), bool)
    probes = []
    for fold in data.folds:
        rows, held_out, test = map(problem.rows, fold)
        seen = problem.standardised(rows)
        probes.append(seen.train(rows, held_out))
        right = seen.predictions(probes[-1].parameters, test) == data.labels[fold.test]
        correct[:, [places[int(row)] for row in fold.test]] = right
    return Measured(
        correct,
        100 * np.mean([p.held_out for p in probes], axis=0),
        np.stack([p.weight_decay for p in probes]),
        np.stack([p.epochs for p in probes]),
    )


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ControlRecord(_Record):
    """Scores of a probe on its control task, all in per cent.

    A control task has labels that can only be memorised: every word type gets a random label, and
    of sentences every distinct sentence (or pair), drawn from the distribution of the real labels.
    Almost every sentence of a test split is a new type, about
    whose label the training says nothing: what a probe can memorise shows in its accuracy on the
    training examples, which is therefore kept as well, with the share of new types.
    """

    accuracy: float
    """On the test examples."""
    selectivity: float
    """Accuracy of the probe on the real labels, less that."""
    memorised: float
    """Accuracy on the examples that it was trained on."""
    unseen: float
    """Share of test examples whose sentence is not among those trained on."""


def measure_control(
    problem: Problem, data: ProbeData, weight_decay: Floats, epochs: Ints, accuracy: Floats
) -> list[ControlRecord]:
    """Train the same probes on random labels: the weight decay and the epochs are the real ones'.

    Args:
        problem: All examples of the data.
        data: Labels and folds.
        weight_decay: (folds, inputs) weight decays of the probes on the real labels.
        epochs: (folds, inputs) epochs of these.
        accuracy: (inputs,) accuracy of these, in per cent.
    """
    known = np.where(data.labels < len(data.classes), data.labels, -1)
    random = control_labels(data.texts, known, problem.options.seed)
    control = replace(problem, labels=problem.rows(random))
    right = np.zeros(problem.inputs.count)
    memorised, unseen = [], []
    for fold, decays, until in zip(data.folds, weight_decay, epochs, strict=True):
        rows, _, test = map(problem.rows, fold)
        seen = control.standardised(rows)
        probes = seen.train_alike(rows, decays, until).parameters
        right += (seen.predictions(probes, test) == random[fold.test]).sum(axis=1)
        learned = (seen.predictions(probes, rows) == random[fold.train]).sum(axis=1)
        memorised.append(learned / len(fold.train))
        unseen.append(unseen_share(data.texts, fold.train, fold.test))
    test_accuracy, known = 100 * right / len(data.scored), 100 * np.mean(memorised, axis=0)
    return [
        ControlRecord(accuracy=t, selectivity=a - t, memorised=m, unseen=float(np.mean(unseen)))
        for t, a, m in zip(test_accuracy.tolist(), accuracy.tolist(), known.tolist(), strict=True)
    ]


def control_labels(texts: Sequence[str], labels: Ints, seed: int) -> Ints:
    """A random label for every distinct text, the same in all splits.

    The label is a function of text, seed and distribution alone, not of the order of the examples.

    Args:
        texts: (examples,) texts, each of which is a type.
        labels: (examples,) real labels, whose distribution is that of the random ones; −1 where
            there is none.
        seed: Seed of the labels.
    """
    counts = np.bincount(labels[labels >= 0])
    ends = np.cumsum(counts) / counts.sum()
    drawn = np.array([_uniform(text, seed) for text in texts])
    return np.searchsorted(ends, drawn, side="right").astype(np.int64)


def unseen_share(texts: Sequence[str], train: Ints, test: Ints) -> float:
    """Per cent of the test examples whose text none of the training examples has.

    Args:
        texts: (examples,)
        train: Numbers of the training examples.
        test: Numbers of the test examples.
    """
    seen = {texts[i] for i in train}
    return 100 * sum(texts[i] not in seen for i in test) / len(test)


def _uniform(text: str, seed: int) -> float:
    """A number in [0, 1) that looks random and belongs to the text."""
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


class OnlineCode(NamedTuple):
    """Code lengths of the labels of the training examples.

    The labels are sent in blocks: the first by a code that knows nothing, each other by a probe
    trained on all blocks before it, from the start. A representation from which labels are easy to
    learn needs few bits.
    """

    bits: Floats
    """(inputs,) length of the online code."""
    uniform_bits: float
    """n log₂ K, of the code that knows nothing."""
    ends: list[int]
    """Number of examples in the blocks up to each one."""

    @property
    def compression(self) -> Floats:
        """(inputs,) how many times shorter than uniform; 1.0 where nothing was learnt."""
        return self.uniform_bits / self.bits


def block_ends(examples: int) -> list[int]:
    """Ends of the blocks of so many examples: `FRACTIONS` of them, without empty blocks."""
    return sorted({max(1, round(fraction * examples)) for fraction in FRACTIONS})


def code_length(
    ends: list[int], classes: int, block_bits: Callable[[int, int], Floats]
) -> OnlineCode:
    """Length of the online code: n₁ log₂ K + Σ −log₂ p(block i + 1 | blocks up to i).

    Args:
        ends: Ends of the blocks, the last of which is n.
        classes: K.
        block_bits: (inputs,) bits of the labels of a block, given by its begin and end, from a
            model of all labels before it.
    """
    bits = np.array([ends[0] * np.log2(classes)])
    for begin, end in zip(ends, ends[1:], strict=False):
        bits = bits + block_bits(begin, end)
    return OnlineCode(bits, float(ends[-1] * np.log2(classes)), ends)


def online_code(
    problem: Problem, rows: Tensor, held_out: Tensor, clusters: Sequence[str] | None = None
) -> OnlineCode:
    """Code the labels of the training examples with probes on every input.

    Each block's probe is stopped and its weight decay chosen by the loss of the held-out examples,
    not by their accuracy: bits are a loss, and a probe that is sure and wrong is expensive. The
    held-out examples are no part of the code. The probe of a small block may take as many optimiser
    steps as one of all examples, and so many more epochs: it ends because it no longer improves.

    Args:
        problem: All examples of the data.
        rows: Numbers of the training examples; they are sent in an order that the seed draws.
        held_out: Numbers of the held-out examples.
        clusters: (examples,) cluster of each of all examples, which are sent as a whole, such as
            the words of a sentence; None sends examples.
    """
    options = problem.options
    shuffle = torch.Generator().manual_seed(options.seed)
    ends = block_ends(len(rows))
    if clusters is None:
        order = rows[torch.randperm(len(rows), generator=shuffle).to(rows.device)]
    else:
        own = cluster_numbers([clusters[row] for row in rows.tolist()])
        turn = torch.randperm(int(own.max()) + 1, generator=shuffle).numpy()[own]
        order = rows[torch.from_numpy(np.argsort(turn, kind="stable")).to(rows.device)]
        whole = np.cumsum(np.bincount(turn))
        ends = sorted({int(whole[np.searchsorted(whole, end)]) for end in ends})
    most_steps = options.max_epochs * math.ceil(len(rows) / options.batch_size)

    def block_bits(begin: int, end: int) -> Floats:
        known, sent = order[:begin], order[begin:end]
        steps = math.ceil(begin / options.batch_size)
        patient = replace(
            options,
            epoch_size=max(options.epoch_size, math.ceil(_LOOK_AFTER / steps)),
            max_epochs=math.ceil(most_steps / steps),
        )
        seen = replace(problem, options=patient).standardised(known)
        probes = seen.train(known, held_out, "loss").parameters
        return np.asarray(-seen.log_likelihoods(probes, sent).sum(axis=1) / np.log(2))

    return code_length(ends, problem.classes, block_bits)


class InlpRecord(_Record):
    """Accuracy of probes on vectors of which the label is removed, step by step.

    Iterative nullspace projection (Ravfogel et al. 2020, arXiv:2004.07667, algorithm 1) trains a
    linear probe, projects the vectors onto the null space of its weights, and does so again; the
    mean projection (Haghighatkhah et al. 2022, arXiv:2212.04273) removes the differences of the
    class means at once. A probe that still does well after both reads something else.
    """

    accuracy: list[float]
    """Per cent of the test examples, at first and after each projection."""
    directions: int
    """Directions that were removed in all."""
    mean_projection: float
    """Per cent after the mean projection alone."""


def measure_inlp(problem: Problem, data: ProbeData, projections: int) -> list[InlpRecord]:
    """Remove the labels from the vectors; in a cross-validation, those of the first fold.

    Args:
        problem: All examples of the data.
        data: Labels and folds.
        projections: Number of projections, at least 1.
    """
    rows, held_out, test = map(problem.rows, data.folds[0])
    right = data.labels[data.folds[0].test]
    start = problem.standardised(rows)
    plain = replace(problem.options, standardise=False)  # it is done, and directions stay removed

    def probed(inputs: Inputs) -> tuple[Tensor, Floats]:
        """Weights of probes on vectors, and their accuracy in per cent."""
        seen = replace(problem, inputs=inputs, options=plain)
        probes = seen.train(rows, held_out).parameters
        return probes[0], 100 * (seen.predictions(probes, test) == right).mean(axis=1)

    count, width = problem.inputs.count, problem.inputs.width
    weights, first = probed(start.inputs)
    accuracy = [first]
    bases = [weights.new_zeros((0, width)) for _ in range(count)]
    for _ in range(projections):
        bases = [extended_basis(basis, w) for basis, w in zip(bases, weights, strict=True)]
        weights, after = probed(start.inputs.without(bases))
        accuracy.append(after)
    means = class_means(replace(problem, inputs=start.inputs), rows)
    _, without_means = probed(
        start.inputs.without([extended_basis(weights.new_zeros((0, width)), m) for m in means])
    )
    return [
        InlpRecord(
            accuracy=[float(step[i]) for step in accuracy],
            directions=len(bases[i]),
            mean_projection=float(without_means[i]),
        )
        for i in range(count)
    ]


def extended_basis(basis: Tensor, rows: Tensor) -> Tensor:
    """An orthonormal basis that also spans the differences of some rows, (…, width)."""
    wide = rows.double()
    differences = (wide - wide.nanmean(dim=0)).nan_to_num()
    least = _NEGLIGIBLE * float(differences.norm())
    differences -= (differences @ basis.double().T) @ basis.double()
    _, sizes, directions = torch.linalg.svd(differences, full_matrices=False)
    new = directions[sizes > least].to(basis.dtype)
    return torch.cat([basis, new])


class MdlRecord(_Record):
    """The online code of the training labels for one input; see `OnlineCode`."""

    bits: float
    uniform_bits: float
    compression: float
    ends: list[int]


def measure_mdl(problem: Problem, data: ProbeData) -> list[MdlRecord]:
    """Code the labels of the training examples; in a cross-validation, those of the first fold.

    Args:
        problem: All examples of the data.
        data: Labels and folds.
    """
    rows, held_out, _ = data.folds[0]
    known = held_out[data.labels[held_out] < len(data.classes)]
    sentences = None if data.spans is None else data.clusters
    code = online_code(problem, problem.rows(rows), problem.rows(known), sentences)
    return [
        MdlRecord(bits=b, uniform_bits=code.uniform_bits, compression=c, ends=code.ends)
        for b, c in zip(code.bits.tolist(), code.compression.tolist(), strict=True)
    ]
