"""Outputs of heads, the padding of packed tokens, and the losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bertvision.errors import InputError


class SpanOutput(NamedTuple):
    """Scores of every token of a batch as the first and as the last token of the answer."""

    start_logits: Tensor
    """(batch, seq): padded with the smallest finite number of the dtype."""
    end_logits: Tensor
    """(batch, seq): padded with the smallest finite number of the dtype."""


class TokenOutput(NamedTuple):
    """Scores of every token of a batch for its classes."""

    logits: Tensor
    """(batch, seq, classes): padded with zeros."""


class ClassOutput(NamedTuple):
    """Scores of every example of a batch for its classes, or the one score that it is given."""

    logits: Tensor
    """(batch, classes), such as not answerable, answerable; (batch, 1) in regression."""


def span_loss(
    output: SpanOutput,
    start_positions: Tensor,
    end_positions: Tensor,
    *,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Mean of the cross entropies of the start and of the end, in float32.

    The loss of the question answering heads of Devlin et al. (2019, section 4.2), as Hugging Face's
    ``BertForQuestionAnswering`` computes it.

    Args:
        output: logits, each (batch, seq).
        start_positions: (batch,) int64, index of the answer's first token; 0 for no answer.
        end_positions: (batch,) int64, index of the answer's last token; 0 for no answer.
        reduction: ``mean`` over the batch, or ``none`` for the loss of each example.

    Returns:
        () float32, or (batch,) float32 without reduction.
    """
    start = F.cross_entropy(output.start_logits.float(), start_positions, reduction=reduction)
    end = F.cross_entropy(output.end_logits.float(), end_positions, reduction=reduction)
    return (start + end) / 2


def class_loss(
    output: ClassOutput, labels: Tensor, *, reduction: Literal["mean", "sum", "none"] = "mean"
) -> Tensor:
    """Cross entropy of the classes, or the squared error of a score, in float32.

    A single logit is a score, as in GLUE's regression (Wang et al. 2019, arXiv:1804.07461).

    Args:
        output: logits (batch, classes), or (batch, 1) of scores.
        labels: (batch,) index of the class, or the score.
        reduction: ``mean`` or ``sum`` over the batch, or ``none`` for the loss of each example.

    Returns:
        () float32, or (batch,) float32 without reduction.
    """
    logits = output.logits.float()
    if logits.shape[1] == 1:
        return F.mse_loss(logits[:, 0], labels.float(), reduction=reduction)
    return F.cross_entropy(logits, labels.long(), reduction=reduction)


def distillation_loss(
    logits: Tensor,
    teacher: Tensor,
    *,
    temperature: float,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """How far a student's answers are from its teacher's, in float32.

    T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), as Hinton, Vinyals & Dean (2015,
    arXiv:1503.02531, section 2): gradients of softened targets shrink with 1 / T², and T² keeps
    them beside those of labels. For high T it is half the mean squared difference of the logits,
    each less its mean (their equation 4). A single logit is a score, and has the squared error.

    Args:
        logits: (batch, choices) of the student, or (batch, 1) of scores; what is no choice, such as
            padding, has the smallest finite number of float32 in both.
        teacher: Teacher of the same shape.
        temperature: T, at least 1.
        reduction: ``mean`` over the batch, or ``none`` for the loss of each example.

    Returns:
        () float32, or (batch,) float32 without reduction.
    """
    logits, teacher = logits.float(), teacher.float()
    if logits.shape[1] == 1:
        loss = (logits - teacher)[:, 0].square()
    else:
        student = F.log_softmax(logits / temperature, dim=1)
        target = F.log_softmax(teacher / temperature, dim=1)
        loss = F.kl_div(student, target, reduction="none", log_target=True).sum(dim=1)
        loss = temperature**2 * loss
    return loss.mean() if reduction == "mean" else loss


def without_autocast(values: Tensor) -> AbstractContextManager[object]:
    """Full precision inside the block, on the device of ``values``, which may be ``meta``."""
    device = values.device.type
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known else nullcontext()


def example_lengths(lengths: Tensor, tokens: int) -> list[int]:
    """The lengths on the host, checked; a transfer if they are on a device.

    Args:
        lengths: (batch,) integers, tokens per example.
        tokens: number of packed tokens.

    Raises:
        InputError: the lengths do not describe the tokens.
    """
    counts: list[int] = lengths.tolist() if lengths.dim() == 1 else []
    if not counts or min(counts) < 1 or sum(counts) != tokens:
        raise InputError(
            f"lengths of shape {tuple(lengths.shape)} with sum {int(lengths.sum())} do not fit "
            f"{tokens} packed tokens: give each example's length, at least 1, summing to {tokens}"
        )
    return counts


def pad_packed(values: Tensor, lengths: Tensor, *, fill: float) -> Tensor:
    """Give packed tokens a batch dimension and a sequence dimension.

    Args:
        values: (tokens, …), the tokens of all examples one after the other.
        lengths: (batch,) integers, tokens per example, each at least 1; their sum is ``tokens``.
        fill: Value behind the last token of an example shorter than ``max(lengths)``.

    Returns:
        (batch, seq, …) with seq = max(lengths); gradients flow to ``values``.

    Raises:
        InputError: the lengths do not describe the tokens.
    """
    tokens = values.shape[0]
    counts = example_lengths(lengths, tokens)
    batch, seq = len(counts), max(counts)
    if batch * seq == tokens:
        return values.reshape(batch, seq, *values.shape[1:])
    lengths = lengths.to(values.device)
    # A token moves back by the padding of all examples before its own.
    padding = (seq - lengths).cumsum(0) - (seq - lengths)  # (batch,)
    rows = torch.arange(tokens, device=values.device)
    rows = rows + padding.repeat_interleave(lengths, output_size=tokens)  # (tokens,)
    padded = values.new_full((batch * seq, *values.shape[1:]), fill)
    return padded.index_copy(0, rows, values).reshape(batch, seq, *values.shape[1:])
