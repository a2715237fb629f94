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
_LARGEST = 1e8
"""Beside a larger value the sums of channel statistics keep no digits of the others."""


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
        stats: channel statistics, where they are known.

    Attributes:
        keys: of the examples it holds.
        lengths: tokens of each.
        tokens: of all.
        rows: arrays beside each.
        stats: channel statistics, once they are known.
        refused: examples that waited and do not fit the encoding, by key why; they are dropped.
    """

    def __init__(
        self, layout: Layout, nonfinite: NonFinite, stats: ChannelStats | None = None
    ) -> None:
        encoding = get_encoding(layout.encoding)
        layers, tokens = len(layout.layers), layout.shard_tokens
        width = encoding.codes_size(layout.hidden_size)
        self.keys: list[str] = []
        self.lengths: list[int] = []
        self.rows: list[Rows] = []
        self.tokens = 0
        self.stats = stats
        self.refused: dict[str, str] = {}
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
            if self._nonfinite == "error" and not bool(_usable(example.hidden_states).all()):
                raise NonFiniteError(
                    f"example {example.key!r}: the hidden states hold NaN, infinity or values "
                    f"above {_LARGEST:.0e}: look at the model, choose encoding bfloat16 or "
                    'float32, or give nonfinite="record" to have them replaced and counted'
                )
            self._waiting.append(example.hidden_states.detach().cpu().clone())
        else:
            self._encode(example.key, example.hidden_states, self.tokens, self.stats)
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

        An example that does not fit the encoding is dropped alone, and stands in ``refused``.
        """
        kept, first, self._replaced = [], 0, 0
        for i, (key, states) in enumerate(zip(self.keys, self._waiting, strict=True)):
            try:
                self._encode(key, states, first, stats)
            except NonFiniteError as error:
                self.refused[key] = str(error)
                continue
            kept.append(i)
            first += len(states)
        self.keys = [self.keys[i] for i in kept]
        self.lengths = [self.lengths[i] for i in kept]
        self.rows = [self.rows[i] for i in kept]
        # last: before this it waits as a whole, and may be tried again
        self.tokens, self._waiting, self.stats = first, [], stats

    def content(self, shard: int) -> ShardContent:
        """What it holds, as the content of a shard."""
        self._codes[:, self.tokens :].zero_()  # the fill of each chunk
        codes = self._codes.transpose(0, 1)
        scale = None if self._scale is None else self._scale[: self.tokens]
        return ShardContent(self._layout, shard, self.lengths, codes, scale, self._replaced)

    def clear(self) -> None:
        """Begin anew; the statistics stay."""
        self.keys, self.lengths, self.rows = [], [], []
        self._waiting, self.tokens, self._said, self._replaced = [], 0, 0, 0

    def _encode(
        self, key: str, hidden_states: Tensor, first: int, stats: ChannelStats | None
    ) -> None:
        stats = stats and ChannelStats(*(s.to(hidden_states.device) for s in stats))
        tokens = slice(first, first + len(hidden_states))
        room = self._codes[:, tokens].transpose(0, 1)
        out = room if hidden_states.device.type == "cpu" else None
        try:
            encoded = encode(
                hidden_states.detach(), self._encoding, stats, nonfinite=self._nonfinite, out=out
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"example {key!r}: {error}") from None
        if encoded.codes is not room:
            room.copy_(encoded.codes)
        if self._scale is not None and encoded.scale is not None:
            self._scale[tokens].copy_(encoded.scale)
        self._replaced += encoded.nonfinite


def calibration(examples: list[Tensor], encoding: Encoding) -> Calibration:
    """Calibrate an encoding on examples, each (seq, layers, hidden).

    The first token of each is a kind of its own, which some encoders load with massive activations;
    where all examples are of one token, they are the vectors of a pooling.

    Raises:
        InputError: there is no example.
        NonFiniteError: no token is without NaN, infinity and values that are too large.
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
        calibrator.add(block.float(), _usable(block).flatten(1).all(dim=1))
    return calibrator.result()


def _usable(hidden_states: Tensor) -> Tensor:
    """Whether channel statistics may be taken of each value: it is neither NaN nor too large."""
    return hidden_states.float().abs() <= _LARGEST
