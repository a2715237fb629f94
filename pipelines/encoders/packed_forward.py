"""The forward pass over packed windows, without any padding, of BERT and the families like it.

Windows of a batch lie one after another on one token axis. All of such an encoder but its attention
looks at each token alone; the attention is computed window by window. So no arithmetic goes into
padding, windows need no sorting by length, and hidden states come out the way they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.pipelines.encoders.kept_states import KeptStates
from bertvision.pipelines.encoders.loading import position_offset, takes_token_types
from bertvision.pipelines.encoders.packed_attention import PACKED_ATTENTION, Packing
from bertvision.pipelines.encoders.sites.names import Site, sites_of
from bertvision.pipelines.encoders.sites.taps import Taps
from bertvision.pipelines.precision import Precision
from bertvision.pipelines.tasks.windows import Windows

_STACKS = {
    "bert": "encoder",
    "roberta": "encoder",
    "xlm-roberta": "encoder",
    "electra": "encoder",
    "distilbert": "transformer",
}
"""Families whose hidden states on this path were compared with their own forward pass, and the
module that holds their layers, as its ``layer``."""


class PackedForward:
    """Computes hidden states of windows that lie one after another.

    Args:
        model: an encoder that `can_pack`; it is cast, and cut after the last wanted layer.
        wanted: indices of the hidden states that are wanted; the one after the last layer is the
            pooler output.
        precision: of the forward pass.
        sites: names of sites, which then stand in the place of the hidden states: ``wanted`` counts
            them from 0.
    """

    attention = PACKED_ATTENTION
    """Name of the attention that is computed."""
    batch_tokens = {"cpu": 1024, "cuda": 8192}
    """Tokens of a batch: on a CPU what its caches like best (measured at 400 to 4,096), on a GPU so
    many that launching kernels takes no longer than running them."""

    def __init__(
        self,
        model: PreTrainedModel,
        wanted: Sequence[int],
        precision: Precision,
        sites: Sequence[str] = (),
    ) -> None:
        self._model = model
        model.set_attn_implementation(PACKED_ATTENTION)
        if precision == "bf16":
            # what autocast does to these weights in every forward pass: the same bits, but once
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)
        stack: Any = model.get_submodule(_STACKS[model.config.model_type])
        depth = len(stack.layer)
        self._pooler_index = depth + 1
        sources = _hidden_states(model, depth)
        if sites:
            known = sites_of(model.config.model_type, depth)
            sources = [known[name] for name in sites]
        seen = {i: sources[i] for i in wanted if i < len(sources)}
        self._taps = Taps(model, seen)
        # taken out, because in the model it would look at the first window of a batch alone
        pooler: Any = getattr(model, "pooler", None)
        self._pooler = pooler if not sites and self._pooler_index in wanted else None
        if pooler is not None:
            model.register_module("pooler", None)
        if len(seen) == len(wanted):  # or the pooler's is wanted, behind all of them
            stack.layer = stack.layer[: 1 + max(site.block for site in seen.values())]
        self._offset = position_offset(model)
        self._token_types = takes_token_types(model)

    def __call__(
        self, windows: Windows, rows: npt.NDArray[np.int64], kept: KeptStates | None
    ) -> None:
        """Compute some windows, and hand each hidden state on at once.

        Args:
            windows: of a split.
            rows: (batch,) which of them.
            kept: takes the hidden states; None drops them.
        """
        first, lengths = windows.first_token[rows], windows.n_tokens[rows]
        within = np.concatenate([np.arange(n) for n in lengths.tolist()])
        token = np.repeat(first, lengths) + within

        def row(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).unsqueeze(0).to(self._model.device)

        inputs = {"input_ids": row(windows.input_ids[token])}
        if self._token_types:
            inputs["token_type_ids"] = row(windows.token_type_ids[token])
        if self._offset:
            within = _counted(windows.input_ids[token] == self._offset - 1, lengths)
        taking = (
            nullcontext()
            if kept is None
            else self._taps.taken(lambda i, state: kept.add(i, state.squeeze(0)))
        )
        with taking:
            last = self._model(
                **inputs,
                position_ids=row(within + self._offset),
                packing=Packing.of(lengths.tolist(), self._model.device),
            ).last_hidden_state.squeeze(0)
        if self._pooler is not None and kept is not None:
            cls = torch.from_numpy(np.cumsum(lengths, dtype=np.int64) - lengths).to(last.device)
            kept.add_pooler(self._pooler_index, self._pooler(last[cls].unsqueeze(1)))


def _hidden_states(model: PreTrainedModel, depth: int) -> list[Site]:
    """Where the hidden states are seen, from the embedding output on."""
    # ELECTRA widens its embeddings to the hidden size: that is what its first layer reads
    embeddings = "embeddings_project" if hasattr(model, "embeddings_project") else "embeddings"
    layer = f"{_STACKS[model.config.model_type]}.layer"
    return [
        Site(-1, embeddings, "gives"),
        *(Site(i, f"{layer}.{i}", "gives") for i in range(depth)),
    ]


def _counted(
    padding: npt.NDArray[np.bool_], lengths: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Positions as RoBERTa's kin count them: padding that a text spells is at −1, uncounted.

    Args:
        padding: (tokens,) whether a token is the padding.
        lengths: (windows,) tokens of each window.
    """
    count = np.cumsum(~padding, dtype=np.int64)
    last = np.cumsum(lengths, dtype=np.int64) - 1
    before = np.concatenate([[0], count[last[:-1]]])
    return np.where(padding, -1, count - np.repeat(before, lengths) - 1)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether windows can be packed for an encoder: of a compared family, attending both ways."""
    return model.config.model_type in _STACKS and not getattr(model.config, "is_decoder", False)
