"""Logits: what a system, BERT or a head or an ensemble, says on the windows of a split.

Their file, ``<split>.safetensors``, stands beside the metrics of the system. It holds the logits by
name, and what tells their windows from others: ``n_tokens``, and ``question_index``, which is
`WindowIndex.item_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.tasks.windows import Windows

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.registry import TaskKind


_NAMES: dict[TaskKind, tuple[str, ...]] = {
    "classification": ("logits",),
    "span": ("start_logits", "end_logits"),
    "token": ("token_logits",),
    "tree": ("arcs", "relations"),
    "order": ("scores",),
}
"""Names of the arrays of each kind."""
_DIMENSIONS = {"logits": 2, "token_logits": 2, "relations": 2}


@dataclass(frozen=True, slots=True, eq=False)
class WindowIndex:
    """The windows of a split in an order: what logits belong to."""

    items: Sequence[Any]
    """The items of the split."""
    n_tokens: npt.NDArray[np.int32]
    """(windows,)"""
    item_index: npt.NDArray[np.int32]
    """(windows,) row in ``items``."""
    offset_mapping: npt.NDArray[np.int32] | None
    """(tokens, 2) characters of the context, −1 −1 outside it; None where a single vector was kept
    of each window, so that nothing is known of its tokens."""
    marks: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """(tokens,) each: `Windows.marks`."""

    @classmethod
    def of(cls, items: Sequence[Any], windows: Windows) -> WindowIndex:
        """The windows that a task makes of items, in the order of the data."""
        index, offsets = windows.item_index, windows.offset_mapping
        return cls(items, windows.n_tokens, index, offsets, windows.marks)

    def rows(self, name: str) -> int:
        """How many rows the logits of a name have."""
        if name == "logits":
            return len(self.item_index)
        if name == "scores":
            return int((self.marks["sentences"] >= 0).sum())
        if name not in ("arcs", "relations"):
            return int(self.n_tokens.sum())
        first = np.cumsum(self.n_tokens, dtype=np.int64) - self.n_tokens
        begins = (self.marks["words"] >= 0).astype(np.int64)
        words = np.add.reduceat(begins, first)  # no window is without tokens
        return int((words * (words + 1)).sum() if name == "arcs" else words.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The logits of one system on all windows of a split."""

    arrays: Mapping[str, npt.NDArray[np.float32]]
    """By name as `Task.logits` gives them: ``start_logits`` and ``end_logits`` (tokens,), the
    windows one after another; ``logits`` (windows, classes); of trees ``arcs`` and ``relations``,
    and of orders ``scores``, as `Task.window_logits` gives them."""
    windows: WindowIndex

    @property
    def kind(self) -> TaskKind:
        """Subject of the logits; a score is a class alone.

        Raises:
            InputError: no kind of task has arrays of these names.
        """
        return _kind_of(self.arrays)

    def save(self, path: Path, metadata: dict[str, str] | None = None) -> None:
        """Write them durably, as safetensors.

        Args:
            path: ``….safetensors``.
            metadata: Further values that are kept in the file.

        Raises:
            DiskSpaceError: the disk is full.
            InputError: no kind of task has arrays of these names, so that none could be read again.
        """
        _kind_of(self.arrays)
        arrays = {**self.arrays, "question_index": self.windows.item_index}
        if self.windows.offset_mapping is not None:
            arrays["n_tokens"] = self.windows.n_tokens
        write_durably(path, lambda target: save_file(arrays, target, metadata))

    @classmethod
    def load(
        cls, path: Path, windows: WindowIndex, command: str, sha256: str | None = None
    ) -> Logits:
        """Read the logits of a system, and check that they are of these windows.

        Args:
            path: ``….safetensors``.
            windows: Windows that they must be of.
            command: Command that makes them, for the messages.
            sha256: SHA-256 of the file, where it is known.

        Raises:
            WorkspaceError: they are missing, damaged or of other windows.
        """
        if not path.is_file():
            raise WorkspaceError(f"there are no logits {path}: `{command}` makes them")
        try:
            if sha256 is not None and sha256_of_files([path]) != sha256:
                raise OSError("they are not as they were written")
            arrays = load_file(path)
            names = _NAMES[_kind_of(arrays)]
            logits = cls({name: arrays[name] for name in names}, windows)
            rows = arrays["question_index"]
            n_tokens = windows.n_tokens if logits.kind == "classification" else arrays["n_tokens"]
        except (OSError, InputError, KeyError, SafetensorError) as error:
            raise WorkspaceError(
                f"the logits {path} are damaged ({error}): delete the file and run `{command}`"
            ) from error
        same = np.array_equal(rows, windows.item_index)
        same = same and np.array_equal(n_tokens, windows.n_tokens)
        if not same or any(
            x.ndim != _DIMENSIONS.get(name, 1) or len(x) != windows.rows(name)
            for name, x in logits.arrays.items()
        ):
            raise WorkspaceError(
                f"the logits {path} ({len(rows):,} windows) are of other data than the "
                f"{len(windows.item_index):,} windows that the workspace's questions make: "
                f"delete the file and run `{command}`"
            )
        return logits


def _kind_of(arrays: Mapping[str, Any]) -> TaskKind:
    for kind, names in _NAMES.items():
        if names[0] in arrays:
            return kind
    raise InputError(
        f"{', '.join(arrays) or 'nothing'}: logits are named "
        f"{'; '.join(', '.join(names) for names in _NAMES.values())}"
    )
