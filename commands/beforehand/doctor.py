"""``bertvision doctor``: whether this machine is fit, and what to change."""

from __future__ import annotations

import typer

from bertvision.commands.options import Json, Store, Workspace, show


def doctor(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """Look at this machine, and say what to change; exit with 1 where bertvision cannot be used.

    Versions of the libraries, threads, bfloat16 against float32, GPU, huge pages, locale, and the
    disk of the workspace, on which a file of 48 MiB is written, read and removed.
    """
    from bertvision.verbs.beforehand.doctor import doctor as run

    found = run(workspace=workspace, store=store)
    show(found.to_json() if as_json else found, as_json, str)
    if not found.usable:
        raise typer.Exit(1)
