"""BestEpoch: keep each head as it was after the epoch with the lowest loss on held-out examples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.training.module import HeadsModule, head_loss

_BATCH = 64


class _Best(NamedTuple):
    epoch: int
    loss: float
    weights: dict[str, Tensor]


class BestEpoch(pl.Callback):
    """Scores the heads after each epoch, and remembers the best state of each.

    The held-out examples are a part of the training data that nothing is trained on, never dev.

    Args:
        held_out: the split to score on.
        layers: indices of the hidden states that the heads take.
        precision: of the heads' arithmetic.
    """

    def __init__(self, held_out: ActivationSplit, layers: list[int], precision: Precision) -> None:
        self._loader = ActivationLoader(held_out, batch_size=_BATCH, shuffle=False, layers=layers)
        self._precision = precision
        self._losses: dict[str, list[float]] = {}
        self._best: dict[str, _Best] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """At the end of an epoch: score, before the resume file of this step is written."""
        if not trainer.is_last_batch:
            return
        assert isinstance(pl_module, HeadsModule)
        scores = self._score(list(pl_module.heads), pl_module.task)
        for run, head, loss in zip(pl_module.runs, pl_module.heads, scores, strict=True):
            losses = self._losses.setdefault(run.name, [])
            losses.append(loss)
            if not math.isfinite(loss):
                pl_module.diverged.add(run)
            elif loss <= min(losses):
                weights = {k: x.detach().cpu().clone() for k, x in head.state_dict().items()}
                self._best[run.name] = _Best(len(losses), loss, weights)

    @torch.no_grad()
    def _score(self, heads: list[nn.Module], task: Task) -> list[float]:
        where = device()
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        sums, count = [0.0] * len(heads), 0
        for head in heads:
            head.eval()
        for packed in self._loader:
            batch = decoded(packed.to(where), dtype)
            with autocast(self._precision, where):
                for i, head in enumerate(heads):
                    sums[i] += float(head_loss(head, batch, task)) * len(packed)
            count += len(packed)
        for head in heads:
            head.train()
        return [total / count for total in sums]

    def restore(self, name: str, head: nn.Module) -> tuple[int, list[float]]:
        """Give a head the weights of its best epoch.

        Returns:
            That epoch, from 1, and the held-out loss of every epoch.
        """
        best = self._best[name]
        head.load_state_dict(best.weights)
        return best.epoch, self._losses[name]

    def state_dict(self) -> dict[str, Any]:
        """Losses and best states, for the resume file."""
        return {"losses": self._losses, "best": {k: tuple(x) for k, x in self._best.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from an interrupted training's."""
        self._losses = state_dict["losses"]
        self._best = {name: _Best(*held) for name, held in state_dict["best"].items()}
