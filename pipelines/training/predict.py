"""What trained heads say on stored examples: one pass over a split for many heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.training.trained_head import LoadedHead


def predict(
    heads: Sequence[LoadedHead],
    task: Task,
    split: ActivationSplit,
    precision: Precision,
    desc: str,
) -> list[Logits]:
    """Logits of every head on every window of a split, in stored order.

    Args:
        heads: of one kind and the same layers; they are moved to this machine's accelerator.
        task: that they learned.
        split: whole.
        precision: arithmetic of the heads.
        desc: name of the progress bar.
    """
    modules, layers = [head.module for head in heads], heads[0].config.layers
    windows = _windows_of(split, task)
    arrays = run_over(modules, task, split, precision, desc, layers=layers)
    return [Logits(of_head, windows) for of_head in arrays]


@torch.inference_mode()
def run_over(
    modules: Sequence[nn.Module],
    task: Task,
    split: ActivationSplit,
    precision: Precision,
    desc: str,
    *,
    layers: Sequence[int],
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """What modules that are called as heads give for every window of a split, in stored order.

    Args:
        modules: called with packed hidden states (tokens, layers, hidden) and lengths (batch,);
            they are moved to this machine's accelerator.
        task: whose outputs they give.
        split: whole.
        precision: of the arithmetic.
        desc: name of the progress bar.
        layers: hidden states that are read.

    Returns:
        For each module the logits by name: (tokens,) of spans, else (windows, …).
    """
    where = device()
    loader = ActivationLoader(split, batch_size=32, shuffle=False, layers=layers)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    modules = [module.to(where) for module in modules]
    found: list[dict[str, list[torch.Tensor]]] = [{} for _ in modules]
    spans = task.kind == "span"
    with progress(len(split), desc, "example") as bar:
        for packed in loader:
            batch = decoded(packed.to(where), dtype)
            seq = torch.arange(int(batch.lengths.max()), device=where)
            real = seq < batch.lengths.unsqueeze(1)
            for parts, module in zip(found, modules, strict=True):
                with autocast(precision, where):
                    output = module(batch.hidden_states, batch.lengths)
                for name, values in task.logits(output).items():
                    kept = values[real] if spans else values
                    parts.setdefault(name, []).append(kept.float().cpu())
            bar.update(len(packed))
    return [{name: torch.cat(values).numpy() for name, values in parts.items()} for parts in found]


def _windows_of(split: ActivationSplit, task: Task) -> WindowIndex:
    """The windows of a split as it is stored."""
    plan = split.plan
    offset_mapping = None
    if task.kind == "span":
        n = plan.n_tokens.astype(np.int64)
        within = np.arange(plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)
        offset_mapping = split.array("offset_mapping")[np.repeat(plan.first_token, n) + within]
    return WindowIndex(
        task.items_of(split.table()),
        plan.n_tokens,
        # of sentences a window is an item, whose row in the data the plan knows
        split.labels.get("question_index", plan.example_id).astype(np.int32),
        offset_mapping,
    )
