"""Minimum description length of labels, by online coding (Voita & Titov 2020, EMNLP).

The labels are sent in blocks: the first by a code that knows nothing, each other by a probe trained
on all blocks before it. A representation from which labels are easy to learn needs few bits. Every
block has a probe of its own, trained from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.probing.batch import Inputs
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.probing.trainer import Done, log_likelihoods, train

_LOOK_AFTER = 50
"""Least optimiser steps between two looks at the held-out examples."""

FRACTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Parts of the training examples at which blocks end; section 4 of the paper."""


class OnlineCode(NamedTuple):
    """Code lengths of the labels of the training examples."""

    bits: npt.NDArray[np.float64]
    """(inputs,) of the online code."""
    uniform_bits: float
    """n log₂ K, of the code that knows nothing."""
    ends: list[int]
    """How many examples the blocks up to each one hold."""

    @property
    def compression(self) -> npt.NDArray[np.float64]:
        """(inputs,) how many times shorter than uniform; 1.0 where nothing was learnt."""
        return self.uniform_bits / self.bits


def block_ends(examples: int) -> list[int]:
    """Where the blocks of so many examples end: `FRACTIONS` of them, empty blocks left out."""
    return sorted({max(1, round(fraction * examples)) for fraction in FRACTIONS})


def code_length(
    examples: int,
    classes: int,
    block_bits: Callable[[int, int], npt.NDArray[np.float64]],
) -> OnlineCode:
    """Length of the online code: n₁ log₂ K + Σ −log₂ p(block i + 1 | blocks up to i).

    Args:
        examples: n.
        classes: K.
        block_bits: begin and end of a block → (inputs,) bits of its labels from a model of all
            labels before ``begin``.
    """
    ends = block_ends(examples)
    bits = np.array([ends[0] * np.log2(classes)])
    for begin, end in zip(ends, ends[1:], strict=False):
        bits = bits + block_bits(begin, end)
    return OnlineCode(bits, float(examples * np.log2(classes)), ends)


def online_code(
    inputs: Inputs,
    labels: Tensor,
    rows: Tensor,
    held_out: Tensor,
    classes: int,
    options: ProbeOptions,
    *,
    done: Done = lambda probes: None,
) -> OnlineCode:
    """Code the labels of the training examples with probes on every input.

    Each block's probe is stopped and its weight decay chosen by the loss of the held-out examples,
    not by their accuracy: bits are a loss, and a probe that is sure and wrong is expensive. The
    held-out examples are no part of the code. The probe of a small block may take as many optimiser
    steps as one of all examples, and so many more epochs: it ends because it no longer improves.

    Args:
        inputs: of all examples.
        labels: (examples,)
        rows: numbers of the training examples; they are sent in an order that the seed draws.
        held_out: numbers of the held-out examples.
        classes: number of classes.
        options: settings of the probes.
        done: told of probes that ended.
    """
    shuffle = torch.Generator().manual_seed(options.seed)
    order = rows[torch.randperm(len(rows), generator=shuffle).to(rows.device)]
    most_steps = options.max_epochs * math.ceil(len(rows) / options.batch_size)

    def block_bits(begin: int, end: int) -> npt.NDArray[np.float64]:
        known, sent = order[:begin], order[begin:end]
        seen = inputs.standardised(known) if options.standardise else inputs
        steps = math.ceil(begin / options.batch_size)
        patient = replace(
            options,
            epoch_size=max(options.epoch_size, math.ceil(_LOOK_AFTER / steps)),
            max_epochs=math.ceil(most_steps / steps),
        )
        probes = train(seen, labels, known, held_out, classes, patient, criterion="loss", done=done)
        nats = -log_likelihoods(probes.parameters, seen, sent, labels).sum(axis=1)
        return np.asarray(nats / np.log(2))

    return code_length(len(rows), classes, block_bits)
