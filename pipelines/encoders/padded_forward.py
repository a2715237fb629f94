"""The forward pass of any encoder of transformers, over padded windows of like length.

Which windows are computed together is decided by a trial (see `padding_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.errors import BertvisionError, InputError
from bertvision.pipelines.encoders.kept_states import KeptStates
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.encoders.padding_trial import SIMILAR, Batching
from bertvision.pipelines.encoders.sites.names import sites_of
from bertvision.pipelines.encoders.sites.taps import Taps
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.windows import Windows

_GROUP_TOKENS = {"cpu": 1024, "cuda": 8192}


class PaddedForward:
    """Computes hidden states by a model's own forward pass, with padding masked.

    Windows are padded behind their last token, so positions are those that the model counts itself,
    and a decoder's tokens look at none of it.

    Args:
        model: the encoder.
        wanted: indices of the hidden states that are wanted; the one after the last layer is the
            pooler output.
        sites: names of sites, which then stand in the place of the hidden states: ``wanted`` counts
            them from 0.

    Attributes:
        batching: Windows that are computed together.
    """

    batch_tokens = {"cpu": 4096, "cuda": 16384}
    """Tokens of a batch: enough to find windows of like length in it."""

    def __init__(
        self, model: PreTrainedModel, wanted: Sequence[int], sites: Sequence[str] = ()
    ) -> None:
        self._model = model
        self.batching: Batching = "like"
        self._sparse = getattr(model.config, "attention_type", None) == "block_sparse"
        self.attention = str(model.config._attn_implementation)
        """Name of the attention that is computed."""
        self._states = model.config.num_hidden_layers + 1
        self._pooled = not sites and self._states in wanted
        self._taps: Taps | None = None
        if sites:
            known = sites_of(model.config.model_type, self._states - 1)
            self._taps = Taps(model, {i: known[sites[i]] for i in wanted})
        self._pad = pad_id(None, model.config)
        self._token_types = takes_token_types(model)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # keys and values of a decoder's layers, for generation

    def __call__(
        self, windows: Windows, rows: npt.NDArray[np.int64], kept: KeptStates | None
    ) -> None:
        """Compute some windows, and hand their hidden states on group by group.

        Args:
            windows: of a split.
            rows: (batch,) which of them.
            kept: takes the hidden states; None drops them.

        Raises:
            InputError: the model does not give a hidden state per layer and one more, or cannot
                compute windows of such lengths.
        """
        lengths = windows.n_tokens[rows]
        for members in groups(lengths, self.group_tokens, self.batching):
            self._group(windows, rows[members], members, kept)

    @property
    def group_tokens(self) -> int:
        """Tokens that are computed together, with padding."""
        return _GROUP_TOKENS[self._model.device.type]

    def _group(
        self,
        windows: Windows,
        rows: npt.NDArray[np.int64],
        members: npt.NDArray[np.int64],
        kept: KeptStates | None,
    ) -> None:
        where = self._model.device
        batch = collate(
            windows, windows.first_token, rows, self._pad, token_types=self._token_types
        )
        inputs = batch.to(where).text
        if kept is None:
            self._compute(inputs)
            return
        real = batch.attention_mask.flatten().nonzero().squeeze(1).to(where)

        def keep(state: int, values: Tensor) -> None:
            kept.add(state, values.flatten(0, 1)[real], members)

        if self._taps is not None:
            with self._taps.taken(keep):
                self._compute(inputs)
            return
        output = self._compute(inputs, output_hidden_states=True)
        states = getattr(output, "hidden_states", None) or ()
        if self._sparse:  # behind the window stand tokens that fill the last block
            states = tuple(state[:, : inputs["input_ids"].shape[1]] for state in states)
        shape = (*batch.input_ids.shape, self._model.config.hidden_size)
        if len(states) != self._states or any(state.shape != shape for state in states):
            raise InputError(
                f"{self._model.config.model_type} gives hidden states of the shapes "
                f"{[tuple(state.shape) for state in states]}, where {self._states} of {shape} are "
                "needed, one per layer and the embeddings: its states cannot be extracted"
            )
        for layer, state in enumerate(states):
            keep(layer, state)
        if self._pooled:
            kept.add_pooler(self._states, output.pooler_output, members)

    def _compute(self, inputs: dict[str, Tensor], **options: Any) -> Any:
        """The model's output.

        Raises:
            InputError: it cannot compute such windows; says what it said.
        """
        model: Any = self._model
        tokens = inputs["input_ids"].shape[1]
        if self._sparse and tokens > _full_attention(model.config):
            model.set_attention_type("block_sparse")  # which a short window ends for good
        try:
            return model(**inputs, **options)
        except (BertvisionError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each family stumbles over what it lacks in its own way
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"a {model.config.model_type} model cannot compute windows of {tokens} token ids "
                f"alone, without other inputs ({type(error).__name__}: {said}): take an encoder "
                "of text such as bert-base-uncased, or other lengths of windows (--max-length)"
            ) from error


def _full_attention(config: Any) -> int:
    """Tokens up to which BigBird looks at all of them, and not at blocks."""
    return int((5 + 2 * config.num_random_blocks) * config.block_size)


def groups(
    lengths: npt.NDArray[np.integer], most: int, batching: Batching = "like"
) -> list[npt.NDArray[np.int64]]:
    """Put windows of like length together, longest first.

    Args:
        lengths: (windows,) tokens of each.
        most: tokens of a group, with padding; a longer window is a group of its own.
        batching: Lengths that are put together.

    Returns:
        Rows of each group; every window is in one.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    if batching == "single":
        return list(order[:, None])
    similar = SIMILAR if batching == "like" else 1
    cuts, start = [], 0
    for i, n in enumerate(lengths[order].tolist()):
        longest = int(lengths[order[start]])
        if i > start and (n < similar * longest or (i + 1 - start) * longest > most):
            cuts.append(i)
            start = i
    return np.split(order, cuts)
