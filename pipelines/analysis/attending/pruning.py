"""The attention heads that a fine-tuned encoder needs: each masked alone, then many at once.

Michel, Levy and Neubig (2019), *Are Sixteen Heads Really Better than One?* (arXiv:1905.10650),
sections 3.1 and 4: masking one head changes little, and a good part can be left out. Heads are
ordered by how much the loss of one window moves with their gate (section 4.1, each layer's divided
by its l2 norm), on one half of the items, and the curve is of the other half; random orders stand
beside it. Ordered by what masking each alone does to the mean loss, heads whose mask happens to
lower it would go first, and a few such together may do more harm than random ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.gates import gated
from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.finetuning.kept_logits import predict_logits
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.scores import Metric, headline, headline_metric, trivial_score
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows

STEPS = 11
"""Points of the curve: all heads, nine tenths, …, none."""
_TOKENS = 8_192
"""Tokens of a batch, padding included."""


class Sample(NamedTuple):
    """Items of a split, and their windows."""

    items: Sequence[Any]
    windows: Windows


def pruning(
    model: PreTrainedModel,
    task: Task,
    ranked: Sample,
    scored: Sample,
    *,
    orders: int = 3,
    precision: Precision = "32",
    seed: int = 0,
    name: str = "x",
) -> PruningResult:
    """Mask each attention head of an encoder, then ever more of them.

    Runs the encoder (heads + 1) times over the windows of ``ranked``, once more with gradients,
    and 11 · (orders + 1) times over those of ``scored``. Scores of spans have the no-answer
    threshold 0 throughout.

    Args:
        model: with the output layer of ``task``; left as it was.
        task: what it was fine-tuned for.
        ranked: the items that order the heads.
        scored: other items, for the curve.
        orders: random orders that stand beside it.
        precision: arithmetic of the forward passes.
        seed: of the random orders.
        name: what it is of, for titles.

    Raises:
        InputError: it is not known where the family has its attention heads, there are no items,
            or fewer than two random orders.
    """
    if not len(ranked.items) or not len(scored.items) or orders < 2:
        raise InputError(
            f"pruning has {len(ranked.items)} items to order heads by, {len(scored.items)} to "
            f"score and {orders} random orders: give at least one, one and two"
        )
    where = device()
    model.to(where).eval()  # type: ignore[arg-type]
    loss = partial(_mean_loss, model, task, ranked.windows, precision)
    with gated(model) as gates:
        heads = gates.numel()
        rise = torch.zeros(gates.shape, dtype=torch.float64)
        steps = STEPS * (orders + 1)
        with progress(heads + 2 + steps, "masking heads", "pass") as bar:
            whole = loss()
            bar.update(1)
            for i in range(heads):
                gates.view(-1)[i] = 0
                rise.view(-1)[i] = loss() - whole
                gates.fill_(1)
                bar.update(1)
            sensitivity = _sensitivity(model, task, ranked.windows, gates)
            bar.update(1)
            least = sensitivity.view(-1).argsort(stable=True)
            random = np.random.default_rng(seed)
            every = [least, *(torch.from_numpy(random.permutation(heads)) for _ in range(orders))]
            found = np.empty((len(every), STEPS))
            for k, order in enumerate(every):
                for step in range(STEPS):
                    gates.fill_(1).view(-1)[order[: round(heads * step / (STEPS - 1))]] = 0
                    found[k, step], metric, trivial = _score(model, task, scored, precision)
                    bar.update(1)
    masked = np.round(heads * np.arange(STEPS) / (STEPS - 1))
    return PruningResult(
        rise=rise.numpy(),
        sensitivity=sensitivity.numpy(),
        loss=whole,
        left=1 - masked / heads,
        score=found[0],
        random=found[1:].mean(axis=0),
        random_sd=found[1:].std(axis=0, ddof=1),
        metric=cast(Metric, metric),
        trivial=trivial,
        layers=tuple(range(1, gates.shape[0] + 1)),
        heads=tuple(range(1, gates.shape[1] + 1)),
        name=name,
        n_ranked=len(ranked.items),
        n_scored=len(scored.items),
        seed=seed,
    )


@torch.inference_mode()
def _mean_loss(model: PreTrainedModel, task: Task, windows: Windows, precision: Precision) -> float:
    """Mean of the task's loss over windows, of like length together."""
    where, labels, padding = device(), task.labels(windows), pad_id(None, model.config)
    order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
    total, done = 0.0, 0
    while done < len(order):
        rows = order[done : done + max(1, _TOKENS // int(windows.n_tokens[order[done]]))]
        batch = collate(
            *(windows, windows.first_token, rows, padding, labels),
            token_types=takes_token_types(model),
        ).to(where)
        with autocast(precision, where):
            output = model(**batch.inputs)
        total += float(task.loss(output, batch))
        done += len(rows)
    return total / len(order)


def _sensitivity(model: PreTrainedModel, task: Task, windows: Windows, gates: Tensor) -> Tensor:
    """(layers, heads) float64: mean over windows of the size of ∂L/∂ξ, l2 norm 1 by layer."""
    where, labels, padding = device(), task.labels(windows), pad_id(None, model.config)
    found = torch.zeros(gates.shape, dtype=torch.float64)
    gates.requires_grad_(True)
    try:
        for row in range(len(windows)):
            batch = collate(
                *(windows, windows.first_token, np.array([row]), padding, labels),
                token_types=takes_token_types(model),
            ).to(where)
            (moved,) = torch.autograd.grad(task.loss(model(**batch.inputs), batch), gates)
            found += moved.abs()
    finally:
        gates.requires_grad_(False)
    norm: Tensor = found.norm(dim=1, keepdim=True)
    return found / norm.clamp_min(torch.finfo(found.dtype).tiny)


def _score(
    model: PreTrainedModel, task: Task, sample: Sample, precision: Precision
) -> tuple[float, str, float | None]:
    """The task's first metric in per cent, its name, and that of the commonest answer."""
    arrays, _ = predict_logits(
        *(model, task, sample.windows),
        padding=pad_id(None, model.config),
        precision=precision,
        desc=None,
    )
    logits = Logits(arrays, WindowIndex.of(sample.items, sample.windows))
    metrics = headline(task.score(logits, None).rules)
    key = headline_metric(task.name, metrics)
    return float(metrics[key]), key, trivial_score(metrics, key)
