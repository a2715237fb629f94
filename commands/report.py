"""``bertvision report``: the results of a workspace as one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bertvision.commands.options import Json, Store, Workspace, find_workspace, show


def report(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default report/ in the workspace."),
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Every result as one HTML file without network; its tables and figures as files.

    An older report at the same place is replaced; a folder with anything else is left alone.
    """
    from bertvision.pipelines.report.build import write_report

    written = write_report(find_workspace(workspace, store), out)
    show({**written._asdict(), "page": str(written.page)}, as_json, _summary)


def _summary(written: Mapping[str, Any]) -> str:
    from bertvision.pipelines.text import size

    lines = [
        f"page    {written['page']} ({size(written['bytes'])}, {written['results']} results)",
        f"tables  {', '.join(written['tables'])}",
        f"figures {', '.join(written['figures'])}",
    ]
    if written["missing"]:
        lines.append(f"no data for: {', '.join(written['missing'])}; the page says what makes them")
    return "\n".join(lines)
