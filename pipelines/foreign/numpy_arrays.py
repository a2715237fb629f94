"""Arrays of NumPy: one for all samples, flat or padded, or a file for each; memory maps too.

Nothing is unpickled: arrays of objects are refused.

Export to NumPy: one array of all tokens, in the order of the data, and what lies beside it.
"""

from __future__ import annotations

import json
import os
import warnings
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, counted
from bertvision.featurestore.storage.durable import fsync, write_durably
from bertvision.pipelines.files import check_regular, read_json, write_json
from bertvision.pipelines.foreign.content import Content, Target
from bertvision.pipelines.foreign.sample import (
    LABELS,
    Sample,
    Source,
    as_layers,
    as_tensor,
    check_ids,
    files_of,
    native,
    whole_numbers,
)

STATES, LENGTHS, IDS, KEYS = "hidden_states.npy", "lengths.npy", "input_ids.npy", "keys.json"
"""Files of a folder that has one array of all tokens."""


class NumpyArray(Source):
    """One array of all samples.

    Args:
        states: (samples, seq, layers, hidden); with ``lengths`` padded behind, also (samples, seq,
            hidden), or flat: (tokens, layers, hidden) or (tokens, hidden).
        lengths: (samples,) tokens of each; where they add up to the first axis, it is flat. An
            array of three axes may be either, and needs them, or ids of (samples, seq).
        input_ids: as the first axes of ``states``, or None.
        keys: Keys of the samples; by default their numbers.
        beside: other arrays by name: ``labels.NAME`` (samples, …), others as the tokens lie.
        is_bfloat16: Whether ``states`` holds the bits of bfloat16, as 16-bit numbers.

    Raises:
        InputError: the shapes do not belong together.
    """

    kind = "NumPy"

    def __init__(
        self,
        states: npt.NDArray[Any],
        lengths: npt.NDArray[Any] | None = None,
        input_ids: npt.NDArray[Any] | None = None,
        *,
        keys: list[str] | None = None,
        beside: dict[str, npt.NDArray[Any]] | None = None,
        is_bfloat16: bool = False,
    ) -> None:
        self._states, self._bfloat16, shape = states, is_bfloat16, states.shape
        if lengths is not None:
            if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths):
                raise InputError(f"lengths are {lengths.dtype} of shape {lengths.shape}: give a "
                                 "whole number for each sample")  # fmt: skip
            lengths = lengths.astype(np.int64)
        flat = lengths is not None and lengths.sum() == shape[0] and len(shape) < 4
        padded_ids = input_ids is not None and input_ids.shape == shape[:2]
        if lengths is None and len(shape) == 3 and not padded_ids:
            raise InputError(
                f"an array of shape {shape} may be (samples, seq, hidden) or (tokens, layers, "
                "hidden): say which by the tokens of each sample, with --lengths LENGTHS.npy (or "
                f"{LENGTHS} beside {STATES} in a folder), of whole numbers that are {shape[1]} at "
                f"most or add up to {shape[0]}"
            )
        if lengths is None and len(shape) in (3, 4):
            lengths = np.full(shape[0], shape[1], np.int64)
        if (
            lengths is None
            or not lengths.size
            or lengths.min() < 1
            or not (flat or (len(lengths) == shape[0] and lengths.max() <= shape[1]))
            or len(shape) not in ((2, 3) if flat else (3, 4))
        ):
            said = "none" if lengths is None else f"{len(lengths):,}, {lengths.sum():,} in all"
            raise InputError(
                f"an array of shape {shape} and lengths ({said}) do not belong together: give "
                "(samples, seq, layers, hidden), with or without the lengths of the samples, or "
                "with them (samples, seq, hidden), (tokens, layers, hidden) or (tokens, hidden)"
            )
        self._lengths, self._flat = lengths, flat
        self._first = np.cumsum(lengths) - lengths
        if input_ids is not None:
            whole_numbers("input_ids", input_ids[:0])
        self._ids, self._beside = input_ids, beside or {}
        for name, array in {"input_ids": input_ids, **self._beside}.items():
            due = (len(lengths),) if name.startswith(LABELS) else shape[: 1 if flat else 2]
            if array is not None and array.shape[: len(due)] != due:
                raise InputError(f"{name} of shape {array.shape} do not begin with {due}, as due "
                                 f"beside hidden states of shape {shape}")  # fmt: skip
        self.keys = [str(i) for i in range(len(lengths))] if keys is None else keys
        if len(set(self.keys)) != len(lengths):
            raise InputError(
                f"{counted(len(set(self.keys)), 'key')} for {counted(len(lengths), 'sample')}: "
                "give each sample one of its own"
            )
        self.longest = int(lengths.max())

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        name = f"sample {self.keys[position]!r}"
        states = as_layers(name, self._tensor(self._part(self._states, position)))
        ids = None if self._ids is None else native(self._part(self._ids, position))
        labels, fields = {}, {}
        for path_of_name, array in self._beside.items():
            if path_of_name.startswith(LABELS):
                labels[path_of_name.removeprefix(LABELS)] = native(array[position])
            else:
                fields[path_of_name] = native(self._part(array, position))
        return Sample(states, ids, labels, fields)

    def _part(self, array: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
        tokens = int(self._lengths[position])
        if not self._flat:
            return array[position, :tokens]
        return array[int(self._first[position]) :][:tokens]

    def _tensor(self, part: npt.NDArray[Any]) -> Tensor:
        states = as_tensor(part)
        return states.view(torch.bfloat16) if self._bfloat16 else states


class NumpyFolder(Source):
    """A folder of ``.npy`` files, each with the hidden states of one sample, whose key it is.

    Token ids, where there are some, are in ``NAME.input_ids.npy`` beside ``NAME.npy``.

    Raises:
        InputError: there is none.
    """

    kind = "NumPy files"

    def __init__(self, folder: Path) -> None:
        paths = {path.stem: path for path in files_of(folder, ".npy")}
        self._paths = {k: p for k, p in paths.items() if not k.endswith(".input_ids")}
        self._ids = {k: paths[n] for k in self._paths if (n := f"{k}.input_ids") in paths}
        self.longest, self.bad, self.keys = 0, dict[str, str](), list[str]()
        for key, path in self._paths.items():
            try:
                self.longest = max(self.longest, *load_array(path).shape[:1])
                self.keys.append(key)
            except InputError as error:
                self.bad[key] = str(error)

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        key = self.keys[position]
        states = as_layers(str(self._paths[key]), as_tensor(load_array(self._paths[key])))
        ids = None
        if key in self._ids:
            ids = whole_numbers(str(self._ids[key]), load_array(self._ids[key]))
        check_ids(str(self._paths[key]), states.shape, ids)
        return Sample(states, ids)


def load_array(path: Path) -> npt.NDArray[Any]:
    """An array out of an ``.npy`` file, mapped into memory.

    Raises:
        InputError: it is damaged, no regular file, or holds objects, which would have to be
            unpickled.
    """
    check_regular(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers of old versions, and sizes that overflow
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the header is parsed as Python's, which fails in many ways
        raise InputError(f"{path} is no whole .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise InputError(f"{path} is no array of hidden states: give .npy files of one array each")
    if not array.size or array.dtype.kind not in "biuf":
        raise InputError(
            f"{path} holds {array.dtype} of shape {array.shape}: give an array of numbers, no axis "
            "of which is 0"
        )
    return array


def load_raw(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Numbers without a header, as ``numpy.memmap`` leaves them; bfloat16 as 16-bit numbers.

    Raises:
        InputError: the file is of another size.
    """
    stored = np.dtype("<u2" if dtype == "bfloat16" else f"<f{int(dtype[5:]) // 8}")
    size, due = check_regular(path).stat().st_size, prod(shape) * stored.itemsize
    if size != due or not due or min(shape) < 1:
        raise InputError(
            f"{path} has {size:,} bytes: {dtype} of shape {shape} has {due:,}; give --dtype and "
            "--shape as it was written with"
        )
    return np.memmap(path, stored, "r", shape=shape)


def open_flat(folder: Path) -> NumpyArray:
    """A folder with one array of all tokens: `STATES`, and beside it what there is.

    Raises:
        InputError: a file is damaged, or they do not belong together.
    """
    paths = {path.name: path for path in files_of(folder, ".npy")}
    states = load_array(paths.pop(STATES))
    lengths, ids = (load_array(paths.pop(n)) if n in paths else None for n in (LENGTHS, IDS))
    keys = None
    if (folder / KEYS).exists():
        keys = read_json(folder / KEYS, 1 << 30)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"{folder / KEYS} is no list of keys")
    beside = {name.removesuffix(".npy"): load_array(path) for name, path in paths.items()}
    return NumpyArray(states, lengths, ids, keys=keys, beside=beside)


class NumpyTarget(Target):
    """``hidden_states.npy`` (tokens, layers, hidden) with ``lengths.npy`` and others beside it.

    The large array is filled under another name, shard after shard: how many are durable stands in
    a file beside it. It gets its own name when it is whole.

    Args:
        folder: Folder to write to.
        content: Content that is exported.

    Raises:
        InputError: what an interrupted export left is damaged.
    """

    def __init__(self, folder: Path, content: Content) -> None:
        self._folder, self._content = folder, content
        self._partial, self._progress = folder / f".{STATES}", folder / ".progress.json"
        lengths, order = content.lengths, content.order
        self._first = np.empty(len(content), np.int64)
        self._first[order] = np.cumsum(lengths[order]) - lengths[order]
        self._shape = (int(lengths.sum()), len(content.layers), content.split.record.hidden_size)
        self._dtype = np.dtype(str(content.dtype).removeprefix("torch."))
        self._whole = (folder / STATES).exists()
        self._done = 0
        if self._whole:
            self._check(load_array(folder / STATES), folder / STATES)
        elif self._progress.exists():
            self._done = self._durable()
        else:
            made = np.lib.format.open_memmap(self._partial, "w+", self._dtype, self._shape)
            made.flush()

    def _check(self, array: npt.NDArray[Any], path: Path) -> None:
        if (array.shape, array.dtype) != (self._shape, self._dtype):
            raise InputError(f"{path} is not of this export: remove it")

    def _durable(self) -> int:
        """Shards that an interrupted export had written."""
        done = read_json(self._progress)
        if not isinstance(done, int) or not 0 <= done <= self._content.split.plan.n_shards:
            raise InputError(f"{self._progress} is damaged: remove {self._folder} and export again")
        self._check(load_array(self._partial), self._partial)
        return done

    def pending(self) -> list[int]:
        """See `Target.pending`."""
        shards = self._content.split.plan.n_shards
        return [] if self._whole else list(range(self._done, shards))

    def write(self, shard: int) -> int:
        """See `Target.write`."""
        array = np.lib.format.open_memmap(self._partial, "r+")
        written = 0
        for example in self._content.examples(shard):
            first = int(self._first[example.position])
            array[first : first + len(example.states)] = example.states.numpy()
            written += 1
        array.flush()
        fsync(self._partial)
        write_json(self._progress, shard + 1)
        return written

    def finish(self) -> None:
        """See `Target.finish`."""
        content, order = self._content, self._content.order
        self._save(LENGTHS, content.lengths[order])
        keys = json.dumps([content.keys[position] for position in order], ensure_ascii=False)
        write_durably(self._folder / KEYS, keys.encode())
        spans = zip(content.split.plan.first_token[order], content.lengths[order], strict=True)
        tokens = np.concatenate([np.arange(first, first + n) for first, n in spans])
        for name, array in content.fields.items():
            self._save(IDS if name == "input_ids" else f"{name}.npy", array[tokens])
        for name, array in content.labels.items():
            self._save(f"{LABELS}{name}.npy", array[order])
        if not self._whole:
            fsync(self._partial)
            os.replace(self._partial, self._folder / STATES)
            fsync(self._folder)
        self._progress.unlink(missing_ok=True)

    def _save(self, name: str, array: npt.NDArray[Any]) -> None:
        def save(path: Path) -> None:
            with path.open("wb") as file:
                np.save(file, array, allow_pickle=False)

        write_durably(self._folder / name, save)
