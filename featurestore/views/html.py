"""Small tables for a notebook: HTML in which every text of the data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_MOST = 50  # rows; a frame shows all of them
_CELL = "text-align:{}; padding:0.1em 0.8em"


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[bool] = (),
) -> str:
    """A table of the first rows.

    Args:
        header: names of the columns, or none.
        rows: cells as text, as many in each row.
        title: above it.
        right: Whether each column stands to the right; all stand to the left by default.
    """
    sides = ["right" if each else "left" for each in right]
    sides += ["left"] * (max(map(len, (header, *rows)), default=0) - len(sides))

    def line(cells: Sequence[str], tag: str) -> str:
        made = (
            f'<{tag} style="{_CELL.format(side)}">{escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=False)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    body = "".join(line(row, "td") for row in rows[:_MOST])
    more = f"<p>… {len(rows):,} rows in all</p>" if len(rows) > _MOST else ""
    above = f"<p><b>{escape(title)}</b></p>" if title else ""
    return f"<div>{above}<table>{head}<tbody>{body}</tbody></table>{more}</div>"


def html_text(text: str) -> str:
    """A text with its line breaks."""
    return f'<p style="white-space:pre-wrap">{escape(text)}</p>'
