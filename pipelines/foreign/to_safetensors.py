"""Export to safetensors: a file for each example, as speculators names and fills them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from bertvision.errors import InputError, counted
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.foreign.content import Content, Example, Target
from bertvision.pipelines.foreign.safetensors_folder import KEY
from bertvision.pipelines.foreign.sample import LABELS


class SafetensorsTarget(Target):
    """``hs_{number}.safetensors`` with hidden states, token ids, and what lies beside them.

    The number is that of the row of the data, or the key where all keys are numbers: no key ever
    becomes a path. The key itself is among the file's metadata.

    Args:
        folder: to write to.
        content: what is exported.

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
        found = {path.name for path in self._folder.glob("*.safetensors")}
        if found != set(self._files):
            raise InputError(
                f"{self._folder} holds {counted(len(found), 'file')}, {len(self._files):,} are "
                "due: something removed or added some meanwhile; run the same command again"
            )
