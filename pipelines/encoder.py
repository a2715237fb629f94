"""The encoder's forward pass over packed windows, without any padding.

Windows of a batch lie one after another on one token axis. All of BERT but its attention looks at
each token alone; the attention is computed window by window. So no arithmetic goes into padding,
windows need no sorting by length, and hidden states come out the way they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import BertModel

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.calibration import ChannelStatsAccumulator
from bertvision.featurestore.encoding import ChannelStats
from bertvision.pipelines.packed_attention import PACKED_ATTENTION, Packing
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.registry import Tokens
from bertvision.pipelines.tasks.windows import Windows

CALIBRATION_WINDOWS: dict[Tokens, int] = {"all": 64, "cls": 256}
"""Windows that channel statistics are taken from, evenly spread over the split. Measured on SQuAD
with all-MiniLM-L6-v2, fine-tuned for an epoch: from 4, 16, 64, 256 and 512 windows the relative
error of int8 is 6.36, 6.27, 6.22, 6.22 and 6.22e-3, that of int4 9.15, 9.02, 8.97, 8.97 and
8.97e-2. 64 windows (11,000 tokens) fix a channel's deviation to 1 % (8 % in the worst channel).

Of the [CLS] alone a window is one vector, and these vectors lie close together, so the error is
measured against their deviation from their mean (the same encoder, fine-tuned on 244 questions to
tell answerable ones; mean of the layers): 8.5, 6.9, 6.7 and 6.7e-3 of int8 from 16, 64, 256 and 512
of 2,872 windows, 6.7e-3 from all; of int4 1.22, 1.05, 1.02, 1.02 and 1.02e-1."""
_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a batch: on a CPU what its caches like best (measured at 400 to 4,096), on a GPU so
many that launching kernels takes no longer than running them."""


class Encoder:
    """A snapshot's encoder on this machine's device: windows in, packed hidden states out.

    Args:
        model: belongs to the encoder from now on: moved, cast, and cut after the last kept layer.
        layers: indices of the hidden states to give out, ascending; 0 is the embedding output. The
            index after the last layer is the pooler output, of a model that has one, and needs
            ``tokens="cls"``.
        precision: of the forward pass.
        tokens: which tokens of each window to give out: all, or the [CLS] alone.

    Attributes:
        device: where it computes.
        model: what it computes with, without its pooler.
        tokens: of each window that it gives out.
    """

    def __init__(
        self,
        model: BertModel,
        layers: Sequence[int],
        precision: Precision,
        tokens: Tokens = "all",
    ) -> None:
        self.device = device()
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.model.set_attn_implementation(PACKED_ATTENTION)
        if precision == "bf16":
            # what autocast does to these weights in every forward pass: the same bits, but once
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)
        sources = [self.model.embeddings, *self.model.encoder.layer]
        self._sources = [sources[layer] for layer in layers if layer < len(sources)]
        # taken out, because in the model it would look at the first window of a batch alone
        self._pooler = self.model.pooler if layers[-1] == len(sources) else None
        self.model.pooler = None
        self.model.encoder.layer = self.model.encoder.layer[: max(layers)]
        self.tokens = tokens
        self._hidden = int(model.config.hidden_size)
        self._precision = precision
        self._memory = torch.empty(0, device=self.device)

    def kept(self, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """How many tokens it gives out of windows of these lengths, (windows,) each."""
        return np.ones_like(lengths) if self.tokens == "cls" else lengths

    def batches(self, lengths: npt.NDArray[np.integer]) -> list[slice]:
        """Cut a sequence of windows into batches that suit the device.

        Args:
            lengths: (windows,) tokens of each.
        """
        most = _BATCH_TOKENS[self.device.type]
        batches, start, tokens = [], 0, 0
        for i, n in enumerate(lengths.tolist()):
            if i > start and tokens + n > most:
                batches.append(slice(start, i))
                start, tokens = i, 0
            tokens += n
        return [*batches, slice(start, len(lengths))]

    def forward(self, windows: Windows, rows: npt.NDArray[np.int64]) -> Tensor:
        """The forward pass of some windows, and nothing else (see `__call__`).

        Returns:
            (tokens, hidden) of the last computed layer, all tokens.
        """
        first, lengths = windows.first_token[rows], windows.n_tokens[rows]
        within = np.concatenate([np.arange(n) for n in lengths.tolist()])
        token = np.repeat(first, lengths) + within

        def row(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).unsqueeze(0).to(self.device)

        with torch.inference_mode(), autocast(self._precision, self.device):
            output = self.model(
                input_ids=row(windows.input_ids[token]),
                token_type_ids=row(windows.token_type_ids[token]),
                position_ids=row(within),
                packing=Packing.of(lengths.tolist(), self.device),
            )
        last: Tensor = output.last_hidden_state.squeeze(0)
        return last

    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> Tensor:
        """Hidden states of some windows, one window after another.

        Args:
            windows: of a split.
            rows: (batch,) which of them.

        Returns:
            (tokens, layers, hidden) float32 on the device, in memory that the next call reuses
            (fresh memory takes several times as long to fill); each layer is contiguous. Of the
            [CLS] alone there is one token per window, and no other is ever gathered.

        Raises:
            InputError: the model does not work as the known versions of transformers do.
        """
        lengths = windows.n_tokens[rows]
        states = len(self._sources) + (self._pooler is not None)
        shape = (states, int(self.kept(lengths).sum()), self._hidden)
        count = shape[0] * shape[1] * shape[2]
        if self._memory.numel() < count:
            self._memory = torch.empty(count, device=self.device)
        packed = self._memory[:count].view(shape)
        free = iter(packed)
        cls: Tensor | None = None
        if self.tokens == "cls":
            cls = torch.from_numpy(np.cumsum(lengths, dtype=np.int64) - lengths).to(self.device)

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            state = output.squeeze(0)
            next(free).copy_(state if cls is None else state[cls])

        hooks = [source.register_forward_hook(keep) for source in self._sources]
        try:
            last = self.forward(windows, rows)
        finally:
            for hook in hooks:
                hook.remove()
        if self._pooler is not None and cls is not None:
            with torch.inference_mode(), autocast(self._precision, self.device):
                next(free).copy_(self._pooler(last[cls].unsqueeze(1)))
        if (missing := sum(1 for _ in free)) > 0:
            raise InputError(
                f"the encoder gave {shape[0] - missing} hidden states instead of {shape[0]}: "
                "this version of transformers is not supported"
            )
        return packed.transpose(0, 1)


def channel_stats(
    encoder: Encoder, windows: Windows, nonfinite: Literal["error", "record"] = "error"
) -> ChannelStats:
    """Channel statistics of a sample of a split's windows, for the quantised encodings.

    Args:
        encoder: of the snapshot.
        windows: of the split.
        nonfinite: what to do about tokens with NaN or infinity: refuse them, or leave them out.

    Raises:
        NonFiniteError: there is one, or no token is without; it names window, token and layer.
    """
    count = min(CALIBRATION_WINDOWS[encoder.tokens], len(windows))
    rows = np.linspace(0, len(windows) - 1, count).astype(np.int64)
    accumulator = ChannelStatsAccumulator()
    added = 0
    for batch in encoder.batches(windows.n_tokens[rows]):
        hidden_states = encoder(windows, rows[batch])
        finite = torch.isfinite(hidden_states).all(dim=-1)
        whole = finite.all(dim=1)
        if bool(whole.all()):
            accumulator.add(hidden_states)
        elif nonfinite == "error":
            _raise_non_finite(finite, rows[batch], encoder.kept(windows.n_tokens[rows[batch]]))
        elif bool(whole.any()):
            accumulator.add(hidden_states[whole])
        added += int(whole.sum())
    if not added:
        raise NonFiniteError(
            f"each token of {len(rows)} windows has NaN or infinity in a hidden state: check the "
            "snapshot, or extract with precision 32"
        )
    return accumulator.result()


def _raise_non_finite(
    finite: Tensor, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.integer]
) -> None:
    """Name the first token and layer that is not finite, (tokens, layers)."""
    token, layer = (int(i) for i in torch.nonzero(~finite)[0])
    starts = np.cumsum(lengths) - lengths
    window = int(np.searchsorted(starts, token, side="right")) - 1
    raise NonFiniteError(
        f"window {rows[window]} of the data, token {token - starts[window]}, layer {layer} of the "
        "kept ones: the hidden state holds NaN or infinity; check the snapshot, extract with "
        "precision 32, or replace and count them with --nonfinite record"
    )
