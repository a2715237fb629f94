"""The encoder's forward pass over packed windows, without any padding.

Windows of a batch lie one after another on one token axis. All of BERT but its attention looks at
each token alone; the attention is computed window by window. So no arithmetic goes into padding,
windows need no sorting by length, and hidden states come out the way they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertModel

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.calibration import ChannelStatsAccumulator
from bertvision.featurestore.encoding import ChannelStats
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.windows import Windows

CALIBRATION_WINDOWS = 64
"""Windows that channel statistics are taken from, evenly spread over the split. Measured on SQuAD
with all-MiniLM-L6-v2, fine-tuned for an epoch: from 4, 16, 64, 256 and 512 windows the relative
error of int8 is 6.36, 6.27, 6.22, 6.22 and 6.22e-3, that of int4 9.15, 9.02, 8.97, 8.97 and
8.97e-2. 64 windows (11,000 tokens) fix a channel's deviation to 1 % (8 % in the worst channel)."""
PACKED_ATTENTION = "sdpa-packed"
"""Name of the attention below in transformers' registry, and in the provenance of a split."""
_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a batch: on a CPU what its caches like best (measured at 400 to 4,096), on a GPU so
many that launching kernels takes no longer than running them."""


class Packing(NamedTuple):
    """Where windows lie on the token axis of a batch, and in a padded frame (batch × seq).

    Attributes:
        lengths: tokens of each window.
        place: (tokens,) int64 of each token in the frame; None on a CPU, which needs no frame.
        mask: (batch, 1, 1, seq) true for real tokens; None likewise.
    """

    lengths: list[int]
    place: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], where: torch.device) -> Packing:
        """The packing of windows of these lengths, for a device."""
        if where.type == "cpu":
            return cls(lengths)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        place = mask.flatten().nonzero().squeeze(1)
        return cls(lengths, place.to(where), mask[:, None, None].to(where))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each window to itself, as transformers calls it.

    A CPU computes window after window; on a GPU that would be too many small kernels, so windows
    are padded to the longest, for this alone: attention is a small part of BERT's arithmetic.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, channels).
        key: likewise.
        value: likewise.
        attention_mask: none is needed.
        packing: which tokens are a window.
        scaling: of the scores.

    Returns:
        (1, tokens, heads, channels), and no weights.
    """
    if packing.place is None or packing.mask is None:
        windows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True)
        done = [
            F.scaled_dot_product_attention(q, k, v, scale=scaling)  # (1, heads, seq, channels)
            for q, k, v in windows
        ]
        return torch.cat(done, dim=2).transpose(1, 2), None
    place, mask = packing.place, packing.mask
    batch, seq = len(mask), mask.shape[-1]

    def framed(x: Tensor) -> Tensor:
        tokens = x.squeeze(0).transpose(0, 1)
        frame = x.new_zeros(batch * seq, *tokens.shape[1:]).index_copy(0, place, tokens)
        return frame.view(batch, seq, *tokens.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        framed(query), framed(key), framed(value), attn_mask=mask, scale=scaling
    )
    return out.transpose(1, 2).flatten(0, 1)[place].unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *args, **kwargs: None)


class Encoder:
    """A snapshot's encoder on this machine's device: windows in, packed hidden states out.

    Args:
        model: belongs to the encoder from now on: moved, cast, and cut after the last kept layer.
        layers: indices of the hidden states to give out, ascending; 0 is the embedding output.
        precision: of the forward pass.

    Attributes:
        device: where it computes.
        model: what it computes with.
    """

    def __init__(self, model: BertModel, layers: Sequence[int], precision: Precision) -> None:
        self.device = device()
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.model.set_attn_implementation(PACKED_ATTENTION)
        self.model.encoder.layer = self.model.encoder.layer[: max(layers)]
        if precision == "bf16":
            # what autocast does to these weights in every forward pass: the same bits, but once
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)
        sources = [self.model.embeddings, *self.model.encoder.layer]
        self._sources = [sources[layer] for layer in layers]
        self._hidden = int(model.config.hidden_size)
        self._precision = precision
        self._memory = torch.empty(0, device=self.device)

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

    def forward(self, windows: Windows, rows: npt.NDArray[np.int64]) -> None:
        """The forward pass of some windows, and nothing else (see `__call__`)."""
        first, lengths = windows.first_token[rows], windows.n_tokens[rows]
        within = np.concatenate([np.arange(n) for n in lengths.tolist()])
        token = np.repeat(first, lengths) + within

        def row(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).unsqueeze(0).to(self.device)

        with torch.inference_mode(), autocast(self._precision, self.device):
            self.model(
                input_ids=row(windows.input_ids[token]),
                token_type_ids=row(windows.token_type_ids[token]),
                position_ids=row(within),
                packing=Packing.of(lengths.tolist(), self.device),
            )

    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> Tensor:
        """Hidden states of some windows, one window after another.

        Args:
            windows: of a split.
            rows: (batch,) which of them.

        Returns:
            (tokens, layers, hidden) float32 on the device, in memory that the next call reuses
            (fresh memory takes several times as long to fill); each layer is contiguous.

        Raises:
            InputError: the model does not work as the known versions of transformers do.
        """
        shape = (len(self._sources), int(windows.n_tokens[rows].sum()), self._hidden)
        count = shape[0] * shape[1] * shape[2]
        if self._memory.numel() < count:
            self._memory = torch.empty(count, device=self.device)
        packed = self._memory[:count].view(shape)
        free = iter(packed)

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            next(free).copy_(output.squeeze(0))

        hooks = [source.register_forward_hook(keep) for source in self._sources]
        try:
            self.forward(windows, rows)
        finally:
            for hook in hooks:
                hook.remove()
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
    count = min(CALIBRATION_WINDOWS, len(windows))
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
            _raise_non_finite(finite, rows[batch], windows.n_tokens[rows[batch]])
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
