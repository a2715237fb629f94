"""TokenStream: batches of token vectors, shuffled over tokens, with exact resume.

Layers of whole shards are read by a few threads into a ring of bounded size, and the rows of a
batch are gathered out of it when it is asked for. What comes when is arithmetic (see `order`),
whatever the threads do; so the position of a stream is the number of its batches.

The mean norm of stored vectors, which trainers of sparse autoencoders scale by.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, counted, truth_value, whole_number
from bertvision.featurestore.lazy import decoded_layers
from bertvision.featurestore.readahead import EpochSetter, Iteration, default_readers, shard_bytes
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.stored_split import is_one_layer
from bertvision.featurestore.tokens.feed import TokenBatch, TokenFeed
from bertvision.featurestore.tokens.order import (
    KeptTokens,
    TokenCuts,
    TokenOrder,
    kept_tokens,
    rank_bounds,
    token_order,
)
from bertvision.featurestore.tokens.transform import (
    TokenTransform,
    TransformName,
    sample_shards,
    short_tokens,
)


def mean_norms(
    split: SplitReader,
    positions: Sequence[int],
    selection: KeptTokens,
    center: Tensor | None = None,
) -> Tensor:
    """The mean Euclidean norm of the kept tokens of at most 32 shards, evenly spread.

    They are the shards of the split, whatever the order, rank or epoch of a stream, so that every
    process scales alike. The channel statistics of a split will not do: they may be widened for
    tokens that stand out, and the mean of norms is not the root of the mean square.

    Args:
        split: Split to read.
        positions: Places on the stored layer axis.
        selection: the tokens that count.
        center: (layers, hidden) vectors that are taken off before.

    Returns:
        (layers,) float64.

    Raises:
        CorruptStoreError: what is stored is damaged.
        InputError: the mean norm of a layer is 0, or not finite.
    """
    chosen, total = sample_shards(selection), np.zeros(len(positions))
    origins = np.zeros(len(positions), np.float32) if center is None else center.numpy()
    for shard in chosen:
        rows = selection.of_shard(shard)
        for i, states in enumerate(decoded_layers(split, shard, positions, any_order=True)):
            own = np.linalg.norm(states[rows] - origins[i], axis=1)
            total[i] += own.sum(dtype=np.float64)
    norms = total / selection.counts[chosen].sum()
    for position, norm in zip(positions, norms.tolist(), strict=True):
        if not 0 < norm < math.inf:
            raise InputError(
                f"the vectors of layer {split.record.layers[position]} of {split.name} have a mean "
                f"norm of {norm}, which no factor scales: leave the layer out, or scaled"
            )
    return torch.from_numpy(norms)


BUFFER_BYTES = 256 << 20
"""Default bound of the shuffle buffer: bytes of the codes of the shards whose tokens are mixed."""


class TokenStream:
    """Iterates over batches of token vectors: one epoch after another, or without end.

    An iteration that was left in the middle of an epoch is resumed by the next one. There is
    one at a time: the next one ends those before it, and so does `load_state_dict`; whoever draws
    from them nonetheless is told by an InputError.

    Args:
        split: a complete split.
        layers: the index of a hidden state, or its name where it has one, for vectors (n, hidden);
            several, for (n, layers, hidden); or None: all of them.
        batch_size: tokens per batch and rank.
        shuffle: tokens in a seeded order, mixed over ``buffer`` shards; or in stored order.
        seed: Seed of the order.
        buffer: shards whose tokens are mixed; by default as many as fit in `BUFFER_BYTES`, at least
            2 and at most 256. They are in memory, with a few that are read ahead.
        endless: epochs follow each other without a seam, and every batch is full. Otherwise each
            iteration is an epoch, the next iteration the next epoch, and its last batch smaller.
        rank: Rank of this process among ``world_size``.
        world_size: Number of processes that share each epoch.
        mix: streams that differ in this alone read the same shards at the same time, and mix their
            tokens in ways of their own. So processes that go about in step on one machine have each
            shard read from the disk once, and each its own order.
        without: vocabulary indices of tokens to leave out, such as a tokenizer's
            ``all_special_ids``.
        keep: a per-token array of the split by its name, or such an array: tokens where it is 0 or
            False are left out.
        examples: (n,) positions of the examples whose tokens are streamed, such as a part of
            `ActivationSplit.hold_out`; by default of all.
        max_norm: Largest norm of a token's vector in each of the layers: a number, or such as
            ``"10x"``, times the median norm of the layer. Longer tokens are left out, and counted
            in ``too_long``; all shards are read once for it.
        transform: ``center`` takes the mean vector of a layer off, ``whiten`` also gives its
            vectors the identity as their covariance; see `TokenTransform`. Or a `TokenTransform`,
            such as that of the stream that a model was trained on, for held-out tokens.
        scaled: vectors are multiplied by `scale_factors`.
        logits: Whether batches have the log-probabilities of next tokens.
        readers: threads that read, by default 2, or 1 where a shard's layers are small and near; 0
            reads in the caller's thread, without read-ahead. Of a remote store more of them wait
            for the server.

    Attributes:
        too_long: Tokens that ``max_norm`` leaves out.
        batches: Number of batches given out since the beginning of the first epoch.
        wait_seconds: Seconds that the consumer has waited for batches, in all.

    Raises:
        IncompleteSplitError: shards of the split are not committed yet.
        UnknownNameError: the split has no such per-token array.
        InputError: an argument is out of range, a layer is not stored, or no token is left.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> stream = split.tokens(-1, batch_size=1024, seed=1)
        >>> [tuple(batch.vectors.shape) for batch in stream]
        [(1024, 32), (1024, 32), (1024, 32), (1024, 32), (569, 32)]
        >>> stream.state_dict()["batches"]  # the next iteration is the next epoch
        5
    """

    def __init__(
        self,
        split: SplitReader,
        layers: int | str | Sequence[int | str] | None = None,
        *,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        buffer: int | None = None,
        endless: bool = False,
        rank: int = 0,
        world_size: int = 1,
        mix: int = 0,
        without: Collection[int] = (),
        keep: str | npt.ArrayLike | None = None,
        examples: npt.ArrayLike | None = None,
        max_norm: float | str | None = None,
        transform: TransformName | TokenTransform | None = None,
        scaled: bool = False,
        logits: bool = False,
        readers: int | None = None,
    ) -> None:
        self.split = split.require_complete(any_order=True)
        self._side_by_side = not is_one_layer(layers)
        self._positions = split.layer_positions(layers)
        if buffer is None:
            buffer = default_buffer(split, len(self._positions))
        batch_size = whole_number("batch_size", batch_size, 1)
        seed, buffer = whole_number("seed", seed, 0), whole_number("buffer", buffer, 1)
        self._rank = whole_number("rank", rank, 0)
        self._world = world_size = whole_number("world_size", world_size, 1)
        if self._rank >= world_size:
            raise InputError(f"rank {rank} is outside the world of {world_size}")
        self._mix = whole_number("mix", mix, 0)
        if readers is None:
            readers = default_readers(split, shard_bytes(split, len(self._positions)))
        self._readers = whole_number("readers", readers, 0)
        self._kept = kept_tokens(split, without, keep, examples)
        self.too_long = 0
        if max_norm is not None:
            all_lengths = int(self._kept.counts.sum())
            self._kept = short_tokens(split, self._positions, self._kept, max_norm)
            self.too_long = all_lengths - int(self._kept.counts.sum())
        shuffle, endless = truth_value("shuffle", shuffle), truth_value("endless", endless)
        self._seed, self._buffer = seed if shuffle else None, buffer if shuffle else 1
        self._scaled = truth_value("scaled", scaled)
        self._transform: TokenTransform | None = None  # but for the scale
        self._own_scale: Tensor | None = None
        if isinstance(transform, TokenTransform):
            transform.require(len(self._positions), split.record.hidden_size)
            self._transform = replace(transform, scale=None)
            self._own_scale = transform.scale
        elif transform is not None:
            self._transform = TokenTransform.of(split, self._positions, self._kept, transform)
        if self._scaled and self._own_scale is not None:
            raise InputError(
                "scaled=True with a transform that has a scale: vectors are multiplied by that; "
                "leave scaled out"
            )
        if self._scaled and self._transform is not None and self._transform.matrix is not None:
            raise InputError(
                "scaled=True with a transform that whitens: whitened vectors have a mean square of "
                "1 in every channel already; leave scaled out"
            )
        self._logits = truth_value("logits", logits)
        if self._logits:
            split.require_logits()
        tokens = int(self._kept.counts.sum())
        if batch_size == 1 and tokens % world_size and not endless:
            raise InputError(
                f"with batch_size 1 some of {world_size} ranks would have one batch more than "
                f"others of {tokens:,} tokens, and wait for them for ever: give a batch_size of 2 "
                "or more, or endless=True"
            )
        low, high = rank_bounds(tokens, self._rank, world_size)
        self._cuts = TokenCuts(high - low, -(-tokens // world_size), batch_size, endless)
        self.batches = 0
        self.wait_seconds = 0.0
        self._iteration: object | None = None  # the one that counts ``batches``
        self._loaded = False

    def __repr__(self) -> str:
        mixed = min(self._buffer, int(np.count_nonzero(self._kept.counts)))
        order = f"mixed over {counted(mixed, 'shard')}, seed {self._seed}"
        return (
            f"<TokenStream {self.split.name}: {self._kept.counts.sum():,} tokens, "
            f"{counted(self._cuts.batch_size, 'token')} a batch, next is batch {self.batches}>\n"
            f"  {'in stored order' if self._seed is None else order}"
        )

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse to be indexed, as a ``DataLoader`` of torch does.

        Raises:
            InputError: says what to iterate over.
        """
        raise InputError(
            "a TokenStream gives whole batches in an order of its own: iterate over it, without a "
            "DataLoader (it reads ahead by itself); a DataLoader takes single examples, of "
            "split.to_dataset()"
        )

    def __len__(self) -> int:
        """Batches of an epoch of this rank.

        Raises:
            TypeError: the stream is endless.
        """
        if self._cuts.endless:
            raise TypeError("a stream without end has no length")
        return len(self._cuts)

    @cached_property
    def transform(self) -> TokenTransform | None:
        """The transform of the vectors, with their scale, or None; its ``inverse`` undoes both."""
        if self._transform is not None:
            return replace(self._transform, scale=self._factors)
        if self._factors is None:
            return None
        return TokenTransform(
            torch.zeros(len(self._positions), self.split.record.hidden_size), scale=self._factors
        )

    @cached_property
    def _factors(self) -> Tensor | None:
        """(layers,) float32 that vectors are multiplied by."""
        return self.scale_factors if self._scaled or self._own_scale is not None else None

    @cached_property
    def scale_factors(self) -> Tensor:
        """(layers,) float32 by which vectors have the mean norm sqrt(hidden) (see `mean_norms`).

        They are those of the given transform, where it has a scale.

        Raises:
            InputError: the mean norm of a layer is 0, or not finite.
        """
        if self._own_scale is not None:
            return self._own_scale
        center = None if self._transform is None else self._transform.mean
        norms = mean_norms(self.split, self._positions, self._kept, center)
        return norms.reciprocal().mul(math.sqrt(self.split.record.hidden_size)).float()

    def state_dict(self) -> dict[str, Any]:
        """The position, counted when a batch is given out: resume goes on after it.

        Returns:
            ``batches``, and what the order depends on; of all ranks the same.
        """
        return {"batches": self.batches} | self._identity

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a position, in the middle of an epoch or not.

        Args:
            state: State of `state_dict`, of any rank.

        Raises:
            InputError: the position is in another order, or is none.
        """
        if not isinstance(state, Mapping) or "batches" not in state:
            raise InputError(f"{state!r} is no position: give what state_dict of a stream returned")
        batches = whole_number("batches of the position", state["batches"], 0)
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise InputError(
                    f"the position was saved of another stream: its {name} is {state.get(name)!r}, "
                    f"here it is {value!r}; give the same split and arguments, or begin anew"
                )
        self.batches, self._loaded = batches, True
        self._iteration = None

    @property
    def _identity(self) -> dict[str, Any]:
        record = self.split.record  # of shuffled tokens the plan does not say the order
        return {
            "split": self.split.name,
            "plan": record.identity if record.is_shuffled else self.split.plan.digest,
            "batch_size": self._cuts.batch_size,
            "seed": self._seed,
            "buffer": self._buffer,
            "endless": self._cuts.endless,
            "world_size": self._world,
            "mix": self._mix,
            "tokens": self._kept.digest,
        }

    def vectors(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Iterator[Tensor]:
        """The decoded vectors of the batches alone, as trainers take them.

        Whoever takes them may change them in place, and keep them.

        Args:
            device: Device on which codes are decoded.
            dtype: Type of the vectors.

        Yields:
            (n, hidden), or (n, layers, hidden) side by side.

        Raises:
            InputError: the dtype is none of torch's floating-point types.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"dtype is {dtype!r}: give a floating-point type of torch, such as torch.float32"
            )
        for batch in self:
            # filling fresh memory takes three times as long as decoding
            on_cpu = torch.device(device).type == "cpu"
            out = self._feed.vectors_memory(batch.shape, dtype) if on_cpu else None
            yield batch.to(device).decode(dtype, out)
            del batch, out

    def order(self, epoch: int) -> TokenOrder:
        """The order of this rank's tokens in an epoch."""
        return token_order(
            self._kept.counts,
            epoch=epoch,
            seed=self._seed,
            buffer=self._buffer,
            rank=self._rank,
            world_size=self._world,
            mix=self._mix,
        )

    @cached_property
    def _feed(self) -> TokenFeed:
        return TokenFeed(
            self.split,
            self._positions,
            self._side_by_side,
            self._kept,
            self.order,
            self._cuts,
            self._factors,
            self._transform,
            self._readers,
            self._logits,
        )

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of an epoch; a loaded position inside of it stays.

        Lightning calls it at the beginning of each of its epochs. A stream without end goes on
        where it is, whatever a trainer calls an epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            InputError: a trainer resumes with a stream without end whose position was not loaded.
        """
        if not self._cuts.endless:
            if not self._loaded or self._cuts.place(self.batches)[0] != epoch:
                self.batches = epoch * len(self._cuts)
        elif epoch and not self.batches:
            raise InputError(
                f"the trainer is in epoch {epoch}, and this stream of {self.split.name} without "
                "end at its beginning: Lightning loads positions between epochs only where it was "
                "given max_steps; give that, or load the position with load_state_dict"
            )

    @property
    def batch_sampler(self) -> EpochSetter:
        """The place where Lightning looks for `set_epoch`."""
        return EpochSetter(self)

    def __iter__(self) -> Iteration[TokenBatch]:
        return Iteration(self.split.name, self._iterate())

    def _iterate(self) -> Generator[TokenBatch, None, None]:
        mine = self._iteration = object()
        self._loaded = False
        epoch, _ = self._cuts.place(self.batches)
        batches = self._batches(self.batches)
        try:
            while True:
                if self._iteration is not mine:
                    raise InputError(
                        f"this iteration of a stream of {self.split.name} has ended, because "
                        "another one was begun or a position loaded: a stream has one at a time; "
                        "make a second stream with split.tokens"
                    )
                started = time.perf_counter()
                batch = next(batches, None)
                self.wait_seconds += time.perf_counter() - started
                if batch is None:
                    break
                self.batches += 1
                yield batch
                del batch  # or its memory could not be used for the batch after the next
            self.batches = (epoch + 1) * len(self._cuts)
        finally:
            batches.close()

    def _batches(
        self, first: int, ending: Callable[[], bool] = sys.is_finalizing
    ) -> Generator[TokenBatch, None, None]:
        """Batches from ``first`` on, of shards that threads read; their errors are raised here."""
        ring = self._feed.ring(first)
        try:
            yield from self._feed.batches(ring, first)
        finally:
            # where an iterator is left open at the end of the interpreter, the threads have ended
            # and modules are gone, this one too
            if not ending():
                ring.close()


def default_buffer(split: SplitReader, layers: int) -> int:
    """Shards in the shuffle buffer of so many layers: what fits in `BUFFER_BYTES`, 2 to 256."""
    return max(2, min(256, BUFFER_BYTES // shard_bytes(split, layers)))
