"""Systems by the name one types, and what they said: their logits, window by window.

A system is written ``NAME``, ``NAME:SNAPSHOT`` or ``NAME:TRAINED_ON:CHECKPOINT``: ``bert:1e``,
``adapter-386-shared:0.3e:1e``, ``max-bert+adapter-386-shared:1e``. What is left out must follow
from what there is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bertvision.errors import InputError, UnknownNameError, WorkspaceError, did_you_mean
from bertvision.featurestore.format.schema import SnapshotTag
from bertvision.pipelines.results.results import Result
from bertvision.pipelines.tasks.scores import Predicted
from bertvision.pipelines.workspace.workspace import Workspace


class SystemName(NamedTuple):
    """A system as the user wrote it; None is what was left out."""

    name: str
    trained_on: str | None
    checkpoint: str | None

    @classmethod
    def parse(cls, text: str) -> SystemName:
        """Read ``NAME[:TRAINED_ON[:CHECKPOINT]]``; one snapshot alone is both.

        Raises:
            InputError: a snapshot is not a tag, or there is too much.
        """
        name, *tags = text.split(":")
        if not name or len(tags) > 2:
            raise InputError(
                f"{text!r} names no system: write NAME, NAME:SNAPSHOT or NAME:TRAINED_ON:CHECKPOINT"
                ", such as bert:1e or adapter-386-shared:0.3e:1e"
            )
        checked = [str(SnapshotTag(tag)) for tag in tags]
        return cls(name, checked[0], checked[-1]) if checked else cls(name, None, None)


class WindowIndex(NamedTuple):
    """The windows of a split, in the order of the data: what logits belong to."""

    items: Sequence[Any]
    n_tokens: npt.NDArray[np.int32]
    """(windows,)"""
    item_index: npt.NDArray[np.int32]
    """(windows,) row in ``items``."""
    offset_mapping: npt.NDArray[np.int32]
    """(tokens, 2) characters of the context, −1 −1 outside it."""


class SystemLogits(NamedTuple):
    """The logits of one system on all windows of a split."""

    kind: str
    """``span`` or ``classification``."""
    parts: tuple[npt.NDArray[np.float32], ...]
    """Of spans start and end logits, each (tokens,); of classification (classes × windows,)."""
    lengths: npt.NDArray[np.int32]
    """How many consecutive values compete with each other: (windows,) tokens, or classes."""

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """By the names under which they are kept."""
        if self.kind == "classification":
            return {"logits": self.parts[0].reshape(len(self.lengths), -1)}
        return {"start_logits": self.parts[0], "end_logits": self.parts[1]}

    def on(self, frame: WindowIndex) -> Predicted:
        """Logits with what decoding and scoring them needs."""
        return Predicted(
            *(self.arrays(), frame.n_tokens, frame.offset_mapping),
            *(frame.item_index, frame.items),
        )


def label(result: Result) -> str:
    """A result's system as one types it."""
    name = result.run
    if result.system == "ensemble":
        name = name.rpartition("@")[0]
    if result.trained_on == result.checkpoint:
        return f"{name}:{result.checkpoint}"
    return f"{name}:{result.trained_on}:{result.checkpoint}"


def find_system(
    results: Sequence[Result],
    text: str,
    *,
    trained_on: str | None = None,
    checkpoint: str | None = None,
) -> Result:
    """The one result that is meant; never a guess between several.

    Args:
        results: those there are.
        text: ``NAME[:TRAINED_ON[:CHECKPOINT]]``.
        trained_on: as if it stood in ``text``.
        checkpoint: as if it stood in ``text``.

    Raises:
        UnknownNameError: there is none, or more than one.
    """
    asked = SystemName.parse(text)
    trained_on, checkpoint = trained_on or asked.trained_on, checkpoint or asked.checkpoint
    names = [label(result).partition(":")[0] for result in results]
    named = [result for result, name in zip(results, names, strict=True) if name == asked.name]
    if not named:
        hint = did_you_mean(asked.name, set(names))
        held = ", ".join(dict.fromkeys(names)) or "none yet"
        raise UnknownNameError(
            f"no system {asked.name} was scored: {hint}there are {held}; `bertvision evaluate` "
            "scores heads, `bertvision ensemble` makes ensembles"
        )
    found = [
        result
        for result in named
        if trained_on in (None, result.trained_on) and checkpoint in (None, result.checkpoint)
    ]
    if len(found) != 1:
        held = ", ".join(label(result) for result in found or named)
        raise UnknownNameError(
            f"which {asked.name} is meant? There are {held}: write one of these"
            if found
            else f"{asked.name} was not scored there: there are {held}; `bertvision evaluate` "
            "scores heads on other snapshots, `bertvision finetune` makes those of BERT"
        )
    return found[0]


def read_predictions(result: Result, items: Sequence[Any]) -> dict[str, Any]:
    """The answers of a system by item id: text, whether it is answerable, a class, or a score.

    Raises:
        WorkspaceError: ``predictions.json`` is missing, damaged, or does not cover the items.
    """
    path = result.folder / "predictions.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = (str, bool, int, float)
        missing = [item.id for item in items if type(found[item.id]) not in known]
    except FileNotFoundError:
        raise WorkspaceError(f"there is no {path}: `{result.command}` makes it") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WorkspaceError(
            f"{path} is damaged or not of the workspace's {len(items):,} items ({error}): "
            f"delete the folder and run `{result.command}`"
        ) from error
    if missing:
        raise WorkspaceError(f"{path}: {missing[0]!r} has no answer: run `{result.command}`")
    return {item.id: found[item.id] for item in items}


def read_frame(workspace: Workspace, tag: str, split: str) -> WindowIndex:
    """Make the windows of a split again, from the workspace's data and a snapshot's tokenizer.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        WorkspaceError: the data changed since the workspace was made.
    """
    from bertvision.pipelines.encoders.loading import load_tokenizer

    data = workspace.dataset()
    items = data.items(split)
    tokenizer = load_tokenizer(workspace.require_snapshot(tag))
    windows = data.task.windows(items, tokenizer, data.config)
    return WindowIndex(items, windows.n_tokens, windows.item_index, windows.offset_mapping)


def read_system_logits(path: Path, frame: WindowIndex, command: str) -> SystemLogits:
    """Read the logits of BERT, a head or an ensemble, and check that they are of these windows.

    Args:
        path: ``….safetensors`` beside the metrics.
        frame: the windows they must be of.
        command: what makes them, for the messages.

    Raises:
        WorkspaceError: they are missing, damaged or of other windows.
    """
    if not path.is_file():
        raise WorkspaceError(f"there are no logits {path}: `{command}` makes them")
    try:
        arrays = load_file(path)
        if "logits" in arrays:
            kind, parts = "classification", [arrays["logits"].ravel()]
            lengths = np.full(len(frame.item_index), arrays["logits"].shape[1], np.int32)
        else:
            kind, parts = "span", [arrays["start_logits"], arrays["end_logits"]]
            lengths = arrays["n_tokens"]
        rows = arrays["question_index"]
    except (OSError, KeyError, SafetensorError) as error:
        raise WorkspaceError(
            f"the logits {path} are damaged ({error}): delete the file and run `{command}`"
        ) from error
    same = np.array_equal(rows, frame.item_index)
    if kind == "span":
        same = same and np.array_equal(lengths, frame.n_tokens)
    if not same or any(len(part) != int(lengths.sum()) for part in parts):
        raise WorkspaceError(
            f"the logits {path} ({len(rows):,} windows) are of other data than the "
            f"{len(frame.item_index):,} windows that the workspace's questions make: "
            f"delete the file and run `{command}`"
        )
    return SystemLogits(kind, tuple(parts), lengths)
