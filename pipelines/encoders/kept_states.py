"""Hidden states that are kept of a forward pass: of chosen layers, of all tokens or pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.poolings import POOLING_NAMES, SpecialEnds, TokenPooling, pool
from bertvision.pipelines.tasks.windows import special_ends


def check_poolings(poolings: Sequence[TokenPooling], tokenizer: Any) -> None:
    """Refuse poolings for which an encoder's windows have no token.

    Args:
        poolings: Poolings that are asked for.
        tokenizer: Tokenizer of the encoder.

    Raises:
        InputError: cls or sep, and windows do not begin, or end, with a special token.
    """
    begins, ends = special_ends(tokenizer)
    lacking = {name for name, there in (("cls", begins), ("sep", ends)) if not there}
    for pooling in poolings:
        if pooling in lacking:
            allowed = [name for name in POOLING_NAMES.split(", ") if name not in lacking]
            where = "begin" if pooling == "cls" else "end"
            raise InputError(
                f"pooling {pooling!r}: windows of {tokenizer.name_or_path!r} do not {where} with a "
                f"special token; its encoder's poolings are {', '.join(allowed)}"
            )


Int64Array = npt.NDArray[np.int64]


class KeptStates:
    """Takes the hidden states of a batch of windows as the encoder gives them, one after another.

    Pooled as soon as they are there, the states of a layer need not outlive it.

    Args:
        layers: Indices of the hidden states, ascending, by token pooling.
        hidden_size: Channels of a hidden state, or of a site.
        where: Place of the states.
        special: Special tokens at the ends of each window.
    """

    def __init__(
        self,
        layers: Mapping[TokenPooling, Sequence[int]],
        hidden_size: int,
        where: torch.device,
        special: SpecialEnds = (True, True),
    ) -> None:
        self._special = special
        self._places = {
            pooling: {layer: place for place, layer in enumerate(wanted)}
            for pooling, wanted in layers.items()
        }
        self._wanted = {layer for wanted in layers.values() for layer in wanted}
        self._given: set[int] = set()
        self._hidden = hidden_size
        self._memory = torch.empty(0, device=where)
        self._room: dict[TokenPooling, Tensor] = {}
        self._lengths: npt.NDArray[np.integer] = np.zeros(0, np.int32)
        self._pointed: Mapping[TokenPooling, npt.NDArray[np.integer]] = {}

    def begin(
        self,
        lengths: npt.NDArray[np.integer],
        places: Mapping[TokenPooling, npt.NDArray[np.integer]] | None = None,
    ) -> None:
        """Make room for a batch of windows, in memory that is used again.

        Args:
            lengths: (windows,) tokens of each.
            places: Token of each window, (windows,), by pooling ``at:FIELD``.
        """
        self._given.clear()
        self._lengths = lengths
        self._pointed = places or {}
        shapes = {
            pooling: (len(places), int(kept_tokens(pooling, lengths).sum()), self._hidden)
            for pooling, places in self._places.items()
        }
        counts = [a * b * c for a, b, c in shapes.values()]
        if self._memory.numel() < sum(counts):
            self._memory = torch.empty(sum(counts), device=self._memory.device)
        parts = self._memory[: sum(counts)].split(counts)
        self._room = {
            pooling: part.view(shape)
            for (pooling, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def add(self, layer: int, state: Tensor, windows: Int64Array | None = None) -> None:
        """Keep what is wanted of one hidden state.

        Args:
            layer: its index.
            state: (tokens, hidden) of windows one after another, without padding.
            windows: (group,) which of the batch they are, in this order; None is all of them.
        """
        chosen = slice(None) if windows is None else windows
        lengths = self._lengths[chosen]
        pointed = {pooling: rows[chosen] for pooling, rows in self._pointed.items()}
        for pooling, places in self._places.items():
            if layer in places:
                value = state
                if pooling != "all":
                    value = pool(state.float(), lengths, pooling, self._special, pointed)
                self._put(pooling, places[layer], value, windows)
        self._given.add(layer)

    def add_pooler(self, layer: int, output: Tensor, windows: Int64Array | None = None) -> None:
        """Keep the pooler output, (windows, hidden), as state ``layer`` of the first token."""
        self._put("cls", self._places["cls"][layer], output, windows)
        self._given.add(layer)

    def result(self) -> list[Tensor]:
        """(tokens, layers, hidden) or (windows, layers, hidden) of each kind that is kept.

        Raises:
            InputError: a wanted state was not given.
        """
        given = len(self._wanted & self._given)
        if given < len(self._wanted):
            raise InputError(
                f"the encoder gave {given} hidden states instead of {len(self._wanted)}: this "
                "version of transformers is not supported"
            )
        return [room.transpose(0, 1) for room in self._room.values()]

    def _put(
        self, pooling: TokenPooling, place: int, value: Tensor, windows: Int64Array | None
    ) -> None:
        room = self._room[pooling][place]
        if windows is None:
            room.copy_(value)
            return
        if pooling == "all":
            first = np.cumsum(self._lengths, dtype=np.int64) - self._lengths
            spans = [np.arange(first[w], first[w] + self._lengths[w]) for w in windows]
            rows = np.concatenate(spans)
        else:
            rows = windows
        room.index_copy_(0, torch.from_numpy(rows).to(room.device), value.to(room.dtype))


def kept_tokens(pooling: TokenPooling, lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """How many tokens, or vectors, are kept of windows of these lengths, (windows,) each."""
    return lengths if pooling == "all" else np.ones_like(lengths)
