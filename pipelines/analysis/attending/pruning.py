"""The attention heads that a fine-tuned encoder needs: each masked alone, then many at once.

Michel, Levy and Neubig (2019), *Are Sixteen Heads Really Better than One?* (arXiv:1905.10650),
sections 3.1 and 4: masking one head changes little, and a good part can be left out. Heads are
ordered by how much the loss of one window moves with their gate (section 4.1, each layer's divided
by its l2 norm), on one half of the items, and the curve is of the other half; random orders stand
beside it. Ordered by what masking each alone does to the mean loss, heads whose mask happens to
lower it would go first, and a few such together may do more harm than random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.gates import gated
from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
from bertvision.pipelines.analysis.attending.replay import replayed
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.finetuning.kept_logits import predict_logits
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.batch import Batch, collate
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

    Runs the encoder once over the windows of ``ranked``, for each head the layers from its own up,
    and once more all with gradients; then 9 · (orders + 1) + 2 times over those of ``scored``.
    Scores of spans have the no-answer threshold 0 throughout.

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
    with gated(model) as gates:
        heads = gates.numel()
        partly = STEPS - 2  # with all heads, and with none, every order is the same
        passes = (heads + 2, partly * (orders + 1) + 2)
        sizes = (len(ranked.windows), len(scored.windows))
        total = sum(n * size for n, size in zip(passes, sizes, strict=True))
        with progress(total, "masking attention heads", "window") as bar:
            whole, rise = _rise(model, task, ranked.windows, gates, precision, bar.update)
            sensitivity = _sensitivity(model, task, ranked.windows, gates)
            bar.update(sizes[0])

            def score(closed: Tensor) -> tuple[float, str, float | None]:
                gates.fill_(1).view(-1)[closed] = 0
                found = _score(model, task, scored, precision)
                bar.update(sizes[1])
                return found

            random = np.random.default_rng(seed)
            every = [sensitivity.view(-1).argsort(stable=True)]
            every += [torch.from_numpy(random.permutation(heads)) for _ in range(orders)]
            found = np.empty((len(every), STEPS))
            found[:, 0], metric, trivial = score(every[0][:0])
            found[:, -1] = score(every[0])[0]
            for k, order in enumerate(every):
                for step in range(1, STEPS - 1):
                    found[k, step] = score(order[: round(heads * step / (STEPS - 1))])[0]
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
def _rise(
    model: PreTrainedModel,
    task: Task,
    windows: Windows,
    gates: Tensor,
    precision: Precision,
    done: Callable[[int], object],
) -> tuple[float, Tensor]:
    """Mean of the task's loss over windows, and (layers, heads) by how much each mask raises it.

    Windows of like length run together, and with a head masked only the layers from its own up.
    """
    where, whole, rise = device(), 0.0, torch.zeros(gates.shape, dtype=torch.float64)
    for batch in _batches(model, task, windows):
        batch = batch.to(where)

        def loss(batch: Batch = batch) -> float:
            with autocast(precision, where):
                output = model(**batch.inputs)
            done(len(batch.input_ids))
            return float(task.loss(output, batch))

        with replayed(model) as replay:
            open_all = loss()
            for layer, head in np.ndindex(*gates.shape):
                replay.start = layer
                gates[layer, head] = 0
                rise[layer, head] += loss() - open_all
                gates[layer, head] = 1
        whole += open_all
    return whole / len(windows), rise / len(windows)


def _batches(model: PreTrainedModel, task: Task, windows: Windows) -> Iterator[Batch]:
    """Windows of like length together, the longest first."""
    labels, padding = task.labels(windows), pad_id(None, model.config)
    order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
    while len(order):
        many = max(1, _TOKENS // int(windows.n_tokens[order[0]]))
        rows, order = order[:many], order[many:]
        yield collate(
            *(windows, windows.first_token, rows, padding, labels),
            token_types=takes_token_types(model),
        )


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
