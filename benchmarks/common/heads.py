"""The heads that benchmarks of training train, and a step of them."""

from __future__ import annotations

import torch
from torch import Tensor

from bertvision.featurestore.split import ActivationSplit
from bertvision.models.outputs import span_loss
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.training.module import build_heads
from bertvision.pipelines.workspace.runs import Run

BATCH = 16
ONE = ["adapter-386-shared"]
EIGHT = [
    f"adapter-{size}-{kind}"
    for size in (64, 386)
    for kind in ("shared", "shared-skip", "independent", "independent-skip")
]


class Heads:
    """Heads and their optimiser on the device, trained as bertvision trains them.

    Args:
        names: of the heads.
        split: whose hidden states they are given.
        precision: of their arithmetic.
    """

    def __init__(self, names: list[str], split: ActivationSplit, precision: Precision) -> None:
        record = split.record
        runs = [Run(name) for name in names]
        heads = build_heads(runs, layers=len(record.layers), hidden=record.hidden_size)
        self._heads = [head.to(device()) for head in heads.values()]
        parameters = [p for head in self._heads for p in head.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=1e-3)
        self._precision = precision

    def step(self, hidden_states: Tensor, lengths: Tensor, labels: dict[str, Tensor]) -> None:
        """Forward, loss, backward and Adam for all heads, on one batch."""
        start, end = (labels[f"{side}_positions"].long() for side in ("start", "end"))
        with autocast(self._precision, device()):
            losses = [span_loss(head(hidden_states, lengths), start, end) for head in self._heads]
        torch.stack(losses).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
