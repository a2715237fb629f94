"""Text for people: tables in columns and as CSV, sizes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

# with its unit; a snapshot tag (0.3e) is none
_NUMBER = re.compile(r"[-−+]?\d[\d,]*(\.\d+)?(e[-+]\d+)?(%| [kMGTP]?B)?|nan")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; text to the left, numbers to the right.

    Args:
        header: names of the columns.
        rows: cells as text, as many in each row as in the header.
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    numeric = [_are_numbers([row[i] for row in rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


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
        cells = [row.get(key) for key in keys]
        writer.writerow([" ".join(map(str, x)) if isinstance(x, list) else x for x in cells])
    return file.getvalue()


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


def _are_numbers(cells: Sequence[str]) -> bool:
    found = [cell for cell in cells if cell not in ("", "-", "–")]
    return bool(found) and all(map(_NUMBER.fullmatch, found))
