"""ResidentCodes: the codes of a split on a device, read from the store once."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, did_you_mean
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.reader import SplitReader


class _OnDevice(NamedTuple):
    """Memory of a device: codes (layers, rows, width), scales (rows, layers, …), moments."""

    codes: Tensor
    scale: Tensor | None
    stats: ChannelStats | None


_READERS = 2
_MEMORY = Path("/proc/meminfo")  # of Linux


class ResidentCodes:
    """The codes of a split on a device, where batches are gathered without reading a file.

    They are read and checked when the first batch is asked for, and stay. Batches and values are
    those of the split, bit for bit.

    Args:
        split: A complete split.
        device: Device that the codes stay on.
        layers: Indices or names of the hidden states that are taken there; None is all.

    Attributes:
        device: Device of the codes.
        layers: Indices of the hidden states that are there.

    Raises:
        IncompleteSplitError: Shards of the split are not committed yet.
        InputError: There is no such device or layer, or the codes do not fit.
    """

    def __init__(
        self,
        split: SplitReader,
        device: torch.device | str,
        layers: int | str | Sequence[int | str] | None = None,
    ) -> None:
        self._split, self.device = split.require_complete(), find_device(device)
        self._taken = split.layer_positions(layers)
        self.layers = [split.record.layers[position] for position in self._taken]
        plan, encoding = split.plan, split.encoding
        rows = (plan.n_shards - 1) * plan.shard_tokens + plan.tokens_of(plan.n_shards - 1)
        hidden = split.record.hidden_size
        self._shape = len(self._taken), rows, encoding.codes_size(hidden)
        self._scale_shape = rows, len(self._taken), *encoding.scale_shape(hidden)
        self._check_room()
        self._memory: _OnDevice | None = None
        self._lock, self._process = threading.Lock(), os.getpid()

    def batch(
        self,
        examples: npt.NDArray[np.int64],
        positions: Sequence[int],
        memory: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> ActivationBatch:
        """A batch on the device.

        Args:
            examples: Positions in the split, (batch,).
            positions: Places on the stored layer axis.
            memory: Source of memory for decoded states, used on a CPU alone.

        Raises:
            InputError: A layer was not taken to the device.
            CorruptStoreError: What is stored is damaged.
        """
        split, here = self._split, self.device
        if missing := [position for position in positions if position not in self._taken]:
            raise InputError(
                f"layer {split.record.layers[missing[0]]} of {split.name} is not on {here}, where "
                f"{', '.join(map(str, self.layers))} are: name it in `split.to`"
            )
        if self._process != os.getpid():  # a thread that a fork left behind may hold the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            all_codes, all_scale, stats = self._memory = self._memory or self._read()
        lengths = split.plan.n_tokens[examples].astype(np.int64)
        index = torch.from_numpy(split.plan.rows_of(examples)).to(here)
        places = [self._taken.index(position) for position in positions]
        scale = None if all_scale is None else all_scale.index_select(0, index)
        if places == list(range(len(self._taken))):
            codes = all_codes.index_select(1, index)
        else:
            scale = None if scale is None else scale[:, places]
            codes = torch.stack([all_codes[place].index_select(0, index) for place in places])
        return ActivationBatch(
            codes=codes.transpose(0, 1),
            scale=scale,
            stats=stats and ChannelStats(*(values[list(positions)] for values in stats)),
            lengths=torch.from_numpy(lengths).to(here),
            examples=torch.from_numpy(examples).to(here),
            labels={
                name: torch.from_numpy(values[examples]).to(here)
                for name, values in split.labels.items()
            },
            memory=memory if here.type == "cpu" else None,
        )

    def _check_room(self) -> None:
        """Refuse a split that does not fit, when it is opened and again when it is read."""
        split, encoding = self._split, self._split.encoding
        size = math.prod(self._shape) * encoding.torch_dtype.itemsize
        if encoding.quantised:
            size += math.prod(self._scale_shape) * encoding.scale_torch_dtype.itemsize
        if size > (free := _free_bytes(self.device)):
            raise InputError(
                f"{split.name} takes {size / 1e9:,.1f} GB, and {self.device} has {free / 1e9:,.1f} "
                "GB free: take fewer layers there, or stream it from the store"
            )

    def _read(self) -> _OnDevice:
        split, encoding, here = self._split, self._split.encoding, self.device
        self._check_room()  # others may have been read meanwhile
        codes = torch.empty(self._shape, dtype=encoding.torch_dtype, device=here)
        scale = stats = None
        if encoding.quantised:
            dtype = encoding.scale_torch_dtype
            scale = torch.empty(self._scale_shape, dtype=dtype, device=here)
        if split.stats is not None:
            stats = ChannelStats(*(values.to(here) for values in split.stats))

        def read(shard: int) -> None:
            reader = split.open_shard(shard)
            own, own_scale = split.buffers(reader.tokens, len(self._taken))
            reader.read(0, len(split.plan.examples_of(shard)), self._taken, own, own_scale)
            reader.close()
            begin = shard * split.plan.shard_tokens
            rows = slice(begin, begin + reader.tokens)
            codes[:, rows] = torch.from_numpy(own).view(codes.dtype).to(here)
            if scale is not None and own_scale is not None:
                scale[rows] = torch.from_numpy(own_scale).to(here)

        with ThreadPoolExecutor(_READERS, "bertvision-resident") as threads:
            list(threads.map(read, range(split.plan.n_shards)))
        return _OnDevice(codes, scale, stats)


def find_device(name: torch.device | str) -> torch.device:
    """The device of a name that torch knows, such as ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        InputError: There is no such device here.
    """
    try:
        if torch.device(name).type == "meta":
            raise RuntimeError("it holds no values")
        return torch.empty(0, device=torch.device(name)).device  # with its number
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        known, why = ("cpu", "cuda", "mps", "xpu"), str(error).splitlines()[0].partition(". ")[0]
        raise InputError(
            f"device {str(name)!r}: {did_you_mean(str(name), known)}torch has none of that name on "
            f"this machine ({why}); cpu is always there"
        ) from None


def _free_bytes(device: torch.device) -> float:
    """Memory of a device that may be taken; infinite where that is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    if device.type == "cpu" and _MEMORY.is_file():
        available = re.search(r"^MemAvailable: +(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
        return 1024.0 * int(available[1]) if available else float("inf")
    return float("inf")
