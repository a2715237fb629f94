"""The folder of a report: one HTML file that needs nothing beside itself, tables and figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bertvision.errors import InputError, counted
from bertvision.pipelines.files import new_folder
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.text import fill, size

GENERATOR = "bertvision report"
"""Content of the page's ``meta name="generator"``, which tells a report from any other folder."""
PAGE, TABLES, FIGURES = "index.html", "tables", "figures"
_LEFT_OUT = (
    "These files are not as they were written, or of other weights than there are now. What "
    "follows from them is not in this report."
)
_KINDS = {TABLES: (".csv", ".json"), FIGURES: (".svg",)}


class Report(NamedTuple):
    """A report that was written."""

    page: Path
    """The HTML file."""
    tables: list[str]
    """Names of the tables; each is there as CSV and JSON."""
    figures: list[str]
    """Names of the figures; each is also there as SVG."""
    bytes: int
    """Size of the page."""
    results: int
    """Results that it shows."""
    missing: list[str]
    """Titles of the sections whose data are not in the workspace."""
    left_out: list[str]
    """A message for each file that is left out: whether it is damaged or of other weights than now,
    and the command that makes it again."""

    def to_json(self) -> dict[str, Any]:
        """Values by name, the page as text."""
        return {**self._asdict(), "page": str(self.page)}

    def __repr__(self) -> str:
        lines = [
            f"page    {self.page} ({size(self.bytes)}, {self.results} results)",
            fill(f"tables  {', '.join(self.tables)}", 8),
            fill(f"figures {', '.join(self.figures)}", 8),
        ]
        if self.missing:
            missing = ", ".join(self.missing)
            lines.append(fill(f"no data for: {missing}; the page says what makes them"))
        lines += [fill(f"left out: {message}", 10) for message in self.left_out]
        return "\n".join(lines)


@dataclass(frozen=True)
class Page:
    """The contents of a page."""

    name: str
    """Name of the workspace, or of the methods."""
    subject: str
    """Subject that it shows of these."""
    heading: str
    """Heading of the facts."""
    facts: Sequence[tuple[str, Sequence[str]]]
    """Names and lines of the header."""
    headline: Sequence[str]
    """Sentences."""
    sections: Sequence[Section]
    files: Sequence[Path]
    """Files of the scores that it shows; the newest tells its time."""
    results: int
    """Number of results."""
    left_out: list[str]
    """See `Report`."""


def write_page(target: Path, page: Page) -> Report:
    """Write the folder of a report, whole or not at all.

    Args:
        target: Folder, which `check_place` passed.
        page: Contents of the page.
    """
    if page.left_out:
        last = Section("left-out", "Left out", _LEFT_OUT, notes=page.left_out)
        count = counted(len(page.left_out), "file") + (" is" if len(page.left_out) == 1 else " are")
        first = f"{count} left out of all that follows; the last section says why."
        page = replace(page, headline=[first, *page.headline], sections=[*page.sections, last])
    text = render(page).encode("utf-8")
    figures = [figure for section in page.sections for figure in section.figures]
    tables = [table for section in page.sections for table in section.tables]
    with new_folder(target) as folder:
        (folder / TABLES).mkdir()
        for table in tables:
            (folder / TABLES / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
            (folder / TABLES / f"{table.name}.json").write_text(table.json(), encoding="utf-8")
        (folder / FIGURES).mkdir()
        for figure in figures:
            (folder / FIGURES / f"{figure.ident}.svg").write_text(figure.file, encoding="utf-8")
        (folder / PAGE).write_bytes(text)
    return Report(
        page=target / PAGE,
        tables=[table.name for table in tables],
        figures=[figure.ident for figure in figures],
        bytes=len(text),
        results=page.results,
        missing=[section.title for section in page.sections if section.missing],
        left_out=page.left_out,
    )


def check_place(target: Path) -> None:
    """Refuse to replace anything but a report.

    Raises:
        InputError: ``target`` is a file, or a folder that holds something else.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"--out {target} is a file: give a folder, new or of an older report")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    foreign = [name for name in names if name not in (PAGE, *_KINDS)]
    for name, kinds in _KINDS.items():
        if (target / name).is_dir():
            inside = sorted(path.name for path in (target / name).iterdir())
            foreign += [f"{name}/{n}" for n in inside if not n.endswith(kinds)]
    if not foreign and not is_page(target / PAGE, GENERATOR):
        foreign = [PAGE]
    if foreign:
        raise InputError(
            f"--out {target} is a folder that holds {foreign[0]}, which is no part of a report: "
            "give a new folder, or one of an older report"
        )


def is_page(path: Path, generator: str) -> bool:
    """Whether a file is a page that a command wrote.

    Args:
        path: The file.
        generator: Content of the page's ``meta name="generator"``.
    """
    try:
        mark = f'<meta name="generator" content="{generator}">'
        return mark in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _newest(files: Sequence[Path]) -> str:
    """When the newest result was written, the only time that the report knows."""
    seconds = max(path.stat().st_mtime for path in files)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def render(page: Page) -> str:
    """The HTML of a whole page."""
    environment = page_environment(Path(__file__).parent)
    environment.filters["groupby_order"] = in_groups
    environment.filters["drawing"] = lambda panel: Markup(panel.svg)  # whose texts are escaped
    return environment.get_template("template.html").render(
        generator=GENERATOR,
        style=page_style(),
        newest=_newest(page.files),
        **vars(page),
    )


def page_environment(folder: Path) -> Environment:
    """The environment of a page's templates, which escapes every text.

    Args:
        folder: Folder of the templates.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = in_code
    return environment


def page_style() -> Markup:
    """The style sheet of pages, a file of the package."""
    return Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))


def in_code(text: str) -> Markup:
    """Escaped prose: between backticks ``<code>``, elsewhere printers' apostrophes."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part.replace("'", "’"))
        for i, part in enumerate(parts)
    )


def in_groups(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, list[Any]]]:
    """Rows by the value of a key, in the order in which the values first come."""
    return list(grouped(rows, itemgetter(key)).items())
