"""Columns of tables: how the values of a row are written for people; and rows in groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from bertvision.pipelines.text import format_table, signed, size

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

MARK = " *"
"""Stands behind the name of a system whose no-answer threshold was not tuned."""
FOOTNOTE = (
    "* The no-answer threshold was not tuned, it is 0: such scores cannot be compared with those "
    "of systems without the mark."
)
"""Footnote of `MARK`, in the same words under every table."""

ORACLE_NOTE = (
    "Without oracle F1 are scores of an earlier version, which did not look for it: `bertvision "
    "evaluate` scores a head again; of BERT delete its metrics.json first, then `bertvision "
    "finetune --resume`."
)
"""Footnote on a missing oracle F1, where other systems have it."""

Kind = Literal["text", "code", "count", "number", "signed", "size", "share"]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    """Key of the value in a row, and the header in CSV and JSON."""
    label: str
    """Header in the page."""
    kind: Kind = "number"
    """How values are written."""
    digits: int = 1
    """Decimals of numbers."""
    sd: bool = False
    """Whether ``<key>_sd`` holds a standard deviation over seeds, and ``<key>_low`` and
    ``<key>_high`` a 95 % interval."""
    interval: bool = False
    """Whether the interval is shown too."""
    gain: bool = False
    """Whether ``<key>_difference`` stands behind it in brackets."""
    form: str = ""
    """Format of numbers that need another than their kind has, such as ``{:.4g}``."""

    @property
    def is_number(self) -> bool:
        """Whether cells are aligned as numbers."""
        return self.kind not in ("text", "code")

    def text(self, row: Mapping[str, Any]) -> str:
        """The cell as people read it; a dash where there is no value, a text as it is."""
        value = row.get(self.key)
        if value is None:
            return "–"
        if isinstance(value, str) or not self.is_number:
            return str(value)
        if self.form:
            return self.form.format(value)
        match self.kind:
            case "count":
                return f"{value:,}"
            case "size":
                return size(value)
            case "share":
                return f"{100 * value:.0f}%"
        if self.kind == "signed":
            return signed(value, self.digits) + self._ends(row)
        sd = row.get(f"{self.key}_sd") if self.sd else None
        written = f"{value:,.{self.digits}f}" + ("" if sd is None else f" ± {sd:.{self.digits}f}")
        if self.gain and (gain := row.get(f"{self.key}_difference")) is not None:
            written += f" ({signed(gain, self.digits)})"
        return (written + self._ends(row)).replace("-", "−")

    def _ends(self, row: Mapping[str, Any]) -> str:
        """The interval in brackets, where it is shown and known."""
        low, high = (row.get(f"{self.key}_{end}") for end in ("low", "high"))
        if not self.interval or low is None or high is None:
            return ""
        if self.kind == "signed":
            return f" ({signed(low, self.digits)} to {signed(high, self.digits)})"
        return f" ({low:.{self.digits}f}{'–' if low >= 0 else ' to '}{high:.{self.digits}f})"


def columns(kind: Kind = "number", /, **labels: str) -> list[Column]:
    """Columns of one kind.

    Args:
        kind: Kind of the values.
        **labels: Headers by the keys of the values.
    """
    return [Column(key, label, kind) for key, label in labels.items()]


def table_of(
    shown: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, stacked: bool = False
) -> str:
    """Rows as a table for a terminal, see `format_table`.

    Args:
        shown: Columns in order.
        rows: Values by the keys of the columns.
        stacked: Whether columns that do not fit follow below.
    """
    lines = [[column.text(row) for column in shown] for row in rows]
    return format_table([column.label for column in shown], lines, stacked=stacked)


def markdown_of(shown: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown.

    Args:
        shown: Columns in order.
        rows: Values by the keys of the columns.
    """
    lines = [[column.label for column in shown]]
    lines.append(["---:" if column.is_number else "---" for column in shown])
    lines += [[column.text(row).replace("|", "\\|") for column in shown] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"−": "$-$", "±": r"$\pm$", "×": r"$\times$", "–": "--", "…": r"\dots{}"},
    }
)


def latex_of(shown: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a LaTeX tabular, with the rules of booktabs.

    Args:
        shown: Columns in order.
        rows: Values by the keys of the columns.
    """

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" + "\n"

    aligned = "".join("r" if column.is_number else "l" for column in shown)
    body = "".join(line(column.text(row) for column in shown) for row in rows)
    head = line(column.label for column in shown)
    return (
        f"\\begin{{tabular}}{{{aligned}}}\n\\toprule\n{head}\\midrule\n{body}"
        "\\bottomrule\n\\end{tabular}\n"
    )


def footnotes(shown: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Meanings of the mark behind a name and of a missing score, where a table has any.

    Args:
        shown: Columns of the table.
        rows: Values by the keys of the columns.
    """
    cells = (row.get(column.key) for row in rows for column in shown)
    notes = [FOOTNOTE] if any(str(cell).endswith(MARK) for cell in cells) else []
    has_oracle = any(column.key == "best_f1" for column in shown)
    return [*notes, ORACLE_NOTE] if has_oracle and lack_oracle(rows) else notes


def lack_oracle(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some of the systems that answer by a threshold have an oracle F1, and others none.

    Args:
        rows: metrics of systems by name, among other things.
    """
    has = {row.get("best_f1") is not None for row in rows if row.get("balanced") is not None}
    return has == {True, False}


def marked(name: str, row: Mapping[str, Any]) -> str:
    """A system's name, with `MARK` where its threshold was not tuned.

    Args:
        name: Name as it is shown.
        row: Row with ``threshold_tuned_on`` where the system has a threshold that can be tuned.
    """
    return name + MARK if row.get("threshold_tuned_on", "") is None else name


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows by a key, groups in the order in which their first rows come."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
