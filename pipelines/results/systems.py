"""Systems by the name one types, their answers, and the windows that these are of.

A system is written ``NAME``, ``NAME:SNAPSHOT`` or ``NAME:TRAINED_ON:CHECKPOINT``: ``bert:1e``,
``adapter-386-shared:0.3e:1e``, ``max-bert+adapter-386-shared:1e``; a head of one's own by its
dotted path, ``my_heads:LastLayer:1e``, or as its folder is named. What is left out must follow from
what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import RootModel

from bertvision.errors import InputError, UnknownNameError, WorkspaceError, did_you_mean
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.models.zoo import plugins
from bertvision.pipelines.records import read_record
from bertvision.pipelines.results.results import Result
from bertvision.pipelines.tasks.logits import WindowIndex
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.plugins import is_dotted_path

Combine = Literal["max", "mean"]
"""How the softmaxes of members are combined."""
BERT = "bert"
"""Name of the encoder with its own output layer, among systems."""


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
        name, tags = parted(text)
        if is_own_class(name.partition("@")[0]):
            name = Run.parse(name).name
        elif ":" in name:
            SnapshotTag(name.rpartition(":")[2])
        if not name or len(tags) > 2:
            raise InputError(
                f"{text!r} names no system: write NAME, NAME:SNAPSHOT or NAME:TRAINED_ON:CHECKPOINT"
                ", such as bert:1e or adapter-386-shared:0.3e:1e"
            )
        checked = [str(SnapshotTag(tag)) for tag in tags]
        return cls(name, checked[0], checked[-1]) if checked else cls(name, None, None)


def parted(text: str) -> tuple[str, list[str]]:
    """A system, perhaps a class of one's own with a colon in its name, and the snapshots behind."""
    parts, tags = text.split(":"), list[str]()
    while len(parts) > 1 and SnapshotTag.is_valid(parts[-1]) and not is_own_class(":".join(parts)):
        tags.insert(0, parts.pop())
    return ":".join(parts), tags


def is_own_class(text: str) -> bool:
    """Whether it is a class, ``my_heads:Last``, and not a head at a snapshot such as ``main``."""
    return is_dotted_path(text) and text.partition(":")[0] not in (BERT, *plugins())


class Predictions(RootModel[dict[str, str | bool | int | float | None]]):
    """``predictions.json``: answers by item id."""


def label(result: Result) -> str:
    """A result's system as one types it."""
    name = result.run
    if result.system == "ensemble":
        name = name.rpartition("@")[0]
    if result.trained_on == result.checkpoint:
        return f"{name}:{result.checkpoint}"
    return f"{name}:{result.trained_on}:{result.checkpoint}"


def seedless(result: Result) -> str:
    """A result's name without its seed, which those that differ from it by seed share."""
    return result.name.replace(f"@s{result.seed}", "") if result.seed else result.name


def find_system(
    results: Sequence[Result],
    text: str,
    *,
    trained_on: str | None = None,
    checkpoint: str | None = None,
    split: str = "dev",
) -> Result:
    """The one result that is meant; never a guess between several.

    Args:
        results: Results of the workspace.
        text: ``NAME[:TRAINED_ON[:CHECKPOINT]]``.
        trained_on: Snapshot, as if it stood in ``text``.
        checkpoint: Snapshot, as if it stood in ``text``.
        split: Split that the results are of, for messages.

    Raises:
        UnknownNameError: there is none, or more than one.
    """
    asked = SystemName.parse(text)
    trained_on, checkpoint = trained_on or asked.trained_on, checkpoint or asked.checkpoint
    names = [label(result).partition(":")[0] for result in results]
    named = [result for result, name in zip(results, names, strict=True) if name == asked.name]
    if not named:
        hint = did_you_mean(asked.name, set(names))
        labels = ", ".join(dict.fromkeys(names)) or "none yet"
        on, option = ("", "") if split == "dev" else (f" on {split}", f" --split {split}")
        raise UnknownNameError(
            f"no system {asked.name} was scored{on}: {hint}there are {labels}; `bertvision evaluate"
            f"{option}` scores heads, `bertvision ensemble{option}` makes ensembles"
        )
    systems = [
        result
        for result in named
        if trained_on in (None, result.trained_on) and checkpoint in (None, result.checkpoint)
    ]
    if len(systems) != 1:
        labels = ", ".join(label(result) for result in systems or named)
        raise UnknownNameError(
            f"which {asked.name} is meant? There are {labels}: write one of these"
            if systems
            else f"{asked.name} was not scored there: there are {labels}; `bertvision evaluate` "
            "scores heads on other snapshots, `bertvision finetune` makes those of BERT"
        )
    return systems[0]


def read_predictions(result: Result, items: Sequence[Any]) -> dict[str, Any]:
    """The answers of a system by item id: text, whether it is answerable, a class, or a score.

    Raises:
        WorkspaceError: ``predictions.json`` is missing, damaged, or does not cover the items.
    """
    path = result.folder / "predictions.json"
    predictions = read_record(
        path, Predictions, result.command, sha256=result.sha256.get(path.name)
    ).root
    for item in items:
        if item.id not in predictions:
            raise WorkspaceError(
                f"{path} is not of the workspace's {len(items):,} items ({item.id!r} is missing): "
                f"delete the folder and run `{result.command}`"
            )
        if predictions[item.id] is None:
            raise WorkspaceError(f"{path}: {item.id!r} has no answer: run `{result.command}`")
    return {item.id: predictions[item.id] for item in items}


def read_windows(workspace: Workspace, tag: str, split: str) -> WindowIndex:
    """Make the windows of a split again, from the workspace's data and a snapshot's tokenizer.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        WorkspaceError: the data changed since the workspace was made.
    """
    from bertvision.pipelines.encoders.loading import load_tokenizer

    tokenizer = load_tokenizer(workspace.require_snapshot(tag))
    return WindowIndex.of(workspace.items(split), workspace.windows(split, tokenizer))
