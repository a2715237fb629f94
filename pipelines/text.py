"""Text for people: tables in columns and as CSV, sizes."""

from __future__ import annotations

import csv
import io
import re
import secrets
import shutil
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from bertvision.featurestore.views.html import html_table, html_text

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# controls but for tab and line feed, and what turns the direction of writing
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# with its unit; a snapshot tag (0.3e) is none
_NUMBER = re.compile(r"[-−+]?\d[\d,]*(\.\d+)?(e[-+]\d+)?(%| [kMGTP]?B)?|nan")


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, stacked: bool = False
) -> str:
    """Columns as wide as their widest cell; text to the left, numbers to the right.

    A file or a pipe gets all columns. On a terminal those that do not fit are left out, which the
    last line says: the columns that matter most come first.

    Args:
        header: names of the columns.
        rows: cells as text, as many in each row as in the header.
        stacked: columns that do not fit follow below, beside the first column again.
    """
    if (tables := _TABLES.get()) is not None:
        tables.append((header, rows))
        return tables.place(len(tables) - 1)
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    numeric = [_are_numbers([row[i] for row in rows]) for i in range(len(header))]
    fitting = _fitting(widths, terminal_width())
    shown = fitting if stacked else fitting[:1]
    text = "\n\n".join(
        "\n".join(
            "  ".join(
                line[i].rjust(widths[i]) if numeric[i] else line[i].ljust(widths[i])
                for i in columns
            ).rstrip()
            for line in lines
        )
        for columns in shown
    )
    left_out = ", ".join(header[i] for columns in fitting[len(shown) :] for i in columns[1:])
    note = f"(not shown: {left_out}; a wider terminal, a pipe and --json show all)"
    return f"{text}\n{fill(note)}" if left_out else text


def html_of(text: Callable[[], str]) -> str:
    """HTML of a text for the terminal: its tables as tables, the rest as text.

    Args:
        text: makes it, by `format_table` where there are tables.
    """
    tables = _Tables()
    token = _TABLES.set(tables)
    try:
        parts = re.split(tables.place(r"(\d+)"), text())
    finally:
        _TABLES.reset(token)
    made = []
    for i, part in enumerate(parts):
        if i % 2:
            header, rows = tables[int(part)]
            right = [_are_numbers(column) for column in zip(*rows, strict=True)]
            made.append(html_table(header, rows, right=right))
        elif part.strip():
            made.append(html_text(part.strip("\n")))
    return "".join(made)


class Displayed(ABC):
    """Base of results that are a text to the eye, and rows to CSV and pandas."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them."""

    def to_pandas(self) -> pd.DataFrame:
        """A frame of the rows that ``--csv`` writes."""
        import pandas as pd

        return pd.DataFrame(self.to_rows())

    def _repr_html_(self) -> str:
        return html_of(self.__repr__)


class _Tables(list[tuple[Sequence[str], Sequence[Sequence[str]]]]):
    """Tables that `html_of` collects, and marks of their places that no data could guess."""

    def __init__(self) -> None:
        super().__init__()
        self._secret = secrets.token_hex(8)

    def place(self, number: int | str) -> str:
        return f"{self._secret}-{number};"


_TABLES: ContextVar[_Tables | None] = ContextVar("tables", default=None)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, 80 at least; None of a file or a pipe."""
    return max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def fill(text: str, indent: int = 0) -> str:
    """A sentence in lines that fit the terminal; one line for a file or a pipe.

    Args:
        text: the sentence.
        indent: columns by which all lines but the first are moved.
    """
    if (width := terminal_width()) is None:
        return text
    return textwrap.fill(
        text, width, break_on_hyphens=False, break_long_words=False, subsequent_indent=" " * indent
    )


def shorten(text: str, used: int) -> str:
    """A long value without its middle, where it does not fit the terminal; else as it is.

    Args:
        text: a path or a digest, which both ends tell.
        used: columns of the line that are used by others.
    """
    if (width := terminal_width()) is None or len(text) <= (room := width - used):
        return text
    return f"{text[: room // 2 - 1]}…{text[-(room - room // 2) :]}"


def _fitting(widths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Columns in groups that fit, each led by the first column and one more at least."""
    groups, used = [[0]], widths[0]
    for i, width in enumerate(widths[1:], 1):
        if limit is not None and used + 2 + width > limit and len(groups[-1]) > 1:
            groups.append([0])
            used = widths[0]
        groups[-1].append(i)
        used += 2 + width
    return groups


def flat_rows(values: Any) -> list[dict[str, Any]]:
    """Rows of a table out of JSON: names inside of a field follow it with a dot.

    Args:
        values: a mapping, which is one row, or a list of them.
    """
    several = values if isinstance(values, list) else [values]
    return [dict(_flat("", row)) for row in several]


def _flat(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        pairs += _flat(f"{name}.", value) if isinstance(value, Mapping) else [(name, value)]
    return pairs


def csv_text(rows: Sequence[Mapping[str, Any]], keys: Sequence[str] | None = None) -> str:
    """Comma-separated values with a header, numbers in full precision; no value is an empty cell.

    Args:
        rows: values by key; the values of a list stand between spaces.
        keys: the columns; None is every key of a row, in the order in which they come.
    """
    keys = keys or list(dict.fromkeys(key for row in rows for key in row))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        writer.writerow([_cell(row.get(key)) for key in keys])
    return file.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(str(_cell(part)) for part in value)
    if isinstance(value, str) and value.startswith(_FORMULA) and not _are_numbers([value]):
        return f"'{value}"  # or a spreadsheet would run what a text of the data says
    return value


def printable(text: str) -> str:
    r"""A text in which no character steers the terminal: each such one as its escape ``\x1b``.

    Texts of the data come into messages and tables; an escape sequence in them could rename the
    window, move the cursor over other lines or write to the clipboard.
    """
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def size(n: float) -> str:
    """Bytes in decimal units, three digits: ``52.1 MB``."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while n >= 1000 and len(units) > 1:
        n /= 1000
        units.pop(0)
    return f"{n:.3g} {units[0]}"


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign, a true minus: ``+1.2``, ``−0.3``."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A number for people; a dash for None."""
    return "-" if value is None else form.format(value)


def _are_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "-", "–")]
    return bool(filled) and all(map(_NUMBER.fullmatch, filled))
