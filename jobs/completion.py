"""Completion in the shell: names in the workspace, and fixed names.

Of a workspace only names of files and folders are looked at, so that an answer takes no longer than
the command line itself; whatever goes wrong, nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import typer

from bertvision.pipelines.declare import Argument

Names = Callable[[Any], Iterable[str]]
"""Names that are offered in a context of click, whose ``params`` have what was typed before."""


def completion(
    argument: Argument, command: str
) -> Callable[[typer.Context, str], list[str]] | None:
    """The completion of an argument, where there is something to offer.

    Args:
        argument: Argument of a job.
        command: Name of the job.
    """
    names = _OF_COMMANDS.get((command, argument.name)) or _OFFERED.get(argument.name)
    if names is None and (choices := argument.choices):
        names = _fixed(*choices)
    return None if names is None else _completion(names)


def _completion(names: Names) -> Callable[[typer.Context, str], list[str]]:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            before, comma, last = incomplete.rpartition(",")  # several values have commas
            given = before.split(",")
            offered = dict.fromkeys(names(ctx))
            return [f"{before}{comma}{n}" for n in offered if n.startswith(last) and n not in given]
        except Exception:  # a traceback in the middle of a line that is typed helps nobody
            return []

    return complete


def _root(ctx: Any) -> Path:
    """Folder of the workspace that was named, or else of the one that one stands in."""
    from bertvision.pipelines.workspace.workspace import FILE

    if (named := ctx.params.get("workspace")) is not None:
        return Path(named).expanduser()
    return next(place for place in (Path.cwd(), *Path.cwd().parents) if (place / FILE).is_file())


def _stored(ctx: Any) -> list[tuple[str, str]]:
    """Snapshot and name of each stored split, where the store is a folder."""
    from bertvision.featurestore.format.ledger import LEDGER

    store = ctx.params.get("store")
    folder = (Path(store) if store else _root(ctx) / "activations") / LEDGER
    return sorted((path.parent.name, path.name) for path in folder.glob("*/[!.]*"))


def _tags(ctx: Any) -> list[str]:
    """Snapshots that are made, and those whose activations are stored."""
    made = [path.parent.name for path in _root(ctx).glob("snapshots/*/snapshot.json")]
    return sorted({*made, *(tag for tag, _ in _stored(ctx))})


def _new_tags(ctx: Any) -> list[str]:
    """Snapshots that can be extracted: these, and the two that are made without training."""
    return [*_tags(ctx), "0e", "untrained"]


def _trained_tags(ctx: Any) -> list[str]:
    return sorted({path.parents[1].name for path in _heads_in(ctx)})


def _heads_in(ctx: Any) -> list[Path]:
    return list(_root(ctx).glob("heads/*/[!.]*/metrics.json"))


def _trained(ctx: Any) -> list[str]:
    """Heads that were trained, on the snapshot that was named before, if one was."""
    tag = ctx.params.get("trained_on")
    found = [p for p in _heads_in(ctx) if tag in (None, p.parents[1].name)]
    return sorted(path.parent.name for path in found)


def _splits(ctx: Any) -> list[str]:
    """Names of stored splits, at the snapshot that was named before, if one was."""
    tag = ctx.params.get("checkpoint")
    held = [split for at, split in _stored(ctx) if tag in (None, at)]
    return [*held, "train", "tune", "dev"]


def _named_splits(ctx: Any) -> list[str]:
    return [f"{tag}/{split}" for tag, split in _stored(ctx)]


def _tasks(ctx: Any) -> list[str]:
    """Tasks, and data sets that were added."""
    try:
        added = [path.stem for path in _root(ctx).glob("datasets/*.json")]
    except StopIteration:
        added = []
    return [*_tasks_known(ctx), *added]


def _fixed(*names: str) -> Names:
    return lambda ctx: names


def _known(place: str, name: str, *before: str) -> Names:
    """Names in a mapping or tuple, or values of a type, which is imported when it is asked for."""

    def names(ctx: Any) -> Iterable[str]:
        held = getattr(import_module(f"bertvision.{place}"), name)
        return [*before, *(get_args(held) or held)]

    return names


_HEADS = _known("models.zoo", "HEADS")
_tasks_known = _known("pipelines.tasks.registry", "TASKS")


_OFFERED: dict[str, Names] = {
    "checkpoint": _tags,
    "trained_on": _trained_tags,
    "split": _splits,
    "splits": _splits,
    "train_split": _splits,
    "heads": _trained,
    "task": _tasks,
    "pool": _known("pipelines.tasks.registry", "POOLINGS"),
    "decay": _fixed("none", "linear"),
    "variant": _known("pipelines.variants.registry", "VARIANTS"),
}
"""By parameter, in every command."""
_OF_COMMANDS: dict[tuple[str, str], Names] = {
    ("extract", "checkpoint"): _new_tags,
    ("extract", "tokens"): _known("pipelines.tasks.registry", "POOLINGS", "none"),
    ("extract", "windows"): _fixed("cut", "split", "pack"),
    ("train", "heads"): _HEADS,
    **{(name, "distil"): _tags for name in ("train", "sweep")},
    ("sweep", "heads"): _HEADS,
    ("sweep", "trained_on"): _tags,
    ("heads", "name"): _HEADS,
    **{(name, place): _tags for name in ("cka", "cca", "rsa") for place in ("first", "second")},
    **{
        (name, "name"): _named_splits
        for name in (
            *("info", "verify", "repair", "rm", "export_states", "audit", "shuffle_tokens"),
        )
    },
}
"""By command and parameter, before the other."""
