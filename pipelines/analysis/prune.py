"""Attention heads of an encoder, switched off one by one or many at once.

What a head gives is a slice of what the output projection of its layer reads; a closed gate makes
that slice zero (Michel et al. 2019, arXiv:1905.10650, equation 1, with ξ of 0 and 1).

Run only the upper layers of an encoder, over a batch that it has seen whole.

A change in one layer leaves all below it as they were, so that what they gave is kept from the
whole pass and given again: the very tensors, so that the result is the same to the last bit.

What an encoder loses without some of its attention heads, as it is read.

The attention heads that a fine-tuned encoder needs: each masked alone, then many at once.

Michel, Levy and Neubig (2019), *Are Sixteen Heads Really Better than One?* (arXiv:1905.10650),
sections 3.1 and 4: masking one head changes little, and a good part can be left out. Heads are
ordered by how much the loss of one window moves with their gate (section 4.1, each layer's divided
by its l2 norm), on one half of the items, and the curve is of the other half; random orders stand
beside it. Ordered by what masking each alone does to the mean loss, heads whose mask happens to
lower it would go first, and a few such together may do more harm than random ones.

Run it on the splits of a workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Numbers
from bertvision.pipelines.declare import Kept, PrecisionOption, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, HeatMap, curves
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.metrics import METRICS, MetricName
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.scores import (
    headline,
    headline_metric,
    trivial_score,
)
from bertvision.pipelines.tasks.windows import Windows

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from bertvision.pipelines.precision import Precision
    from bertvision.pipelines.tasks.task import Task
    from bertvision.pipelines.tasks.windows import Batch


_PROJECTIONS = (
    "attention.output.dense",  # BERT, RoBERTa, ELECTRA, DeBERTa
    "attention.attn.o",  # MPNet
    "attention.out_lin",  # DistilBERT
    "attention.dense",  # ALBERT, whose layers are one
    "attn.Wo",  # ModernBERT
    "attn.c_proj",  # GPT-2
    "self_attn.o_proj",  # Llama and its kin
)
"""Where the families have the output projection of attention: ends of names of modules."""


@contextmanager
def gated(model: PreTrainedModel) -> Iterator[Tensor]:
    """Gates of all attention heads of a model, open at first.

    Args:
        model: an encoder, with an output layer or without.

    Yields:
        (layers, heads) float32: 1 lets a head through, 0 does not. Set its elements between
        forward passes; when the block is left the model is as it was.

    Raises:
        InputError: it is not known where the family has its attention heads.
    """
    import torch

    encoder, config = model.base_model, model.config
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    modules = [m for name, m in encoder.named_modules() if name.endswith(_PROJECTIONS)]
    if len(modules) not in (1, layers):
        raise InputError(
            f"it is not known where {config.model_type} has its attention heads: found "
            f"{len(modules)} output projections of attention for {layers} layers; BERT, RoBERTa, "
            "ELECTRA, DeBERTa, MPNet, DistilBERT, ALBERT, ModernBERT, GPT-2 and Llama can be masked"
        )
    gates = torch.ones(layers, heads)
    passes = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal passes
        passes = 0

    def close(number: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal passes
        layer = (
            number if len(modules) == layers else passes
        )  # one that is shared comes in all places
        passes += 1
        width = args[0].shape[-1] // heads
        return (args[0] * gates[layer].to(args[0]).repeat_interleave(width), *args[1:])

    hooks = [encoder.register_forward_pre_hook(begin)]
    hooks += [m.register_forward_pre_hook(partial(close, i)) for i, m in enumerate(modules)]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


class Replay:
    """Outputs of an encoder's layers in the last whole pass.

    Args:
        layers: Layers of the encoder, from the bottom up.

    Attributes:
        start: number of the first layer that computes, from 0: those below give what is kept, and
            nothing more is kept. None runs all layers, and keeps what they give.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.start: int | None = None
        self._computed = [layer.forward for layer in layers]
        self._kept: list[Any] = [None] * len(layers)

    def layer(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Output of a layer, in the place of its own forward pass."""
        if self.start is None:
            self._kept[number] = self._computed[number](*args, **kwargs)
        elif number >= self.start:
            return self._computed[number](*args, **kwargs)
        return self._kept[number]


@contextmanager
def replayed(model: PreTrainedModel) -> Iterator[Replay]:
    """Let an encoder begin at any layer, with what those below gave in its last whole pass.

    Args:
        model: an encoder, with an output layer or without; when the block is left it is as it was.

    Yields:
        Where to begin. It changes nothing for a family that shares one layer among all (ALBERT),
        which always runs whole.
    """
    from bertvision.pipelines.variants.variant import transformer_layers

    try:
        layers = [*transformer_layers(model)]
    except InputError:
        layers = []
    replay = Replay(layers)
    with ExitStack() as patches:
        for number, layer in enumerate(layers):
            patches.callback(_restore, layer, vars(layer).get("forward"))
            layer.forward = partial(replay.layer, number)
        yield replay


def _restore(layer: nn.Module, own: Any) -> None:
    """Give a layer the forward pass of its class back, or one of its own."""
    del layer.forward
    if own is not None:
        layer.forward = own


@dataclass(frozen=True, eq=False, repr=False)
class PruningResult(AnalysisResult):
    """Loss of an encoder without some of its attention heads.

    Attributes:
        rise: (layers, heads) by how much the mean loss rises where this head alone is masked;
            below 0 the encoder does better without it.
        sensitivity: (layers, heads) by how much the loss of a window moves with the head's gate,
            each layer's of l2 norm 1; by it heads are ordered.
        loss: mean loss with all heads, on the same items.
        left: (steps,) share of heads that are left.
        score: (steps,) with the least important masked first, in per cent.
        random: (steps,) mean of the scores with heads masked in random orders.
        random_sd: (steps,) their standard deviation over the orders.
        metric: name of the score.
        trivial: score of the commonest answer; None where the metric has none.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: Name of the measured snapshot, for titles.
        n_ranked: items by which heads were ordered.
        n_scored: other items, of which the curve is.
        seed: Seed of the choice of items, and of the random orders.
    """

    kind = "prune"
    heading = "Which attention heads the encoder needs"
    titled = (
        "Pruning of attention heads, {name}, ordered on {n_ranked:,} items, scored on "
        "{n_scored:,} others"
    )
    caption = (
        "Score with ever fewer attention heads: the least important masked first, and at random"
    )
    reading = (
        "Attention heads are ordered by how much the loss moves with their gate, on some items; "
        "scores are of other items, by one rule, without a tuned threshold."
    )
    seen = (
        "A map of how much the loss rises without each head, and the score over the share of "
        "heads that are left, the least important masked first, beside random orders."
    )

    named = ("name",)

    rise: Annotated[Array, Axes.of("layers", "heads")]
    sensitivity: Annotated[Array, Axes.of("layers", "heads")]
    loss: float
    left: Annotated[Array, Axes.of("steps")]
    score: Annotated[Array, Axes.of("steps")]
    random: Annotated[Array, Axes.of("steps")]
    random_sd: Annotated[Array, Axes.of("steps")]
    metric: MetricName
    trivial: float | None
    layers: Numbers
    heads: Numbers
    name: str
    n_ranked: Count
    n_scored: Count
    seed: int

    def columns(self) -> list[Column]:
        """Columns for a point of the curve."""
        metric = METRICS[self.metric].label
        return [
            Column("percent", "heads left (%)", digits=0),
            Column(self.metric, metric),
            Column("random", f"{metric}, random order", sd=True),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """The points of the curve."""
        return [row | {"percent": 100 * row["left"]} for row in self._curve()]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head, then a row for each point of the curve."""
        values = {"rise": self.rise, "sensitivity": self.sensitivity}
        return self.listed({"layer": self.layers, "head": self.heads}, values) + self._curve()

    def _curve(self) -> list[dict[str, Any]]:
        values = {self.metric: self.score, "random": self.random, "random_sd": self.random_sd}
        return self.listed({"left": self.left.tolist()}, values)

    def remarks(self) -> list[str]:
        """The heads that matter most, and how many do not."""
        order = np.argsort(-self.rise, axis=None)[:5]
        most = ", ".join(
            f"{self.layers[i]}.{self.heads[j]} (+{self.rise[i, j]:.3f})"
            for i, j in zip(*np.unravel_index(order, self.rise.shape), strict=True)
        )
        harmless = int((self.rise <= 0).sum())
        remarks = [
            f"Without one head the loss, {self.loss:.3f} with all, rises most at (layer.head) "
            f"{most}; it does not rise at {harmless} of {self.rise.size} heads."
        ]
        if self.trivial is not None:
            remarks.append(f"The commonest answer has {self.trivial:.1f}.")
        return remarks

    def charts(self) -> dict[str, Chart]:
        """The score over the heads that are left, and what the loss rises without each head."""
        metric = METRICS[self.metric].label
        rows = [
            {"left": 100 * row["left"], "order": name, "score": row[key], "score_sd": row.get(sd)}
            for name, key, sd in (
                ("least important first", self.metric, ""),
                ("random order", "random", "random_sd"),
            )
            for row in self._curve()
        ]
        return {
            "score": curves(
                rows,
                "score",
                f"{metric} ({METRICS[self.metric].unit})",
                by=["order"],
                places="left",
                of_places="attention heads left (%)",
                levels={"commonest answer": self.trivial},
                over="orders",
            ),
            "rise": HeatMap(
                "layer",
                self.layers,
                "attention head",
                self.heads,
                "rise of the loss without the head",
                self.rise,
                signed=True,
            ),
        }

    def drawn(self) -> list[Chart]:
        """A heat map of layer × head, then the curve."""
        charts = self.charts()
        return [charts["rise"], charts["score"]]


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
        model: Model with the output layer of ``task``; left as it was.
        task: Task that it was fine-tuned for.
        ranked: the items that order the heads.
        scored: other items, for the curve.
        orders: random orders that stand beside it.
        precision: arithmetic of the forward passes.
        seed: Seed of the random orders.
        name: Name of its subject, for titles.

    Raises:
        InputError: it is not known where the family has its attention heads, there are no items,
            or fewer than two random orders.
    """
    import torch

    from bertvision.pipelines.precision import device

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
                scores = _score(model, task, scored, precision)
                bar.update(sizes[1])
                return scores

            random = np.random.default_rng(seed)
            every = [sensitivity.view(-1).argsort(stable=True)]
            every += [torch.from_numpy(random.permutation(heads)) for _ in range(orders)]
            scores = np.empty((len(every), STEPS))
            scores[:, 0], metric, trivial = score(every[0][:0])
            scores[:, -1] = score(every[0])[0]
            for k, order in enumerate(every):
                for step in range(1, STEPS - 1):
                    scores[k, step] = score(order[: round(heads * step / (STEPS - 1))])[0]
    masked = np.round(heads * np.arange(STEPS) / (STEPS - 1))
    return PruningResult(
        rise=rise.numpy(),
        sensitivity=sensitivity.numpy(),
        loss=whole,
        left=1 - masked / heads,
        score=scores[0],
        random=scores[1:].mean(axis=0),
        random_sd=scores[1:].std(axis=0, ddof=1),
        metric=metric,
        trivial=trivial,
        layers=tuple(range(1, gates.shape[0] + 1)),
        heads=tuple(range(1, gates.shape[1] + 1)),
        name=name,
        n_ranked=len(ranked.items),
        n_scored=len(scored.items),
        seed=seed,
    )


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
    import torch

    from bertvision.pipelines.precision import autocast, device

    where, whole, rise = device(), 0.0, torch.zeros(gates.shape, dtype=torch.float64)
    with torch.inference_mode():
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
    from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
    from bertvision.pipelines.tasks.windows import collate

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
    import torch

    from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
    from bertvision.pipelines.precision import device
    from bertvision.pipelines.tasks.windows import collate

    where, labels, padding = device(), task.labels(windows), pad_id(None, model.config)
    sensitivity = torch.zeros(gates.shape, dtype=torch.float64)
    gates.requires_grad_(True)
    try:
        for row in range(len(windows)):
            batch = collate(
                *(windows, windows.first_token, np.array([row]), padding, labels),
                token_types=takes_token_types(model),
            ).to(where)
            (moved,) = torch.autograd.grad(task.loss(model(**batch.inputs), batch), gates)
            sensitivity += moved.abs()
    finally:
        gates.requires_grad_(False)
    norm: Tensor = sensitivity.norm(dim=1, keepdim=True)
    return sensitivity / norm.clamp_min(torch.finfo(sensitivity.dtype).tiny)


def _score(
    model: PreTrainedModel, task: Task, sample: Sample, precision: Precision
) -> tuple[float, str, float | None]:
    """The task's first metric in per cent, its name, and that of the commonest answer."""
    from bertvision.pipelines.encoders.loading import pad_id
    from bertvision.pipelines.finetuning.kept_logits import predict_logits

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


@job
def prune(
    checkpoint: Tag,
    *,
    split: str = "dev",
    items: Annotated[int, Option(ge=2)] = 100,
    orders: Annotated[int, Option(ge=2)] = 3,
    precision: PrecisionOption = "auto",
    seed: Seed = 0,
    **where: Unpack[Kept],
) -> PruningResult:
    """Mask attention heads, and measure what the encoder loses.

    Heads are masked one by one, and then ever more of them. For each attention head the layers from
    its own up are run, and for the curve the encoder 38 times, over half of the items each. A
    second call with the same settings, of the same weights, gives what was kept.

    Examples:
        >>> import bertvision
        >>> pruned = bertvision.prune("1e", items=4)
        >>> pruned.rise.shape  # (layers, attention heads)
        (2, 4)

    Args:
        checkpoint: Snapshot to analyse.
        split: Split to score on.
        items: Seeded sample: half orders the heads, half is scored.
        orders: Random orders beside that of importance.
        seed: Seed of the sample and of the orders.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the family's attention heads cannot be
            masked, or the workspace has no task.
    """
    request, tag = Request(prune, locals()), parse_tag(checkpoint)
    if not find_task(request.workspace.config.task.name).learns:
        raise InputError(
            f"workspace {request.workspace.root} has no task by which attention heads could be "
            "told important: make one with `bertvision finetune`"
        )
    folder, arithmetic = request.snapshot(tag, precision)
    data = request.workspace.dataset()
    data.check([split])
    request.names = [split]

    def measure() -> PruningResult:
        from bertvision.pipelines.workspace.snapshots import load_snapshot

        snapshot = load_snapshot(folder)
        every = data.items(split)
        chosen = np.random.default_rng(seed).permutation(len(every))[:items]
        half = len(chosen) // 2

        def sample(rows: Any) -> Sample:
            some = [every[i] for i in sorted(rows)]
            return Sample(some, data.task.windows(some, snapshot.tokenizer, data.config))

        return pruning(
            snapshot.model,
            data.task,
            sample(chosen[:half]),
            sample(chosen[half:]),
            orders=orders,
            precision=arithmetic,
            seed=seed,
            name=f"{tag}/{split}",
        )

    return request.answer(PruningResult, measure)
