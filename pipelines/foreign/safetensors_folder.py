"""Files of named tensors, safetensors or npz, one for each sample.

Speculators and vLLM write ``hidden_states``; a cache of TransformerLens has a tensor for each hook.
Speculators calls them ``hs_{i}.safetensors`` for the i-th row of its data, vLLM's connector after
its requests. Each holds ``hidden_states`` (tokens, layers, hidden) and ``token_ids`` (tokens,).

Export to safetensors: a file for each example, as speculators names and fills them.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from bertvision.errors import InputError, counted
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.files import check_regular
from bertvision.pipelines.foreign.content import Content, Example, Target
from bertvision.pipelines.foreign.sample import (
    LABELS,
    Sample,
    Source,
    as_tensor,
    hooked_sample,
    hooks_of,
    sample_of,
)

KEY = "key"
"""Name of the key of an example among the metadata of an exported file."""
NPZ = ".npz"
_HOOK_IDS = ("token_ids", "input_ids", "tokens")
_OF_ZIP = (zipfile.BadZipFile, zlib.error)
_MOST_UNPACKED = 1_032
"""Bytes that deflate makes of one, at most."""
_NUMBERED = re.compile(r"hs_(0|[1-9]\d{0,17})", re.ASCII)


class SafetensorsFolder(Source):
    """Safetensors files of a folder; the folders inside of it are not looked into.

    All headers are read at once, so that what is cut off or damaged is known before hours are
    spent on the others.

    Args:
        paths: The files.
        pattern: Names of the tensors that are the layers, such as ``blocks.*.hook_resid_post``;
            None takes ``hidden_states``, and where there are none all hooks.

    Raises:
        InputError: two files have the same key.
    """

    kind = "safetensors"

    def __init__(self, paths: Sequence[Path], pattern: str | None = None) -> None:
        files, bad = dict[str, Path](), dict[str, str]()
        self.longest, self._hooks = 0, list[str]()
        for path in sorted(paths, key=_order):
            try:
                key, tokens, hooks = _header(path, pattern)
                if files and hooks != self._hooks:
                    raise InputError(
                        f"{path} has the layers {', '.join(hooks) or 'hidden_states'}, and "
                        f"{next(iter(files.values()))} has {', '.join(self._hooks) or 'others'}"
                    )
                self._hooks = hooks
            except InputError as error:
                bad[_key(path)] = str(error)
                continue
            if key in files:
                raise InputError(
                    f"{path} and {files[key]} are both of example {key!r}: remove one of them"
                )
            files[key] = path
            self.longest = max(self.longest, tokens)
        self.keys, self._paths, self.bad = list(files), list(files.values()), bad
        self.layer_names = self._hooks or None

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        path = self._paths[position]
        with _opened(path) as file:
            if not self._hooks:
                return sample_of(str(path), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            ids = {*_HOOK_IDS}.intersection(file.keys())
            tensors = {name: file.get_tensor(name) for name in (*self._hooks, *ids)}
            return hooked_sample(str(path), tensors, self._hooks)


class NpzFolder(SafetensorsFolder):
    """Files of ``numpy.savez`` with the same contents."""

    kind = "npz"


def _header(path: Path, pattern: str | None) -> tuple[str, int, list[str]]:
    """Key, tokens and hooks of a file; of one with ``hidden_states`` no hooks."""
    with _opened(path) as file:
        names, hooks = list(file.keys()), list[str]()
        if pattern is not None or "hidden_states" not in names:
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            hooks = hooks_of(str(path), shapes, pattern)
        shape = file.get_slice(hooks[0] if hooks else "hidden_states").get_shape()
        tokens = shape[-2] if hooks else shape[0] if shape else 0
        # without numbers a shape may have any size
        key = (file.metadata() or {}).get(KEY, _key(path))
        return key, tokens if all(shape) else 0, hooks


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; errors name it."""
    check_regular(path)
    try:
        if path.suffix == NPZ:
            with zipfile.ZipFile(path) as archive:
                yield _Npz(archive)
        else:
            with safe_open(path, framework="pt") as file:
                yield file
    except InputError:
        raise
    # RuntimeError: an archive with a password; ValueError: numbers that are cut off
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, *_OF_ZIP) as error:
        raise InputError(f"{path} is damaged, cut off or still being written: {error}") from None


class _Npz:
    """Arrays of an ``.npz``, with the methods of `safe_open`; nothing is unpickled."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._members = {
            member.filename.removesuffix(".npy"): member for member in archive.infolist()
        }
        if len(self._members) < len(archive.infolist()):
            raise InputError(f"{archive.filename} has two arrays of one name: write it again")
        self._archive = archive

    def keys(self) -> list[str]:
        return list(self._members)

    def metadata(self) -> dict[str, str]:
        return {}

    def get_slice(self, name: str) -> _Npz._Shape:
        with self._archive.open(self._members[name]) as file:
            return self._Shape(self._header(name, file)[0])

    def get_tensor(self, name: str) -> torch.Tensor:
        member = self._members[name]
        with self._archive.open(member) as file:
            shape, turned, dtype = self._header(name, file)
            size = prod(shape) * dtype.itemsize
            most = _MOST_UNPACKED * max(member.compress_size, 1)
            if size > min(member.file_size, most):
                raise InputError(
                    f"{self._archive.filename}: {name} says that it has {size:,} bytes of numbers "
                    f"in {member.compress_size:,} of the file: it is damaged; save it again"
                )
            values = np.frombuffer(file.read(size), dtype)
            file.read(1)  # at the end the archive's checksum is compared
        return as_tensor(values.reshape(shape, order="F" if turned else "C"))

    def _header(self, name: str, file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Shape, whether columns come first, and type."""
        try:
            version = np.lib.format.read_magic(file)
            reads = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                reads = np.lib.format.read_array_header_2_0
            shape, turned, dtype = reads(file)
        except Exception as error:  # the header is parsed as Python's, which fails in many ways
            raise InputError(f"{self._archive.filename}: {name} is no array: {error}") from None
        if min(shape, default=0) < 0:
            raise InputError(f"{self._archive.filename}: {name} has shape {shape}: it is damaged")
        if dtype.kind not in "biuf":
            raise InputError(
                f"{self._archive.filename}: {name} holds {dtype}: give numbers; objects would have "
                "to be unpickled"
            )
        return shape, turned, dtype

    class _Shape(NamedTuple):
        shape: tuple[int, ...]

        def get_shape(self) -> tuple[int, ...]:
            return self.shape


def _key(path: Path) -> str:
    number = _NUMBERED.fullmatch(path.stem)
    return number[1] if number else path.stem


def _order(path: Path) -> tuple[int, str]:
    """By number where there is one, then by name."""
    key = _key(path)
    return int(key) if key.isdigit() and key.isascii() and len(key) < 19 else -1, path.name


class SafetensorsTarget(Target):
    """``hs_{number}.safetensors`` with hidden states, token ids, and what lies beside them.

    The number is that of the row of the data, or the key where all keys are numbers: no key ever
    becomes a path. The key itself is among the file's metadata.

    Args:
        folder: Folder to write to.
        content: Content that is exported.

    Raises:
        InputError: a file that is there is not of this export.
    """

    def __init__(self, folder: Path, content: Content) -> None:
        self._folder, self._content = folder, content
        self._files = [f"hs_{number}.safetensors" for number in content.numbers]
        self._there = {path.name for path in folder.glob("*.safetensors")}
        if strange := self._there.difference(self._files):
            raise InputError(f"{folder} holds {min(strange)}, which is not of this export")
        for position, name in enumerate(self._files):
            if name in self._there and not self._is_own(folder / name, position):
                raise InputError(
                    f"{folder / name} is damaged, or of another export: remove it, and the same "
                    "command writes it again"
                )

    def _is_own(self, path: Path, position: int) -> bool:
        try:
            with safe_open(path, framework="pt") as file:
                shape = file.get_slice("hidden_states").get_shape()
                due = self._content.lengths[position], len(self._content.layers)
                return file.metadata() == self._metadata(position) and tuple(shape[:2]) == due
        except (SafetensorError, OSError):
            return False

    def _metadata(self, position: int) -> dict[str, str]:
        """One entry: of several, safetensors would change the order each time."""
        return {KEY: self._content.keys[position]}

    def pending(self) -> list[int]:
        """See `Target.pending`."""
        shards = self._content.split.plan.shard.tolist()
        missing = (s for s, name in zip(shards, self._files, strict=True) if self._lacks(name))
        return sorted(set(missing))

    def _lacks(self, name: str) -> bool:
        return name not in self._there

    def write(self, shard: int) -> int:
        """See `Target.write`."""
        written = 0
        for example in self._content.examples(shard):
            name = self._files[example.position]
            if self._lacks(name):
                write_durably(self._folder / name, self._bytes(example))
                self._there.add(name)
                written += 1
        return written

    def _bytes(self, example: Example) -> bytes:
        tensors = {"hidden_states": example.states}
        for name, array in example.fields.items():
            tensor = torch.from_numpy(array.copy())
            is_ids = name == "input_ids"
            tensors["token_ids" if is_ids else name] = tensor.long() if is_ids else tensor
        for name, array in example.labels.items():
            tensors[LABELS + name] = torch.from_numpy(array.copy())
        return save(tensors, self._metadata(example.position))

    def finish(self) -> None:
        """See `Target.finish`."""
        names = {path.name for path in self._folder.glob("*.safetensors")}
        if names != set(self._files):
            raise InputError(
                f"{self._folder} holds {counted(len(names), 'file')}, {len(self._files):,} are "
                "due: something removed or added some meanwhile; run the same command again"
            )
