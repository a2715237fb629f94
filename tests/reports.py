"""A workspace with all that a report shows, from real small trainings; a page, taken apart."""

from __future__ import annotations

import csv
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ("learned-pooling", "adapter-64-shared")


def make_lab(workspace: Workspace, folder: Path) -> Workspace:
    """A copy of a workspace with 0.5e and 1e, with all that the laboratory makes.

    Two heads with two seeds and two parts of the data on both snapshots, a control on none of
    them, an ensemble with BERT, and two error analyses.
    """
    from bertvision.pipelines.results.ensemble import ensemble
    from bertvision.pipelines.results.error_analysis import errors
    from bertvision.pipelines.results.sweep import sweep
    from bertvision.pipelines.workspace.job_options import TrainOptions
    from bertvision.pipelines.workspace.workspace import Workspace

    shutil.copytree(
        workspace.root, folder, ignore=shutil.ignore_patterns("heads", "report", "analysis")
    )
    space = Workspace.find(folder)
    options = TrainOptions(precision="32")
    sweep(space, HEADS, fractions=(0.5, 1.0), seeds=(0, 1), options=options)
    ensemble(space, ["adapter-64-shared"], with_bert=True, trained_on="1e", tag="1e", combine="max")
    errors(space, "adapter-64-shared:1e", examples=2)
    errors(space, "learned-pooling:1e", examples=2)
    return space


class Page(HTMLParser):
    """Tags with their attributes, and the cells of each table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table: list[list[str]] | None = None
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "table":
            self._table = self.tables.setdefault(str(values["aria-labelledby"])[6:], [])
        if tag == "tr" and self._table is not None:
            self._table.append([])
        if tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell and self._table is not None:
            self._table[-1][-1] += data.strip()


def read_table(page: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table beside a page, from its CSV."""
    path = page.parent / "tables" / f"{name}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
