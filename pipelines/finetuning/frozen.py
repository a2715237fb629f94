"""The frozen lower layers of an encoder, out of a store: computed once, and never again.

With ``freeze-stored:K`` the embeddings and the K lowest layers are run once over the training
windows; their hidden state K is kept in a store of its own until the last snapshot is made, and
every step of training begins there.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.precision import Precision, autocast
from bertvision.pipelines.tasks.windows import Batch, Int64Array
from bertvision.pipelines.variants.variant import embeddings, transformer_layers
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
FOLDER = "finetune/frozen"
"""Where the store is, in a workspace, while it is trained."""


class FrozenLayers:
    """Hidden state k of the training windows, and the layers above it.

    Args:
        workspace: Workspace that is fine-tuned.
        layers: Number of lower layers that are frozen, k.
        precision: Precision of the training: float32 states are kept for 32, bfloat16 for bf16, in
            which the layers above would round them anyway.
    """

    def __init__(self, workspace: Workspace, layers: int, precision: Precision) -> None:
        self.layers = layers
        self._root = workspace.root / FOLDER
        options = ExtractOptions(
            splits=("train",),
            tokens=("all",),
            layers=(layers,),
            encoding="float32" if precision == "32" else "bfloat16",
            precision=precision,
            store=str(self._root),
        )
        extract(workspace, "0e", options)
        self.split: ActivationSplit = workspace.at(str(self._root)).split("0e", "train")
        self._row = np.argsort(self.split.plan.example_id, kind="stable")

    def states(self, rows: Int64Array) -> Tensor:
        """Hidden state k of some windows, (batch, seq, hidden) float32, padded with zeros.

        Args:
            rows: (batch,) numbers of the windows in the data.
        """
        return self.split.read(self._row[rows]).padded()[..., 0]

    @contextmanager
    def below(self, model: PreTrainedModel, states: Tensor) -> Iterator[None]:
        """Let the model begin at hidden state k: what it computes inside is of the layers above.

        Args:
            model: the whole encoder, with an output layer.
            states: (batch, seq, hidden) of the windows that it is called with.
        """
        parts, layers = embeddings(model), transformer_layers(model)
        bottom = {n: m for n, m in model.base_model.named_children() if m in parts}
        lower = [*layers][: self.layers]
        for name in bottom:
            setattr(model.base_model, name, _Given(states))
        del layers[: self.layers]
        try:
            yield
        finally:
            for name, module in bottom.items():
                setattr(model.base_model, name, module)
            upper = [*layers]
            del layers[:]
            layers.extend([*lower, *upper])

    def check(
        self, model: PreTrainedModel, batch: Batch, rows: Int64Array, precision: Precision
    ) -> None:
        """Make sure that a family computes the same from the stored state as from the text.

        Args:
            model: the whole encoder, at its start; left in evaluation mode.
            batch: some windows.
            rows: (batch,) their numbers in the data.
            precision: Precision of the forward passes.

        Raises:
            InputError: it does not.
        """
        model.eval()
        where = next(model.parameters()).device
        batch = batch.to(where)
        with torch.inference_mode(), autocast(precision, where):
            whole = model(**batch.inputs)
            with self.below(model, self.states(rows).to(where)):
                above = model(**batch.inputs)
        real = batch.attention_mask.bool()
        for one, other in zip(_logits(whole), _logits(above), strict=True):
            a, b = (x.float()[real] if x.shape == real.shape else x.float() for x in (one, other))
            off = float((a - b).norm() / a.norm().clamp_min(1e-12))
            if off > (1e-3 if precision == "32" else 5e-2):
                raise InputError(
                    f"{model.config.model_type} does not compute the same from hidden state "
                    f"{self.layers} as from the text (its outputs differ by {100 * off:.2g} %): "
                    f"take --variant freeze:{self.layers}, which runs all layers"
                )

    def remove(self) -> None:
        """Remove the store; training is done."""
        shutil.rmtree(self._root, ignore_errors=True)


class _Given(nn.Module):
    """Stands in the place of the embeddings, and gives what it was made with."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states


def _logits(output: Any) -> Sequence[Tensor]:
    names = ("logits", "start_logits", "end_logits")
    return [values for name in names if (values := getattr(output, name, None)) is not None]
