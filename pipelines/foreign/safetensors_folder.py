"""A folder of safetensors files, one for each sample, as speculators and vLLM write them.

Speculators calls them ``hs_{i}.safetensors`` for the i-th row of its data, vLLM's connector after
its requests. Each holds ``hidden_states`` (tokens, layers, hidden) and ``token_ids`` (tokens,).

Export to safetensors: a file for each example, as speculators names and fills them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    files_of,
    no_states,
    sample_of,
)

KEY = "key"
"""Name of the key of an example among the metadata of an exported file."""
_NUMBERED = re.compile(r"hs_(0|[1-9]\d{0,17})", re.ASCII)


class SafetensorsFolder(Source):
    """Safetensors files of a folder; the folders inside of it are not looked into.

    All headers are read at once, so that what is cut off or damaged is known before hours are
    spent on the others.

    Args:
        folder: Folder of the files.

    Raises:
        InputError: two files have the same key.
    """

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        files, bad = dict[str, Path](), dict[str, str]()
        self.longest = 0
        for path in sorted(files_of(folder, ".safetensors"), key=_order):
            try:
                key, tokens = _header(path)
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

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        path = self._paths[position]
        with _opened(path) as file:
            return sample_of(str(path), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _header(path: Path) -> tuple[str, int]:
    """Key and tokens of a file."""
    with _opened(path) as file:
        if "hidden_states" not in (names := list(file.keys())):
            raise InputError(no_states(str(path), names))
        shape = file.get_slice("hidden_states").get_shape()
        # without numbers a shape may have any size
        return (file.metadata() or {}).get(KEY, _key(path)), shape[0] if shape and all(shape) else 0


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; errors name it."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged, cut off or still being written: {error}") from None


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
