"""Which attention heads a fine-tuned encoder needs: each masked alone, then many at once.

Michel, Levy and Neubig (2019), *Are Sixteen Heads Really Better than One?* (arXiv:1905.10650),
sections 3.1 and 4: masking one head changes little, and a good part can be left out. Heads are
ordered by how much the loss rises without them, on one half of the items, and the curve is of the
other half; a random order stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.gates import gated
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.drawing.figures import NARROW, WIDE, legend, sample, series
from bertvision.pipelines.drawing.layers import value_maps
from bertvision.pipelines.drawing.svg import Canvas, Plot
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.finetuning.baseline import predict_logits
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.scores import METRICS, headline, headline_metric, trivial_score
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.text import fill, format_table

STEPS = 11
"""Points of the curve: all heads, nine tenths, …, none."""
_TOKENS = 8_192
"""Tokens of a batch, padding included."""


class Sample(NamedTuple):
    """Items of a split, and their windows."""

    items: Sequence[Any]
    windows: Windows


@dataclass(frozen=True, eq=False, repr=False)
class PruningResult(AnalysisResult):
    """What an encoder loses without some of its attention heads.

    Attributes:
        rise: (layers, heads) by how much the mean loss rises where this head alone is masked;
            below 0 the encoder does better without it.
        loss: mean loss with all heads, on the same items.
        left: (steps,) share of heads that are left.
        score: (steps,) with the least important masked first, in per cent.
        random: (orders, steps) with heads masked in a random order.
        metric: name of the score.
        trivial: score of the commonest answer, NaN where the metric has none.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: what was measured, for titles.
        n_ranked: items by which heads were ordered.
        n_scored: other items, of which the curve is.
        seed: of the choice of items, and of the random orders.
    """

    seen = (
        "Left: by how much the loss rises without a head. Right: the score over the share of heads "
        "that are left, the least important masked first, beside random orders."
    )

    rise: Array
    loss: float
    left: Array
    score: Array
    random: Array
    metric: str
    trivial: float
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    name: str
    n_ranked: int
    n_scored: int
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        many = f"ordered on {self.n_ranked:,} items, scored on {self.n_scored:,} others"
        return f"Pruning of attention heads, {self.name}, {many}"

    def table(self) -> str:
        """Text for a terminal: the curve, then the heads that matter most."""
        of = METRICS[self.metric]
        header = ["heads left (%)", of, f"{of}, random order", "± sd"]
        rows = [
            [f"{100 * left:.0f}", f"{score:.1f}", f"{some.mean():.1f}", f"{some.std(ddof=1):.1f}"]
            for left, score, some in zip(self.left, self.score, self.random.T, strict=True)
        ]
        order = np.argsort(-self.rise, axis=None)[:5]
        most = ", ".join(
            f"{self.layers[i]}.{self.heads[j]} (+{self.rise[i, j]:.3f})"
            for i, j in zip(*np.unravel_index(order, self.rise.shape), strict=True)
        )
        harmless = int((self.rise <= 0).sum())
        legend = (
            f"Without one head the loss, {self.loss:.3f} with all, rises most at (layer.head) "
            f"{most}; it does not rise at {harmless} of {self.rise.size} heads. Scores are by one "
            "rule, without a tuned threshold; the commonest answer has "
            f"{_shown(self.trivial)}."
        )
        return f"{self.title()}\n\n{format_table(header, rows)}\n\n{fill(legend)}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head, then a row for each point of the curve."""
        of_heads = [
            {"name": self.name, "layer": layer, "head": head, "rise": float(self.rise[i, j])}
            for i, layer in enumerate(self.layers)
            for j, head in enumerate(self.heads)
        ]
        curve = [
            {
                "name": self.name,
                "left": float(left),
                self.metric: float(score),
                "random": float(some.mean()),
                "random_sd": float(some.std(ddof=1)),
            }
            for left, score, some in zip(self.left, self.score, self.random.T, strict=True)
        ]
        return of_heads + curve

    def drawing(self) -> Canvas:
        """A heat map of layer × head, and the curve below it."""
        top = max(float(self.rise.max()), 1e-9)
        heat = value_maps(
            f"rise of the loss without the head, in parts of the largest ({top:.3f})",
            {"Importance": self.rise / top},
            ("layer", self.layers),
            ("attention head", self.heads),
        )
        c = Canvas(WIDE, heat.height + 300)
        c.put(heat, 0, 0)
        of = METRICS[self.metric]
        high = max(float(self.score.max()), float(self.random.max()), 1.0)
        low = min(float(self.score.min()), float(self.random.min()), 0.0)
        box = (40, heat.height + 40, NARROW + 120, heat.height + 240)
        p = Plot(c, *box, (0, 1), (low * 1.1, high * 1.1))
        ticks = [(k / 10, f"{10 * k} %") for k in range(0, 11, 2)]
        p.axes(ticks, "attention heads left", of)
        lines = {"least important masked first": self.score, "random order": self.random.mean(0)}
        for i, (name, line) in enumerate(lines.items()):
            points = list(zip(map(float, self.left), map(float, line), strict=True))
            series(p, i, points, [f"{name}: {100 * x:.0f} %, {y:.1f}" for x, y in points])
        c.height = legend(c, [sample(i, n) for i, n in enumerate(lines)], box[3] + 46, WIDE) + 10
        return c


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

    Runs the encoder (heads + 1) times over the windows of ``ranked`` and 11 · (orders + 1) times
    over those of ``scored``. Scores of spans have the no-answer threshold 0 throughout.

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
        with progress(heads + 1 + steps, "masking heads", "pass") as bar:
            whole = loss()
            bar.update(1)
            for i in range(heads):
                gates.view(-1)[i] = 0
                rise.view(-1)[i] = loss() - whole
                gates.fill_(1)
                bar.update(1)
            least = rise.view(-1).argsort(stable=True)
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
        loss=whole,
        left=1 - masked / heads,
        score=found[0],
        random=found[1:],
        metric=metric,
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


def _score(
    model: PreTrainedModel, task: Task, sample: Sample, precision: Precision
) -> tuple[float, str, float]:
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
    trivial = trivial_score(metrics, key)
    return float(metrics[key]), key, float("nan") if trivial is None else trivial


def _shown(trivial: float) -> str:
    return f"{trivial:.1f}" if np.isfinite(trivial) else "0, by its definition"
