"""The shard that is being filled: encoded examples in memory, one after another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.calibration import POOLED, Calibration, Calibrator
from bertvision.featurestore.format.encoding import ChannelStats, encode
from bertvision.featurestore.format.layout import Encoding, get_encoding
from bertvision.featurestore.format.names import NonFinite
from bertvision.featurestore.format.records import Layout
from bertvision.featurestore.storage.storage import SMALL_BYTES
from bertvision.featurestore.writing.columns import Rows
from bertvision.featurestore.writing.shards import ShardContent

_BLOCK_TOKENS = 1024


class Example(NamedTuple):
    """What is kept of an example until its shard is written.

    Attributes:
        key: its name.
        hidden_states: (seq, layers, hidden) as it was given.
        rows: arrays beside them.
    """

    key: str
    hidden_states: Tensor
    rows: Rows


class ShardBuffer:
    """Memory of one shard, used for one after another.

    As long as the channel statistics of a quantised encoding are not known, hidden states wait as
    they were given: they are the sample that `calibrate` takes them from.

    Args:
        layout: of the split.
        nonfinite: what to do about NaN and infinity (see `encode`).

    Attributes:
        keys: of the examples it holds.
        lengths: tokens of each.
        tokens: of all.
        rows: arrays beside each.
        stats: channel statistics, once they are known.
    """

    def __init__(self, layout: Layout, nonfinite: NonFinite) -> None:
        encoding = get_encoding(layout.encoding)
        layers, tokens = len(layout.layers), layout.shard_tokens
        width = encoding.codes_size(layout.hidden_size)
        self.keys: list[str] = []
        self.lengths: list[int] = []
        self.rows: list[Rows] = []
        self.tokens = 0
        self.stats: ChannelStats | None = None
        self._layout, self._encoding, self._nonfinite = layout, encoding, nonfinite
        self._codes = torch.empty((layers, tokens, width), dtype=encoding.torch_dtype)
        self._scale: Tensor | None = None
        if encoding.quantised:
            shape = (tokens, layers, *encoding.scale_shape(layout.hidden_size))
            self._scale = torch.empty(shape, dtype=encoding.scale_torch_dtype)
        self._waiting: list[Tensor] = []
        self._replaced = self._said = 0

    @property
    def waits(self) -> bool:
        """Whether channel statistics are needed before it can be written."""
        return self._encoding.quantised and self.stats is None

    def has_room(self, key: str, tokens: int) -> bool:
        """Whether an example of so many tokens fits, and what its shard's record says of it."""
        fits = self.tokens + tokens <= self._layout.shard_tokens
        return fits and self._said + self._says(key) <= SMALL_BYTES // 2

    def _says(self, key: str) -> int:
        """Bytes that an example takes of its shard's record, at most: key, length, checksums."""
        return 2 * len(key.encode()) + 32 + 11 * len(self._layout.layers)

    def put(self, example: Example) -> None:
        """Take an example, for which there is room.

        Raises:
            NonFiniteError: names it.
        """
        if self.waits:
            if self._nonfinite == "error" and not bool(example.hidden_states.isfinite().all()):
                raise NonFiniteError(
                    f"example {example.key!r}: the hidden states hold NaN or infinity: look at "
                    'the model, or give nonfinite="record" to have them replaced and counted'
                )
            self._waiting.append(example.hidden_states.detach().cpu().clone())
        else:
            self._encode(example.key, example.hidden_states, self.tokens)
        self.keys.append(example.key)
        self.lengths.append(len(example.hidden_states))
        self.tokens += len(example.hidden_states)
        self._said += self._says(example.key)
        self.rows.append(example.rows)

    def calibrate(self) -> Calibration:
        """Channel statistics of the examples that wait, and what the encoding loses of them.

        Raises:
            NonFiniteError: all of them hold NaN or infinity.
        """
        return calibration(self._waiting, self._encoding)

    def use(self, stats: ChannelStats) -> None:
        """Encode with these statistics from now on, and what waits first.

        Raises:
            NonFiniteError: an example does not fit the encoding.
        """
        self.stats, first = stats, 0
        for key, states in zip(self.keys, self._waiting, strict=False):
            self._encode(key, states, first)
            first += len(states)
        self._waiting = []

    def content(self, shard: int) -> ShardContent:
        """What it holds, as the content of a shard."""
        codes = self._codes[:, : self.tokens].transpose(0, 1)
        scale = None if self._scale is None else self._scale[: self.tokens]
        return ShardContent(self._layout, shard, self.lengths, codes, scale, self._replaced)

    def clear(self) -> None:
        """Begin anew; the statistics stay."""
        self.keys, self.lengths, self.rows = [], [], []
        self._waiting, self.tokens, self._said, self._replaced = [], 0, 0, 0

    def _encode(self, key: str, hidden_states: Tensor, first: int) -> None:
        stats = self.stats and ChannelStats(*(s.to(hidden_states.device) for s in self.stats))
        try:
            encoded = encode(
                hidden_states.detach(), self._encoding, stats, nonfinite=self._nonfinite
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"example {key!r}: {error}") from None
        tokens = slice(first, first + len(hidden_states))
        self._codes[:, tokens].copy_(encoded.codes.transpose(0, 1))
        if self._scale is not None and encoded.scale is not None:
            self._scale[tokens].copy_(encoded.scale)
        self._replaced += encoded.nonfinite


def calibration(examples: list[Tensor], encoding: Encoding) -> Calibration:
    """Calibrate an encoding on examples, each (seq, layers, hidden).

    The first token of each is a kind of its own, which some encoders load with massive activations;
    where all examples are of one token, they are the vectors of a pooling.

    Raises:
        InputError: there is no example.
        NonFiniteError: none is without NaN and infinity.
    """
    if not examples:
        raise InputError("there are no examples to take channel statistics from")
    lengths = [len(states) for states in examples]
    kinds = np.full(sum(lengths), "ordinary")
    kinds[np.cumsum([0, *lengths[:-1]])] = "first"
    if max(lengths) == 1:
        kinds[:] = POOLED
    calibrator = Calibrator(encoding, kinds)
    for block in torch.cat(examples).split(_BLOCK_TOKENS):
        calibrator.add(block.float(), block.isfinite().flatten(1).all(dim=1))
    return calibrator.result()
