"""TokenMixture: batches out of several splits, each with its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError, whole_number
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.tokens.stream import TokenStream


class TokenMixture:
    """Iterates without end over batches of vectors of several splits, of one store or of many.

    Every batch has as many tokens of each split as its weight says, rounded to whole tokens, so
    that the shares hold in every batch and not only in the long run. Each split is a `TokenStream`
    of its own without end: a small one begins anew while a large one is in its first epoch.

    Args:
        splits: Complete splits, with vectors of one width.
        weights: Share of each, above 0; they need not sum to 1. By default the tokens that each
            has, whatever is left out.
        layers: As in `TokenStream`.
        batch_size: Tokens of a batch, of all splits together.
        seed: Seed of the order of the first split; of the others it is one more each, so that
            splits of the same examples do not give the same tokens at a time.
        options: The others of `TokenStream`, the same for all: ``without``, ``scaled``, …; of
            ``examples`` and of arrays in ``keep`` a list with those of each split.

    Attributes:
        streams: The stream of each split; the batch size of each is its part of a batch.

    Raises:
        InputError: the weights do not fit, a split would have no token in a batch, or widths
            differ; or as of `TokenStream`.

    Examples:
        >>> store = bertvision.ActivationStore.open("activations")
        >>> splits = [store["0.5e/train"], store["1e/train"]]
        >>> mixture = bertvision.TokenMixture(splits, [3, 1], layers=-1, batch_size=64)
        >>> [len(next(iter(stream))) for stream in mixture.streams]
        [48, 16]
        >>> next(mixture.vectors()).shape
        torch.Size([64, 32])
    """

    def __init__(
        self,
        splits: Sequence[SplitReader],
        weights: Sequence[float] | None = None,
        layers: int | str | Sequence[int | str] | None = None,
        *,
        batch_size: int = 4096,
        seed: int = 0,
        **options: Any,
    ) -> None:
        splits = [] if isinstance(splits, str | SplitReader) else list(splits)
        if not splits or not all(isinstance(split, SplitReader) for split in splits):
            raise InputError("splits: give a list with at least one split of a store")
        widths = [split.record.hidden_size for split in splits]
        if len(set(widths)) > 1:
            named = zip(splits, widths, strict=True)
            text = ", ".join(f"{split.name} {width}" for split, width in named)
            raise InputError(f"vectors differ in width ({text}): mix splits of one width")
        if "endless" in options:
            raise InputError("a mixture has no end: leave endless out")
        if options.pop("logits", False):
            raise InputError("a mixture gives vectors alone: leave logits out")
        own = [_own_options(options, i, len(splits)) for i in range(len(splits))]
        batch_size = whole_number("batch_size", batch_size, 1)
        seed = whole_number("seed", seed, 0)
        shares = [split.record.tokens for split in splits] if weights is None else list(weights)
        sizes = _sizes(splits, shares, batch_size)
        self.streams = [
            TokenStream(split, layers, batch_size=n, seed=seed + i, endless=True, **own[i])
            for i, (split, n) in enumerate(zip(splits, sizes, strict=True))
        ]

    @property
    def batches(self) -> int:
        """Batches that were given out."""
        return self.streams[0].batches

    def vectors(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Iterator[Tensor]:
        """The decoded vectors of the batches, those of each split one after another.

        Args:
            device: Device on which codes are decoded.
            dtype: Type of the vectors.

        Yields:
            (batch_size, hidden), or (batch_size, layers, hidden) side by side.
        """
        iterators = [stream.vectors(device, dtype) for stream in self.streams]
        try:
            while True:
                yield torch.cat([next(vectors) for vectors in iterators])
        finally:
            for iterator in iterators:
                iterator.close()  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Tensor]:
        return self.vectors()

    def state_dict(self) -> dict[str, Any]:
        """The position of every stream, in plain JSON: resume goes on with the next batch."""
        return {"streams": [stream.state_dict() for stream in self.streams]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a position.

        Args:
            state: State of `state_dict`.

        Raises:
            InputError: the position is of other splits or in another order, or is none.
        """
        states = state.get("streams") if isinstance(state, Mapping) else None
        if not isinstance(states, list) or len(states) != len(self.streams):
            raise InputError(
                f"{state!r:.100} is no position of a mixture of {len(self.streams)} splits: give "
                "what its state_dict returned"
            )
        before = [stream.state_dict() for stream in self.streams]
        try:
            for stream, own in zip(self.streams, states, strict=True):
                stream.load_state_dict(own)
        except InputError:
            for stream, own in zip(self.streams, before, strict=True):
                stream.load_state_dict(own)
            raise


def _own_options(options: Mapping[str, Any], place: int, splits: int) -> dict[str, Any]:
    """The options of one split: of those that name its examples or tokens its own.

    Raises:
        InputError: there is not one for each.
    """
    own = dict(options)
    for name in ("examples", "keep"):
        value = own.get(name)
        if value is None or isinstance(value, str):
            continue
        if not isinstance(value, list | tuple) or len(value) != splits:
            raise InputError(
                f"{name} of a mixture: give a list with one for each of the {splits} splits, as "
                "places in one are none in another"
            )
        own[name] = value[place]
    return own


def _sizes(splits: Sequence[SplitReader], weights: Sequence[float], batch_size: int) -> list[int]:
    """Tokens of each split in a batch: the largest remainders are rounded up."""
    try:
        shares = np.array(weights, np.float64)
    except (TypeError, ValueError):
        shares = np.zeros(0)
    if shares.shape != (len(splits),) or not np.isfinite(shares).all() or (shares <= 0).any():
        raise InputError(
            f"weights are {list(weights)!r}: give a number above 0 for each of the "
            f"{len(splits)} splits"
        )
    exact = shares / shares.sum() * batch_size
    sizes = np.floor(exact).astype(int)
    missing = batch_size - int(sizes.sum())
    sizes[np.argsort(-(exact - sizes), kind="stable")[:missing]] += 1
    if (sizes == 0).any():
        name = splits[int(np.argmin(sizes))].name
        raise InputError(
            f"of {name} a batch of {batch_size} would have no token: give a larger batch_size, "
            "or a larger weight"
        )
    return [int(size) for size in sizes]
