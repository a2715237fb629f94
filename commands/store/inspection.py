"""``bertvision store``: look into the activation store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertvision.commands.options import CommandGroup, Json, Store, Workspace, show
from bertvision.errors import (
    BertvisionError,
    CorruptStoreError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    WorkspaceError,
    counted,
)
from bertvision.pipelines.text import format_table, size
from bertvision.verbs.arguments.reading import parse_tag
from bertvision.verbs.tables import Values, mapping_table

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.featurestore.store import ActivationStore

app = typer.Typer(
    cls=CommandGroup,
    help="Look into the activation store, and remove from it.",
    no_args_is_help=True,
)


@app.command("ls")
def store_ls(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """List the snapshots and splits that are stored."""
    opened = _store(workspace, store)
    found = [split.info() for split in opened.stored_splits()]
    show([*found, *_growing(opened)], as_json, splits_table)


@app.command("info")
def store_info(
    name: Annotated[str | None, typer.Argument(help="Split, such as 0.3e/train.")] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Show everything about one split: sizes, encoding, provenance."""
    if name is None:
        opened = _store(workspace, store)
        held = [f"{tag}/{split}" for tag in opened for split in opened[tag]]
        raise InputError(
            f"which split? name one: {', '.join(held)}"
            if held
            else "the store is empty: `bertvision extract` writes to it"
        )
    from bertvision.featurestore.writing.growing import GrowingLedger

    try:
        found = _split(workspace, store, name).info()
    except IncompleteSplitError:
        growing = GrowingLedger(_store(workspace, store).storage, *_parts(name)).info()
        if growing is None:
            raise
        found = growing
    show(found, as_json, mapping_table)


@app.command("verify")
def store_verify(
    name: Annotated[
        str | None, typer.Argument(help="Split, such as 0.3e/train; by default all.")
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Read every committed byte again; exit with 1 where a split is not whole."""
    from bertvision.featurestore.writing.committed import find_growing_damage

    opened = _store(workspace, store)
    names = [name] if name else [f"{tag}/{split}" for tag in opened for split in opened[tag]]
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            found[name] = _split(workspace, store, name).verify()
        except IncompleteSplitError:
            found[name] = find_growing_damage(opened.storage, *_parts(name))
        except (CorruptStoreError, FormatVersionError) as error:
            found[name] = [f"{name}: {error}"]
    rows = [{"split": name, "problems": problems} for name, problems in found.items()]
    show(found, as_json, _verdicts, rows)
    if any(found.values()):
        raise typer.Exit(1)


@app.command("repair")
def store_repair(
    name: Annotated[
        str | None, typer.Argument(help="Split, such as 0.3e/train; by default all.")
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Extract again what is damaged, and only that.

    It needs the snapshot and the data that the activations came from. It exits with 1 where shards
    are missing that were never written, or where one of several splits cannot be repaired.
    """
    from bertvision.featurestore.format.contents import split_names
    from bertvision.pipelines.extraction.repair import Repaired, repair
    from bertvision.verbs.arguments.checks import find_workspace

    try:
        space = find_workspace(workspace, store)
    except WorkspaceError as error:
        if store is None:
            raise
        raise WorkspaceError(
            f"{error}; a split that was imported, or written by a program, cannot be repaired: "
            "remove it with `bertvision store rm`, and import or write it again"
        ) from error
    storage = _store(workspace, store).storage
    wanted = [_parts(name)] if name else split_names(storage)
    done = []
    for tag, split in wanted:
        try:
            done.append(repair(space, tag, split)._asdict())
        except BertvisionError as error:
            if name:
                raise
            reason = f"{tag}/{split} was not repaired: {error}"  # the others are all the same
            done.append(Repaired(f"{tag}/{split}", [], [], reason)._asdict())
    show(done, as_json, repaired_table)
    if any(split["lacking"] for split in done):
        raise typer.Exit(1)


@app.command("rm")
def store_rm(
    name: Annotated[
        str, typer.Argument(help="A split, such as 0.3e/train, or a snapshot: all its splits.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Remove stored hidden states, to free their space; asks first.

    Heads and scores that were made from them stay. `bertvision extract` writes the same hidden
    states again, from the snapshot and the data.
    """
    opened = _store(workspace, store)
    tag, slash, split = name.partition("/")
    tag = parse_tag(tag)
    named = [split] if slash else list(opened[tag])
    if not yes:
        sizes = (f"{tag}/{split}, {size(opened.stored_bytes(tag, split))}" for split in named)
        typer.confirm(f"Remove {'; '.join(sizes)} from {opened.storage}?", abort=True, err=True)
    removed: list[Values] = []
    try:
        for split in named:
            removed.append({"tag": tag, "split": split, "bytes": opened.remove(tag, split)})
    finally:  # what is gone is said even where the next one cannot be removed
        if removed:
            show(removed, as_json, removed_table)


def _store(workspace: Path | None, store: str | None) -> ActivationStore:
    """The store that is named, for which there need be no workspace, or the workspace's."""
    from bertvision.featurestore.store import ActivationStore
    from bertvision.verbs.arguments.checks import find_workspace

    return ActivationStore.open(store or find_workspace(workspace).activations)


def _split(workspace: Path | None, store: str | None, name: str) -> ActivationSplit:
    from bertvision.featurestore.format.names import SnapshotTag

    tag, split = _parts(name)
    return _store(workspace, store)[SnapshotTag(tag)][split]


def _growing(store: ActivationStore) -> list[Values]:
    """What is known of the splits that examples are still added to."""
    from bertvision.featurestore.writing.growing import GrowingLedger

    ledgers = (GrowingLedger(store.storage, tag, split) for tag in store for split in store[tag])
    found = (ledger.info() for ledger in ledgers if ledger.is_growing)
    return [info for info in found if info is not None]


def _parts(name: str) -> tuple[str, str]:
    tag, _, split = name.partition("/")
    if not split:
        raise InputError(f"{name!r}: name a snapshot and a split of it, such as 0.3e/train")
    return parse_tag(tag), split


def _verdicts(found: dict[str, list[str]]) -> str:
    """A line per split that is whole, the problems of the others."""
    if not found:
        return "the store is empty"
    return "\n".join(
        "\n".join(problems) if problems else f"{name}: whole" for name, problems in found.items()
    )


def splits_table(splits: Sequence[Values]) -> str:
    """What a store holds."""
    if not splits:
        return "the store is empty"
    table = format_table(
        ["split", "examples", "encoding", "layers", "size", "complete", "per example", "× smaller"],
        [
            [
                f"{s['tag']}/{s['split']}",
                f"{s['examples']:,}",
                s["encoding"],
                str(len(s["layers"])),
                size(s["bytes"]),
                _completeness(s),
                size(s["bytes_per_example"] or 0),
                f"{s['times_smaller_than_dense_float32'] or 0:.1f}",
            ]
            for s in splits
        ],
    )
    return f"{table}\n\n{size(sum(s['bytes'] for s in splits))} in all"


def _completeness(split: Values) -> str:
    if split.get("growing"):
        return f"still being written, {counted(split['shards_committed'], 'shard')}"
    of = f"{split['shards_committed']} of {counted(split['shards'], 'shard')}"
    return "yes" if split["complete"] else of


def removed_table(splits: Sequence[Values]) -> str:
    """What was removed, and what that freed."""
    lines = [f"removed {s['tag']}/{s['split']}, {size(s['bytes'])}" for s in splits]
    return "\n".join([*lines, f"{size(sum(s['bytes'] for s in splits))} freed"])


def repaired_table(splits: Sequence[Values]) -> str:
    """What a repair found and did."""
    if not splits:
        return "the store is empty"
    return "\n".join(line for s in splits for line in _repaired(s))


def _repaired(split: Values) -> list[str]:
    lines = list(split["damage"])
    if lines:
        shards = counted(len(split["shards"]), "shard")
        lines.append(f"{split['name']}: repaired, {shards} extracted again")
    if split["lacking"]:
        return [*lines, split["lacking"]]
    return lines or [f"{split['name']}: whole"]
