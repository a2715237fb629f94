"""Results of verbs: rows that are a list to Python, a table to the eye and a frame to pandas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    SupportsIndex,
    TypeVar,
    overload,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from bertvision.errors import InputError, did_you_mean
from bertvision.pipelines.plotting.axes import Plotted
from bertvision.pipelines.plotting.charts import Chart
from bertvision.pipelines.text import format_table, html_of
from bertvision.verbs.tables import Values, flat_rows

if TYPE_CHECKING:
    import pandas as pd


class Result(Protocol):
    """What verbs return: its text is the command's table, its JSON what ``--json`` prints."""

    def to_json(self) -> Any:
        """The result as lists, dicts, texts and numbers."""


R = TypeVar("R", bound=Result, covariant=True)


class Row(Mapping[str, Any]):
    """One row of a table: values by name, as attributes and by key; names depend on the task.

    Examples:
        >>> import bertvision
        >>> row = bertvision.results()[0]
        >>> row.name, row["checkpoint"], 0 <= row.f1 <= 100
        ('BERT', '0.5e', True)
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name in Row.__slots__ or name not in self._values:
            held = {} if name in Row.__slots__ else self._values
            hint = did_you_mean(name, held)
            raise AttributeError(f"the row has no {name!r}: {hint}it has {', '.join(held)}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a row is not changed: {name!r} cannot be set")

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._values,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._values)


class Rows(Sequence[R], Plotted, Generic[R]):
    """Several results, in order: a list to Python, a table where it is shown.

    Examples:
        >>> import bertvision
        >>> rows = bertvision.extract("1e", split="dev", pool="max")
        >>> len(rows), rows[0].examples
        (1, 24)
        >>> print(str(rows).splitlines()[0].split("  ")[0])
        split
        >>> list(rows.to_pandas().columns)[:3]
        ['tag', 'split', 'examples']
    """

    def __init__(
        self,
        rows: Iterable[R],
        table: Callable[[Sequence[Values]], str] | None = None,
        charts: Callable[[Sequence[Values]], Mapping[str, Chart]] | None = None,
    ) -> None:
        self._rows, self._table, self._charts = tuple(rows), table or plain_table, charts

    @overload
    def __getitem__(self, index: SupportsIndex) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[R]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> R | Rows[R]:
        if isinstance(index, slice):
            return Rows(self._rows[index], self._table, self._charts)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return self._table(self.to_json())

    def _repr_html_(self) -> str:
        return html_of(self.__repr__)

    def charts(self) -> Mapping[str, Chart]:
        """What `plot` draws, by measure: of scores and probes.

        Raises:
            InputError: the rows are neither.
        """
        if self._charts is None:
            raise InputError(
                "these rows are drawn by nothing of bertvision: `to_pandas()` gives a frame, whose "
                "`plot` draws columns; results, sweep and probe give rows with figures"
            )
        return self._charts(self.to_json())

    def to_json(self) -> list[Any]:
        """The rows as ``--json`` prints them."""
        return [row.to_json() for row in self._rows]

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows as ``--csv`` writes them; names inside of a field follow it with a dot."""
        return flat_rows(self.to_json())

    def to_pandas(self) -> pd.DataFrame:
        """A frame of `to_rows`, with a column for each field."""
        import pandas as pd

        return pd.DataFrame(self.to_rows())


class Shown(ABC):
    """Base of a single result: its text is what the command prints."""

    rows_in: ClassVar[str] = "rows"
    """The field that holds its rows; a result without that field is one row itself."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The fields as ``--json`` prints them."""

    @abstractmethod
    def table(self, values: Values) -> str:
        """The text that the command prints.

        Args:
            values: the fields, as `to_json` gives them.
        """

    def to_rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them; names inside of a field follow it with a dot."""
        values = self.to_json()
        return flat_rows(values.get(self.rows_in, values))

    def to_pandas(self) -> pd.DataFrame:
        """A frame of `to_rows`."""
        import pandas as pd

        return pd.DataFrame(self.to_rows())

    def __repr__(self) -> str:
        return self.table(self.to_json())

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_of(self.__repr__)


class ShownRecord(Shown, BaseModel):
    """A result whose fields are those of ``--json``."""

    model_config = ConfigDict(
        frozen=True, extra="allow", protected_namespaces=(), arbitrary_types_allowed=True
    )

    def to_json(self) -> dict[str, Any]:
        """The fields as ``--json`` prints them."""
        return self.model_dump(mode="json", exclude_unset=True)


def plain_table(rows: Sequence[Values]) -> str:
    """A table of all fields of the first rows, texts shortened; see `_FIRST` and `_WIDEST`."""
    if not rows:
        return "no rows"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_cell(row.get(name)) for name in names] for row in rows[:_FIRST]]
    rest = f"\n… {len(rows):,} rows in all" if len(rows) > _FIRST else ""
    return format_table(names, lines) + rest


_FIRST, _WIDEST = 10, 40


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " | ".join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 2]} …"


def _rows(values: Any) -> Any:
    return values if isinstance(values, Rows) else Rows(map(Row, values))


RowsField = Annotated[
    Rows[Row], BeforeValidator(_rows), PlainSerializer(lambda rows: rows.to_json())
]
"""Rows inside of a result, made of a list of dicts."""
