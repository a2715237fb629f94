"""The content of a shard: encoded hidden states → the bytes of its files, and its record.

Both writers stand on it: extraction's, which fills the shards of a plan, and the one that plans its
shards as they fill.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.records import Layout, ShardFile, ShardRecord
from bertvision.featurestore.format.shard import example_checksums
from bertvision.featurestore.format.shardfile import compress


class ShardContent:
    """Content of a shard.

    Args:
        layout: of the split.
        shard: its number.
        lengths: (examples,) tokens of each.
        codes: (tokens, layers, width) from `encode`, on the CPU; fastest where each layer is
            contiguous, and without a copy where zeros follow until there are
            ``layout.shard_tokens``.
        scale: (tokens, layers, …) or None.
        nonfinite: values that were NaN or infinite and were replaced.

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
        shapes = {name: tuple(values.shape) for name, values in given.items()}
        if shapes != wanted:
            raise InputError(f"shard {shard} of {layout.encoding} takes {wanted}, not {shapes}")
        self._layout, self._shard, self._lengths = layout, shard, list(lengths)
        self._codes = codes.view(torch.uint16) if codes.dtype == torch.bfloat16 else codes
        self._scale, self._scale_dtype = scale, encoding.scale_dtype
        self._nonfinite = nonfinite
        self._checksums: list[list[int]] = []

    def files(self) -> dict[str, Iterator[npt.NDArray[Any] | bytes]]:
        """The chunks of each file by its array's name, each to be used before the next."""
        found: dict[str, Iterator[npt.NDArray[Any] | bytes]] = {"hidden_states": self._layers()}
        if self._scale is not None:
            whole = np.zeros((self._layout.shard_tokens, *self._scale.shape[1:]), self._scale_dtype)
            whole[: len(self._scale)] = self._scale.numpy()
            found["scale"] = iter([whole])
        return found

    def record(self, split: str, files: Mapping[str, ShardFile]) -> ShardRecord:
        """The shard's record, once its files are written.

        Args:
            split: identity of the split that it belongs to.
            files: that were written.
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
