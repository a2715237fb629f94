"""``bertvision store``: look into the activation store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertvision.commands.options import Json, Workspace, find_workspace, show

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.featurestore.store import ActivationStore

app = typer.Typer(help="Look into the activation store.", no_args_is_help=True)


@app.command("ls")
def store_ls(workspace: Workspace = None, as_json: Json = False) -> None:
    """The snapshots and splits that are stored."""
    from bertvision.pipelines.tables import splits_table

    show([split.info() for split in _store(workspace).splits()], as_json, splits_table)


@app.command("info")
def store_info(
    name: Annotated[str, typer.Argument(help="Such as 0.3e/train.")],
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Everything about one split: sizes, encoding, provenance."""
    from bertvision.pipelines.tables import mapping_table

    show(_split(workspace, name).info(), as_json, mapping_table)


@app.command("verify")
def store_verify(
    name: Annotated[str | None, typer.Argument(help="Such as 0.3e/train; by default all.")] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Read every committed byte again; exits with 1 where something is damaged."""
    splits = [_split(workspace, name)] if name else _store(workspace).splits()
    found = {split.name: split.verify() for split in splits}
    if as_json:
        show(found, True, str)
    else:
        for split, problems in found.items():
            typer.echo("\n".join(problems) if problems else f"{split}: whole")
    if any(found.values()):
        raise typer.Exit(1)


def _store(workspace: Path | None) -> ActivationStore:
    from bertvision.featurestore.store import ActivationStore

    return ActivationStore.open(find_workspace(workspace).activations)


def _split(workspace: Path | None, name: str) -> ActivationSplit:
    tag, _, split = name.partition("/")
    return _store(workspace)[tag][split]
