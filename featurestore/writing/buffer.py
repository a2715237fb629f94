"""The shard that is being filled, and the bytes of its files and its record.

Both writers make shards of a `ShardContent`: extraction's, which fills the shards of a plan, and
the one that plans its shards as they fill, from encoded examples in memory.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.calibration import POOLED, Calibration, Calibrator
from bertvision.featurestore.format.encoding import ChannelStats, Encoded, encode, lossy_layer
from bertvision.featurestore.format.keeping import KEPT_POSITION
from bertvision.featurestore.format.layout import Encoding, get_encoding, transform_room
from bertvision.featurestore.format.logits import OUTPUTS, TopLogits
from bertvision.featurestore.format.names import NonFinite
from bertvision.featurestore.format.records import Layout, ShardFile, ShardRecord
from bertvision.featurestore.format.shard import example_checksums
from bertvision.featurestore.format.shardfile import compress
from bertvision.featurestore.format.transform import Transform
from bertvision.featurestore.storage.storage import SMALL_BYTES
from bertvision.featurestore.writing.columns import Rows
from bertvision.featurestore.writing.growing import Column


class ShardContent:
    """Content of a shard.

    Args:
        layout: Layout of the split.
        shard: its number.
        lengths: (examples,) tokens of each.
        codes: (tokens, layers, width) from `encode`, on the CPU; fastest where each layer is
            contiguous, and without a copy where zeros follow until there are
            ``layout.shard_tokens``.
        scale: (tokens, layers, …) or None.
        nonfinite: values that were NaN or infinite and were replaced.
        transform: Coder of its layers, where the encoding is the transform.
        logits: Log-probabilities of its tokens, arrays of NumPy, where the split has some.

    Raises:
        InputError: the shapes are not those of the split.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        lengths: Sequence[int],
        codes: Tensor,
        scale: Tensor | None,
        nonfinite: int = 0,
        transform: Transform | None = None,
        logits: TopLogits | None = None,
    ) -> None:
        encoding = get_encoding(layout.encoding)
        rows = (sum(lengths), len(layout.layers))
        wanted: dict[str, tuple[int, ...]] = {
            "codes": (*rows, encoding.codes_size(layout.hidden_size))
        }
        if encoding.quantised:
            wanted["scale"] = (*rows, *encoding.scale_shape(layout.hidden_size))
        # a fill that is not zero is of another number of tokens, and refused below
        fill = codes[rows[0] :].view(torch.uint8).numpy()  # torch's `any` takes ten times as long
        filled = len(codes) == layout.shard_tokens and not fill.any()
        own = codes[: rows[0]] if filled else codes
        given = {"codes": own} | ({} if scale is None else {"scale": scale})
        if layout.top is not None:
            wanted |= {name: (rows[0], *shape) for name, shape in layout.top.shapes.items()}
        if logits is not None:
            given |= logits._asdict()
        shapes = {name: tuple(values.shape) for name, values in given.items()}
        if shapes != wanted:
            raise InputError(f"shard {shard} of {layout.encoding} takes {wanted}, not {shapes}")
        self._layout, self._shard, self._lengths = layout, shard, list(lengths)
        self._codes = codes.view(torch.uint16) if codes.dtype == torch.bfloat16 else codes
        self._scale, self._scale_dtype = scale, encoding.scale_dtype
        self._nonfinite, self._transform, self._logits = nonfinite, transform, logits
        self._checksums: list[list[int]] = []

    def files(self) -> dict[str, Iterator[npt.NDArray[Any] | bytes]]:
        """The chunks of each file by its array's name, each to be used before the next."""
        layers = self._layers() if self._transform is None else self._coded(self._transform)
        arrays: dict[str, Iterator[npt.NDArray[Any] | bytes]] = {"hidden_states": layers}
        if self._scale is not None:
            whole = np.zeros((self._layout.shard_tokens, *self._scale.shape[1:]), self._scale_dtype)
            whole[: len(self._scale)] = self._scale.numpy()
            arrays["scale"] = iter([whole])
        for name, values in self._logits._asdict().items() if self._logits else ():
            whole = np.zeros((self._layout.shard_tokens, *values.shape[1:]), OUTPUTS[name])
            whole[: len(values)] = values
            arrays[name] = iter([whole])
        return arrays

    def record(self, split: str, files: Mapping[str, ShardFile]) -> ShardRecord:
        """The shard's record, once its files are written.

        Args:
            split: identity of the split that it belongs to.
            files: Files that were written.
        """
        return ShardRecord(
            shard=self._shard,
            split_sha256=split,
            examples=len(self._lengths),
            tokens=sum(self._lengths),
            nonfinite=self._nonfinite,
            files=dict(files),
            checksums=base64.b64encode(np.array(self._checksums, "<u8").tobytes()).decode(),
        )

    def _coded(self, transform: Transform) -> Iterator[bytes]:
        """The chunks of a shard whose layers are coded together; notes the examples' checksums."""
        room = transform_room(self._layout.shard_tokens, self._layout.hidden_size)
        states = self._codes[: sum(self._lengths)]  # without fill
        self._checksums = []
        for layer, codes in enumerate(transform.encode_layers(states, self._lengths)):
            lengths = np.array([code.nbytes for code in codes], "<u4")
            used = lengths.nbytes + int(lengths.sum())
            if used > room:
                raise InputError(
                    f"shard {self._shard}, layer {layer} of those stored: its states take more "
                    f"than 16 bits a value in {self._layout.encoding}; "
                    "choose encoding int8, or a larger error"
                )
            chunk = np.zeros(room, np.uint8)
            parts = [lengths, *(code.astype("<u2", copy=False) for code in codes)]
            chunk[:used] = np.concatenate([part.view(np.uint8) for part in parts])
            self._checksums.append([xxhash.xxh3_64_intdigest(code.data) for code in codes])
            yield bytes(compress(chunk, "zstd"))

    def _layers(self) -> Iterator[npt.NDArray[Any] | bytes]:
        """The chunks of a shard, one per layer with its fill; notes the examples' checksums."""
        codes, self._checksums = self._codes.numpy(), []
        offsets = [0, *np.cumsum(self._lengths).tolist()]
        size = (self._layout.shard_tokens, codes.shape[2])
        room: npt.NDArray[Any] = np.zeros(size, codes.dtype)
        for layer in range(codes.shape[1]):
            chunk = codes[:, layer]
            if len(chunk) < len(room) or not chunk.flags.c_contiguous:
                room[: len(codes)] = chunk
                chunk = room
            self._checksums.append(example_checksums(chunk, offsets))
            yield compress(chunk, self._layout.compression)


log = logging.getLogger(__name__)

_BLOCK_TOKENS = 1024
_MOST_LOST_IN_A_ROW = 16
"""Examples that lose half of themselves before that is refused: one may be small, all may not."""
_LARGEST = 1e8
"""Beside a larger value the sums of channel statistics keep no digits of the others."""


@dataclass
class Losses:
    """Losses of small values in the examples of a writer.

    Attributes:
        said: Whether it was said.
        in_a_row: Examples up to the last one that lost half of themselves.
    """

    said: bool = False
    in_a_row: int = 0


class Example(NamedTuple):
    """An example that is offered to a shard.

    Attributes:
        key: its name.
        hidden_states: (seq, layers, hidden) as it was given.
        rows: arrays beside them.
        columns: the kinds of these arrays.
        logits: Log-probabilities of its tokens, where the split has some.
    """

    key: str
    hidden_states: Tensor
    rows: Rows
    columns: Mapping[str, Column]
    logits: TopLogits | None


class _Stored(NamedTuple):
    """An example of a shard that is not written yet.

    Attributes:
        length: its tokens.
        end: tokens of the shard up to its last one.
        said: bytes of the shard's record up to what is said of it.
        replaced: values that were NaN or infinite and were replaced.
        rows: arrays beside its hidden states.
        columns: the kinds of these arrays.
        logits: Log-probabilities of its tokens, where the split has some.
        waiting: (length, layers, hidden) as long as the channel statistics are not known.
    """

    length: int
    end: int
    said: int
    replaced: int
    rows: Rows
    columns: Mapping[str, Column]
    logits: TopLogits | None
    waiting: Tensor | None


class ShardBuffer:
    """Memory of one shard, used for one after another.

    As long as the channel statistics of a quantised encoding are not known, hidden states wait as
    they were given: they are the sample that `calibrate` takes them from.

    An example is taken in one step, the last of `put`, and dropped with all others in one step, by
    `clear`: whatever interrupts a caller, an example is there as a whole or not at all.

    Args:
        layout: Layout of the split.
        nonfinite: Treatment of NaN and infinity (see `encode`).
        stats: channel statistics, where they are known.
        losses: Losses of small values in the buffers of the same writer.

    Attributes:
        stats: channel statistics, once they are known.
        refused: examples that waited and do not fit the encoding, by key why; they are dropped.
    """

    def __init__(
        self,
        layout: Layout,
        nonfinite: NonFinite,
        stats: ChannelStats | None = None,
        losses: Losses | None = None,
    ) -> None:
        encoding = get_encoding(layout.encoding)
        layers, tokens = len(layout.layers), layout.shard_tokens
        width = encoding.codes_size(layout.hidden_size)
        self.stats = stats
        self.refused: dict[str, str] = {}
        self._losses = Losses() if losses is None else losses
        self._examples: dict[str, _Stored] = {}
        self._committed: object = None
        self._attempt: tuple[object, int] | None = None
        self._layout, self._encoding, self._nonfinite = layout, encoding, nonfinite
        self._codes = torch.empty((layers, tokens, width), dtype=encoding.torch_dtype)
        self._scale: Tensor | None = None
        if encoding.quantised:
            shape = (tokens, layers, *encoding.scale_shape(layout.hidden_size))
            self._scale = torch.empty(shape, dtype=encoding.scale_torch_dtype)

    def __contains__(self, key: str) -> bool:
        return key in self._examples

    @property
    def keys(self) -> list[str]:
        """Keys of the examples it holds."""
        return list(self._examples)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [stored.length for stored in self._examples.values()]

    @property
    def rows(self) -> list[Rows]:
        """Arrays beside each."""
        return [stored.rows for stored in self._examples.values()]

    @property
    def columns(self) -> Mapping[str, Column] | None:
        """The kinds of arrays that each of them has; None where there is none."""
        return next((stored.columns for stored in self._examples.values()), None)

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return self._examples[next(reversed(self._examples))].end if self._examples else 0

    @property
    def batch(self) -> object:
        """Batch number, which `clear` increases."""
        return self._examples

    @property
    def is_committed(self) -> bool:
        """Whether the shard of the examples that it holds was committed."""
        return self._committed is self._examples

    def mark_committed(self) -> None:
        """Note that the shard of the examples that it holds was committed."""
        self._committed = self._examples

    @property
    def attempted(self) -> int | None:
        """The shard under whose number the examples that it holds may have been committed."""
        return self._attempt[1] if self._attempt and self._attempt[0] is self._examples else None

    def attempt(self, shard: int) -> None:
        """Note that the examples that it holds are about to be committed as a shard."""
        self._attempt = self._examples, shard

    @property
    def waits(self) -> bool:
        """Whether channel statistics are needed before it can be written."""
        return self._encoding.quantised and self.stats is None

    def has_room(self, key: str, tokens: int) -> bool:
        """Whether an example of so many tokens fits, and what its shard's record says of it."""
        fits = self.tokens + tokens <= self._layout.shard_tokens
        return fits and self._said(key) <= SMALL_BYTES // 2

    def _said(self, key: str) -> int:
        """Bytes of the shard's record with one more example, at most: key, length, checksums."""
        before = self._examples[next(reversed(self._examples))].said if self._examples else 0
        return before + 2 * len(key.encode()) + 32 + 11 * len(self._layout.layers)

    def put(self, example: Example) -> None:
        """Take an example, for which there is room.

        Raises:
            NonFiniteError: names it.
        """
        waiting, replaced, first = None, 0, self.tokens
        if self.waits:
            if self._nonfinite == "error" and not bool(_usable(example.hidden_states).all()):
                raise NonFiniteError(
                    f"example {example.key!r}: the hidden states hold NaN, infinity or values "
                    f"above {_LARGEST:.0e}: look at the model, choose encoding bfloat16 or "
                    'float32, or give nonfinite="record" to have them replaced and counted'
                )
            waiting = example.hidden_states.detach().cpu().clone()
        else:
            replaced = self._encode(example.key, example.hidden_states, first, self.stats)
        length = len(example.hidden_states)
        self._examples[example.key] = _Stored(
            length=length,
            end=first + length,
            said=self._said(example.key),
            replaced=replaced,
            rows=example.rows,
            columns=example.columns,
            logits=example.logits,
            waiting=waiting,
        )

    def take_back(self, key: str) -> bool:
        """Drop the example that came last, if it has this key; whether it had."""
        if key not in self._examples or next(reversed(self._examples)) != key:
            return False
        del self._examples[key]
        return True

    def calibrate(self) -> Calibration:
        """Channel statistics of the examples that wait, and what the encoding loses of them.

        Raises:
            NonFiniteError: all of them hold NaN or infinity.
        """
        waiting = [stored for stored in self._examples.values() if stored.waiting is not None]
        begins = [KEPT_POSITION not in x.rows or not x.rows[KEPT_POSITION][0] for x in waiting]
        states = [stored.waiting for stored in waiting if stored.waiting is not None]
        return calibration(states, self._encoding, begins)

    def use(self, stats: ChannelStats) -> None:
        """Encode with these statistics from now on, and what waits first.

        An example that does not fit the encoding is dropped alone, and stands in ``refused``.
        """
        encoded: dict[str, _Stored] = {}
        first = 0
        for key, stored in self._examples.items():
            if stored.waiting is None:
                raise RuntimeError("channel statistics were given twice")
            try:
                replaced = self._encode(key, stored.waiting, first, stats)
            except NonFiniteError as error:
                self.refused[key] = str(error)
                continue
            first += stored.length
            encoded[key] = stored._replace(end=first, replaced=replaced, waiting=None)
        # last: before this all wait, and may be tried again
        self._examples, self.stats = encoded, stats

    def content(self, shard: int) -> ShardContent:
        """Content of the buffer as that of a shard."""
        tokens = self.tokens
        self._codes[:, tokens:].zero_()  # the fill of each chunk
        codes = self._codes.transpose(0, 1)
        scale = None if self._scale is None else self._scale[:tokens]
        replaced = sum(stored.replaced for stored in self._examples.values())
        parts = [stored.logits for stored in self._examples.values() if stored.logits is not None]
        logits = TopLogits.joined(parts) if parts else None
        return ShardContent(
            self._layout, shard, self.lengths, codes, scale, replaced, logits=logits
        )

    def clear(self) -> None:
        """Begin anew; the statistics stay."""
        self._examples = {}

    def _encode(
        self, key: str, hidden_states: Tensor, first: int, stats: ChannelStats | None
    ) -> int:
        """Encode an example into its place; returns how many values were replaced."""
        stats = stats and ChannelStats(*(s.to(hidden_states.device) for s in stats))
        tokens = slice(first, first + len(hidden_states))
        room = self._codes[:, tokens].transpose(0, 1)
        out = room if hidden_states.device.type == "cpu" else None
        try:
            encoded = encode(
                hidden_states.detach(), self._encoding, stats, nonfinite=self._nonfinite, out=out
            )
            if not encoded.nonfinite:
                self._check_loss(key, hidden_states.detach(), encoded, stats)
        except NonFiniteError as error:
            raise NonFiniteError(f"example {key!r}: {error}") from None
        if encoded.codes is not room:
            room.copy_(encoded.codes)
        if self._scale is not None and encoded.scale is not None:
            self._scale[tokens].copy_(encoded.scale)
        return encoded.nonfinite

    def _check_loss(
        self, key: str, hidden_states: Tensor, encoded: Encoded, stats: ChannelStats | None
    ) -> None:
        """Say what the encoding loses of small values, once, and refuse that it loses them all.

        Raises:
            NonFiniteError: float16 has no numbers for an example, or many examples in a row lose
                half of themselves, as gradients that shrink while a model trains.
        """
        loss = lossy_layer(hidden_states, encoded, self._encoding, stats)
        half = loss is not None and loss[0] >= 0.5
        losses = self._losses
        losses.in_a_row = losses.in_a_row + 1 if half else 0
        if loss is None:
            return
        many = losses.in_a_row >= _MOST_LOST_IN_A_ROW
        if half and self._nonfinite == "error" and (many or not self._encoding.quantised):
            raise NonFiniteError(loss[1])
        if not losses.said:
            losses.said = True
            log.warning("example %r: %s", key, loss[1])


def calibration(
    examples: list[Tensor], encoding: Encoding, begins: Sequence[bool] | None = None
) -> Calibration:
    """Calibrate an encoding on examples, each (seq, layers, hidden).

    The first token of each is a kind of its own, which some encoders load with massive activations;
    where all examples are of one token, they are the vectors of a pooling.

    Args:
        examples: Hidden states.
        encoding: Encoding to calibrate.
        begins: (examples,) whether the first token given is the first that the model read; None is
            all.

    Raises:
        InputError: there is no example.
        NonFiniteError: no token is without NaN, infinity and values that are too large.
    """
    if not examples:
        raise InputError("there are no examples to take channel statistics from")
    lengths = [len(states) for states in examples]
    kinds = np.full(sum(lengths), "ordinary")
    kinds[np.cumsum([0, *lengths[:-1]])[slice(None) if begins is None else begins]] = "first"
    if max(lengths) == 1:
        kinds[:] = POOLED
    calibrator = Calibrator(encoding, kinds)
    for block in torch.cat(examples).split(_BLOCK_TOKENS):
        calibrator.add(block.float(), _usable(block))
    return calibrator.result()


def _usable(hidden_states: Tensor) -> Tensor:
    """Whether channel statistics may be taken of each token: no value is NaN, or too large."""
    rows = hidden_states.flatten(1)
    if hidden_states.dtype == torch.float16:  # all of its numbers are small enough
        return rows.sum(dim=1, dtype=torch.float32).isfinite()
    least, most = (x.float() for x in rows.aminmax(dim=1))
    return (least >= -_LARGEST) & (most <= _LARGEST)
