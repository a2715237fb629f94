"""The page: sections rendered into one HTML file that needs nothing beside itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bertvision.pipelines.drawing.figures import THEME
from bertvision.pipelines.report.section import Section

GENERATOR = "bertvision report"
"""Content of the page's ``meta name="generator"``, which tells a report from any other folder."""


def render(
    *,
    name: str,
    facts: Sequence[tuple[str, Sequence[str]]],
    headline: Sequence[str],
    sections: Sequence[Section],
    newest: str,
) -> str:
    """The HTML of the whole page.

    Args:
        name: of the workspace.
        facts: names and lines of the header.
        headline: sentences.
        sections: in order.
        newest: time of the newest result.
    """
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = in_code
    environment.filters["groupby_order"] = in_groups
    style = THEME.read_text(encoding="utf-8") + (folder / "style.css").read_text(encoding="utf-8")
    return environment.get_template("template.html").render(
        generator=GENERATOR,
        style=Markup(style),  # a file of the package
        name=name,
        facts=facts,
        headline=headline,
        sections=sections,
        newest=newest,
    )


def in_code(text: str) -> Markup:
    """Escaped prose: between backticks ``<code>``, elsewhere printers' apostrophes."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part.replace("'", "’"))
        for i, part in enumerate(parts)
    )


def in_groups(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, list[Any]]]:
    """Rows by the value of a key, in the order in which the values first come."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return list(groups.items())
